"""Many level codecs that share their scales: all of them encode a tensor once, and are compared with it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs.coders import SharedCode
from gtrace.codecs.engine import Composed, level_grid
from gtrace.codecs.grids import Stochastic
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import UsageError
from gtrace.kernels.compare import add_error
from gtrace.metrics import Comparison

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.base import Codec
    from gtrace.metrics import Reference
    from gtrace.types import State


class DrawnSets(NamedTuple):
    """One encoding by each codec: the fields of :class:`~gtrace.metrics.Comparison` and lengths, arrays[codecs].

    Attributes:
        body: int64, bytes of the payload without its envelope.
        fixed: bits per value as in :class:`~gtrace.codecs.base.CodedBits`, like the next two.
    """

    squared_error: NDArray[np.float64]
    relative_variance: NDArray[np.float64]
    mean_abs_error: NDArray[np.float64]
    mean_relative_error: NDArray[np.float64]
    cosine: NDArray[np.float64]
    snr_db: NDArray[np.float64]
    w1: NDArray[np.float64]
    w1_normalized: NDArray[np.float64]
    w1_mcgq: NDArray[np.float64]
    sparsity: NDArray[np.float64]
    update_error: NDArray[np.float64]
    body: NDArray[np.int64]
    fixed: NDArray[np.float64]
    entropy: NDArray[np.float64]
    huffman: NDArray[np.float64]


def draws_together(item: Codec) -> bool:
    """Whether a codec can be in :class:`LevelDraws`: levels, stochastic rounding, a shared code, and no memory."""
    if not isinstance(item, Composed) or level_grid(item) is None or type(item).simulate is not Composed.simulate:
        return False
    parts = item.parts
    return type(parts.rounding) is Stochastic and isinstance(parts.coder, SharedCode) and not parts.memory.keeps


class LevelDraws:
    """Level codecs with stochastic rounding and without memory that share one scale; see :func:`draws_together`.

    Raises:
        UsageError: codecs with other parts, or with different scales.
    """

    def __init__(self, codecs: Sequence[Codec]) -> None:
        self.codecs = tuple(codecs)
        if not all(map(draws_together, self.codecs)) or len({item.parts.scale for item in self.codecs}) > 1:
            raise UsageError("codecs that draw together must be level codecs with the same scale")

    def draw(
        self,
        states: Sequence[State],
        reference: Reference,
        key: tuple[int, int],
        totals: Sequence[NDArray[np.float64] | None] | NDArray[np.float64] | None = None,
    ) -> DrawnSets:
        """One encoding of a tensor by each codec with its state; the same as ``simulate`` and ``compare`` of each.

        Args:
            states: one for each codec.
            reference: the exact values.
            key: as for ``encode``, the same for all codecs.
            totals: for each codec float64[n] to which its errors are added, or None.
        """
        rows = []
        for place, (item, state) in enumerate(zip(self.codecs, states, strict=True)):
            sent = item.simulate(state, reference.values, key)
            total = None if totals is None else totals[place]
            if total is not None:
                add_error(reference.values, sent.values, total)
            found = reference.compare(sent.values)
            values = [getattr(found, item.name) for item in fields(Comparison)]
            rows.append([*values, sent.payload_bytes - ENVELOPE_BYTES, *sent.coded])
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        return DrawnSets(*columns)
