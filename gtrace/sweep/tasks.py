"""A sweep as plain data: jobs cut into tasks that another process runs, and what that process does with them.

A task names what to compute: the trace's path, tensors, steps, specs of codecs and settings. Nothing that is open is
in it, so it can be sent anywhere and run again.
"""

from __future__ import annotations

import functools
import hashlib
import tempfile
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import gtrace
from gtrace.codecs import codec, expecting
from gtrace.codecs.installed import origin_of, require_installed, source_digest
from gtrace.codecs.plugin import load_plugin, plugin_of
from gtrace.errors import GtraceError, TraceError, UsageError
from gtrace.sweep.allocation import Allocation
from gtrace.sweep.bursts import start_of
from gtrace.sweep.engine import Gate, replay_of
from gtrace.sweep.gradients import Gradients
from gtrace.sweep.results import EXPECTATION
from gtrace.trace import open_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from gtrace.codecs import Codec
    from gtrace.sweep.gradients import Kind
    from gtrace.sweep.jobs import Among
    from gtrace.sweep.replay import Block, Job, Settings
    from gtrace.trace import Trace

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
    """What is wrong with a worker's ``build``, None where it is the same."""
    there, here = found.partition("+")[0], wanted.partition("+")[0]
    if found == wanted:
        return None
    if there != here:
        return f"it runs gtrace {there} and this is gtrace {here}: install the same version on both"
    return f"its gtrace {there} has other source than this one: install the same on both"


@dataclass(frozen=True, slots=True)
class Session:
    """What all tasks of one sweep have in common.

    Attributes:
        trace: path or address, the same on every machine.
        fingerprint: of the trace, so that nobody sweeps another one.
        tensors: globs, as in ``run_sweep``.
        kind: of gradient.
        chunk: elements that are held at a time.
        settings: of the rows.
        allocating: specs of the codecs that share something out among tensors, and among which.
        plugins: name and source of the files that codecs come from.
        packages: name, package and digest of the codecs that packages bring, which a worker must have too.
        build: what the sender runs, see :func:`build`.
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


@dataclass(frozen=True, slots=True)
class Part:
    """Some steps of a job, with specs in place of codecs.

    Attributes:
        job: without what is wanted of it.
        wanted: as of a job: index of a step, specs with draws.
    """

    job: Job
    wanted: tuple[tuple[int, tuple[tuple[str, tuple[int, ...]], ...]], ...]

    def to_job(self) -> Job:
        """The job again."""
        made = {spec: codec(spec) for _, specs in self.wanted for spec, _ in specs}
        wanted = tuple((index, tuple((made[spec], draws) for spec, draws in specs)) for index, specs in self.wanted)
        return replace(self.job, wanted=wanted)


def cut(jobs: Iterable[Job], seconds: float) -> Iterator[tuple[Part, ...]]:
    """Tasks of about so many seconds, in the order of the jobs: long jobs in parts, short ones together.

    A codec that keeps memory is replayed from the start of a burst, so where one takes part, a job is cut between
    bursts only. Otherwise it is cut between windows, over which errors are added up.
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
        told = job.wanted[first : place + 1]
        wanted = tuple((at, tuple((str(item), draws) for item, draws in specs)) for at, specs in told)
        yield Part(replace(bare, final=job.final and last), wanted), held
        first, held = place + 1, 0.0


def _seconds(job: Job, codecs: Sequence[tuple[Codec, tuple[int, ...]]]) -> float:
    """A guess at what a step takes."""
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
        _load(session.plugins)
        for name, package, digest in session.packages:
            require_installed(name, package, digest)
        try:
            self._trace = open_trace(session.trace)
        except GtraceError as error:
            told = str(error).removeprefix(f"{session.trace}: ")
            raise TraceError(
                f"cannot open {session.trace} ({told}): every worker has to see the trace under this path"
            ) from None
        if self._trace.fingerprint != session.fingerprint:
            self._trace.close()
            raise TraceError(
                f"{session.trace}: another trace there than here, or one that is still being written; copy it anew"
            )
        self.gradients = Gradients(self._trace, session.tensors, session.kind, session.chunk)
        codecs = [(codec(spec), among) for spec, among in session.allocating]
        self.allocation = Allocation(self.gradients, self.gradients.steps, codecs)
        self.gate = Gate(session.chunk)


_benches: OrderedDict[Session, Bench] = OrderedDict()
_plugins_loaded: dict[str, bytes] = {}
_lock = threading.Lock()


def _bench(session: Session) -> Bench:
    with _lock:
        if session not in _benches:
            _benches[session] = Bench(session)
            # Other tasks may be at work on it: it is closed with the last of them.
            while len(_benches) > _MOST_OPEN:
                _benches.popitem(last=False)
        _benches.move_to_end(session)
        return _benches[session]


@functools.cache
def _plugin_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="gtrace-plugins-")


def _load(plugins: Iterable[tuple[str, bytes]]) -> None:
    """Run plugins that were sent, each once; a newer one takes the place of its namesake."""
    for name, source in plugins:
        if _plugins_loaded.get(name) != source:
            file = Path(_plugin_folder().name) / Path(name).name
            file.write_bytes(source)
            load_plugin(file)
            _plugins_loaded[name] = source


def work(session: Session, task: Sequence[Part]) -> Iterator[Block]:
    """Run a task: the blocks of its parts, always in the same order.

    Raises:
        UsageError: this process runs another gtrace.
        TraceError: the trace cannot be read here.
    """
    bench = _bench(session)
    for part in task:
        job = part.to_job()
        with bench.gate.held(0 if job.sketched else job.size):
            yield from replay_of(job)(bench.gradients, job, session.settings, bench.allocation).blocks()
