"""Host memory for gradients on their way to disk, and copies from a GPU that training does not wait for.

A GPU's gradients are gathered into one block on the device, in the order of training's own work, so training may
change them at once. A separate stream copies that block to page-locked host memory. An event marks the end of the
copy: until then the writer does not read it and the next step does not fill the block.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import mmap
import queue
import sys
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import torch

from gtrace.capture.options import PATIENCE
from gtrace.trace.journal import MOST_ROWS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

#: limits on the bytes and the rows of a slab, and the least number of slabs in a pool that has room for several rows
_SLAB_BYTES, _SLAB_ROWS, _FEWEST_SLABS = 32 * 1024 * 1024, 512, 4
#: memory is made for this many times the rows in use, and for this share of the slab that is to come
_AHEAD, _FIRST_PART = 2, 1 / 8
#: bytes of a row up to which it is copied while the interpreter waits: to let others run costs more than the copy
_AT_A_STROKE = 1024 * 1024
#: Linux's MADV_POPULATE_WRITE, and bytes for each call: meanwhile nobody in the process can map memory
_POPULATE, _AT_ONCE = 23, 1024 * 1024


_Thing = TypeVar("_Thing")

# Not ``ctypes.memmove``, after which another thread may have the interpreter's lock for a while.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes, _memmove.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None


class Returns(Generic[_Thing]):
    """What the writer's thread hands back to training, which waits for it at most ``PATIENCE``.

    After a wait in vain it does not wait again until something has come back. Only SimpleQueue is used, which a signal
    handler may also use at any moment.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Thing] = queue.SimpleQueue()
        self._late = False

    def put(self, thing: _Thing) -> None:
        """Hand something back."""
        self._queue.put(thing)

    def get(self, *, wait: bool) -> _Thing | None:
        """The oldest thing; None if there is nothing, with ``wait`` only after waiting."""
        patience = PATIENCE if wait and not self._late else 0.0
        try:
            thing = self._queue.get(timeout=patience) if patience else self._queue.get_nowait()
        except queue.Empty:
            self._late = self._late or wait
            return None
        self._late = False
        return thing


