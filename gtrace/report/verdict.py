"""The answer in plain words, first thing on every report."""

from __future__ import annotations

import math
from collections import Counter
from typing import TYPE_CHECKING

from gtrace.report.families import FITTED
from gtrace.report.names import count, listed, number
from gtrace.report.ranking import decisive_target, leaders, lossless, ranking
from gtrace.report.runs import known_mean

if TYPE_CHECKING:
    from gtrace.report.analysis import Configuration, SweepAnalysis
    from gtrace.report.runs import Run, RunLogAnalysis

#: Nominal bits at which fitted levels are set beside the best ones, when several can be: eight levels.
FITTED_BITS = 4.0


def sweep_verdict(analysis: SweepAnalysis) -> list[str]:
    """Sentences that say which method adds the least error at equal measured bits."""
    if not analysis.rows:
        return ["Nothing was measured: the sweep has no rows."]
    if not analysis.measured:
        return ["Nothing can be compared: no row holds an error that is a number."]
    k = decisive_target(analysis)
    if k < 0:
        wanted = listed([f"{t:g}" for t in analysis.targets])
        nowhere = f"No method has configurations around {wanted} measured bits per coordinate: nothing to compare."
        return [nowhere, *_fitted(analysis)]
    ranked = ranking(analysis, k)
    best = ranked[0].at[k].variance
    at = f"At {bits_in_words(analysis.targets[k])}"
    sentences = []
    if len(ranked) == 1:
        sentences.append(
            f"{at}, {ranked[0].label} has relative variance {number(best)}; no other method has data there."
        )
    else:
        level = leaders(analysis, k)
        rest = [f"{f.label} {number(f.at[k].variance)}{_times(f.at[k].variance, best)}" for f in ranked[len(level) :]]
        values = listed([number(f.at[k].variance) for f in level])
        if len(level) > 1:
            head = f"{at}, {listed([f.label for f in level])} add the least error: relative variance {values}"
        else:
            head = f"{at}, {level[0].label} adds the least error: relative variance {values}"
        sentences.append(f"{head}; {listed(rest, limit=4)}." if rest else f"{head}.")
    return sentences + _elsewhere(analysis, k) + _fitted(analysis)


def _elsewhere(analysis: SweepAnalysis, k: int) -> list[str]:
    """Who leads at the other targets, where there is a choice at all."""
    here = leaders(analysis, k)
    led: dict[tuple[str, ...], list[float]] = {}
    for j, target in enumerate(analysis.targets):
        if j != k and len(ranking(analysis, j)) > 1:
            led.setdefault(tuple(f.label for f in leaders(analysis, j)), []).append(target)
    sentences = []
    for labels, targets in led.items():
        verb = "leads" if len(labels) == 1 else "lead"
        also = " as well" if {f.label for f in here}.issuperset(labels) else ""
        bits = "bit" if targets == [1.0] else "bits"
        sentences.append(f"{listed(labels)} {verb} at {listed([f'{t:g}' for t in targets])} {bits}{also}.")
    return sentences


def _fitted(analysis: SweepAnalysis) -> list[str]:
    """How far fitted levels are from the best ones, at the nominal bits that most fitted methods have."""
    known = [c for c in analysis.configurations if c.method in FITTED and not c.partial]
    known = [c for c in known if math.isfinite(c.times_optimal) and math.isfinite(c.nominal_bits)]
    counts = Counter(c.nominal_bits for c in known)
    if not counts:
        return []
    # Two levels, 0 and 1, leave nothing to fit: every method is the best one there.
    bits = max(counts, key=lambda b: (b > 2, counts[b], -abs(b - FITTED_BITS)))
    here = sorted((c for c in known if c.nominal_bits == bits), key=lambda c: c.times_optimal)
    times = listed(f"{c.family} {number(c.times_optimal)}" for c in here)
    what = "fitted levels make this many times the error of the best levels of the same number"
    sentences = [f"At bits={bits:g}, {what}: {times}{_age(here)}."]
    models = [c for c in here if math.isfinite(c.model_variance)]
    if models:
        said = [f"{c.family} {number(c.model_variance)}, in truth {number(c.relative_variance)}" for c in models]
        sentences.append(f"Relative variance that the model of the data promised for its levels: {'; '.join(said)}.")
    return sentences


