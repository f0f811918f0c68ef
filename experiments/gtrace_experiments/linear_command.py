"""``gtrace linear``: train linear models at low precision; options, progress and tables."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean as mean
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import print_results, step_progress
from gtrace.cli.groups import complete_spec, complete_specs
from gtrace.cli.options import PLUGIN, arguments, codecs_with, file_name, load_plugins, options, pick, print_json
from gtrace.errors import UsageError, check_output
from gtrace.schedule import DEFAULT_REFIT
from gtrace.settings import option

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace_experiments.linear import LinearResult, LinearStudy

#: longest spec that is shown on one line
_NAME = 18
#: losses from here on are those of models that blew up
_HUGE = 1e5
#: tasks of linear models, with one line about each
LINEAR_TASKS = {
    "linear": "linear regression at low precision, end to end",
    "lssvm": "least-squares support vector machine, labels of -1 and 1, ridge term",
    "logistic": "logistic regression",
    "svm": "support vector machine with the hinge loss",
}
_TASKS = "".join(f"  {name:17}{line}\n" for name, line in LINEAR_TASKS.items())


@dataclass(frozen=True)
class LinearSettings:
    """The options of ``gtrace linear``.

    ``call`` marks what :class:`~gtrace_experiments.linear.LinearStudy` (``study``) and a
    :class:`~gtrace_experiments.linear.Precision` (``precision``) take under its own name.
    """

    task: str = option("linear", choices=tuple(LINEAR_TASKS), help="See below.")
    data: str = option(
        "synthetic-100",
        call=("study",),
        metavar="DATA",
        help="synthetic-100 (features; add x60000 for that number of samples), heavy-8, or a .csv, .libsvm or .npz "
        "file.",
    )
    target: str | None = option(
        None, call=("study",), metavar="NAME", help="Column of the CSV file to predict.  [default: the last]"
    )
    quantize: str | None = option(
        None,
        call=("precision",),
        metavar="PARTS",
        help="samples, model, gradients, or several with commas.  [default: samples]",
    )
    bits: int | None = option(
        None, call=("precision",), help="Nominal bits of what is quantized, or of a codec that has them."
    )
    sampling: str | None = option(
        None,
        choices=("naive", "nearest", "double", "symmetrized"),
        help="How often a sample is quantized for one gradient.  [default: double; naive with --refetch]",
    )
    levels: str | None = option(
        None,
        call=("precision",),
        choices=("uniform", "optimal"),
        help="Where the samples' levels lie.  [default: uniform]",
    )
    codec: str | None = option(
        None, shell_complete=complete_spec, help="A codec for the gradients, e.g. qsgdinf:bits=3,bucket_size=512."
    )
    sparsity: float | None = option(None, help="Sparsity of a codec that has it, e.g. 0.8.")
    compare: str | None = option(
        None,
        metavar="ITEMS",
        shell_complete=complete_specs,
        help="Several precisions or codecs instead of one, e.g. naive,double:bits=4,alq:bits=3.",
    )
    chebyshev: int | None = option(
        None,
        call=("precision",),
        minimum=1,
        metavar="DEGREE",
        help="For logistic and svm: a polynomial instead of the derivative, estimated without bias.",
    )
    radius: float | None = option(
        None, call=("precision",), help="Margins up to which the polynomial holds.  [default: 16]"
    )
    refetch: str | None = option(
        None,
        call=("precision",),
        choices=("l1", "jl"),
        help="For svm: fetch the exact sample if bounds (l1) or random projections (jl) do not decide the side of the "
        "hinge.",
    )
    failure: float | None = option(
        None, call=("precision",), help="Probability of the wrong side with jl.  [default: 0.01]"
    )
    prox: str | None = option(None, metavar="TERM", help="l1=0.01, l2=0.01, ball=10 or none beside the loss.")
    epochs: int | None = option(None, minimum=1, help="Passes over the training set.  [default: 30]")
    batch_size: int = option(1, call=("study",), minimum=1, help="Samples of a step.")
    lr: float | None = option(None, help="Step size of the first epoch.  [default: what suits the data]")
    seed: int = option(0, call=("study",), minimum=0, help="Random seed for data, order and rounding.")
    seeds: int = option(1, call=("study",), minimum=1, metavar="N", help="Train with N seeds, one after the other.")
    refit: str = option(DEFAULT_REFIT, call=("study",), help="Steps at which a codec's levels are fitted.")
    plugin: tuple[Path, ...] = option((), **PLUGIN)
    output: Path | None = option(None, help="Run log.  [default: TASK-PRECISION.jsonl]")
    force: bool = option(False, help="Overwrite an existing run log.")
    as_json: bool = option(False, help="Print a JSON summary instead of a table.")


@click.command("linear", epilog=f"\b\nTasks:\n{_TASKS}")
@options(LinearSettings)
def command(settings: LinearSettings) -> None:
    """Train a linear model at low precision, as ZipML does, with full precision beside it.

    Samples, model and gradients can be quantized, alone or together; a gradient codec can be used instead.

    \b
    Examples:
      gtrace linear --quantize samples --bits 5 --sampling double
      gtrace linear --task svm --compare naive,naive:refetch=l1 --bits 8
      gtrace linear --task logistic --codec qsgd:bits=4 --batch-size 16
    """
    load_plugins(settings.plugin)

    from gtrace_experiments.linear import LinearStudy, Prox
    from gtrace_experiments.linear.study import EPOCHS

    items = _precisions(settings)
    named = file_name(str(items[0])) if len(items) == 1 else "compare"
    path = settings.output or Path(f"{settings.task}-{named}.jsonl")
    check_output(path, force=settings.force)
    study = LinearStudy(
        settings.task,
        items,
        rate=settings.lr,
        prox=None if settings.prox is None else Prox.parse(settings.prox),
        epochs=settings.epochs or EPOCHS,
        **arguments(settings, "study"),
    )
    try:
        with step_progress("train", quiet=settings.as_json, unit="epochs") as show:
            study.run(path, force=settings.force, on_record=_following(study, show))
    except KeyboardInterrupt:
        if study.results[0].losses:
            _show(study, path, as_json=settings.as_json)
        raise
    _show(study, path, as_json=settings.as_json)


def _following(study: LinearStudy, show: Callable[..., None] | None) -> Callable[[dict[str, Any]], None] | None:
    """What keeps a bar and the loss beside it up to date; None without a bar."""
    if show is None:
        return None

    def update(record: dict[str, Any]) -> None:
        if record["type"] == "step":
            done = (record["seed"] - study.seeds[0]) * study.epochs + record["step"] + 1
            show(done, study.epochs * len(study.seeds), f"loss of {record['run']} {record['loss']:.4g}")

    return update


def _precisions(settings: LinearSettings) -> list[Any]:
    from gtrace.codecs import split_specs
    from gtrace_experiments.linear import Precision

    given = {name: value for name, value in arguments(settings, "precision").items() if value is not None}
    spec, several, sampling = settings.codec, settings.compare, settings.sampling
    if several is not None:
        if spec is not None or sampling is not None:
            raise UsageError(f"--compare names what is compared; leave out --{'codec' if spec else 'sampling'}")
        if "quantize" in given:
            given["quantize"] = _parts(given["quantize"])
        return [Precision.parse(item, **given) for item in split_specs(several)]
    if spec is not None and sampling is None and not set(given) - {"bits"}:
        chosen = codecs_with([spec], {"bits": given.get("bits"), "sparsity": settings.sparsity})[0]
        return [Precision.parse(str(chosen))]
    if settings.sparsity is not None:
        raise UsageError("--sparsity is of a --codec that has it")
    parts = _parts(given.pop("quantize", "samples"))
    if "samples" not in parts:
        if sampling is not None:
            raise UsageError(f"--sampling {sampling} quantizes samples; add them to --quantize")
        sampling = "full"
    codec = {} if spec is None else {"codec": codecs_with([spec], {})[0]}
    usual = "naive" if settings.refetch else "double"
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
        **pick(result, "run", "seed", "finished", "loss", "optimum", "gap", "losses", "test_loss", "accuracy"),
        "epochs": len(result.losses),
        "diverged": bool(result.diverged),
        "sample_bits_per_value": samples,
        "model_bits_per_value": model,
        "gradient_bits_per_value": gradients,
        "bits": result.traffic.total,
        "shared_bits": result.traffic.shared,
        "sample_variance": result.variance,
        **pick(result, "ratio", "fetched", "flipped", "seconds", "codec_seconds"),
    }


def _print_table(study: LinearStudy) -> None:
    from gtrace.cli.train_task import mean_deviation

    by_run = {str(item): [r for r in study.results if r.run == str(item)] for item in study.precisions}
    has_gap = math.isfinite(study.results[0].optimum)
    labels, hinge = study.problem.labels, study.problem.hinge
    fetched = any(item.refetch != "none" for item in study.precisions)
    plain = [r.loss for r in by_run["none"]]

    def above(run: str, results: list[LinearResult]) -> str:
        if has_gap:
            return _with(*mean_deviation([r.gap for r in results]))
        against = [r.loss - p for r, p in zip(results, plain, strict=False)]
        return "" if run == "none" else _with(*mean_deviation(against))

    runs = by_run.values()
    columns = {
        "precision": [run if len(run) <= _NAME else run.replace(",", ",\n") for run in by_run],
        "loss": [_number(mean(r.loss for r in results), "{:.4f}") for results in runs],
        "above optimum" if has_gap else "above none": [above(run, results) for run, results in by_run.items()],
    }
    if labels:
        columns["accuracy"] = [
            _number(100 * mean(r.accuracy or math.nan for r in results), "{:.1f} %") for results in runs
        ]
    else:
        columns["test loss"] = [_number(mean(r.test_loss for r in results), "{:.4f}") for results in runs]
    columns["bits"] = ["/".join(f"{bits:.3g}" for bits in study.bits_per_value(results[0])) for results in runs]
    if not hinge:
        columns["smaller"] = [f"{results[0].ratio:.1f}x" for results in runs]
    if fetched:
        columns["fetched"] = [_number(100 * mean(r.fetched for r in results), "{:.2g} %") for results in runs]
    if hinge:
        columns["flipped"] = [_number(100 * mean(r.flipped for r in results), "{:.2g} %") for results in runs]
    console = print_results(columns, width=_NAME + 2, gap=1 if hinge else 2)
    count, n = study.data.a.shape
    seeds = len(study.seeds)
    epochs = f"{study.epochs} epoch{'s' * (study.epochs > 1)}"
    which = f"seed {study.seeds[0]}" if seeds == 1 else f"seeds {study.seeds[0]} to {study.seeds[-1]}"
    text = (
        f"{study.problem.name} on {study.data.name}: {count:,} samples of {n} features, {epochs}, batches "
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


def _with(mean: float, deviation: float, _count: int) -> str:
    shown = _number(mean, "{:.2g}")
    return f"{shown} ± {deviation:.1g}" if math.isfinite(deviation) else shown


def _number(value: float, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    return form.format(value) if abs(value) < _HUGE else f"{value:.2g}"
