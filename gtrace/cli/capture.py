"""``gtrace capture``: run a training script and record its gradients."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.errors import EXIT_OK, GtraceError, ScriptError, UsageError

if TYPE_CHECKING:
    from gtrace.capture.session import CaptureSession, CaptureSummary
    from gtrace.host.launcher import Outcome, Program


def _patterns(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


@click.command(
    "capture",
    context_settings={"allow_interspersed_args": False},
    epilog="Example: gtrace capture --every 10 --exclude '*.bias' -o run.zarr train.py --epochs 3",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Trace to write, .zarr or .h5.  [default: SCRIPT.zarr]",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as in python -m.")
@click.option("--every", type=int, metavar="N", help="Record every N-th step.")
@click.option(
    "--steps",
    metavar="LIST",
    help="Record these steps: 0,10,100-200,500-900:100; 1000+50 is a burst of 50.  [default: auto: every step "
    "at first, then bursts at growing distances, within the budget]",
)
@click.option(
    "--tensors",
    multiple=True,
    metavar="GLOB",
    callback=_patterns,
    help="Record only tensors with such names.",
)
@click.option("--exclude", multiple=True, metavar="GLOB", callback=_patterns, help="Leave out tensors with such names.")
@click.option(
    "--budget",
    metavar="SIZE",
    help="Record at most so many bytes of gradients.  [default: 4GB with automatic steps, else no limit]",
)
@click.option(
    "--kind",
    default="weight",
    metavar="KIND",
    help="Gradients of the loss with respect to what: weight (parameters), neural (outputs of modules) or both.  "
    "[default: weight]",
)
@click.option(
    "--max-elements",
    type=int,
    metavar="N",
    help="Keep N elements of a larger neural gradient, a seeded sample.  [default: 262144]",
)
@click.option("--force", is_flag=True, help="Replace an existing trace.")
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    output: Path | None,
    is_module: bool,
    every: int | None,
    steps: str | None,
    tensors: tuple[str, ...],
    exclude: tuple[str, ...],
    budget: str | None,
    kind: str,
    max_elements: int | None,
    force: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Run SCRIPT with its ARGS and record the gradient of every parameter at its optimizer steps.

    The script runs unchanged and ends with the same weights, bit for bit. Options of gtrace come before
    SCRIPT; everything after it is the script's own. One line on stderr at the end says what was recorded. The
    exit code is 5 where the script fails, and the message names its own.
    """
    from gtrace.host.launcher import Outcome, Program, run_program

    program = Program(script, args, is_module)
    program.check()
    if os.environ.get("RANK", "0") != "0":
        # One process of a distributed run records; the others train along.
        return run_program(program).exit_code

    from gtrace.capture import capture_options
    from gtrace.capture.session import CaptureSession, git_commit
    from gtrace.host.exits import before_abrupt_exit
    from gtrace.host.imports import after_import

    shown = output or Path(f"{program.stem}.zarr")
    options = capture_options(
        shown,
        steps=steps,
        every=every,
        tensors=tensors,
        exclude=exclude,
        budget=budget,
        force=force,
        kind=kind,
        max_elements=max_elements,
    )
    argv = ["-m", script, *args] if is_module else [script, *args]
    session = CaptureSession(options, {"argv": argv, "git_commit": git_commit(program.folder)})

    def leave(exit_code: int) -> int:
        """The program ends the process by itself, so that nothing after ``run_program`` is reached."""
        try:
            return _conclude(program, Outcome(exit_code), session, shown)
        except GtraceError as error:
            click.echo(f"gtrace: {error}", err=True)
            return error.exit_code

    with before_abrupt_exit(leave):
        with after_import("torch", session.start_or_tell):
            outcome = run_program(program)
        return _conclude(program, outcome, session, shown)


def _conclude(program: Program, outcome: Outcome, session: CaptureSession, path: Path) -> int:
    """Finish the trace, say what came of it, and give the exit code."""
    summary = session.finish("interrupted" if outcome.exit_code else "complete")
    if session.in_child:
        return outcome.exit_code
    sys.stdout.flush()
    if outcome.exit_code and not outcome.interrupted:
        failed = f"{_called(program)} failed with exit code {outcome.exit_code}"
        raise ScriptError(f"{failed}; {_result(summary, path)}")
    click.echo(f"gtrace: {_result(summary, path)}{_next(summary, path)}", err=True)
    if outcome.interrupted:
        raise click.Abort
    if summary.complaints:
        raise UsageError("; ".join(summary.complaints))
    return EXIT_OK


def _called(program: Program) -> str:
    return f"-m {program.target}" if program.is_module else program.target


def _result(summary: CaptureSummary, path: Path) -> str:
    if not summary.rows:
        return f"nothing was captured: {_why_nothing(summary)}"
    parts = [
        _tensors(summary),
        _size(summary.bytes),
        f"training waited {summary.blocked:.1%} of its time",
    ]
    if summary.optimizers > 1:
        parts.insert(0, f"{summary.optimizers} optimizers")
    if summary.skipped_steps:
        parts.append(f"{summary.skipped_steps} steps skipped by the gradient scaler")
    if summary.over_budget:
        parts.append("stopped at the budget")
    if summary.errors:
        parts.append(f"{summary.errors} errors")
    seen = "" if summary.rows == summary.steps_seen else f" of {summary.steps_seen}"
    return f"{summary.rows}{seen} steps captured in {path} ({', '.join(parts)})"


def _tensors(summary: CaptureSummary) -> str:
    if not summary.neural_rows:
        return f"{summary.tensors} tensors"
    neural = f"{summary.neural_tensors} neural"
    if summary.neural_rows != summary.rows:
        neural += f" at {summary.neural_rows} steps"
    return f"{summary.tensors} weight and {neural} tensors" if summary.tensors else f"{neural} tensors"


def _why_nothing(summary: CaptureSummary) -> str:
    if summary.errors:
        return "see the warnings above"
    if not summary.torch_seen:
        return "it never imported torch"
    if not summary.steps_seen:
        return "it took no step of a torch optimizer"
    if summary.over_budget:
        return "a single step is larger than the budget; give a larger --budget or fewer --tensors"
    if not summary.steps_wanted:
        return f"none of its {summary.steps_seen} optimizer steps was to be recorded; see --steps and --every"
    return f"its {summary.steps_seen} optimizer steps had no gradient of a tensor that was to be recorded"


def _next(summary: CaptureSummary, path: Path) -> str:
    name = shlex.quote(str(path))
    return f"; next: gtrace info {name}, gtrace sweep {name}" if summary.rows else ""


def _size(count: float) -> str:
    if count < 1000:
        return f"{count:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 1000:
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"
