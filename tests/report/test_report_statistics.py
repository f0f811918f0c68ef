import math
from itertools import pairwise

import numpy as np
import pytest
from scipy import stats

from gtrace.report.statistics import (
    FEWEST_SEEDS,
    FEWEST_STEPS,
    block_counts,
    block_length,
    bootstrap,
    holm,
    step_weights,
    t_interval,
    thirds,
)
from gtrace.types import Key

KEY = Key(1, 2)


def autoregressive(random, runs, n, rho):
    """(runs, n) stationary, mean 0 and variance 1."""
    out = random.normal(size=(runs, n))
    for k in range(1, n):
        out[:, k] = rho * out[:, k - 1] + math.sqrt(1 - rho**2) * out[:, k]
    return out


def naive_weights(steps):
    """Each burst owns the training up to the middle of the gaps around it; its steps share that."""
    bursts = [[steps[0]]]
    for step in steps[1:]:
        if step - bursts[-1][-1] == 1:
            bursts[-1].append(step)
        else:
            bursts.append([step])
    gaps = [b[0] - a[-1] for a, b in pairwise(bursts)]
    margin = min(gaps) / 2 if gaps else 0.5
    out = []
    for k, burst in enumerate(bursts):
        left = gaps[k - 1] / 2 if k else margin
        right = gaps[k] / 2 if k < len(gaps) else margin
        out += [(burst[-1] - burst[0] + left + right) / len(burst)] * len(burst)
    return [value / sum(out) for value in out]


@pytest.mark.parametrize(
    "steps",
    [[5], [0, 10, 20], [0, 1, 2, 3], [0, 1, 2, 3, 100, 101, 102, 1000, 1001, 9000], [3, 4, 6, 9], list(range(50))],
)
def test_steps_weigh_what_they_stand_for(steps):
    found = step_weights(steps)
    assert found.tolist() == pytest.approx(naive_weights(steps))
    assert found.sum() == pytest.approx(1)


def test_a_dense_beginning_does_not_outweigh_the_training_after_it():
    steps = [*range(100), 1000, 2000, 3000, 4000]
    assert step_weights(steps)[:100].sum() < 0.25
    assert step_weights([]).shape == (0,)


def test_thirds_go_by_step_numbers():
    found = dict(thirds([0, 1, 2, 3, 50, 90]))
    assert {name: mask.tolist() for name, mask in found.items()} == {
        "early": [True] * 4 + [False, False],
        "middle": [False] * 4 + [True, False],
        "late": [False] * 5 + [True],
    }
    assert [name for name, _ in thirds([0, 1, 2, 3, 90])] == ["early", "late"]
    assert thirds([0, 100]) == thirds([]) == ()


def naive_holm(p_values):
    """Step down: test the smallest against m, the next against m - 1, and never let a p fall."""
    out, worst = {}, 0.0
    for rank, (p, place) in enumerate(sorted((p, place) for place, p in enumerate(p_values))):
        worst = max(worst, min(1.0, p * (len(p_values) - rank)))
        out[place] = worst
    return [out[place] for place in range(len(p_values))]


def test_holm_agrees_with_a_naive_twin():
    random = np.random.default_rng(0)
    for m in (1, 2, 5, 30):
        p = random.random(m) ** 3
        assert holm(p).tolist() == pytest.approx(naive_holm(p.tolist()))
    assert holm([0.5, 0.5, 0.01]).tolist() == pytest.approx([1.0, 1.0, 0.03])


def test_holm_does_not_count_what_could_not_be_tested():
    found = holm([0.01, math.nan, 0.02])
    assert found[[0, 2]].tolist() == pytest.approx([0.02, 0.02])
    assert math.isnan(found[1])
    assert holm([]).shape == (0,)


def test_holm_keeps_the_chance_of_any_false_alarm():
    random = np.random.default_rng(5)
    p = random.random((2000, 10))
    alarms = np.mean([(holm(row) < 0.05).any() for row in p])
    assert alarms < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert (p < 0.05).any(axis=1).mean() > 0.3


