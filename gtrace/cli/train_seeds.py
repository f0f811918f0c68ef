"""The table of a study with several seeds: means, deviations, and paired differences with their intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from gtrace.cli.train_task import time_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.training import RunResult, Study

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
    from rich.table import Table

    from gtrace.cli.train_weights import explain_weights

    entries = summarize(study)
    accurate = any(math.isfinite(entry["accuracy"]) for entry in entries)
    timed = any(math.isfinite(entry["step_seconds"]) for entry in entries)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
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
