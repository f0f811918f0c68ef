"""Tables of a sweep."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.report.analysis.cells import CODED
from gtrace.report.analysis.evidence import SIGNIFICANT, PairedComparison, Phase
from gtrace.report.analysis.families import MEASURES, OUTCOMES, PREFERRED_BITS, AtBits, BDRate, Configuration, Family
from gtrace.report.analysis.safety import Judgement, SafetyVerdict, samples, whose_gradient
from gtrace.report.names import (
    MISSING,
    bits_text,
    count,
    duration,
    energy_share,
    listed,
    number,
    percent,
    signed_percent,
)
from gtrace.report.section import FEW_ROWS, NOTHING, PARETO, Cell, Column, LayerTables, Table, column, value_cell, words
from gtrace.report.statistics import THIRDS, Interval
from gtrace.report.verdict import ERROR_LIMIT, Candidate, candidates_of, choose, short_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.sweep import ConfigurationRatio, SideBySide, SweepAnalysis
    from gtrace.report.analysis.tensors import TensorGroup
    from gtrace.report.section import Mark, Shown, Shows


#: how a verdict on safety is set off
MARKS: dict[SafetyVerdict, Mark] = {"safe": "best", "at risk": "", "cannot tell": "quiet"}
#: Layers that have a section of their own, the ones with the most energy, and methods in each.
MOST_LAYERS, MOST_METHODS = 250, 16
#: groups, or codecs, up to which they have a column each
_WIDE = 6


def choice_table(analysis: SweepAnalysis, savings: Savings | None, *, every: bool = False) -> Table | None:
    """The recommended configuration beside the best of other methods; None if no error was measured.

    ``savings`` are those on the user's network; None without one. ``every`` shows all configurations by their specs,
    with the two columns of step times that a page fills in.
    """
    found = candidates_of(analysis, savings)
    if not analysis.measured:
        return None
    shown = short_list(found, network=savings is not None, most=FEW_ROWS)
    if every:
        shown = sorted(found, key=lambda one: (not one.within, one.bits))
    safety = analysis.safety
    chosen = choose(found, network=savings is not None).chosen

    def verdict(one: Candidate) -> Cell:
        known = safety.judged.get(one.codec)
        if one.method == "none" or not math.isfinite(one.error):
            return Cell("exact" if one.method == "none" else "not measured", mark="quiet")
        if known is not None and safety.known:
            return Cell(known.in_short, mark=MARKS[known.verdict], hint=known.reason)
        limit = f"{ERROR_LIMIT:.0%}"
        return Cell(f"below {limit}", mark="best") if one.within else Cell(f"above {limit}")

    def name(one: Candidate) -> Cell:
        text = "float32" if one.method == "none" else one.codec if every else one.name
        return Cell(text, mark="best" if one is chosen else "")

    columns: list[Shows[Candidate]] = [
        words("codec", name),
        column("bits", lambda one: number(one.bits), "measured, per value", 1),
        column("error", lambda one: energy_share(one.error, 3), "share of gradient energy lost"),
    ]
    if not safety.outlook.why:
        hint = f"of {samples(safety.outlook.batch)}: uncompressed one whose noise costs as much, predicted"
        columns.append(column("batch", lambda one: batch_cell(safety.judged.get(one.codec)), hint, 2))
    if savings is not None and not every:
        columns.append(column("step", lambda one: duration(one.seconds), f"on {savings.cluster.ranks} ranks"))
    columns.append(words("verdict", verdict))
    if every:
        columns.append(column("step", lambda _: NOTHING, "seconds of a step on this network"))
        columns.append(column("over bf16", lambda _: NOTHING, "a step with bf16 gradients over this one"))
        return Table.of("Every configuration", shown, columns, place="choose")
    left = len({one.method for one in found if math.isfinite(one.error)} - {one.method for one in shown})
    notes = (f"{count(left, 'more method')}; --full shows all.",) if left else ()
    return Table.of("The best configuration of each method", shown, columns, notes=notes, place="choose")


def batch_cell(found: Judgement | None, *, interval: bool = False) -> Cell:
    """The equivalent batch that is predicted."""
    prediction = None if found is None else found.prediction
    if prediction is None:
        return dataclasses.replace(NOTHING, hint="" if found is None else found.reason)
    between = f"{samples(prediction.least)}{MISSING}{samples(prediction.most)}" if interval else ""
    return Cell(samples(prediction.equivalent), between)


def layer_tables(analysis: SweepAnalysis) -> LayerTables | None:
    """One folded table per layer with what each method makes of it; None if no layer has methods to compare."""
    known = np.flatnonzero([bool(label) for label in analysis.layer_best])
    if not len(known):
        return None
    share = np.nan_to_num(analysis.energy_share)
    kept = sorted(known[np.argsort(-share[known], kind="stable")][:MOST_LAYERS].tolist())
    rate = bits_text(analysis.targets[analysis.decisive])
    tables = []
    for k in kept:
        energy = f"{analysis.elements[k]:,} elements, {analysis.energy_share[k]:.1%} of the energy"
        beside = f"{energy}, least error at {rate}: {analysis.layer_best[k]}"
        tables.append((_ranked(analysis, k, rate), beside))
    left_out = len(analysis.tensors) - len(kept)
    note = f"{count(left_out, 'layer')} not compared here: see the table below." if left_out else ""
    return LayerTables("Layer by layer", tuple(tables), note)


def _ranked(analysis: SweepAnalysis, k: int, rate: str) -> Table:
    known = sorted((float(at[k]), label) for label, at in analysis.layer_at.items() if math.isfinite(at[k]))
    meaning = f"at {rate} per value of this tensor, summed over steps"
    columns: list[Shows[tuple[float, str]]] = [
        words("method", lambda found: found[1]),
        column(f"error at {rate}", lambda found: energy_share(found[0]), meaning),
        column("times least", lambda found: number(found[0] / known[0][0]), "error over the least of these methods"),
    ]
    return Table.of(analysis.tensors[k], known[:MOST_METHODS], columns)


def comparison_table(analysis: SweepAnalysis) -> Table:
    """The leader against every other method at the decisive bits, paired over steps."""
    bits = analysis.targets[analysis.decisive]
    here = [c for c in analysis.comparisons if c.bits == bits]
    rows = sum(len(analysis.ranking(j)) > 1 for j in range(len(analysis.targets)))
    title = f"Error of the leader over that of the others at {bits:g} bits, paired over steps"
    note = (
        f"p is Holm's, corrected for the {len(analysis.comparisons)} comparisons at all {rows} numbers of bits; "
        f"marked where it is below {SIGNIFICANT:g}."
    )
    return dataclasses.replace(pairs_table(title, here, (note,) if here else ()), place="details")


def ratio_columns(ratio: str, interval: str, compared: str) -> list[Shows[Any]]:
    """A ratio of errors, its interval and its p-value; what the first two mean, and what Holm's correction counts."""
    meaning = f"that there is no difference, corrected for the number of {compared} (Holm)"

    def ends(found: PairedComparison | ConfigurationRatio) -> Cell:
        known = found.by_elements
        return Cell(span(known)) if known.known else dataclasses.replace(NOTHING, hint=known.why)

    def p(found: PairedComparison | ConfigurationRatio) -> Cell:
        text = "<0.001" if found.p_holm < 0.001 else f"{found.p_holm:.3f}"
        return NOTHING if math.isnan(found.p_holm) else Cell(text, mark="best" if found.differs else "")

    return [
        column("ratio", lambda f: Cell(number(f.ratio), mark="best" if f.differs and f.ratio < 1 else ""), ratio),
        column("95% interval", ends, interval),
        column("p", p, meaning, 1),
    ]


