"""Run the jobs of a sweep on threads, one tensor each; the caller's thread gets the finished blocks."""

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


#: seconds after which finished blocks are handed over even if no job has ended
_PATIENCE = 0.2


class Gate:
    """Lets threads in while what they hold together fits into the room; a larger one enters alone."""

    def __init__(self, room: int) -> None:
        self._free = self._room = room
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Hold ``size`` of the room (at most all of it), as soon as that much is free."""
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

    Tensors in work at a time have at most ``room`` elements together; a larger tensor runs alone. So memory does not
    grow with workers. On an exception or Ctrl-C, workers stop after their current step, and finished blocks are handed
    over first.
    """
    stop = threading.Event()
    finished: list[Block] = []
    lock = threading.Lock()
    gate = Gate(room)

    def work(job: Job) -> None:
        with gate.held(0 if job.sketched else job.size):
            # The job may have ended while this one waited.
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
