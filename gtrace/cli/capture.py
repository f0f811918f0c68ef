"""``gtrace capture``: run a training script and record its gradients."""

from __future__ import annotations

import contextlib
import functools
import secrets
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from gtrace.capture.options import CaptureSettings, capture_options
from gtrace.cli.live import live_view
from gtrace.cli.options import Command, options
from gtrace.errors import EXIT_OK, EXIT_USAGE, GtraceError, ScriptError, UsageError
from gtrace.settings import nested, option

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.capture.session import CaptureSession
    from gtrace.capture.summary import CaptureSummary
    from gtrace.torch_hooks.launcher import Outcome, Program


@dataclass(frozen=True)
class CaptureTarget:
    """What ``gtrace capture`` records, of which kind of program, and where it goes."""

    output: Path | None = option(
        None, names=("-o", "--output"), help="Trace to write, .zarr or .h5.  [default: SCRIPT.zarr]"
    )
    is_module: bool = option(False, names=("-m",), help="SCRIPT is the name of a module, like python -m.")
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
    from gtrace.torch_hooks.children import watch_no_more
    from gtrace.torch_hooks.launcher import Outcome, Program, run_program
    from gtrace.torch_hooks.processes import first_of_launch, launch_token, launched_place

    if target.is_module and target.is_code:
        raise UsageError("-m and -c exclude each other")
    program = Program(script, args, target.is_module, target.is_code)
    program.check()
    place = launched_place()
    watch_no_more()
    if target.settings.rank == "0" and place.rank:
        return run_program(program).exit_code

    from gtrace.capture.session import CaptureSession, captured, git_commit, print_line
    from gtrace.torch_hooks.children import after_import
    from gtrace.torch_hooks.processes import before_abrupt_exit

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
            end_view()

    shows = target.live and not place.rank
    with (
        live_view(shown, lambda: session.waited, say, shown=shows) as end_view,
        before_abrupt_exit(leave, session.hurry),
    ):
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
    """Finish the trace, say what came of it, and give the exit code."""
    from gtrace.capture.session import end_of_fork
    from gtrace.capture.words import result_text
    from gtrace.torch_hooks.processes import launched_place

    place = launched_place()
    status: Literal["complete", "interrupted"] = "interrupted" if outcome.exit_code else "complete"
    if session.in_child:
        end_of_fork(outcome.exit_code)
        return outcome.exit_code
    summary = session.finish(status)
    if place.rank is None:
        summary = session.settle(status)
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
    say(f"gtrace: {result}{_next(summary, path)}")
    if outcome.interrupted or session.pressed:
        raise click.Abort
    if summary.complaints:
        raise UsageError("; ".join(summary.complaints))
    if place.rank is not None:
        return EXIT_OK
    return EXIT_USAGE if not summary.rows and not summary.errors else summary.lost


def _next(summary: CaptureSummary, path: Path) -> str:
    name = shlex.quote(str(path))
    return f"; next: gtrace info {name}, gtrace sweep {name}" if summary.rows else ""
