"""A sweep as a section: its words, which tables and figures it has, and its numbers for other programs."""

from __future__ import annotations

import dataclasses
import math
import shlex
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.report.analysis.cells import CODED
from gtrace.report.analysis.families import LEVEL, OUTCOMES, PLAIN, Family
from gtrace.report.analysis.safety import averaged_over
from gtrace.report.names import bits_text, count, energy_share, listed, number, percent, pick
from gtrace.report.section import Block, Numbers, Record, Section, Verdict, flat
from gtrace.report.sections import charts, checks, sweep_tables
from gtrace.report.verdict import verdict_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from gtrace.kernels import Floats
    from gtrace.report.analysis.evidence import PairedComparison, Phase
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.sweep import SideBySide, SweepAnalysis
    from gtrace.report.analysis.tensors import TensorGroup
    from gtrace.report.inputs import Report


#: nominal bits up to which a sweep is worth its time
MOST_BITS = 8
#: Methods that the first sentence names: a tired reader stops there.
_FIRST = 3
#: Methods and layers that a sentence names before it counts.
_NAMED = 6
_LAYERS = 3
#: Part of an error that is bias, from which on it is named.
_BIASED = 0.1


def sections(report: Report, most_layers: int | None) -> Iterator[Section]:
    """One section for each sweep."""
    for analysis, pairs, groups in zip_longest(report.sweeps, report.pairs, report.groups):
        first, *others = sweep_verdict(analysis)
        others += checks.safety_sentences(analysis) + checks.over_noise_sentence(analysis)
        others += checks.exchange_sentence(analysis.exchanges)
        others += checks.rotation_sentences(analysis.rotation)
        named = [f"{pair.first} has {compared_in_words(pair)}." for pair in pairs or ()]
        methods = count(len({c.method for c in analysis.configurations}), "method")
        made = {key: value for key, value in analysis.provenance.items() if key != "tensors"}
        savings = report.savings_of(analysis)
        yield Section(
            kind="Sweep",
            name=analysis.name,
            sentences=(*named, first, *groups_in_words(groups or ()), *others),
            blocks=(*_answers(analysis, pairs or (), groups or (), savings), *_details(analysis, most_layers)),
            place="choose",
            notes=analysis.notes,
            warnings=analysis.warnings,
            facts=(
                f"{methods} in {count(len(analysis.configurations), 'configuration')}, "
                f"{count(len(analysis.tensors), 'tensor')} with {count(int(analysis.elements.sum()), 'element')}, "
                f"{count(len(analysis.steps), 'step')}; "
                f"{count(analysis.cells, f'tensor-{analysis.table.noun}')} compared"
            ),
            provenance={"results": analysis.name, "rows": analysis.rows, **made},
            numbers=partial(_numbers, analysis, pairs, groups),
            verdict=(verdict := verdict_of(analysis, savings)),
            brief=sweep_tables.choice_table(analysis, savings),
            following=_following(analysis, verdict),
        )


def _following(analysis: SweepAnalysis, verdict: Verdict) -> str:
    """The command that makes a verdict better: bits by layer, the noise that is not known, or what was not measured."""
    path = analysis.provenance.get("trace")
    if not isinstance(path, str) or not Path(path).exists():
        return ""
    trace = shlex.quote(path)
    if analysis.provenance.get("kind") == "neural":
        return f"gtrace plan formats {trace} --kind neural"
    if verdict.answer == "compress":
        return f"gtrace plan {trace} --max-bits {verdict.bits:.3g}"
    bits = [c.nominal_bits for c in analysis.configurations if math.isfinite(c.nominal_bits)]
    if verdict.answer == "nothing is safe" and max(bits, default=0) < MOST_BITS:
        return f"gtrace sweep {trace} --methods qsgdinf --bits {max(bits, default=1) + 1:.0f}-{MOST_BITS}"
    there = {c.method for c in analysis.configurations}
    if verdict.answer == "not measured":
        # What another sweep cannot measure either, it need not try.
        return f"gtrace sweep {trace}" if there <= PLAIN.keys() else ""
    unknown = verdict.answer == "do not compress" and not verdict.codec and "bf16" not in there
    return f"gtrace sweep {trace} --methods bf16" if unknown else ""


