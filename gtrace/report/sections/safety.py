"""Gradient noise and the verdicts that follow from it, in sentences and tables."""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING

from gtrace.report.analysis.equal_bits import PREFERRED_BITS
from gtrace.report.analysis.safety import LAYER_RATIO, LAYER_SHARE, SAFE_BIAS, SAFE_RATIO, Judgement, cheapest_safe
from gtrace.report.analysis.savings import EXCHANGES
from gtrace.report.names import MISSING, count, listed, number
from gtrace.report.section import NOTHING, Cell, Column, Table, value_cell
from gtrace.report.sections.sweep_tables import MARKS, method_columns, most_energy

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gtrace.report.analysis.families import Configuration
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.safety import Safety, SafetyVerdict
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
    noise = number(safety.noise.estimate)
    judged = Counter(found.verdict for found in safety.judged)
    counted = listed(f"{judged[verdict]} {verdict}" for verdict in _ORDER if judged[verdict])
    sentences = [
        f"Gradient noise, from {listed(list(safety.sources))}, is {noise} times the squared norm of the gradients.",
        f"Judged by it, of {count(len(safety.judged), 'configuration')}: {counted}.",
    ]
    k = cheapest_safe(safety.judged, [c.bits for c in analysis.configurations])
    if k >= 0:
        sentences.append(f"Fewest bits that are safe: {_predicted(analysis, k)}.")
    return sentences


def _by_verdict(analysis: SweepAnalysis) -> list[tuple[Configuration, Judgement]]:
    """Configurations with what is said of them, by verdict, and the fewest bits first."""
    pairs = zip(analysis.configurations, analysis.safety.judged, strict=True)
    return sorted(pairs, key=lambda pair: (_ORDER.index(pair[1].verdict), math.isnan(pair[0].bits), pair[0].bits))


def _predicted(analysis: SweepAnalysis, k: int) -> str:
    safety, spec = analysis.safety, analysis.configurations[k].spec
    size, low, high = safety.equivalent(safety.judged[k].ratio)
    if not math.isfinite(size):
        return spec
    batch = f"at batch {safety.batch:,.0f}" if math.isfinite(safety.batch) else f"per {safety.stated_batch:g} samples"
    return f"{spec} {batch} is predicted to behave like {_samples(size)} ({_samples(low)} to {_samples(high)})"


def _samples(size: float) -> str:
    return f"{size:,.0f}" if size >= 100 else number(size)


def safety_table(analysis: SweepAnalysis, savings: Savings | None = None) -> Table:
    """One line per configuration: the verdict, its numbers, what it saves, and its reason; what is safe first."""
    safety = analysis.safety
    saved = [] if savings is None else [Column("step over bf16", f"between {savings.cluster.ranks} ranks", rank=1)]
    whole = f"{safety.batch:,.0f}" if math.isfinite(safety.batch) else f"{safety.stated_batch:g}"
    columns = (
        Column("configuration", "codec and its parameters", numeric=False),
        Column("verdict", "by the noise that the gradients have anyway", numeric=False),
        Column("bits measured", "per coordinate: payload with norms, and shared bytes"),
        Column("noise ratio", "variance of Q(g) over gradient noise, the same for any number of workers"),
        Column("bias", "norm of the bias over that of the expected gradient", rank=1),
        Column(f"batch of {whole} like", "prediction: batch in full precision whose gradients are as noisy", rank=2),
        Column("worst layer", "the layer with the largest noise ratio", rank=3, numeric=False),
        *saved,
        Column("because", "the reason for the verdict", rank=4, numeric=False, prose=True),
    )
    rows = tuple(
        (
            Cell(c.spec),
            Cell(found.verdict, mark=MARKS[found.verdict]),
            value_cell(c.bits),
            _ratio_cell(found),
            _bias_cell(found),
            _batch_cell(safety, found),
            Cell(found.worst or MISSING, number(found.worst_ratio) if found.worst else ""),
            *([] if savings is None else [_saved_cell(savings.best(c.spec))]),
            Cell(found.reason),
        )
        for c, found in _by_verdict(analysis)
    )
    layer = f"no layer with {LAYER_SHARE:.0%} of the elements or more has a noise ratio above {LAYER_RATIO:g}"
    notes = [
        (
            "Noise ratio: what the codec's rounding adds to the variance of one worker's gradient, over the variance "
            "that it has because its batch is a sample. Below it: 95% interval over steps."
        ),
        (
            f"Safe: the interval ends below {SAFE_RATIO:g}, the bias is below {SAFE_BIAS:g} of the expected gradient, "
            f"and {layer}. At risk: the interval begins at {SAFE_RATIO:g} or above, or such a layer. Otherwise "
            "gradient noise does not decide."
        ),
        (
            "The batch is a prediction: B / (1 + noise ratio), as if a codec's noise cost as much as gradient noise of "
            "the same size. Measured, it costs less as a rule: at risk means that gradient noise does not clear a "
            "codec, not that the codec does harm. It says nothing about codecs that are biased or remember their error."
        ),
    ]
    if savings is not None:
        notes.append(
            "Step over bf16: how many times as long a step with bf16 gradients would take, with the exchange below it; "
            "more under Savings."
        )
    if not math.isfinite(safety.batch):
        notes.append("The batch size is not in the trace; --batch-size states it.")
    return Table(TITLE, columns, rows, (*notes, *_test(analysis)), "No configuration was measured.", place="safety")


