"""Host memory for gradients on their way to disk."""

from __future__ import annotations

import math
import queue
from typing import TYPE_CHECKING

import torch

from gtrace.capture.staging import parts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.capture.staging import Event, Staging


class RowBuffer:
    """Room for one row of gradients.

    Args:
        pool: where it belongs.
        block: float32 on the host.
        targets: its parts, one per gradient, with its shape.
    """

    def __init__(self, pool: BufferPool, block: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
        self.targets = targets
        self._pool = pool
        self._block = block
        self._arrived: Event | None = None

    def fill(self, places: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Copy gradients, or have the device copy them that the pool is made for.

        Args:
            places: of the gradients among the targets.
            gradients: strided and real, with the targets' shapes.
        """
        self._arrived, staging = None, self._pool.staging
        if staging is not None and all(gradient.device == staging.device for gradient in gradients):
            self._arrived = staging.copy(self._block, places, gradients)
        else:
            torch._foreach_copy_([self.targets[place] for place in places], list(gradients))

    def wait(self) -> None:
        """Wait until the copies are there; called in the writer's thread."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def release(self) -> None:
        """Give it back to its pool."""
        self._pool.release(self)


class BufferPool:
    """Reusable buffers for rows of one layout, as many as fit a number of bytes and at least one.

    ``acquire`` waits while all are in use, unless told not to: this is what bounds the memory, and what slows
    training down when the disk cannot keep up. Only SimpleQueue is used, which a signal handler may use at any
    moment, too.

    Args:
        shapes: of the gradients of a row.
        limit: bytes that all buffers together may take.
        staging: through which a device copies them, None for those on the host.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], limit: int, staging: Staging | None = None) -> None:
        self.staging = staging
        self._shapes = shapes
        self._elements = sum(map(math.prod, shapes))
        self._unborn = max(1, limit // max(1, 4 * self._elements))
        self._free: queue.SimpleQueue[RowBuffer] = queue.SimpleQueue()

    def acquire(self, *, wait: bool = True) -> RowBuffer | None:
        """A buffer whose content is arbitrary; None where all are in use and the caller will not wait."""
        try:
            return self._free.get_nowait()
        except queue.Empty:
            if self._unborn == 0:
                return self._free.get() if wait else None
        self._unborn -= 1
        if self.staging is not None:
            block = self.staging.room(self._elements)
        else:
            # The device and dtype are spelled out because the script may have set other defaults.
            block = torch.empty(self._elements, dtype=torch.float32, device="cpu")
        return RowBuffer(self, block, parts_of(block, self._shapes))

    def release(self, buffer: RowBuffer) -> None:
        """Give a buffer back."""
        self._free.put(buffer)


def as_real_dense(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as a strided real tensor: a sparse one filled up, a complex one with a last axis of 2."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient
