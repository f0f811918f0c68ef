"""A sweep as a section: which words, tables and figures it has, and in which order."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report import figures
from gtrace.report.analysis.fits import MOST_TENSORS, common_count, tensors_with_convergence, tensors_with_levels
from gtrace.report.analysis.results import MOST_NAMED, drawn_families, fitted_at
from gtrace.report.names import count
from gtrace.report.sections.groups import group_table, groups_in_words
from gtrace.report.sections.safety import noise_table, safety_sentences, safety_table
from gtrace.report.sections.section import FigureSpec, Section
from gtrace.report.sections.sweep_numbers import sweep_numbers
from gtrace.report.sections.sweep_tables import (
    comparison_table,
    configuration_table,
    equal_bits_table,
    layer_table,
    layer_tables,
    pairs_table,
    phase_table,
)
from gtrace.report.sections.sweep_words import compared_in_words, sweep_verdict
from gtrace.report.tables import VIEW_BITS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gtrace.report.analysis.evidence import PairedComparison
    from gtrace.report.analysis.groups import TensorGroup
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.inputs import Report
    from gtrace.report.sections.section import Block


def sections(report: Report, most_layers: int | None = None) -> Iterator[Section]:
    """One section for each sweep."""
    for place, analysis in enumerate(report.sweeps):
        pairs = report.pairs[place] if report.pairs else None
        groups = report.groups[place] if report.groups else None
        first, *others = sweep_verdict(analysis)
        others += safety_sentences(analysis)
        prefix = f"{analysis.name}: " if len(report.sweeps) > 1 else ""
        named = [f"{pair.first} has {compared_in_words(pair)}." for pair in pairs or ()]
        made = {key: value for key, value in analysis.provenance.items() if key != "tensors"}
        yield Section(
            kind="Sweep",
            name=analysis.name,
            sentences=(*named, first, *groups_in_words(groups or ()), *others),
            blocks=(
                *_answers(analysis, pairs or (), groups or (), report.savings_of(analysis)),
                *_details(analysis, most_layers),
            ),
            notes=analysis.notes,
            warnings=analysis.warnings,
            summary=(prefix + first, *([" ".join(others)] if others else [])),
            facts=_facts(analysis),
            provenance={"results": analysis.name, "rows": analysis.rows, **made},
            numbers=partial(sweep_numbers, analysis, pairs, groups),
        )


def _facts(analysis: SweepAnalysis) -> str:
    methods = count(len({c.method for c in analysis.configurations}), "method")
    return (
        f"{methods} in {count(len(analysis.configurations), 'configuration')}, "
        f"{count(len(analysis.tensors), 'tensor')} with {count(int(analysis.elements.sum()), 'element')}, "
        f"{count(len(analysis.steps), 'step')}; {count(analysis.cells, 'tensor-step')} compared"
    )


def _answers(
    analysis: SweepAnalysis,
    pairs: tuple[PairedComparison, ...],
    groups: tuple[TensorGroup, ...],
    savings: Savings | None,
) -> Iterator[Block]:
    """Which method is best, how sure that is, and whether it is safe."""
    if pairs:
        title = "Error of the first configuration over that of the second, paired over steps"
        note = f"Each at its own bits. p is Holm's, corrected for the {count(len(pairs), 'pair')} named."
        yield pairs_table(title, pairs, (note,))
    if analysis.measured:
        yield equal_bits_table(analysis)
    if analysis.safety.known:
        yield safety_table(analysis, savings)
    if groups:
        yield group_table(groups)
    if analysis.comparisons:
        yield comparison_table(analysis)
        if analysis.phases:
            yield phase_table(analysis)


def _details(analysis: SweepAnalysis, most_layers: int | None) -> Iterator[Block]:
    """Every configuration, and every layer."""
    if not analysis.configurations:
        return
    drawn = sweep_figures(analysis)
    yield from (figure for figure in drawn if figure.name == "rate-distortion")
    yield configuration_table(analysis)
    yield from (figure for figure in drawn if figure.name != "rate-distortion")
    if analysis.safety.known:
        yield noise_table(analysis, most_layers)
    layers = layer_tables(analysis)
    if layers is not None:
        yield layers
    if analysis.measured and len(analysis.tensors) > 1:
        yield layer_table(analysis, most_layers)


def sweep_figures(analysis: SweepAnalysis) -> list[FigureSpec]:
    """The figures of a sweep that have something to show."""
    found = []
    if drawn_families(analysis):
        found.append(
            FigureSpec(
                "rate-distortion",
                "Error against measured bits",
                "Lower and further left is better. Each point is one configuration, summed over tensors and "
                "steps; its bar spans the middle 80 % of the steps, each by itself. Circled points are "
                "Pareto-optimal. What has no error at all, or no known bits, cannot be drawn."
                + _noise_in_words(analysis),
                lambda: figures.sweep.rate_distortion(analysis),
            )
        )
    if (analysis.per_step > 0).any():
        found.append(
            FigureSpec(
                "variance-over-steps",
                "Error over training",
                f"For each method the configuration with measured bits nearest to {VIEW_BITS:g}, which stand "
                "beside its name. Methods at different bits are not to be ranked here." + _noise_in_words(analysis),
                lambda: figures.sweep.variance_over_steps(analysis),
            )
        )
    if np.isfinite(analysis.safety.ratio_per_step).any():
        found.append(
            FigureSpec(
                "equivalent-batch",
                "Equivalent batch size over training",
                "A prediction: the batch in full precision whose gradients are as noisy as the compressed ones, "
                "B / (1 + noise ratio), over a twentieth of the steps around each. The configurations of the figure "
                "before; codecs with a bias are left out.",
                lambda: figures.sweep.equivalent_batch_over_steps(analysis),
            )
        )
    if (analysis.per_tensor > 0).any():
        found.append(
            FigureSpec(
                "layers",
                "Error per layer",
                "Every tensor with every configuration, summed over steps. Darker is worse; grey has no value."
                + (" Rows are named by block, or every few." if len(analysis.tensors) > MOST_NAMED else ""),
                lambda: figures.heatmap.layer_heatmap(analysis),
            )
        )
    if len(analysis.steps) > 1 and (analysis.bits_per_step > 0).any():
        marked = "Ticks on the axis: levels and codes were fitted to that step." if fitted_at(analysis) else ""
        found.append(
            FigureSpec(
                "bits-over-steps",
                "Bits over training",
                "The configurations of the figure before, payload and shared bytes of all tensors. A method whose "
                f"bits grow needs more of them as the gradients change. {marked}".rstrip(),
                lambda: figures.sweep.bits_over_steps(analysis),
                folded=True,
            )
        )
    if any(c.relative_variance > 0 and c.w1_normalized > 0 for c in analysis.configurations):
        found.append(
            FigureSpec(
                "wasserstein",
                "Wasserstein distance against variance",
                "Each point is one configuration. Lower and further left is better. The Wasserstein distance compares "
                "the values before and after as two heaps, whoever holds which; the variance compares them one by "
                "one. Points far below the others keep the distribution better than their error says.",
                lambda: figures.sweep.wasserstein(analysis),
                folded=True,
            )
        )
    return found + _fit_figures(analysis)


def _noise_in_words(analysis: SweepAnalysis) -> str:
    if not analysis.safety.known:
        return ""
    return (
        " Dashed: the noise that gradients have without any codec, that of one worker, and that of the average over "
        f"{analysis.safety.workers} workers."
    )


def _fit_figures(analysis: SweepAnalysis) -> list[FigureSpec]:
    found = []
    drawn = tensors_with_levels(analysis.fits, {c.spec for c in analysis.configurations})
    others = drawn[1 : 1 + MOST_TENSORS]
    n = common_count(analysis.fits)
    how = (
        f"Above, how the magnitudes r of the gradient lie on a logarithmic axis, and the part of the squared norm "
        f"that they hold; below, the {n} levels of each method, 0 at the left end. Every method with {n} levels is "
        "shown, so that they can be compared; methods that scale differently have panels of their own."
    )
    if drawn:
        found.append(
            FigureSpec(
                "levels",
                "Levels over the density of the gradient",
                f"{how} The largest tensor, at step {drawn[0].step:,}.",
                lambda: figures.levels.levels_over_density(analysis, drawn[:1]),
            )
        )
    if others:
        found.append(
            FigureSpec(
                "levels-of-other-tensors",
                "Levels over the density of other tensors",
                f"{how} The largest tensors after the first.",
                lambda: figures.levels.levels_over_density(analysis, others),
                folded=True,
            )
        )
    descents = tensors_with_convergence(analysis.fits)[:MOST_TENSORS]
    if descents:
        found.append(
            FigureSpec(
                "convergence",
                "Convergence of coordinate descent",
                "How far the objective is from the best one found, after each sweep over the levels, from uniform, "
                "exponential and companding starts. The dotted line is one part in a million: arrived. A curve that "
                "ends above it is caught in a local optimum.",
                lambda: figures.levels.convergence(descents),
            )
        )
    return found
