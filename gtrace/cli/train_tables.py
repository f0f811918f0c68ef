"""The tables of ``gtrace train --task``: of one seed, and of several with deviations and paired differences."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
import numpy as np
from scipy import special

from gtrace.cli.console import plain_table

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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


CONFIDENCE = 0.95
#: with fewer seeds an interval is printed, and called what it is
_ENOUGH = 5


@dataclass(frozen=True, slots=True)
class Spread:
    """A number over seeds.

    Attributes:
        mean: over the seeds.
        deviation: sample standard deviation; NaN for a single one.
        reach: half width of the t-interval of the mean; NaN for a single one.
        count: seeds.
    """

    mean: float
    deviation: float
    reach: float
    count: int


def spread(values: Sequence[float]) -> Spread:
    """Mean, deviation and the reach of the 95 % t-interval, of the finite values."""
    known = np.asarray([value for value in values if math.isfinite(value)], np.float64)
    n = known.size
    if n == 0:
        return Spread(math.nan, math.nan, math.nan, 0)
    if n == 1:
        return Spread(float(known[0]), math.nan, math.nan, 1)
    deviation = float(known.std(ddof=1))
    reach = float(special.stdtrit(n - 1, 0.5 + CONFIDENCE / 2)) * deviation / math.sqrt(n)
    return Spread(float(known.mean()), deviation, reach, n)


def paired(study: Study, spec: str, number: Callable[[RunResult], float | None]) -> Spread:
    """Difference to the uncompressed run of the same seed, over the seeds."""
    by_seed = {(result.run, result.seed): number(result) for result in study.results}
    differences = []
    for seed in study.seeds:
        ours, plain = by_seed.get((spec, seed)), by_seed.get(("none", seed))
        if ours is not None and plain is not None:
            differences.append(ours - plain)
    return spread(differences)


def summarize(study: Study) -> list[dict[str, Any]]:
    """One entry a codec, for JSON: what the table shows."""
    entries = []
    for spec in dict.fromkeys(result.run for result in study.results):
        runs = [result for result in study.results if result.run == spec]
        entry: dict[str, Any] = {"run": spec, "seeds": len(runs)}
        for name, number in _NUMBERS.items():
            found = spread([math.nan if (value := number(one)) is None else value for one in runs])
            entry[name] = found.mean
            entry[f"{name}_deviation"] = found.deviation
        for name in ("accuracy", "loss"):
            change = paired(study, spec, _NUMBERS[name])
            entry[f"{name}_change"] = change.mean
            entry[f"{name}_change_low"] = change.mean - change.reach
            entry[f"{name}_change_high"] = change.mean + change.reach
        entries.append(entry)
    return entries


_NUMBERS: dict[str, Callable[[RunResult], float | None]] = {
    "accuracy": lambda result: result.accuracy,
    "loss": lambda result: result.loss,
    "bits_per_value": lambda result: result.tally.bits_per_element,
    "relative_variance": lambda result: result.relative_variance,
    "worker_variance": lambda result: result.worker_variance,
    "weight_error": lambda result: result.weight_error,
    "step_seconds": lambda result: result.sim_seconds / max(1, result.steps),
}


def print_seeds(study: Study) -> None:
    """The table on stdout, with what its numbers mean."""
    from rich.console import Console

    entries = summarize(study)
    accurate = any(math.isfinite(entry["accuracy"]) for entry in entries)
    timed = any(math.isfinite(entry["step_seconds"]) for entry in entries)
    table = plain_table()
    table.add_column("codec", overflow="fold", min_width=10)
    headers = ["accuracy", "against none"] if accurate else ["loss", "against none"]
    quantized = ["weights"] if study.quantized else []
    for header in (*headers, "bits", "variance", *quantized, *(["a step"] if timed else [])):
        table.add_column(header, justify="right", no_wrap=True)
    for entry in entries:
        name, scale, form = ("accuracy", 100, ".2f") if accurate else ("loss", 1, ".4f")
        cells = [entry["run"], _with(entry[name], entry[f"{name}_deviation"], scale, form)]
        reach = entry[f"{name}_change_high"] - entry[f"{name}_change"]
        cells.append("" if entry["run"] == "none" else _with(entry[f"{name}_change"], reach, scale, f"+{form}"))
        cells.append(f"{entry['bits_per_value']:.2f}")
        cells.append(_with(entry["relative_variance"], entry["relative_variance_deviation"], 1, ".3g"))
        if quantized:
            cells.append(_with(entry["weight_error"], entry["weight_error_deviation"], 1, ".3g"))
        if timed:
            cells.append(time_text(entry["step_seconds"]))
        table.add_row(*cells)
    console = Console(highlight=False)
    console.print(table)
    settings, seeds = study.settings, study.seeds
    workers = f"{settings.workers} worker{'s' * (settings.workers > 1)}"
    text = (
        f"{study.task.name}: {workers} with {settings.batch_size} samples each, {settings.steps} steps, "
        f"seeds {seeds[0]} to {seeds[-1]}.\n"
        f"{'accuracy, in percent' if accurate else 'loss'}: of held-out data, mean and standard deviation over seeds. "
        "against none: difference to\nthe uncompressed run of the same seed, mean and 95 % t-interval. variance: "
        "squared error of the average of\nall workers over its energy."
    )
    if timed:
        assert settings.network is not None
        computed = "measured CPU time, " if settings.network.compute is None else ""
        text += f" a step: over {settings.network}; {computed}simulated links."
    if len(seeds) < _ENOUGH:
        text += f"\n{len(seeds)} seeds describe what happened; differences inside of an interval are noise."
    if quantized:
        text += f"\n{explain_weights(study)}"
    console.print(text, soft_wrap=True)


def _with(value: float, spread_of: float, scale: float, form: str) -> str:
    if not math.isfinite(value):
        return "-"
    shown = format(scale * value, form)
    return shown if not math.isfinite(spread_of) else f"{shown} ± {format(scale * spread_of, form.lstrip('+'))}"


def print_table(study: Study, logged: dict[tuple[str, int], Logged], target: float) -> None:
    """The table of one seed on stdout, with what its numbers mean."""
    from rich.console import Console

    from gtrace.report.analysis.runs import seconds_to_loss

    settings, results = study.settings, study.results
    has_accuracy = any(result.accuracy is not None for result in results)
    neural, has_shadow = settings.kind == "neural", any(result.shadow.steps for result in results)
    table = plain_table()
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


def explain_weights(study: Study) -> str:
    """What the column on quantized weights says, in words."""
    total = sum(study.describe()["tensors"].values())
    first = study.quantized[0]
    bits = "/".join(dict.fromkeys(f"{one['bits']:.3g}" for one in study.quantized))
    return (
        f"weights: squared error of the quantized ones over their energy, in the last step; {bits} bits each,\n"
        f"{100 * first['elements'] / total:.0f} % of the parameters ({', '.join(first['tensors'])}). The first and the "
        "last layer,\nbiases and norms are exact, and so is what the optimizer steps."
    )
