"""How values of a bucket become symbols: what a level codec says, and what every engine that rounds reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.coding import fixed_size, packed_room
from gtrace.kernels import rounding as _rounding

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: up to this many magnitudes, counting random thresholds beats a search
FEW_LEVELS = 32

_KERNELS = {
    "uniform": _rounding.UNIFORM,
    "count": _rounding.COUNT,
    "search": _rounding.SEARCH,
    "powers": _rounding.POWERS,
}
_NO_SYMBOLS, _NO_BYTES = np.empty(0, np.uint16), np.empty(0, np.uint8)
_NO_VALUES, _NO_TALLIES = np.empty(0, np.float32), np.empty((_rounding.TALLIES, 0), np.int64)


def _no_levels() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule of stochastic rounding; :func:`gtrace.kernels.rounding.quantize` follows it.

    Attributes:
        kind: ``uniform`` computes the cell; ``count`` and ``search`` find it among ``levels``, which differs from
            each other by roundings only; ``powers`` reads it off the bits of the value itself.
        mirrored: there is no zero level, and a value below the first magnitude goes to it or to its opposite.
        steps: of ``uniform``: magnitudes are k / steps, or the odd ones of them where ``mirrored``.
        levels: float32[m], ascending, of ``count`` and ``search``.
    """

    kind: Literal["uniform", "count", "search", "powers"]
    mirrored: bool = False
    steps: int = 0
    levels: NDArray[np.float32] = field(default_factory=_no_levels)

    @classmethod
    def among(cls, levels: NDArray[np.float32], *, mirrored: bool) -> Rule:
        """To the two ascending magnitudes, float32[m], around |v| / scale."""
        return cls("count" if levels.size <= FEW_LEVELS else "search", mirrored, levels=levels)

    def symbols(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        start: int = 0,
    ) -> NDArray[np.uint16]:
        """Symbols of finite float32[n] in buckets of ``bucket`` values: uint16[n].

        ``start`` is the place of the first value in its tensor, from which the random numbers are counted.
        """
        out = np.empty(x.size, np.uint16)
        self._quantize(x, bucket, scales, key, start, _rounding.SYMBOLS, symbols=out)
        return out

    def packed(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        width: int,
        start: int = 0,
    ) -> bytes:
        """The bytes of :meth:`symbols` at ``width`` bits each, 1 to 16, without the symbols in between."""
        out = packed_room(x.size, width)
        self._quantize(x, bucket, scales, key, start, _rounding.PACKED, width=width, packed=out)
        return out[: fixed_size(x.size, width)].tobytes()

    def simulate(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        values: NDArray[np.float32],
        out: NDArray[np.float32],
        *,
        count: bool,
    ) -> NDArray[np.int64]:
        """What :meth:`symbols` stand for in ``values`` times the scale, into ``out``, float32[n].

        Returns:
            how often each symbol occurs, int64[m]; without ``count`` it is empty.
        """
        tallies = np.zeros((_rounding.TALLIES, values.size), np.int64) if count else _NO_TALLIES
        self._quantize(x, bucket, scales, key, 0, _rounding.VALUES, values=values, decoded=out, tallies=tallies)
        found: NDArray[np.int64] = tallies.sum(axis=0)
        return found

    def _quantize(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        start: int,
        sink: int,
        *,
        symbols: NDArray[np.uint16] = _NO_SYMBOLS,
        width: int = 0,
        packed: NDArray[np.uint8] = _NO_BYTES,
        values: NDArray[np.float32] = _NO_VALUES,
        decoded: NDArray[np.float32] = _NO_VALUES,
        tallies: NDArray[np.int64] = _NO_TALLIES,
    ) -> None:
        high, low = np.uint64(key[0]), np.uint64(key[1])
        _rounding.quantize(
            x,
            bucket,
            scales,
            _KERNELS[self.kind],
            self.mirrored,
            self.steps,
            self.levels,
            high,
            low,
            start,
            sink,
            symbols,
            width,
            packed,
            values,
            decoded,
            tallies,
        )
