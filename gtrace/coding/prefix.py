"""Pruned tensors: zeros in one bit, plus or minus a threshold in three, everything else as float32 in 34."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import prefix as _prefix

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PrefixCode:
    """The prefix code of Chmiel et al. (Neural gradients are near-lognormal, 2021) for stochastically pruned tensors.

    A zero is ``0``; plus or minus alpha is ``10`` and a sign bit; any other value is ``11`` and its 32 bits. Alpha
    itself is not part of the stream. The sign of a zero is lost.

    Args:
        alpha: the threshold, positive and finite; rounded to float32.

    Raises:
        UsageError: alpha is not positive, or vanishes or overflows in float32.

    >>> code = PrefixCode(0.5)
    >>> data = code.encode(np.array([0, 0.5, -0.5, 3], np.float32))
    >>> code.bits(np.array([0, 0.5, -0.5, 3], np.float32)), code.decode(data, 4).tolist()
    (41, [0.0, 0.5, -0.5, 3.0])
    """

    def __init__(self, alpha: float) -> None:
        with np.errstate(over="ignore", under="ignore"):
            self.alpha = np.float32(alpha)
        if not (np.isfinite(self.alpha) and self.alpha > 0):
            raise UsageError(f"prefix code: alpha {alpha} must be positive and within float32")
        self._pattern = self.alpha.reshape(1).view(np.uint32)[0]

    def bits(self, values: NDArray[np.float32]) -> int:
        """Exact length of the encoded float32[n] in bits."""
        return int(_prefix.prefix_bits(_patterns(values), self._pattern))

    @staticmethod
    def expected_bits(zeros: float, at_alpha: float) -> float:
        """Mean bits per value when these fractions of the values are zero and plus or minus alpha.

        >>> round(PrefixCode.expected_bits(0.8, 0.15), 9)
        2.95
        """
        return zeros + 3.0 * at_alpha + 34.0 * (1.0 - zeros - at_alpha)

    def encode(self, values: NDArray[np.float32]) -> bytes:
        """Encode float32[n]; the last byte is padded with zeros."""
        patterns = _patterns(values)
        out = np.empty(-(-int(_prefix.prefix_bits(patterns, self._pattern)) // 8) + _prefix.SLACK, np.uint8)
        _prefix.write_prefix(patterns, self._pattern, out)
        return out[: -_prefix.SLACK].tobytes()

    def decode(self, data: bytes | memoryview, count: int) -> NDArray[np.float32]:
        """Decode ``count`` values that take up all of ``data``: float32[count].

        Raises:
            PayloadError: too short (checked before memory is taken), too long, or nothing that an encoder writes.
        """
        raw = np.frombuffer(data, np.uint8)
        if raw.size * 8 < count:
            raise PayloadError(f"{raw.size} bytes cannot hold {count} values of the prefix code")
        out = np.empty(count, np.uint32)
        padded = np.zeros(raw.size + _prefix.SLACK, np.uint8)
        padded[: raw.size] = raw
        used = int(_prefix.read_prefix(padded, raw.size, self._pattern, out))
        if used < 0 or -(-used // 8) != raw.size or (used % 8 and raw[-1] >> (used % 8)):
            raise PayloadError("the prefix-coded stream ends early, is too long or holds what no encoder writes")
        return out.view(np.float32)


def _patterns(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
