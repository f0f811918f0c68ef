"""Which float format and which power of two suit a tensor: by the expected relative error under a law of log2|x|.

After Chmiel et al., Neural gradients are near-lognormal, 2021, Sections 4 and 5. A format is judged where the scale
rule that will be used puts the values: with the ``max`` rule the best format is another than with the best scale.

What rounding does to a sketched tensor needs no law: numbers of a format times a power of two, and the midpoints
between them, lie on edges of the sketch's bins, so a bin falls into one rounding cell as a whole and sums come out
exactly. Only ties within a bin that also holds other values are unknown to a sketch; they are counted as rounded up.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.fitting.floats import LARGEST_BITS, LARGEST_EXPONENT, LARGEST_MANTISSA, NORMAL_MU, FloatFormat, LawName
from gtrace.kernels.floats import rounding_error

if TYPE_CHECKING:
    from gtrace.kernels import Flags, Floats
    from gtrace.sketch import MomentSketch

    _Sums = tuple[Floats, Floats, Floats]
    _Found = tuple[float, float, Floats]

ScaleRule: TypeAlias = Literal["max", "mean", "error", "absmax"]
RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
LAWS: tuple[LawName, ...] = ("lognormal", "normal")

#: powers of two that a scale may multiply by: 2^-k must be a float32
LEAST_SCALE, LARGEST_SCALE = -127, 149
#: narrowest exponent that an automatic choice considers
LEAST_EXPONENT = 2
#: how finely a scale that need not be a power of two is searched, in octaves, before it is refined
_STEP = 0.125


def scale_exponent(
    form: FloatFormat,
    rule: ScaleRule,
    mu: float,
    sigma: float,
    count: int,
    largest: float | None = None,
    *,
    law: LawName = "lognormal",
    stochastic: bool = False,
) -> int:
    """The k of the power of two by which x is multiplied before it is rounded to a format.

    Args:
        form: the format.
        rule: ``max`` puts the largest of ``count`` values, as the law expects it, below the format's largest number:
            k = floor(log2 max - mu - sigma Phi^-1(1 - 1 / count)); ``mean`` is the nearest to -mu - 3; ``error`` has
            the least expected relative error; ``absmax`` is ``max`` with the largest value that there is. On
            captured gradients a fitted lognormal law reaches octaves further than the data do.
        mu: mean of log2|x| over non-zero values.
        sigma: its standard deviation.
        count: how many values; one alone is its own largest.
        largest: log2 of the largest magnitude, for rule ``absmax``, which without it is as ``max``.
        law: of the quantile and of the error.
        stochastic: the error is that of stochastic rounding.

    Raises:
        UsageError: an unknown rule or law, a count below 1, or mu and sigma that are not finite.
    """
    _check(rule, law, sigma, count)
    if not math.isfinite(mu):
        raise UsageError(f"scale: mu is {mu}; a tensor of zeros has no scale")
    if rule in ("max", "absmax"):
        expected = mu + _quantile(sigma, count, law)
        top = expected if rule == "max" or largest is None else largest
        k = math.floor(math.log2(form.max) - top)
    elif rule == "mean":
        k = round(-mu - 3.0)
    else:
        low, high = _window(form)
        shifts = np.arange(math.floor(low - mu), math.ceil(high - mu) + 1)
        errors = form.relative_errors(mu + shifts.astype(np.float64), sigma, stochastic=stochastic, law=law)
        k = int(shifts[np.argmin(errors)])
    return min(max(k, LEAST_SCALE), LARGEST_SCALE)


def optimal_format(
    bits: int,
    sigma: float,
    scale: ScaleRule = "error",
    law: LawName = "lognormal",
    count: int = 1_000_000,
    *,
    mu: float | None = None,
    largest: float | None = None,
    stochastic: bool = False,
) -> FloatFormat:
    """The format of so many bits (2 to 7 of exponent) with the least expected relative error under a scale rule.

    Args:
        bits: 1 + E + M, 2 (the one format 1-1-0) to 16.
        sigma: standard deviation of log2|x|.
        scale: the rule that places the values; see :func:`scale_exponent`.
        law: ``lognormal``, or ``normal`` for what one chooses who takes gradients for normal.
        count: number of values; only rules ``max`` and ``absmax`` look at it.
        mu: mean of log2|x|: the scale is then a power of two; without it the scale is free, and with rule ``max`` the
            error is a mean over where mu may fall between two powers.
        largest: log2 of the largest magnitude, for rule ``absmax`` where mu is given.
        stochastic: for stochastic rounding.

    Raises:
        UsageError: no format of these bits, an unknown rule or law, or numbers out of range.

    >>> [str(optimal_format(8, sigma)) for sigma in (1, 2, 3, 5)]
    ['1-2-5', '1-3-4', '1-4-3', '1-5-2']
    """
    _check(scale, law, sigma, count)
    return min(
        candidates(bits),
        key=lambda form: placed_error(form, sigma, scale, law, count, mu=mu, largest=largest, stochastic=stochastic),
    )


def candidates(bits: int) -> tuple[FloatFormat, ...]:
    """The formats that :func:`optimal_format` chooses from, narrowest exponent first.

    Raises:
        UsageError: there are none.
    """
    widths = range(min(LEAST_EXPONENT, bits - 1), min(LARGEST_EXPONENT, bits - 1) + 1)
    found = tuple(
        FloatFormat(e, bits - 1 - e)
        for e in widths
        if e > 0 and bits <= LARGEST_BITS and bits - 1 - e <= LARGEST_MANTISSA
    )
    if not found:
        raise UsageError(f"float formats: none of {bits} bits; give 2 to {LARGEST_BITS}")
    return found


def placed_error(
    form: FloatFormat,
    sigma: float,
    scale: ScaleRule = "error",
    law: LawName = "lognormal",
    count: int = 1_000_000,
    *,
    mu: float | None = None,
    largest: float | None = None,
    stochastic: bool = False,
) -> float:
    """Expected relative error of a format with its values placed by a scale rule; see :func:`optimal_format`."""
    if mu is not None:
        k = scale_exponent(form, scale, mu, sigma, count, largest, law=law, stochastic=stochastic)
        return float(form.relative_errors(np.array([mu + k]), sigma, stochastic=stochastic, law=law)[0])
    if scale == "error":
        return _least_error(form, float(sigma), law, stochastic)[1]
    if scale == "mean":
        centres = np.array([-3.0])
    else:
        centres = math.log2(form.max) - _quantile(sigma, count, law) - (np.arange(8) + 0.5) / 8
    return float(form.relative_errors(centres, sigma, stochastic=stochastic, law=law).mean())


def format_thresholds(bits: int, largest_sigma: float = 8.0) -> tuple[tuple[float, FloatFormat], ...]:
    """From which sigma of log2|x| on each format is optimal with the error-optimal scale, to 1e-4.

    Returns:
        (sigma, format) pairs, ascending; the first sigma is 0.
    """
    found: list[tuple[float, FloatFormat]] = []

    def better(sigma: float, narrow: FloatFormat, wide: FloatFormat) -> bool:
        return placed_error(wide, sigma) < placed_error(narrow, sigma)

    forms = candidates(bits)
    found.append((0.0, forms[0]))
    for wide in forms[1:]:
        low, high, narrow = max(found[-1][0], 0.25), largest_sigma, found[-1][1]
        if not better(high, narrow, wide):
            break
        while high - low > 1e-4:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if better(middle, narrow, wide) else (middle, high)
        found.append((high, wide))
    return tuple(found)


def best_centre(form: FloatFormat, sigma: float, law: LawName = "lognormal", *, stochastic: bool = False) -> float:
    """The mean of log2|x| after scaling at which the expected relative error is least, the scale being free."""
    return _least_error(form, float(sigma), law, stochastic)[0]


@lru_cache(maxsize=4096)
def _least_error(form: FloatFormat, sigma: float, law: LawName, stochastic: bool) -> tuple[float, float]:
    from scipy.optimize import minimize_scalar

    low, high = _window(form)
    centres = np.arange(low, high + _STEP, _STEP)
    errors = form.relative_errors(centres, sigma, stochastic=stochastic, law=law)
    start = int(np.argmin(errors))
    refined = minimize_scalar(
        lambda at: float(form.relative_errors(np.array([at]), sigma, stochastic=stochastic, law=law)[0]),
        bounds=(centres[start] - _STEP, centres[start] + _STEP),
        method="bounded",
        options={"xatol": 1e-7},
    )
    if refined.fun < errors[start]:
        return float(refined.x), float(refined.fun)
    return float(centres[start]), float(errors[start])


def _window(form: FloatFormat) -> tuple[float, float]:
    """Where the mean of log2|x| can usefully be put: within the format."""
    return math.log2(form.min_positive) - 1.0, math.log2(form.max) + 1.0


def _quantile(sigma: float, count: int, law: LawName) -> float:
    """log2 of the magnitude that 1 / count of the values exceed, less the mean of log2."""
    from scipy.special import ndtri

    if count <= 1:
        return 0.0
    if law == "normal":
        return math.log2(float(-ndtri(0.5 / count))) - NORMAL_MU
    return sigma * float(-ndtri(1.0 / count))


def _check(rule: str, law: str, sigma: float, count: int) -> None:
    if rule not in RULES:
        raise UsageError(f"scale: '{rule}' is unknown; {suggest(rule, RULES)}")
    if law not in LAWS:
        raise UsageError(f"law: '{law}' is unknown; {suggest(law, LAWS)}")
    if not (math.isfinite(sigma) and sigma >= 0) or count < 1:
        raise UsageError(f"sigma={sigma:g}, count={count}: sigma must be finite and not negative, count at least 1")


class Rounded(NamedTuple):
    """Sums over the non-zero values of a tensor.

    Attributes:
        squared_error: expected sum of (Q(x) - x)^2.
        squared_bias: sum of (E Q(x) - x)^2.
        counts: float64[codes], expected number of values at each magnitude; non-zero ones alone.
        saturated: how many lie above the largest magnitude.
    """

    squared_error: float
    squared_bias: float
    counts: Floats
    saturated: float


def expected_rounding(form: FloatFormat, scale: float, sketch: MomentSketch, *, stochastic: bool) -> Rounded:
    """Expectations of rounding to ``form`` times ``scale`` (a power of two), from a sketch with norm ``none``."""
    grid = form.exact_levels * scale
    decoded = form.decode_blocks(np.arange(grid.size, dtype=np.uint16), grid.size, np.array([scale])).astype(np.float64)
    low = sketch.lower
    count, first, second = sketch.sums[:, 0], sketch.sums[:, 1], sketch.sums[:, 2]
    on_edge = first == 0
    above = (low >= grid[-1]) & ~((low == grid[-1]) & on_edge)
    found = _stochastic if stochastic else _nearest
    error, bias, counts = found(grid, decoded, low, (count, first, second), on_edge)
    return Rounded(error, bias, counts, float(count[above].sum()))


class Placement(NamedTuple):
    """Where a scale puts the values of a tensor in a format.

    Attributes:
        squared_error: expected sum of (Q(x) - x)^2.
        exponent: the k of the 2^k by which values are multiplied.
    """

    squared_error: float
    exponent: int


def best_placement(
    form: FloatFormat, sketch: MomentSketch, *, stochastic: bool, exponent: int | None = None
) -> Placement:
    """The power of two with the least expected squared error, exact over all of them.

    Args:
        form: the format.
        sketch: of the values, with norm ``none`` and at least one non-zero value.
        stochastic: the error is that of stochastic rounding.
        exponent: the only k to look at.
    """
    found: Placement = sketch.remember(
        ("placement", form, stochastic, exponent), lambda: _best_placement(form, sketch, stochastic, exponent)
    )
    return found


def _best_placement(form: FloatFormat, sketch: MomentSketch, stochastic: bool, exponent: int | None) -> Placement:
    levels, largest = form.exact_levels, float(np.finfo(np.float32).max)

    def errors(k: int) -> tuple[float, float]:
        found: tuple[float, float] = rounding_error(sketch.lower, sketch.sums, levels, 2.0**-k, largest, stochastic)
        return found

    if exponent is not None:
        return Placement(errors(exponent)[0], exponent)
    # The numbers at k - 1 are among those at k, but for the largest ones. So nothing is lost by starting where the
    # largest value just fits; and from there on only clipping grows, so that it ends the search.
    top, most = math.frexp(form.max), math.frexp(sketch.largest)
    k = min(max(top[1] - most[1] - (most[0] > top[0]), LEAST_SCALE), LARGEST_SCALE)
    best = Placement(errors(k)[0], k)
    clipped = 0.0
    while clipped < best.squared_error and k < LARGEST_SCALE:
        k += 1
        error, clipped = errors(k)
        best = min(best, Placement(error, k))
    return best


def _nearest(grid: Floats, decoded: Floats, low: Floats, sums: _Sums, on_edge: Flags) -> _Found:
    count, first, second = sums
    middle = (grid[:-1] + grid[1:]) / 2
    code = np.searchsorted(middle, low, side="right")
    # A bin whose values all sit on its lower edge is a tie where that edge is a midpoint: to the even code.
    tie = on_edge & (code > 0)
    tie[tie] = middle[code[tie] - 1] == low[tie]
    code -= tie & (code % 2 == 1)
    off = low - decoded[code]
    error = float(np.sum(off * off * count + 2 * off * first + second))
    return error, error, np.bincount(code, count, grid.size).astype(np.float64)


def _stochastic(grid: Floats, decoded: Floats, low: Floats, sums: _Sums, on_edge: Flags) -> _Found:
    del on_edge
    count, first, second = sums
    code = np.searchsorted(grid, low, side="right") - 1
    top = grid.size - 1
    inside = code < top
    over = low[~inside] - decoded[top]
    clipped = float(np.sum(over * over * count[~inside] + 2 * over * first[~inside] + second[~inside]))
    code, low, count, first, second = code[inside], low[inside], count[inside], first[inside], second[inside]
    below, above = low - grid[code], grid[code + 1] - low
    error = float(np.sum(below * above * count + (above - below) * first - second))
    up = (below * count + first) / (grid[code + 1] - grid[code])
    counts: Floats = np.bincount(code, count - up, grid.size).astype(np.float64)
    counts += np.bincount(code + 1, up, grid.size)
    counts[top] += float(sums[0].sum() - count.sum())
    return error + clipped, clipped, counts