def _answers(
    analysis: SweepAnalysis,
    pairs: tuple[PairedComparison, ...],
    groups: tuple[TensorGroup, ...],
    savings: Savings | None,
) -> Iterator[Block]:
    if pairs:
        title = "Error of the first configuration over that of the second, paired over steps"
        note = f"Each at its own bits. p is Holm's, corrected for the {count(len(pairs), 'pair')} named."
        yield sweep_tables.pairs_table(title, pairs, (note,))
    if analysis.measured:
        yield sweep_tables.equal_bits_table(analysis)
    if analysis.safety.known and analysis.measured:
        yield checks.safety_table(analysis, savings)
    if analysis.exchanges:
        yield checks.exchange_table(analysis.exchanges)
    if groups:
        yield sweep_tables.group_table(groups)
    if analysis.comparisons:
        yield sweep_tables.comparison_table(analysis)
        if analysis.phases:
            yield sweep_tables.phase_table(analysis)


def _details(analysis: SweepAnalysis, most_layers: int | None) -> Iterator[Block]:
    if not analysis.configurations:
        return
    yield sweep_tables.configuration_table(analysis)
    yield from charts.sweep_figures(analysis)
    if analysis.safety.known and analysis.measured:
        yield checks.noise_table(analysis, most_layers)
    layers = sweep_tables.layer_tables(analysis)
    if layers is not None:
        yield layers
    if analysis.rotation is not None:
        yield checks.rotation_table(
            analysis.rotation, {analysis.tensors[t] for t in sweep_tables.most_energy(analysis, most_layers)}
        )
    if analysis.measured and len(analysis.tensors) > 1:
        yield sweep_tables.layer_table(analysis, most_layers)


def _numbers(
    analysis: SweepAnalysis, pairs: tuple[PairedComparison, ...] | None, groups: tuple[TensorGroup, ...] | None
) -> Numbers:
    """Every number of a sweep, of the pairs and of the groups that the reader named; None if nobody named any."""
    found = _json(analysis)
    json: dict[str, Any] = {"sweeps": found}
    rows = {"configurations": [{"results": analysis.name, **row} for row in found["configurations"]]}
    whose = {"workers": analysis.basis.workers, "averaged_over": found["averaged_over"]}
    records = list(_records(analysis, found, whose))
    if groups is not None:
        json["groups"], group_rows = [], []
        for group in groups:
            numbers = pick(group, "elements", "energy_share")
            about = {"group": group.name, "group_tensors": len(group.tensors)}
            about |= {f"group_{name}": value for name, value in numbers.items()}
            own = [flat(c) for c in group.analysis.configurations]
            group_rows += [{**about, **row} for row in own]
            said = {"verdict": sweep_verdict(group.analysis), "configurations": own, "notes": [*group.analysis.notes]}
            json["groups"].append({"group": group.name, "tensors": list(group.tensors), **numbers, **said})
        rows["groups"] = [{"results": analysis.name, **row} for row in group_rows]
        records += [{"record": "group", **row} for row in group_rows]
    if pairs is not None:
        json["pairs"] = [flat(c) for c in pairs]
        records += [{"record": "pair", **whose, **row} for row in json["pairs"]]
    return Numbers(json, records, rows)


def _equal_bits(sweep: SweepAnalysis) -> Iterator[Record]:
    specs = [c.spec for c in sweep.configurations]
    for f, family in enumerate(sweep.families):
        for k, at in enumerate(family.at):
            yield {
                "method": family.method,
                "family": family.label,
                "bits": at.target,
                "error": at.variance,
                "bias": at.bias,
                "error_bits": at.bits,
                "error_by_layers": sweep.at_layers[f, k],
                "error_of_single_steps": sweep.step_at[f, k],
                "outcome": at.outcome,
                "why": OUTCOMES[at.outcome],
                "lower": specs[at.lower] if at.lower >= 0 else None,
                "upper": specs[at.upper] if at.upper >= 0 else None,
            }


def _records(sweep: SweepAnalysis, json: Record, whose: Record) -> Iterator[Record]:
    """The rows of ``json`` as records, those of all methods together with whose gradients they are about."""
    specs = [c.spec for c in sweep.configurations]
    yield from ({"record": "configuration", **row} for row in json["configurations"])
    basis = {**whose, "coder": sweep.basis.coder, "window": sweep.basis.window}
    for row in json["equal_bits"]:
        own = {name: value for name, value in row.items() if name not in ("method", "why")}
        yield {"record": "equal_bits", **basis, **own}
    yield from ({"record": "comparison", **whose, **row} for row in json["comparisons"])
    yield from ({"record": "bd_rate", **row} for row in json["bd_rates"])
    for phase in sweep.phases:
        steps = {"phase": phase.name, "first_step": phase.first, "last_step": phase.last}
        for i, spec in enumerate(specs):
            numbers = {"relative_variance": phase.relative_variance[i], "bits": phase.bits[i]}
            yield {"record": "phase", **steps, "spec": spec, **numbers}
    for t, tensor in enumerate(sweep.tensors):
        about = {"tensor": tensor, "elements": sweep.elements[t], "energy_share": sweep.energy_share[t]}
        about["best"] = sweep.layer_best[t] or None
        for i, spec in enumerate(specs):
            numbers = {"relative_variance": sweep.per_tensor[i, t], "bits": sweep.single.layer_bits[i, t]}
            yield {"record": "layer", **about, "spec": spec, **numbers}
    yield from ({"record": "layer_choice", **row} for row in json["layer_choices"])
    yield from ({"record": "rotation", **row} for row in json["rotation"])


