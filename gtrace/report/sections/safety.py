"""Gradient noise and the verdicts that follow from it, in sentences and tables."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.analysis.equal_bits import PREFERRED_BITS
from gtrace.report.analysis.safety import LEAST_OVER_NOISE, SAFE_BIAS, SAFE_COST, Judgement, cheapest_safe, samples
from gtrace.report.analysis.savings import EXCHANGES
from gtrace.report.names import MISSING, count, listed, number, percent
from gtrace.report.section import NOTHING, Cell, Column, Table, value_cell
from gtrace.report.sections.sweep_tables import MARKS, batch_cell, method_columns, most_energy

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gtrace.report.analysis.families import Configuration
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.safety import SafetyVerdict
    from gtrace.report.analysis.savings import Saving, Savings
    from gtrace.report.section import Shown


TITLE = "Is it safe?"
_ORDER: tuple[SafetyVerdict, ...] = ("safe", "at risk", "cannot tell")


def safety_sentences(analysis: SweepAnalysis) -> list[str]:
    """What is safe, or why that is unknown, after the verdict on errors."""
    safety = analysis.safety
    if not analysis.measured:
        return []
    if not safety.known:
        return [f"Safety unknown: {safety.why}."]
    noise, outlook = number(safety.noise.estimate), safety.outlook
    judged = Counter(found.verdict for found in safety.judged)
    counted = listed(f"{judged[verdict]} {verdict}" for verdict in _ORDER if judged[verdict])
    sentences = [
        f"Gradient noise, from {listed(list(safety.sources))}, is {noise} times the squared norm of the gradients.",
        f"Of {count(len(safety.judged), 'configuration')}: {counted}.",
    ]
    if outlook.why:
        sentences.append(f"What noise costs is not known: {outlook.why}.")
    k = cheapest_safe(safety.judged, [c.bits for c in analysis.configurations])
    if k >= 0:
        sentences.append(f"Fewest bits that are safe: {analysis.configurations[k].spec} {safety.judged[k].reason}.")
    return sentences


def over_noise_sentence(analysis: SweepAnalysis) -> list[str]:
    """How many configurations keep the gradient's norm above sqrt(3) times their noise, and from which bits on."""
    least = least_over_noise(analysis)
    known = [(c, value) for c, value in zip(analysis.configurations, least, strict=True) if math.isfinite(value)]
    if not known:
        return []
    above = [(c, value) for c, value in known if value >= LEAST_OVER_NOISE]
    said = (
        f"sqrt(3) rule (Chmiel et al. 2025: quantized training gets worse once the gradient's norm is below "
        f"{LEAST_OVER_NOISE:.2f} times the quantization noise): {len(above)} of "
        f"{count(len(known), 'configuration')} stay above it at every step"
    )
    if not above:
        return [f"{said}."]
    c, value = min(above, key=lambda pair: pair[0].bits)
    return [f"{said}, with the fewest bits {c.spec} ({number(value)} times at least)."]


def least_over_noise(analysis: SweepAnalysis) -> list[float]:
    """The least ||g|| / ||Q(g) - g|| over steps of each configuration, for the workers of the comparison.

    NaN without an error, and for a codec that has none.
    """
    errors = analysis.per_step if analysis.table is None else analysis.table.relative()
    worst = np.where(np.isfinite(errors), errors, 0.0).max(axis=1, initial=0.0)
    return [1 / math.sqrt(value) if value > 0 else math.nan for value in worst.tolist()]


def _by_verdict(analysis: SweepAnalysis) -> list[tuple[Configuration, Judgement]]:
    """Configurations with what is said of them, by verdict, and the fewest bits first."""
    pairs = zip(analysis.configurations, analysis.safety.judged, strict=True)
    return sorted(pairs, key=lambda pair: (_ORDER.index(pair[1].verdict), math.isnan(pair[0].bits), pair[0].bits))


