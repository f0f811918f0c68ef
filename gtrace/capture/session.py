"""One capture from start to end, in this process and those that it launches: hooks, recorder and trace."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import platform
import signal
import subprocess
import sys
import threading
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

from gtrace.capture.options import CaptureOptions, CaptureSettings, capture_options
from gtrace.capture.summary import CaptureSummary, all_parts
from gtrace.capture.writer import quiet_logs
from gtrace.errors import GtraceError, UsageError
from gtrace.torch_hooks import processes
from gtrace.torch_hooks.children import after_import, children_call
from gtrace.torch_hooks.launcher import hide_machinery

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import TracebackType

    from torch import nn
    from torch.optim import Optimizer

    from gtrace.capture.recorder import Recorder
    from gtrace.trace import SketchPlan, TraceWriter


class CaptureSession:
    """Watches this process from :meth:`start` to :meth:`finish`.

    Args:
        options: what to record, and where.
        attrs: further attributes of the trace.
        say: prints one line for the user; to stderr by default.
        launched: this process was launched by the one that runs the program.
        status: also report progress after the first recorded step.

    Raises:
        UsageError: torch is not installed.
    """

    def __init__(
        self,
        options: CaptureOptions,
        attrs: Mapping[str, object] | None = None,
        *,
        say: Callable[[str], None] | None = None,
        launched: bool = False,
        status: bool = False,
    ) -> None:
        if importlib.util.find_spec("torch") is None:
            raise UsageError("gtrace.capture needs PyTorch, which is not installed: pip install torch")
        self._status = status or options.verbose
        self._options = options
        self._attrs = attrs or {}
        self._say = say or print_line
        self._launched = launched
        self._broken = False
        self._place = processes.Place()
        self._recorder: Recorder | None = None
        self._summary: CaptureSummary | None = None
        self._owner = os.getpid()
        #: of the parent, in a forked child; kept, because files that it has open must not be closed here
        self._inherited: Recorder | None = None
        #: Ctrl-C came while the trace was being finished, which went on
        self.pressed = False
        #: another program takes this process
        self.replaced = False
        self._finishing = threading.RLock()
        self._ends = False

    def start(self, optimizers: Iterable[Optimizer] | None = None, models: Sequence[nn.Module] | None = None) -> None:
        """Install the hooks. Imports torch.

        Args:
            optimizers: watch only these.
            models: name parameters by these modules only, instead of searching the process.
        """
        with quiet_logs():
            from gtrace.capture.recorder import Recorder

            recorder = Recorder(
                self._create,
                self._options,
                optimizers=optimizers,
                models=models,
                sharers=self._sharers,
                plan=self._plan(),
                say=self._say,
                report=self._report,
            )
            recorder.install()
            if self._inherited is not None:
                recorder.hooks.adopt(self._inherited.hooks)
        self._recorder = recorder

    def start_or_tell(self, start: Callable[[], None] | None = None) -> None:
        """Install the hooks in a program that must not notice; if that fails, it runs without capture."""
        if self.in_child:
            return
        try:
            (start or self.start)()
        except Exception as error:  # noqa: BLE001 - the program's import of torch must succeed
            self._broken = True
            self._say(f"gtrace: warning: capture could not start: {type(error).__name__}: {error}")

    def finish(self, status: Literal["complete", "interrupted"]) -> CaptureSummary:
        """Remove the hooks, write queued rows, close the trace and return the summary.

        Ctrl-C does not interrupt it: the first one says how many steps are still to be written, the second one drops
        them. In a forked child this does nothing: its own session does.

        Args:
            status: whether the run ended normally; stored in the trace.
        """
        if self._summary is None and (self.in_child or self._recorder is None):
            self._summary = CaptureSummary(self._options.path, errors=int(self._broken))
        if self._summary is not None:
            return self._summary
        assert self._recorder is not None
        with processes.counting_ctrl_c(self._recorder.press) as presses, self._finishing, quiet_logs():
            self._ends = True
            if self._summary is None:
                self._summary = self._recorder.finish(status)
            self.pressed = self.pressed or bool(presses)
        return self._summary

    def hurry(self) -> bool:
        """Let :meth:`finish` end soon, whatever is not written by then; whether it has begun. Any thread may call."""
        if self._recorder is not None:
            self._recorder.hurry()
        return self._ends

    def settle(self, status: Literal["complete", "interrupted"]) -> CaptureSummary:
        """Finish a trace that launched processes also wrote to, and return the summary of all of them.

        ``status`` is how the run as a whole ended. Call it after :meth:`finish`.
        """
        summary, options = self.finish(status), self._options
        if self.replaced:
            self._say("gtrace: warning: capture ended before os.exec, which failed; later steps are not recorded")
            status = "interrupted"
        if options.run is None or summary.lost or not options.path.is_dir():
            return summary
        from gtrace.trace.shared import belongs_to, settle

        if not belongs_to(options.path, options.run):
            return summary
        try:
            settle(options.path, options.run, status)
            return all_parts(options.path, summary)
        except GtraceError as error:
            self._say(f"gtrace: warning: capture: {error}")
            return summary

    def note(self, facts: Mapping[str, object]) -> None:
        """Store further attributes with the trace; comes before :meth:`finish`."""
        if self._recorder is not None and not self.in_child:
            self._recorder.attrs = {**self._recorder.attrs, **facts}

    @property
    def waited(self) -> tuple[float, float]:
        """Seconds that training waited for capture so far, and seconds of training."""
        return (0.0, 0.0) if self._recorder is None else self._recorder.waiting()[1:]

    @property
    def times(self) -> dict[str, Any]:
        """What is known so far about the time of steps, the fields of :class:`gtrace.trace.facts.StepTimes`."""
        return {} if self._recorder is None else self._recorder.hooks.clock.describe()

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child of the capturing process, which has a session of its own."""
        return os.getpid() != self._owner

    def hand(self, gradients: Mapping[str, Any], loss: float, lr: float) -> None:
        """Record gradients that the program hands over; see :func:`gtrace.capture.record_gradients`."""
        if self._recorder is not None and not self.in_child:
            self._recorder.hooks.hand(gradients, loss, lr)

    def pause(self) -> Callable[[], None] | None:
        """Let no row be written until the result is called; None if one takes longer than ``PATIENCE``."""
        return (lambda: None) if self._recorder is None else self._recorder.pause()

    def successor(self) -> CaptureSession:
        """In a forked child: stop watching for the parent, and return the child's own session."""
        own = CaptureSession(replace(self._options, first=False), self._attrs, launched=True, status=self._status)
        own._inherited = self._recorder or self._inherited
        if self._recorder is not None:
            self._recorder.abandon()
        return own

    def _report(self, text: str) -> None:
        """Report progress; only the first of several processes does."""
        place = self._place
        if self._status and (place.rank == 0 or (place.rank is None and not self._launched)):
            self._say(text)

    def _sharers(self) -> int:
        """Number of processes that share the budget; 0 if this one records nothing."""
        options = self._options
        place = self._place = processes.process_place()
        if options.rank == "0":
            return 0 if place.rank else 1
        if options.path.suffix != ".zarr" and (self._launched or place.world_size > 1):
            if self._recorder is not None and (place.rank or 0) == 0:
                self._recorder.error(
                    UsageError(
                        f"{options.path.name}: an HDF5 trace cannot take the steps of several processes; "
                        "choose a name that ends in .zarr"
                    )
                )
            return 0
        return place.world_size

    def _plan(self) -> SketchPlan | None:
        if self._options.sketch is None:
            return None
        from gtrace.trace import SketchPlan
        from gtrace.types import STORED_MANTISSA

        mantissa = self._options.sketch_mantissa
        return SketchPlan.parse(self._options.sketch, STORED_MANTISSA if mantissa is None else mantissa)

    def _create(self, found: Mapping[str, object]) -> tuple[TraceWriter, int]:
        import numpy as np
        import torch

        from gtrace.trace import create_trace

        versions = {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__}
        place, options, plan = self._place, self._options, self._plan()
        attrs = {
            **found,
            **self._attrs,
            "world_size": place.world_size,
            "versions": versions,
            "capture": options.describe(),
            **({} if plan is None else {"sketch": plan.describe()}),
        }
        if options.run is None or options.path.suffix != ".zarr":
            return create_trace(options.path, force=options.force, attrs=attrs), 0
        from gtrace.trace.shared import join_trace

        return join_trace(
            options.path,
            run=options.run,
            rank=place.rank,
            writers=1 if options.rank == "0" else place.world_size,
            force=options.force,
            attrs=attrs,
            launcher=options.launcher,
            first=options.first,
        )


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print a line for the user, between the program's own output, on the present stderr or another stream."""
    stream = sys.stderr if stream is None else stream
    # A closed stderr must neither stop training nor the thread that writes.
    with contextlib.suppress(OSError, ValueError):
        # In one write: the writer's thread may print warnings.
        stream.write(f"{text}\n")
        stream.flush()