def _json(analysis: SweepAnalysis) -> dict[str, Any]:
    targets, labels = [f"{target:g}" for target in analysis.targets], [f.label for f in analysis.families]

    def by_spec(values: Floats) -> dict[str, Any]:
        return dict(zip([c.spec for c in analysis.configurations], values, strict=True))

    def of_phase(phase: Phase) -> Record:
        steps = {"name": phase.name, "first_step": phase.first, "last_step": phase.last, "steps": phase.steps}
        at = {label: dict(zip(targets, own, strict=True)) for label, own in zip(labels, phase.at, strict=True)}
        return {**steps, "relative_variance": by_spec(phase.relative_variance), "equal_bits": at}

    return {
        "name": analysis.name,
        "verdict": sweep_verdict(analysis),
        **pick(analysis, "rows", "cells"),
        **dataclasses.asdict(analysis.basis),
        "coder_leaders": {coder: found._asdict() for coder, found in analysis.coder_leaders.items()},
        "equal_bits": list(_equal_bits(analysis)),
        # With the name that papers have for the relative variance.
        "configurations": [{**flat(c), "vnmse": c.relative_variance} for c in analysis.configurations],
        "tensors": list(analysis.tensors),
        **pick(analysis, "elements", "steps"),
        "per_tensor": by_spec(analysis.per_tensor),
        "per_step": by_spec(analysis.per_step),
        "notes": list(analysis.notes),
        "warnings": list(analysis.warnings),
        "provenance": analysis.provenance,
        "fits": [dataclasses.asdict(fit) for fit in analysis.fits],
        "step_weights": analysis.single.weights,
        "averaged_over": averaged_over(analysis.provenance),
        "comparisons": [flat(c) for c in analysis.comparisons],
        "phases": [of_phase(phase) for phase in analysis.phases],
        "bd_rates": [flat(rate) for rate in analysis.bd_rates],
        "layer_choices": [flat(choice) for choice in analysis.layer_choices],
        "safety": checks.safety_json(analysis),
        "rotation": checks.rotation_rows(analysis.rotation),
        "layer_best": dict(zip(analysis.tensors, analysis.layer_best, strict=True)),
    }


def sweep_verdict(analysis: SweepAnalysis) -> list[str]:
    """Sentences that say which method has the least error at equal measured bits, and how sure that is."""
    if not analysis.rows:
        return ["Nothing was measured: the sweep has no rows."]
    if not analysis.measured:
        zero = "every gradient is zero" if analysis.zero else "no row holds an error that is a number"
        return [f"Nothing can be compared: {zero}."]
    k = analysis.decisive
    if k < 0:
        wanted = listed([f"{t:g}" for t in analysis.targets])
        near = f"no method was measured near {wanted} bits per value"
        return [f"Nothing to compare: {near if wanted else 'no method has both an error and a known number of bits'}."]
    found = analysis.ranking(k)
    at = f"At {bits_text(analysis.targets[k])} per value"
    basis = analysis.basis
    over = f" over {basis.steps_in_words}" if basis.window else ""
    over += f" with {basis.workers:,} workers" if basis.workers > 1 else ""
    if len(found) == 1:
        only, own = found[0], found[0].at[k]
        at = f"At {bits_text(float(f'{own.bits:.3g}'))} per value"
        lost = f"{energy_share(own.variance)} of gradient energy"
        return [f"{at}, {only.label} loses {lost}{over}; no other method was measured there."]
    named = [f"{f.label} ({_amount(f, k, 'has')})" for f in found[1:]]
    least = _amount(found[0], k, "it has", " of gradient energy")
    said = [f"{at}, {found[0].label} loses least{over} ({least}), then {listed(named[: _FIRST - 1])}."]
    if named[_FIRST - 1 :]:
        said.append(f"Behind them: {listed(named[_FIRST - 1 :], _NAMED)}.")
    for more in (_how_sure, _bias, _coders, _elsewhere, _over_training, _layers):
        said += more(analysis, k)
    return said


