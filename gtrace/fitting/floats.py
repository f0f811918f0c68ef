"""Float formats 1-E-M: their numbers, their codes, and the relative error they cost under a law of magnitudes.

Laws are given by mean and standard deviation of log2|x|. Formulas follow Chmiel et al., Neural gradients are
near-lognormal, 2021, Section 4; where the printed Eq. (4) is off, the exact sum stands.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from gtrace.buckets import MANTISSA, as_values
from gtrace.errors import UsageError
from gtrace.fitting import relative_error as _error
from gtrace.kernels import floats as _floats

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.fitting.relative_error import Law

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
    def levels(self) -> NDArray[np.float32]:
        """Magnitudes by code, float32[top + 1]: ascending, 0 first."""
        return self.exact_levels.astype(np.float32)

    @property
    def exact_levels(self) -> NDArray[np.float64]:
        """The same as float64, for sums; read-only."""
        return _levels(self)

    def encode(self, x: ArrayLike, key: tuple[int, int] | None = None) -> NDArray[np.uint16]:
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
        self,
        values: NDArray[np.float32],
        block: int,
        factors: NDArray[np.float64],
        key: tuple[int, int] | None = None,
        start: int = 0,
    ) -> NDArray[np.uint16]:
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

    def decode(self, codes: ArrayLike) -> NDArray[np.float32]:
        """The numbers of codes, float32[n].

        Raises:
            UsageError: a code that stands for no finite number.
        """
        given = np.asarray(codes).reshape(-1)
        sign = 1 << (self.exponent + self.mantissa)
        if given.size and not (given.min() >= 0 and given.max() < 2 * sign and (given & (sign - 1)).max() <= self.top):
            raise UsageError(f"float format {self}: a code stands for no number")
        return self.decode_blocks(given.astype(np.uint16), max(1, given.size), _ONE[: given.size])

    def decode_blocks(self, codes: NDArray[np.uint16], block: int, scales: NDArray[np.float64]) -> NDArray[np.float32]:
        """Numbers of valid codes, each block times its own scale, at most the largest float32; float32[n]."""
        out = np.empty(codes.size, np.float32)
        _floats.restore(codes, block, scales, _signed_levels(self), float(np.finfo(np.float32).max), out)
        return out

    def round(self, x: ArrayLike, key: tuple[int, int] | None = None) -> NDArray[np.float32]:
        """The nearest numbers of the format, float32[n]; see :meth:`encode`.

        >>> [float(v) for v in FloatFormat(3, 0).round([1.5, 3.0, 1000.0, -0.0])]
        [2.0, 2.0, 16.0, -0.0]
        """
        codes = self.encode(x, key)
        return self.decode_blocks(codes, max(1, codes.size), _ONE[: codes.size])

    def expected_relative_error(
        self, mu: float, sigma: float, *, stochastic: bool = False, law: Law = "lognormal"
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

    def relative_errors(
        self, mu: NDArray[np.float64], sigma: float, *, stochastic: bool, law: Law
    ) -> NDArray[np.float64]:
        """As :meth:`expected_relative_error`, unchecked, for several means of log2 x at once (float64[n] to [n])."""
        if sigma < 1e-9 and law == "lognormal":
            return _error.point_error(self.exact_levels, 2.0**mu, stochastic=stochastic)
        found = _error.stochastic_error if stochastic else _error.nearest_error
        return found(self.exact_levels, _error.magnitudes(law, mu, sigma))

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
def _levels(form: FloatFormat) -> NDArray[np.float64]:
    out: NDArray[np.float64]
    code = np.arange(form.top + 1)
    field, fraction = code >> form.mantissa, code & ((1 << form.mantissa) - 1)
    significand = np.where(field > 0, fraction + (1 << form.mantissa), fraction)
    out = np.ldexp(significand.astype(np.float64), np.maximum(field, 1) - form.bias - form.mantissa)
    out.setflags(write=False)
    return out


@cache
def _signed_levels(form: FloatFormat) -> NDArray[np.float64]:
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
