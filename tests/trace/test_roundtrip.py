"""What is written is read back, bit for bit, whatever holds it."""

import math

import numpy as np
import pytest
from helpers_trace import (
    SHAPES,
    STEPS,
    SUFFIXES,
    check_gradients,
    gradient,
    loss,
    opened,
    present,
    write_arrays,
)

from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch
from gtrace.trace import StreamKey, Trace, create_trace, open_trace
from gtrace.trace import format as layout

BACKENDS = (*SUFFIXES, ".hdf5", "memory")


@pytest.mark.parametrize("backend", BACKENDS)
def test_everything_comes_back(backend, tmp_path):
    with opened(backend, tmp_path) as trace:
        assert [info.name for info in trace.tensors] == ["fc.bias", "fc.weight", "embed/weight", "scale"]
        check_gradients(trace, STEPS)
        values = trace.read("fc.weight", 4)
        assert (values.dtype, values.flags.c_contiguous, values.flags.owndata) == (np.float32, True, True)
        values[:] = 0
        np.testing.assert_array_equal(trace.read("fc.weight", 4), gradient("fc.weight", 4).ravel())
        info = trace.tensors[1]
        assert (info.shape, info.dtype, info.size) == ((7, 31), "float32", 217)
        scalars = trace.scalars()
        assert set(scalars) == {"step", *layout.SCALARS}
        wanted = [(step, loss(step), 0.1) for step in STEPS]
        assert [*zip(*(scalars[name].tolist() for name in ("step", "loss", "lr")), strict=True)] == wanted
        assert np.isnan(scalars["clip_norm"]).all()
        assert (np.diff(scalars["time"]) >= 0).all()
        for name in SHAPES:
            stored = trace.statistics(name)
            assert stored["step"].tolist() == present(name)
            assert stored["step"].dtype == np.int64
            for k, step in enumerate(present(name)):
                values = gradient(name, step).ravel().astype(np.float64)
                assert math.isclose(stored["norm2"][k], values @ values, rel_tol=1e-12)
                assert stored["absmax"][k] == np.abs(values).max()
                assert (stored["zeros"][k], stored["nonfinite"][k]) == (0, 0)
        found = trace.sketch("fc.weight", 4, "linf", 64)
    expected = MomentSketch.of(gradient("fc.weight", 4).ravel(), norm="linf", bucket_size=64)
    assert found.expected_error(np.array([0.0, 0.25, 1.0])) == expected.expected_error(np.array([0.0, 0.25, 1.0]))


def test_fingerprint_depends_on_the_gradients_alone(tmp_path):
    prints = set()
    for backend in BACKENDS:
        with opened(backend, tmp_path) as trace:
            prints.add(trace.fingerprint)
    assert len(prints) == 1
    with opened("memory", tmp_path, STEPS[:-1]) as fewer:
        prints.add(fewer.fingerprint)
    one = gradient("fc.bias", 0)
    for tensors in ({"a": one}, {"b": one}, {"a": one[::-1]}, {"a": {1: one}}, {"a": one.reshape(1, 7)}):
        prints.add(Trace.from_arrays(tensors).fingerprint)
    assert len(prints) == 7


def test_attributes_come_back(path, tmp_path):
    attrs = {"argv": ["train.py", "--x"], "seed": 7, "rate": 0.5, "big": 2**80, "text": "é\0\x1b", "empty": ""}
    attrs |= {"flag": True, "nothing": None, "versions": {"torch": "2.13"}, "numbers": np.arange(3), "folder": tmp_path}
    with create_trace(path, attrs=attrs) as writer:
        writer.append(0, "w", np.ones(3), aliases=("v", "u"), module_type="Linear", stage="reduced", note={"a": [1]})
        writer.set_attrs(seed=8, dropped={"steps": 2})
    with open_trace(path) as trace:
        told = {**attrs, "numbers": [0, 1, 2], "folder": str(tmp_path), "seed": 8, "dropped": {"steps": 2}}
        assert {key: trace.attrs[key] for key in told} == told
        assert (trace.attrs["format"], trace.attrs["version"]) == ("gtrace", 1)
        (info,) = trace.tensors
    assert (info.aliases, info.module_type, info.stage) == (("v", "u"), "Linear", "reduced")
    assert (info.attrs, info.dtype) == ({"note": {"a": [1]}}, "float64")


