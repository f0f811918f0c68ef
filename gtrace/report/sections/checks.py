"""What else a sweep says of its codecs, in sentences and tables: noise, rotation and exchanges.

Verdicts on safety follow from gradient noise.
"""

from __future__ import annotations

import dataclasses
import math
import shlex
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.report.analysis.families import PREFERRED_BITS, Configuration
from gtrace.report.analysis.safety import (
    LEAST_OVER_NOISE,
    MANY_STEPS,
    MOST_NOISE,
    SAFE_BIAS,
    SAFE_COST,
    Judgement,
    samples,
)
from gtrace.report.analysis.savings import EXCHANGES, Saving, Savings
from gtrace.report.names import MISSING, bits_text, count, energy_share, listed, number, percent, pick
from gtrace.report.section import NOTHING, Cell, Record, Shows, Table, column, flat, value_cell, words
from gtrace.report.sections.sweep_tables import MARKS, batch_cell, method_columns, most_energy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from gtrace.noise import NoisePrediction
    from gtrace.report.analysis.details import ExchangeError, LayerRotation, Rotation
    from gtrace.report.analysis.sweep import SweepAnalysis


def safety_sentences(analysis: SweepAnalysis) -> list[str]:
    """What is safe, or why that is unknown, after the verdict on errors."""
    safety = analysis.safety
    if not analysis.measured:
        return []
    if not safety.known:
        return [f"Safety unknown: {safety.why}."]
    noise, outlook = number(safety.noise.estimate), safety.outlook
    judged = Counter(found.verdict for found in safety.judged.values())
    counted = listed(f"{judged[verdict]} {verdict}" for verdict in MARKS if judged[verdict])
    sentences = [
        f"Gradient noise, from {listed(list(safety.sources))}, is {noise} times the squared norm of the gradients.",
        f"Of {count(len(safety.judged), 'configuration')}: {counted}.",
    ]
    if outlook.why:
        sentences.append(f"What noise costs is not known: {outlook.why}.")
    cheapest = _cheapest_safe(analysis)
    if cheapest is not None:
        sentences.append(f"Fewest bits that are safe: {cheapest.spec} {safety.judged[cheapest.spec].reason}.")
    return sentences


def _cheapest_safe(analysis: SweepAnalysis) -> Configuration | None:
    judged = analysis.safety.judged
    safe = [c for c in analysis.configurations if judged[c.spec].verdict == "safe" and math.isfinite(c.bits)]
    return min(safe, key=lambda c: c.bits, default=None)


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
    errors = analysis.table.relative()
    worst = np.where(np.isfinite(errors), errors, 0.0).max(axis=1, initial=0.0)
    return [1 / math.sqrt(value) if value > 0 else math.nan for value in worst.tolist()]


