"""A sweep on a Dask cluster: jobs are cut into tasks of plain data, and workers run them. Dask is optional."""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pkgutil
import queue
import re
import signal
import tempfile
import threading
import time
import zlib
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import gtrace
from gtrace.codecs import Codec, codec, expecting
from gtrace.codecs.plugins import load_plugin, origin_of, plugin_of, require_installed, source_digest
from gtrace.errors import GtraceError, TraceError, UsageError
from gtrace.sweep.engine import Gate
from gtrace.sweep.fits import Allocation
from gtrace.sweep.gradients import Gradients, Kind
from gtrace.sweep.jobs import Among, Block, Job, Settings, start_of
from gtrace.sweep.replay import Replay
from gtrace.sweep.schema import EXPECTATION
from gtrace.trace import Trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from distributed import Client, Future


#: A rough guess at what a row costs: alone, for each element that is encoded, for each that is only summarized.
_ROW, _DRAWN, _SUMMARIZED = 1e-3, 6e-8, 3e-9
#: Traces that a worker keeps open.
_MOST_OPEN = 2
#: What rows depend on; the rest of the package may differ between machines.
_COMPUTING = ("codecs", "coding", "fitting", "kernels", "sweep", "trace")


@functools.cache
def build() -> str:
    """Version of this gtrace and a digest of the source that rows depend on, as ``0.1.0+1f0c...``."""
    home = Path(gtrace.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    files = [*home.glob("*.py"), *(file for name in _COMPUTING for file in (home / name).rglob("*.py"))]
    for file in sorted(files):
        digest.update(file.relative_to(home).as_posix().encode() + b"\0" + file.read_bytes())
    return f"{gtrace.__version__}+{digest.hexdigest()}"


def build_obstacle(found: str, wanted: str) -> str | None:
    """Why a worker with build ``found`` cannot give the rows of build ``wanted``; None if the two are equal."""
    there, here = found.partition("+")[0], wanted.partition("+")[0]
    if found == wanted:
        return None
    if there != here:
        return f"it runs gtrace {there} and this is gtrace {here}: install the same version on both"
    return f"its gtrace {there} has different source code: install the same on both"


@dataclass(frozen=True, slots=True)
class Session:
    """What all tasks of one sweep have in common.

    Attributes:
        trace: path or address, the same on every machine.
        fingerprint: the trace's; a worker refuses a trace with another one.
        tensors: globs, see :func:`~gtrace.sweep.run.run_sweep`.
        kind: kind of gradient.
        chunk: elements that are held at a time.
        settings: the settings that rows depend on.
        allocating: specs of the codecs that allocate, each with the tensors that they allocate among.
        plugins: name and source of each plugin file.
        packages: name, package and digest of the codecs that packages bring, which a worker must have too.
        build: the sender's build, see :func:`build`.
    """

    trace: str
    fingerprint: str
    tensors: tuple[str, ...] | None
    kind: Kind
    chunk: int
    settings: Settings
    allocating: tuple[tuple[str, Among], ...]
    plugins: tuple[tuple[str, bytes], ...]
    packages: tuple[tuple[str, str, str], ...]
    build: str

    @classmethod
    def of(
        cls,
        trace: Trace,
        tensors: Sequence[str] | None,
        kind: Kind,
        chunk: int,
        settings: Settings,
        codecs: Sequence[tuple[Codec, Among]],
    ) -> Session:
        """The session of a sweep.

        Raises:
            UsageError: the trace or a codec is known to this process alone.
        """
        if trace.location is None:
            raise UsageError("--scheduler: a trace in memory cannot be sent to workers; write it with create_trace")
        plugins, packages = _brought(item for item, _ in codecs)
        return cls(
            trace.location,
            trace.fingerprint,
            None if tensors is None else tuple(tensors),
            kind,
            chunk,
            settings,
            tuple((str(item), among) for item, among in codecs if item.allocates),
            plugins,
            packages,
            build(),
        )


def _brought(codecs: Iterable[Codec]) -> tuple[tuple[tuple[str, bytes], ...], tuple[tuple[str, str, str], ...]]:
    """The files and the packages that those codecs come from that are not gtrace's own."""
    files: dict[Path, None] = {}
    packages: dict[tuple[str, str, str], None] = {}
    for item in codecs:
        part: Codec | None = item
        while part is not None:
            kind = type(part)
            file, origin = plugin_of(kind), origin_of(kind)
            if file is not None:
                files[file] = None
            elif origin is not None:
                packages[origin.name, origin.package, source_digest(kind)] = None
            elif not kind.__module__.startswith("gtrace."):
                raise UsageError(
                    f"--scheduler: workers do not know the codec {part.name}, a class of {kind.__module__}; "
                    "put it into a file and pass --plugin FILE (gtrace.codecs.load_plugin)"
                )
            part = getattr(part, "inner", None)
    return tuple((file.name, file.read_bytes()) for file in files), tuple(packages)


#: some steps of a job without its ``wanted``, and these with specs: (index of a step, specs with draws)
Part: TypeAlias = "tuple[Job, tuple[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], ...]]"


def cut(jobs: Iterable[Job], seconds: float) -> Iterator[tuple[Part, ...]]:
    """Tasks of about ``seconds`` seconds each, in the order of the jobs: long jobs are cut, short ones are joined.

    A job with a stateful codec is cut only between bursts, because the codec is replayed from the start of a burst.
    Any other job is cut between windows, because errors are summed over a window.
    """
    task: list[Part] = []
    held = 0.0
    for job in jobs:
        for part, cost in _parts(job, seconds):
            task.append(part)
            held += cost
            if held >= seconds:
                yield tuple(task)
                task, held = [], 0.0
    if task:
        yield tuple(task)


def _parts(job: Job, seconds: float) -> Iterator[tuple[Part, float]]:
    replayed = any(item.stateful and draws[-1] != EXPECTATION for _, codecs in job.wanted for item, draws in codecs)
    bare = replace(job, wanted=())
    start = {index: first for first, last in job.windows for index in range(first, last + 1)}
    first, held = 0, 0.0
    for place, (index, codecs) in enumerate(job.wanted):
        held += _seconds(job, codecs)
        last = place + 1 == len(job.wanted)
        if not last:
            after = job.wanted[place + 1][0]
            begins = start_of(job.steps, after) if replayed else start.get(after, after)
            if held < seconds or begins <= index:
                continue
        part = job.wanted[first : place + 1]
        wanted = tuple((at, tuple((str(item), draws) for item, draws in specs)) for at, specs in part)
        yield (replace(bare, final=job.final and last), wanted), held
        first, held = place + 1, 0.0


def _seconds(job: Job, codecs: Sequence[tuple[Codec, tuple[int, ...]]]) -> float:
    """Estimated seconds for a step."""
    total = 0.0
    for item, draws in codecs:
        drawn = sum(draw != EXPECTATION for draw in draws)
        total += _ROW * len(draws) + job.size * (_DRAWN * drawn + _SUMMARIZED * expecting(item))
    return total


class Bench:
    """A trace open in a worker, for the tasks of one session."""

    def __init__(self, session: Session) -> None:
        obstacle = build_obstacle(build(), session.build)
        if obstacle is not None:
            raise UsageError(obstacle)
        for name, source in session.plugins:
            # Each is run once; a newer version replaces an older one of the same name.
            if _plugins.get(name) != source:
                file = Path(_plugin_folder().name) / Path(name).name
                file.write_bytes(source)
                load_plugin(file)
                _plugins[name] = source
        for name, package, digest in session.packages:
            require_installed(name, package, digest)
        try:
            self._trace = open_trace(session.trace)
        except GtraceError as error:
            reason = str(error).removeprefix(f"{session.trace}: ")
            raise TraceError(
                f"cannot open {session.trace} ({reason}): every worker must see the trace under this path"
            ) from None
        if self._trace.fingerprint != session.fingerprint:
            self._trace.close()
            raise TraceError(
                f"{session.trace}: the trace here differs from the sender's, or it is still being written; copy it"
            )
        self.gradients = Gradients(self._trace, session.tensors, session.kind, session.chunk)
        codecs = [(codec(spec), among) for spec, among in session.allocating]
        self.allocation = Allocation(self.gradients, self.gradients.steps, codecs)
        self.gate = Gate(session.chunk)


#: a trace that leaves may still serve tasks: the last of them closes it
_bench = functools.lru_cache(_MOST_OPEN)(Bench)
_lock = threading.Lock()
_plugins: dict[str, bytes] = {}


@functools.cache
def _plugin_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gtrace-plugins-")


def work(session: Session, task: Sequence[Part]) -> Iterator[Block]:
    """Run a task: the blocks of its parts, always in the same order.

    Raises:
        UsageError: this process runs another gtrace.
        TraceError: the trace cannot be read here.
    """
    with _lock:
        bench = _bench(session)
    for bare, specs in task:
        made = {spec: codec(spec) for _, each in specs for spec, _ in each}
        wanted = tuple((index, tuple((made[spec], draws) for spec, draws in each)) for index, each in specs)
        job = replace(bare, wanted=wanted)
        with bench.gate.held(0 if job.sketched else job.size):
            yield from Replay(bench.gradients, [job], session.settings, bench.allocation).blocks()


#: Seconds to wait for a scheduler, and then for a first worker.
CONNECT_SECONDS = 10
#: Seconds that a task should take: many times what sending it costs, and little to do again when a worker is lost.
TASK_SECONDS = 2.0
#: Tasks that are with the cluster at a time, for each of its threads and at least.
_AHEAD, _FEWEST = 4, 64
#: The topic on which workers report finished blocks. One for all sweeps: the scheduler keeps its last 1000 messages.
_TOPIC = "gtrace-sweep"
#: Seconds between two checks whether a task is done.
_PATIENCE = 0.1

_ADDRESS = re.compile(r"(tcp|tls|ucx|wss?)://.+")
_LOCAL = re.compile(r"local:([1-9]\d{0,3})")
_FORMS = "give tcp://HOST:PORT, the scheduler's file, or local:N for N processes of this machine"


@contextmanager
def connected(scheduler: str | os.PathLike[str] | Client) -> Iterator[Client]:
    """A client of a cluster whose workers run this build of gtrace.

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
        raise UsageError("--scheduler: needs Dask, which is not installed: pip install 'gradtrace[dask]'") from None
    if isinstance(scheduler, distributed.Client):
        _check_workers(scheduler)
        yield scheduler
        return
    # We raise one clear line for each failure; Dask would also log it, at length.
    with silence_logging_cmgr(logging.CRITICAL), _client(os.fspath(scheduler)) as client:
        _check_workers(client)
        yield client


@contextmanager
def _client(place: str) -> Iterator[Client]:
    """A client of the cluster at ``place``; ``local:N`` starts that cluster first."""
    import distributed

    local = _LOCAL.fullmatch(place)
    if local is not None:
        # Nobody asked for a dashboard, so it takes any free port. The sweep itself bounds the memory.
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
    """The address that a scheduler file holds."""
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
    """Raise UsageError if there are no workers, or if one of them cannot give this sweep's rows."""
    if client.asynchronous:
        raise UsageError("--scheduler: the client is asynchronous; pass one made without asynchronous=True")
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
    """Collects the blocks of tasks: early ones from tasks that still run, in their order, and the rest at the end.

    Args:
        sink: gets each block once, even if a lost worker's task ran twice.
    """

    def __init__(self, sink: Callable[[Block], None]) -> None:
        self._sink = sink
        self._early: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        #: blocks of each task at work that were handed over
        self._taken: dict[str, int] = {}

    def heard(self, event: tuple[float, Mapping[str, Any]]) -> None:
        """Take a worker's message; any thread may call this."""
        self._early.put(event[1])

    def begin(self, task: str) -> None:
        """A task is sent."""
        self._taken[task] = 0

    def end(self, task: str, blocks: Sequence[Block]) -> None:
        """A task is done; ``blocks`` are all its blocks."""
        self._hand_over(task, 0, blocks)
        del self._taken[task]

    def drain(self, patience: float = 0) -> None:
        """Hand over early blocks; wait up to ``patience`` seconds for the first."""
        from distributed.protocol import pickle

        try:
            while True:
                said = self._early.get(timeout=patience) if patience else self._early.get_nowait()
                patience = 0
                # Messages of another sweep on the same cluster are skipped.
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

    Tasks of a lost worker run again elsewhere. On an exception or Ctrl-C, all tasks are cancelled and workers stop
    after their current step; blocks that have arrived are handed over first.

    Raises:
        UsageError: as in :func:`work`, with the worker's address.
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
        with suppress(OSError):  # without a scheduler there is nothing to cancel
            client.cancel(list(pending))
            client.unsubscribe_topic(_TOPIC)
        arrivals.drain()
        for future, result in late:
            if future.status == "finished":
                arrivals.end(future.key, result)


def _work(session: Session, task: Sequence[Part], every: float) -> list[Block]:
    """Run a task on a worker: report finished blocks every ``every`` seconds, and put its address into errors."""
    from distributed import get_worker
    from distributed.protocol import pickle

    worker = get_worker()
    key = worker.get_current_task()
    blocks: list[Block] = []
    sent, last = 0, time.monotonic()
    try:
        for block in work(session, task):
            blocks.append(block)
            if time.monotonic() - last >= every:
                early = zlib.compress(pickle.dumps(blocks[sent:]), 1)
                worker.log_event(_TOPIC, {"task": key, "first": sent, "blocks": early})
                sent, last = len(blocks), time.monotonic()
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
        return TraceError(f"the scheduler at {where} is gone; finished blocks are kept: start it and sweep again")
    error: BaseException = result[1]
    if isinstance(error, KilledWorker):
        lost = error.allowed_failures + 1
        return TraceError(
            f"{lost} workers died on the same task, the last at {error.last_worker.address}, probably out of memory: "
            "give each more memory or fewer threads, or lower --chunk; finished blocks are kept"
        )
    if isinstance(error, ImportError):
        return UsageError(f"--scheduler: a worker cannot run this gtrace ({error}): install the same there")
    return error