def _amount(family: Family, k: int, has: str, of: str = "") -> str:
    """``4.6%``, or ``has 3.0% at 1.99 bits`` when it needs fewer bits than the target."""
    at = family.at[k]
    lost = f"{energy_share(at.variance)}{of}"
    return f"{has} {lost} at {number(at.bits)} bits" if at.elsewhere else lost


def _bias(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Whose error does not shrink with more workers, when not everybody's does or nobody's."""
    shares = {f.label: f.at[k].bias / f.at[k].variance for f in analysis.ranking(k) if f.at[k].variance > 0}
    biased = [f"{label} ({percent(share)})" for label, share in shares.items() if share > _BIASED]
    if biased and (len(biased) < len(shares) or any(c.bias_known for c in analysis.configurations)):
        yield f"More workers do not shrink the part of an error that is bias: {listed(biased)}."


def _coders(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    here, target = {f.label for f in analysis.leaders(k)}, analysis.targets[k]
    own = analysis.basis.coder
    said: dict[tuple[str, float], list[str]] = {}
    for coder, found in analysis.coder_leaders.items():
        if coder != own and found.label not in here:
            said.setdefault((found.label, found.target), []).append(CODED[coder])
    elsewhere = any(rate != target for _, rate in said)

    def at(rate: float) -> str:
        return f" at {bits_text(rate)}" if elsewhere else ""

    others = [f"{listed(how)} {label} leads{at(rate)}" for (label, rate), how in said.items()]
    sentence = f"{', '.join(others)}; {CODED[own]} {analysis.ranking(k)[0].label} does{at(target)}."
    if said:
        yield f"{sentence[:1].upper()}{sentence[1:]}"


def _how_sure(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """The leader against those that are too close to call, and against the first that is not; and whose gradients."""
    found, level = analysis.ranking(k), analysis.leaders(k)
    if len(level) > 1:
        yield f"{listed([f.label for f in level])} are too close to call: {_doubt(analysis, level, k)}."
    behind = next((f.label for f in found if f not in level), "")
    compared = analysis.comparison(found[0].label, behind, analysis.targets[k])
    if compared is not None:
        yield f"{found[0].label} has {compared_in_words(compared)}."
    ranks = averaged_over(analysis.provenance)
    if ranks > 1:
        yield (
            f"Measured on averages over {ranks} ranks: the gradients that each would send have more noise, "
            "so errors on the wire will be larger."
        )


def _doubt(analysis: SweepAnalysis, level: Sequence[Family], k: int) -> str:
    known = [analysis.comparison(level[0].label, f.label, analysis.targets[k]) for f in level[1:]]
    found = [c for c in known if c is not None]
    if all(f.at[k].variance <= level[0].at[k].variance * (1 + LEVEL) for f in level):
        return "their errors are nearly the same"
    unsure = next((c for c in found if not c.by_elements.known), None)
    if unsure is not None:
        return f"{unsure.first} was better in {percent(unsure.better)} of training, but {unsure.by_elements.why}"
    compared = count(found[0].by_elements.count, analysis.table.noun)
    return f"the differences are within the noise of {compared}"


def compared_in_words(compared: PairedComparison) -> str:
    """``0.54 times the error of zipml (95%: 0.46 to 0.63)``, or why there is no interval."""
    found = compared.by_elements
    said = f"{number(compared.ratio, 2)} times the error of {compared.second}"
    if found.known:
        within = found.low <= 1 <= found.high
        unsure = ", within the noise of steps" if within else ", but not sure with several methods compared"
        return f"{said} (95%: {number(found.low, 2)} to {number(found.high, 2)}){'' if compared.differs else unsure}"
    return f"{said} and less in {percent(compared.better)} of training, but {found.why}"


def _elsewhere(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Who leads at the other targets, if there is a choice at all."""
    here = analysis.leaders(k)
    led: dict[tuple[str, ...], list[float]] = {}
    for j, target in enumerate(analysis.targets):
        if j != k and len(analysis.ranking(j)) > 1:
            led.setdefault(tuple(f.label for f in analysis.leaders(j)), []).append(target)
    for labels, targets in led.items():
        verb = "leads" if len(labels) == 1 else "lead"
        also = " as well" if {f.label for f in here}.issuperset(labels) else ""
        bits = "bit" if targets == [1.0] else "bits"
        yield f"{listed(labels)} {verb} at {listed([f'{t:g}' for t in targets])} {bits}{also}."


def _over_training(analysis: SweepAnalysis, k: int) -> Iterator[str]:
    """Thirds of training where another method has the least error than over all of it."""
    leader = analysis.ranking(k)[0].label
    said = []
    for phase in analysis.phases:
        known = {f.label: at for f, at in zip(analysis.families, phase.at[:, k], strict=True) if math.isfinite(at)}
        best = min(known, key=known.__getitem__, default=leader)
        if best != leader and leader in known:
            values = f"{best} {energy_share(known[best])}, {leader} {energy_share(known[leader])}"
            said.append(f"{phase.name} (steps {phase.first:,} to {phase.last:,}) {values}")
    if said:
        yield f"The leader changes over training: {'; '.join(said)}."


def _layers(analysis: SweepAnalysis, _k: int) -> Iterator[str]:
    """Layers that another method suits better beyond the noise of steps, the clearest first."""
    sure = sorted((c for c in analysis.layer_choices if c.sure), key=lambda c: c.ratio)
    shown = [f"{c.tensor} prefers {c.best} ({number(c.ratio, 2)} times the error)" for c in sure[:_LAYERS]]
    more = f" and {len(sure) - _LAYERS} more" if len(sure) > _LAYERS else ""
    if sure:
        at = bits_text(sure[0].bits)
        yield f"At {at} per value of the layer itself, {', '.join(shown)}{more}, against {sure[0].leader}."


def groups_in_words(groups: Sequence[TensorGroup]) -> list[str]:
    """The answer for each group, for as many as a reader wants to read."""
    firsts = [(group.name, sweep_verdict(group.analysis)[0]) for group in groups[:_NAMED]]
    said = [f"In {name}, {sentence[:1].lower()}{sentence[1:]}" for name, sentence in firsts]
    return [*said, f"{len(groups) - _NAMED} more groups are in the table."] if len(groups) > _NAMED else said


def side_by_side_verdict(pair: SideBySide) -> Iterator[str]:
    """How much more or less error the same codecs make in a second sweep, and what only one of them has."""
    known = sorted(c.ratio for c in pair.shared if math.isfinite(c.ratio))
    if not pair.shared:
        yield "No codec is in both sweeps."
    elif not known:
        yield f"{count(len(pair.shared), 'configuration')} in both, none with errors to compare."
    else:
        middle = math.sqrt(known[(len(known) - 1) // 2] * known[len(known) // 2])
        low, high = number(known[0]), number(known[-1])
        more = f" in the median, {low} to {high} times" if low != high else ""
        found = f"{pair.second} has {number(middle)} times the error of {pair.first}{more}"
        yield f"{count(len(pair.shared), 'configuration')} in both: {found}."
        if any(found.cells for found in pair.shared):
            sure = sum(c.differs for c in pair.shared)
            none = sum(not c.by_elements.known for c in pair.shared)
            unsure = f"; {none} have too few steps to compare" if none else ""
            yield (
                f"Paired on {count(pair.tensors, 'tensor')} and {count(pair.steps, 'step')} that both have: "
                f"{sure} differ beyond the noise of steps{unsure}."
            )
        else:
            yield "No tensor at any step is in both, so these are ratios of sums over different gradients."
    if pair.same_trace is False:
        yield "The sweeps are of different traces: the ratios hold the difference of the runs as well."
    for name, specs in ((pair.first, pair.only_first), (pair.second, pair.only_second)):
        if specs:
            yield f"Only in {name}: {listed(specs)}."


def side_by_side_section(pair: SideBySide) -> Section:
    """A further sweep against the first."""
    return Section(
        kind="Sweep",
        name=f"{pair.second} against {pair.first}",
        sentences=tuple(side_by_side_verdict(pair)),
        blocks=(sweep_tables.side_by_side_table(pair),),
        place="choose",
        together=True,
        numbers=partial(_pair_numbers, pair),
    )


def _pair_numbers(pair: SideBySide) -> Numbers:
    shared = [flat(found) for found in pair.shared]
    common = {"results": pair.second, "first_results": pair.first, "same_trace": pair.same_trace}
    return Numbers(
        {"side_by_side": {**flat(pair), "verdict": list(side_by_side_verdict(pair)), "shared": shared}},
        [{"record": "side_by_side", **common, **row} for row in shared],
    )