def test_several_optimizers_kinds_and_ranks(path):
    with create_trace(path) as writer:
        for step in range(4):
            writer.append(step, "w", [step, 0.0])
            writer.append(step, "w", [step, 0.5], kind="neural", extra=1)
            if step % 2:
                writer.append(10 * step, "w", [step, 1.0], optimizer=1)
                writer.append(10 * step, "only", [step], optimizer=1)
                writer.commit(10 * step, optimizer=1, lr=0.2)
            writer.append(step, "w", [step, 2.0], rank=3)
            writer.commit(step, loss=float(step))
    with open_trace(path) as trace:
        places = [(0, "weight", 0), (0, "weight", 1), (0, "neural", 0), (3, "weight", 0)]
        assert trace.streams == tuple(StreamKey(*place) for place in places)
        assert [info.name for info in trace.tensors] == ["w", "opt1/w", "only", "w", "w"]
        assert trace.read("w", 2).tolist() == [2, 0]
        assert trace.read("w", 2, kind="neural").tolist() == [2, 0.5]
        assert trace.read("w", 30, optimizer=1).tolist() == trace.read("opt1/w", 30).tolist() == [3, 1]
        assert trace.read("w", 2, rank=3).tolist() == [2, 2]
        assert trace.steps("w", optimizer=1).tolist() == [10, 30]
        # A name that only one place has needs no keyword.
        assert trace.read("only", 10).tolist() == [1]
        assert trace.scalars(optimizer=1)["lr"].tolist() == [0.2, 0.2]
        assert trace.scalars()["loss"].tolist() == [0, 1, 2, 3]
        with pytest.raises(UsageError, match="holds no rank 1; it holds weight gradients of optimizer 0 on rank 0"):
            trace.read("w", 0, rank=1)


def test_many_steps_and_tensors_outgrow_the_first_shapes(path, monkeypatch):
    """More steps than the arrays have rows at first, more late tensors than the tables have columns at first."""
    monkeypatch.setattr("gtrace.trace.zarr._FIRST_ROWS", 32)
    monkeypatch.setattr(layout, "STEP_ROWS", 64)
    with create_trace(path) as writer:
        for step in range(200):
            writer.append(step, "a", [step, 1])
            for k in range(step - 70 if step < 100 else 0):
                writer.append(step, f"late{k}", [step + k])
            writer.commit(step)
    with open_trace(path) as trace:
        assert trace.steps("a").size == 200
        for step in (0, 1, 31, 32, 63, 64, 127, 128, 199):
            assert trace.read("a", step).tolist() == [step, 1]
        assert len(trace.tensors) == 30
        assert trace.steps("late0").tolist() == list(range(71, 100))
        assert trace.read("late20", 95).tolist() == [115]


def test_a_row_longer_than_a_chunk(path, monkeypatch):
    monkeypatch.setattr(layout, "_ELEMENTS", 100_000)
    arrays = [gradient("w", step, 300_001) for step in range(3)]
    write_arrays(path, {"w": dict(enumerate(arrays))})
    if path.suffix == ".zarr":
        found = sorted(p.name for p in (path / "rank00000" / "weight_grad" / "w").iterdir())
        assert found == [*(f"c.{r}.{p}" for r in range(3) for p in range(4)), "zarr.json"]
    with open_trace(path) as trace:
        for step, array in enumerate(arrays):
            np.testing.assert_array_equal(trace.read("w", step), array)


ARRAYS = [
    np.float16([1.5, -2, 65504]),
    np.array([1e300, 1.0]),
    np.array([2**40, -1]),
    np.array([True, False]),
    np.arange(12, dtype=np.float32).reshape(3, 4).T,
    np.arange(3, dtype=">f4"),
    [[1, 2], [3, 4]],
    np.zeros((0, 4), np.float32),
]


@pytest.mark.filterwarnings("ignore:overflow")
def test_any_real_array_is_taken(path):
    write_arrays(path, {f"w{k}": {0: array, 1: array} for k, array in enumerate(ARRAYS)})
    with open_trace(path) as trace:
        for info, array in zip(trace.tensors, ARRAYS, strict=True):
            for step in range(2):
                np.testing.assert_array_equal(trace.read(info.name, step), np.asarray(array, np.float32).ravel())
            assert info.shape == np.shape(array)
        assert trace.statistics("w1")["nonfinite"].tolist() == [1, 1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_bit_of_odd_values_is_kept(backend, tmp_path):
    odd = np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1e-45, 3.4028235e38, 1.0], np.float32)
    odd = np.append(odd, np.array([0x7FC12345, 0xFFC00001, 0x7F800001], np.uint32).view(np.float32))
    if backend == "memory":
        trace = Trace.from_arrays({"w": odd})
    else:
        trace = open_trace(write_arrays(tmp_path / f"run{backend}", {"w": odd}))
    with trace:
        np.testing.assert_array_equal(trace.read("w", 0).view(np.uint32), odd.view(np.uint32))
        numbers = trace.statistics("w")
    assert (numbers["zeros"][0], numbers["nonfinite"][0]) == (2, 6)
    assert numbers["absmax"][0] == np.float32(3.4028235e38)
    assert math.isclose(numbers["norm2"][0], float(np.float32(3.4028235e38)) ** 2)


def test_an_empty_trace(path):
    create_trace(path).close()
    with open_trace(path) as trace:
        assert (trace.tensors, trace.scalars()["step"].size, trace.status) == ((), 0, "complete")
        assert trace.fingerprint
        with pytest.raises(UsageError, match="it holds no step"):
            trace.read("w", 0)
