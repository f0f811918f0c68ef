"""The part of the page that goes layer by layer: a folded section each, small enough for hundreds of layers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.report import markup
from gtrace.report.names import number
from gtrace.report.tables import VIEW_BITS, Cell, Column, Table, configuration_name

if TYPE_CHECKING:
    from gtrace.report.analysis import SweepAnalysis

#: Layers that have a section of their own, the ones with the most energy, and methods in each.
MOST_LAYERS, MOST_METHODS = 250, 16

_COLUMNS = (
    Column("method", "the configuration with measured bits nearest to 3, of all tensors together", numeric=False),
    Column("bits", "measured bits per coordinate of this tensor"),
    Column("relative variance", "||Q(g) - g||² / ||g||² of this tensor, summed over steps"),
    Column("times least", "relative variance over the least of these methods"),
)


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
        table = _table(analysis, chosen, k)
        named = [f"{analysis.elements[k]:,} elements"]
        if math.isfinite(analysis.energy_share[k]):
            named.append(f"{analysis.energy_share[k]:.1%} of the energy")
        named.append(f"least error: {table.rows[0][0].text}")
        parts += markup.details(analysis.tensors[k], markup.table(table, notes=False), beside=", ".join(named))
    parts.append("</div>")
    left_out = len(known) - len(kept)
    if left_out:
        parts.append(f'<p class="facts">{left_out:,} layers with less energy are in the table below alone.</p>')
    return parts


def _table(analysis: SweepAnalysis, chosen: list[int], k: int) -> Table:
    """The methods on one layer, least error first; those that have no number there come last."""
    values = analysis.per_tensor[chosen, k]
    bits = analysis.per_tensor_bits[chosen, k]
    order = np.argsort(values, kind="stable")
    least = values[values > 0].min(initial=math.inf)
    rows = tuple(
        (
            Cell(configuration_name(analysis.configurations[chosen[j]])),
            Cell(number(float(bits[j]))),
            Cell(number(float(values[j]))),
            Cell(number(float(values[j] / least)) if values[j] > 0 else number(math.nan)),
        )
        for j in order.tolist()
    )
    return Table(analysis.tensors[k], _COLUMNS, rows)
