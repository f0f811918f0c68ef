"""Float formats 1-E-M: their numbers, their relative error under a law of magnitudes, and the best one for a tensor.

Laws are given by mean and standard deviation of log2|x|. Formulas follow Chmiel et al., Neural gradients are
near-lognormal, 2021, Sections 4 and 5; the printed Eq. (4) is wrong, so the exact sum is computed. A format is judged
with the values placed by the scale rule that will be used: the ``max`` rule has another best format than the
best scale.

|Q(x) - x| / x is linear in x and 1 / x inside a cell of the grid, so its mean is a finite sum of partial moments. They
are computed as tails relative to the nearest boundary, which neither overflow nor cancel for wide laws.

A sketched tensor needs no law: numbers of a format times a power of two, and the midpoints
between them, are edges of the sketch's bins, so every bin is inside one rounding cell and sums are
exact. Only ties within a bin that also holds other values are unknown to a sketch; they are counted as rounded up.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import scipy as sp

from gtrace.buckets import MANTISSA, as_values
from gtrace.errors import UsageError, suggest
from gtrace.fitting.sparsity import lowest
from gtrace.kernels import floats as _floats

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gtrace.kernels import Bytes, Floats, Singles, Symbols
    from gtrace.sketch import MomentSketch

#: widest exponent: numbers of wider ones do not fit into float32
LARGEST_EXPONENT = 7
#: widest mantissa: every midpoint between two numbers is an edge between two bins of a sketch
LARGEST_MANTISSA = MANTISSA - 1
#: widest format: codes are uint16
LARGEST_BITS = 16
_WORD = re.compile(r"e([1-9])m([0-9]+)(fn|inf)?")
_ONE = np.ones(1)
_NO_BYTES, _NO_CODES = np.empty(0, np.uint8), np.empty(0, np.uint16)


@dataclass(frozen=True, order=True)
class FloatFormat:
    """A float format with sign, subnormals, and (unless codes are reserved) neither infinity nor NaN.

    The bias is 2^(E-1) - 1; magnitudes above the largest saturate.

    Attributes:
        exponent: E, 1 to 7 bits.
        mantissa: M, 0 to 9 bits.
        reserved: number of top codes without a finite value: 0; 1 (the NaN of OCP's E4M3); or 2^M (infinity and
            NaN of OCP's E5M2).

    >>> str(FloatFormat(3, 2)), FloatFormat(3, 2).max, FloatFormat.parse("e4m3fn").max
    ('1-3-2', 28.0, 448.0)
    """

    exponent: int
    mantissa: int
    reserved: int = 0

    def __post_init__(self) -> None:
        """Check the fields.

        Raises:
            UsageError: widths or reserved codes that are not allowed.
        """
        fits = 1 <= self.exponent <= LARGEST_EXPONENT and 0 <= self.mantissa <= LARGEST_MANTISSA
        if not (fits and self.bits <= LARGEST_BITS):
            raise UsageError(
                f"float format 1-{self.exponent}-{self.mantissa}: exponents have 1 to {LARGEST_EXPONENT} bits, "
                f"mantissas 0 to {LARGEST_MANTISSA}, formats at most {LARGEST_BITS}"
            )
        if self.reserved and (self.mantissa == 0 or self.reserved not in (1, 1 << self.mantissa)):
            raise UsageError(f"float format {self}: {self.reserved} reserved codes; give 0, 1 or 2^M with M above 0")

    def __str__(self) -> str:
        return f"1-{self.exponent}-{self.mantissa}" + self._suffix

    @classmethod
    def parse(cls, text: str) -> FloatFormat:
        """A format from ``e3m2`` or ``1-3-2``; suffix ``fn`` reserves NaN's code, ``inf`` infinity's and NaN's.

        Raises:
            UsageError: text that is neither, or a format that does not exist.
        """
        match = _WORD.fullmatch(text) or re.fullmatch(r"1-(\d+)-(\d+)(fn|inf)?", text)
        if not match:
            raise UsageError(f"float format '{text}': write eXmY, such as e3m2")
        exponent, mantissa = int(match[1]), int(match[2])
        reserved = {None: 0, "fn": 1, "inf": 1 << min(mantissa, 16)}[match[3]]
        return cls(exponent, mantissa, reserved)

    @property
    def _suffix(self) -> str:
        return "" if not self.reserved else "fn" if self.reserved == 1 else "inf"

    @property
    def name(self) -> str:
        """The format in the notation of :meth:`parse`: ``e3m2``."""
        return f"e{self.exponent}m{self.mantissa}{self._suffix}"

    @property
    def bits(self) -> int:
        """1 + E + M."""
        return 1 + self.exponent + self.mantissa

    @property
    def bias(self) -> int:
        """2^(E-1) - 1."""
        return (1 << (self.exponent - 1)) - 1

    @property
    def top(self) -> int:
        """The largest code of a magnitude."""
        return (1 << (self.exponent + self.mantissa)) - 1 - self.reserved

    @property
    def max(self) -> float:
        """The largest magnitude."""
        return float(self.exact_levels[-1])

    @property
    def min_positive(self) -> float:
        """The smallest positive magnitude."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def levels(self) -> Singles:
        """Magnitudes by code, float32[top + 1]: ascending, 0 first."""
        return self.exact_levels.astype(np.float32)

    @property
    def exact_levels(self) -> Floats:
        """The same as float64, for sums; read-only."""
        return _levels(self)

    def encode(self, x: ArrayLike, key: tuple[int, int] | None = None) -> Symbols:
        """Codes sign, exponent, mantissa (uint16[n]) of the nearest numbers, ties to the even code.

        Args:
            x: real numbers of any shape, taken as float32; infinities saturate.
            key: round stochastically to one of the two neighbours, without bias, with these two 64-bit words.

        Raises:
            UsageError: NaN, or values that are not real numbers.
        """
        values = as_values(x)
        if np.isnan(values).any():
            raise UsageError(f"float format {self}: value {int(np.flatnonzero(np.isnan(values))[0])} is NaN")
        return self.encode_blocks(values, max(1, values.size), _ONE[: values.size], key)

    def encode_blocks(
        self, values: Singles, block: int, factors: Floats, key: tuple[int, int] | None = None, start: int = 0
    ) -> Symbols:
        """Like :meth:`encode`, for float32[n] without NaN, each block times its own factor.

        Powers of two multiply exactly; other factors must be float32, and the products are rounded to float32.
        ``start`` is the first value's index for the key.
        """
        out = np.empty(values.size, np.uint16)
        if key is None:
            _floats.encode_nearest(values, block, factors, *self._numbers, 0, _NO_BYTES, out)
        else:
            words = (np.uint64(key[0]), np.uint64(key[1]), start)
            single = bool((np.frexp(factors)[0] != 0.5).any())
            _floats.encode_stochastic(values, block, factors, single, *self._numbers, *words, out)
        return out

    def pack_blocks(self, values: Singles, block: int, factors: Floats, out: Bytes) -> None:
        """Write the codes of :meth:`encode_blocks` to the nearest number in ``bits`` bits each, in one pass.

        ``out`` is from :func:`gtrace.coding.packed_room`.
        """
        _floats.encode_nearest(values, block, factors, *self._numbers, self.bits, out, _NO_CODES)

    @property
    def _numbers(self) -> tuple[int, int, int, int]:
        """Of kernels: mantissa, bias, largest code, and the bit of the sign."""
        return self.mantissa, self.bias, self.top, 1 << (self.exponent + self.mantissa)

    def decode(self, codes: ArrayLike) -> Singles:
        """The numbers of codes, float32[n].

        Raises:
            UsageError: a code without a finite value.
        """
        given = np.asarray(codes).reshape(-1)
        sign = 1 << (self.exponent + self.mantissa)
        if given.size and not (given.min() >= 0 and given.max() < 2 * sign and (given & (sign - 1)).max() <= self.top):
            raise UsageError(f"float format {self}: a code has no finite value")
        return self.decode_blocks(given.astype(np.uint16), max(1, given.size), _ONE[: given.size])

    def decode_blocks(self, codes: Symbols, block: int, scales: Floats) -> Singles:
        """Numbers of valid codes, each block times its own scale, at most the largest float32; float32[n]."""
        out = np.empty(codes.size, np.float32)
        _floats.restore(codes, block, scales, _signed_levels(self), float(np.finfo(np.float32).max), out)
        return out

    def round(self, x: ArrayLike, key: tuple[int, int] | None = None) -> Singles:
        """The nearest numbers of the format, float32[n]; see :meth:`encode`.

        >>> [float(v) for v in FloatFormat(3, 0).round([1.5, 3.0, 1000.0, -0.0])]
        [2.0, 2.0, 16.0, -0.0]
        """
        return self.decode(self.encode(x, key))

    def expected_relative_error(
        self, mu: float, sigma: float, *, stochastic: bool = False, law: LawName = "lognormal"
    ) -> float:
        """E |Q(x) - x| / x, exact: a finite sum of partial moments over the rounding cells.

        Args:
            mu: mean of log2 x.
            sigma: standard deviation of log2 x; ignored for ``law="normal"``, whose logarithm has a fixed one.
            stochastic: for unbiased rounding instead of nearest.
            law: law of x; ``normal`` means that x is the magnitude of a normal number.

        Raises:
            UsageError: a negative sigma, or numbers that are not finite.
        """
        if not (math.isfinite(mu) and math.isfinite(sigma) and sigma >= 0):
            raise UsageError(f"relative error: mu={mu:g}, sigma={sigma:g}; give finite numbers, sigma not negative")
        return float(self.relative_errors(np.array([float(mu)]), float(sigma), stochastic=stochastic, law=law)[0])

    def relative_errors(self, mu: Floats, sigma: float, *, stochastic: bool, law: LawName) -> Floats:
        """Like :meth:`expected_relative_error`, unchecked, for several means of log2 x at once (float64[n] to [n])."""
        if sigma < 1e-9 and law == "lognormal":
            return point_error(self.exact_levels, 2.0**mu, stochastic=stochastic)
        found = stochastic_error if stochastic else nearest_error
        if law == "normal":
            return found(self.exact_levels, HalfNormalMagnitudes(2.0 ** (mu[:, None] - NORMAL_MU)))
        return found(self.exact_levels, LogNormalMagnitudes(mu[:, None], sigma))


@cache
def _levels(form: FloatFormat) -> Floats:
    out: Floats
    code = np.arange(form.top + 1)
    field, fraction = code >> form.mantissa, code & ((1 << form.mantissa) - 1)
    significand = np.where(field > 0, fraction + (1 << form.mantissa), fraction)
    out = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - form.bias - form.mantissa)
    out.setflags(write=False)
    return out


@cache
def _signed_levels(form: FloatFormat) -> Floats:
    out = np.zeros(2 << (form.exponent + form.mantissa))
    out[: form.top + 1] = form.exact_levels
    out[out.size // 2 : out.size // 2 + form.top + 1] = -form.exact_levels
    return out


def kappa(mantissa: int) -> float:
    """Mean of |Q(x) - x| / x over one binade with log2 x uniform; the correct 1 / (8 ln 2 (2^M - 1)) of Eq. (4).

    >>> [round(kappa(m), 4) for m in range(4)]
    [0.1699, 0.0886, 0.0449, 0.0225]
    """
    low = (1 << mantissa) + np.arange(1 << mantissa, dtype=np.float64)
    return float(np.sum(np.log2((low + 0.5) ** 2 / (low * (low + 1)))))


LawName: TypeAlias = Literal["lognormal", "normal"]

_ROOT_2 = math.sqrt(2.0)
_LN2 = math.log(2.0)
#: mean of log2 of a half-normal |z|
NORMAL_MU = -(np.euler_gamma + _LN2) / (2.0 * _LN2)


#: a law of |x|, or one for each of several shifts; points are float64[p], results float64[shifts, p]
MagnitudeLaw: TypeAlias = "LogNormalMagnitudes | HalfNormalMagnitudes"


@dataclass(frozen=True, slots=True)
class LogNormalMagnitudes:
    """log2 x is normal.

    Attributes:
        mu: float64[shifts, 1], means of log2 x.
        sigma: its standard deviation, positive.
    """

    mu: Floats
    sigma: float

    def mass(self, low: Floats, high: Floats) -> Floats:
        """P(low < x < high), from the tail that is nearer."""
        a, b = self._standard(low), self._standard(high)
        right = a > 0
        return sp.special.ndtr(np.where(right, -a, b)) - sp.special.ndtr(np.where(right, -b, a))

    def ratio(self, power: int, unit: Floats, low: Floats, high: Floats) -> Floats:
        """E[(x / unit)^power; low < x < high], power 1 or -1."""
        spread = self.sigma * _LN2
        at_low, at_high = self._tail(power, unit, low), self._tail(power, unit, high)
        shift = power * spread
        left, right = self._standard(high) <= shift, self._standard(low) >= shift
        # The whole mean is needed only if the interval holds the peak of the tilted law; there it is moderate.
        exponent = np.minimum(0.5 * spread * spread - shift * self._standard(unit), 700.0)
        middle = np.exp(exponent) - at_low - at_high
        return np.where(right, at_low - at_high, np.where(left, at_high - at_low, middle))

    def _standard(self, points: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            out: Floats = (np.log2(points) - self.mu) / self.sigma
        return out

    def _tail(self, power: int, unit: Floats, point: Floats) -> Floats:
        """The part of E[(x / unit)^power] beyond ``point``, seen from the tilted law's peak; 0 at 0 and infinity."""
        inner = (point > 0) & np.isfinite(point)
        at = np.where(inner, point, unit)
        t = self._standard(at)
        tilted = np.abs(t - power * self.sigma * _LN2) / _ROOT_2
        tail = 0.5 * (at / unit) ** float(power) * np.exp(-0.5 * t * t) * sp.special.erfcx(tilted)
        return np.where(inner, tail, 0.0)


@dataclass(frozen=True, slots=True)
class HalfNormalMagnitudes:
    """x is the magnitude of a normal number with mean 0.

    Attributes:
        deviation: float64[shifts, 1], its standard deviations.
    """

    deviation: Floats

    def mass(self, low: Floats, high: Floats) -> Floats:
        """P(low < x < high)."""
        a, b = low / (self.deviation * _ROOT_2), high / (self.deviation * _ROOT_2)
        return np.where(a > 0.5, sp.special.erfc(a) - sp.special.erfc(b), sp.special.erf(b) - sp.special.erf(a))

    def ratio(self, power: int, unit: Floats, low: Floats, high: Floats) -> Floats:
        """E[(x / unit)^power; low < x < high]; with power -1 low must be positive."""
        a, b = 0.5 * (low / self.deviation) ** 2, 0.5 * (high / self.deviation) ** 2
        if power > 0:
            return math.sqrt(2 / math.pi) * self.deviation / unit * (np.exp(-a) - np.exp(-b))
        return unit / (self.deviation * math.sqrt(2 * math.pi)) * (sp.special.exp1(a) - sp.special.exp1(b))


def nearest_error(levels: Floats, law: MagnitudeLaw) -> Floats:
    """E |Q(x) - x| / x for rounding to the nearest of ``levels`` (float64[m], 0 first); float64[shifts]."""
    own = levels[1:]
    low = (levels[:-1] + own) / 2
    high = np.append(low[1:], np.inf)
    above = law.mass(own, high) - law.ratio(-1, own, own, high)
    below = law.ratio(-1, own, low, own) - law.mass(low, own)
    flushed = law.mass(np.zeros(1), low[:1])
    return (above + below).sum(axis=1) + flushed[:, 0]


def stochastic_error(levels: Floats, law: MagnitudeLaw) -> Floats:
    """E |Q(x) - x| / x for unbiased rounding to a neighbour, saturating above the last level; float64[shifts]."""
    low, high, top = levels[1:-1], levels[2:], levels[-1:]
    width = (high - low) / high
    inner = (1 + low / high) * law.mass(low, high) - law.ratio(1, high, low, high) - law.ratio(-1, low, low, high)
    first, zero, end = levels[1:2], np.zeros(1), np.full(1, np.inf)
    bottom = 2 * (law.mass(zero, first) - law.ratio(1, first, zero, first))
    clipped = law.mass(top, end) - law.ratio(-1, top, top, end)
    return (2 * inner / width).sum(axis=1) + bottom[:, 0] + clipped[:, 0]


def point_error(levels: Floats, x: Floats, *, stochastic: bool) -> Floats:
    """E |Q(x) - x| / x at single magnitudes, float64[n]: the laws without spread."""
    cell = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, levels.size - 2)
    down, up = x - levels[cell], levels[cell + 1] - x
    inside = 2 * down * up / (down + up) if stochastic else np.minimum(down, up)
    return np.where(up < 0, -up, inside) / x


ScaleRule: TypeAlias = Literal["max", "mean", "error", "absmax"]
RULES: tuple[ScaleRule, ...] = get_args(ScaleRule)
LAWS: tuple[LawName, ...] = get_args(LawName)

#: powers of two that a scale may multiply by: 2^-k must be a float32
LEAST_SCALE, LARGEST_SCALE = -127, 149
#: narrowest exponent that an automatic choice considers
LEAST_EXPONENT = 2
#: step of the search for a scale other than a power of two, in octaves, before refinement
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
    """The k of the power of two by which x is multiplied before rounding to a format.

    Args:
        form: the format.
        rule: ``max`` puts the largest of ``count`` values, as the law expects it, below the format's largest number:
            k = floor(log2 max - mu - sigma Phi^-1(1 - 1 / count)); ``mean`` is the nearest to -mu - 3; ``error`` has
            the least expected relative error; ``absmax`` is ``max`` with the actual largest value. On
            captured gradients a fitted lognormal law reaches octaves further than the data do.
        mu: mean of log2|x| over non-zero values.
        sigma: its standard deviation.
        count: number of values; a single one is its own largest.
        largest: log2 of the largest magnitude, for rule ``absmax``, which without it equals ``max``.
        law: law of the quantile and of the error.
        stochastic: use the error of stochastic rounding.

    Raises:
        UsageError: an unknown rule or law, a count below 1, or a mu or sigma that is not finite.
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
    """The format of ``bits`` bits (2 to 7 of exponent) with the least expected relative error under a scale rule.

    Args:
        bits: 1 + E + M, 2 (the one format 1-1-0) to 16.
        sigma: standard deviation of log2|x|.
        scale: the rule that places the values; see :func:`scale_exponent`.
        law: ``lognormal``, or ``normal`` for users who assume normal gradients.
        count: number of values; used by rules ``max`` and ``absmax`` only.
        mu: mean of log2|x|: the scale is then a power of two; without it the scale is free, and with rule ``max`` the
            error is a mean over where mu may fall between two powers.
        largest: log2 of the largest magnitude, for rule ``absmax`` if mu is given.
        stochastic: use stochastic rounding.

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
        UsageError: there are no such formats.
    """
    if not 2 <= bits <= LARGEST_BITS:
        raise UsageError(f"float formats: there is none of {bits} bits; give 2 to {LARGEST_BITS}")
    widths = range(min(LEAST_EXPONENT, bits - 1), min(LARGEST_EXPONENT, bits - 1) + 1)
    return tuple(FloatFormat(e, bits - 1 - e) for e in widths if bits - 1 - e <= LARGEST_MANTISSA)


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
        return _least_error(form, float(sigma), law, stochastic)
    if scale == "mean":
        centres = np.array([-3.0])
    else:
        centres = math.log2(form.max) - _quantile(sigma, count, law) - (np.arange(8) + 0.5) / 8
    return float(form.relative_errors(centres, sigma, stochastic=stochastic, law=law).mean())


def format_thresholds(bits: int, largest_sigma: float = 8.0) -> tuple[tuple[float, FloatFormat], ...]:
    """The sigma of log2|x| from which each format is optimal with the error-optimal scale, to 1e-4.

    Returns:
        (sigma, format) pairs, ascending; the first sigma is 0.
    """

    def better(sigma: float, narrow: FloatFormat, wide: FloatFormat) -> bool:
        return placed_error(wide, sigma) < placed_error(narrow, sigma)

    first, *others = candidates(bits)
    found = [(0.0, first)]
    for wide in others:
        low, high, narrow = max(found[-1][0], 0.25), largest_sigma, found[-1][1]
        if not better(high, narrow, wide):
            break
        while high - low > 1e-4:
            middle = 0.5 * (low + high)
            low, high = (low, middle) if better(middle, narrow, wide) else (middle, high)
        found.append((high, wide))
    return tuple(found)


@lru_cache(maxsize=4096)
def _least_error(form: FloatFormat, sigma: float, law: LawName, stochastic: bool) -> float:
    low, high = _window(form)
    centres = np.arange(low, high + _STEP, _STEP)
    errors = form.relative_errors(centres, sigma, stochastic=stochastic, law=law)
    start = int(np.argmin(errors))
    _, refined = lowest(
        lambda at: float(form.relative_errors(np.array([at]), sigma, stochastic=stochastic, law=law)[0]),
        centres[start] - _STEP,
        centres[start] + _STEP,
        1e-7,
    )
    return min(refined, float(errors[start]))


def _window(form: FloatFormat) -> tuple[float, float]:
    """The useful range for the mean of log2|x|: within the format."""
    return math.log2(form.min_positive) - 1.0, math.log2(form.max) + 1.0


def _quantile(sigma: float, count: int, law: LawName) -> float:
    """log2 of the magnitude that 1 / count of the values exceed, minus the mean of log2."""
    if count <= 1:
        return 0.0
    if law == "normal":
        return math.log2(float(-sp.special.ndtri(0.5 / count))) - NORMAL_MU
    return sigma * float(-sp.special.ndtri(1.0 / count))


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
        saturated: number of values above the largest magnitude.
    """

    squared_error: float
    squared_bias: float
    counts: Floats
    saturated: float


def expected_rounding(form: FloatFormat, scale: float, sketch: MomentSketch, *, stochastic: bool) -> Rounded:
    """Expectations of rounding to ``form`` times ``scale`` (a power of two), from a sketch with norm ``none``."""
    grid = form.exact_levels * scale
    decoded = form.decode_blocks(np.arange(grid.size, dtype=np.uint16), grid.size, np.array([scale])).astype(np.float64)
    above = (sketch.lower >= grid[-1]) & ~((sketch.lower == grid[-1]) & (sketch.sums[:, 1] == 0))
    error, bias, counts = (_stochastic if stochastic else _nearest)(grid, decoded, sketch)
    return Rounded(error, bias, counts, float(sketch.sums[above, 0].sum()))


class Placement(NamedTuple):
    """A scale for a tensor in a format, and its error.

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
        sketch: sketch of the values, with norm ``none`` and at least one non-zero value.
        stochastic: use the error of stochastic rounding.
        exponent: the only k to consider.
    """
    levels, largest = form.exact_levels, float(np.finfo(np.float32).max)

    def errors(k: int) -> tuple[float, float]:
        return _floats.rounding_error(sketch.lower, sketch.sums, levels, 2.0**-k, largest, stochastic)

    def search() -> Placement:
        if exponent is not None:
            return Placement(errors(exponent)[0], exponent)
        # The numbers at k - 1 are also numbers at k, except the largest ones. So the search can start where the
        # largest value just fits; from there on only clipping grows, which ends the search.
        top, most = math.frexp(form.max), math.frexp(sketch.largest)
        k = min(max(top[1] - most[1] - (most[0] > top[0]), LEAST_SCALE), LARGEST_SCALE)
        best = Placement(errors(k)[0], k)
        clipped = 0.0
        while clipped < best.squared_error and k < LARGEST_SCALE:
            k += 1
            error, clipped = errors(k)
            best = min(best, Placement(error, k))
        return best

    return sketch.remember(("placement", form, stochastic, exponent), search)


def _nearest(grid: Floats, decoded: Floats, sketch: MomentSketch) -> tuple[float, float, Floats]:
    low, (count, first, second) = sketch.lower, sketch.sums[:, :3].T
    middle = (grid[:-1] + grid[1:]) / 2
    code = np.searchsorted(middle, low, side="right")
    # If all values of a bin are on its lower edge and the edge is a midpoint, they are ties: to the even code.
    tie = (first == 0) & (code > 0)
    tie[tie] = middle[code[tie] - 1] == low[tie]
    code -= tie & (code % 2 == 1)
    off = low - decoded[code]
    error = float(np.sum(off * off * count + 2 * off * first + second))
    return error, error, np.bincount(code, count, grid.size).astype(np.float64)


def _stochastic(grid: Floats, decoded: Floats, sketch: MomentSketch) -> tuple[float, float, Floats]:
    low, (count, first, second) = sketch.lower, sketch.sums[:, :3].T
    everything = float(count.sum())
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
    counts[top] += everything - float(count.sum())
    return error + clipped, clipped, counts
