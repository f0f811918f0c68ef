"""Tables of a sweep."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.analysis.equal_bits import OUTCOMES, PREFERRED_BITS
from gtrace.report.analysis.evidence import SIGNIFICANT
from gtrace.report.analysis.families import MEASURES
from gtrace.report.analysis.results import CODED, whose_gradient
from gtrace.report.analysis.safety import samples
from gtrace.report.names import MISSING, count, duration, listed, number, percent, sparkline
from gtrace.report.section import FEW_ROWS, NOTHING, PARETO, Cell, Column, LayerTables, Table, value_cell
from gtrace.report.sections.side_by_side import ratio_columns, span
from gtrace.report.sections.sweep_words import bits_in_words, energy_share, off_target, signed_percent
from gtrace.report.statistics import THIRDS
from gtrace.report.verdict import ERROR_LIMIT, Candidate, candidates_of, choose, lost, short_list

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from gtrace.report.analysis.equal_bits import AtBits
    from gtrace.report.analysis.evidence import PairedComparison, Phase
    from gtrace.report.analysis.families import BDRate, Configuration, Family
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.safety import Judgement, SafetyVerdict
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.tensors import TensorGroup
    from gtrace.report.section import Mark, Shown


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
    judged = dict(zip((c.spec for c in analysis.configurations), safety.judged, strict=False))
    chosen = choose(found, network=savings is not None).chosen

    def verdict(one: Candidate) -> Cell:
        known = judged.get(one.codec)
        if not math.isfinite(one.error):
            return Cell("exact" if one.method == "none" else "not measured", mark="quiet")
        if known is not None and safety.known:
            return Cell(known.verdict, mark=MARKS[known.verdict], hint=known.reason)
        limit = f"{ERROR_LIMIT:.0%}"
        return Cell(f"below {limit}", mark="best") if one.within else Cell(f"above {limit}")

    columns: list[tuple[Column, Callable[[Candidate], Shown]]] = [
        (
            Column("codec", numeric=False),
            lambda one: Cell(
                "float32" if one.method == "none" else one.codec if every else one.name,
                mark="best" if one is chosen else "",
            ),
        ),
        (Column("bits", "measured, per value", rank=1), lambda one: number(one.bits)),
        (Column("error", "share of gradient energy lost"), lambda one: lost(one.error)),
    ]
    if not safety.outlook.why:
        hint = f"of {samples(safety.outlook.batch)}: uncompressed one that trains as well, predicted"
        columns.append((Column("batch", hint, rank=2), lambda one: batch_cell(judged.get(one.codec))))
    if savings is not None and not every:
        columns.append((Column("step", f"on {savings.cluster.ranks} ranks"), lambda one: duration(one.seconds)))
    columns.append((Column("verdict", numeric=False), verdict))
    if every:
        columns.append((Column("step", "seconds of a step on this network"), lambda _: NOTHING))
        columns.append((Column("over bf16", "a step with bf16 gradients over this one"), lambda _: NOTHING))
        return Table.of("Every configuration", shown, columns, place="choose")
    left = len({one.method for one in found if math.isfinite(one.error)} - {one.method for one in shown})
    notes = (f"{count(left, 'more method')}; --full shows all.",) if left else ()
    return Table.of("The best configuration of each method", shown, columns, notes=notes, place="choose")


def batch_cell(found: Judgement | None, *, interval: bool = False) -> Cell:
    """The equivalent batch that is predicted."""
    prediction = None if found is None else found.prediction
    if prediction is None:
        return Cell(MISSING, mark="missing", hint="" if found is None else found.reason)
    between = f"{samples(prediction.least)}{MISSING}{samples(prediction.most)}" if interval else ""
    return Cell(samples(prediction.equivalent), between)


def layer_tables(analysis: SweepAnalysis) -> LayerTables | None:
    """One folded table per layer with what each method makes of it; None if nothing was measured."""
    chosen = analysis.view()[:MOST_METHODS]
    known = np.flatnonzero((analysis.per_tensor[chosen] > 0).any(axis=0))
    if not len(known):
        return None
    share = np.nan_to_num(analysis.energy_share)
    kept = set(known[np.argsort(-share[known], kind="stable")][:MOST_LAYERS].tolist())
    tables = []
    for k in sorted(kept):
        named = [f"{analysis.elements[k]:,} elements"]
        if math.isfinite(analysis.energy_share[k]):
            named.append(f"{analysis.energy_share[k]:.1%} of the energy")
        if analysis.layer_best[k]:
            rate = bits_in_words(analysis.targets[analysis.decisive])
            content = _ranked(analysis, k, rate)
            named.append(f"least error at {rate}: {analysis.layer_best[k]}")
        else:
            content = _listed(analysis, chosen, k)
        tables.append((content, ", ".join(named)))
    left_out = len(known) - len(kept)
    note = f"{left_out:,} layers with less energy are in the table below alone." if left_out else ""
    return LayerTables("Layer by layer", tuple(tables), note)


def _ranked(analysis: SweepAnalysis, k: int, rate: str) -> Table:
    """The methods on one layer at equal bits of this layer, least error first."""
    known = sorted((float(at[k]), label) for label, at in analysis.layer_at.items() if math.isfinite(at[k]))
    error = Column(f"error at {rate}", f"at {rate} per value of this tensor, summed over steps")
    least = Column("times least", "error over the least of these methods")
    return Table.of(
        analysis.tensors[k],
        known[:MOST_METHODS],
        [
            (Column("method", numeric=False), lambda found: found[1]),
            (error, lambda found: energy_share(found[0])),
            (least, lambda found: number(found[0] / known[0][0])),
        ],
    )


def _listed(analysis: SweepAnalysis, chosen: list[int], k: int) -> Table:
    """One configuration of each method on a layer where nothing can be compared at equal bits, in no order."""
    bits = Column("bits", "measured bits per value of this tensor")
    error = Column("relative variance", "||Q(g) - g||² / ||g||² of this tensor, summed over steps")
    return Table.of(
        analysis.tensors[k],
        chosen,
        [
            (Column("method", numeric=False), lambda i: analysis.configurations[i].name),
            (bits, lambda i: number(float(analysis.per_tensor_bits[i, k]))),
            (error, lambda i: number(float(analysis.per_tensor[i, k]))),
        ],
    )


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

    return Table.of(
        title,
        comparisons,
        [
            (
                Column("first / second", "error of the first over that of the second", numeric=False),
                lambda c: f"{c.first} / {c.second}",
            ),
            *ratio_columns(
                "of errors summed over all elements and steps",
                "from blocks of consecutive steps drawn again",
                "comparisons",
            ),
            (
                Column("steps better", "part of training in which the first has less error", rank=3),
                lambda c: percent(c.better),
            ),
            *(
                (Column(name, f"ratio in the {name} third of training", rank=4), partial(third, name))
                for name in THIRDS
            ),
            (
                Column("by layers", "mean ratio of the layers, all counted the same", rank=2),
                lambda c: Cell(number(math.exp(c.by_layers.estimate)), hint=span(c.by_layers)),
            ),
        ],
        notes=(*about, *notes, *why) if comparisons else (),
        empty="Nothing to compare.",
    )


def phase_table(analysis: SweepAnalysis) -> Table:
    """Error of each method in the thirds of training, at the decisive bits, and a line over the steps."""
    k = analysis.decisive
    bits = analysis.targets[k]
    place = {f.label: i for i, f in enumerate(analysis.families)}

    def over(phase: Phase) -> Callable[[Family], Cell]:
        errors = phase.at[:, k].tolist()
        cells = [Cell(energy_share(error)) if math.isfinite(error) else NOTHING for error in errors]
        return lambda family: cells[place[family.label]]

    notes = (
        "Thirds by step number. In each, methods are compared at equal bits of that third.",
        f"Over steps: single steps of the configuration with bits nearest to {bits:g}, from the least to the largest "
        "error.",
    )
    title = f"Error over training at {bits:g} measured bits per value"
    return Table.of(
        title,
        analysis.ranking(k),
        [
            (Column("method", numeric=False), lambda family: family.label),
            *(
                (Column(f"{p.name} {p.first:,}–{p.last:,}", f"{p.steps} captured steps"), over(p))
                for p in analysis.phases
            ),
            (
                Column("over steps", "each line on a scale of its own", numeric=False, rank=1),
                lambda family: sparkline(analysis.per_step[analysis.nearest(family, bits)].tolist()),
            ),
        ],
        place="training",
        notes=notes,
    )


def equal_bits_table(analysis: SweepAnalysis) -> Table:
    """The headline: error of each method at equal measured bits, best first."""
    columns = [Column("method", "codec, and the parameters in which its families differ", numeric=False)]
    decisive = analysis.decisive
    for k, t in enumerate(analysis.targets):
        rank = 0 if k == decisive else 1 + abs(k - decisive)
        columns.append(Column(bits_in_words(t), f"error at {t:g} measured bits per value", rank=rank))
    rates = {rate.family: rate for rate in analysis.bd_rates}
    reference = analysis.bd_rates[0].reference if rates else ""
    if rates:
        columns.append(Column(f"BD-rate / {reference}", f"bits for the same error as {reference}, on average", rank=1))
    best = [analysis.leaders(k) for k in range(len(analysis.targets))]

    def order(family: Family) -> tuple[bool, float, bool]:
        here = family.at[decisive].variance if decisive >= 0 else math.nan
        nowhere = all(math.isnan(at.variance) for at in family.at)
        return math.isnan(here), 0.0 if math.isnan(here) else here, nowhere

    places = {family.label: f for f, family in enumerate(analysis.families)}
    ordered = sorted((f for f in analysis.families if not analysis.lossless(f)), key=order)
    rows = []
    for family in ordered:
        cells = [Cell(family.label)]
        for k, at in enumerate(family.at):
            winner = len(analysis.ranking(k)) > 1 and family in best[k]
            single = float(analysis.step_at[places[family.label], k])
            cells.append(_at_cell(analysis, at, single if analysis.basis.window else math.nan, winner=winner))
        if rates:
            cells.append(_rate_cell(rates.get(family.label), reference=family.label == reference))
        rows.append(tuple(cells))
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
    return Table(
        f"Error at equal bits: {_compared(analysis)}",
        tuple(columns),
        tuple(rows),
        tuple(notes),
        "No configuration to compare.",
        headline=True,
    )


def _at_cell(analysis: SweepAnalysis, at: AtBits, single: float, *, winner: bool) -> Cell:
    """A method at a number of bits: its error, and what it is made of."""
    if math.isnan(at.variance):
        hint = OUTCOMES[at.outcome]
        if at.outcome == "wide":
            hint = f"not measured near {bits_in_words(at.target)}: {_neighbours(analysis, at)}"
        return Cell(MISSING, mark="missing", hint=hint)
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
    one, two = (f"{c.spec} ({energy_share(c.error)} at {number(c.bits)} bits)" for c in (low, high))
    hint = f"between {one} and {two}"
    if low is high:
        hint = f"{low.spec}: {energy_share(low.error)} at {number(low.bits)} bits"
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


def _rate_cell(rate: BDRate | None, *, reference: bool) -> Cell:
    if reference:
        return Cell("0%", mark="quiet")
    if rate is None or math.isnan(rate.change):
        return Cell(MISSING, mark="missing", hint=rate.why if rate else "")
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

    columns: list[tuple[Column, Callable[[Configuration], Shown]]] = [
        (
            Column("configuration", "codec and its parameters", numeric=False),
            lambda c: Cell(c.spec, "", "quiet", "measured on too few cells") if c.partial else c.spec,
        ),
        (
            Column("", "Pareto-optimal: nothing else has fewer bits and less error", numeric=False, rank=2),
            lambda c: Cell(PARETO, mark="best") if c.pareto else "",
        ),
    ]
    if analysis.basis.window is not None or analysis.basis.workers > 1:
        columns.append((Column("error", f"what methods are compared by: {_compared(analysis)}"), lambda c: c.error))
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
    return Table.of(
        "Configurations",
        analysis.configurations,
        columns,
        notes=notes,
        place="details",
    )


_COMPUTED = {"expected": "computed", "mixed": "partly computed"}
#: numbers that are known in part, or in a way that a hint tells
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

    columns: list[tuple[Column, Callable[[int], Shown]]] = [
        (Column("tensor", "parameter name", numeric=False), lambda t: analysis.tensors[t]),
        (Column("elements", rank=len(chosen) + 2), lambda t: f"{analysis.elements[t]:,}"),
        (
            Column("energy", "part of the total ||g||²", rank=len(chosen) + 1),
            lambda t: value_cell(float(analysis.energy_share[t]), ".1%"),
        ),
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
        columns.append((Column(f"best at {target}", meaning, numeric=False), best))
        notes.append(f"Best at {target}: least error at as many measured bits of the tensor itself.")
    columns += method_columns(analysis, chosen, lambda i, t: float(analysis.per_tensor[i, t]))
    shown = most_energy(analysis, most, sure)
    if len(shown) < len(analysis.tensors):
        notes.append(
            f"{len(analysis.tensors) - len(shown)} tensors with less energy are left out; -o FILE has them all."
        )
    return Table.of(
        "Relative variance per tensor",
        shown,
        columns,
        notes=tuple(notes),
        folded=True,
        place="layers",
    )


def method_columns(
    analysis: SweepAnalysis, chosen: Sequence[int], show: Callable[[int, int], Shown]
) -> list[tuple[Column, Callable[[int], Shown]]]:
    """A column for each configuration, by its place, with what is shown of it for a tensor, by its place."""
    named = [(i, analysis.configurations[i]) for i in chosen]
    return [(Column(c.name, c.spec, rank=place), partial(show, i)) for place, (i, c) in enumerate(named)]


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
        about[group.name] = f"{tensors}, {group.elements:,} elements, {group.energy_share:.1%} of the energy"
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
