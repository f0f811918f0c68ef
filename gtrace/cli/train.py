"""``gtrace train``: train with a codec on the gradients, beside the same training without."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.options import check_output, codec_options, load_plugins, print_json
from gtrace.errors import UsageError
from gtrace.online.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.online.tasks import describe_task, task_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gtrace.codecs import Codec
    from gtrace.online import RunResult, Study
    from gtrace.online.neural import Layers
    from gtrace.online.run import Kind
    from gtrace.online.shadow import ShadowSummary


#: what stands below the table
_EXPLAINED: dict[Kind, str] = {
    "weight": "accuracy and loss: held-out data. bits: per value. sent: by one worker in a step. smaller: than\n"
    "float32. variance: squared error of the averaged gradient over its energy, mean over the steps.\n"
    "codec CPU: its part of the steps' CPU time.",
    "neural": "accuracy and loss: held-out data. bits: per value of the gradients of layers' outputs. a step: bytes\n"
    "of them, one worker. smaller: than float32. variance: their squared error over their energy, mean over\n"
    "the steps. codec CPU: its part of the steps' CPU time.",
}
#: longest spec that is shown on one line
_NAME = 16
_TASKS = "".join(f"  {name:12}{describe_task(name)}\n" for name in task_names())


@click.command("train", epilog=f"\b\nTasks:\n{_TASKS}")
@click.option("--codec", required=True, help="A codec or its spec, as in qsgdinf:bits=3,bucket_size=512.")
@click.option("--bits", type=int, default=None, help="Nominal bits of a codec that has them.")
@click.option("--sparsity", type=float, default=None, help="Sparsity of a codec that has it, as in 0.8.")
@codec_options
@click.option(
    "--kind",
    type=click.Choice(["weight", "neural"]),
    default="weight",
    show_default=True,
    help="What goes through the codec: the gradients between workers, or those that enter each layer's backward.",
)
@click.option(
    "--layers",
    type=click.Choice(["inner", "all"]),
    default="inner",
    show_default=True,
    help="With --kind neural: inner leaves the gradient alone that the last layer gets from the loss.",
)
@click.option("--task", default="digits-cnn", show_default=True, metavar="NAME", help="What to train, see below.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Simulated workers, each with its own mini-batch.  [default: 4; 1 for --kind neural]",
)
@click.option("--steps", type=click.IntRange(min=1), default=None, help="Optimizer steps.  [default: the task's]")
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    default=None,
    help="Samples of one worker in a step.  [default: the task's]",
)
@click.option("--lr", type=float, default=None, help="Learning rate at the start.  [default: the task's]")
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the model, the batches and the rounding.",
)
@click.option(
    "--refit",
    default=DEFAULT_REFIT,
    show_default=True,
    help="Steps at which levels and codes are fitted; +N repeats. Or: every, once.",
)
@click.option(
    "--nonfinite",
    type=click.Choice(["skip", "zero", "error"]),
    default="skip",
    show_default=True,
    help="What to do with a gradient that holds NaN or infinity.",
)
@click.option(
    "--eval-every",
    type=click.IntRange(min=1),
    default=None,
    help="Steps between two tests.  [default: a tenth of the steps]",
)
@click.option(
    "--shadow",
    type=click.IntRange(min=1),
    default=None,
    metavar="K",
    help="With --kind neural: every K steps run the backward pass exactly too, and compare the weight gradients.",
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=None, help="Run log.  [default: TASK-CODEC.jsonl]"
)
@click.option("--force", is_flag=True, help="Overwrite an existing run log.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON summary instead of a table.")
def command(**options: Any) -> None:
    """Train a task with a codec on every worker's gradients, and beside it the same without.

    Every gradient travels as bytes: each worker encodes its own, they are decoded from the bytes alone, averaged,
    and one optimizer step follows. With --kind neural the gradient with respect to each layer's output takes that
    way inside the backward pass, and weight gradients are averaged exactly.

    \b
    Examples:
      gtrace train --codec qsgdinf --bits 3 --workers 4 --task digits-cnn
      gtrace train --codec nuqsgd:bits=4,bucket_size=512 --task char-lstm --steps 100
      gtrace train --codec int8 --kind neural --shadow 10
    """
    run(**options)


def run(
    *,
    codec: str,
    bits: int | None,
    sparsity: float | None,
    error_feedback: bool,
    plugin: tuple[Path, ...],
    kind: Kind,
    layers: Layers,
    task: str,
    workers: int | None,
    steps: int | None,
    batch_size: int | None,
    lr: float | None,
    seed: int,
    refit: str,
    nonfinite: str,
    eval_every: int | None,
    shadow: int | None,
    output: Path | None,
    force: bool,
    as_json: bool,
) -> None:
    """The command without its options' parsing."""
    # Whatever can be wrong in the arguments is said before torch takes its seconds to load.
    load_plugins(plugin)
    chosen = _codec(f"ef:{codec}" if error_feedback else codec, {"bits": bits, "sparsity": sparsity})
    describe_task(task)
    RefitSchedule.parse(refit)
    path = output or Path(f"{task}-{'neural-' if kind == 'neural' else ''}{_file_name(str(chosen))}.jsonl")
    check_output(path, force=force)

    from gtrace.online import Study

    study = Study(
        task,
        [chosen],
        kind=kind,
        layers=layers,
        workers=workers,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        seed=seed,
        refit=refit,
        nonfinite=nonfinite,  # type: ignore[arg-type]
        eval_every=eval_every,
        shadow=shadow,
    )
    try:
        with _progress(study, as_json=as_json) as progress:
            study.run(path, force=force, on_record=progress)
    except KeyboardInterrupt:
        if study.results[0].steps:
            _show(study, path, as_json=as_json)
        raise
    _show(study, path, as_json=as_json)


