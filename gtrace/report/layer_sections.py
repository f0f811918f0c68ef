"""The part of the page that goes layer by layer: a folded section each, small enough for hundreds of layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report import markup
from gtrace.report.names import number
from gtrace.report.ranking import decisive_target
from gtrace.report.tables import VIEW_BITS, Cell, Column, Table, configuration_name
from gtrace.report.verdict import bits_in_words, energy_share

if TYPE_CHECKING:
    from gtrace.report.analysis import SweepAnalysis

#: Layers that have a section of their own, the ones with the most energy, and methods in each.
MOST_LAYERS, MOST_METHODS = 250, 16

_BITS = Column("bits", "measured bits per value of this tensor")
_VARIANCE = Column("relative variance", "||Q(g) - g||² / ||g||² of this tensor, summed over steps")


def layer_sections(analysis: SweepAnalysis) -> list[str]:
    """One folded table per layer with what each method makes of it; nothing where nothing was measured."""
    chosen = [i for i in (analysis.nearest(f, VIEW_BITS) for f in analysis.families) if i >= 0][:MOST_METHODS]
    values = analysis.per_tensor[chosen]
    known = np.flatnonzero((values > 0).any(axis=0))
    if not len(known):
        return []
    share = np.nan_to_num(analysis.energy_share)
    kept = set(known[np.argsort(-share[known], kind="stable")][:MOST_LAYERS].tolist())
    parts = ['<div class="layers" role="group" aria-label="Layers">']
    for k in sorted(kept):
        named = [f"{analysis.elements[k]:,} elements"]
        if math.isfinite(analysis.energy_share[k]):
            named.append(f"{analysis.energy_share[k]:.1%} of the energy")
        if analysis.layer_best[k]:
            content, rate = _ranked(analysis, k), bits_in_words(analysis.targets[decisive_target(analysis)])
            named.append(f"least error at {rate}: {analysis.layer_best[k]}")
        else:
            content = _listed(analysis, chosen, k)
        parts += markup.details(analysis.tensors[k], markup.table(content, notes=False), beside=", ".join(named))
    parts.append("</div>")
    left_out = len(known) - len(kept)
    if left_out:
        parts.append(f'<p class="facts">{left_out:,} layers with less energy are in the table below alone.</p>')
    return parts


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