def span(interval: Interval) -> str:
    """Both ends of an interval, or why there is none."""
    return f"{number(interval.low)} to {number(interval.high)}" if interval.known else interval.why


def pairs_table(title: str, comparisons: Sequence[PairedComparison], notes: tuple[str, ...] = ()) -> Table:
    """One line per pair: ratio of errors, with its interval."""
    reasons = dict.fromkeys(c.by_elements.why for c in comparisons if c.by_elements.why)
    why = (f"No interval: {'; '.join(reasons)}. Such lines describe these steps and prove nothing.",) if reasons else ()
    about = (
        (
            "Ratio: error of the first over that of the second, on the same gradients; below 1 the first is better. "
            "Steps count by the part of training that they stand for."
        ),
        "By layers: every layer counts the same, at the same configurations, small layers as much as large ones.",
    )

    def third(name: str, compared: PairedComparison) -> str:
        return number(compared.thirds.get(name, math.nan))

    layers = "mean ratio of the layers, all counted the same"
    what = "of errors summed over all elements and steps"
    columns: list[Shows[PairedComparison]] = [
        words("first / second", lambda c: f"{c.first} / {c.second}", "error of the first over that of the second"),
        *ratio_columns(what, "from blocks of consecutive steps drawn again", "comparisons"),
        column("steps better", lambda c: percent(c.better), "part of training in which the first has less error", 3),
        *(column(name, partial(third, name), f"ratio in the {name} third of training", 4) for name in THIRDS),
        column("by layers", lambda c: Cell(number(c.by_layers.estimate), hint=span(c.by_layers)), layers, 2),
    ]
    said = (*about, *notes, *why) if comparisons else ()
    return Table.of(title, comparisons, columns, notes=said, empty="Nothing to compare.")


