"""How long training waits for what records it. Imports neither torch nor numpy."""

from __future__ import annotations

import queue
from typing import Generic, TypeVar

#: seconds without progress of the thread that writes, after which training goes on without it
PATIENCE = 10.0
#: seconds from a signal that ends the program until the steps that still wait are dropped
GRACE = 1.5

_Thing = TypeVar("_Thing")


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
