"""Tasks of a sweep on a Dask cluster. Dask is loaded where it is used, and it is no dependency."""

from __future__ import annotations

import json
import os
import pkgutil
import re
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gtrace
from gtrace.errors import GtraceError, TraceError, UsageError
from gtrace.sweep.tasks import build_obstacle, cut, work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from distributed import Client, Future

    from gtrace.sweep.replay import Block, Job
    from gtrace.sweep.tasks import Part, Session

#: Seconds to wait for a scheduler, and then for a first worker.
CONNECT_SECONDS = 10
#: Seconds that a task should take: many times what sending it costs, and little to do again when a worker is lost.
TASK_SECONDS = 2.0
#: Tasks that are with the cluster at a time, for each of its threads and at least.
_AHEAD, _FEWEST = 4, 64

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
    except ImportError:
        raise UsageError("--scheduler: needs Dask, which is not installed: pip install 'gtrace[dask]'") from None
    if isinstance(scheduler, distributed.Client):
        _check_workers(scheduler)
        yield scheduler
        return
    place = os.fspath(scheduler)
    local = _LOCAL.fullmatch(place)
    if local is not None:
        # Nobody asked for a dashboard, so it takes any free port; memory is bounded by the sweep itself.
        with (
            distributed.LocalCluster(
                n_workers=int(local[1]), threads_per_worker=1, dashboard_address=":0", memory_limit=0
            ) as cluster,
            distributed.Client(cluster, set_as_default=False) as client,
        ):
            _check_workers(client)
            yield client
        return
    address = place if _ADDRESS.fullmatch(place) else _address_in(Path(place))
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        why = f" ({error})" if isinstance(error, ValueError) else f" within {CONNECT_SECONDS} s"
        raise UsageError(f"--scheduler: no Dask scheduler answers at {address}{why}; {_FORMS}") from None
    with client:
        _check_workers(client)
        yield client


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


def run_on_cluster(client: Client, session: Session, jobs: Sequence[Job], sink: Callable[[Block], None]) -> None:
    """Run every job on the workers of a cluster; ``sink`` is called in this thread with each finished block.

    Tasks that a lost worker had are run again elsewhere. An exception, Ctrl-C among them, takes back the tasks that
    have not begun; blocks that have arrived are handed over first.

    Raises:
        UsageError: as of ``gtrace.sweep.tasks.work``, with the worker's address.
        TraceError: likewise, or the cluster is gone.
    """
    from distributed import as_completed

    tasks = cut(jobs, TASK_SECONDS)
    pending: set[Future] = set()
    arriving = as_completed(loop=client.loop, with_results=True, raise_errors=False)

    def send() -> None:
        most = max(_FEWEST, _AHEAD * sum(client.nthreads().values()))
        while len(pending) < most and (task := next(tasks, None)) is not None:
            future = client.submit(_work, session, task, pure=False)
            pending.add(future)
            arriving.add(future)

    try:
        send()
        while pending:
            future, result = next(arriving)
            pending.remove(future)
            if future.status != "finished":
                raise _failure(future, result, client)
            for block in result:
                sink(block)
            send()
    finally:
        late = arriving.next_batch(block=False)
        with suppress(OSError):  # nothing is left to be taken back where the scheduler is gone
            client.cancel(list(pending))
        for future, result in late:
            if future.status == "finished":
                for block in result:
                    sink(block)


def _work(session: Session, task: Sequence[Part]) -> list[Block]:
    """What a worker runs; its address goes into errors."""
    from distributed import get_worker

    try:
        return work(session, task)
    except GtraceError as error:
        raise type(error)(f"worker {get_worker().address}: {error}") from None


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
