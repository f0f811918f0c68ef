"""Tasks of a sweep on a Dask cluster. Dask is loaded where it is used, and it is no dependency."""

from __future__ import annotations

import json
import logging
import os
import pkgutil
import queue
import re
import signal
import time
import zlib
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gtrace
from gtrace.errors import GtraceError, TraceError, UsageError
from gtrace.sweep.tasks import build_obstacle, cut, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from distributed import Client, Future

    from gtrace.sweep.replay import Block, Job
    from gtrace.sweep.tasks import Part, Session

#: Seconds to wait for a scheduler, and then for a first worker.
CONNECT_SECONDS = 10
#: Seconds that a task should take: many times what sending it costs, and little to do again when a worker is lost.
TASK_SECONDS = 2.0
#: Tasks that are with the cluster at a time, for each of its threads and at least.
_AHEAD, _FEWEST = 4, 64
#: Where workers tell what they have finished; the scheduler remembers its last 1000 messages, so one for all sweeps.
_TOPIC = "gtrace-sweep"
#: Seconds until it is looked again whether a task is done.
_PATIENCE = 0.1

_ADDRESS = re.compile(r"(tcp|tls|ucx|wss?)://.+")
_LOCAL = re.compile(r"local:([1-9]\d{0,3})")
_FORMS = "give tcp://HOST:PORT, the scheduler's file, or local:N for N processes of this machine"


@contextmanager
def connected(scheduler: str | os.PathLike[str] | Client) -> Iterator[Client]:
    """A client of a cluster that has workers which run this very gtrace.

    Args:
        scheduler: ``tcp://host:port`` (or ``tls://``, with Dask's own configuration), the path of a scheduler file,
            ``local:N`` for a cluster of N processes on this machine that ends with the sweep, or a client.

    Raises:
        UsageError: Dask is not there, there is no cluster or no worker, or a worker runs another gtrace.
    """
    try:
        import distributed
        from distributed.utils import silence_logging_cmgr
    except ImportError:
        raise UsageError("--scheduler: needs Dask, which is not installed: pip install 'gtrace[dask]'") from None
    if isinstance(scheduler, distributed.Client):
        _check_workers(scheduler)
        yield scheduler
        return
    # What goes wrong is told here in one line; Dask would log it as well, at length.
    with silence_logging_cmgr(logging.CRITICAL), _client(os.fspath(scheduler)) as client:
        _check_workers(client)
        yield client


@contextmanager
def _client(place: str) -> Iterator[Client]:
    """A client of the cluster at a place, which is started first where it is ``local:N``."""
    import distributed

    local = _LOCAL.fullmatch(place)
    if local is not None:
        # Nobody asked for a dashboard, so it takes any free port; memory is bounded by the sweep itself.
        with (
            distributed.LocalCluster(
                n_workers=int(local[1]),
                threads_per_worker=1,
                dashboard_address=":0",
                memory_limit=0,
                silence_logs=logging.CRITICAL,
            ) as cluster,
            distributed.Client(cluster, set_as_default=False) as client,
        ):
            client.run(_ignore_interrupts)
            yield client
        return
    address = place if _ADDRESS.fullmatch(place) else _address_in(Path(place))
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else f" within {CONNECT_SECONDS} s"
        raise UsageError(f"--scheduler: no Dask scheduler answers at {address}{why}; {_FORMS}") from None
    with client:
        yield client


def _ignore_interrupts() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes of a command, to the one that was started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _address_in(file: Path) -> str:
    """The address that a scheduler file tells."""
    if not file.is_file():
        raise UsageError(f"--scheduler: {file}: no such file; {_FORMS}")
    try:
        address = json.loads(file.read_bytes())["address"]
    except (OSError, ValueError, KeyError, TypeError):
        address = None
    if not isinstance(address, str) or not _ADDRESS.fullmatch(address):
        raise UsageError(f"--scheduler: {file}: not the file of a Dask scheduler (dask scheduler --scheduler-file)")
    return address


def _check_workers(client: Client) -> None:
    """Raise UsageError where there are no workers, or some that cannot give this sweep's rows."""
    if client.asynchronous:
        raise UsageError("--scheduler: an asynchronous client cannot be waited for; pass one made without asynchronous")
    try:
        client.wait_for_workers(1, timeout=CONNECT_SECONDS)
    except TimeoutError:
        where = client.scheduler.address
        raise UsageError(f"--scheduler: {where} has no workers; start some with `dask worker {where}`") from None
    # A function of the standard library, so that a worker without gtrace can say so.
    versions = client.run(pkgutil.resolve_name, "gtrace:__version__", on_error="return")
    for worker, found in versions.items():
        if not isinstance(found, str):
            said = " ".join(f"{type(found).__name__}: {found}".split())
            raise UsageError(f"--scheduler: worker {worker} cannot import gtrace ({said}); install it there")
        obstacle = build_obstacle(found, gtrace.__version__)
        if obstacle is not None:
            raise UsageError(f"--scheduler: worker {worker}: {obstacle}")


