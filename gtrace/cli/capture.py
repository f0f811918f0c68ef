"""``gtrace capture``: run a training script and record its gradients, with a live view below its output if wanted.

Importing this imports neither torch nor numpy: the program may set them up first. With ``--live`` a process of its own
shows the capture. ``%load_ext gtrace`` adds the same as a cell magic of notebooks.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import select
import shlex
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

import gtrace
from gtrace import capture
from gtrace.capture.options import CaptureSettings, capture_options
from gtrace.capture.session import CaptureSession, captured, end_of_fork, git_commit, print_line
from gtrace.capture.summary import result_text
from gtrace.cli.options import Command, options
from gtrace.errors import EXIT_INPUT, EXIT_OK, EXIT_USAGE, GtraceError, ScriptError, UsageError
from gtrace.settings import nested, option
from gtrace.torch_hooks.children import after_import, watch_no_more
from gtrace.torch_hooks.launcher import Outcome, Program, run_program
from gtrace.torch_hooks.processes import before_abrupt_exit, first_of_launch, launch_token, launched_place

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class CaptureTarget:
    """What ``gtrace capture`` records, of which kind of program, and where it goes."""

    output: Path | None = option(None, help="Trace to write, .zarr or .h5.  [default: SCRIPT.zarr]")
    is_module: bool = option(False, help="SCRIPT is the name of a module, like python -m.")
    is_code: bool = option(
        False, advanced=True, names=("-c",), help="SCRIPT is code, like python -c; the trace is run.zarr."
    )
    live: bool = option(False, help="Show loss, norm, energy by layer and overhead below the script's output.")
    settings: CaptureSettings = nested(CaptureSettings)


@click.command(
    "capture",
    cls=Command,
    context_settings={"allow_interspersed_args": False},
    epilog="Example: gtrace capture --every 10 --exclude '*.bias' -o run.zarr train.py --epochs 3",
)
@options(CaptureTarget)
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(target: CaptureTarget, script: str, args: tuple[str, ...]) -> int:
    """Run SCRIPT with its ARGS and record the gradient of every parameter at its optimizer steps.

    SCRIPT is a file, or an installed command that is written in Python, e.g. trl or torchrun. It runs unchanged and
    ends with the same weights, bit for bit. Options of gtrace come before SCRIPT; everything after it is the
    script's own. A line on stderr after the first recorded step says what that
    takes, and one at the end what was recorded. The exit code is 5 where the script fails, and the message names
    its own.
    """
    if target.is_module and target.is_code:
        raise UsageError("-m and -c exclude each other")
    program = Program(script, args, target.is_module, target.is_code)
    program.check()
    place = launched_place()
    watch_no_more()
    if target.settings.rank == "0" and place.rank:
        return run_program(program).exit_code

    shown = target.output or Path(f"{program.stem}.zarr")
    chosen = capture_options(
        shown, target.settings, run=launch_token() or secrets.token_hex(8), first=first_of_launch()
    )
    attrs = {"argv": program.argv, "git_commit": git_commit(program.folder)}
    # The script may put something else instead of stderr, or close that.
    say = functools.partial(print_line, stream=sys.stderr)
    session = CaptureSession(chosen, attrs, say=say, status=True)

    def leave(exit_code: int) -> int:
        """The program ends the process by itself, so that nothing after ``run_program`` is reached."""
        try:
            return _conclude(program, Outcome(exit_code), session, shown, say)
        except GtraceError as error:
            say(f"gtrace: {error}")
            return error.exit_code
        finally:
            if view:
                view.close()

    view = LiveView(shown, lambda: session.waited, say) if target.live and not place.rank else None
    with contextlib.closing(view) if view else contextlib.nullcontext(), before_abrupt_exit(leave, session.hurry):
        try:
            with after_import("torch", session.start_or_tell), captured(session, chosen, attrs):
                outcome = run_program(program)
            return _conclude(program, outcome, session, shown, say)
        except BaseException:
            # There is no such module, or Ctrl-C came between the program's end and here: nothing must stay hooked.
            session.finish("interrupted")
            raise


def _conclude(
    program: Program, outcome: Outcome, session: CaptureSession, path: Path, say: Callable[[str], None]
) -> int:
    place = launched_place()
    status: Literal["complete", "interrupted"] = "interrupted" if outcome.exit_code else "complete"
    if session.in_child:
        end_of_fork(outcome.exit_code)
        return outcome.exit_code
    summary = session.settle(status) if place.rank is None else session.finish(status)
    with contextlib.suppress(Exception):  # it may be anything by now; the interpreter flushes it at its end, too
        sys.stdout.flush()
    result = result_text(summary, path, place.rank if place.world_size > 1 else None)
    if outcome.exit_code and not outcome.interrupted:
        failed = f"{program.called} failed with exit code {outcome.exit_code}; {result}"
        if place.rank is None:
            raise ScriptError(failed)
        # Whoever launched this process goes by the code of what it launched.
        say(f"gtrace: {failed}")
        return outcome.exit_code
    if place.rank and summary.rows and not summary.errors:
        return EXIT_OK  # one line is enough: rank 0 prints it
    processes = sys.modules.get("multiprocessing.process")
    if not summary.rows and processes and any(not one.daemon for one in processes.active_children()):
        say(f"gtrace: nothing was captured in {path} yet; other processes of the script go on and record theirs")
        return EXIT_OK
    name = shlex.quote(str(path))
    after = f"; next: gtrace info {name}, gtrace sweep {name}" if summary.rows else ""
    say(f"gtrace: {result}{after}")
    if outcome.interrupted or session.pressed:
        raise click.Abort
    if summary.complaints:
        raise UsageError("; ".join(summary.complaints))
    if place.rank is not None:
        return EXIT_OK
    return EXIT_OK if summary.rows else summary.lost or (EXIT_INPUT if summary.errors else EXIT_USAGE)


#: The process that shows the view. It is nobody's child, so that a script which waits for all of its own does not wait
#: for this one, and finds gtrace where this process found it, and nothing in the current folder. It takes only
#: processor time that the training leaves.
_PROGRAM = (
    "import os, sys; os.fork() and os._exit(0); os.nice(19); os.write(0, b'%d' % os.getpid()); "
    "sys.path[0] = sys.argv.pop(1); from gtrace.cli.watch import main; main(sys.argv[1])"
)
#: Seconds between two reports of how long training waited; that the view gets to start, and to leave the terminal.
_EVERY, _START, _GRACE = 1.0, 10.0, 2.0
#: Lets the whole terminal scroll again, and does not move the cursor.
WHOLE = "\x1b7\x1b[r\x1b8"


class LiveView:
    """The process that shows a capture live; its ``pid`` is None if nothing is shown.

    ``waited`` gives the seconds that training waited for capture so far, and those of training; ``say`` prints a line.
    """

    def __init__(self, path: Path, waited: Callable[[], tuple[float, float]], say: Callable[[str], None]) -> None:
        self.pid: int | None = None
        self._waited = waited
        self._owner = os.getpid()
        self._done = threading.Event()
        try:
            self._terminal = sys.stderr.fileno()
            if not os.isatty(self._terminal) or os.environ.get("TERM", "dumb") == "dumb":
                say("gtrace: --live needs a terminal as stderr; nothing is shown live")
                return
            self._socket, theirs = socket.socketpair()
            self._socket.settimeout(_START)
            with theirs:
                _start(path.absolute(), self._terminal, theirs)
            self.pid = int(self._socket.recv(32))
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
            say(f"gtrace: --live could not start ({error}); nothing is shown live")
            return
        self._thread = threading.Thread(target=self._report, name="gtrace-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the view; does nothing in a forked child, or a second time."""
        if self.pid is None or os.getpid() != self._owner:
            return
        view, self.pid = self.pid, None
        self._done.set()
        self._thread.join(_GRACE)
        with self._socket:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self._ended(0.0):
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.kill(view, number)
                self._ended(_GRACE)
        # It may have been killed with its lines on the terminal, which takes nothing at all after Ctrl-S.
        with contextlib.suppress(OSError, ValueError):
            if os.isatty(self._terminal) and select.select([], [self._terminal], [], 0)[1]:
                os.write(self._terminal, WHOLE.encode())

    def _ended(self, seconds: float) -> bool:
        """Whether the process ends within some seconds, with which its end of the socket is closed."""
        self._socket.settimeout(seconds)
        try:
            return not self._socket.recv(1)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            return True

    def _report(self) -> None:
        self._socket.settimeout(0)
        while not self._done.wait(_EVERY):
            try:
                self._socket.send(json.dumps(self._waited()).encode() + b"\n")
            except BlockingIOError:
                continue
            except OSError:
                return


