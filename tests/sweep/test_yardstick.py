"""Gradient noise in sweeps: where a trace tells it, which noise counts, and what rows say."""

import numpy as np
import pytest

import gtrace
from gtrace.sweep.gradient_noise import NOISE

SIZES = {"conv.weight": 3000, "fc.bias": 40}
STEPS, RANKS = (0, 1, 2), 4
SPECS = ("qsgdinf:bits=3", "signsgd", "fp:bits=5", "topk", "ef:qsgdinf:bits=3")


def gradients(seed=0, ranks=RANKS):
    """(step, name) -> float32[ranks, size]."""
    random = np.random.default_rng(seed)
    out = {}
    for step in STEPS:
        for name, size in SIZES.items():
            mean = random.standard_t(4, size) * 0.01
            out[step, name] = np.float32(mean + 0.02 * random.normal(size=(ranks, size)))
    return out


def write(path, found, stage="local", **attrs):
    with gtrace.create_trace(path, attrs=attrs) as writer:
        for step in STEPS:
            for name in SIZES:
                for rank, values in enumerate(found[step, name]):
                    writer.append(step, name, values, rank=rank, stage=stage)
            writer.commit(step)
    return path


def truth(values):
    """tr Cov and ||E g||^2 as numpy has them."""
    exact = values.astype(np.float64)
    variance = float(exact.var(axis=0, ddof=1).sum())
    return variance, float(np.square(exact.mean(axis=0)).sum() - variance / len(exact))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    found = gradients()
    path = write(tmp_path_factory.mktemp("noise") / "ranks.zarr", found)
    return path, found, gtrace.run_sweep(path, SPECS, draws=1)


def test_noise_between_ranks_is_stored_and_divides_the_error(swept):
    _, found, result = swept
    for (step, name), values in found.items():
        told = result.details[name, step, NOISE]
        assert told["freedom"] == RANKS - 1
        np.testing.assert_allclose([told["variance"], told["signal"]], truth(values), rtol=1e-9)
    assert result.provenance["noise"] == {"from": ["ranks"]}
    for row in result.rows():
        if row["codec"] == "qsgdinf:bits=3":
            expected = row["squared_error"] / truth(found[row["step"], row["tensor"]])[0]
            assert row["noise_ratio"] == pytest.approx(expected, rel=1e-9)


def test_bias_is_told_apart_where_it_can_be(swept):
    _, found, result = swept
    for row in result.rows():
        method, drawn = row["method"], row["draw"] >= 0
        if method == "ef:qsgdinf":
            assert np.isnan(row["noise_ratio"])
            assert "no noise ratio" in row["note"]
        elif method in ("topk", "fp") or (drawn and method == "signsgd"):
            assert row["noise_ratio"] == 0
        elif method == "signsgd":
            bias = row["relative_bias"] ** 2 * row["energy"]
            variance = max(0.0, row["squared_error"] - bias)
            expected = variance / truth(found[row["step"], row["tensor"]])[0]
            assert row["noise_ratio"] == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("chunk", [2**24, 3 * 256])
@pytest.mark.parametrize("stage", ["local", "reduced"])
def test_one_gradient_a_step_has_the_noise_of_second_differences(stage, chunk, tmp_path):
    found = gradients(ranks=1)
    result = gtrace.run_sweep(write(tmp_path / "one.zarr", found, stage), SPECS[:1], draws=0, chunk=chunk)
    assert result.provenance["noise"] == {"from": ["consecutive steps"]}
    for name in SIZES:
        first, middle, last = (found[step, name][0].astype(np.float64) for step in STEPS)
        expected = float(np.square(first - 2 * middle + last).sum()) / 6
        # The first and the last step have no neighbor on one side, and take the estimate of the one between them.
        assert [result.details[name, step, NOISE]["variance"] for step in STEPS] == pytest.approx([expected] * 3)


def test_without_three_consecutive_steps_there_is_no_noise():
    apart = dict.fromkeys((0, 1, 10, 20), gradients(ranks=1)[0, "fc.bias"][0])
    result = gtrace.run_sweep(gtrace.Trace.from_arrays({"fc.bias": apart}), SPECS[:1], draws=0)
    assert result.provenance["noise"]["from"] == []
    assert "bursts such as --steps 100+10" in result.provenance["noise"]["why"]
    assert np.isnan(result["noise_ratio"]).all()
    assert not any(what == NOISE for *_, what in result.details)
