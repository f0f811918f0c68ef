import math

import numpy as np
import pytest
from helpers_laws import LAYERS, STEPS, gradient, memory_trace

from gtrace.errors import UsageError
from gtrace.fitting.magnitudes import LAWS, fit_magnitudes
from gtrace.sweep.laws import follow_laws, judge, verdict_sentences
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


def test_nothing_to_judge():
    trace = Trace.from_arrays({"zero": np.zeros(500), "few": np.ones(3)})
    assert verdict_sentences(judge(list(layers_of(trace).values()))) == [
        "No tensor has the 100 non-zero elements that are needed to compare laws."
    ]


def test_steps_are_spread_with_both_ends():
    trace = Trace.from_arrays({"w": {step: np.ones(2) for step in range(0, 100, 3)}})
    infos = choose_infos(trace)
    chosen = sorted(choose_steps(trace, infos, most=5))
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 99, 5)
    assert choose_steps(trace, infos, [3, 4, 6]) == {3, 6}
    assert len(choose_steps(trace, infos)) == 16
    with pytest.raises(UsageError, match="none of these steps is in the trace; it has 34 steps from 0 to 99"):
        choose_steps(trace, infos, [1])
