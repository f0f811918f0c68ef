import numpy as np
import pytest
from helpers_laws import STEPS, gradient, memory_trace

from gtrace.fitting import threshold
from gtrace.fitting.sparsity import RULES
from gtrace.sketch import MomentSketch
from gtrace.sweep.laws import ASKED, PruningTrial, follow_laws
from gtrace.trace import Trace
from gtrace.trace.choose import choose_infos


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
