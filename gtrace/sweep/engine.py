"""Run independent tasks, such as the jobs of a sweep, on several processors; results go to the caller's thread.

Python itself takes a good part of a sweep, so workers are processes where that is safe and threads elsewhere. A process
is forked when the modules and kernels are loaded, which a fresh one would have to do again, and it opens the files of a
trace itself. Results go back through a pipe; arrays of a gradient's size never do.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import math
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Pipe
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

from gtrace.errors import GtraceError, TraceError
from gtrace.kernels._jit import nothing_compiled
from gtrace.sweep.jobs import Block, Job, Settings
from gtrace.sweep.replay import Replay, batches
from gtrace.sweep.schema import EXPECTATION

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from multiprocessing.connection import Connection

    from gtrace.sweep.fits import Allocation
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.noise_cost import CostJobs
    from gtrace.trace import Trace

Task = TypeVar("Task")
Result = TypeVar("Result")

#: results of a worker that wait for the caller; with more the workers wait, so that memory does not grow
_AHEAD = 8
#: seconds after which the caller looks whether workers still live
_PATIENCE = 1.0
#: A task of at most this part of the work that every worker has runs before them: it loads kernels once for all.
_FIRST = 0.1
#: elements of a tensor after which a worker gives freed memory back; for smaller ones it is needed again at once
_LARGE = 1 << 22
#: elements of the largest tensor on which other processes try each method for the kernels that it needs
_REHEARSED = 1 << 18
#: glibc's M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD, in bytes
_MALLOC = {-1: 1 << 29, -2: 1 << 25, -3: 1 << 25}
#: prctl's request for a signal when the parent dies
_PR_SET_PDEATHSIG = 1


def keep_memory() -> None:
    """Let this process keep what it frees for its next arrays, as far as its C library can.

    The system clears each page that it hands out, which would take a tenth of a sweep's time. Arrays above 32 MiB are
    given back at once.
    """
    with contextlib.suppress(AttributeError):
        libc = ctypes.CDLL(None)
        for option, value in _MALLOC.items():
            libc.mallopt(option, value)


class Gate:
    """Lets threads in, as they come, while what they hold together fits into the room; a larger one enters alone."""

    def __init__(self, room: float) -> None:
        self._free = self._room = room
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()

    @contextlib.contextmanager
    def held(self, size: int) -> Iterator[None]:
        """Hold ``size`` of the room (at most all of it), as soon as that much is free."""
        taken, place = min(size, self._room), object()
        with self._changed:
            self._waiting.append(place)
            # A large one would never enter while small ones pass it.
            self._changed.wait_for(lambda: self._waiting[0] is place and self._free >= taken)
            self._waiting.popleft()
            self._free -= taken
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += taken
                self._changed.notify_all()


class Workers(NamedTuple):
    """How many workers there are, and whether they may be forked.

    Attributes:
        number: at least 1.
        fork: what they read survives a fork.
    """

    number: int
    fork: bool

    @classmethod
    def of(cls, trace: Trace, number: int | None) -> Workers:
        """For work on a trace; by default one worker for each processor.

        The files of a folder are opened for each read. HDF5 and remote traces keep state that two processes must not
        share.
        """
        folder = trace.location is not None and os.path.isdir(trace.location)
        return cls(number or os.cpu_count() or 1, folder)

    @property
    def processes(self) -> bool:
        """Whether workers are processes. Locks that another thread holds during a fork would stay locked."""
        return self.fork and sys.platform == "linux" and len(sys._current_frames()) == 1


class _Said(NamedTuple):
    """What a worker says: a result, or at the end of a task perhaps an error."""

    result: Any = None
    error: BaseException | None = None
    last: bool = True


class _Forked(Generic[Task, Result]):
    """A forked process that runs tasks by their number; it dies with this one.

    Args:
        tasks: the tasks.
        function: task -> results.
        others: the processes forked before.
        sizes: what each task holds.
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        function: Callable[[Task], Iterable[Result]],
        others: Iterable[_Forked[Any, Any]],
        sizes: Sequence[int],
    ) -> None:
        self._pipe, there = Pipe()
        parent = os.getpid()
        _flush()
        # Ctrl-C is for the parent alone, also before the child can say so.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT,))
        try:
            with warnings.catch_warnings():
                # Threads without Python, of a library for linear algebra, take no part in a sweep.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._process = os.fork()
            if not self._process:
                # A pipe that others hold open too is not closed when its owner dies.
                for child in (*others, self):
                    child._pipe.close()
                _serve(there, parent, tasks, function, sizes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        there.close()

    def begin(self, numbers: Iterable[int]) -> None:
        """Run tasks one after the other; nobody waits for what they give."""
        for number in numbers:
            self._pipe.send(number)

    def run(self, number: int) -> Iterator[Result]:
        """The results of a task.

        Raises:
            TraceError: the process was killed.
        """
        try:
            self._pipe.send(number)
            while not (said := self._pipe.recv()).last:
                yield said.result
        except (EOFError, OSError):
            raise TraceError(
                f"sweep: a worker process {self._end()}; finished work is kept. If memory ran out, sweep again with "
                "fewer --jobs or a lower --chunk"
            ) from None
        if said.error is not None:
            raise said.error

    def _end(self) -> str:
        """How the process ended; it stays a zombie, so that its number is not given to another."""
        with contextlib.suppress(ChildProcessError):
            found = os.waitid(os.P_PID, self._process, os.WEXITED | os.WNOWAIT)
            if found is not None and found.si_code != os.CLD_EXITED:
                return f"was killed by {signal.Signals(found.si_status).name}"
        return "ended"

    def kill(self) -> None:
        """End the process at once: it has no file open for writing."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process, signal.SIGKILL)

    def close(self) -> None:
        """End the process and forget it."""
        self.kill()
        self._pipe.close()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._process, 0)


def _serve(
    pipe: Connection,
    parent: int,
    tasks: Sequence[Task],
    function: Callable[[Task], Iterable[Result]],
    sizes: Sequence[int],
) -> NoReturn:
    """Run in a forked process the tasks whose numbers come through the pipe, until it is closed."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # The kernel ends this process with its parent; if it refuses to, the closed pipe does after a step.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # A collection would copy all of the parent's pages.
        gc.freeze()
        while os.getppid() == parent:
            number = pipe.recv()
            error = None
            try:
                for result in function(tasks[number]):
                    pipe.send(_Said(result, last=False))
            except BaseException as found:  # noqa: BLE001
                error = _portable(found)
            # Freed memory of a large tensor would stay with this process while another one takes the next.
            if sizes[number] >= _LARGE:
                with contextlib.suppress(AttributeError):
                    ctypes.CDLL(None).malloc_trim(0)
            _flush()
            pipe.send(_Said(error=error))
    except (EOFError, OSError):
        pass  # the parent has gone
    finally:
        os._exit(0)


def _flush() -> None:
    """Print what was printed: a fork copies what waits in buffers, and a killed process loses it."""
    for stream in (sys.stdout, sys.stderr):
        # Someone else's stream may have no such thing, or be closed.
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def _portable(error: BaseException) -> BaseException:
    """An exception that can be sent; a bug's traceback goes along as a note."""
    if not isinstance(error, GtraceError):
        error.add_note("".join(traceback.format_exception(error)))
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301
    except Exception:  # noqa: BLE001
        plain = RuntimeError(f"{type(error).__name__}: {error}")
        plain.add_note("".join(getattr(error, "__notes__", ())))
        return plain
    return error


class _Crew(Generic[Result]):
    """Threads that run tasks themselves, or each on a process of its own.

    Args:
        runs: one function for each thread: number of a task -> results.
        children: the processes behind them, if there are any.
        sizes: what each task holds.
        room: what they hold together.
    """

    def __init__(
        self,
        runs: Iterable[Callable[[int], Iterable[Result]]],
        children: Sequence[_Forked[Any, Result]],
        sizes: Sequence[int],
        room: float,
    ) -> None:
        self._children, self._sizes, self._gate = children, sizes, Gate(room)
        self._threads = [threading.Thread(target=self._work, args=(run,), daemon=True) for run in runs]
        self._waiting = iter(range(len(sizes)))
        #: a list holds one result, or none when a thread ends
        self._arrivals: queue.Queue[list[Result]] = queue.Queue(_AHEAD * len(self._threads))
        self._stop = threading.Event()
        self._ended: list[Callable[[int], Iterable[Result]]] = []
        self._error: BaseException | None = None

    def _work(self, run: Callable[[int], Iterable[Result]]) -> None:
        try:
            # Threads share one iterator; each step of it is atomic.
            for number in self._waiting:
                self._task(run, number)
                if self._stop.is_set():
                    break
        except BaseException as error:  # noqa: BLE001
            self._stop.set()
            self._error = self._error or error
        # An interrupted caller may lose what it takes, so it does not count these.
        self._ended.append(run)
        self._arrivals.put([])

    def _task(self, run: Callable[[int], Iterable[Result]], number: int) -> None:
        with self._gate.held(self._sizes[number]):
            # The work may have ended while this task waited.
            if not self._stop.is_set():
                for result in run(number):
                    self._arrivals.put([result])
                    if self._stop.is_set():
                        return

    def _drain(self, sink: Callable[[Result], None]) -> None:
        """Hand over results until all threads have ended."""
        while len(self._ended) < len(self._threads) or not self._arrivals.empty():
            with contextlib.suppress(queue.Empty):
                for result in self._arrivals.get(timeout=_PATIENCE):
                    sink(result)

    def work(self, sink: Callable[[Result], None]) -> None:
        """Run all tasks; see :func:`spread`."""
        for thread in self._threads:
            thread.start()
        try:
            self._drain(sink)
        except BaseException:
            self._stop.set()
            self._drain(sink)
            raise
        finally:
            # After a second exception workers may still be at work.
            self._stop.set()
            for child in self._children:
                child.kill()
            self._drain(lambda _: None)
        if self._error is not None:
            raise self._error


def spread(
    tasks: Iterable[Task],
    function: Callable[[Task], Iterable[Result]],
    sink: Callable[[Result], None],
    workers: Workers,
    size: Callable[[Task], int],
    room: float = math.inf,
) -> None:
    """Run every task on workers; ``sink`` is called in this thread with each result as soon as it is there.

    On an exception, of a task or of the sink, and on Ctrl-C, workers stop after the result that they are at, and the
    sink gets all results before the exception is raised again.

    Args:
        tasks: the largest first.
        function: task -> results, one after the other; processes must be able to send them.
        sink: gets the results; those of one task in order.
        workers: the workers. With one, tasks run in this thread.
        size: what a task holds in memory; by it tasks are also compared.
        room: what tasks at work hold together; a larger one runs alone. So memory does not grow with workers.

    Raises:
        TraceError: a worker process was killed.
    """
    waiting = list(tasks)
    sizes = list(map(size, waiting))
    number = min(workers.number, len(waiting))
    here = waiting if number == 1 else []
    processes = number > 1 and workers.processes
    if processes and number * sizes[-1] <= _FIRST * sum(sizes):
        here = [waiting.pop()]
    for task in here:
        for result in function(task):
            sink(result)
    if here is waiting or not waiting:
        return
    # A plugin's code may have started threads of its own.
    processes = processes and workers.processes
    children: list[_Forked[Task, Result]] = []
    try:
        for _ in range(number if processes else 0):
            children.append(_Forked(waiting, function, children, sizes))
        runs: list[Callable[[int], Iterable[Result]]] = [child.run for child in children]
        runs = runs or [lambda place: function(waiting[place])] * number
        _Crew(runs, children, sizes[: len(waiting)], room).work(sink)
    finally:
        for child in children:
            child.close()


def run_jobs(
    gradients: Gradients,
    settings: Settings,
    allocation: Allocation,
    workers: Workers,
    room: int,
    jobs: Sequence[Job],
    sink: Callable[[Block], None],
    costs: CostJobs | None = None,
) -> None:
    """Run every job; ``sink`` is called in this thread with each finished block, see :func:`spread`.

    Tensors in work at a time have at most ``room`` elements together; a larger tensor runs alone. With ``costs``, what
    noise costs on a tensor is measured after its first job, which has just read the gradients.
    """
    sizes = {} if costs is None else costs.sizes()
    first = {job.tensor: job for job in reversed(jobs)}
    alone = [Job(tensor, 32, (), (), size=size) for tensor, size in sizes.items() if tensor not in first]
    first |= {job.tensor: job for job in alone}

    def run(batch: Sequence[Job]) -> Iterator[Block]:
        measured = [job.tensor for job in batch if job.tensor in sizes and job is first[job.tensor]]
        kept = {} if costs is None else {tensor: costs.fitted(tensor) for tensor in measured}
        replay = Replay(gradients, batch, settings, allocation, kept)
        yield from replay.blocks()
        if costs is not None and measured:
            # Together: a commit takes as long as what noise costs on a small tensor.
            yield Block([], [], [d for name in measured for d in costs.details(name, replay.tensors[name].kept)])

    def size(batch: Sequence[Job]) -> int:
        return sum(0 if job.sketched else job.size for job in batch)

    tasks = batches(gradients, [*jobs, *alone], workers.number)
    tasks.sort(key=lambda batch: -sum(job.size for job in batch))
    if workers.number > 1 and tasks:
        # One tensor is enough to load the kernels of all, which happens before there are workers.
        tasks[-1:] = [part for part in (tasks[-1][:-1], tasks[-1][-1:]) if part]
    others = []
    if tasks and nothing_compiled() and workers.processes:
        # Others than the first task has, so that their kernels are compiled, too.
        some = [batch[0] for batch in tasks if len(batch) == 1 and batch[0].size <= _REHEARSED]
        job = next((job for job in [*some, *tasks[-1]] if job.wanted), None)
        if job is not None:
            leader, *more = (partial(run, (part,)) for part in rehearsed(job))
            noise = [partial(costs.details, job.tensor, {})] if costs is not None and job.tensor in sizes else []
            others = _rehearse([leader, *noise, *more], workers)
    try:
        spread(tasks, run, sink, workers, size, room)
    finally:
        for other in others:
            other.close()


def rehearsed(job: Job) -> Iterator[Job]:
    """A step of a job with one method each: first its draws alone, for which no best levels are searched."""
    index, wanted = job.wanted[0]
    methods = {codec.name: (codec, draws) for codec, draws in wanted}
    drawn = [(codec, tuple(draw for draw in draws if draw != EXPECTATION)) for codec, draws in methods.values()]
    for each in dict.fromkeys([*drawn, *methods.values()]):
        if each[1]:
            yield replace(job, wanted=((index, (each,)),), names={}, final=True)


def _rehearse(tasks: Sequence[Callable[[], Iterable[Any]]], workers: Workers) -> list[_Forked[Any, None]]:
    """Processes that run tasks for the sake of the kernels that they compile.

    A kernel is compiled by whoever wants it first, while others wait, so this process finds some of them compiled.
    """

    def rehearse(task: Callable[[], Iterable[Any]]) -> Iterable[None]:
        for _ in task():
            pass
        return ()

    others: list[_Forked[Any, None]] = []
    number = min(workers.number - 1, len(tasks))
    for place in range(number):
        others.append(_Forked(tasks, rehearse, others, [0] * len(tasks)))
        others[-1].begin(range(place, len(tasks), number))
    return others
