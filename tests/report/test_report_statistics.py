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
    around = [margin, *(gap / 2 for gap in gaps), margin]
    out = []
    for burst, left, right in zip(bursts, around, around[1:], strict=False):
        out += [(burst[-1] - burst[0] + left + right) / len(burst)] * len(burst)
    return [value / sum(out) for value in out]


@pytest.mark.parametrize(
    "steps",
    [[5], [0, 10, 20], [0, 1, 2, 3], [0, 1, 2, 3, 100, 101, 102, 1000, 1001, 9000], [3, 4, 6, 9]],
)
def test_steps_weigh_what_they_stand_for(steps):
    found = step_weights(steps)
    assert found.tolist() == pytest.approx(naive_weights(steps))
    assert found.sum() == pytest.approx(1)


def naive_holm(p_values):
    """Step down: test the smallest against m, the next against m - 1, and never let a p fall."""
    out, worst = {}, 0.0
    for rank, (p, place) in enumerate(sorted((p, place) for place, p in enumerate(p_values))):
        worst = max(worst, min(1.0, p * (len(p_values) - rank)))
        out[place] = worst
    return [out[place] for place in range(len(p_values))]


def test_holm_agrees_with_a_naive_twin_and_keeps_the_chance_of_any_false_alarm():
    random = np.random.default_rng(0)
    for m in (1, 2, 5, 30):
        p = random.random(m) ** 3
        assert holm(p).tolist() == pytest.approx(naive_holm(p.tolist()))
    # What could not be tested does not count.
    assert holm([0.01, math.nan, 0.02]).tolist() == pytest.approx([0.02, math.nan, 0.02], nan_ok=True)
    p = np.random.default_rng(5).random((2000, 10))
    alarms = np.mean([(holm(row) < 0.05).any() for row in p])
    assert alarms < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert (p < 0.05).any(axis=1).mean() > 0.3


def test_blocks_are_consecutive_every_step_is_as_likely_and_they_grow_with_memory():
    counts = block_counts(20, 5, KEY, 4000)
    assert (counts.sum(axis=1) == 20).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(20), abs=0.1)
    # Four whole blocks of five: neighbours are drawn together in four of five cases.
    together, alone = (np.mean(counts[:, 3] * counts[:, other]) - 1 for other in (4, 10))
    assert alone < 0 < 0.5 < together
    assert np.array_equal(counts, block_counts(20, 5, KEY, 4000))
    random = np.random.default_rng(1)
    lengths = [block_length(autoregressive(random, 1, 200, rho)[0]) for rho in (0.0, 0.6, 0.95)]
    assert math.ceil(200 ** (1 / 3)) == lengths[0] < lengths[1] < lengths[2]


@pytest.mark.parametrize(("n", "rho", "least"), [(30, 0.0, 0.91), (60, 0.4, 0.89), (100, 0.6, 0.87)])
def test_intervals_cover_the_truth_with_memory_between_steps(n, rho, least):
    """95% are nominal; 300 runs scatter by 0.013, and a bootstrap of few blocks is a little too sure."""
    series = autoregressive(np.random.default_rng(7), 300, n, rho) + 3.0
    found = [bootstrap(x, np.ones(n), KEY) for x in series]
    known = [interval for interval in found if interval.known]
    assert len(known) > 0.9 * len(found)
    assert least < np.mean([interval.low <= 3.0 <= interval.high for interval in known]) <= 1
    if rho == 0.6:
        # Ignoring memory would be too sure.
        plain = stats.t.ppf(0.975, n - 1) * series.std(axis=1, ddof=1) / math.sqrt(n)
        assert np.mean(np.abs(series.mean(axis=1) - 3.0) <= plain) < 0.75


def test_a_difference_is_found_and_noise_is_not():
    noise = np.random.default_rng(3).normal(0, 0.1, 40)
    sure = bootstrap(noise + 0.2, np.ones(40), KEY)
    assert sure.p < 1e-3
    assert sure.low < 0.2 < sure.high
    ratio = sure.exp()
    ends = [math.exp(end) for end in (sure.estimate, sure.low, sure.high)]
    assert (ratio.estimate, ratio.low, ratio.high, ratio.p) == pytest.approx((*ends, sure.p))
    assert bootstrap(noise - noise.mean(), np.ones(40), KEY).p > 0.9
    # What never varies is exact.
    found = bootstrap(np.full(20, 0.7), np.ones(20), KEY)
    assert (found.low, found.high, found.p) == (pytest.approx(0.7), pytest.approx(0.7), 0.0)


def test_the_estimate_is_weighted_and_holes_are_left_out():
    values, weights = np.arange(20.0), np.linspace(1, 2, 20)
    assert bootstrap(values, weights, KEY).estimate == pytest.approx(np.average(values, weights=weights))
    values[3] = math.nan
    known, found = np.isfinite(values), bootstrap(values, weights, KEY)
    assert found.estimate == pytest.approx(np.average(values[known], weights=weights[known]))
    assert found.count == 19


@pytest.mark.parametrize(
    ("values", "weights", "why"),
    [
        (np.ones(FEWEST_STEPS - 1), 1.0, f"needs {FEWEST_STEPS}"),
        (np.zeros(0), 1.0, "no number"),
        (np.linspace(0, 1, 20), 1.0, "too correlated"),
        (np.sin(np.arange(30.0)), np.r_[np.ones(29), 500.0], "too correlated"),
    ],
)
def test_too_little_is_said_and_gets_no_interval(values, weights, why):
    found = bootstrap(values, np.broadcast_to(weights, values.shape), KEY)
    assert why in found.why
    assert not found.known
    assert math.isnan(found.p)


def test_seeds_get_a_t_interval():
    values = [0.91, 0.93, 0.92, 0.95, 0.90]
    found = t_interval(values)
    expected = stats.t.interval(0.95, 4, np.mean(values), stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert t_interval(np.array(values) - 0.92).p == pytest.approx(stats.ttest_1samp(values, 0.92).pvalue)
    few = t_interval(values[: FEWEST_SEEDS - 1])
    assert (few.estimate, few.why) == (pytest.approx(np.mean(values[:4])), "fewer than 5 seeds")
    assert "no number" in t_interval([]).why