def _ratio_cell(found: Judgement) -> Cell:
    ratio = found.ratio
    if not math.isfinite(ratio.estimate):
        return Cell(MISSING, mark="missing", hint=found.reason)
    between = f"{number(max(ratio.low, 0.0))}{MISSING}{number(ratio.high)}" if ratio.known else ""
    return Cell(number(ratio.estimate), between, hint=ratio.why)


def _bias_cell(found: Judgement) -> Cell:
    if not math.isfinite(found.bias):
        return Cell(MISSING, mark="missing", hint="the expected gradient is lost in its noise")
    return Cell(f"{'at most ' if found.bounded and found.bias else ''}{number(found.bias)}")


def _batch_cell(safety: Safety, found: Judgement) -> Cell:
    size, low, high = safety.equivalent(found.ratio)
    if not math.isfinite(size) or not found.bias < SAFE_BIAS:
        return Cell(MISSING, mark="missing", hint=found.reason)
    return Cell(_samples(size), f"{_samples(low)}{MISSING}{_samples(high)}" if math.isfinite(low) else "")


def _saved_cell(best: Saving | None) -> Cell:
    if best is None:
        return Cell(MISSING, mark="missing", hint="it was not swept on all of the step's gradients")
    return Cell(f"{number(best.over_bfloat16[0])}x", EXCHANGES[best.exchange])


def _test(analysis: SweepAnalysis) -> list[str]:
    """The command that would test the prediction for the codec that a reader may want to take."""
    k = cheapest_safe(analysis.safety.judged, [c.bits for c in analysis.configurations])
    attrs = analysis.provenance.get("trace_attrs")
    if k < 0 or not isinstance(attrs, dict) or not isinstance(attrs.get("argv"), list) or not attrs["argv"]:
        return []
    world = attrs.get("world_size")
    start = f"torchrun --nproc-per-node {world} -m -- " if isinstance(world, int) and world > 1 else ""
    codec, script = shlex.quote(analysis.configurations[k].spec), shlex.join(map(str, attrs["argv"]))
    return [f"To test it, compare the losses with and without the codec: {start}gtrace train --codec {codec} {script}"]


def safety_json(analysis: SweepAnalysis) -> dict[str, Any]:
    """Every number behind the verdicts, in dictionaries, lists and arrays."""
    safety = analysis.safety
    if not safety.known:
        return {"why": safety.why}
    judged = {}
    for k, (configuration, found) in enumerate(zip(analysis.configurations, safety.judged, strict=True)):
        size, low, high = safety.equivalent(found.ratio)
        judged[configuration.spec] = {
            "verdict": found.verdict,
            "reason": found.reason,
            "noise_ratio": found.ratio.estimate,
            "noise_ratio_low": found.ratio.low,
            "noise_ratio_high": found.ratio.high,
            "bias": found.bias,
            "bias_at_most": found.bounded,
            "equivalent_batch": size,
            "equivalent_batch_low": low,
            "equivalent_batch_high": high,
            "per_tensor": safety.ratio_per_tensor[k],
            "per_step": safety.ratio_per_step[k],
        }
    return {
        "sentences": safety_sentences(analysis),
        "sources": list(safety.sources),
        "batch": safety.stated_batch,
        "noise": dataclasses.asdict(safety.noise),
        "noise_per_step": safety.noise_per_step,
        "noise_per_tensor": dict(zip(analysis.tensors, safety.noise_per_tensor.tolist(), strict=True)),
        "judged": judged,
    }


def noise_table(analysis: SweepAnalysis, most: int | None = None) -> Table:
    """One line per tensor: its gradient noise, and the equivalent batch size with one configuration of each method.

    Args:
        analysis: of a sweep whose gradient noise is known.
        most: of more tensors, those with the largest part of the energy.
    """
    safety = analysis.safety
    chosen = [i for i in analysis.view() if safety.judged[i].bias < SAFE_BIAS]
    columns: list[tuple[Column, Callable[[int], Shown]]] = [
        (Column("tensor", "parameter name", numeric=False), lambda t: analysis.tensors[t]),
        (Column("elements", rank=len(chosen) + 1), lambda t: f"{analysis.elements[t]:,}"),
        (
            Column("noise / ||g||²", "tr Cov(g) over the squared norm of the gradient"),
            lambda t: float(safety.noise_per_tensor[t]),
        ),
        *method_columns(analysis, chosen, partial(_layer_cell, safety)),
    ]
    shown = most_energy(analysis, most)
    whole = f"{safety.stated_batch:,.0f} samples"
    notes = [
        (
            f"Predicted batch in full precision that a batch of {whole} behaves like in this tensor, per method with "
            f"the configuration nearest to {PREFERRED_BITS:g} measured bits, and below it the noise ratio."
        )
    ]
    if len(shown) < len(analysis.tensors):
        left = count(len(analysis.tensors) - len(shown), "tensor")
        notes.append(f"{left} with less energy left out; -o FILE has all.")
    return Table.of(
        "Equivalent batch size per tensor",
        shown,
        columns,
        notes=tuple(notes),
        empty="No tensor was measured.",
        folded=True,
        place="safety",
    )


def _layer_cell(safety: Safety, i: int, t: int) -> Cell:
    ratio = float(safety.ratio_per_tensor[i, t])
    if not math.isfinite(ratio):
        return NOTHING
    return Cell(_samples(safety.stated_batch / (1 + ratio)), number(ratio))