def phase_table(analysis: SweepAnalysis) -> Table:
    """Error of each method in the thirds of training, at the decisive bits."""
    k = analysis.decisive
    bits = analysis.targets[k]
    place = {f.label: i for i, f in enumerate(analysis.families)}

    def over(phase: Phase) -> Callable[[Family], Cell]:
        cells = [Cell(energy_share(at)) if math.isfinite(at) else NOTHING for at in phase.at[:, k].tolist()]
        return lambda family: cells[place[family.label]]

    notes = ("Thirds by step number. In each, methods are compared at equal bits of that third.",)
    columns: list[Shows[Family]] = [
        words("method", lambda family: family.label),
        *(column(f"{p.name} {p.first:,}–{p.last:,}", over(p), f"{p.steps} captured steps") for p in analysis.phases),
    ]
    title = f"Error over training at {bits:g} measured bits per value"
    return Table.of(title, analysis.ranking(k), columns, place="training", notes=notes)


def equal_bits_table(analysis: SweepAnalysis) -> Table:
    """The headline: error of each method at equal measured bits, best first."""
    decisive = analysis.decisive
    rates = {rate.family: rate for rate in analysis.bd_rates}
    reference = analysis.bd_rates[0].reference if rates else ""
    places = {family.label: f for f, family in enumerate(analysis.families)}

    def order(family: Family) -> tuple[bool, float, bool]:
        here = family.at[decisive].variance if decisive >= 0 else math.nan
        nowhere = all(math.isnan(at.variance) for at in family.at)
        return math.isnan(here), 0.0 if math.isnan(here) else here, nowhere

    def at_bits(k: int) -> Callable[[Family], Cell]:
        best = analysis.leaders(k) if len(analysis.ranking(k)) > 1 else []
        singles = analysis.step_at[:, k].tolist() if analysis.basis.window else [math.nan] * len(places)
        return lambda f: _at_cell(analysis, f.at[k], singles[places[f.label]], winner=f in best)

    columns: list[Shows[Family]] = [
        words("method", lambda f: f.label, "codec, and the parameters in which its families differ")
    ]
    for k, t in enumerate(analysis.targets):
        rank = 0 if k == decisive else 1 + abs(k - decisive)
        columns.append(column(bits_text(t), at_bits(k), f"error at {t:g} measured bits per value", rank))
    if rates:
        meaning = f"bits for the same error as {reference}, on average"
        columns.append(column(f"BD-rate / {reference}", lambda f: _rate_cell(rates.get(f.label)), meaning, 1))
    ordered = sorted((f for f in analysis.families if not analysis.lossless(f)), key=order)
    notes = _what_error_is(analysis)
    notes += [
        (
            "Below each number: the configurations it is log-interpolated between, b3 means bits=3, or the one that "
            "has it, with its bits when these are fewer."
        ),
        f"{MISSING}: not measured on both sides of this bit rate; gtrace does not extrapolate.",
    ]
    if rates:
        notes.append(
            f"BD-rate: average extra bits needed for the same error as {reference}, over the errors that both reach, "
            "which are below it."
        )
    wide: dict[str, list[str]] = {}
    for name, at in ((f.label, at) for f in ordered for at in f.at if at.outcome == "wide"):
        wide.setdefault(f"{name} ({_neighbours(analysis, at)})", []).append(f"{at.target:g}")
    if wide:
        said = listed(f"{who} near {listed(rates)} bits" for who, rates in wide.items())
        notes.append(f"Not measured, because neighbors more than one nominal bit apart are not interpolated: {said}.")
    elsewhere = off_target(analysis)
    if elsewhere:
        notes.append(f"Reached by none of these columns: {'; '.join(elsewhere)}.")
    title, empty = f"Error at equal bits: {_compared(analysis)}", "No configuration to compare."
    return Table.of(title, ordered, columns, notes=tuple(notes), empty=empty, headline=True)


