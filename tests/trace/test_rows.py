"""Gradients of activations: another number of elements at each step, padded on disk and nowhere else."""

import math
import shutil

import h5py
import numpy as np
import pytest
from helpers_trace import SUFFIXES, gradient, write_arrays

from gtrace.errors import TraceError
from gtrace.trace import Trace, create_trace, open_trace
from gtrace.trace import format as layout
from gtrace.trace.rows import SAMPLE, checksum, sample_indices

BACKENDS = (*SUFFIXES, "memory")
GROUP = "rank00000/neural_grad"
#: name -> step -> elements; the width is what the first one asks for
SIZES = {
    "conv1": {0: 64, 1: 64, 2: 17, 4: 80},
    "fc#1": {0: 8, 2: 0, 4: 10},
    "wide": {0: 70_000, 1: 30_000, 2: 87_500},
    "late": {4: 5},
}
STEPS = (0, 1, 2, 4)


def ragged(name, step):
    return gradient(name, step, SIZES[name][step])


def write(path):
    with create_trace(path) as writer:
        for step in STEPS:
            writer.append(step, "w", [float(step)])
            for name, sizes in SIZES.items():
                if step in sizes:
                    writer.append(step, name, ragged(name, step), kind="neural")
            writer.commit(step, loss=0.5)
    return path


def opened(backend, folder):
    if backend == "memory":
        return Trace.from_arrays({n: {s: ragged(n, s) for s in sizes} for n, sizes in SIZES.items()}, kind="neural")
    return open_trace(write(folder / f"run{backend}"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_exactly_the_valid_elements_come_back(backend, tmp_path):
    with opened(backend, tmp_path) as trace:
        infos = {info.name: info for info in trace.tensors if info.kind == "neural"}
        assert {name: info.size for name, info in infos.items()} == {"conv1": 80, "fc#1": 10, "wide": 87_500, "late": 6}
        for name, sizes in SIZES.items():
            assert trace.steps(name, kind="neural").tolist() == list(sizes)
            numbers = trace.statistics(name)
            assert numbers["n_valid"].tolist() == numbers["n_total"].tolist() == list(sizes.values())
            for k, step in enumerate(sizes):
                values = ragged(name, step)
                np.testing.assert_array_equal(trace.read(name, step), values)
                assert math.isclose(numbers["norm2"][k], values.astype(np.float64) @ values, rel_tol=1e-6)
                assert numbers["absmax"][k] == np.abs(values).max(initial=0)
                assert (numbers["zeros"][k], numbers["nonfinite"][k]) == (0, 0)
                assert numbers["crc32c"][k] == checksum(values)
        assert (infos["conv1"].shape, infos["conv1"].sample) == ((64,), SAMPLE)


def test_a_larger_gradient_is_cut_to_a_sample(path):
    arrays = [gradient("x", step, size) for step, size in enumerate((40, 1000, 1000, 30))]
    with create_trace(path) as writer:
        for step, array in enumerate(arrays):
            writer.append(step, "x", array, kind="neural", capacity=64)
            writer.append(step, "given", array[:16], kind="neural", n_total=array.size, shape=array.shape, capacity=16)
    with open_trace(path) as trace:
        for name, stored in (("x", [40, 64, 64, 30]), ("given", [16] * 4)):
            numbers = trace.statistics(name)
            assert (numbers["n_valid"].tolist(), numbers["n_total"].tolist()) == (stored, [40, 1000, 1000, 30])
        for step in (1, 2):
            np.testing.assert_array_equal(trace.read("x", step), arrays[step][sample_indices(1000, 64)])


@pytest.mark.parametrize(("total", "count"), [(10, 10), (1000, 64), (2**33 + 7, 5000), (7, 1), (5, 0)])
def test_a_sample_takes_one_element_of_each_stretch(total, count):
    indices = sample_indices(total, count)
    assert indices.shape == (count,)
    assert all(i * total // count <= index < (i + 1) * total // count for i, index in enumerate(indices.tolist()))
    np.testing.assert_array_equal(indices, sample_indices.__wrapped__(total, count))


@pytest.mark.parametrize(
    ("table", "value", "words"),
    [
        ("n_valid", -1, "step 2: -1 valid elements of 17 in a row of 80"),
        ("n_valid", 81, "step 2: 81 valid elements"),
        ("n_valid", 2**62, "valid elements of 17 in a row of 80"),
        ("n_valid", 18, "18 valid elements of 17"),
        ("n_valid", 16, "checksum mismatch"),
        ("n_total", -5, "17 valid elements of -5"),
    ],
)
def test_forged_lengths_are_refused(table, value, words, tmp_path):
    path = write(tmp_path / "run.h5")
    with h5py.File(path, "r+", libver="v110") as file:
        file[GROUP][table][2, 0] = value
    looks = [lambda t: t.read("conv1", 2), lambda t: t.statistics("conv1"), lambda t: t.fingerprint]
    # A length that is plausible and wrong is found by the checksum of the values.
    for look in looks[: 1 if value == 16 else 3]:
        with open_trace(path) as trace, pytest.raises(TraceError, match=f"tensor 'conv1'.*{words}"):
            look(trace)
    with open_trace(path) as trace:
        np.testing.assert_array_equal(trace.read("conv1", 0), ragged("conv1", 0))


def test_a_trace_without_lengths_opens(tmp_path):
    """Before there were any, every row was full."""
    arrays = [gradient("x", step, 24) for step in range(3)]
    path = write_arrays(tmp_path / "run.zarr", {"x": dict(enumerate(arrays))}, kind="neural", capacity=24)
    for table in layout.LENGTHS:
        shutil.rmtree(path / GROUP / table)
    with open_trace(path) as trace:
        assert trace.fingerprint
        assert trace.statistics("x")["n_valid"].tolist() == trace.statistics("x")["n_total"].tolist() == [24] * 3
        for step, array in enumerate(arrays):
            np.testing.assert_array_equal(trace.read("x", step), array)
