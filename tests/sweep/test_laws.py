import math

import numpy as np
import pytest
from helpers_laws import LAYERS, STEPS, gradient, memory_trace

from gtrace.errors import UsageError
from gtrace.fitting import threshold
from gtrace.fitting.magnitudes import LAWS, fit_magnitudes
from gtrace.fitting.sparsity import RULES
from gtrace.sketch import MomentSketch
from gtrace.sweep.laws import ASKED, PruningTrial, follow_laws, judge, verdict_sentences
from gtrace.trace import Trace
from gtrace.trace.choose import choose_infos, choose_steps


def layers_of(trace, steps=None):
    infos = choose_infos(trace)
    return {layer.info.name: layer for layer in follow_laws(trace, infos, choose_steps(trace, infos, steps))}


def test_every_layer_and_step_is_fitted_alone():
    found = layers_of(memory_trace())
    assert set(found) == set(LAYERS)
    for name, layer in found.items():
        assert layer.steps.tolist() == list(STEPS)
        for step, fit in zip(STEPS, layer.fits, strict=True):
            assert fit == fit_magnitudes(gradient(name, step))
        np.testing.assert_allclose(layer.mu_log2, [fit.mu_log2 for fit in layer.fits])


def test_the_law_of_each_layer_is_found():
    found = layers_of(memory_trace())
    assert [found[name].best for name in ("wide", "narrow", "early")] == ["lognormal", "lognormal", "half-normal"]
    assert found["wide"].sigma_log2.mean() == pytest.approx(3 / math.log(2), rel=0.05)
    # The scale falls by four octaves from step to step.
    np.testing.assert_allclose(np.diff(found["narrow"].mu_log2), -4, atol=0.2)


def test_the_verdict_is_the_mean_over_layers_and_steps_with_enough_elements():
    found = layers_of(memory_trace())
    verdict = judge(list(found.values()))
    kept = [found[name] for name in ("wide", "narrow", "early")]
    for law in LAWS:
        mean = np.mean([fit.ks[law] for layer in kept for fit in layer.fits])
        assert verdict.distances[law] == pytest.approx(mean)
    assert (verdict.nearest["lognormal"], verdict.nearest["half-normal"]) == (6, 3)
    assert (verdict.cells, verdict.layers, verdict.left_out) == (9, 3, 1)
    first, second, third = verdict_sentences(verdict)
    assert first.startswith("The lognormal law fits best on average: mean KS distance 0.0")
    assert first.endswith("(3 layers, 9 gradients).")
    assert second == "Nearest law by number of gradients: lognormal 6, half-normal 3."
    assert third == "Not in the averages: 1 layer with fewer than 100 non-zero elements."


def test_steps_are_spread_with_both_ends():
    trace = Trace.from_arrays({"w": {step: np.ones(2) for step in range(0, 100, 3)}})
    infos = choose_infos(trace)
    chosen = sorted(choose_steps(trace, infos, most=5))
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 99, 5)
    assert choose_steps(trace, infos, [3, 4, 6]) == {3, 6}
    assert len(choose_steps(trace, infos)) == 16
    with pytest.raises(UsageError, match="none of these steps is in the trace; it has 34 steps from 0 to 99"):
        choose_steps(trace, infos, [1])


@pytest.fixture(scope="module")
def trial():
    trace = memory_trace()
    found = PruningTrial(frozenset([0, 20]))
    follow_laws(trace, choose_infos(trace), frozenset(STEPS), look=found)
    return found


def test_expected_sparsity_and_its_error_are_those_of_the_definition(trial):
    for cell in trial.cells:
        x = np.abs(gradient(cell.tensor, cell.step)).astype(np.float64)
        sketch = MomentSketch.of(x, norm="none")
        for i, rule in enumerate(RULES):
            for j, asked in enumerate(ASKED):
                alpha = threshold(rule, asked, sketch)
                pruned = np.clip(1 - x / alpha, 0, 1) if alpha else (x == 0).astype(float)
                # Inside a bin of the sketch a few values may lie on the other side of the threshold.
                assert cell.expected[i, j] == pytest.approx(pruned.mean(), abs=1e-4)
                spread = np.sqrt(np.sum(pruned * (1 - pruned))) / x.size
                assert cell.standard_error[i, j] == pytest.approx(spread, rel=1e-3, abs=1e-9)


def test_draws_agree_with_what_is_expected(trial):
    off = np.concatenate(
        [((c.realized - c.expected) / np.maximum(c.standard_error, 1e-9)).ravel() for c in trial.cells]
    )
    assert np.abs(off).max() < 5
    assert 0.5 < off.std() < 1.5


def test_exact_thresholds_are_the_most_accurate(trial):
    def off(rule):
        place = RULES.index(rule)
        return np.mean([np.abs(c.expected[place] - c.wanted).mean() for c in trial.cells if c.tensor != "tiny"])

    assert off("exact") < 0.003
    assert off("exact") < off("lognormal") < off("normal")
    assert off("lognormal") < off("topk")


def test_sharing_sparsity_out_never_costs_cosine(trial):
    cosines = trial.cosines()
    assert [found.step for found in cosines] == [0, 20]
    for found in cosines:
        assert (found.heterogeneous >= found.homogeneous - 1e-9).all()
        assert (found.heterogeneous > found.homogeneous + 0.01).any()
        assert (np.diff(found.homogeneous) < 0).all()


def test_zeros_and_nonfinite_gradients_are_passed_over():
    trace = Trace.from_arrays({"zero": np.zeros(9), "bad": np.array([1.0, np.nan]), "good": np.ones(9)})
    found = PruningTrial(frozenset([0]))
    follow_laws(trace, choose_infos(trace), frozenset([0]), look=found)
    assert [cell.tensor for cell in found.cells] == ["good"]