def off_target(analysis: SweepAnalysis) -> list[str]:
    """Where the methods lie that no target reaches, as ``terngrad 523% at 0.60 bits``."""
    found = []
    for family in analysis.families:
        if analysis.lossless(family) or any(math.isfinite(at.variance) for at in family.at):
            continue
        points = [analysis.configurations[i] for i in family.members]
        points = [c for c in points if math.isfinite(c.bits) and math.isfinite(c.error)]
        if points:
            near = min(points, key=lambda c: min(abs(c.bits - t) for t in analysis.targets or (0.0,)))
            found.append(f"{family.label} {energy_share(near.error)} at {number(near.bits)} bits")
    return found


def _at_cell(analysis: SweepAnalysis, at: AtBits, single: float, *, winner: bool) -> Cell:
    if math.isnan(at.variance):
        hint = OUTCOMES[at.outcome]
        if at.outcome == "wide":
            hint = f"not measured near {bits_text(at.target)}: {_neighbours(analysis, at)}"
        return dataclasses.replace(NOTHING, hint=hint)
    low, high = analysis.configurations[at.lower], analysis.configurations[at.upper]
    detail = low.setting or "alone"
    if low is not high:
        detail += f"{MISSING}{high.setting or 'alone'}"
    if at.elsewhere:
        detail += f" at {number(at.bits)} bits"
    if at.bias >= 0.01 * at.variance > 0 and low.bias_known:
        detail += f", {at.bias / at.variance:.0%} bias"
    if math.isfinite(single):
        detail += f", one step {energy_share(single)}"
    one, two = (f"{energy_share(c.error)} at {number(c.bits)} bits" for c in (low, high))
    hint = f"{low.spec}: {one}" if low is high else f"between {low.spec} ({one}) and {high.spec} ({two})"
    return Cell(energy_share(at.variance), detail, "best" if winner else "", hint)


def _neighbours(analysis: SweepAnalysis, at: AtBits) -> str:
    low, high = analysis.configurations[at.lower], analysis.configurations[at.upper]
    return f"neighbours at {number(low.bits)} and {number(high.bits)} bits"


def _compared(analysis: SweepAnalysis) -> str:
    """What methods are compared by, as in the title of a table."""
    basis = analysis.basis
    steps = f"over {basis.steps_in_words}, " if basis.window else ""
    return f"{steps}{count(basis.workers, 'worker')}, {CODED[basis.coder]}"


def _what_error_is(analysis: SweepAnalysis) -> list[str]:
    basis, whose = analysis.basis, whose_gradient(analysis.provenance)
    said = [
        f"Error: ||Q(g) - g||² / ||g||² of {whose}, the share of gradient energy lost; above 100% it is more than the "
        "gradient."
    ]
    if basis.window:
        said.append(
            f"Q(g) - g and g are summed over {basis.steps_in_words} first, because codecs with memory send later what "
            "they leave out now."
        )
    many = f"Averaging over {basis.workers:,} workers divides the variance of an error by {basis.workers:,}"
    one = "For one worker. --cluster or --ranks compares for N workers, which shrink variance and leave bias."
    return [*said, f"{many}; its bias stays." if basis.workers > 1 else one]


def _rate_cell(rate: BDRate | None) -> Cell:
    if rate is None:
        # Of the reference itself there is none.
        return Cell("0%", mark="quiet")
    if math.isnan(rate.change):
        return dataclasses.replace(NOTHING, hint=rate.why)
    return Cell(signed_percent(rate.change), f"{number(rate.low, 2)}{MISSING}{number(rate.high, 2)}")