def safety_table(analysis: SweepAnalysis, savings: Savings | None = None) -> Table:
    """One line per configuration: the verdict, its numbers, what it saves, and its reason; what is safe first."""
    outlook = analysis.safety.outlook
    saved = [] if savings is None else [Column("step over bf16", f"between {savings.cluster.ranks} ranks", rank=1)]
    like = f"batch of {samples(outlook.batch)} like" if not outlook.why else "batch like"
    columns = (
        Column("configuration", "codec and its parameters", numeric=False),
        Column("verdict", "by what its noise and its bias cost", numeric=False),
        Column("bits measured", "per coordinate: payload with norms, and shared bytes"),
        Column(like, "prediction: uncompressed batch that trains as well"),
        Column("lost progress", "part of each step's progress that the bias takes", rank=1),
        Column("noise ratio", "variance of Q(g) over gradient noise, the same for any number of workers", rank=2),
        Column("bias", "norm of the bias over that of the expected gradient", rank=3),
        *saved,
        Column("norm / noise", "least ||g|| / ||Q(g) - g|| of the steps: the sqrt(3) rule wants 1.73", rank=5),
        Column("because", "the reason for the verdict", rank=4, numeric=False, prose=True),
    )
    least = dict(zip((c.spec for c in analysis.configurations), least_over_noise(analysis), strict=True))
    rows = tuple(
        (
            Cell(c.spec),
            Cell(found.verdict, mark=MARKS[found.verdict]),
            value_cell(c.bits),
            batch_cell(found, interval=True),
            NOTHING if found.prediction is None else Cell(percent(max(found.prediction.lost, 0.0))),
            _ratio_cell(found),
            _bias_cell(found),
            *([] if savings is None else [_saved_cell(savings.best(c.spec))]),
            _over_noise_cell(least[c.spec]),
            Cell(found.reason),
        )
        for c, found in _by_verdict(analysis)
    )
    over = f" over {outlook.horizon:,} steps (--horizon)" if not outlook.why else ""
    notes = [
        (
            f"Safe: by the whole interval the codec costs at most a tenth of the batch{over}, and its bias takes at "
            "most a tenth of each step's progress. At risk: by the whole interval it costs more than a tenth."
        ),
        (
            "The interval is one that 9 of 10 measured trainings agreed with. "
            "Error feedback counts by what its memory still holds after several steps."
        ),
        (
            f"Without a prediction a codec is safe if its noise ratio costs at most {SAFE_COST:.0%} of the batch by "
            f"the 95% interval over steps and its bias is below {SAFE_BIAS:g}. Noise ratio: what rounding adds to the "
            "variance of one worker's gradient, over the variance that it has because its batch is a sample. Measured, "
            "codecs cost less than it says."
        ),
        (
            "Norm / noise: at the step with the least of it. By the sqrt(3) rule of Chmiel et al. (2025) quantized "
            "training gets worse below 1.73; the verdict does not use it."
        ),
    ]
    if savings is not None:
        notes.append(
            "Step over bf16: how many times as long a step with bf16 gradients would take, with the exchange below it; "
            "more under Savings."
        )
    return Table(TITLE, columns, rows, (*notes, *_test(analysis)), "No configuration was measured.", place="safety")


def _ratio_cell(found: Judgement) -> Cell:
    ratio = found.ratio
    if not math.isfinite(ratio.estimate):
        return Cell(MISSING, mark="missing", hint=found.reason)
    between = f"{number(max(ratio.low, 0.0))}{MISSING}{number(ratio.high)}" if ratio.known else ""
    return Cell(number(ratio.estimate), between, hint=ratio.why)


def _over_noise_cell(value: float) -> Cell:
    return NOTHING if math.isnan(value) else Cell(number(value), mark="quiet" if value < LEAST_OVER_NOISE else "")


def _bias_cell(found: Judgement) -> Cell:
    if not math.isfinite(found.bias):
        return Cell(MISSING, mark="missing", hint="the expected gradient is lost in its noise")
    return Cell(f"{'at most ' if found.bounded and found.bias else ''}{number(found.bias)}")


def _saved_cell(best: Saving | None) -> Cell:
    if best is None:
        return Cell(MISSING, mark="missing", hint="it was not swept on all of the step's gradients")
    return Cell(f"{number(best.over_bfloat16[0])}x", EXCHANGES[best.exchange])