def test_blocks_are_consecutive_and_every_step_is_as_likely():
    counts = block_counts(20, 5, KEY, 4000)
    assert (counts.sum(axis=1) == 20).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(20), abs=0.1)
    # Four whole blocks of five: neighbours are drawn together in four of five cases.
    together = np.mean(counts[:, 3] * counts[:, 4]) - 1
    alone = np.mean(counts[:, 3] * counts[:, 10]) - 1
    assert together > 0.5
    assert alone < 0
    assert np.array_equal(counts, block_counts(20, 5, KEY, 4000))
    assert not np.array_equal(counts, block_counts(20, 5, Key(1, 3), 4000))


def test_blocks_grow_with_memory():
    random = np.random.default_rng(1)
    lengths = [block_length(autoregressive(random, 1, 200, rho)[0]) for rho in (0.0, 0.6, 0.95)]
    assert lengths[0] == math.ceil(200 ** (1 / 3))
    assert lengths[0] < lengths[1] < lengths[2]
    assert block_length(np.ones(30)) == math.ceil(30 ** (1 / 3))


@pytest.mark.parametrize(("n", "rho", "least"), [(30, 0.0, 0.91), (60, 0.4, 0.89), (100, 0.6, 0.87)])
def test_intervals_cover_the_truth_with_memory_between_steps(n, rho, least):
    """95% are nominal; 300 runs scatter by 0.013, and a bootstrap of few blocks is a little too sure."""
    series = autoregressive(np.random.default_rng(7), 300, n, rho) + 3.0
    found = [bootstrap(x, np.ones(n), KEY) for x in series]
    known = [interval for interval in found if interval.known]
    assert len(known) > 0.9 * len(found)
    assert least < np.mean([interval.low <= 3.0 <= interval.high for interval in known]) <= 1


def test_ignoring_memory_would_be_too_sure():
    series = autoregressive(np.random.default_rng(7), 300, 100, 0.6)
    plain = stats.t.ppf(0.975, 99) * series.std(axis=1, ddof=1) / 10
    covered = np.mean(np.abs(series.mean(axis=1)) <= plain)
    assert covered < 0.75


def test_a_difference_is_found_and_noise_is_not():
    random = np.random.default_rng(3)
    noise = random.normal(0, 0.1, 40)
    sure = bootstrap(noise + 0.2, np.ones(40), KEY)
    assert sure.p < 1e-3
    assert sure.low < 0.2 < sure.high
    assert sure.exp() == pytest.approx((math.exp(sure.estimate), math.exp(sure.low), math.exp(sure.high)))
    assert bootstrap(noise - noise.mean(), np.ones(40), KEY).p > 0.9


def test_the_estimate_is_weighted_and_holes_are_left_out():
    values = np.arange(20.0)
    weights = np.linspace(1, 2, 20)
    assert bootstrap(values, weights, KEY).estimate == pytest.approx(np.average(values, weights=weights))
    values[3] = math.nan
    known = np.isfinite(values)
    found = bootstrap(values, weights, KEY)
    assert found.estimate == pytest.approx(np.average(values[known], weights=weights[known]))
    assert found.count == 19


@pytest.mark.parametrize(
    ("values", "weights", "why"),
    [
        (np.ones(FEWEST_STEPS - 1), None, f"needs {FEWEST_STEPS}"),
        (np.full(30, math.nan), None, "no number"),
        (np.zeros(0), None, "no number"),
        (np.linspace(0, 1, 20), None, "too correlated"),
        (np.sin(np.arange(30.0)), np.r_[np.ones(29), 500.0], "too correlated"),
    ],
)
def test_too_little_is_said_and_gets_no_interval(values, weights, why):
    found = bootstrap(values, np.ones(len(values)) if weights is None else weights, KEY)
    assert why in found.why
    assert not found.known
    assert math.isnan(found.p)


def test_what_never_varies_is_exact():
    found = bootstrap(np.full(20, 0.7), np.ones(20), KEY)
    assert (found.low, found.high, found.p) == (pytest.approx(0.7), pytest.approx(0.7), 0.0)
    assert bootstrap(np.zeros(20), np.ones(20), KEY).p == 1.0


def test_seeds_get_a_t_interval():
    values = [0.91, 0.93, 0.92, 0.95, 0.90]
    found = t_interval(values)
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert t_interval(np.array(values) - 0.92).p == pytest.approx(stats.ttest_1samp(values, 0.92).pvalue)
    few = t_interval(values[: FEWEST_SEEDS - 1])
    assert few.estimate == pytest.approx(np.mean(values[:4]))
    assert "fewer than 5 seeds" in few.why
    assert "no number" in t_interval([]).why