class Staging:
    """A block on a GPU for one row of gradients with these shapes, and the copies from it to the host."""

    def __init__(self, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> None:
        self.device = device
        sizes = list(map(math.prod, shapes))
        self._block = self.block(sum(sizes))
        self._parts = [part.view(shape) for part, shape in zip(torch.split(self._block, sizes), shapes, strict=True)]
        self._copied: torch.cuda.Event | None = None

    @functools.cached_property
    def copying(self) -> torch.cuda.Stream:
        """The stream of copies to the host."""
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def block(self, elements: int, *, locked: bool = False) -> torch.Tensor:
        """A block for ``elements`` float32 values on the device; ``locked``: on the host, for copies by the device."""
        device = "cpu" if locked else self.device
        return torch.empty(elements, dtype=torch.float32, device=device, pin_memory=locked)

    def event(self) -> torch.cuda.Event:
        """A new event; threads that wait for it sleep, so that training keeps the core."""
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def computing(self) -> torch.cuda.Stream:
        """The stream in which training computes."""
        return torch.cuda.current_stream(self.device)

    def send(self, target: torch.Tensor, block: torch.Tensor) -> None:
        """Queue a copy from a block on the device to a locked one."""
        with torch.cuda.stream(self.copying):
            target.copy_(block, non_blocking=True)

    def copy(self, target: torch.Tensor, places: Iterable[int], gradients: Sequence[torch.Tensor]) -> torch.cuda.Event:
        """Queue the copy of gradients on the device, which may change once this returns, to their places in a row.

        Returns:
            an event, after which the locked block ``target`` can be read; parts without a gradient are arbitrary.
        """
        computing, copying = self.computing(), self.copying
        if self._copied is not None:
            computing.wait_event(self._copied)
        torch._foreach_copy_([self._parts[place] for place in places], list(gradients))
        filled, self._copied = self.event(), self.event()
        filled.record(computing)
        copying.wait_event(filled)
        self.send(target, self._block)
        self._copied.record(copying)
        return self._copied


def staging_for(devices: Iterable[torch.device], shapes: Sequence[tuple[int, ...]]) -> Staging | None:
    """Staging for gradients on these devices if they share a GPU; None means plain copies."""
    several = set(devices)
    if len(several) != 1:
        return None
    device = several.pop()
    return Staging(device, shapes) if device.type == "cuda" else None


class RowBuffer:
    """Room for one row of gradients: a place in a slab, whose ``targets`` have the shapes of the gradients."""

    def __init__(self, pool: BufferPool, slab: Slab, place: int, targets: list[torch.Tensor]) -> None:
        self.slab = slab
        self.place = place
        self.targets = targets
        #: whether the slab has no further row, and whether it has as many as the trace takes together
        self.last, self.several = place == slab.size - 1, slab.size >= MOST_ROWS
        self._pool = pool
        self._arrived: torch.cuda.Event | None = None

    @property
    def ahead(self) -> Callable[[], None] | None:
        """What the writer's thread is to call when this row has been taken, for those that follow."""
        due = self.place and not self.place & (self.place - 1) and self.slab.touched < self.slab.size
        return functools.partial(self._pool.prepare, self) if due else None

    def fill(self, places: Sequence[int], gradients: Sequence[torch.Tensor]) -> None:
        """Copy strided real gradients to the targets at these places, directly or through the pool's device.

        If that fails, the buffer goes back to the pool.
        """
        self._arrived, staging = None, self._pool.staging
        try:
            if staging is not None and all(gradient.device == staging.device for gradient in gradients):
                self._arrived = staging.copy(self.slab.block[self.place], places, gradients)
            else:
                # Places follow the parameters; targets follow the order in which these first had a gradient.
                torch._foreach_copy_([self.targets[place] for place in places], list(gradients))
        except BaseException:
            self.release()
            raise

    def copy(self, addresses: Iterable[int]) -> None:
        """Copy gradients of all targets, float32, dense and contiguous, from these addresses on the host.

        For small rows, see :attr:`BufferPool.small`, this takes less than :meth:`fill`, and ends as that if it fails.
        """
        self._arrived, start = None, self.slab.address + 4 * self.place * self._pool.elements
        starts, sizes = self._pool.extents
        try:
            deque(map(_memmove, [start + each for each in starts], addresses, sizes), 0)
        except BaseException:
            self.release()
            raise

    def wait(self) -> None:
        """Wait until the copies are complete; called in the writer's thread."""
        if self._arrived is not None:
            self._arrived.synchronize()
            self._arrived = None

    def release(self) -> None:
        """Return the buffer to its pool."""
        self._pool.free.put(self)


class Slab:
    """Memory for rows one after the other, so that many of them can be read together: float32[rows, elements]."""

    def __init__(self, block: torch.Tensor, sizes: Sequence[int]) -> None:
        self.block = block
        self.address = block.data_ptr()
        self.size = len(block)
        #: place of each gradient in a row
        self.parts = [slice(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
        self.rows: list[RowBuffer] = []
        #: rows at its start that the system has given their memory
        self.touched = 0
        #: rows handed out, and rows that came back
        self.taken = self.returned = 0

    def values(self, rows: Sequence[RowBuffer]) -> NDArray[np.float32]:
        """Some of its rows: (rows, elements); a view if they are consecutive."""
        places = [row.place for row in rows]
        together = places == list(range(places[0], places[0] + len(places)))
        values: NDArray[np.float32] = self.block.numpy()[slice(places[0], places[-1] + 1) if together else places]
        return values

    def touch(self, rows: int) -> None:
        """Have the system give as many rows their memory now, so that no copy waits for that; they keep their values.

        Where the system has no such call, nothing happens.
        """
        first, self.touched = self.touched, min(max(rows, self.touched), self.size)
        if sys.platform == "linux":
            # Not ``mmap.madvise``, which keeps the interpreter's lock.
            advise = ctypes.CDLL(None).madvise
            start, row = self.address, self.block.stride(0) * self.block.element_size()
            begin, end = (-(-(start + row * place) // mmap.PAGESIZE) * mmap.PAGESIZE for place in (first, self.touched))
            # The last page may be partly another's.
            end = min(end, (start + self.block.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE)
            for piece in range(begin, end, _AT_ONCE):
                advise(ctypes.c_void_p(piece), ctypes.c_size_t(min(_AT_ONCE, end - piece)), _POPULATE)


class BufferPool:
    """Reusable buffers for rows of one layout: as many as fit a number of bytes, at least one.

    Buffers are handed out slab by slab, in order. By default ``acquire`` waits while all are in use: this bounds the
    memory, and slows training down if the disk cannot keep up.

    Args:
        shapes: shapes of the gradients of a row.
        limit: bytes that all buffers together may take.
        staging: the device's staging, None for gradients on the host.

    Attributes:
        elements: of a row.
        extents: where the gradients begin in a row, and their sizes, in bytes.
        small: rows are on the host, and small enough for :meth:`RowBuffer.copy`.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], limit: int, staging: Staging | None = None) -> None:
        self.staging = staging
        self._shapes = shapes
        self._sizes = sizes = list(map(math.prod, shapes))
        self.elements = sum(sizes)
        starts = itertools.accumulate(sizes[:-1], initial=0)
        self.extents = [4 * start for start in starts], [4 * size for size in sizes]
        row = max(1, 4 * self.elements)
        self.small = staging is None and row <= _AT_A_STROKE
        self._most_rows = max(1, limit // row)
        rows = max(1, min(_SLAB_ROWS, _SLAB_BYTES // row, self._most_rows // _FEWEST_SLABS))
        # The writer is quickest with rows up to a multiple of 64.
        self._slab_rows = rows // MOST_ROWS * MOST_ROWS or rows
        #: numbers for slabs; two threads make them, and this many are made
        self._numbers, self._made = itertools.count(), 0
        self._slab: Slab | None = None
        self._spare: queue.SimpleQueue[Slab] = queue.SimpleQueue()
        #: buffers that come back
        self.free: Returns[RowBuffer] = Returns()

    def acquire(self, *, wait: bool = True) -> RowBuffer | None:
        """A buffer with arbitrary content; None if all are in use and ``wait`` is off, or the writer does not go on."""
        slab = self._slab
        if slab is None or slab.taken == slab.size:
            slab = self._returned(wait=False)
            if slab is None and not self._spare.empty():
                slab = self._spare.get()
            slab = slab or self._new_slab() or self._returned(wait=wait)
            if slab is None:
                return None
            self._slab = slab
        slab.taken += 1
        return slab.rows[slab.taken - 1]

    def prepare(self, buffer: RowBuffer) -> None:
        """Have memory for rows after this one; called in the writer's thread at the 1st, 2nd, 4th, 8th row and so on.

        That many more rows are likely. Two slabs are enough for a writer that keeps up, so the second is made ahead.
        """
        slab = buffer.slab
        slab.touch(_AHEAD * buffer.place)
        if slab.touched == slab.size and self._made == 1 and (second := self._new_slab()) is not None:
            second.touch(int(second.size * _FIRST_PART))
            self._spare.put(second)

    def _returned(self, *, wait: bool) -> Slab | None:
        """A slab whose rows have all come back."""
        while (buffer := self.free.get(wait=wait)) is not None:
            slab = buffer.slab
            slab.returned += 1
            if slab.returned == slab.size:
                slab.taken = slab.returned = 0
                return slab
        return None

    def _new_slab(self) -> Slab | None:
        """A slab; None if there are as many as may be."""
        number = next(self._numbers)
        rows = min(self._slab_rows, self._most_rows - number * self._slab_rows)
        if rows <= 0:
            return None
        self._made, elements = number + 1, self.elements
        if self.staging is not None:
            block = self.staging.block(rows * elements, locked=True)
        else:
            # Device and dtype are explicit because the script may have set other defaults.
            block = torch.empty(rows * elements, dtype=torch.float32, device="cpu")
        slab = Slab(block.view(rows, elements), self._sizes)
        if self.staging is not None:
            slab.touched = rows  # locked memory
        # All views at once: one by one they would cost more than the copies.
        several = zip(torch.split(slab.block, self._sizes, dim=1), self._shapes, strict=True)
        targets = zip(*(part.view(rows, *shape).unbind() for part, shape in several), strict=True)
        slab.rows = [RowBuffer(self, slab, place, list(own)) for place, own in enumerate(targets)]
        return slab