def _test(analysis: SweepAnalysis) -> list[str]:
    """The command that would test the prediction for the codec that a reader may want to take."""
    k = cheapest_safe(analysis.safety.judged, [c.bits for c in analysis.configurations])
    attrs = analysis.provenance.get("trace_attrs")
    if k < 0 or not isinstance(attrs, dict):
        return []
    words = attrs.get("argv")
    if not isinstance(words, list) or not words:
        return []
    world = attrs.get("world_size")
    start = f"torchrun --nproc-per-node {world} -m -- " if isinstance(world, int) and world > 1 else ""
    codec, script = shlex.quote(analysis.configurations[k].spec), shlex.join(map(str, words))
    return [f"To test it, compare the losses with and without the codec: {start}gtrace train --codec {codec} {script}"]


def safety_json(analysis: SweepAnalysis) -> dict[str, Any]:
    """Every number behind the verdicts, in dictionaries, lists and arrays."""
    safety = analysis.safety
    if not safety.known:
        return {"why": safety.why}
    judged, least = {}, least_over_noise(analysis)
    for k, (configuration, found) in enumerate(zip(analysis.configurations, safety.judged, strict=True)):
        judged[configuration.spec] = {
            "verdict": found.verdict,
            "reason": found.reason,
            "noise_ratio": found.ratio.estimate,
            "noise_ratio_low": found.ratio.low,
            "noise_ratio_high": found.ratio.high,
            "bias": found.bias,
            "norm_over_noise": least[k],
            "bias_at_most": found.bounded,
            "prediction": safety.record(found),
            "per_tensor": safety.ratio_per_tensor[k],
        }
    return {
        "sentences": safety_sentences(analysis),
        "sources": list(safety.sources),
        "batch": safety.outlook.batch,
        "horizon": safety.outlook.horizon,
        "noise": dataclasses.asdict(safety.noise),
        "noise_per_step": safety.noise_per_step,
        "noise_per_tensor": dict(zip(analysis.tensors, safety.noise_per_tensor.tolist(), strict=True)),
        "judged": judged,
    }


def noise_table(analysis: SweepAnalysis, most: int | None = None) -> Table:
    """One line per tensor: its gradient noise, and the noise of one configuration of each method in it.

    Args:
        analysis: of a sweep whose gradient noise is known.
        most: of more tensors, those with the largest part of the energy.
    """
    safety = analysis.safety
    chosen, parts = [i for i in analysis.view() if safety.judged[i].bias < SAFE_BIAS], safety.outlook.parts()

    def cell(i: int, t: int) -> Cell:
        ratio = float(safety.ratio_per_tensor[i, t])
        part = parts.get((analysis.configurations[i].spec, analysis.tensors[t]), math.nan)
        if not math.isfinite(ratio):
            return NOTHING
        return Cell(number(ratio), f"{percent(part)} of its cost" if math.isfinite(part) else "")

    columns: list[tuple[Column, Callable[[int], Shown]]] = [
        (Column("tensor", "parameter name", numeric=False), lambda t: analysis.tensors[t]),
        (Column("elements", rank=len(chosen) + 1), lambda t: f"{analysis.elements[t]:,}"),
        (
            Column("noise / ||g||²", "tr Cov(g) over the squared norm of the gradient"),
            lambda t: float(safety.noise_per_tensor[t]),
        ),
        *method_columns(analysis, chosen, cell),
    ]
    shown = most_energy(analysis, most)
    notes = [
        (
            f"Noise ratio per method with the configuration nearest to {PREFERRED_BITS:g} measured bits, and below it "
            "the part of the predicted cost that is in this tensor."
        )
    ]
    if len(shown) < len(analysis.tensors):
        left = count(len(analysis.tensors) - len(shown), "tensor")
        notes.append(f"{left} with less energy left out; -o FILE has all.")
    return Table.of(
        "Noise ratio per tensor",
        shown,
        columns,
        notes=tuple(notes),
        empty="No tensor was measured.",
        folded=True,
        place="safety",
    )
