"""Which float format and which power of two suit a tensor: by the expected relative error under a law of log2|x|.

After Chmiel et al., Neural gradients are near-lognormal, 2021, Sections 4 and 5. A format is judged where the scale
rule that will be used puts the values: with the ``max`` rule the best format is another than with the best scale.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.fitting.floats import LARGEST_BITS, LARGEST_EXPONENT, LARGEST_MANTISSA, FloatFormat
from gtrace.fitting.relative_error import NORMAL_MU, Law

ScaleRule: TypeAlias = Literal["max", "mean", "error", "absmax"]
RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
LAWS: tuple[Law, ...] = ("lognormal", "normal")

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
    law: Law = "lognormal",
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
    law: Law = "lognormal",
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
    law: Law = "lognormal",
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


def best_centre(form: FloatFormat, sigma: float, law: Law = "lognormal", *, stochastic: bool = False) -> float:
    """The mean of log2|x| after scaling at which the expected relative error is least, the scale being free."""
    return _least_error(form, float(sigma), law, stochastic)[0]


@lru_cache(maxsize=4096)
def _least_error(form: FloatFormat, sigma: float, law: Law, stochastic: bool) -> tuple[float, float]:
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


def _quantile(sigma: float, count: int, law: Law) -> float:
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
