"""How sure a difference is: weights of steps, block bootstrap over steps, t-intervals over seeds, Holm's correction.

Nothing here knows of codecs. The draws of a sweep carry rounding noise alone, so a difference between two codecs is
judged by how it changes from one training step to the next, on the same tensors and steps. Neighbouring steps are
alike, so whole blocks of consecutive steps are drawn again (Kuensch 1989, circular after Politis and Romano 1992).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from gtrace.report.names import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from gtrace.kernels import Flags, Floats
    from gtrace.types import Key

#: Confidence of every interval.
CONFIDENCE = 0.95
#: Resamples of a bootstrap.
RESAMPLES = 1000
#: Fewer steps, or fewer blocks of steps that are worth one independent number each, describe and prove nothing.
FEWEST_STEPS = 12
FEWEST_BLOCKS = 4.0
#: Correlation of neighboring steps that is assumed at most.
_MOST_ALIKE = 0.97
#: Standard errors of that correlation that are added to it.
_CAUTION = 1.25
#: Quantile of the ends of a ratio's interval.
_SKEWED = 0.985
#: An interval of a ratio whose ends are further than this factor from the estimate says nothing.
_WIDEST = 1e6
#: Fewer seeds describe what happened.
FEWEST_SEEDS = 5
#: Names of the thirds of training.
THIRDS = ("early", "middle", "late")


@dataclass(frozen=True, slots=True)
class Interval:
    """An estimate with its confidence interval, in the units of the statistic.

    Attributes:
        estimate: of all the data.
        low: lower end, NaN where nothing but the estimate can be given.
        high: upper end, NaN likewise.
        p: two-sided p-value of "the statistic is 0", NaN likewise.
        count: steps or seeds that it rests on.
        blocks: of these how many are worth an independent number each.
        why: why there is no interval, empty if there is one.
    """

    estimate: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    count: int = 0
    blocks: float = math.nan
    why: str = ""

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return math.isfinite(self.low) and math.isfinite(self.high)

    def exp(self) -> Interval:
        """The ratio that this is the logarithm of; ``p`` is that it is 1."""
        low, estimate, high = np.exp([self.low, self.estimate, self.high]).tolist()
        return replace(self, estimate=estimate, low=low, high=high)


#: Where there is nothing to estimate.
UNKNOWN = Interval(math.nan, why="no number to judge")


def step_weights(steps: ArrayLike) -> Floats:
    """(S,) part of training that each step represents; they add up to 1.

    Consecutive steps are a burst. A burst stands for the training up to the middle of the gaps around it, and its
    steps share that equally: a step at the end of a burst says no more about the gap than its neighbours do. Beyond
    the first and the last step half the smallest gap is added, so steps at equal distances weigh the same.

    Args:
        steps: (S,) ascending, all different.

    >>> step_weights([0, 10, 20]).tolist() == [1 / 3] * 3
    True
    >>> (34 * step_weights([0, 1, 2, 3, 24, 29])).round(2).tolist()
    [4.0, 4.0, 4.0, 4.0, 13.0, 5.0]
    """
    at = np.asarray(steps, dtype=np.float64)
    if len(at) == 0:
        return np.zeros(0)
    first = np.flatnonzero(np.diff(at, prepend=-np.inf) > 1)
    last = np.append(first[1:], len(at)) - 1
    gaps = at[first[1:]] - at[last[:-1]]
    margin = float(gaps.min()) / 2 if len(gaps) else 0.5
    edges = np.concatenate([[at[0] - margin], at[last[:-1]] + gaps / 2, [at[-1] + margin]])
    sizes = last - first + 1
    weights = np.repeat(np.diff(edges) / sizes, sizes)
    return np.asarray(weights / weights.sum(), dtype=np.float64)


def thirds(steps: ArrayLike) -> tuple[tuple[str, Flags], ...]:
    """Names and masks (S,) of the early, middle and late third of training, by step number; none of fewer than 3 steps.

    Thirds without a captured step are left out.
    """
    at = np.asarray(steps, dtype=np.float64)
    if len(at) < len(THIRDS):
        return ()
    place = np.minimum((at - at[0]) / (at[-1] - at[0]) * len(THIRDS), len(THIRDS) - 1).astype(np.int64)
    masks = ((name, place == k) for k, name in enumerate(THIRDS))
    return tuple((name, mask) for name, mask in masks if mask.any())


def holm(p_values: ArrayLike) -> Floats:
    """(m,) p-values adjusted for m comparisons at once (Holm 1979); NaN stays and does not count.

    >>> holm([0.01, 0.04, 0.03]).round(3).tolist()
    [0.03, 0.06, 0.06]
    """
    p = np.asarray(p_values, dtype=np.float64)
    out = np.full(len(p), np.nan)
    known = np.flatnonzero(np.isfinite(p))
    order = known[np.argsort(p[known], kind="stable")]
    factors = np.arange(len(order), 0, -1)
    out[order] = np.minimum(np.maximum.accumulate(p[order] * factors), 1.0)
    return out


def block_length(contributions: Floats) -> int:
    """Steps of a block, for contributions (S,) to a statistic in the order of training.

    The length that suits an autoregression of order one with the lag-1 autocorrelation of the data (Andrews 1991,
    eq. 6.4, which is also the optimum of Politis and White 2004 for such a process). The autocorrelation of few
    values is estimated too low by (1 + 3 rho) / S (Kendall 1954), which is put right. Never below the cube root of S,
    because so few values cannot show that they are independent.
    """
    n = len(contributions)
    least = math.ceil(math.pow(n, 1 / 3))
    if n < 3:
        return least
    centred = contributions - contributions.mean()
    total = float(centred @ centred)
    if total <= 0:
        return least
    rho = float(centred[:-1] @ centred[1:]) / total
    rho = min(rho + (1 + 3 * rho) / n, _MOST_ALIKE)
    if rho <= 0:
        return least
    alpha = 4 * rho**2 / (1 - rho**2) ** 2
    return min(max(math.ceil(1.1447 * math.pow(alpha * n, 1 / 3)), least), n)


def block_counts(n: int, block: int, key: Key, resamples: int = RESAMPLES) -> Floats:
    """(resamples, n) how often each of n steps is drawn when blocks of consecutive steps are drawn until n are full.

    Blocks that reach over the end go on at the beginning, so every step is as likely as every other. The last block
    is cut short. The same key gives the same counts.
    """
    generator = np.random.Generator(np.random.Philox(key=np.array(key, dtype=np.uint64)))
    starts = generator.integers(0, n, size=(resamples, -(-n // block)))
    drawn = ((starts[:, :, None] + np.arange(block)) % n).reshape(resamples, -1)[:, :n]
    flat = (drawn + n * np.arange(resamples)[:, None]).ravel()
    return np.bincount(flat, minlength=resamples * n).reshape(resamples, n).astype(np.float64)


def bootstrap(values: ArrayLike, weights: ArrayLike, key: Key, noun: str = "step") -> Interval:
    """Interval of a weighted mean over steps: standard error from blocks drawn again, quantiles of Student's t.

    Few blocks make a bootstrap's own percentiles too narrow. So its standard error is put right for the blocks that
    there are, and its ends come from a t-distribution with one degree of freedom less than there are blocks. Steps
    of unequal weights are worth fewer: ``(sum w)^2 / sum w^2`` (Kish 1965).

    Args:
        values: (S,) one per step in the order of training, such as paired differences; NaN without one.
        weights: (S,) part of training that each stands for, see :func:`step_weights`.
        key: of the resampling; the same one gives the same interval.
        noun: what there is one value for.
    """
    x, w = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    known = np.isfinite(x) & (w > 0)
    x, w = x[known], w[known]
    n = len(x)
    if n == 0:
        return UNKNOWN
    estimate = float(x @ w / w.sum())
    if n < FEWEST_STEPS:
        return Interval(estimate, count=n, why=_too_few(n, noun))
    off = x - estimate
    if float(np.abs(off).max()) <= 1e-9 * max(abs(estimate), 1e-3):
        # The same in every step: nothing varies that a bootstrap could see.
        return student(estimate, 0.0, n - 1, steps=n, blocks=float(n))
    block = block_length(off)
    blocks = float(w.sum() ** 2 / (w @ w)) / block
    if blocks < FEWEST_BLOCKS:
        why = f"the {count(n, noun)} are too correlated for a confidence interval"
        return Interval(estimate, count=n, blocks=blocks, why=why)
    drawn = block_counts(n, block, key)
    found = (drawn @ (w * off)) / (drawn @ w)
    error = float(found.std(ddof=1)) * math.sqrt(blocks / (blocks - 1))
    return student(estimate, error, blocks - 1, steps=n, blocks=blocks)


def _too_few(number: int, noun: str = "step") -> str:
    few = f"{count(number, noun)} {'is' if number == 1 else 'are'} too few for a confidence interval"
    return f"{few}, which needs {FEWEST_STEPS}"


def ratio_of_sums(top: ArrayLike, bottom: ArrayLike) -> Interval:
    """Interval of ``sum top / sum bottom``: a t-interval of its logarithm, for steps that resemble their neighbors.

    What each step adds to the difference from the ratio is taken for an autoregression of order one. Its
    autocorrelation is estimated too low from few steps by (1 + 3 rho) / S (Kendall 1954), and with an error of
    sqrt((1 - rho^2) / S): the first is put right, and 1.25 times the second is added. Steps with unequal sums are worth
    fewer than S, at least ``(sum x)^2 / sum x^2`` (Kish 1965): the geometric mean of both. Sums of positive numbers
    are skewed, so the ends are 98.5% quantiles instead of 97.5%. With all three the interval holds the truth in at
    least 95% of the series of ``benchmarks/noise_intervals.py``, and the truth is above it in at most 3.5%.

    Args:
        top: (S,) sums of each step in the order of training, weighted already.
        bottom: (S,) likewise; a step whose sum is exactly 0 does not count.
    """
    a, b = np.asarray(top, dtype=np.float64), np.asarray(bottom, dtype=np.float64)
    known = np.isfinite(a) & np.isfinite(b) & (b != 0)
    a, b = a[known], b[known]
    n = len(b)
    mean = float(b.mean()) if n else 0.0
    if mean == 0:
        return UNKNOWN
    estimate = float(a.sum() / b.sum())
    if n < FEWEST_STEPS:
        return Interval(estimate, count=n, why=_too_few(n))
    off = (a - estimate * b) / mean
    if float(np.abs(off).max()) <= 1e-9 * abs(estimate):
        # The same in every step: nothing varies that an interval could show.
        return Interval(estimate, estimate, estimate, count=n, blocks=float(n))
    if estimate <= 0:
        return Interval(estimate, count=n, why="the ratio is not positive")
    rho = float(off[:-1] @ off[1:]) / float(off @ off)
    rho = min(rho + (1 + 3 * rho) / n, _MOST_ALIKE)
    alike = min(max(rho + _CAUTION * math.sqrt(max(1 - rho**2, 0.0) / n), 0.0), _MOST_ALIKE)
    worth = math.sqrt(n * min(float(x.sum() ** 2 / (x @ x)) for x in (a, b)))
    independent = worth * (1 - max(rho, 0.0)) / (1 + max(rho, 0.0))
    least = worth * (1 - alike) / (1 + alike)
    error = math.sqrt(float(off @ off) / n / max(least - 1, 0.5)) / estimate
    reach = float(special.stdtrit(max(independent - 1, 1.0), _SKEWED)) * error
    if reach > math.log(_WIDEST):
        why = "the steps are too correlated or vary too much"
        return Interval(estimate, count=n, blocks=independent, why=why)
    low, high = estimate * math.exp(-reach), estimate * math.exp(reach)
    return Interval(estimate, low, high, count=n, blocks=independent)


def student(estimate: float, error: float, freedom: float, *, steps: int, blocks: float) -> Interval:
    """Interval of an estimate with a standard error, by Student's t; an error of 0 is an exact number."""
    reach = float(special.stdtrit(freedom, 0.5 + CONFIDENCE / 2)) * error
    if error <= 1e-12 * max(abs(estimate), 1e-12):
        p = 1.0 if abs(estimate) < 1e-12 else 0.0
    else:
        p = float(2 * special.stdtr(freedom, -abs(estimate) / error))
    return Interval(estimate, estimate - reach, estimate + reach, p, steps, blocks)


def t_interval(values: Sequence[float] | Floats) -> Interval:
    """Mean of independent values, such as one per seed, with its t-interval; of fewer than 5 the mean alone."""
    known = np.asarray(values, dtype=np.float64)
    known = known[np.isfinite(known)]
    n = len(known)
    if n == 0:
        return UNKNOWN
    mean = float(known.mean())
    if n < FEWEST_SEEDS:
        return Interval(mean, count=n, blocks=float(n), why=f"fewer than {FEWEST_SEEDS} seeds")
    return student(mean, float(known.std(ddof=1)) / math.sqrt(n), n - 1, steps=n, blocks=float(n))
