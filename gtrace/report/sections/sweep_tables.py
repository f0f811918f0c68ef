"""Tables of a sweep."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report.analysis.equal_bits import OUTCOMES
from gtrace.report.analysis.evidence import SIGNIFICANT
from gtrace.report.analysis.notes import whose_gradient
from gtrace.report.analysis.results import decisive_target, leaders, lossless, ranking
from gtrace.report.analysis.workers import CODED
from gtrace.report.names import MISSING, count, listed, number, percent, sparkline
from gtrace.report.sections.section import LayerTables
from gtrace.report.sections.sweep_words import bits_in_words, energy_share, off_target, signed_percent
from gtrace.report.statistics import THIRDS
from gtrace.report.tables import (
    PARETO,
    VIEW_BITS,
    Cell,
    Column,
    Mark,
    Table,
    configuration_name,
    percent_cell,
    value_cell,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.report.analysis.bd_rate import BDRate
    from gtrace.report.analysis.equal_bits import AtBits
    from gtrace.report.analysis.evidence import PairedComparison
    from gtrace.report.analysis.families import Configuration, Family
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.statistics import Interval


#: Layers that have a section of their own, the ones with the most energy, and methods in each.
MOST_LAYERS, MOST_METHODS = 250, 16
_BITS = Column("bits", "measured bits per value of this tensor")
_VARIANCE = Column("relative variance", "||Q(g) - g||² / ||g||² of this tensor, summed over steps")


def layer_tables(analysis: SweepAnalysis) -> LayerTables | None:
    """One folded table per layer with what each method makes of it; None if nothing was measured."""
    chosen = [i for i in (analysis.nearest(f, VIEW_BITS) for f in analysis.families) if i >= 0][:MOST_METHODS]
    values = analysis.per_tensor[chosen]
    known = np.flatnonzero((values > 0).any(axis=0))
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
            content, rate = _ranked(analysis, k), bits_in_words(analysis.targets[decisive_target(analysis)])
            named.append(f"least error at {rate}: {analysis.layer_best[k]}")
        else:
            content = _listed(analysis, chosen, k)
        tables.append((content, ", ".join(named)))
    left_out = len(known) - len(kept)
    note = f"{left_out:,} layers with less energy are in the table below alone." if left_out else ""
    return LayerTables("Layer by layer", tuple(tables), note)


def _ranked(analysis: SweepAnalysis, k: int) -> Table:
    """The methods on one layer at equal bits of this layer, least error first."""
    known = sorted((float(at[k]), label) for label, at in analysis.layer_at.items() if math.isfinite(at[k]))
    rate = bits_in_words(analysis.targets[decisive_target(analysis)])
    columns = (
        Column("method", numeric=False),
        Column(f"error at {rate}", f"at {rate} per value of this tensor, summed over steps"),
        Column("times least", "error over the least of these methods"),
    )
    rows = tuple((Cell(name), Cell(energy_share(v)), Cell(number(v / known[0][0]))) for v, name in known[:MOST_METHODS])
    return Table(analysis.tensors[k], columns, rows)


def _listed(analysis: SweepAnalysis, chosen: list[int], k: int) -> Table:
    """One configuration of each method on a layer where nothing can be compared at equal bits, in no order."""
    rows = tuple(
        (
            Cell(configuration_name(analysis.configurations[i])),
            Cell(number(float(analysis.per_tensor_bits[i, k]))),
            Cell(number(float(analysis.per_tensor[i, k]))),
        )
        for i in chosen
    )
    return Table(analysis.tensors[k], (Column("method", numeric=False), _BITS, _VARIANCE), rows)


_MISSING = Cell(MISSING, mark="missing")


def comparison_table(analysis: SweepAnalysis) -> Table:
    """The leader against every other method at the decisive bits, paired over steps."""
    k = decisive_target(analysis)
    bits = analysis.targets[k] if k >= 0 else math.nan
    here = [c for c in analysis.comparisons if c.bits == bits]
    rows = sum(len(ranking(analysis, j)) > 1 for j in range(len(analysis.targets)))
    title = f"Error of the leader over that of the others at {bits:g} bits, paired over steps"
    note = (
        f"p is Holm's, corrected for the {len(analysis.comparisons)} comparisons at all {rows} numbers of bits; "
        f"marked where it is below {SIGNIFICANT:g}."
    )
    return pairs_table(title, here, (note,) if here else ())


def pairs_table(title: str, comparisons: Sequence[PairedComparison], notes: tuple[str, ...] = ()) -> Table:
    """One line per pair: ratio of errors, with its interval."""
    columns = (
        Column("first / second", "error of the first over that of the second", numeric=False),
        Column("ratio", "of errors summed over all elements and steps"),
        Column("95% interval", "from blocks of consecutive steps drawn again"),
        Column("p", "that there is no difference, corrected for the number of comparisons (Holm)", rank=1),
        Column("steps better", "part of training in which the first has less error", rank=3),
        *(Column(name, f"ratio in the {name} third of training", rank=4) for name in THIRDS),
        Column("by layers", "mean ratio of the layers, each layer alike", rank=2),
    )
    rows = []
    for c in comparisons:
        mark: Mark = "best" if c.differs else ""
        rows.append(
            (
                Cell(f"{c.first} / {c.second}"),
                Cell(number(c.ratio), mark=mark),
                interval_cell(c.by_elements),
                Cell(MISSING, mark="missing") if math.isnan(c.p_holm) else Cell(p_text(c.p_holm), mark=mark),
                Cell(percent(c.better)),
                *(Cell(number(c.thirds.get(name, math.nan))) for name in THIRDS),
                Cell(number(math.exp(c.by_layers.estimate)), hint=_span(c.by_layers)),
            )
        )
    reasons = dict.fromkeys(c.by_elements.why for c in comparisons if c.by_elements.why)
    why = (f"No interval: {'; '.join(reasons)}. Such lines describe these steps and prove nothing.",) if reasons else ()
    about = (
        (
            "Ratio: error of the first over that of the second, on the same gradients; below 1 the first is better. "
            "Steps count by the part of training that they stand for."
        ),
        "By layers: each layer alike, at the same configurations; small layers count as much as large ones.",
    )
    return Table(title, columns, tuple(rows), (*about, *notes, *why) if rows else (), "Nothing to compare.")


def interval_cell(interval: Interval) -> Cell:
    """Both ends of an interval of logarithms as ratios, or a dash with the reason."""
    return Cell(_span(interval)) if interval.known else Cell(MISSING, mark="missing", hint=interval.why)


def _span(interval: Interval) -> str:
    _, low, high = interval.exp()
    return f"{number(low)} to {number(high)}" if interval.known else interval.why


def p_text(value: float) -> str:
    """A p-value with three digits."""
    return "<0.001" if value < 0.001 else f"{value:.3f}"


def phase_table(analysis: SweepAnalysis) -> Table:
    """Error of each method in the thirds of training, at the decisive bits, and a line over the steps."""
    k = decisive_target(analysis)
    bits = analysis.targets[k] if k >= 0 else math.nan
    columns = (
        Column("method", numeric=False),
        *(Column(f"{p.name} {p.first:,}–{p.last:,}", f"{p.steps} captured steps") for p in analysis.phases),
        Column("over steps", "each line on a scale of its own", numeric=False, rank=1),
    )
    place = {f.label: i for i, f in enumerate(analysis.families)}
    rows = []
    for family in ranking(analysis, k) if k >= 0 and analysis.phases else []:
        i = place[family.label]
        values = [float(phase.at[i, k]) for phase in analysis.phases]
        line = analysis.per_step[analysis.nearest(family, bits)].tolist()
        cells = [Cell(energy_share(v)) if math.isfinite(v) else _MISSING for v in values]
        rows.append((Cell(family.label), *cells, Cell(sparkline(line))))
    notes = (
        "Thirds by step number. In each, methods are compared at equal bits of that third.",
        f"Over steps: single steps of the configuration with bits nearest to {bits:g}, from the least to the largest "
        "error.",
    )
    title = f"Error over training at {bits:g} measured bits per value"
    return Table(title, columns, tuple(rows), notes if rows else (), "Too few steps to tell parts of training apart.")


@dataclass(frozen=True, slots=True)
class _Extra:
    """A column of the table of configurations that is there when any configuration has it."""

    column: Column
    value: Callable[[Configuration], float]
    note: str = ""


_EXTRAS = (
    _Extra(
        Column("optimal", "relative variance of the best levels of the same number under the same scale", rank=2),
        lambda c: c.optimal_variance,
        "optimal: relative variance of the best levels of the same number, fitted to each gradient itself, with "
        "the same scale.",
    ),
    _Extra(Column("times optimal", "relative variance over the optimal one", rank=1), lambda c: c.times_optimal),
    _Extra(
        Column("model says", "relative variance that the model of the data promised", rank=1),
        lambda c: c.model_variance,
        "model says: relative variance that the fitted model of the data promised; relative variance is what the "
        "data gave.",
    ),
)


def equal_bits_table(analysis: SweepAnalysis) -> Table:
    """The headline: error of each method at equal measured bits, best first."""
    columns = [Column("method", "codec, and what tells its families apart", numeric=False)]
    decisive = decisive_target(analysis)
    columns += [
        Column(
            bits_in_words(t),
            f"error at {t:g} measured bits per value",
            rank=0 if k == decisive else 1 + abs(k - decisive),
        )
        for k, t in enumerate(analysis.targets)
    ]
    rates = {rate.family: rate for rate in analysis.bd_rates}
    reference = analysis.bd_rates[0].reference if rates else ""
    if rates:
        columns.append(Column(f"BD-rate / {reference}", f"bits for the same error as {reference}, on average", rank=1))
    best = [leaders(analysis, k) for k in range(len(analysis.targets))]

    def order(family: Family) -> tuple[bool, float, bool]:
        here = family.at[decisive].variance if decisive >= 0 else math.nan
        nowhere = all(math.isnan(at.variance) for at in family.at)
        return math.isnan(here), 0.0 if math.isnan(here) else here, nowhere

    places = {family.label: f for f, family in enumerate(analysis.families)}
    ordered = sorted((f for f in analysis.families if not lossless(analysis, f)), key=order)
    rows = []
    for family in ordered:
        cells = [Cell(family.label)]
        for k, at in enumerate(family.at):
            winner = len(ranking(analysis, k)) > 1 and family in best[k]
            single = float(analysis.step_at[places[family.label], k])
            cells.append(_at_cell(analysis, at, single if analysis.basis.window else math.nan, winner=winner))
        if rates:
            cells.append(_rate_cell(rates.get(family.label), reference=family.label == reference))
        rows.append(tuple(cells))
    notes = [
        *_what_error_is(analysis),
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
    detail = _bracket(low, high)
    if at.elsewhere:
        detail += f" at {number(at.bits)} bits"
    if at.bias >= 0.01 * at.variance > 0 and low.bias_known:
        detail += f", {at.bias / at.variance:.0%} bias"
    if math.isfinite(single):
        detail += f", one step {energy_share(single)}"
    return Cell(energy_share(at.variance), detail, "best" if winner else "", _bracket_hint(low, high))


def _neighbours(analysis: SweepAnalysis, at: AtBits) -> str:
    low, high = analysis.configurations[at.lower], analysis.configurations[at.upper]
    return f"neighbours at {number(low.bits)} and {number(high.bits)} bits"


def _compared(analysis: SweepAnalysis) -> str:
    """What methods are compared by, as in the title of a table."""
    basis = analysis.basis
    parts = [count(basis.workers, "worker"), CODED[basis.coder]]
    return ", ".join(([f"over {basis.steps_in_words}"] if basis.window else []) + parts)


def _what_error_is(analysis: SweepAnalysis) -> list[str]:
    basis, whose = analysis.basis, whose_gradient(analysis.provenance)
    notes = [
        f"Error: ||Q(g) - g||² / ||g||² of {whose}, the share of gradient energy lost; above 100% it is more than the "
        "gradient."
    ]
    if basis.window:
        notes.append(
            f"Q(g) - g and g are summed over {basis.steps_in_words} first, because codecs with memory send later what "
            "they leave out now."
        )
    if basis.workers > 1:
        notes.append(
            f"Averaging over {basis.workers:,} workers divides the variance of an error by {basis.workers:,}; its bias "
            "stays."
        )
    else:
        notes.append("For one worker. --ranks N compares for N workers, which shrink variance and leave bias.")
    return notes


def _rate_cell(rate: BDRate | None, *, reference: bool) -> Cell:
    if reference:
        return Cell("0%", mark="quiet")
    if rate is None or math.isnan(rate.change):
        return Cell(MISSING, mark="missing", hint=rate.why if rate else "")
    return Cell(signed_percent(rate.change), f"{number(rate.low, 2)}{MISSING}{number(rate.high, 2)}")


def _bracket(low: Configuration, high: Configuration) -> str:
    one, two = low.setting or "alone", high.setting or "alone"
    return one if low is high else f"{one}{MISSING}{two}"


def _bracket_hint(low: Configuration, high: Configuration) -> str:
    if low is high:
        return f"{low.spec}: {energy_share(low.error)} at {number(low.bits)} bits"
    return (
        f"between {low.spec} ({energy_share(low.error)} at {number(low.bits)} bits) "
        f"and {high.spec} ({energy_share(high.error)} at {number(high.bits)} bits)"
    )


def configuration_table(analysis: SweepAnalysis) -> Table:
    """One line per configuration."""
    fitted = [extra for extra in _EXTRAS if any(math.isfinite(extra.value(c)) for c in analysis.configurations)]
    alone = analysis.basis.window is None and analysis.basis.workers == 1
    updates = any(math.isfinite(c.update_error) for c in analysis.configurations)
    columns = (
        Column("configuration", "codec and its parameters", numeric=False),
        Column("", "Pareto-optimal: nothing else has fewer bits and less error", numeric=False, rank=2),
        *([] if alone else [Column("error", f"what methods are compared by: {_compared(analysis)}")]),
        Column("relative variance", "||Q(g) - g||² / ||g||² of one worker, summed over tensors and steps"),
        Column("of it bias", "the part of relative variance that more workers do not shrink", rank=3),
        *(extra.column for extra in fitted),
        Column("by layers", "geometric mean of the layers' relative variances, each layer alike", rank=4),
        Column("bits", f"per value, {CODED[analysis.basis.coder]}, with norms and shared bytes"),
        Column("bits measured", "per value, of its own payloads, with norms and shared bytes", rank=3),
        Column("bits fixed", "per value, with symbols of fixed width", rank=5),
        Column("bits entropy", "per value, at the entropy of the symbols", rank=4),
        Column("bits Huffman", "per value, with a Huffman code", rank=5),
        Column("32 / bits", "compression: float32 bits over bits", rank=1),
        Column("cosine", "of decoded and original gradient, mean weighted by elements", rank=3),
        Column("|error| / |g|", "mean |Q(g) - g| over mean |g|, which W1 / |g| never exceeds", rank=6),
        Column("W1 / |g|", "Wasserstein-1 distance of the values over mean |g|; blind to permutations", rank=7),
        *([Column("update error", "of Adam's update, with v of the exact gradient", rank=8)] if updates else []),
    )
    rows = tuple(
        (
            Cell(
                c.spec,
                mark="quiet" if c.partial else "",
                hint="measured on too few cells" if c.partial else "",
            ),
            Cell(PARETO if c.pareto else "", mark="best" if c.pareto else ""),
            *([] if alone else [value_cell(c.error)]),
            value_cell(c.relative_variance),
            value_cell(c.bias if c.bias_known else math.nan, hint="" if c.bias_known else "not known"),
            *(value_cell(extra.value(c)) for extra in fitted),
            value_cell(c.layers_variance),
            value_cell(c.bits, hint={"expected": "computed", "mixed": "partly computed"}.get(c.bits_source, "")),
            value_cell(c.bits_measured),
            value_cell(c.bits_fixed),
            value_cell(c.bits_entropy),
            value_cell(c.bits_huffman),
            value_cell(c.ratio_float32),
            Cell(MISSING, mark="missing") if math.isnan(c.cosine) else Cell(f"{c.cosine:.4f}"),
            value_cell(c.mean_abs_error),
            value_cell(c.w1_normalized),
            *([value_cell(c.update_error)] if updates else []),
        )
        for c in analysis.configurations
    )
    notes = (
        f"{PARETO} Pareto-optimal: no other configuration takes fewer bits at no more error. What loses more than the "
        "gradient's energy is never marked.",
        (
            "Relative variance: errors and energies summed over all elements. By layers: each layer alike. Steps "
            "count by the part of training that they stand for."
        ),
        *(extra.note for extra in fitted if extra.note),
        (
            f"32 / bits: bits of float32 over bits, of {whose_gradient(analysis.provenance)}. W1 ignores "
            "which value is where: it ranks no codec, and the mean error beside it is its upper bound."
        ),
    )
    return Table("Configurations", columns, rows, notes, "No configuration was measured.")


def layer_table(analysis: SweepAnalysis, most: int | None = None) -> Table:
    """One line per tensor: relative variance with the configuration of each method nearest to three bits.

    Args:
        analysis: of a sweep.
        most: of more tensors, those with the largest part of the energy and those that prefer another method.
    """
    k = decisive_target(analysis)
    order = [f.label for f in ranking(analysis, k)] if k >= 0 else []
    families = sorted(analysis.families, key=lambda f: order.index(f.label) if f.label in order else len(order))
    chosen = [i for i in (analysis.nearest(f, VIEW_BITS) for f in families) if i >= 0]
    columns = [
        Column("tensor", "parameter name", numeric=False),
        Column("elements", rank=len(chosen) + 2),
        Column("energy", "part of the total ||g||²", rank=len(chosen) + 1),
    ]
    if any(analysis.layer_best):
        columns.append(
            Column(
                f"best at {analysis.targets[k]:g}",
                f"method with the least error at {analysis.targets[k]:g} measured bits of this tensor; bold where it "
                "differs from the leader beyond the noise of steps",
                numeric=False,
            )
        )
    columns += [
        Column(configuration_name(analysis.configurations[i]), analysis.configurations[i].spec, rank=place)
        for place, i in enumerate(chosen)
    ]
    sure = {c.tensor for c in analysis.layer_choices if c.sure}
    shown = list(range(len(analysis.tensors)))
    if most is not None and len(shown) > most:
        share = np.nan_to_num(analysis.energy_share)
        weight = [(analysis.tensors[t] in sure, float(share[t])) for t in shown]
        shown = sorted(sorted(shown, key=lambda t: weight[t], reverse=True)[:most])
    rows = []
    for t in shown:
        name = analysis.tensors[t]
        cells = [Cell(name), Cell(f"{analysis.elements[t]:,}"), percent_cell(float(analysis.energy_share[t]))]
        if any(analysis.layer_best):
            best = analysis.layer_best[t]
            cells.append(Cell(best or MISSING, mark="best" if name in sure else "" if best else "missing"))
        rows.append((*cells, *(value_cell(float(analysis.per_tensor[i, t])) for i in chosen)))
    notes = [
        (
            f"Per method the configuration with measured bits nearest to {VIEW_BITS:g}, summed over steps; its bits "
            "differ from tensor to tensor, so these columns rank no methods."
        )
    ]
    if any(analysis.layer_best):
        notes.append(f"Best at {analysis.targets[k]:g}: least error at as many measured bits of the tensor itself.")
    if len(rows) < len(analysis.tensors):
        notes.append(
            f"{len(analysis.tensors) - len(rows)} tensors with less energy are left out; -o FILE has them all."
        )
    return Table(
        "Relative variance per tensor",
        tuple(columns),
        tuple(rows),
        tuple(notes),
        "No tensor was measured.",
        folded=True,
    )
