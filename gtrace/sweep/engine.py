"""The only loop over a trace: jobs on threads, one tensor each, finished blocks handed over in the caller's thread."""

from __future__ import annotations

import threading
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from gtrace.sweep.replay import Replay, SketchReplay

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.sweep.allocation import Allocation
    from gtrace.sweep.replay import Block, Job, Settings, Source


def run_jobs(
    source: Source,
    jobs: Sequence[Job],
    settings: Settings,
    workers: int,
    sink: Callable[[Block], None],
    allocation: Allocation | None = None,
) -> None:
    """Run every job on ``workers`` threads; ``sink`` is called in this thread with each finished block.

    ``allocation`` is what the tensors share out among them, where a codec does that.

    An exception, Ctrl-C among them, stops the workers after their current step; blocks that were finished
    are handed over first.
    """
    stop = threading.Event()
    finished: list[Block] = []
    lock = threading.Lock()

    def work(job: Job) -> None:
        replay = SketchReplay if job.sketched else Replay
        for block in replay(source, job, settings, allocation).blocks():
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
    pending: set[Future[None]] = set()
    try:
        pending = {pool.submit(work, job) for job in jobs}
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
            drain()
            for future in done:
                future.result()
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        drain()
