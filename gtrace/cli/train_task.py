"""What ``gtrace train --task`` prints: progress, the table, and what its numbers mean."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shlex
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.cluster import print_savings, savings_of_log
from gtrace.cli.options import print_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from gtrace.costs import Cluster
    from gtrace.report.analysis.runs import LoggedRun as Logged
    from gtrace.training import RunResult, Study
    from gtrace.training.neural import ShadowSummary
    from gtrace.training.settings import Kind


#: what stands below the table: column -> what it says; columns that are not shown are left out
_MEANINGS: dict[Kind, dict[str, str]] = {
    "weight": {
        "loss": "held-out data, as accuracy",
        "bits": "per value",
        "sent": "by one worker in a step",
        "smaller": "than float32",
        "variance": "squared error of the averaged gradient over its energy, mean over the steps",
        "codec CPU": "its part of the steps' CPU time",
    },
    "neural": {
        "loss": "held-out data, as accuracy",
        "bits": "per value of the gradients of layers' outputs",
        "a step": "bytes of them, one worker",
        "smaller": "than float32",
        "variance": "their squared error over their energy, mean over the steps",
        "codec CPU": "its part of the steps' CPU time",
    },
}
#: longest spec that is shown on one line
_NAME = 16


def show(study: Study, path: Path, cluster: Cluster | None = None, *, as_json: bool) -> None:
    """The results so far, and what they save between the machines of ``cluster``, on stdout."""
    settings, savings = study.settings, savings_of_log(path, cluster)
    from gtrace.cli.train_seeds import print_seeds, summarize
    from gtrace.report import analyze_runs
    from gtrace.report.analysis.runs import chosen_bits, common_loss
    from gtrace.report.sections.savings import savings_json
    from gtrace.runlog import read_runlog

    logged = {(run.spec, run.seed): run for run in analyze_runs(read_runlog(path)).runs}
    target = math.nan if settings.network is None else common_loss(list(logged.values()))
    if as_json:
        print_json(
            {
                "output": str(path),
                "task": study.task.name,
                "kind": settings.kind,
                "workers": settings.workers,
                "steps": settings.steps,
                "seed": settings.seed,
                "seeds": list(study.seeds),
                "codecs": summarize(study) if len(study.seeds) > 1 else None,
                "common_loss": target,
                "weights": study.quantized,
                "savings": savings_json(savings) if savings is not None else None,
                "runs": [
                    _as_dict(result, settings.workers, logged.get((result.run, result.seed)), target)
                    for result in study.results
                ],
                "warnings": study.warnings,
            }
        )
        return
    for text in study.warnings:
        click.echo(f"gtrace: warning: {text}", err=True)
    if len(study.seeds) > 1:
        print_seeds(study)
    else:
        _print_table(study, logged, target)
    for (spec, of_seed), run in logged.items():
        if chosen := chosen_bits(run):
            click.echo(f"bits of {spec}{f', seed {of_seed}' if len(study.seeds) > 1 else ''}: {chosen}")
    print_savings(savings)
    unfinished = [result for result in study.results if not result.finished]
    if unfinished:
        seed = f" of seed {unfinished[-1].seed}" if len(study.seeds) > 1 else ""
        click.echo(f"interrupted after {unfinished[-1].steps} of {settings.steps} steps{seed}")
    click.echo(f"{path}\nnext: gtrace report {shlex.quote(str(path))}")


def _as_dict(result: RunResult, workers: int, logged: Logged | None, target: float) -> dict[str, Any]:
    from gtrace.report.analysis.runs import seconds_to_loss

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
        "seed": result.seed,
        "sim_seconds": result.sim_seconds,
        "seconds_to_common_loss": math.nan if logged is None else seconds_to_loss(logged, target),
        "codec_bits": [] if logged is None else _changes(logged),
        "steps": result.steps,
        "finished": result.finished,
        "diverged": bool(result.diverged),
        "loss": result.loss,
        "accuracy": result.accuracy,
        "bits": tally.bits,
        "bits_per_value": tally.bits_per_element,
        "bits_per_worker_and_step": tally.bits / (workers * max(1, result.steps)),
        "down_bits": tally.down_bits,
        "shared_bits": tally.shared_bits,
        "envelope_bits": tally.envelope_bits,
        "ratio": tally.ratio,
        "sparsity": tally.sparsity,
        "relative_variance": result.relative_variance,
        "worker_variance": result.worker_variance,
        "weight_error": result.weight_error,
        "nonfinite": tally.nonfinite,
        "seconds": result.seconds,
        "codec_seconds": tally.codec_seconds,
        "fit_seconds": tally.fit_seconds,
        "shadow": compared if shadow.steps else None,
    }


def _changes(run: Logged) -> list[list[int]]:
    """[step, bits] wherever a policy chose other bits than before."""
    found: list[list[int]] = []
    for step, bits in zip(run.steps.tolist(), run.codec_bits.tolist(), strict=True):
        if math.isfinite(bits) and not (found and found[-1][1] == bits):
            found.append([step, int(bits)])
    return found


def _print_table(study: Study, logged: dict[tuple[str, int], Logged], target: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from gtrace.report.analysis.runs import seconds_to_loss

    settings, results = study.settings, study.results
    has_accuracy = any(result.accuracy is not None for result in results)
    neural, has_shadow = settings.kind == "neural", any(result.shadow.steps for result in results)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("codec", overflow="fold", min_width=10)
    accuracy = ["accuracy"] if has_accuracy else []
    cosine = ["cosine", "worst"] if has_shadow else []
    quantized = ["weights"] if study.quantized else []
    timed = ["time"] if settings.network is not None else []
    aimed = ["to loss"] if math.isfinite(target) else []
    # A terminal of 80 columns has room for one of the two.
    size = [] if aimed else ["a step" if neural else "sent"]
    smaller = [] if timed or quantized else ["smaller"]
    share = [] if quantized else ["codec CPU"]
    headers = (*accuracy, "loss", "bits", *size, *smaller, "variance", *cosine, *quantized, *share, *timed, *aimed)
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for result in results:
        tally = result.tally
        cells = [result.run if len(result.run) <= _NAME else result.run.replace(",", ",\n")]
        if has_accuracy:
            cells.append("-" if result.accuracy is None else f"{100 * result.accuracy:.1f} %")
        cells += [
            _number(result.loss, "{:.4f}"),
            _number(tally.bits_per_element, "{:.2f}"),
            *([_bytes(tally.bits / 8 / (settings.workers * max(1, result.steps)))] if size else []),
            *([_number(tally.ratio, "{:.1f}x")] if smaller else []),
            _number(result.relative_variance, "{:.3g}"),
            *(_cosines(result.shadow) if has_shadow else []),
            *([_number(result.weight_error, "{:.3g}")] if quantized else []),
            *([_share(tally.codec_seconds, result.seconds)] if share else []),
            *([time_text(result.sim_seconds / max(1, result.steps))] if timed else []),
            *([time_text(seconds_to_loss(logged[result.run, result.seed], target))] if aimed else []),
        ]
        table.add_row(*cells)
    Console(highlight=False).print(table)
    workers = f"{settings.workers} workers with {settings.batch_size} samples each"
    click.echo(
        f"{study.task.name}: {workers if settings.workers > 1 else f'1 worker with {settings.batch_size} samples'}, "
        f"{settings.steps} steps, seed {settings.seed}."
    )
    meanings = _MEANINGS[settings.kind].items()
    click.echo(textwrap.fill(" ".join(f"{name}: {text}." for name, text in meanings if name in headers), 104))
    if quantized:
        from gtrace.cli.train_weights import explain_weights

        click.echo(explain_weights(study))
    if settings.network is not None:
        computed = "measured CPU time, " if settings.network.compute is None else ""
        click.echo(
            f"time: of a step over {settings.network}; {computed}simulated links. A bf16 all-reduce: "
            f"{time_text(_bf16(study))}."
        )
    if aimed:
        click.echo(f"to loss: simulated time to a training loss of {target:g}, the least that all runs reached.")
    for result in results:
        if result.shadow.worst is not None:
            click.echo(
                "cosine: of weight gradients to the exact ones of the same batch, mean over tensors and shadow\n"
                f"passes ({result.shadow.steps}). worst: the tensor with the lowest, {result.shadow.worst.tensor}."
            )


def _bf16(study: Study) -> float:
    """Seconds of a step in which half of float32's bits travelled and nothing else cost anything."""
    network, plain = study.settings.network, study.results[0]
    assert network is not None
    steps, workers = max(1, plain.steps), study.settings.workers
    values = plain.tally.float32_bits // 32 // workers // steps
    computed = network.compute
    if computed is None:
        computed = (plain.seconds - plain.tally.codec_seconds) / workers / steps
    return computed + network.transfer(workers, 16.0 * values, values, exact=True)