def configuration_table(analysis: SweepAnalysis) -> Table:
    """One line per configuration."""
    known = {
        name: measure
        for name, measure in MEASURES.items()
        if not measure.optional or any(math.isfinite(getattr(c, name)) for c in analysis.configurations)
    }

    def of(name: str) -> Callable[[Configuration], Cell]:
        if name in _CAREFUL:
            return _CAREFUL[name]
        return lambda c: value_cell(getattr(c, name), known[name].form)

    optimal = "Pareto-optimal: nothing else has fewer bits and less error"
    columns: list[Shows[Configuration]] = [
        words(
            "configuration",
            lambda c: Cell(c.spec, "", "quiet", "measured on too few cells") if c.partial else c.spec,
            "codec and its parameters",
        ),
        words("", lambda c: Cell(PARETO, mark="best") if c.pareto else "", optimal, 2),
    ]
    if analysis.basis.window is not None or analysis.basis.workers > 1:
        columns.append(column("error", lambda c: c.error, f"what methods are compared by: {_compared(analysis)}"))
    for name, measure in known.items():
        meaning = measure.column.meaning.format(coded=CODED[analysis.basis.coder])
        columns.append((dataclasses.replace(measure.column, meaning=meaning), of(name)))
    notes = (
        f"{PARETO} Pareto-optimal: no other configuration takes fewer bits at no more error. What loses more than the "
        "gradient's energy is never marked.",
        (
            "vNMSE, or relative variance: errors and energies summed over all elements. By layers: every layer counts "
            "the same. Steps count by the part of training that they stand for."
        ),
        *(measure.note for measure in known.values() if measure.note),
        (
            f"32 / bits: bits of float32 over bits, of {whose_gradient(analysis.provenance)}. W1 ignores "
            "which value is where: it ranks no codec, and the mean error beside it is its upper bound."
        ),
    )
    return Table.of("Configurations", analysis.configurations, columns, notes=notes, place="details")


_COMPUTED = {"expected": "computed", "mixed": "partly computed"}
#: numbers that are known in part, or in a way that a hint says
_CAREFUL: dict[str, Callable[[Configuration], Cell]] = {
    "bias": lambda c: value_cell(c.bias) if c.bias_known else value_cell(math.nan, hint="not known"),
    "bits": lambda c: value_cell(c.bits, hint=_COMPUTED.get(c.bits_source, "")),
}


def layer_table(analysis: SweepAnalysis, most: int | None = None) -> Table:
    """One line per tensor: relative variance with the configuration of each method nearest to three bits.

    Of more than ``most`` tensors, those with the largest part of the energy and those that prefer another method.
    """
    k = analysis.decisive
    order = [f.label for f in analysis.ranking(k)] if k >= 0 else []
    families = sorted(analysis.families, key=lambda f: order.index(f.label) if f.label in order else len(order))
    chosen = analysis.view(families)
    sure = {c.tensor for c in analysis.layer_choices if c.sure}

    def best(t: int) -> Cell:
        label = analysis.layer_best[t]
        return Cell(label, mark="best" if analysis.tensors[t] in sure else "") if label else NOTHING

    share = analysis.energy_share.tolist()
    columns: list[Shows[int]] = [
        words("tensor", lambda t: analysis.tensors[t], "parameter name"),
        column("elements", lambda t: f"{analysis.elements[t]:,}", rank=len(chosen) + 2),
        column("energy", lambda t: value_cell(share[t], ".1%"), "part of the total ||g||²", len(chosen) + 1),
    ]
    notes = [
        f"Per method the configuration with measured bits nearest to {PREFERRED_BITS:g}, summed over steps; its bits "
        "differ from tensor to tensor, so these columns rank no methods."
    ]
    if any(analysis.layer_best):
        target = f"{analysis.targets[k]:g}"
        meaning = (
            f"method with the least error at {target} measured bits of this tensor; bold where it differs from the "
            "leader beyond the noise of steps"
        )
        columns.append(words(f"best at {target}", best, meaning))
        notes.append(f"Best at {target}: least error at as many measured bits of the tensor itself.")
    columns += method_columns(analysis, chosen, lambda i, t: float(analysis.per_tensor[i, t]))
    shown = most_energy(analysis, most, sure)
    if left := len(analysis.tensors) - len(shown):
        notes.append(f"{left} tensors with less energy are left out; -o FILE has them all.")
    title = "Relative variance per tensor"
    return Table.of(title, shown, columns, notes=tuple(notes), folded=True, place="layers")


