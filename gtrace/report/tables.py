"""Tables as plain data, the same for a terminal, a page and Markdown."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.report.comparison import OUTCOMES
from gtrace.report.names import MISSING, count, listed, number
from gtrace.report.notes import whose_gradient
from gtrace.report.ranking import decisive_target, leaders, lossless, ranking
from gtrace.report.verdict import bits_in_words, energy_share, off_target, signed_percent
from gtrace.report.workers import CODED

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.report.analysis import Configuration, Family, SweepAnalysis
    from gtrace.report.bd_rate import BDRate
    from gtrace.report.comparison import AtBits
    from gtrace.report.traces import TraceSummary

Mark = Literal["", "best", "quiet", "missing"]

#: Stands in the column of Pareto-optimal configurations.
PARETO = "★"

#: Bits at which per-layer and per-step views pick one configuration of each method.
VIEW_BITS = 3.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        text: what it says.
        detail: a smaller second line.
        mark: ``best`` of its column, ``quiet`` beside the others, or ``missing``.
        hint: the reason for what stands here, for a tooltip.
    """

    text: str
    detail: str = ""
    mark: Mark = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, what it means, and how early a narrow terminal drops it (0: never).

    ``prose`` says that a first column holds sentences and no names, which a page sets in another type.
    """

    heading: str
    meaning: str = ""
    numeric: bool = True
    rank: int = 0
    prose: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of cells; ``notes`` are the lines that stand below it, ``empty`` the word for no rows."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    empty: str = "Nothing to show."


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
        cells = [Cell(name), Cell(f"{analysis.elements[t]:,}"), _percent(float(analysis.energy_share[t]))]
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
    return Table("Relative variance per tensor", tuple(columns), tuple(rows), tuple(notes), "No tensor was measured.")


def trace_table(summary: TraceSummary) -> Table:
    """One line per tensor of a trace."""
    columns = (
        Column("tensor", numeric=False),
        Column("shape", numeric=False),
        Column("elements"),
        Column("steps"),
    )
    rows = tuple(
        (
            Cell(t.name),
            Cell(" × ".join(map(str, t.shape)) or "scalar"),
            Cell(f"{t.elements:,}"),
            Cell(f"{t.steps:,}"),
        )
        for t in summary.tensors
    )
    return Table("Recorded tensors", columns, rows, (), "The trace holds no tensor.")


def configuration_name(configuration: Configuration) -> str:
    """Family and setting, short enough for a heading: ``qsgdinf b3``."""
    return f"{configuration.family} {configuration.setting}".strip()


def value_cell(value: float, hint: str = "") -> Cell:
    """A number, or a dash."""
    return Cell(number(value), mark="missing" if math.isnan(value) else "", hint=hint)


def _percent(share: float) -> Cell:
    return Cell(MISSING, mark="missing") if math.isnan(share) else Cell(f"{share:.1%}")


def cosine_cell(value: float) -> Cell:
    """A cosine with its four digits: those near 1 differ in the last ones."""
    return Cell(MISSING, mark="missing") if math.isnan(value) else Cell(f"{value:.4f}")
