"""How values of a bucket become symbols: what a level codec says, and what every engine that rounds reads."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.kernels import rounding as _rounding

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: up to this many magnitudes, counting random thresholds beats a search
FEW_LEVELS = 16


def _no_levels() -> NDArray[np.float32]:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A rule of stochastic rounding; each is a kernel of :mod:`gtrace.kernels.rounding`.

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

    def round(
        self,
        x: NDArray[np.float32],
        bucket: int,
        scales: NDArray[np.float32],
        key: tuple[int, int],
        out: NDArray[np.uint16],
        start: int = 0,
    ) -> None:
        """Symbols of finite float32[n] in buckets of ``bucket`` values into ``out``, uint16[n].

        ``start`` is the place of the first value in its tensor, from which the random numbers are counted.
        """
        high, low = np.uint64(key[0]), np.uint64(key[1])
        if self.kind == "uniform":
            _rounding.round_uniform(x, bucket, scales, self.steps, self.mirrored, high, low, start, out)
        elif self.kind == "powers":
            _rounding.round_powers(x, high, low, start, out)
        elif self.kind == "count":
            _rounding.round_levels(x, bucket, scales, self.levels, self.mirrored, high, low, start, out)
        else:
            table = np.empty(_rounding.TABLE_SIZE, np.int32)
            _rounding.search_table(self.levels, table)
            _rounding.round_many(x, bucket, scales, self.levels, table, self.mirrored, high, low, start, out)
