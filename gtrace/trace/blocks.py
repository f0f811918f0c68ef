"""Samples of a gradient of fixed size: whole aligned blocks of it, the same at every step, and numbers about all of it.

A bucket of a codec whose size divides that of a block is in the sample as a whole or not at all, with the norm that
it has in the gradient. Of elements that are drawn one by one no bucket is left whole.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

#: Elements of a block.
BLOCK = 16384
#: Value of ``kind`` in the attribute ``sample`` of such a tensor.
BLOCKS = "blocks"
#: Seed of the choice.
SEED = 0

#: What is kept about a whole gradient, unknown: where all of it is stored, or nothing was found out.
UNKNOWN = dict.fromkeys(("whole_norm1", "whole_norm2", "whole_absmax", "whole_nonfinite"), math.nan)

_PASS = 1 << 20


class BlockSample(NamedTuple):
    """Which blocks of a gradient are stored, one after the other.

    Attributes:
        offsets: index of the first element of each, rising; multiples of ``block``.
        total: elements of the gradient.
        block: elements of a block; the gradient's last one may be shorter.
    """

    offsets: tuple[int, ...]
    total: int
    block: int = BLOCK

    @classmethod
    def choose(cls, name: str, total: int, most: int) -> BlockSample | None:
        """Draw blocks, each set of so many with the same probability; None where all of them are wanted.

        Args:
            name: of the tensor; name and sizes decide, so every step and process has the same blocks.
            total: elements of the gradient.
            most: elements to keep, rounded up to whole blocks; at least 1.

        >>> BlockSample.choose("w", 100_000, 20_000).kept
        2
        """
        blocks, wanted = -(-total // BLOCK), -(-most // BLOCK)
        if wanted >= blocks:
            return None
        key = Key.derive(SEED, tensor=name, role="sample")
        # Numpy's own Philox and not the kernels' hash: this runs while a model trains, which must not wait for a
        # compiler. Sorted by random words, the first blocks of the order are a draw without replacement.
        words = np.random.Philox(key=np.array(key, np.uint64)).random_raw(blocks)
        chosen = np.sort(np.argsort(words, kind="stable")[:wanted])
        return cls(tuple((chosen * BLOCK).tolist()), total)

    @classmethod
    def read(cls, value: object) -> BlockSample | None:
        """What the attribute ``sample`` says, None where it does not tell blocks or is none.

        Raises:
            ValueError: it contradicts itself.
        """
        if not isinstance(value, dict) or value.get("kind") != BLOCKS or "block" not in value:
            return None
        offsets, total, block = value.get("offsets"), value.get("total"), value.get("block")
        if type(total) is not int or type(block) is not int or block < 1 or not isinstance(offsets, list):
            raise ValueError("no list of offsets with 'total' and 'block'")
        last = -1
        for offset in offsets:
            if type(offset) is not int or not last < offset < total or offset % block:
                raise ValueError("offsets that are not rising multiples of 'block' below 'total'")
            last = offset
        if not offsets:
            raise ValueError("no block")
        return cls(tuple(offsets), total, block)

    def describe(self) -> dict[str, Any]:
        """The attribute ``sample``."""
        return {"kind": BLOCKS, "offsets": list(self.offsets), "total": self.total, "block": self.block}

    @property
    def kept(self) -> int:
        """Blocks that are stored."""
        return len(self.offsets)

    @property
    def blocks(self) -> int:
        """Blocks of the gradient."""
        return -(-self.total // self.block)

    @property
    def size(self) -> int:
        """Elements that are stored."""
        return sum(min(self.block, self.total - offset) for offset in self.offsets)

    def take(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The stored elements of a flat gradient."""
        return np.concatenate([values[offset : offset + self.block] for offset in self.offsets])


def whole_numbers(values: NDArray[np.float32]) -> Mapping[str, float]:
    """What is kept about a whole gradient of which blocks are stored: ``whole_*`` of ``format.EXTRAS``.

    Args:
        values: float32, flat. Sums are in float64, over blocks of 2^20 elements in index order.
    """
    norm1 = norm2 = absmax = 0.0
    nonfinite = 0
    for start in range(0, values.size, _PASS):
        magnitudes = np.abs(values[start : start + _PASS]).astype(np.float64)
        total = float(magnitudes.sum())
        if not math.isfinite(total):
            finite = np.isfinite(magnitudes)
            nonfinite += magnitudes.size - int(np.count_nonzero(finite))
            magnitudes = magnitudes[finite]
            total = float(magnitudes.sum())
        norm1 += total
        absmax = max(absmax, float(magnitudes.max(initial=0.0)))
        norm2 += float(np.square(magnitudes, out=magnitudes).sum())
    return {"whole_norm1": norm1, "whole_norm2": norm2, "whole_absmax": absmax, "whole_nonfinite": float(nonfinite)}
