"""``gtrace trace``: what one does with a trace beside measuring it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import echo, step_progress
from gtrace.cli.groups import SUBCOMMANDS, LazyGroup
from gtrace.cli.options import STEPS, TENSORS, Command, TracePath, arguments, options, pick, print_json
from gtrace.errors import EXIT_INPUT, EXIT_OK, printable, size_text
from gtrace.report.names import count, literal
from gtrace.settings import KIND, option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.trace.check import CheckReport, Fault, Repair
    from gtrace.trace.importing import Imported


@click.group("trace", cls=LazyGroup, table=SUBCOMMANDS["trace"], epilog="Example: gtrace trace check run.zarr --repair")
def command() -> None:
    """Look after traces: what is in one, whether it is whole, other formats, smaller copies."""


_MOST_LINES = 100


@dataclass(frozen=True)
class _CheckSettings:
    repair: bool = option(
        False, help="Make a damaged or interrupted trace usable; a damaged one is kept as NAME.damaged."
    )
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("check", cls=Command, epilog="Example: gtrace trace check run.zarr --repair")
@click.argument("trace", type=TracePath())
@options(_CheckSettings)
def check(settings: _CheckSettings, trace: Path | str) -> int:
    """Read every committed gradient of TRACE and verify it: checksums, presence, statistics, metadata.

    Every fault is reported. The exit code is 0 if there is none, and 3 otherwise; after a repair it is 0. A repair
    keeps all gradients that are right; those that are damaged are absent in the new trace.
    """
    from gtrace.trace.check import check_trace, repair_trace

    repair = repair_trace(trace) if settings.repair else None
    report = check_trace(trace) if repair is None else repair.report
    if settings.as_json:
        print_json(_checked(report, repair))
    else:
        _show_check(report, repair)
    return EXIT_OK if repair is not None or not report.faults else EXIT_INPUT


def _checked(report: CheckReport, repair: Repair | None) -> dict[str, Any]:
    document: dict[str, Any] = {
        "trace": str(report.path),
        **pick(report, "status", "unfinished", "steps", "gradients", "wrong"),
        "being_written": report.live,
        "leftovers": [str(path) for path in report.leftovers],
        "faults": [fault._asdict() for fault in report.faults],
    }
    if repair is not None:
        document["repaired"] = repair.changed
        document["backup"] = None if repair.backup is None else str(repair.backup)
    return document


def _show_check(report: CheckReport, repair: Repair | None) -> None:
    lines = list(_fault_lines(report.faults))
    for line in lines[:_MOST_LINES]:
        echo(line)
    if len(lines) > _MOST_LINES:
        echo(f"... and {len(lines) - _MOST_LINES} more lines; --json has all")
    echo(f"{report.path}: {_check_summary(report)}")
    if repair is None:
        if not report.clean and isinstance(report.path, Path):
            echo(f"next: gtrace trace check {report.path} --repair")
    elif not repair.changed:
        echo("nothing to repair")
    else:
        kept = "" if repair.backup is None else f"; the damaged trace is kept as {repair.backup}"
        echo(f"repaired: {report.gradients - report.wrong} gradients are in {report.path}{kept}")


def _check_summary(report: CheckReport) -> str:
    parts = [f"{report.steps} steps", f"{report.gradients - report.wrong} of {report.gradients} gradients are right"]
    if report.faults:
        parts.append(f"{len(report.faults)} faults")
    if report.live:
        parts.append("being written")
    elif report.unfinished or report.status == "writing":
        parts.append("its writer was killed")
    if report.leftovers:
        parts.append(f"{len(report.leftovers)} leftovers of killed writers")
    return ", ".join(parts)


def _fault_lines(faults: Sequence[Fault]) -> list[str]:
    """One line for each fault, and one for all steps of a tensor that share a chunk, whose messages are the same."""
    lines = []

    def cause(fault: Fault) -> tuple[str, str | None, str]:
        return fault.stream, fault.tensor, fault.what.replace(f"step {fault.step}", "")

    for (stream, tensor, _), group in groupby(faults, key=cause):
        same = list(group)
        if tensor is None:
            lines += [fault.what for fault in same]
        elif len(same) == 1:
            lines.append(f"{stream}, tensor '{printable(tensor)}', step {same[0].step}: {same[0].what}")
        else:
            steps = f"{len(same)} steps from {same[0].step} to {same[-1].step}"
            lines.append(f"{stream}, tensor '{printable(tensor)}', {steps}: {same[0].what}")
    return lines


@dataclass(frozen=True)
class _PackSettings:
    output: Path | None = option(
        None, help="Trace to write, .zarr or .h5.  [default: a Zarr trace is replaced by its shards]"
    )
    force: bool = option(False, help="Replace an existing trace.")


@click.command("pack", cls=Command, epilog="Example: gtrace trace pack run.h5 -o run.zarr")
@click.argument("trace", type=TracePath())
@options(_PackSettings)
def pack(settings: _PackSettings, trace: Path | str) -> None:
    """Rewrite a finished TRACE with the same content: Zarr in shards, which are fewer files, or HDF5.

    The new trace is written beside its place and moved in once it is whole and reads back the same.
    """
    from gtrace.trace.convert import pack_trace
    from gtrace.trace.files import disk_bytes

    before = f" (before: {_count_files(trace)} files)" if isinstance(trace, Path) else ""
    packed = pack_trace(trace, settings.output, force=settings.force)
    echo(f"{packed}: {_count_files(packed)} files, {disk_bytes(packed) / 1e6:.1f} MB{before}")


def _count_files(path: Path) -> int:
    return sum(entry.is_file() for entry in path.rglob("*")) if path.is_dir() else 1


@dataclass(frozen=True)
class _SketchSettings:
    output: Path | None = option(None, help="Trace to write, .zarr or .h5.  [default: TRACE.sketch.zarr]")
    sketch: str = option(
        "l2:8192,linf:8192,none",
        help="Norms and bucket sizes, e.g. l2:8192,linf:none; none alone: the plain magnitudes.",
    )
    mantissa: int = option(6, minimum=0, maximum=10, help="Width of bins: 2^N in an octave. 10 loses nothing.")
    merge_steps: int = option(1, minimum=1, help="Sum the sketches of this many consecutive recorded steps.")
    tensors: tuple[str, ...] = option((), **TENSORS)
    force: bool = option(False, help="Replace an existing trace.")
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("sketch", cls=Command, epilog="Example: gtrace trace sketch run.zarr -o small.zarr --merge-steps 10")
@click.argument("trace", type=TracePath())
@options(_SketchSettings)
def sketch(settings: _SketchSettings, trace: Path | str) -> None:
    """Make a small trace of TRACE that keeps moment sketches of its gradients instead of their values.

    It is swept like a full one, in expectation. Tensors whose values take less room than their sketches keep them.
    """
    from gtrace.trace import SketchPlan, sketch_trace
    from gtrace.trace.remote import stem_of

    plan = SketchPlan.parse(settings.sketch, settings.mantissa, settings.merge_steps)
    path = settings.output or Path(f"{stem_of(trace)}.sketch.zarr")
    with step_progress("sketch", quiet=settings.as_json) as progress:
        done = sketch_trace(trace, path, sketch=plan, tensors=settings.tensors, force=settings.force, progress=progress)
    if settings.as_json:
        counts = pick(done, "sketched", "raw", "bytes_before", "bytes_after")
        print_json({"output": str(path), **done.plan.describe(), **counts})
        return
    before = done.bytes_before
    share = "" if before is None else f"{size_text(before)} -> "
    echo(f"{share}{size_text(done.bytes_after)}" + (f" ({done.bytes_after / before:.2%})" if before else ""))
    echo(f"{count(done.sketched, 'tensor')} as sketches, {done.raw} as values, which take less room")
    echo("kept: expected error, bits and sparsity of codecs with closed forms at these norms and bucket sizes")
    echo("lost: the values, so draws, Wasserstein distances, payloads, and codecs without closed forms")
    echo(f"{path}\nnext: gtrace sweep {path}")


#: By name: torch takes seconds to load, and only the process that reads such files needs it.
STATE_DICTS = dict.fromkeys((".pt", ".pth"), "gtrace.torch_hooks.statedicts:StateDictFile")


@dataclass(frozen=True)
class _ImportSettings:
    output: Path = option(help="The trace: .zarr, .h5 or .hdf5.")
    pattern: str | None = option(
        None,
        call=("rules",),
        metavar="TEMPLATE",
        help="What names say, e.g. '{step}/{tensor}.npy'; also {rank}, and * for anything.",
    )
    step_axis: bool = option(False, call=("rules",), help="The first axis of every array counts steps.")
    steps: tuple[int, ...] | None = option(None, call=("rules",), **STEPS)
    tensors: tuple[str, ...] = option((), call=("rules",), **TENSORS)
    kind: str = option("weight", call=("rules",), **KIND | {"help": "What the arrays are."})
    force: bool = option(False, help="Replace a trace that is there.")
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("import", cls=Command)
@click.argument("sources", metavar="SOURCE...", type=click.Path(path_type=Path), nargs=-1, required=True)
@options(_ImportSettings)
def import_(settings: _ImportSettings, sources: tuple[Path, ...]) -> None:
    """Make a trace of the gradients in SOURCE: files or folders of .npy, .npz, .safetensors, .pt and HDF5, Zarr stores.

    The step is the number of a file or folder, e.g. grads/step_000100.safetensors. What was found is printed.

    \b
    Example:
      gtrace trace import grads/ -o run.zarr
      gtrace trace import grads/ -o run.zarr --pattern '{step}/{tensor}.npy'
    """
    from gtrace.trace.importing import ImportRules, import_trace

    with step_progress("import", quiet=settings.as_json) as progress:
        rules = ImportRules(readers=STATE_DICTS, **arguments(settings, "rules"))
        made = import_trace(sources, settings.output, rules, force=settings.force, progress=progress)
    if not settings.as_json:
        _show_import(made)
        return
    about = {"output": os.fspath(made.output), "step_numbers": made.numbering, "files_ignored": made.ignored}
    print_json({**pick(made, "steps", "tensors", "files", "left_out", "nonfinite"), **about})


def _show_import(made: Imported) -> None:
    from gtrace.trace.importing import STEPS_FROM

    span = f" ({made.steps[0]} to {made.steps[-1]})" if len(made.steps) > 1 else ""
    found = f"{count(len(made.steps), 'step')}{span}, {count(len(made.tensors), 'tensor')}"
    numbered = ", ".join(STEPS_FROM[how] for how in made.numbering)
    echo(f"{found} from {count(made.files, 'file')}; {numbered}")
    if len(made.steps) == 1 and set(made.numbering) <= {"sorted", "none"}:
        echo("nothing named a step: if the first axis of the arrays counts steps, pass --step-axis --force")
    if made.left_out:
        shown = ", ".join(literal(name) for name in made.left_out[:4]) + (", ..." if len(made.left_out) > 4 else "")
        echo(f"left out as no gradients (integers, or no axis of steps): {shown}")
    if made.ignored:
        echo(f"left out: {count(made.ignored, 'other file')}")
    if made.nonfinite:
        echo(f"{count(made.nonfinite, 'value')} not finite: gtrace info says where")
    place = os.fspath(made.output)
    echo(f"{literal(place)}\nnext: gtrace sweep {literal(shlex.quote(place))}")


@dataclass(frozen=True)
class _ExportSettings:
    to: str = option("npz", choices=("npz", "safetensors", "parquet"), help="Format.")
    output: Path | None = option(
        None, help="The folder, for parquet the file.  [default: TRACE.npz, TRACE.safetensors or TRACE.parquet]"
    )
    tensors: tuple[str, ...] = option((), call=("choice",), **TENSORS)
    steps: tuple[int, ...] | None = option(None, call=("choice",), **STEPS)
    kind: str | None = option(None, call=("choice",), **KIND)
    optimizer: int | None = option(None, call=("choice",), metavar="N", help="Only tensors that this optimizer steps.")
    rank: int | None = option(None, call=("choice",), metavar="N", help="Only this process of several.")
    force: bool = option(False, help="Replace a file or an earlier export that is there.")
    as_json: bool = option(False, help="Print JSON instead of text.")


@click.command("export", cls=Command)
@click.argument("trace", type=TracePath())
@options(_ExportSettings)
def export(settings: _ExportSettings, trace: Path | str) -> None:
    """Write the gradients of TRACE as one .npz or .safetensors file per step, or as one Parquet table.

    \b
    Example:
      gtrace trace export run.zarr --to npz -o grads
    """
    from gtrace.trace import open_trace
    from gtrace.trace.exporting import ExportChoice, export_trace
    from gtrace.trace.remote import stem_of

    path = settings.output or Path(f"{stem_of(trace)}.{settings.to}")
    choice = ExportChoice(**arguments(settings, "choice"))
    with open_trace(trace) as opened, step_progress("export", quiet=settings.as_json) as progress:
        made = export_trace(opened, path, settings.to, choice, force=settings.force, progress=progress)
    if settings.as_json:
        print_json({"output": os.fspath(made.output), **pick(made, "steps", "tensors", "files")})
        return
    echo(f"{count(len(made.steps), 'step')}, {count(len(made.tensors), 'tensor')} in {count(made.files, 'file')}")
    echo(literal(os.fspath(made.output)))
