"""``gtrace sweep``: measure codecs on a trace."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.completion import complete_specs
from gtrace.cli.options import Fractions, Integers, TracePath, codec_options, load_plugins, parse_range, print_json
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gtrace.codecs.assignment import TableLike

_REFITS = ("pooled", "previous", "each", "once")


@click.command("sweep")
@click.argument("trace", type=TracePath())
@click.option(
    "--methods",
    default=None,
    shell_complete=complete_specs,
    help="Codec specs, as in qsgd,nuqsgd:p=0.3; or all.  [default: all]",
)
@click.option(
    "--bits", type=Integers(), default="2-8", show_default=True, help="Nominal bits of codecs that have them."
)
@click.option(
    "--ratio", type=Fractions(), default=None, help="Part of the values that sparsifiers send, as in 0.001-0.1."
)
@click.option(
    "--sparsity", type=Fractions("0.05"), default=None, help="Zeros that pruning aims at, as in 0.5-0.95 or 0.8,0.9."
)
@click.option("--amount", type=Fractions(), default=None, help="Samples per value of mcgq, as in 0.01-1.")
@click.option(
    "--plan",
    "plans",
    type=click.Path(path_type=Path),
    multiple=True,
    metavar="FILE",
    help="A plan, whose rows are called plan:NAME; may be repeated. Without --methods: only plans.",
)
@codec_options
@click.option("--bucket-size", default=None, help="Values per norm: a range such as 128,8192; none for a tensor.")
@click.option("--norm", default=None, help="What a bucket is divided by: l2, linf or l1, comma-separated.")
@click.option("--scope", default=None, help="Buckets over one tensor, or over the whole model: tensor, model.")
@click.option(
    "--draws",
    type=click.IntRange(min=0),
    default=1,
    show_default=True,
    help="Encodings per tensor and step; 0: closed forms only.",
)
@click.option("--tensors", default=None, help="Only tensors that match one of these globs, comma-separated.")
@click.option(
    "--kind",
    type=click.Choice(["weight", "neural"]),
    default=None,
    help="Gradients of weights or of layer outputs.  [default: weight, where the trace has them]",
)
@click.option("--steps", default=None, help="Only these steps, as in 0,10,100-200.")
@click.option(
    "--refit",
    default="pooled",
    show_default=True,
    help="Data that levels and codes are fitted on: pooled (a decayed mean of the captured steps before), previous "
    "(the one before), each (the step itself), once (the first), or steps.",
)
@click.option(
    "--nonfinite",
    type=click.Choice(["skip", "zero", "error"]),
    default="skip",
    show_default=True,
    help="What to do with a tensor that holds NaN or infinity.",
)
@click.option(
    "--optimal/--no-optimal",
    default=True,
    show_default=True,
    help="With a fitted codec among the methods: set each level codec beside the best levels of the same number.",
)
@click.option(
    "--chunk",
    type=click.IntRange(min=1),
    default=2**24,
    show_default=True,
    help="Elements held at a time of larger tensors: a power of two, a multiple of the bucket sizes.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the stochastic rounding.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=None,
    help="Threads; rows do not depend on it.  [default: all processors]",
)
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    default=None,
    help="Run on a Dask cluster: tcp://HOST:PORT, a scheduler file, or local:N processes here. Same rows.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="Result file.  [default: TRACE.sweep.db]",
)
@click.option("--force", is_flag=True, help="Overwrite a result file that belongs to another sweep.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON summary instead of text.")
def command(**options: Any) -> None:
    """Measure codecs on the gradients of TRACE: error, bits, distance, at every tensor and step.

    Codecs that keep memory are replayed over bursts of consecutive steps; without any, all leaves them out.
    A sweep that was interrupted, or that gets more codecs, continues where it stopped.

    \b
    Example:
      gtrace sweep digits_cnn.zarr --methods qsgd,qsgdinf,terngrad --bits 2-8
    """
    run(**options)


def run(
    *,
    trace: Path | str,
    methods: str | None,
    bits: tuple[int, ...],
    ratio: tuple[float, ...] | None,
    sparsity: tuple[float, ...] | None,
    amount: tuple[float, ...] | None,
    plans: tuple[Path, ...],
    error_feedback: bool,
    plugin: tuple[Path, ...],
    bucket_size: str | None,
    norm: str | None,
    scope: str | None,
    draws: int,
    tensors: str | None,
    kind: str | None,
    steps: str | None,
    refit: str,
    nonfinite: str,
    optimal: bool,
    chunk: int,
    seed: int,
    jobs: int | None,
    scheduler: str | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """The command without its options' parsing."""
    from gtrace.codecs import split_specs
    from gtrace.sweep import expand, run_sweep
    from gtrace.sweep.jobs import LEFT_OUT
    from gtrace.trace.io.remote import stem_of

    load_plugins(plugin)
    ranges: dict[str, list[Any]] = {
        "bits": list(bits),
        "ratio": list(ratio or ()),
        "sparsity": list(sparsity or ()),
        "amount": list(amount or ()),
    }
    if bucket_size:
        ranges["bucket_size"] = [
            None if part.strip() == "none" else int(value)
            for part in bucket_size.split(",")
            for value in ([0] if part.strip() == "none" else parse_range(part, "--bucket-size"))
        ]
    for name, text in (("norm", norm), ("scope", scope)):
        if text:
            ranges[name] = [part.strip() for part in text.split(",")]
    methods = methods or ("" if plans else "all")
    codecs: list[TableLike] = []
    if methods:
        codecs += expand(methods, ranges, prefix="ef:" if error_feedback else "")
    if plans:
        from gtrace.planning import load_plan

        codecs += [load_plan(path).table for path in plans]
    path = output or Path(f"{stem_of(trace)}.sweep.db")
    with _progress(as_json=as_json) as progress:
        result = run_sweep(
            trace,
            codecs,
            steps=None if steps is None else [int(v) for v in parse_range(steps, "--steps")],
            tensors=None if tensors is None else [part.strip() for part in tensors.split(",")],
            kind=kind,  # type: ignore[arg-type]
            draws=draws,
            seed=seed,
            refit=_refit(refit),  # type: ignore[arg-type]
            nonfinite=nonfinite,  # type: ignore[arg-type]
            optimal=optimal,
            leave_out=bool(methods) and "all" in split_specs(methods),
            chunk=chunk,
            jobs=jobs,
            scheduler=scheduler,
            output=path,
            force=force,
            command=sys.argv,
            progress=progress,
        )
    if kind is None:
        for other, count in result.provenance.get("left_out", {}).items():
            click.echo(f"gtrace: {count} tensors of {other} gradients left out; --kind {other} takes them", err=True)
    for text in result.warnings:
        if not as_json or text.startswith(LEFT_OUT):
            click.echo(f"gtrace: warning: {text}", err=True)
    tensors_seen, steps_seen = len(set(result["tensor"])), len(set(result["step"]))
    if as_json:
        print_json(
            {
                "output": str(path),
                "rows": len(result),
                "tensors": tensors_seen,
                "steps": steps_seen,
                "codecs": sorted(set(result["codec"])),
                "kind": result.provenance.get("kind"),
                "left_out": result.provenance.get("left_out"),
                "warnings": list(result.warnings),
            }
        )
        return
    click.echo(
        f"{len(result)} rows: {len(set(result['codec']))} codecs on {tensors_seen} tensors at {steps_seen} steps"
    )
    click.echo(f"{path}\nnext: gtrace report {path}")


def _refit(text: str) -> str | list[int]:
    if text in _REFITS:
        return text
    if not text[:1].isdigit():
        raise UsageError(f"--refit: '{text}' is unknown; choose pooled, previous, each, once or steps such as 0,100")
    return [int(v) for v in parse_range(text, "--refit")]


@contextlib.contextmanager
def _progress(*, as_json: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if as_json or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("sweep"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps of tensors"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("sweep", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