def method_columns(
    analysis: SweepAnalysis, chosen: Sequence[int], show: Callable[[int, int], Shown]
) -> list[Shows[int]]:
    """A column for each configuration, by its place, with what is shown of it for a tensor, by its place."""
    named = [(i, analysis.configurations[i]) for i in chosen]
    return [column(c.name, partial(show, i), c.spec, place) for place, (i, c) in enumerate(named)]


def most_energy(analysis: SweepAnalysis, most: int | None, first: Collection[str] = ()) -> list[int]:
    """Places of the tensors with the largest part of the energy, behind those to be shown ``first``; None for all."""
    every = range(len(analysis.tensors))
    share = np.nan_to_num(analysis.energy_share)
    order = sorted(every, key=lambda t: (analysis.tensors[t] in first, float(share[t])), reverse=True)
    return sorted(order[:most])


def group_table(groups: Sequence[TensorGroup]) -> Table:
    """Error, and bits, of each configuration in each group; the fewer of the two are the columns."""
    names = {c.spec: c.name for group in groups for c in group.analysis.configurations}
    specs = list(names)
    cells = {(group.name, spec): NOTHING for group in groups for spec in specs}
    about = {}
    for group in groups:
        tensors = count(len(group.tensors), "tensor")
        share = value_cell(group.energy_share, ".1%").text
        about[group.name] = f"{tensors}, {group.elements:,} elements, {share} of the energy"
        for c in group.analysis.configurations:
            if not math.isnan(c.error):
                cells[group.name, c.spec] = Cell(number(c.error), number(c.bits), "best" if c.pareto else "")
    if len(groups) <= _WIDE:
        heads = [("codec", "its spec"), *((group.name, about[group.name]) for group in groups)]
        rows = [[Cell(names[spec]), *(cells[group.name, spec] for group in groups)] for spec in specs]
    elif len(specs) <= _WIDE:
        heads = [("group", "tensors that are summed up"), *((names[spec], spec) for spec in specs)]
        rows = [[Cell(group.name), *(cells[group.name, spec] for spec in specs)] for group in groups]
    else:
        heads = [("group", "tensors that are summed up"), ("codec", "its spec"), ("error", "and bits")]
        rows = [[Cell(g.name), Cell(names[spec]), cells[g.name, spec]] for g in groups for spec in specs]
    columns = [Column(head, meaning, numeric=k > 0 and head != "codec") for k, (head, meaning) in enumerate(heads)]
    notes = [f"{group.name}: {about[group.name]}." for group in groups] if len(groups) <= _WIDE else []
    notes.append(
        "Error: squared errors over energies, both summed over the group; below it bits "
        "per value, weighted by elements. Marked: no other codec takes fewer bits at no more error."
    )
    said = dict.fromkeys(note for group in groups for note in group.analysis.notes)
    return Table("Error by group of tensors", tuple(columns), tuple(map(tuple, rows)), (*notes, *said), place="layers")


def side_by_side_table(pair: SideBySide) -> Table:
    """One line per configuration that two sweeps share."""
    reasons = dict.fromkeys(c.by_elements.why for c in pair.shared if c.by_elements.why)
    notes = [f"Ratio: relative variance of {pair.second} over that of {pair.first}, of {pair.whose}."]
    if reasons:
        notes.append(f"No interval: {'; '.join(reasons)}.")
    over, bits = "over what both have", "measured, over the whole sweep"
    ratio, steps = f"{pair.second} / {pair.first}", "of the ratio, over the steps that both have"
    columns: list[Shows[ConfigurationRatio]] = [
        words("configuration", lambda c: c.spec),
        column(pair.first, lambda c: number(c.first), f"relative variance in {pair.first}, {over}"),
        column(pair.second, lambda c: number(c.second), f"relative variance in {pair.second}, {over}"),
        *ratio_columns(ratio, steps, "configurations"),
        column(f"bits {pair.first}", lambda c: number(c.first_bits), bits, 2),
        column(f"bits {pair.second}", lambda c: number(c.second_bits), bits, 2),
        column("cells", lambda c: f"{c.cells:,}", "tensors at steps that both have", 3),
    ]
    empty = "No codec is in both sweeps."
    return Table.of("The same configurations in both", pair.shared, columns, notes=tuple(notes), empty=empty)
