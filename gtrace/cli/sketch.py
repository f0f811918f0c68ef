"""``gtrace trace sketch``: make a trace of sketches from a full one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gtrace.cli.console import echo, step_progress
from gtrace.cli.options import JSON, TENSORS, Command, TracePath, options, pick, print_json
from gtrace.errors import size_text
from gtrace.settings import option

_LOST = "kept: expected error, bits and sparsity of codecs with closed forms at these norms and bucket sizes"
_GONE = "lost: the values, so draws, Wasserstein distances, payloads, and codecs without closed forms"


@dataclass(frozen=True)
class SketchSettings:
    """The options of ``gtrace trace sketch``."""

    output: Path | None = option(
        None, names=("-o", "--output"), help="Trace to write, .zarr or .h5.  [default: TRACE.sketch.zarr]"
    )
    sketch: str = option(
        "l2:8192,linf:8192,none",
        help="Norms and bucket sizes, e.g. l2:8192,linf:none; none alone: the plain magnitudes.",
    )
    mantissa: int = option(6, minimum=0, maximum=10, help="Width of bins: 2^N in an octave. 10 loses nothing.")
    merge_steps: int = option(1, minimum=1, help="Sum the sketches of this many consecutive recorded steps.")
    tensors: tuple[str, ...] = option((), **TENSORS)
    force: bool = option(False, help="Replace an existing trace.")
    as_json: bool = option(False, **JSON)


@click.command("sketch", cls=Command, epilog="Example: gtrace trace sketch run.zarr -o small.zarr --merge-steps 10")
@click.argument("trace", type=TracePath())
@options(SketchSettings)
def command(settings: SketchSettings, trace: Path | str) -> None:
    """Make a small trace of TRACE that keeps moment sketches of its gradients instead of their values.

    It is swept like a full one, in expectation. Tensors whose values take less room than their sketches keep them.
    """
    from gtrace.report.names import count
    from gtrace.trace import SketchPlan, sketch_trace
    from gtrace.trace.io.remote import stem_of

    plan = SketchPlan.parse(settings.sketch, settings.mantissa, settings.merge_steps)
    path = settings.output or Path(f"{stem_of(trace)}.sketch.zarr")
    with step_progress("sketch", quiet=settings.as_json) as progress:
        done = sketch_trace(trace, path, sketch=plan, tensors=settings.tensors, force=settings.force, progress=progress)
    if settings.as_json:
        print_json(
            {
                "output": str(path),
                **done.plan.describe(),
                **pick(done, "sketched", "raw", "bytes_before", "bytes_after"),
            }
        )
        return
    before = done.bytes_before
    share = "" if before is None else f"{size_text(before)} -> "
    echo(f"{share}{size_text(done.bytes_after)}" + (f" ({done.bytes_after / before:.2%})" if before else ""))
    echo(f"{count(done.sketched, 'tensor')} as sketches, {done.raw} as values, which take less room")
    echo(f"{_LOST}\n{_GONE}")
    echo(f"{path}\nnext: gtrace sweep {path}")