def _start(path: Path, terminal: int, reports: socket.socket) -> None:
    about = {"path": str(path), "since": identity(path), "parent": os.getpid()}
    package = os.path.dirname(os.path.dirname(os.path.abspath(gtrace.__file__)))
    # Kernels with one thread: the processors are for the training.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, package, json.dumps(about)],
        stdin=reports.fileno(),
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **threads},
        timeout=_START,
        check=True,
    )


def identity(path: Path) -> str:
    """A word that another trace at the same path does not have; empty if nothing is there."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_ino}.{about.st_ctime_ns}"


@click.command("%%gtrace_capture", cls=Command, epilog="Example: %%gtrace_capture run.zarr --every 10 --force")
@options(CaptureSettings)
@click.argument("path", default="run.zarr", type=click.Path(path_type=Path))
def _read(settings: CaptureSettings, path: Path) -> tuple[Path, CaptureSettings]:
    """Run this cell and record the gradients of everything that it trains in PATH, run.zarr by default."""
    return path, settings


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext gtrace`` does in a shell of IPython."""
    shell.register_magic_function(functools.partial(_run_cell, shell), "cell", "gtrace_capture")


def _run_cell(shell: Any, line: str, cell: str) -> None:
    try:
        chosen = _read.main(shlex.split(line), prog_name=_read.name, standalone_mode=False)
        if not isinstance(chosen, tuple):
            return  # --help
        path, settings = chosen
        with capture(path, **vars(settings)) as session:  # type: ignore[operator]
            done = shell.run_cell(cell)
            status = "complete" if done.success else "interrupted"
            session.finish(status)
        print_line(f"gtrace: {result_text(session.settle(status), path)}")
    except click.ClickException as error:
        shell.show_usage_error(error.format_message())
    except GtraceError as error:
        shell.show_usage_error(str(error))
