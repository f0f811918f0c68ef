"""``gtrace linear``: train linear models at low precision; options, progress and tables."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import sys
from pathlib import Path
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.completion import complete_spec, complete_specs
from gtrace.cli.options import check_output, file_name, load_plugins, print_json
from gtrace.errors import UsageError
from gtrace.schedule import DEFAULT_REFIT
from gtrace_experiments.linear import LINEAR_TASKS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gtrace.cli.train_tables import Spread
    from gtrace_experiments.linear import LinearResult, LinearStudy

#: longest spec that is shown on one line
_NAME = 18
#: losses from here on are those of models that blew up
_HUGE = 1e5
#: options that are parameters of a precision
_PRECISION = ("bits", "quantize", "levels", "chebyshev", "radius", "refetch", "failure")
_SAMPLINGS = ("naive", "nearest", "double", "symmetrized")
_TASKS = "".join(f"  {name:17}{line}\n" for name, line in LINEAR_TASKS.items())


@click.command("linear", epilog=f"\b\nTasks:\n{_TASKS}")
@click.option("--task", type=click.Choice(tuple(LINEAR_TASKS)), default="linear", show_default=True, help="See below.")
@click.option(
    "--data",
    metavar="DATA",
    default="synthetic-100",
    show_default=True,
    help="synthetic-100 (features; add x60000 for that number of samples), heavy-8, or a .csv, .libsvm or .npz file.",
)
@click.option("--target", metavar="NAME", help="Column of the CSV file to predict.  [default: the last]")
@click.option(
    "--quantize",
    metavar="PARTS",
    help="samples, model, gradients, or several with commas.  [default: samples]",
)
@click.option("--bits", type=int, help="Nominal bits of what is quantized, or of a codec that has them.")
@click.option(
    "--sampling",
    type=click.Choice(_SAMPLINGS),
    help="How often a sample is quantized for one gradient.  [default: double; naive with --refetch]",
)
@click.option(
    "--levels",
    type=click.Choice(["uniform", "optimal"]),
    help="Where the samples' levels lie.  [default: uniform]",
)
@click.option(
    "--codec", shell_complete=complete_spec, help="A codec for the gradients, e.g. qsgdinf:bits=3,bucket_size=512."
)
@click.option("--sparsity", type=float, help="Sparsity of a codec that has it, e.g. 0.8.")
@click.option(
    "--compare",
    metavar="ITEMS",
    shell_complete=complete_specs,
    help="Several precisions or codecs instead of one, e.g. naive,double:bits=4,alq:bits=3.",
)
@click.option(
    "--chebyshev",
    type=click.IntRange(min=1),
    metavar="DEGREE",
    help="For logistic and svm: a polynomial instead of the derivative, estimated without bias.",
)
@click.option("--radius", type=float, help="Margins up to which the polynomial holds.  [default: 16]")
@click.option(
    "--refetch",
    type=click.Choice(["l1", "jl"]),
    help="For svm: fetch the exact sample if bounds (l1) or random projections (jl) do not decide the side of the "
    "hinge.",
)
@click.option("--failure", type=float, help="Probability of the wrong side with jl.  [default: 0.01]")
@click.option("--prox", metavar="TERM", help="l1=0.01, l2=0.01, ball=10 or none beside the loss.")
@click.option("--epochs", type=click.IntRange(min=1), help="Passes over the training set.  [default: 30]")
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Samples of a step.")
@click.option("--lr", type=float, help="Step size of the first epoch.  [default: what suits the data]")
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Random seed for data, order and rounding."
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Train with N seeds, one after the other.",
)
@click.option("--refit", default=DEFAULT_REFIT, show_default=True, help="Steps at which a codec's levels are fitted.")
@click.option(
    "--plugin",
    type=click.Path(path_type=Path, dir_okay=False),
    multiple=True,
    help="A Python file with codecs of your own; it is run.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Run log.  [default: TASK-PRECISION.jsonl]")
@click.option("--force", is_flag=True, help="Overwrite an existing run log.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON summary instead of a table.")
def command(*, task: str, output: Path | None, force: bool, as_json: bool, **options: Any) -> None:
    """Train a linear model at low precision, as ZipML does, with full precision beside it.

    Samples, model and gradients can be quantized, alone or together; a gradient codec can be used instead.

    \b
    Examples:
      gtrace linear --quantize samples --bits 5 --sampling double
      gtrace linear --task svm --compare naive,naive:refetch=l1 --bits 8
      gtrace linear --task logistic --codec qsgd:bits=4 --batch-size 16
    """
    load_plugins(options["plugin"])

    from gtrace_experiments.linear import LinearStudy, Prox

    items = _precisions(options)
    path = output or Path(f"{task}-{file_name(str(items[0])) if len(items) == 1 else 'compare'}.jsonl")
    check_output(path, force=force)
    study = LinearStudy(
        task,
        items,
        data=options["data"],
        target=options["target"],
        batch_size=options["batch_size"],
        rate=options["lr"],
        prox=None if options["prox"] is None else Prox.parse(options["prox"]),
        seed=options["seed"],
        seeds=options["seeds"],
        refit=options["refit"],
        **({} if options["epochs"] is None else {"epochs": options["epochs"]}),
    )
    try:
        with _progress(study, as_json=as_json) as on_record:
            study.run(path, force=force, on_record=on_record)
    except KeyboardInterrupt:
        if study.results[0].losses:
            _show(study, path, as_json=as_json)
        raise
    _show(study, path, as_json=as_json)


def _precisions(options: dict[str, Any]) -> list[Any]:
    from gtrace.cli.train import codec_with
    from gtrace.codecs import split_specs
    from gtrace_experiments.linear import Precision

    given = {name: options[name] for name in _PRECISION if options[name] is not None}
    spec, several, sampling = options["codec"], options["compare"], options["sampling"]
    if several is not None:
        if spec is not None or sampling is not None:
            raise UsageError(f"--compare names what is compared; leave out --{'codec' if spec else 'sampling'}")
        if "quantize" in given:
            given["quantize"] = _parts(given["quantize"])
        return [Precision.parse(item, **given) for item in split_specs(several)]
    if spec is not None and sampling is None and not set(given) - {"bits"}:
        chosen = codec_with(spec, {"bits": given.get("bits"), "sparsity": options["sparsity"]})
        return [Precision.parse(str(chosen))]
    if options["sparsity"] is not None:
        raise UsageError("--sparsity is of a --codec that has it")
    parts = _parts(given.pop("quantize", "samples"))
    if "samples" not in parts:
        if sampling is not None:
            raise UsageError(f"--sampling {sampling} quantizes samples; add them to --quantize")
        sampling = "full"
    codec = {} if spec is None else {"codec": codec_with(spec, {})}
    usual = "naive" if options["refetch"] else "double"
    return [Precision.parse(sampling or usual, **given, **codec, quantize=parts)]


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("+", ",").split(","))


def _show(study: LinearStudy, path: Path, *, as_json: bool) -> None:
    """The results so far, on stdout."""
    if as_json:
        print_json(
            {
                "output": str(path),
                **{name: value for name, value in study.describe().items() if name not in ("versions", "tensors")},
                "runs": [_as_dict(study, result) for result in study.results],
                "warnings": study.warnings,
            }
        )
        return
    for text in study.warnings:
        click.echo(f"gtrace: warning: {text}", err=True)
    _print_table(study)
    unfinished = [result for result in study.results if not result.finished]
    if unfinished:
        click.echo(f"interrupted after {len(unfinished[-1].losses)} of {study.epochs} epochs")
    click.echo(f"{path}\nnext: gtrace report {shlex.quote(str(path))}")


def _as_dict(study: LinearStudy, result: LinearResult) -> dict[str, Any]:
    samples, model, gradients = study.bits_per_value(result)
    return {
        "run": result.run,
        "seed": result.seed,
        "epochs": len(result.losses),
        "finished": result.finished,
        "diverged": bool(result.diverged),
        "loss": result.loss,
        "optimum": result.optimum,
        "gap": result.gap,
        "losses": result.losses,
        "test_loss": result.test_loss,
        "accuracy": result.accuracy,
        "sample_bits_per_value": samples,
        "model_bits_per_value": model,
        "gradient_bits_per_value": gradients,
        "bits": result.traffic.total,
        "shared_bits": result.traffic.shared,
        "ratio": result.ratio,
        "sample_variance": result.variance,
        "fetched": result.fetched,
        "flipped": result.flipped,
        "seconds": result.seconds,
        "codec_seconds": result.codec_seconds,
    }


def _print_table(study: LinearStudy) -> None:
    from rich.console import Console
    from rich.table import Table

    from gtrace.cli.train_tables import spread

    seeds = len(study.seeds)
    by_run = {str(item): [r for r in study.results if r.run == str(item)] for item in study.precisions}
    has_gap = math.isfinite(study.results[0].optimum)
    labels, hinge = study.problem.labels, study.problem.hinge
    fetched = any(item.refetch != "none" for item in study.precisions)
    table = Table(box=None, pad_edge=False, padding=(0, 1 if hinge else 2, 0, 0))
    table.add_column("precision", overflow="fold", min_width=_NAME + 2)
    headers = ["loss", "above optimum" if has_gap else "above none", "accuracy" if labels else "test loss", "bits"]
    headers += ["smaller"] * (not hinge) + ["fetched"] * fetched + ["flipped"] * hinge
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    plain = [r.loss for r in by_run["none"]]
    for run, results in by_run.items():
        above = [r.gap for r in results] if has_gap else [r.loss - p for r, p in zip(results, plain, strict=False)]
        tested = 100 * mean(r.accuracy or math.nan for r in results) if labels else mean(r.test_loss for r in results)
        cells = [
            run if len(run) <= _NAME else run.replace(",", ",\n"),
            _number(mean(r.loss for r in results), "{:.4f}"),
            "" if not has_gap and run == "none" else _with(spread(above)),
            _number(tested, "{:.1f} %" if labels else "{:.4f}"),
            "/".join(f"{bits:.3g}" for bits in study.bits_per_value(results[0])),
            *([] if hinge else [f"{results[0].ratio:.1f}x"]),
        ]
        if fetched:
            cells.append(_number(100 * mean(r.fetched for r in results), "{:.2g} %"))
        if hinge:
            cells.append(_number(100 * mean(r.flipped for r in results), "{:.2g} %"))
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(table)
    count, n = study.data.a.shape
    which = f"seed {study.seeds[0]}" if seeds == 1 else f"seeds {study.seeds[0]} to {study.seeds[-1]}"
    text = (
        f"{study.problem.name} on {study.data.name}: {count:,} samples of {n} features, {study.epochs} epochs, batches "
        f"of {study.batch_size}, step {study.rate:.3g}/epoch, {which}.\n"
        f"loss: {study.problem.measure}, of the mean of all models in the second half of the epochs.\n"
    )
    if seeds > 1:
        text += "above: mean and standard deviation over seeds, the other columns means. "
    text += "bits: per value of samples, model and gradients."
    if not hinge:
        text += " smaller: all that moves, than in float32."
    if fetched:
        text += "\nfetched: samples that were needed in full after all."
    if hinge:
        text += "\nflipped: samples whose gradient was that of the wrong side of the hinge."
    console.print(text, soft_wrap=True)


def _with(found: Spread) -> str:
    shown = _number(found.mean, "{:.2g}")
    return f"{shown} ± {found.deviation:.1g}" if math.isfinite(found.deviation) else shown


def _number(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    return form.format(value) if abs(value) < _HUGE else f"{value:.2g}"


@contextlib.contextmanager
def _progress(study: LinearStudy, *, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None] | None]:
    """A bar with the losses on a terminal, nothing in a pipe."""
    if as_json or not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("epochs  {task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=study.epochs * len(study.seeds))

        def update(record: dict[str, Any]) -> None:
            if record["type"] == "step":
                done = (record["seed"] - study.seeds[0]) * study.epochs + record["step"] + 1
                bar.update(task, completed=done, description=f"loss of {record['run']} {record['loss']:.4g}")

        yield update