def _age(configurations: list[Configuration]) -> str:
    """What the levels were fitted to; the distance to the optimum is in part their age."""
    ages = {c.fitted_on for c in configurations}
    if ages == {"previous"}:
        return "; they were fitted to the captured step before"
    if len(ages) == 1 and "itself" not in ages and "" not in ages:
        return f"; they were fitted to {ages.pop()}"
    return ""


def off_target(analysis: SweepAnalysis) -> list[str]:
    """Where the methods lie that no target reaches, as ``terngrad 5.23 at 0.60 bits``."""
    found = []
    for family in analysis.families:
        if lossless(analysis, family) or any(math.isfinite(at.variance) for at in family.at):
            continue
        points = [analysis.configurations[i] for i in family.members]
        points = [c for c in points if math.isfinite(c.bits) and math.isfinite(c.relative_variance)]
        if points:
            near = min(points, key=lambda c: min(abs(c.bits - t) for t in analysis.targets or (0.0,)))
            found.append(f"{family.label} {number(near.relative_variance)} at {number(near.bits)} bits")
    return found


def runs_verdict(analysis: RunLogAnalysis) -> list[str]:
    """One sentence per compressed run: what it reached, what the uncompressed one reached, what was sent."""
    if not analysis.runs:
        return ["No training step was logged."]
    sentences = []
    for run in analysis.runs:
        if run.spec == "none" and len(analysis.runs) > 1:
            continue
        baseline = analysis.baseline(run)
        seed = f" (seed {run.seed})" if len({r.seed for r in analysis.runs}) > 1 else ""
        until = "" if run.finished else f", until step {run.last_step}"
        parts = [f"Trained with {run.spec}{seed} on {count(analysis.workers, 'worker')}{until}: {_reached(run)}"]
        if baseline is not None and _reached(baseline) and _comparable(run, baseline):
            parts.append(f"uncompressed {_reached(baseline, name=False)}")
        if math.isfinite(run.ratio) and run.spec != "none":
            what = "for the neural gradients" if analysis.neural else "sent up"
            parts.append(f"{number(run.ratio)} times fewer bits {what} than with float32")
        sentences.append("; ".join(parts) + ".")
        if run.shadow:
            cosines = {curve.tensor: known_mean(curve.cosine) for curve in run.shadow}
            known = {tensor: value for tensor, value in cosines.items() if math.isfinite(value)}
            if known:
                worst = min(known, key=known.__getitem__)
                mean = sum(known.values()) / len(known)
                sentences.append(
                    f"Its weight gradients have a mean cosine of {mean:.4f} to the exact ones; "
                    f"the worst is {worst} with {known[worst]:.4f}."
                )
    return sentences


def _comparable(run: Run, baseline: Run) -> bool:
    return math.isfinite(run.final_accuracy) == math.isfinite(baseline.final_accuracy)


def _reached(run: Run, *, name: bool = True) -> str:
    if math.isfinite(run.final_accuracy):
        return f"test accuracy {run.final_accuracy:.2%}" if name else f"{run.final_accuracy:.2%}"
    for word, value in (("test loss", run.final_eval_loss), ("training loss", run.final_loss)):
        if math.isfinite(value):
            return f"{word} {number(value)}" if name else number(value)
    return "no finite loss"


def bits_in_words(target: float) -> str:
    """``3 measured bits per coordinate``."""
    return f"{target:g} measured {_bits(target)} per coordinate"


def _bits(number_of: float) -> str:
    return "bit" if number_of == 1 else "bits"


def _times(value: float, best: float) -> str:
    return f" ({number(value / best, 2)} times as much)" if best > 0 else ""