class _Arrivals:
    """What has come back of tasks: early blocks of those at work, in the order in which a task makes them, and all.

    Args:
        sink: gets each block once, whatever comes twice because a lost worker's task was run again.
    """

    def __init__(self, sink: Callable[[Block], None]) -> None:
        self._sink = sink
        self._early: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        #: blocks of each task at work that were handed over
        self._taken: dict[str, int] = {}

    def heard(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Take what a worker said, in whatever thread."""
        self._early.put(event[1])

    def begin(self, task: str) -> None:
        """A task is sent."""
        self._taken[task] = 0

    def end(self, task: str, blocks: Sequence[Block]) -> None:
        """A task is done, and these are all its blocks."""
        self._hand_over(task, 0, blocks)
        del self._taken[task]

    def drain(self, patience: float = 0) -> None:
        """Hand over early blocks; wait so many seconds for some."""
        from distributed.protocol import pickle

        try:
            while True:
                said = self._early.get(timeout=patience) if patience else self._early.get_nowait()
                patience = 0
                # Another sweep's on the same cluster are none of ours.
                if said["task"] in self._taken:
                    self._hand_over(said["task"], said["first"], pickle.loads(zlib.decompress(said["blocks"])))
        except queue.Empty:
            return

    def _hand_over(self, task: str, first: int, blocks: Sequence[Block]) -> None:
        taken = self._taken[task]
        if first > taken:
            return  # a message was lost; the task's end brings all
        for block in blocks[taken - first :]:
            # Counted first: a sink that is interrupted has kept the block.
            self._taken[task] += 1
            self._sink(block)


def run_on_cluster(client: Client, session: Session, jobs: Sequence[Job], sink: Callable[[Block], None]) -> None:
    """Run every job on the workers of a cluster; ``sink`` is called in this thread with each finished block.

    Tasks that a lost worker had are run again elsewhere. An exception, Ctrl-C among them, takes back all tasks, and
    workers stop after their current step; blocks that have arrived are handed over first.

    Raises:
        UsageError: as of ``gtrace.sweep.tasks.work``, with the worker's address.
        TraceError: likewise, or the cluster is gone.
    """
    from distributed import as_completed

    tasks = cut(jobs, TASK_SECONDS)
    pending: set[Future] = set()
    arrivals = _Arrivals(sink)
    done = as_completed(loop=client.loop, with_results=True, raise_errors=False)

    def send() -> None:
        most = max(_FEWEST, _AHEAD * sum(client.nthreads().values()))
        while len(pending) < most and (task := next(tasks, None)) is not None:
            future = client.submit(_work, session, task, TASK_SECONDS, pure=False)
            arrivals.begin(future.key)
            pending.add(future)
            done.add(future)

    client.subscribe_topic(_TOPIC, arrivals.heard)
    try:
        send()
        while pending:
            arrivals.drain(0 if done.has_ready() else _PATIENCE)
            while done.has_ready():
                future, result = next(done)
                pending.remove(future)
                if future.status != "finished":
                    raise _failure(future, result, client)
                arrivals.end(future.key, result)
                send()
    finally:
        late = done.next_batch(block=False)
        with suppress(OSError):  # nothing is left to be taken back where the scheduler is gone
            client.cancel(list(pending))
            client.unsubscribe_topic(_TOPIC)
        arrivals.drain()
        for future, result in late:
            if future.status == "finished":
                arrivals.end(future.key, result)


def _work(session: Session, task: Sequence[Part], every: float) -> list[Block]:
    """What a worker runs; finished blocks are told every so many seconds, and its address goes into errors."""
    from distributed import get_worker
    from distributed.protocol import pickle

    worker = get_worker()
    key = worker.get_current_task()
    blocks: list[Block] = []
    told, last = 0, time.monotonic()
    try:
        for block in work(session, task):
            blocks.append(block)
            if time.monotonic() - last >= every:
                early = zlib.compress(pickle.dumps(blocks[told:]), 1)
                worker.log_event(_TOPIC, {"task": key, "first": told, "blocks": early})
                told, last = len(blocks), time.monotonic()
            if worker.state.tasks[key].state == "cancelled":
                break
    except GtraceError as error:
        raise type(error)(f"worker {worker.address}: {error}") from None
    return blocks


def _failure(future: Future, result: Any, client: Client) -> BaseException:
    """Why a task has no result."""
    from distributed import KilledWorker

    if future.status != "error":
        where = client.scheduler.address
        return TraceError(f"the scheduler at {where} is gone; what was finished is kept: start it and sweep again")
    error: BaseException = result[1]
    if isinstance(error, KilledWorker):
        lost = error.allowed_failures + 1
        return TraceError(
            f"{lost} workers died on the same task, {error.last_worker.address} the last, out of memory as a rule: "
            "give each more memory or fewer threads, or lower --chunk; what was finished is kept"
        )
    if isinstance(error, ImportError):
        return UsageError(f"--scheduler: a worker cannot run this gtrace ({error}): install the same there")
    return error
