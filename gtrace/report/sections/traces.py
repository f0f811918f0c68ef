"""A trace in tables: what it holds, the laws of its gradients and what follows from them."""

from __future__ import annotations

import dataclasses
import math
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.fitting.magnitudes import LAWS
from gtrace.fitting.sparsity import RULES
from gtrace.report import figures
from gtrace.report.names import MISSING, listed, number, pick
from gtrace.report.section import FEW_ROWS, NOTHING, Block, Cell, Column, FigureSpec, Mark, Numbers, Section, Table
from gtrace.settings import KINDS
from gtrace.sweep.laws import ASKED, FEW

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.report.analysis.traces import LawSection, TraceSummary
    from gtrace.sweep.laws import LayerLaws, PruningCell


def section_json(section: LawSection) -> dict[str, Any]:
    """Every number of a section as plain values and arrays."""

    def of_layer(layer: LayerLaws) -> dict[str, Any]:
        about = {"tensor": layer.info.name, "best": layer.best, "mean_ks": layer.mean_distances, "steps": layer.steps}
        numbers = {"nonzero": layer.counts, **pick(layer, "mu_log2", "sigma_log2")}
        return {**about, **numbers, "ks": [fit.ks for fit in layer.fits]}

    def of_cell(cell: PruningCell) -> dict[str, Any]:
        by_rule = {
            name: dict(zip(RULES, getattr(cell, name), strict=True))
            for name in ("expected", "realized", "standard_error")
        }
        return pick(cell, "tensor", "step", "zeros", "wanted") | by_rule

    return {
        "kind": section.kind,
        "verdict": section.sentences,
        "steps": list(section.steps),
        "recorded_steps": section.recorded,
        "mean_ks": section.verdict.distances,
        "nearest": section.verdict.nearest,
        "layers": [of_layer(layer) for layer in section.layers],
        "formats": {
            layer.info.name: {found.bits: found.format.name for found in layer.formats} for layer in section.formats
        },
        "asked_sparsity": list(ASKED),
        "pruning": [of_cell(cell) for cell in section.cells],
        "cosines": [dataclasses.asdict(cosines) for cosines in section.cosines],
    }


def trace_table(summary: TraceSummary) -> Table:
    """One line per tensor of a trace."""
    return Table.of(
        "Recorded tensors",
        summary.tensors,
        [
            (Column("tensor", numeric=False), lambda t: t.name),
            (Column("shape", numeric=False), lambda t: " × ".join(map(str, t.shape)) or "scalar"),
            (Column("elements"), lambda t: f"{t.elements:,}"),
            (Column("steps"), lambda t: f"{t.steps:,}"),
        ],
        empty="The trace holds no tensor.",
        folded=True,
    )


#: How early a narrow terminal drops a law.
_RANKS = {"lognormal": 0, "normal": 1, "loglaplace": 2, "half-normal": 3, "half-laplace": 3}
#: A layer that loses more than this is marked.
_MUCH_FLUSHED = 0.25


def law_table(section: LawSection) -> Table:
    """One line per layer: mean KS distance to each law, mu and sigma."""
    columns = (
        Column("layer", "tensor", numeric=False),
        Column("non-zero", "elements that are not zero, mean over steps", rank=5),
        Column("sigma log2", "standard deviation of log2 |g|: mean over the steps, smallest to largest"),
        Column("mu log2", "mean of log2 |g|: mean over the steps, smallest to largest", rank=2),
        *(
            Column(name, f"KS distance to the fitted {name} law, mean over steps", rank=_RANKS.get(name, 4))
            for name in LAWS
        ),
    )
    rows = []
    for layer in section.layers:
        means, best = layer.mean_distances, layer.best
        quiet: Mark = "" if layer.judged.any() else "quiet"
        cells = [Cell(layer.info.name, mark=quiet), Cell(f"{float(layer.counts.mean()):,.0f}", mark=quiet)]
        for every, digits in ((layer.sigma_log2, 2), (layer.mu_log2, 1)):
            values = every[layer.counts > 0]
            cells.append(Cell(MISSING))
            if len(values):
                span = f"{values.min():.{digits}f} to {values.max():.{digits}f}"
                cells[-1] = Cell(f"{values.mean():.{digits}f}", detail=span)
        for name in LAWS:
            found = Cell(f"{means[name]:.3f}", mark=quiet or ("best" if name == best else ""))
            cells.append(NOTHING if math.isnan(means[name]) else found)
        rows.append(tuple(cells))
    if section.verdict.cells:
        means = section.verdict.distances
        cells = [Cell("mean"), Cell(""), Cell(""), Cell("")]
        cells += [Cell(f"{means[name]:.3f}", mark="best" if name == section.verdict.best else "") for name in LAWS]
        rows.append(tuple(cells))
    notes = (
        "KS distance: largest gap between the distribution functions of |g| without zeros and of the law fitted to it.",
        "0 is perfect. There is no p-value, since the parameters are fitted.",
        f"Grey: fewer than {FEW} non-zero elements, too few to compare laws; not in the mean.",
    )
    return Table("Distance to each law, per layer", columns, tuple(rows), notes)


