"""``gtrace trace export``: write a trace for other programs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import click

from gtrace.cli.console import echo, step_progress
from gtrace.cli.options import JSON, STEPS, TENSORS, Command, TracePath, arguments, options, pick, print_json
from gtrace.settings import KIND, option


@dataclass(frozen=True)
class ExportSettings:
    """The options of ``gtrace trace export``."""

    to: str = option("npz", choices=("npz", "safetensors", "parquet"), help="Format.")
    output: Path | None = option(
        None,
        names=("-o", "--output"),
        help="The folder, for parquet the file.  [default: TRACE.npz, TRACE.safetensors or TRACE.parquet]",
    )
    tensors: tuple[str, ...] = option((), call=("choice",), **TENSORS)
    steps: tuple[int, ...] | None = option(None, call=("choice",), **STEPS)
    kind: str | None = option(None, call=("choice",), **KIND)
    optimizer: int | None = option(None, call=("choice",), metavar="N", help="Only tensors that this optimizer steps.")
    rank: int | None = option(None, call=("choice",), metavar="N", help="Only this process of several.")
    force: bool = option(False, help="Replace a file or an earlier export that is there.")
    as_json: bool = option(False, **JSON)


@click.command("export", cls=Command)
@click.argument("trace", type=TracePath())
@options(ExportSettings)
def command(settings: ExportSettings, trace: Path | str) -> None:
    """Write the gradients of TRACE as one .npz or .safetensors file per step, or as one Parquet table.

    \b
    Example:
      gtrace trace export run.zarr --to npz -o grads
    """
    from gtrace.report.names import count, literal
    from gtrace.trace import open_trace
    from gtrace.trace.io.exporting import ExportChoice, export_trace
    from gtrace.trace.io.remote import stem_of

    with open_trace(trace) as opened, step_progress("export", quiet=settings.as_json) as progress:
        made = export_trace(
            opened,
            settings.output or Path(f"{stem_of(trace)}.{settings.to}"),
            settings.to,
            ExportChoice(**arguments(settings, "choice")),
            force=settings.force,
            progress=progress,
        )
    if settings.as_json:
        print_json({"output": os.fspath(made.output), **pick(made, "steps", "tensors", "files")})
        return
    echo(f"{count(len(made.steps), 'step')}, {count(len(made.tensors), 'tensor')} in {count(made.files, 'file')}")
    echo(literal(os.fspath(made.output)))
