"""Rows in pieces of another length than they are stored in."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray


Real = TypeVar("Real", np.float32, np.float64)


def rechunk(pieces: Iterable[NDArray[Real]], chunk: int) -> Iterator[NDArray[Real]]:
    """The same elements in pieces of ``chunk``, the last one shorter; none for no elements."""
    held: list[NDArray[Real]] = []
    size = 0
    for piece in pieces:
        start = 0
        while start < piece.size:
            part = piece[start : start + chunk - size]
            start += part.size
            size += part.size
            held.append(part)
            if size == chunk:
                yield held[0] if len(held) == 1 else np.concatenate(held)
                held, size = [], 0
    if held:
        yield held[0] if len(held) == 1 else np.concatenate(held)
