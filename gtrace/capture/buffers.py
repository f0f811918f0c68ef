"""Host memory for gradients on their way to disk."""

from __future__ import annotations

import math
import queue
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class RowBuffer:
    """Room for one row of gradients.

    Attributes:
        pool: where it belongs.
        targets: float32 tensors on the host, one per gradient, with its shape; parts of one block.
    """

    pool: BufferPool
    targets: Sequence[torch.Tensor]

    def release(self) -> None:
        """Give it back to its pool."""
        self.pool.release(self)


class BufferPool:
    """Reusable buffers for rows of one layout, as many as fit a number of bytes and at least one.

    ``acquire`` waits while all are in use, unless told not to: this is what bounds the memory, and what slows
    training down when the disk cannot keep up. Only SimpleQueue is used, which a signal handler may use at any
    moment, too.

    Args:
        shapes: of the gradients of a row.
        limit: bytes that all buffers together may take.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], limit: int) -> None:
        self._shapes = shapes
        self._sizes = [math.prod(shape) for shape in shapes]
        self._unborn = max(1, limit // max(1, 4 * sum(self._sizes)))
        self._free: queue.SimpleQueue[RowBuffer] = queue.SimpleQueue()

    def acquire(self, *, wait: bool = True) -> RowBuffer | None:
        """A buffer whose content is arbitrary; None where all are in use and the caller will not wait."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._unborn == 0:
                return self._free.get() if wait else None
        self._unborn -= 1
        # The device and dtype are spelled out because the script may have set other defaults.
        total = sum(self._sizes)
        block = torch.empty(total, dtype=torch.float32, device="cpu")
        targets, start = [], 0
        for shape, size in zip(self._shapes, self._sizes, strict=True):
            targets.append(block[start : start + size].view(shape))
            start += size
        return RowBuffer(self, targets)

    def release(self, buffer: RowBuffer) -> None:
        """Give a buffer back."""
        self._free.put(buffer)


def as_real_dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a strided real tensor: a sparse one filled up, a complex one with a last axis of 2."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
