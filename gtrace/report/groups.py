"""Results by group of tensors: what each codec makes of the convolutions, the embedding, each layer.

A group is a part of the rows of a sweep and is summed up as the whole is by :func:`~gtrace.report.analysis.analyze`:
relative variance is ``sum squared_error / sum energy`` and bits are ``sum bits n / sum n`` over the tensors and steps
of the group, so tensors count by their elements and energies.
"""

from __future__ import annotations

import dataclasses
import fnmatch
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.report.analysis import analyze
from gtrace.report.names import MISSING, number
from gtrace.report.records import flat
from gtrace.report.tables import Cell, Column, Table, configuration_name
from gtrace.report.verdict import sweep_verdict
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis import Configuration, SweepAnalysis
    from gtrace.report.cells import Coder
    from gtrace.sweep import SweepResult

#: ``--group`` without globs: a group for every layer, or for every tensor
BY_LAYER, BY_TENSOR = "layer", "tensor"
#: what is in no group
OTHERS = "(others)"
#: groups, or codecs, up to which they have a column each
_WIDE = 6


@dataclass(frozen=True, slots=True)
class TensorGroup:
    """Some tensors of a sweep.

    Attributes:
        name: of the group.
        tensors: their names, in the sweep's order.
        elements: of all of them together, at one step.
        energy_share: their part of ||g||^2 over all tensors and steps.
        analysis: of their rows alone.
    """

    name: str
    tensors: tuple[str, ...]
    elements: int
    energy_share: float
    analysis: SweepAnalysis


def group_tensors(
    result: SweepResult, groups: Sequence[str], *, workers: int | None = None, coder: Coder = "huffman"
) -> list[TensorGroup]:
    """Sum a sweep up group by group.

    Args:
        result: the sweep; rows of the whole model are in no group.
        groups: ``NAME=GLOB`` or ``NAME=GLOB,GLOB`` each; or the one word ``layer`` (tensors whose names differ in the
            last part alone: ``conv1.weight`` and ``conv1.bias``) or ``tensor``. The first group that matches a tensor
            has it; what no group has goes to a last one, ``(others)``.
        workers: as of :func:`~gtrace.report.analysis.analyze`.
        coder: likewise.

    Raises:
        UsageError: no such form, a name given twice, a glob that matches no tensor, or no rows of single tensors.
    """
    column = result["tensor"]
    tensors = [name for name in dict.fromkeys(column.tolist()) if name != WHOLE_MODEL]
    if not tensors:
        raise UsageError("--group: the sweep has no rows of single tensors, only of the whole model")
    of_tensor = assign(tensors, groups)
    energies = {name: _energy(result, column == name) for name in tensors}
    total = sum(energies.values())
    found = []
    for group in dict.fromkeys(of_tensor.values()):
        members = tuple(name for name in tensors if of_tensor[name] == group)
        mask = np.isin(column, members)
        part = dataclasses.replace(result, columns={name: values[mask] for name, values in result.columns.items()})
        part = dataclasses.replace(part, warnings=(), times=None, details={})
        analysis = analyze(part, group, workers=workers, coder=coder)
        share = sum(energies[name] for name in members) / total if total else float("nan")
        found.append(TensorGroup(group, members, int(analysis.elements.sum()), share, analysis))
    last = [group for group in found if group.name == OTHERS]
    return [group for group in found if group.name != OTHERS] + last


def assign(tensors: Sequence[str], groups: Sequence[str]) -> dict[str, str]:
    """Each tensor's group, as :func:`group_tensors` reads ``groups``; ``(others)`` for what is in none.

    Raises:
        UsageError: no such form, a name given twice, or a glob that matches no tensor.
    """
    if list(groups) == [BY_TENSOR]:
        return {name: name for name in tensors}
    if list(groups) == [BY_LAYER]:
        return {name: name.rpartition(".")[0] or name for name in tensors}
    parsed: dict[str, list[str]] = {}
    for text in groups:
        name, equals, globs = text.partition("=")
        patterns = [glob.strip() for glob in globs.split(",") if glob.strip()]
        if not equals or not name.strip() or not patterns:
            raise UsageError(
                f"--group: '{text}' is no NAME=GLOB; write conv='conv*', or {BY_LAYER} or {BY_TENSOR} alone"
            )
        if name.strip() in parsed:
            raise UsageError(f"--group: '{name.strip()}' is given twice; put its globs into one, with commas")
        for glob in patterns:
            if not any(fnmatch.fnmatchcase(tensor, glob) for tensor in tensors):
                raise UsageError(f"--group: no tensor matches '{glob}'; {suggest(glob, tensors)}")
        parsed[name.strip()] = patterns
    of_tensor = dict.fromkeys(tensors, OTHERS)
    for name, patterns in reversed(parsed.items()):
        for tensor in tensors:
            if any(fnmatch.fnmatchcase(tensor, glob) for glob in patterns):
                of_tensor[tensor] = name
    return {
        tensor: of_tensor[tensor] for tensor in sorted(tensors, key=lambda t: [*parsed, OTHERS].index(of_tensor[t]))
    }


def _energy(result: SweepResult, mask: np.ndarray[Any, np.dtype[np.bool_]]) -> float:
    """||g||^2 of a tensor over its steps; each of its rows tells that of one step."""
    steps, first = np.unique(result["step"][mask], return_index=True)
    return float(np.nansum(result["energy"][mask][first])) if steps.size else 0.0


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
