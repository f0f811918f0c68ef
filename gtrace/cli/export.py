"""``gtrace export``: write a trace for other programs."""

from __future__ import annotations

import os
from pathlib import Path

import click

from gtrace.cli.options import TracePath, patterns, print_json, steps_option
from gtrace.cli.progress import step_progress


@click.command("export")
@click.argument("trace", type=TracePath())
@click.option(
    "--to", type=click.Choice(["npz", "safetensors", "parquet"]), default="npz", show_default=True, help="Format."
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="The folder, for parquet the file.  [default: TRACE.npz, TRACE.safetensors or TRACE.parquet]",
)
@click.option("--tensors", multiple=True, metavar="GLOB", callback=patterns, help="Only tensors with such names.")
@click.option("--steps", default=None, help="Only these steps, as in 0,10,100-200.")
@click.option(
    "--kind",
    type=click.Choice(["weight", "neural"]),
    default=None,
    help="Gradients of weights or of layer outputs.  [default: weight, where the trace has them]",
)
@click.option("--optimizer", type=int, metavar="N", help="Only tensors that this optimizer steps.")
@click.option("--rank", type=int, metavar="N", help="Only this process of several.")
@click.option("--force", is_flag=True, help="Replace a file or an earlier export that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
def command(
    trace: Path | str,
    to: str,
    output: Path | None,
    tensors: tuple[str, ...],
    steps: str | None,
    kind: str | None,
    optimizer: int | None,
    rank: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the gradients of TRACE as one .npz or .safetensors file per step, or as one Parquet table.

    \b
    Example:
      gtrace export run.zarr --to npz -o grads
    """
    from gtrace.report.names import count, literal
    from gtrace.trace import open_trace
    from gtrace.trace.io.exporting import export_trace
    from gtrace.trace.io.remote import stem_of

    with open_trace(trace) as opened, step_progress("export", quiet=as_json) as progress:
        made = export_trace(
            opened,
            output or Path(f"{stem_of(trace)}.{to}"),
            to,
            tensors=tensors,
            steps=steps_option(steps),
            kind=kind,
            optimizer=optimizer,
            rank=rank,
            force=force,
            progress=progress,
        )
    if as_json:
        print_json(
            {"output": os.fspath(made.output), "steps": made.steps, "tensors": made.tensors, "files": made.files}
        )
        return
    click.echo(f"{count(len(made.steps), 'step')}, {count(len(made.tensors), 'tensor')} in {count(made.files, 'file')}")
    click.echo(literal(os.fspath(made.output)))
