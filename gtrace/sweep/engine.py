"""The only loop over a trace: jobs on threads, one tensor each, finished blocks handed over in the caller's thread."""

from __future__ import annotations

import contextlib
import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from gtrace.sweep.replay import Replay

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gtrace.sweep.fits import Allocation
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Block, Job, Settings


#: seconds after which finished blocks are handed over though no job has ended
_PATIENCE = 0.2


class Gate:
    """Lets threads in as long as what they hold together fits into the room; what is larger enters alone."""

    def __init__(self, room: int) -> None:
        self._free = self._room = room
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Hold ``size`` of the room, all of it at most, once that much is free."""
        size = min(size, self._room)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= size)
            self._free -= size
        try:
            yield
        finally:
            with self._changed:
                self._free += size
                self._changed.notify_all()


def run_jobs(
    gradients: Gradients,
    settings: Settings,
    allocation: Allocation,
    workers: int,
    room: int,
    jobs: Sequence[Job],
    sink: Callable[[Block], None],
) -> None:
    """Run every job on ``workers`` threads; ``sink`` is called in this thread with each finished block.

    Tensors in work at a time have at most ``room`` elements together, or one of them is larger and alone: memory does
    not grow with workers. An exception, Ctrl-C among them, stops the workers after their current step; blocks that
    were finished are handed over first.
    """
    stop = threading.Event()
    finished: list[Block] = []
    lock = threading.Lock()
    gate = Gate(room)

    def work(job: Job) -> None:
        with gate.held(0 if job.sketched else job.size):
            # It may have ended while this one waited to be let in.
            if stop.is_set():
                return
            for block in Replay(gradients, job, settings, allocation).blocks():
                with lock:
                    finished.append(block)
                if stop.is_set():
                    return

    def drain() -> None:
        with lock:
            blocks, finished[:] = finished[:], []
        for block in blocks:
            sink(block)

    pool = ThreadPoolExecutor(max_workers=max(1, workers), thread_name_prefix="gtrace-sweep")
    # Waiting for a set of futures looks at every one of them each time.
    ended: queue.SimpleQueue[Future[None]] = queue.SimpleQueue()
    try:
        for job in jobs:
            pool.submit(work, job).add_done_callback(ended.put)
        for _ in jobs:
            future = None
            while future is None:
                with contextlib.suppress(queue.Empty):
                    future = ended.get(timeout=_PATIENCE)
                drain()
            future.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        drain()