def format_table(section: LawSection) -> Table:
    """One line per layer: the best float format of each number of bits."""
    bits = [found.bits for found in section.formats[0].formats]
    columns = (
        Column("layer", "tensor", numeric=False),
        Column("sigma log2", "mean over steps", rank=1),
        *(Column(f"FP{b}", f"format 1-E-M of {b} bits with the least expected relative error") for b in bits),
        Column("scale drift", f"scale exponents over the steps at {bits[-1]} bits", rank=2),
    )
    rows = []
    flushed = False
    for layer in section.formats:
        cells = [Cell(layer.info.name), Cell(f"{layer.sigma_log2.mean():.2f}")]
        for found in layer.formats:
            worst = float(found.flushed.max())
            flushed |= worst > _MUCH_FLUSHED
            hint = (
                f"relative error {found.error:.1%}, up to {worst:.1%} flushed to zero, up to "
                f"{float(found.saturated.max()):.2%} saturated; second best {found.second} has "
                f"{number(found.margin)} times the error"
            )
            cells.append(Cell(str(found.format) + "*" * (worst > _MUCH_FLUSHED), hint=hint))
        k = layer.formats[-1].scale_exponents
        cells.append(Cell(f"{k.min()} to {k.max()}"))
        rows.append(tuple(cells))
    notes = [
        "1-E-M: sign, exponent and mantissa bits with the least expected relative error over the steps.",
        "Scale: the power of two that keeps the largest expected value below the format's largest (scale=max).",
        "Scale drift: the smallest and largest k of the 2^k that gradients are multiplied by, at the most bits.",
    ]
    if flushed:
        notes.append(f"*: at some step more than {_MUCH_FLUSHED:.0%} of the non-zero elements become zero.")
    notes.append("`gtrace plan formats TRACE --full` shows errors, drift, flush and margins; -o writes TOML.")
    return Table("Best float format per layer", columns, tuple(rows), tuple(notes))


def sparsity_table(section: LawSection) -> Table:
    """One line per threshold rule: how far the sparsity is from what was asked for."""
    draw = "one draw, mean over gradients, and its standard error"
    columns = (
        Column("threshold rule", numeric=False),
        Column("mean off", "mean |expected - required| over gradients and sparsities"),
        Column("worst off", "largest |expected - required|"),
        Column("worst layer", numeric=False, rank=1),
        *(Column(f"realized at {asked:g}", draw, rank=2) for asked in ASKED),
    )
    rows = []
    off = {rule: section.deviations(rule) for rule in RULES}
    best = min(RULES, key=lambda rule: float(off[rule].mean()))
    for place, rule in enumerate(RULES):
        worst = section.cells[int(off[rule].max(axis=1).argmax())]
        mean = Cell(f"{off[rule].mean():.4f}", mark="best" if rule == best else "")
        cells = [Cell(rule), mean, Cell(f"{off[rule].max():.4f}"), Cell(f"{worst.tensor} @ {worst.step}")]
        for k in range(len(ASKED)):
            value = float(np.mean([cell.realized[place, k] for cell in section.cells]))
            total = math.sqrt(sum(cell.standard_error[place, k] ** 2 for cell in section.cells))
            cells.append(Cell(f"{value:.4f}", detail=f"±{total / len(section.cells):.4f}"))
        rows.append(tuple(cells))
    zeros = np.mean([cell.zeros for cell in section.cells])
    steps = sorted({cell.step for cell in section.cells})
    notes = (
        f"Stochastic pruning of {len(section.cells)} gradients, at steps {listed(map(str, steps))}.",
        f"Required: the sparsity asked for, or the zeros that are there already ({zeros:.1%} on average) if more.",
        "Off: |expected sparsity - required|. Realized: one seeded draw, with the standard error of its mean.",
    )
    return Table("Required against achieved sparsity, per threshold rule", columns, tuple(rows), notes)