def safety_table(analysis: SweepAnalysis, savings: Savings | None = None) -> Table:
    """One line per configuration: the verdict, its numbers, what it saves, and its reason; what is safe first."""
    outlook = analysis.safety.outlook
    like = f"batch of {samples(outlook.batch)} like" if not outlook.why else "batch like"
    judged = analysis.safety.judged.values()
    found = list(zip(analysis.configurations, judged, least_over_noise(analysis), strict=True))
    found.sort(key=lambda one: (list(MARKS).index(one[1].verdict), math.isnan(one[0].bits), one[0].bits))
    by, trains = "by what its noise and its bias cost", "prediction: uncompressed batch whose noise costs as much"
    added = "variance of Q(g) over gradient noise, the same for any number of workers"
    least = "least ||g|| / ||Q(g) - g|| of the steps: the sqrt(3) rule wants 1.73"
    columns: list[Shows[tuple[Configuration, Judgement, float]]] = [
        words("configuration", lambda one: one[0].spec, "codec and its parameters"),
        words("verdict", lambda one: Cell(one[1].verdict, mark=MARKS[one[1].verdict]), by),
        column("bits measured", lambda one: one[0].bits, "per coordinate: payload with norms, and shared bytes"),
        column(like, lambda one: batch_cell(one[1], interval=True), trains),
        column(
            "lost progress",
            lambda one: _progress(one[1].prediction),
            "part of each step's progress that the bias takes, or noise that makes Adam's steps shorter",
            1,
        ),
        column("noise ratio", lambda one: _ratio_cell(one[1]), added, 2),
        column("bias", lambda one: _bias_cell(one[1]), "norm of the bias over that of the expected gradient", 3),
        column(
            "norm / noise",
            lambda one: Cell(number(one[2]), mark="quiet") if one[2] < LEAST_OVER_NOISE else one[2],
            least,
            5,
        ),
        words("because", lambda one: one[1].reason, "the reason for the verdict", 4, prose=True),
    ]
    if savings is not None:
        between = f"between {savings.cluster.ranks} ranks"
        columns.insert(-2, column("step over bf16", lambda one: _saved_cell(savings.best(one[0].spec)), between, 1))
    over = f" over {outlook.horizon:,} steps (--horizon)" if not outlook.why else ""
    notes = [
        (
            f"Safe: by the whole interval the codec costs at most a tenth of the batch{over}, its bias takes at most a "
            "tenth of each step's progress, and its noise makes Adam's steps at most a twentieth shorter and has at "
            f"most {MOST_NOISE:g} times the gradient's energy. At risk: it likely costs more than a tenth of the "
            "batch (with a memory: by the whole interval), or its bias or Adam's shorter steps take more than a tenth "
            f"of the progress over {MANY_STEPS} steps or more."
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
    return Table.of("Is it safe?", found, columns, notes=(*notes, *_test(analysis)), place="safety")


def _ratio_cell(found: Judgement) -> Cell:
    ratio = found.ratio
    if not math.isfinite(ratio.estimate):
        return dataclasses.replace(NOTHING, hint=found.reason)
    between = f"{number(max(ratio.low, 0.0))}{MISSING}{number(ratio.high)}" if ratio.known else ""
    return Cell(number(ratio.estimate), between, hint=ratio.why)


def _bias_cell(found: Judgement) -> Cell:
    if not math.isfinite(found.bias):
        return dataclasses.replace(NOTHING, hint="the expected gradient is lost in its noise")
    return Cell(f"{'at most ' if found.bounded and found.bias else ''}{number(found.bias)}")


def _progress(found: NoisePrediction | None) -> Cell:
    if found is None or math.isnan(found.shorter):
        return NOTHING
    return Cell(percent(max(found.lost, found.shorter)))


def _saved_cell(best: Saving | None) -> Cell:
    if best is None:
        return dataclasses.replace(NOTHING, hint="it was not swept on all of the step's gradients")
    return Cell(f"{number(best.over_bfloat16[0])}x", EXCHANGES[best.exchange])


def _test(analysis: SweepAnalysis) -> list[str]:
    """The command that would test the prediction for the codec that a reader may want to take."""
    cheapest, attrs = _cheapest_safe(analysis), analysis.trace_attrs
    argv = attrs.get("argv")
    if cheapest is None or not isinstance(argv, list) or not argv:
        return []
    world = attrs.get("world_size")
    start = f"torchrun --nproc-per-node {world} -m -- " if isinstance(world, int) and world > 1 else ""
    codec, script = shlex.quote(cheapest.spec), shlex.join(map(str, argv))
    return [f"To test it, compare the losses with and without the codec: {start}gtrace train --codec {codec} {script}"]


def safety_json(analysis: SweepAnalysis) -> dict[str, Any]:
    """Every number behind the verdicts, in dictionaries, lists and arrays."""
    safety = analysis.safety
    if not safety.known:
        return {"why": safety.why}
    each = zip(safety.judged.items(), least_over_noise(analysis), safety.ratio_per_tensor, strict=True)
    judged = {
        spec: {
            **pick(found, "verdict", "reason"),
            "noise_ratio": found.ratio.estimate,
            "noise_ratio_low": found.ratio.low,
            "noise_ratio_high": found.ratio.high,
            "bias": found.bias,
            "norm_over_noise": least,
            "bias_at_most": found.bounded,
            "prediction": safety.record(found),
            "per_tensor": per_tensor,
        }
        for (spec, found), least, per_tensor in each
    }
    return {
        "sentences": safety_sentences(analysis),
        "sources": list(safety.sources),
        **pick(safety.outlook, "batch", "horizon"),
        "noise": dataclasses.asdict(safety.noise),
        "noise_per_step": safety.noise_per_step,
        "noise_per_tensor": dict(zip(analysis.tensors, safety.noise_per_tensor.tolist(), strict=True)),
        "judged": judged,
    }


def noise_table(analysis: SweepAnalysis, most: int | None = None) -> Table:
    """One line per tensor, or those with most energy: its gradient noise, and the noise of each method in it."""
    safety = analysis.safety
    specs, parts = [c.spec for c in analysis.configurations], safety.outlook.parts()
    chosen = [i for i in analysis.view() if safety.judged[specs[i]].bias < SAFE_BIAS]

    def cell(i: int, t: int) -> Cell:
        ratio = float(safety.ratio_per_tensor[i, t])
        part = parts.get((specs[i], analysis.tensors[t]), math.nan)
        if not math.isfinite(ratio):
            return NOTHING
        return Cell(number(ratio), f"{percent(part)} of its cost" if math.isfinite(part) else "")

    noise, meaning = safety.noise_per_tensor.tolist(), "tr Cov(g) over the squared norm of the gradient"
    columns: list[Shows[int]] = [
        words("tensor", lambda t: analysis.tensors[t], "parameter name"),
        column("elements", lambda t: f"{analysis.elements[t]:,}", rank=len(chosen) + 1),
        column("noise / ||g||²", lambda t: noise[t], meaning),
        *method_columns(analysis, chosen, cell),
    ]
    shown = most_energy(analysis, most)
    notes = [
        (
            f"Noise ratio per method with the configuration nearest to {PREFERRED_BITS:g} measured bits, and below it "
            "the part of the predicted cost that is in this tensor."
        )
    ]
    if left := len(analysis.tensors) - len(shown):
        notes.append(f"{count(left, 'tensor')} with less energy left out; -o FILE has all.")
    return Table.of("Noise ratio per tensor", shown, columns, notes=tuple(notes), folded=True, place="safety")


#: tensors that a sentence names
_NAMED = 3
_CLOSED = "No codec of this sweep rotates: eden is taken from its closed form, which holds for any values."


def rotation_sentences(found: Rotation | None) -> list[str]:
    """How many tensors gain from a rotation, which, and by how much at equal bits."""
    if found is None:
        return []
    known, at = found.known, bits_text(found.bits)
    gaining = sorted(
        (layer for layer in known if layer.verdict == "rotate"),
        key=lambda layer: layer.energy * (layer.rotated_error - layer.plain_error),
    )
    whole = f"{count(len(known), 'tensor')}{' compared' if len(known) < len(found.layers) else ''}"
    if not gaining:
        said = f"Rotation pays on none of {whole} at {at}: leave it out."
        return [said] if found.measured else [said, _CLOSED]
    held = sum(layer.energy for layer in gaining)
    names = listed([f"{layer.tensor} ({_change(layer)})" for layer in gaining], _NAMED)
    ratios = sorted(1 / layer.ratio for layer in gaining)
    times = " to ".join(dict.fromkeys(number(ratio, 2) for ratio in (ratios[0], ratios[-1])))
    without = sum(layer.energy * layer.plain_error for layer in known)
    mixed = sum(layer.energy * min(layer.plain_error, layer.rotated_error) for layer in known)
    sentences = [
        f"Rotation pays on {len(gaining)} of {whole}, with {percent(held)} of the gradient's energy: at {at} the best "
        f"codec that rotates loses {times} times less there. First: {names}."
    ]
    if energy_share(mixed) != energy_share(without):
        sentences.append(
            f"Rotating these alone, all tensors together lose {energy_share(mixed)} instead of {energy_share(without)} "
            "of gradient energy at the same bits."
        )
    return sentences if found.measured else [*sentences, _CLOSED]


def rotation_rows(found: Rotation | None) -> list[Record]:
    """The comparison for other programs, a row for each tensor."""
    if found is None:
        return []
    about = {"bits": found.bits, "measured": found.measured}
    return [{**about, **flat(one), "ratio": one.ratio, "verdict": one.verdict} for one in found.known]


def _change(layer: LayerRotation) -> str:
    rotated, plain = energy_share(layer.rotated_error), energy_share(layer.plain_error)
    return f"{rotated} with {layer.rotated}, {plain} with {layer.plain}"


def rotation_table(found: Rotation, shown: Collection[str]) -> Table:
    """One line per tensor that is named: the best codec with and without a rotation, and the verdict."""

    def error(label: str, value: float) -> Cell:
        return Cell(energy_share(value), label) if label else NOTHING

    def verdict(one: LayerRotation) -> Cell:
        return Cell(one.verdict, mark="best" if one.verdict == "rotate" else "") if one.known else NOTHING

    rotated = "least error of the codecs that rotate, at these bits of this tensor"
    plain = "least error of the codecs that do not"
    columns: list[Shows[LayerRotation]] = [
        words("tensor", lambda one: one.tensor, "parameter name"),
        column("energy", lambda one: value_cell(one.energy, ".1%"), "part of the total ||g||²", 2),
        column("rotated", lambda one: error(one.rotated, one.rotated_error), rotated),
        column("not rotated", lambda one: error(one.plain, one.plain_error), plain),
        column("ratio", lambda one: one.ratio, "error rotated over error not rotated; below 1 the rotation pays", 1),
        words("verdict", verdict),
    ]
    notes = [
        "Shares of the tensor's energy lost, by codecs without bias and memory. Same: they differ by less than 2%."
    ]
    if left := len(found.layers) - len(shown):
        notes.append(f"{count(left, 'tensor')} with less energy left out; -o FILE has all.")
    if not found.measured:
        notes.append(_CLOSED)
    layers = [layer for layer in found.layers if layer.tensor in shown]
    title = f"Rotate or not, at {bits_text(found.bits)}"
    return Table.of(title, layers, columns, notes=tuple(notes), place="layers")


#: ways in the order of their error
_WAYS = ("allgather", "shared-scale", "two-shot", "hierarchical", "ring")
_MANY = 10.0


def exchange_sentence(found: Sequence[ExchangeError]) -> list[str]:
    """What the worst exchange of the most ranks costs; nothing if no exchange was measured beside an all-gather."""
    most = max((one.ranks for one in found), default=0)
    gathered = [one for one in found if one.ranks == most and one.exchange == "allgather"]
    plain = {one.codec: one.error for one in gathered if one.error > 0}
    worse = [one for one in found if one.ranks == most and one.error > _MANY * plain.get(one.codec, math.inf)]
    worse = sorted(worse, key=lambda one: -one.error / plain[one.codec])
    if not worse:
        return []
    one = worse[0]
    name, _, node = one.exchange.partition(":")
    way = {"ring": "a ring", "two-shot": "two shots", "hierarchical": f"nodes of {node}"}.get(name, one.exchange)
    return [
        f"Between {most} ranks {one.codec} loses {number(one.error)} of the average in {way}, "
        f"{number(one.error / plain[one.codec])} times what it loses in an all-gather: sums are encoded again."
    ]


def exchange_table(found: Sequence[ExchangeError]) -> Table:
    """A line for each codec and number of ranks, a column for each exchange."""
    order = {name: k for k, name in enumerate(_WAYS)}
    ways = sorted({one.exchange for one in found}, key=lambda way: (order.get(way.partition(":")[0], len(order)), way))
    cells = {(one.codec, one.ranks, one.exchange): one for one in found}
    lines = sorted({(ranks, codec) for codec, ranks, _ in cells})

    def cell(exchange: str, line: tuple[int, str]) -> Cell:
        ranks, codec = line
        one = cells.get((codec, ranks, exchange))
        if one is None:
            return NOTHING
        here = [cells[codec, ranks, each].error for each in ways if (codec, ranks, each) in cells]
        across = "" if one.across == one.sent else f", {number(one.across)} out"
        return Cell(number(one.error), f"{number(one.sent)} B{across}", "best" if one.error == min(here) else "")

    said = "vNMSE of the average that every rank ends with, like DynamiQ's; below: bytes a rank sends for a value"
    columns: list[Shows[tuple[int, str]]] = [
        words("codec", lambda line: line[1]),
        column("ranks", lambda line: str(line[0]), "that exchange"),
        *(column(way, partial(cell, way), said) for way in ways),
    ]
    tensors = max((one.tensors for one in found), default=0)
    notes = (
        "Error of the average that every rank ends with, as a share of the exact average's energy, over "
        f"{count(tensors, 'tensor')}; below it the bytes that a rank sends for each value. By the code that real ranks "
        "run; out: what leaves a node.",
        f"Gradients of the ranks: {'; '.join(sorted({one.source for one in found}))}.",
    )
    empty = "No codec fits: sums need codes that add up (shared-scale), and ranks that are whole nodes (hierarchical)."
    return Table.of("Where sums happen", lines, columns, notes=notes, empty=empty, place="network")