def _cosines(shadow: ShadowSummary) -> list[str]:
    worst = shadow.worst
    if worst is None:
        return ["-", "-"]
    return [f"{shadow.cosine:.4f}", f"{worst.cosine:.4f}"]


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _number(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"


def time_text(seconds: float) -> str:
    """Seconds with three digits and a unit; ``-`` for NaN."""
    if not math.isfinite(seconds):
        return "-"
    return (
        f"{seconds:.3g} s"
        if 1 <= seconds < 1000
        else f"{seconds:.0f} s"
        if seconds >= 1
        else f"{1000 * seconds:.3g} ms"
    )


def _bytes(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1000
    return f"{value:.3g} GB"


@contextlib.contextmanager
def progress(study: Study, *, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None] | None]:
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
    shown_seed = [study.settings.seed]
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=study.settings.steps * len(study.seeds))

        def update(record: dict[str, Any]) -> None:
            if record["type"] == "step":
                if record["seed"] != shown_seed[0]:
                    shown_seed[0] = record["seed"]
                    losses.clear()
                losses[record["run"]] = record["loss"]
                shown = ", ".join(f"{run} {loss:.3f}" for run, loss in losses.items())
                done = (record["seed"] - study.seeds[0]) * study.settings.steps + record["step"] + 1
                bar.update(task, completed=done, description=f"loss {shown}")

        yield update
