"""``gtrace sketch``: make a trace of sketches from a full one."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.options import TracePath, print_json
from gtrace.errors import size_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LOST = "kept: expected error, bits and sparsity of codecs with closed forms at these norms and bucket sizes"
_GONE = "lost: the values, so draws, Wasserstein distances, payloads, and codecs without closed forms"


def _patterns(_context: click.Context, _option: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part.strip() for value in values for part in value.split(",") if part.strip())


@click.command("sketch", epilog="Example: gtrace sketch run.zarr -o small.zarr --merge-steps 10")
@click.argument("trace", type=TracePath())
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    help="Trace to write, .zarr or .h5.  [default: TRACE.sketch.zarr]",
)
@click.option(
    "--sketch",
    "sketches",
    default="l2:8192,linf:8192,none",
    show_default=True,
    help="Norms and bucket sizes, as in l2:8192,linf:none; none alone: the plain magnitudes.",
)
@click.option(
    "--mantissa",
    type=click.IntRange(0, 10),
    default=6,
    show_default=True,
    help="Width of bins: 2^N in an octave. 10 loses nothing.",
)
@click.option(
    "--merge-steps",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Sum the sketches of so many consecutive recorded steps.",
)
@click.option("--tensors", multiple=True, metavar="GLOB", callback=_patterns, help="Only tensors with such names.")
@click.option("--force", is_flag=True, help="Replace an existing trace.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(
    trace: Path | str,
    output: Path | None,
    sketches: str,
    mantissa: int,
    merge_steps: int,
    tensors: tuple[str, ...],
    force: bool,
    as_json: bool,
) -> None:
    """Make a small trace of TRACE that keeps moment sketches of its gradients instead of their values.

    It is swept like a full one, in expectation. Tensors whose values take less room than their sketches keep them.
    """
    from gtrace.report.names import count
    from gtrace.trace import SketchPlan, sketch_trace
    from gtrace.trace.io.remote import stem_of

    plan = SketchPlan.parse(sketches, mantissa, merge_steps)
    path = output or Path(f"{stem_of(trace)}.sketch.zarr")
    with _progress(as_json=as_json) as progress:
        done = sketch_trace(trace, path, sketch=plan, tensors=tensors, force=force, progress=progress)
    if as_json:
        print_json(
            {
                "output": str(path),
                **done.plan.describe(),
                "sketched": done.sketched,
                "raw": done.raw,
                "bytes_before": done.bytes_before,
                "bytes_after": done.bytes_after,
            }
        )
        return
    before = done.bytes_before
    share = "" if before is None else f"{size_text(before)} -> "
    click.echo(f"{share}{size_text(done.bytes_after)}" + (f" ({done.bytes_after / before:.2%})" if before else ""))
    click.echo(f"{count(done.sketched, 'tensor')} as sketches, {done.raw} as values, which take less room")
    click.echo(f"{_LOST}\n{_GONE}")
    click.echo(f"{path}\nnext: gtrace sweep {path}")


@contextlib.contextmanager
def _progress(*, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if as_json or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sketch", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