def cosine_table(section: LawSection) -> Table:
    """One line per step and allocation: size-weighted mean cosine at each sparsity."""
    columns = (
        Column("step", numeric=False),
        Column("allocation", numeric=False),
        *(Column(f"{asked:g}", f"mean cosine at mean sparsity {asked:g}") for asked in ASKED),
    )
    rows = []
    for found in section.cosines:
        for name, values in (("homogeneous", found.homogeneous), ("heterogeneous", found.heterogeneous)):
            better = values > found.homogeneous + 5e-4
            cells = [Cell(f"{v:.4f}", mark="best" if m else "") for v, m in zip(values, better, strict=True)]
            rows.append((Cell(f"{found.step:,}"), Cell(name), *cells))
    notes = (
        "Cosine of pruned and whole gradient, mean over layers weighted by size, exact thresholds.",
        "Homogeneous: every layer at the same sparsity. Heterogeneous: shared out for the largest mean cosine.",
    )
    return Table("Cosine after pruning, per allocation", columns, tuple(rows), notes)


def trace_section(trace: TraceSummary) -> Section:
    """A trace, with a part for each kind of gradient."""
    largest = sorted(trace.tensors, key=lambda tensor: -tensor.elements)[:FEW_ROWS]
    return Section(
        kind="Trace",
        name=trace.name,
        sentences=(trace.sentence,),
        blocks=(trace_table(trace),),
        place="details",
        brief=trace_table(dataclasses.replace(trace, tensors=tuple(largest))),
        following=f"gtrace sweep {shlex.quote(trace.path or trace.name)}",
        parts=tuple(law_section(laws) for laws in trace.laws),
        numbers=partial(_numbers, trace),
    )


def _numbers(trace: TraceSummary) -> Numbers:
    tensors = [dataclasses.asdict(tensor) for tensor in trace.tensors]
    found = {"name": trace.name, "tensors": tensors, "laws": [section_json(laws) for laws in trace.laws]}
    return Numbers({"traces": found}, [{"record": "tensor", "results": trace.name, **tensor} for tensor in tensors])


def law_section(laws: LawSection) -> Section:
    """One kind of gradient in a trace; each table is before the figures that show the same."""
    title = f"Which law do the {KINDS[laws.kind]} follow?"
    return Section("", title, tuple(laws.sentences), tuple(_law_blocks(laws)), "details", together=True)


def _law_blocks(section: LawSection) -> Iterator[Block]:
    if section.layers:
        yield law_table(section)
    picture = section.picture
    if picture is not None:
        yield FigureSpec(
            f"{section.kind}-distribution",
            f"One gradient as an example: {picture.tensor} at step {picture.step:,}",
            "The largest tensor at the last step looked at, its zeros left out. Grey: the data. On the Q-Q plots, "
            "points on the dashed line follow the law.",
            lambda: figures.laws.distribution(picture),
        )
    if section.verdict.cells:
        yield FigureSpec(
            f"{section.kind}-distances-over-steps",
            "Distance to each law over training",
            "Lower is a better fit; the thick curve is the law that fits best on average.",
            lambda: figures.laws.distances_over_steps(section),
        )
        yield FigureSpec(
            f"{section.kind}-mu-and-sigma",
            "Fitted mu and sigma over training",
            "One octave is a factor of two. sigma says how many exponent bits a float format needs, mu how its "
            "scale has to follow.",
            lambda: figures.laws.spread_over_steps(section),
        )
    if section.formats:
        yield format_table(section)
    if section.formats and section.verdict.cells:
        yield FigureSpec(
            f"{section.kind}-format-errors",
            "Expected error of each float format",
            "Lower is better. Thick and named: where a format is best under scale=max, the largest of 10,000 "
            "lognormal values just fitting. Dotted: the best that any format reaches when the scale is set for the "
            "least error instead, which clips the largest values. Ticks below: this trace's layers and steps.",
            lambda: figures.laws.format_errors(section),
        )
    if section.cells:
        yield sparsity_table(section)
        yield FigureSpec(
            f"{section.kind}-sparsity",
            "Sparsity: required, achieved, and what it costs",
            "Left: a rule on the dashed line prunes as much as it was told to; gradients that are half zero "
            "already are left out. Right: higher is better.",
            lambda: figures.laws.sparsity(section),
        )
    if section.cosines:
        yield cosine_table(section)
