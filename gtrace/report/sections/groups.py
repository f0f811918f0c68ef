"""What each codec makes of groups of tensors, in words, as a table and as records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gtrace.report.names import MISSING, number
from gtrace.report.plain import Record, flat
from gtrace.report.sections.sweep_words import sweep_verdict
from gtrace.report.tables import Cell, Column, Table, configuration_name

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis.families import Configuration
    from gtrace.report.analysis.groups import TensorGroup


#: groups, or codecs, up to which they have a column each
_WIDE = 6


def group_table(groups: Sequence[TensorGroup]) -> Table:
    """Error, and bits, of each configuration in each group; the fewer of the two are the columns."""
    specs = list(dict.fromkeys(c.spec for group in groups for c in group.analysis.configurations))
    by_spec = [{c.spec: c for c in group.analysis.configurations} for group in groups]
    names = {c.spec: configuration_name(c) for group in groups for c in group.analysis.configurations}
    cells = {}
    for group, found in zip(groups, by_spec, strict=True):
        winners = {c.spec for c in group.analysis.configurations if c.pareto}
        cells.update({(group.name, spec): _cell(found.get(spec), spec in winners) for spec in specs})
    if len(groups) <= _WIDE:
        heads = [("codec", "its spec"), *((group.name, _about(group)) for group in groups)]
        rows = [[Cell(names[spec]), *(cells[group.name, spec] for group in groups)] for spec in specs]
    elif len(specs) <= _WIDE:
        heads = [("group", "tensors that are summed up"), *((names[spec], spec) for spec in specs)]
        rows = [[Cell(group.name), *(cells[group.name, spec] for spec in specs)] for group in groups]
    else:
        heads = [("group", "tensors that are summed up"), ("codec", "its spec"), ("error", "and bits")]
        rows = [[Cell(g.name), Cell(names[spec]), cells[g.name, spec]] for g in groups for spec in specs]
    columns = [Column(head, meaning, numeric=k > 0 and head != "codec") for k, (head, meaning) in enumerate(heads)]
    notes = [f"{group.name}: {_about(group)}." for group in groups] if len(groups) <= _WIDE else []
    notes.append(
        "Error: squared errors over energies, both summed over the group; below it bits "
        "per value, weighted by elements. Marked: no other codec takes fewer bits at no more error."
    )
    said = dict.fromkeys(note for group in groups for note in group.analysis.notes)
    return Table("Error by group of tensors", tuple(columns), tuple(map(tuple, rows)), (*notes, *said))


def _about(group: TensorGroup) -> str:
    count = f"{len(group.tensors)} tensor{'s' * (len(group.tensors) != 1)}"
    return f"{count}, {group.elements:,} elements, {group.energy_share:.1%} of the energy"


def _cell(found: Configuration | None, best: bool) -> Cell:
    if found is None or found.error != found.error:
        return Cell(MISSING, mark="missing")
    return Cell(number(found.error), number(found.bits), mark="best" if best else "")


def groups_in_words(groups: Sequence[TensorGroup]) -> list[str]:
    """The answer for each group, for as many as a reader wants to read."""
    said = [f"In {group.name}, {_uncapitalized(sweep_verdict(group.analysis)[0])}" for group in groups[:_WIDE]]
    return [*said, f"{len(groups) - _WIDE} more groups are in the table."] if len(groups) > _WIDE else said


def _uncapitalized(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def group_json(group: TensorGroup) -> dict[str, Any]:
    """Every number at full precision."""
    return {
        "group": group.name,
        "tensors": list(group.tensors),
        "elements": group.elements,
        "energy_share": group.energy_share,
        "verdict": sweep_verdict(group.analysis),
        "configurations": [flat(c) for c in group.analysis.configurations],
        "notes": list(group.analysis.notes),
    }


def group_rows(groups: Sequence[TensorGroup]) -> list[Record]:
    """One record per group and configuration."""
    return [
        {
            "group": group.name,
            "group_tensors": len(group.tensors),
            "group_elements": group.elements,
            "group_energy_share": group.energy_share,
            **flat(c),
        }
        for group in groups
        for c in group.analysis.configurations
    ]