def git_commit(folder: str) -> str | None:
    """The commit that is checked out at ``folder``; None outside a repository or without git."""
    command = ["git", "-C", folder, "rev-parse", "HEAD"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


@contextlib.contextmanager
def captured(session: CaptureSession, options: CaptureOptions, attrs: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, processes that are launched or forked record into the same trace, each under its own rank."""
    # A tracker of the program's own is in this process alone.
    shared = options if isinstance(options.to, str) else replace(options, to=None)
    settings = {field.name: getattr(shared, field.name) for field in fields(CaptureSettings)}
    message = {"path": str(options.path), "run": options.run, "settings": settings, "attrs": dict(attrs)}
    _watch_processes()
    with children_call(__name__, message):
        _active.append(session)
        try:
            yield
        finally:
            # A forked child that leaves the block has a session of its own.
            if session in _active:
                _active.remove(session)


#: the sessions of this process whose forked children are captured, the latest last, which captures them
_active: list[CaptureSession] = []
#: the forked child that this process is
_child: _Child | None = None
#: lets the next row be written after a fork, which waited for one; None if it did in vain
_resume: Callable[[], None] | None = None


@functools.cache
def _watch_processes() -> None:
    os.register_at_fork(before=_before_fork, after_in_parent=lambda: _resume and _resume(), after_in_child=_after_fork)
    # All others call one of them.
    os.execv, os.execve = _finishing_first(os.execv), _finishing_first(os.execve)


def _finishing_first(execute: Callable[..., Any]) -> Callable[..., Any]:
    """``os.exec*`` that finish the capture: Python that this process becomes records on, as one that was launched."""

    @functools.wraps(execute)
    def call(path: Any, *arguments: Any) -> Any:
        # ``os.execvp`` tries each folder of PATH.
        if _active and os.path.isfile(path):
            _active[-1].finish("complete")
            _active[-1].replaced = True
        return execute(path, *arguments)

    return call


def _before_fork() -> None:
    """Wait until the row that is being written is done: a child would inherit the locks of the thread that writes."""
    global _resume  # noqa: PLW0603 - what a process is
    _resume = _active[-1].pause() if _active else None


def _after_fork() -> None:
    """Give a forked child a session of its own. Most children never train, so this must be quick."""
    global _child  # noqa: PLW0603 - what a process is
    if not _active:
        return
    try:
        processes.release_signals()
        _active[:] = [_active[-1].successor()]
        if _resume is None:
            raise TimeoutError("this child was forked while its parent wrote a step")
        _child = _Child(_active[-1])
        after_import("torch", functools.partial(_child.session.start_or_tell, _child.start))
    except Exception as error:  # noqa: BLE001 - the child must live as without capture
        print_line(f"gtrace: warning: capture could not start: {type(error).__name__}: {error}")


def current_session() -> CaptureSession | None:
    """The session that captures this process's program, if there is one."""
    return _active[-1] if _active else None


def end_of_fork(exit_code: int) -> None:
    """Finish the capture of a forked child that ends as its parent's program would."""
    if _child is not None:
        _child.leave(exit_code)


def start(message: Mapping[str, Any]) -> None:
    """Record in this process until it ends; called when it has imported torch. Never stops the process."""
    try:
        run = message["run"]
        launcher = None
        token = processes.launch_token() if processes.spans_machines() else None
        if token not in (None, run):
            # Every machine has its own launching process, and all of them write one trace.
            run, launcher = token, run
        settings = CaptureSettings(**message["settings"])
        options = capture_options(Path(message["path"]), settings, run=run, launcher=launcher)
        child = _Child(CaptureSession(options, message["attrs"], launched=True, status=True))
        child.start()
        _watch_processes()
        _active.append(child.session)
    except Exception as error:  # noqa: BLE001 - the program's import of torch must succeed
        print_line(f"gtrace: warning: capture could not start: {type(error).__name__}: {error}")


class _Child:
    """The end of a captured process that was launched or forked, whichever way it ends."""

    def __init__(self, session: CaptureSession) -> None:
        self.session = session
        self._failed = False
        #: by a signal or os._exit
        self._leaves = False
        self._exits = contextlib.ExitStack()

    def start(self) -> None:
        self.session.start()
        self._exits.enter_context(processes.before_abrupt_exit(self.leave, self.session.hurry))
        original = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._failed = True
            if traceback is not None:
                hide_machinery(error)
                traceback = error.__traceback__
            original(kind, error, traceback)

        sys.excepthook = excepthook
        processes.before_shutdown(self._end)
        self._watch_multiprocessing()

    def _watch_multiprocessing(self) -> None:
        """Its processes print what ends them themselves, so that no excepthook sees it."""
        util = importlib.import_module("multiprocessing.util")
        util.register_after_fork(self, _Child._watch_multiprocessing)  # the registry is emptied before the target runs
        util.Finalize(None, self._look_at_error, exitpriority=0)

    def _look_at_error(self) -> None:
        error = sys.exc_info()[1]
        self._failed = self._failed or not (error is None or (isinstance(error, SystemExit) and not error.code))

    def leave(self, exit_code: int) -> int:
        """The process ends by a signal or ``os._exit``."""
        # A pool ends its workers by SIGTERM, and a program its daemons.
        process = importlib.import_module("multiprocessing").current_process()
        expected = exit_code == 128 + signal.SIGTERM and process.daemon
        self._failed, self._leaves = self._failed or (exit_code != 0 and not expected), True
        self._end()
        return exit_code

    def _end(self) -> None:
        if self.session.in_child:
            return
        summary = self.session.finish("interrupted" if self._failed else "complete")
        if self.session in _active:
            _active.remove(self.session)
        if self.session.replaced and summary.rows:
            self.session.settle("interrupted")
        if summary.complaints and summary.rows:
            print_line(f"gtrace: warning: {'; '.join(summary.complaints)}")
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None and multiprocessing._exiting:
            # The session has cleaned up already; what the writer made since (a lock of numcodecs) would be leaked.
            multiprocessing._run_finalizers()
        if not self._leaves:
            self._exits.close()
