"""Sweeps over sparsities: shares among tensors, neural gradients, tensors whose size changes from step to step."""

import numpy as np
import pytest
from helpers_sweep import pick, rows_of

import gtrace
from gtrace import fitting
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch
from gtrace.sweep import EXPECTATION
from gtrace.trace import Trace
from gtrace.types import Key, State

SIZES = {
    "conv": {0: 3000, 1: 3000, 2: 2000, 3: 2000},
    "fc": {0: 500, 1: 500, 2: 320, 3: 500},
    "fc#1": {2: 7, 3: 0},
    "late": {1: 40, 3: 40},
}
SPREAD = {"conv": 2.5, "fc": 1.0, "fc#1": 0.5, "late": 1.5}
MIXED = "prune:sparsity=0.8,allocation=heterogeneous"


def gradient(name, step):
    rng = np.random.default_rng([step, len(name), SIZES[name][step]])
    n = SIZES[name][step]
    return (rng.choice([-1, 1], n) * rng.lognormal(-step, SPREAD[name], n)).astype(np.float32)


def neural_trace():
    return Trace.from_arrays({n: {s: gradient(n, s) for s in sizes} for n, sizes in SIZES.items()}, kind="neural")


def write_both(path):
    with gtrace.create_trace(path) as writer:
        for step in range(4):
            writer.append(step, "conv", np.ones(12, np.float32))
            for name, sizes in SIZES.items():
                if step in sizes:
                    writer.append(step, name, gradient(name, step), kind="neural")
            writer.commit(step, loss=1.0)
    return path


def test_every_codec_takes_tensors_whose_size_changes():
    result = gtrace.run_sweep(neural_trace(), gtrace.codec_names(), refit="previous", jobs=2)
    for row in result.rows():
        assert row["n"] == SIZES[row["tensor"]][row["step"]]
    draws = [r for r in result.rows() if r["draw"] == 0]
    assert len(draws) == sum(len(sizes) for sizes in SIZES.values()) * len(gtrace.codec_names())


@pytest.mark.parametrize("spec", ["ef:qsgdinf:bits=3", "mem-sgd:ratio=0.1"])
def test_memory_starts_afresh_where_the_size_changes(spec, tmp_path):
    result = gtrace.run_sweep(neural_trace(), [spec], refit="each")
    c = gtrace.codec(spec)

    def alone(state, step):
        x = gradient("fc", step)
        if c.needs is not None:
            state = c.fit(state, MomentSketch.from_spec(c.view(state, x), c.needs), step)
        q = c.decode(c.shared(state), c.encode(state, x, Key.derive(0, tensor="fc", step=step)), x.size)
        return c.update(state, x, q), np.sum((q - x.astype(np.float64)) ** 2)

    state, _ = alone(c.init(500), 0)
    expected = {1: alone(state, 1)[1], 2: alone(c.init(320), 2)[1], 3: alone(c.init(500), 3)[1]}
    for step, error in expected.items():
        row = pick(result, tensor="fc", step=step, draw=0)
        assert row["squared_error"] == pytest.approx(error, rel=1e-9)
        assert ("afresh" in row["note"]) == (step > 1)
    # the same where the replay starts in the middle
    part = gtrace.run_sweep(neural_trace(), [spec], refit="each", steps=[3])
    for name in SIZES:
        if 3 in SIZES[name]:
            wanted = {"tensor": name, "step": 3, "draw": 0}
            assert pick(part, **wanted) == pytest.approx(pick(result, **wanted), nan_ok=True)


def test_shares_are_those_of_all_tensors_at_the_step_itself():
    trace = neural_trace()
    result = gtrace.run_sweep(trace, [MIXED, "prune:sparsity=0.8"], refit="previous")
    for step in (1, 2, 3):
        present = [n for n in SIZES if step in SIZES[n]]
        shares = fitting.allocate_sparsity([MomentSketch.of(gradient(n, step), norm="none") for n in present], 0.8)
        for name, share in zip(present, shares, strict=True):
            if step in SIZES[name]:
                row = pick(result, tensor=name, step=step, codec=str(gtrace.codec(MIXED)), draw=EXPECTATION)
                assert row["sparsity_asked"] == share
    each = gtrace.run_sweep(trace, [MIXED, "prune:sparsity=0.8"], refit="each", draws=0)
    rows = [r for r in each.rows() if r["step"] == 0]
    mixed = [r for r in rows if r["sparsity_asked"] != 0.8]
    assert np.average([r["sparsity"] for r in mixed], weights=[r["n"] for r in mixed]) == pytest.approx(0.8, abs=5e-4)
    alike = [r for r in rows if r not in mixed]
    cosines = [sum(r["n"] * (1 + r["relative_variance"]) ** -0.5 for r in chosen) for chosen in (mixed, alike)]
    assert cosines[0] > cosines[1]


@pytest.mark.parametrize("suffix", ["zarr", "h5"])
def test_kinds(tmp_path, suffix):
    path = write_both(tmp_path / f"run.{suffix}")
    weights = gtrace.run_sweep(path, ["prune"])
    assert set(weights["tensor"]) == {"conv"}
    assert set(weights["n"]) == {12}
    assert (weights.provenance["kind"], weights.provenance["left_out"]) == ("weight", {"neural": 4})
    neural = gtrace.run_sweep(path, ["prune"], kind="neural")
    assert rows_of(neural) == rows_of(gtrace.run_sweep(neural_trace(), ["prune"]))
    assert neural.provenance["left_out"] == {"weight": 1}
    with pytest.raises(UsageError, match="no weight gradients"):
        gtrace.run_sweep(neural_trace(), ["prune"], kind="weight")
    with pytest.raises(UsageError, match="unknown"):
        gtrace.run_sweep(neural_trace(), ["prune"], kind="neutral")


def test_a_stateless_codec_is_fitted_on_one_size_and_encodes_another():
    c = gtrace.codec("prune:threshold=lognormal")
    result = gtrace.run_sweep(neural_trace(), [c])
    before, x = gradient("conv", 1), gradient("conv", 2)
    state = State(x.size, c.fit(c.init(before.size), MomentSketch.from_spec(before, c.needs), 2).arrays)
    q = c.decode(b"", c.encode(state, x, Key.derive(0, tensor="conv", step=2)), x.size)
    row = pick(result, tensor="conv", step=2, draw=0)
    assert row["sparsity"] == np.mean(q == 0)
    assert row["squared_error"] == pytest.approx(np.sum((q - x.astype(np.float64)) ** 2))
    assert (row["fitted_on"], row["sparsity_asked"]) == ("previous", 0.8)