def _codec(spec: str, options: dict[str, float | None]) -> Codec:
    """The codec of a spec, with the parameters that have options of their own."""
    from gtrace.codecs import codec
    from gtrace.codecs.registry import parse_spec

    chosen, given = codec(spec), {}
    for name, value in options.items():
        if value is None:
            continue
        if name not in chosen.parameters:
            click.echo(f"gtrace: {spec} has no {name} to choose; --{name} {value:g} is ignored", err=True)
        elif name in parse_spec(spec).given:
            raise UsageError(f"--{name} {value:g}: the codec '{spec}' names its {name} already; give it once")
        else:
            given[name] = value
    return codec(spec, **given) if given else chosen


def _file_name(spec: str) -> str:
    """A spec as a part of a file name: ``qsgdinf:bits=3`` becomes ``qsgdinf-bits3``."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", spec.replace("=", ""))


def _show(study: Study, path: Path, *, as_json: bool) -> None:
    """The results so far, on stdout."""
    settings = study.settings
    if as_json:
        print_json(
            {
                "output": str(path),
                "task": study.task.name,
                "kind": settings.kind,
                "workers": settings.workers,
                "steps": settings.steps,
                "seed": settings.seed,
                "runs": [_as_dict(result, settings.workers) for result in study.results],
                "warnings": study.warnings,
            }
        )
        return
    for text in study.warnings:
        click.echo(f"gtrace: warning: {text}", err=True)
    _print_table(study)
    unfinished = [result for result in study.results if not result.finished]
    if unfinished:
        click.echo(f"interrupted after {unfinished[-1].steps} of {settings.steps} steps")
    click.echo(f"{path}\nnext: gtrace report {shlex.quote(str(path))}")


def _as_dict(result: RunResult, workers: int) -> dict[str, Any]:
    tally = result.tally
    shadow, worst = result.shadow, result.shadow.worst
    compared = {
        "steps": shadow.steps,
        "cosine": shadow.cosine,
        "worst": worst and worst.tensor,
        "worst_cosine": worst and worst.cosine,
        "tensors": [dataclasses.asdict(item) for item in shadow.tensors],
        "seconds": shadow.seconds,
    }
    return {
        "run": result.run,
        "steps": result.steps,
        "finished": result.finished,
        "diverged": bool(result.diverged),
        "loss": result.loss,
        "accuracy": result.accuracy,
        "bits": tally.bits,
        "bits_per_value": tally.bits_per_element,
        "bits_per_worker_and_step": tally.bits / (workers * max(1, result.steps)),
        "shared_bits": tally.shared_bits,
        "envelope_bits": tally.envelope_bits,
        "ratio": tally.ratio,
        "sparsity": tally.sparsity,
        "relative_variance": result.relative_variance,
        "worker_variance": result.worker_variance,
        "nonfinite": tally.nonfinite,
        "seconds": result.seconds,
        "codec_seconds": tally.codec_seconds,
        "fit_seconds": tally.fit_seconds,
        "shadow": compared if shadow.steps else None,
    }


def _print_table(study: Study) -> None:
    from rich.console import Console
    from rich.table import Table

    settings, results = study.settings, study.results
    has_accuracy = any(result.accuracy is not None for result in results)
    neural, has_shadow = settings.kind == "neural", any(result.shadow.steps for result in results)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("codec", overflow="fold", min_width=10)
    accuracy = ["accuracy"] if has_accuracy else []
    cosine = ["cosine", "worst"] if has_shadow else []
    size = "a step" if neural else "sent"
    for header in (*accuracy, "loss", "bits", size, "smaller", "variance", *cosine, "codec CPU"):
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        tally = result.tally
        cells = [result.run if len(result.run) <= _NAME else result.run.replace(",", ",\n")]
        if has_accuracy:
            cells.append("-" if result.accuracy is None else f"{100 * result.accuracy:.1f} %")
        cells += [
            _number(result.loss, "{:.4f}"),
            _number(tally.bits_per_element, "{:.2f}"),
            _bytes(tally.bits / 8 / (settings.workers * max(1, result.steps))),
            _number(tally.ratio, "{:.1f}x"),
            _number(result.relative_variance, "{:.3g}"),
            *(_cosines(result.shadow) if has_shadow else []),
            f"{100 * tally.codec_seconds / result.seconds:.0f} %" if result.seconds else "-",
        ]
        table.add_row(*cells)
    Console(highlight=False).print(table)
    workers = f"{settings.workers} workers with {settings.batch_size} samples each"
    click.echo(
        f"{study.task.name}: {workers if settings.workers > 1 else f'1 worker with {settings.batch_size} samples'}, "
        f"{settings.steps} steps, seed {settings.seed}.\n{_EXPLAINED[settings.kind]}"
    )
    for result in results:
        if result.shadow.worst is not None:
            click.echo(
                "cosine: of weight gradients to the exact ones of the same batch, mean over tensors and shadow\n"
                f"passes ({result.shadow.steps}). worst: the tensor with the lowest, {result.shadow.worst.tensor}."
            )


def _cosines(shadow: ShadowSummary) -> list[str]:
    worst = shadow.worst
    if worst is None:
        return ["-", "-"]
    return [f"{shadow.cosine:.4f}", f"{worst.cosine:.4f}"]


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


@contextlib.contextmanager
def _progress(study: Study, *, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None] | None]:
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
        TextColumn("steps  {task.description}"),
        TimeRemainingColumn(),
    )
    losses: dict[str, float] = {}
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=study.settings.steps)

        def update(record: dict[str, Any]) -> None:
            if record["type"] == "step":
                losses[record["run"]] = record["loss"]
                shown = ", ".join(f"{run} {loss:.3f}" for run, loss in losses.items())
                bar.update(task, completed=record["step"] + 1, description=f"loss {shown}")

        yield update
