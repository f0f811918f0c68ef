"""Does a measure of a codec's error predict the loss in the end? Rank correlations over the codecs of a study."""

from __future__ import annotations

import fnmatch
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from gtrace.errors import TraceError, UsageError
from gtrace.report.analysis.runs import BASELINE, analyze_runs, known_mean
from gtrace.report.names import MISSING, count, number, pick
from gtrace.report.section import Cell, Chart, Column, Curve, Panel, Table
from gtrace.report.statistics import CONFIDENCE, Interval
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gtrace.kernels import Floats

#: measure -> what it is called
MEASURES = {
    "relative_variance": "relative variance",
    "noise_ratio": "noise ratio",
    "bias": "bias",
    "update_error": "update error",
    "step_error": "step error",
    "w1": "W1 / mean |g|",
    "cosine": "1 - cosine",
}
#: Fewer codecs say nothing about an order.
FEWEST_CODECS = 5
#: a correlation that predicts
STRONG = 0.5
_RESAMPLES = 2000
#: no measure of a log that can be
_LARGEST = 1e300
#: range of a measure from which its axis is logarithmic
_LOGARITHMIC = 20.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What one measure says about the loss in the end.

    Attributes:
        measure: its name in the run log.
        values: float64[codecs], mean over the steps and seeds of each codec; of the cosine 1 minus it.
        correlation: Spearman's rank correlation of the values with the excess, and its bootstrap interval.
        best: share of the resamples in which no measure has a larger one.
    """

    measure: str
    values: Floats
    correlation: Interval
    best: float = math.nan

    @property
    def verdict(self) -> str:
        """In a word."""
        if not self.correlation.known:
            return MISSING
        if self.correlation.low > STRONG:
            return "predicts"
        return "says something" if self.correlation.low > 0 else "not seen to predict"


@dataclass(frozen=True, slots=True)
class Predictions:
    """All measures of one training study.

    Attributes:
        codecs: specs, without the uncompressed run's.
        excess: float64[codecs], final test loss above the uncompressed run's, mean of seeds; infinite if one diverged.
        found: one for each measure.
    """

    name: str
    task: str
    codecs: tuple[str, ...]
    excess: Floats
    seeds: int
    found: tuple[Prediction, ...]

    @property
    def leader(self) -> Prediction | None:
        """The measure with the largest correlation, None where none is known."""
        known = [one for one in self.found if one.correlation.known]
        return max(known, key=lambda one: one.correlation.estimate, default=None)

    @property
    def sentence(self) -> str:
        """The verdict."""
        best = self.leader
        if best is None:
            why = next((one.correlation.why for one in self.found), "")
            return f"{self.task}: no measure can be judged ({why})."
        low, estimate, high = best.correlation.low, best.correlation.estimate, best.correlation.high
        return (
            f"{self.task}: over {count(len(self.codecs), 'codec')} and {count(self.seeds, 'seed')}, "
            f"{MEASURES[best.measure]} orders the final losses best: rank correlation {estimate:.2f} "
            f"({low:.2f} to {high:.2f}), ahead of all others in {best.best:.0%} of the resamples."
        )


def predict(
    records: Sequence[Mapping[str, Any]], name: str, *, first: float = 1.0, exclude: Sequence[str] = ()
) -> Predictions:
    """Relate every measure to the final loss.

    Args:
        records: of a run log, the study first.
        name: of the log, in headings and errors.
        first: share of the steps, from the start, whose measures count.
        exclude: patterns of specs to leave out.

    Raises:
        TraceError: the log is damaged.
        UsageError: no uncompressed run to compare with, or nothing but it.
    """
    analysis = analyze_runs(records, name)
    losses: dict[tuple[str, int], float] = {}
    for run in analysis.runs:
        if run.finished:
            final = run.final_eval_loss
            losses[run.spec, run.seed] = final if math.isfinite(final) else math.inf
    specs = dict.fromkeys(spec for spec, _ in losses if spec != BASELINE)
    codecs = tuple(s for s in specs if not any(fnmatch.fnmatchcase(s, glob) for glob in exclude))
    seeds = sorted({seed for spec, seed in losses if spec == BASELINE})
    if not seeds or not codecs:
        lacking = "without" if codecs else "with"
        raise UsageError(f"{name}: no finished run {lacking} a codec; train with gtrace study compare")
    nothing = math.nan
    excess = np.array([[losses.get((c, s), nothing) - losses[BASELINE, s] for s in seeds] for c in codecs])
    measured = _measured(records, name, first)
    found = {
        measure: np.array([[measured.get((c, s), {}).get(measure, nothing) for s in seeds] for c in codecs])
        for measure in MEASURES
    }
    found["cosine"] = 1.0 - found["cosine"]
    judged = tuple(_judge(found, excess))
    return Predictions(name, analysis.task or name, codecs, _over_seeds(excess), len(seeds), judged)


def _measured(records: Sequence[Mapping[str, Any]], name: str, first: float) -> dict[tuple[str, int], dict[str, float]]:
    """Mean of each measure over the first steps of each run; without measurements the variance of all steps."""
    of_kind = {kind: [r for r in records if r["type"] == kind] for kind in ("measure", "step")}
    chosen = of_kind["measure"] or of_kind["step"]
    steps = 1 + max((int(r["step"]) for r in of_kind["step"]), default=0)
    grouped: dict[tuple[str, int], dict[str, list[float]]] = {}
    for record in chosen:
        step, seed = record.get("step"), record.get("seed", 0)
        if "run" not in record or type(step) is not int or type(seed) is not int:
            raise TraceError(f"{name}: a {record['type']} record names no run and step; the run log is damaged")
        if step < max(1.0, first * steps):
            into = grouped.setdefault((str(record["run"]), seed), {})
            for measure in MEASURES:
                value = record.get(measure)
                if isinstance(value, (int, float)) and abs(value) <= _LARGEST:
                    into.setdefault(measure, []).append(float(value))
    return {
        run: {measure: known_mean(np.array(values)) for measure, values in into.items()}
        for run, into in grouped.items()
    }


def _judge(found: Mapping[str, Floats], excess: Floats) -> list[Prediction]:
    """Correlations of float64[codecs, seeds], with the same resamples for all measures."""
    means, losses = {measure: _over_seeds(values) for measure, values in found.items()}, _over_seeds(excess)
    there = {measure: np.isfinite(values) & ~np.isnan(losses) for measure, values in means.items()}
    whys = {measure: _obstacle(values[there[measure]], losses[there[measure]]) for measure, values in means.items()}
    draws = {m: _resampled(found[m][there[m]], excess[there[m]]) for m, why in whys.items() if not why}
    # A resample of codecs that are all the same has no order, and no measure leads in it.
    most = np.max([np.where(np.isnan(drawn), -np.inf, drawn) for drawn in draws.values()], axis=0) if draws else 0.0
    out = []
    for measure, values in means.items():
        if whys[measure]:
            out.append(Prediction(measure, values, Interval(math.nan, why=whys[measure])))
            continue
        known, drawn = there[measure], draws[measure]
        estimate = float(_spearman(values[known][None], losses[known][None])[0])
        tail = 50.0 * (1.0 - CONFIDENCE)
        low, high = np.nanpercentile(drawn, [tail, 100.0 - tail]).tolist()
        # Measures that order the codecs in the same way share a resample.
        best = float(np.mean(drawn >= most - 1e-9))
        out.append(Prediction(measure, values, Interval(estimate, low, high, count=int(known.sum())), best))
    return out


def _obstacle(values: Floats, losses: Floats) -> str:
    """Why the order of codecs by a measure says nothing; empty if it does."""
    if values.size < FEWEST_CODECS:
        return f"needs at least {FEWEST_CODECS} codecs with a final loss; it was measured for {values.size}"
    if np.all(losses == losses[0]):
        return "the final loss is the same for all codecs"
    return "it is the same for all codecs" if np.all(values == values[0]) else ""


def _resampled(values: Floats, excess: Floats) -> Floats:
    """float64[resamples], correlations over codecs drawn with replacement, and seeds within each."""
    # The same key for all measures: they differ by what they measure, not by the codecs drawn.
    rng = np.random.default_rng(Key.derive(0, tensor="compare", role="sample"))
    codecs, seeds = values.shape
    chosen = rng.integers(codecs, size=(_RESAMPLES, codecs))
    of_each = rng.integers(seeds, size=(_RESAMPLES, codecs, seeds))
    drawn = [_over_seeds(table[chosen[:, :, None], of_each]) for table in (values, excess)]
    return _spearman(*drawn)


def _over_seeds(values: Floats) -> Floats:
    """Mean over the last axis of what is there, NaN where nothing is."""
    there = ~np.isnan(values)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(there, values, 0.0).sum(axis=-1) / there.sum(axis=-1))


def _spearman(x: Floats, y: Floats) -> Floats:
    """Rank correlation of each row, ties with their mean rank; NaN where all are tied."""
    a, b = (stats.rankdata(values, axis=1) for values in (x, y))
    a, b = a - a.mean(axis=1, keepdims=True), b - b.mean(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return np.asarray((a * b).sum(axis=1) / np.sqrt((a * a).sum(axis=1) * (b * b).sum(axis=1)))


def table(several: Sequence[Predictions]) -> Table:
    """One row for each study and measure."""
    rows = []
    for study in several:
        for one in study.found:
            found, interval, best = one.correlation, MISSING, MISSING
            if found.known:
                interval, best = f"{found.low:.2f} to {found.high:.2f}", f"{one.best:.0%}"
            estimate = Cell(number(found.estimate) if found.known else MISSING, hint=found.why)
            said = (study.task, MEASURES[one.measure], estimate, interval, best, one.verdict)
            rows.append(tuple(cell if isinstance(cell, Cell) else Cell(cell) for cell in said))
    columns = (
        Column("task", numeric=False),
        Column("measure", numeric=False),
        Column("rank correlation", "Spearman's, over codecs, with the final test loss above full precision"),
        Column("interval", f"{CONFIDENCE:.0%}, bootstrap over codecs and seeds"),
        Column("best", "share of the resamples in which no other measure is ahead", rank=1),
        Column("verdict", numeric=False),
    )
    note = f"predicts: the interval lies above {STRONG:g}; says something: above 0."
    note += " Mean of each measure over the steps of a run."
    return Table("Does the measure predict the final loss?", columns, tuple(rows), (note,))


def chart(several: Sequence[Predictions]) -> Chart:
    """One row of panels for each study: the excess loss over each measure."""
    panels = []
    for study in several:
        for one in study.found:
            known = np.isfinite(one.values) & np.isfinite(study.excess)
            curves = tuple(
                Curve(spec, (float(x),), (float(y),), method=spec.partition(":")[0], form="points")
                for spec, x, y, there in zip(study.codecs, one.values, study.excess, known, strict=True)
                if there
            )
            x = one.values[known]
            wide = bool(x.size) and float(x.min()) > 0 and float(x.max() / x.min()) > _LOGARITHMIC
            if curves and one.correlation.known:
                title = f"{study.task}: {one.correlation.estimate:.2f}"
                panels.append(Panel(curves, title, MEASURES[one.measure], "loss above full precision", log_x=wide))
    columns = 3 if len(several) == 1 else max(1, len(panels) // len(several))
    return Chart(tuple(panels), "Final test loss above full precision over each measure, one point a codec.", columns)


def as_json(study: Predictions) -> dict[str, Any]:
    """Everything as JSON values."""
    return {
        "log": study.name,
        **pick(study, "task", "seeds"),
        "codecs": list(study.codecs),
        "excess_loss": study.excess.tolist(),
        "sentence": study.sentence,
        "measures": {
            one.measure: {
                "values": one.values.tolist(),
                "correlation": one.correlation.estimate,
                **pick(one.correlation, "low", "high"),
                **pick(one, "best", "verdict"),
                "why": one.correlation.why,
            }
            for one in study.found
        },
    }
