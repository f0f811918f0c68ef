"""Host memory for gradients on their way to disk, and copies from a GPU that training does not wait for.

A GPU's gradients are gathered into one block on the device, in the order of the training's own work, so that it may
change them at once. A stream of its own copies that block to page-locked memory of the host. An event says when that is
done: until then the writer does not read the copy and the next step does not fill the block.
"""

from __future__ import annotations

import math
import queue
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class CudaRuntime:
    """What a GPU can do beside computing, as ``torch.cuda`` gives it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        #: The stream of copies to the host.
        self.copying: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def block(self, elements: int, *, locked: bool = False) -> torch.Tensor:
        """Room for so many float32 on the device, or ``locked`` on the host, where the device writes by itself."""
        device = "cpu" if locked else self._device
        return torch.empty(elements, dtype=torch.float32, device=device, pin_memory=locked)

    def event(self) -> torch.cuda.Event:
        """A new event; those who wait for it sleep, so that training keeps the core."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def computing(self) -> torch.cuda.Stream:
        """The stream in which training computes."""
        return torch.cuda.current_stream(self._device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Have the stream of copies copy a block of the device to a locked one."""
        with torch.cuda.stream(self.copying):
            target.copy_(source, non_blocking=True)


class Staging:
    """One row's room on a device.

    Args:
        device: where the gradients are.
        runtime: of this device.
        shapes: of the gradients of a row.
    """

    def __init__(self, device: torch.device, runtime: CudaRuntime, shapes: Sequence[tuple[int, ...]]) -> None:
        self.device = device
        self._runtime = runtime
        self._block = runtime.block(sum(map(math.prod, shapes)))
        self._parts = parts_of(self._block, shapes)
        self._copied: torch.cuda.Event | None = None

    def room(self, elements: int) -> torch.Tensor:
        """A host block to copy to."""
        return self._runtime.block(elements, locked=True)

    def copy(self, target: torch.Tensor, places: Iterable[int], gradients: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Have a row copied; the gradients may change when this returns.

        Args:
            target: a block from ``room``; parts that have no gradient get arbitrary content.
            places: of the gradients in the row.
            gradients: on the device, with the shapes of their places.

        Returns:
            the moment from which on ``target`` can be read.
        """
        computing, copying = self._runtime.computing(), self._runtime.copying
        if self._copied is not None:
            computing.wait_event(self._copied)
        torch._foreach_copy_([self._parts[place] for place in places], list(gradients))
        filled, self._copied = self._runtime.event(), self._runtime.event()
        filled.record(computing)
        copying.wait_event(filled)
        self._runtime.copy(target, self._block)
        self._copied.record(copying)
        return self._copied


def parts_of(block: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Consecutive parts of a block in these shapes."""
    parts, start = [], 0
    for shape in shapes:
        size = math.prod(shape)
        parts.append(block[start : start + size].view(shape))
        start += size
    return parts


def staging_for(devices: Iterable[torch.device], shapes: Sequence[tuple[int, ...]]) -> Staging | None:
    """How to copy gradients from these devices: through a block on the device if they share a GPU, else plainly."""
    several = set(devices)
    if len(several) != 1:
        return None
    device = several.pop()
    return Staging(device, CudaRuntime(device), shapes) if device.type == "cuda" else None


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
        self._arrived: torch.cuda.Event | None = None

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
