"""Float formats 1-E-M: their numbers, their codes, and the relative error they cost under a law of magnitudes.

Laws are given by mean and standard deviation of log2|x|. Formulas follow Chmiel et al., Neural gradients are
near-lognormal, 2021, Section 4; where the printed Eq. (4) is off, the exact sum is computed.

|Q(x) - x| / x is linear in x and 1 / x inside a cell of the grid, so its mean is a finite sum of partial moments. Those
are taken as tails relative to the nearest boundary, which neither overflow nor cancel for wide laws.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np

from gtrace.buckets import MANTISSA, as_values
from gtrace.errors import UsageError
from gtrace.kernels import floats as _floats

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats, Singles, Symbols

#: widest exponent: the numbers of wider ones are no float32
LARGEST_EXPONENT = 7
#: widest mantissa: every midpoint between two numbers is an edge between two bins of a sketch
LARGEST_MANTISSA = MANTISSA - 1
#: widest format: codes are uint16
LARGEST_BITS = 16
_WORD = re.compile(r"e([1-9])m([0-9]+)(fn|inf)?")
_ONE = np.ones(1)


@dataclass(frozen=True, order=True)
class FloatFormat:
    """A float format with sign, subnormals, and (unless codes are reserved) neither infinity nor NaN.

    The bias is 2^(E-1) - 1; magnitudes above the largest saturate.

    Attributes:
        exponent: E, 1 to 7 bits.
        mantissa: M, 0 to 9 bits.
        reserved: codes at the top that stand for no finite number: 0; 1 (the NaN of OCP's E4M3); or 2^M (infinity and
            NaN of OCP's E5M2).

    >>> str(FloatFormat(3, 2)), FloatFormat(3, 2).max, FloatFormat.parse("e4m3fn").max
    ('1-3-2', 28.0, 448.0)
    """

    exponent: int
    mantissa: int
    reserved: int = 0

    def __post_init__(self) -> None:
        """Check.

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
        """As :meth:`parse` reads it: ``e3m2``."""
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
    def min_normal(self) -> float:
        """The smallest magnitude with a leading one: 2^(1 - bias)."""
        return 2.0 ** (1 - self.bias)

    @property
    def min_positive(self) -> float:
        """The smallest magnitude but zero."""
        return 2.0 ** (1 - self.bias - self.mantissa)

    @property
    def levels(self) -> Singles:
        """MagnitudeLaw by code, float32[top + 1]: ascending, 0 first."""
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
            UsageError: NaN, or what are not real numbers.
        """
        values = as_values(x)
        if np.isnan(values).any():
            raise UsageError(f"float format {self}: value {int(np.flatnonzero(np.isnan(values))[0])} is NaN")
        return self.encode_blocks(values, max(1, values.size), _ONE[: values.size], key)

    def encode_blocks(
        self, values: Singles, block: int, factors: Floats, key: tuple[int, int] | None = None, start: int = 0
    ) -> Symbols:
        """As :meth:`encode`, for float32[n] without NaN, each block times a factor of its own.

        Powers of two multiply exactly; other factors must be float32, and the products are rounded to float32.
        ``start`` is the key's number of the first value.
        """
        out = np.empty(values.size, np.uint16)
        single = bool((np.frexp(factors)[0] != 0.5).any())
        form = (self.mantissa, self.bias, self.top, 1 << (self.exponent + self.mantissa))
        if key is None:
            _floats.encode_nearest(values, block, factors, single, *form, out)
        else:
            words = (np.uint64(key[0]), np.uint64(key[1]), start)
            _floats.encode_stochastic(values, block, factors, single, *form, *words, out)
        return out

    def decode(self, codes: ArrayLike) -> Singles:
        """The numbers of codes, float32[n].

        Raises:
            UsageError: a code that stands for no finite number.
        """
        given = np.asarray(codes).reshape(-1)
        sign = 1 << (self.exponent + self.mantissa)
        if given.size and not (given.min() >= 0 and given.max() < 2 * sign and (given & (sign - 1)).max() <= self.top):
            raise UsageError(f"float format {self}: a code stands for no number")
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
        codes = self.encode(x, key)
        return self.decode_blocks(codes, max(1, codes.size), _ONE[: codes.size])

    def expected_relative_error(
        self, mu: float, sigma: float, *, stochastic: bool = False, law: LawName = "lognormal"
    ) -> float:
        """E |Q(x) - x| / x, exact: a finite sum of partial moments over the rounding cells.

        Args:
            mu: mean of log2 x.
            sigma: standard deviation of log2 x; without effect for ``law="normal"``, whose logarithm has one spread.
            stochastic: for unbiased rounding instead of nearest.
            law: of x; ``normal`` means that x is the magnitude of a normal number.

        Raises:
            UsageError: a negative sigma, or numbers that are not finite.
        """
        if not (math.isfinite(mu) and math.isfinite(sigma) and sigma >= 0):
            raise UsageError(f"relative error: mu={mu:g}, sigma={sigma:g}; give finite numbers, sigma not negative")
        return float(self.relative_errors(np.array([float(mu)]), float(sigma), stochastic=stochastic, law=law)[0])

    def relative_errors(self, mu: Floats, sigma: float, *, stochastic: bool, law: LawName) -> Floats:
        """As :meth:`expected_relative_error`, unchecked, for several means of log2 x at once (float64[n] to [n])."""
        if sigma < 1e-9 and law == "lognormal":
            return point_error(self.exact_levels, 2.0**mu, stochastic=stochastic)
        found = stochastic_error if stochastic else nearest_error
        return found(self.exact_levels, magnitude_law(law, mu, sigma))

    def closed_form_error(self, sigma: float) -> float:
        """Eq. (4) of the paper at mu = 0, its mantissa term corrected to ``kappa(M)``.

        It treats every binade within 2^+-Emax alike and knows neither subnormals nor the format's own top, so it is
        off where sigma is small against the range; :meth:`expected_relative_error` is exact.

        Args:
            sigma: standard deviation of log2 x, positive.
        """
        reach = float(1 << (self.exponent - 1))
        inner = math.erf(reach / (sigma * math.sqrt(2.0)))
        spread = sigma * math.log(2.0)
        # 2^(Emax - 1) e^(a^2 / 2) (1 - erf(..)) as a scaled tail: the factors alone overflow.
        argument = (spread + reach / sigma) / math.sqrt(2.0)
        exponent = (reach - 1) * math.log(2.0) + 0.5 * spread**2 - argument**2
        tail = math.exp(exponent) * _scaled_erfc(argument)
        return inner * kappa(self.mantissa) - tail - 0.5 * inner + 1.5 - 0.5 * (1.0 + inner)


def _scaled_erfc(x: float) -> float:
    from scipy.special import erfcx

    return float(erfcx(x))


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
    """Mean of |Q(x) - x| / x over one binade with log2 x uniform; what the 1 / (8 ln 2 (2^M - 1)) of Eq. (4) means.

    >>> [round(kappa(m), 4) for m in range(4)]
    [0.1699, 0.0886, 0.0449, 0.0225]
    """
    low = (1 << mantissa) + np.arange(1 << mantissa, dtype=np.float64)
    return float(np.sum(np.log2((low + 0.5) ** 2 / (low * (low + 1)))))


LawName: TypeAlias = Literal["lognormal", "normal"]

_ROOT_2 = math.sqrt(2.0)
_LN2 = math.log(2.0)
#: log2 of a half-normal |z|: mean and standard deviation
NORMAL_MU = -(np.euler_gamma + _LN2) / (2.0 * _LN2)
NORMAL_SIGMA = math.pi / (2.0 * _ROOT_2 * _LN2)


class MagnitudeLaw(Protocol):
    """A law of |x|, or one for each of several shifts; points are float64[p], results float64[shifts, p]."""

    def mass(self, low: Floats, high: Floats) -> Floats:
        """P(low < x < high)."""

    def ratio(self, power: int, unit: Floats, low: Floats, high: Floats) -> Floats:
        """E[(x / unit)^power; low < x < high], power 1 or -1."""


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
        from scipy.special import ndtr

        a, b = self._standard(low), self._standard(high)
        right = a > 0
        out: Floats = ndtr(np.where(right, -a, b)) - ndtr(np.where(right, -b, a))
        return out

    def ratio(self, power: int, unit: Floats, low: Floats, high: Floats) -> Floats:
        """E[(x / unit)^power; low < x < high]."""
        spread = self.sigma * _LN2
        at_low, at_high = self._tail(power, unit, low), self._tail(power, unit, high)
        shift = power * spread
        left, right = self._standard(high) <= shift, self._standard(low) >= shift
        # The whole mean is needed only where the interval holds the peak of the tilted law; there it is moderate.
        exponent = np.minimum(0.5 * spread * spread - shift * self._standard(unit), 700.0)
        middle = np.exp(exponent) - at_low - at_high
        return np.where(right, at_low - at_high, np.where(left, at_high - at_low, middle))

    def _standard(self, points: Floats) -> Floats:
        with np.errstate(divide="ignore"):
            out: Floats = (np.log2(points) - self.mu) / self.sigma
        return out

    def _tail(self, power: int, unit: Floats, point: Floats) -> Floats:
        """The part of E[(x / unit)^power] beyond ``point``, seen from the tilted law's peak; 0 at 0 and infinity."""
        from scipy.special import erfcx

        inner = (point > 0) & np.isfinite(point)
        at = np.where(inner, point, unit)
        t = self._standard(at)
        tilted = np.abs(t - power * self.sigma * _LN2) / _ROOT_2
        tail = 0.5 * (at / unit) ** float(power) * np.exp(-0.5 * t * t) * erfcx(tilted)
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
        from scipy.special import erf, erfc

        a, b = low / (self.deviation * _ROOT_2), high / (self.deviation * _ROOT_2)
        out: Floats = np.where(a > 0.5, erfc(a) - erfc(b), erf(b) - erf(a))
        return out

    def ratio(self, power: int, unit: Floats, low: Floats, high: Floats) -> Floats:
        """E[(x / unit)^power; low < x < high]; with power -1 low must be positive."""
        from scipy.special import exp1

        a, b = 0.5 * (low / self.deviation) ** 2, 0.5 * (high / self.deviation) ** 2
        if power > 0:
            out: Floats = math.sqrt(2 / math.pi) * self.deviation / unit * (np.exp(-a) - np.exp(-b))
            return out
        inverse: Floats = unit / (self.deviation * math.sqrt(2 * math.pi)) * (exp1(a) - exp1(b))
        return inverse


def magnitude_law(law: LawName, mu: Floats, sigma: float) -> MagnitudeLaw:
    """The law with these means of log2 x (float64[shifts]); ``normal`` has no spread of its own to choose."""
    if law == "normal":
        return HalfNormalMagnitudes(2.0 ** (mu[:, None] - NORMAL_MU))
    return LogNormalMagnitudes(mu[:, None], sigma)


def nearest_error(levels: Floats, law: MagnitudeLaw) -> Floats:
    """E |Q(x) - x| / x for rounding to the nearest of ``levels`` (float64[m], 0 first); float64[shifts]."""
    own = levels[1:]
    low = (levels[:-1] + own) / 2
    high = np.append(low[1:], np.inf)
    above = law.mass(own, high) - law.ratio(-1, own, own, high)
    below = law.ratio(-1, own, low, own) - law.mass(low, own)
    flushed = law.mass(np.zeros(1), low[:1])
    out: Floats = (above + below).sum(axis=1) + flushed[:, 0]
    return out


def stochastic_error(levels: Floats, law: MagnitudeLaw) -> Floats:
    """E |Q(x) - x| / x for unbiased rounding to a neighbour, saturating above the last level; float64[shifts]."""
    low, high, top = levels[1:-1], levels[2:], levels[-1:]
    width = (high - low) / high
    inner = (1 + low / high) * law.mass(low, high) - law.ratio(1, high, low, high) - law.ratio(-1, low, low, high)
    first, zero, end = levels[1:2], np.zeros(1), np.full(1, np.inf)
    bottom = 2 * (law.mass(zero, first) - law.ratio(1, first, zero, first))
    clipped = law.mass(top, end) - law.ratio(-1, top, top, end)
    out: Floats = (2 * inner / width).sum(axis=1) + bottom[:, 0] + clipped[:, 0]
    return out


def point_error(levels: Floats, x: Floats, *, stochastic: bool) -> Floats:
    """E |Q(x) - x| / x at single magnitudes, float64[n]: the laws without spread."""
    cell = np.clip(np.searchsorted(levels, x, side="right") - 1, 0, levels.size - 2)
    down, up = x - levels[cell], levels[cell + 1] - x
    inside = 2 * down * up / (down + up) if stochastic else np.minimum(down, up)
    out: Floats = np.where(up < 0, -up, inside) / x
    return out
