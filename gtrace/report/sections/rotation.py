"""Rotate or not: the sentence and the table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.report.names import count, listed, number, percent
from gtrace.report.section import NOTHING, Cell, Column, Table, flat, format_cell
from gtrace.report.sections.sweep_words import bits_in_words, energy_share

if TYPE_CHECKING:
    from collections.abc import Collection

    from gtrace.report.analysis.rotation import LayerRotation, Rotation
    from gtrace.report.section import Record

#: tensors that a sentence names
_NAMED = 3
_CLOSED = "No codec of this sweep rotates: eden is taken from its closed form, which holds for any values."


def rotation_sentences(found: Rotation | None) -> list[str]:
    """How many tensors gain from a rotation, which, and by how much at equal bits."""
    if found is None:
        return []
    known, at = found.known, bits_in_words(found.bits)
    gaining = sorted((layer for layer in known if layer.verdict == "rotate"), key=lambda layer: -_saved(layer))
    whole = f"{count(len(known), 'tensor')}{' compared' if len(known) < len(found.layers) else ''}"
    if not gaining:
        said = f"Rotation pays on none of {whole} at {at}: leave it out."
        return [said] if found.measured else [said, _CLOSED]
    held = sum(layer.energy for layer in gaining)
    names = listed([f"{layer.tensor} ({_change(layer)})" for layer in gaining], _NAMED)
    ratios = sorted(1 / layer.ratio for layer in gaining)
    times = " to ".join(dict.fromkeys(number(ratio, 2) for ratio in (ratios[0], ratios[-1])))
    without = sum(layer.energy * layer.plain_error for layer in known)
    mixed = sum(layer.energy * min(layer.plain_error, layer.rotated_error) for layer in known)
    sentences = [
        f"Rotation pays on {len(gaining)} of {whole}, with {percent(held)} of the gradient's energy: at {at} the best "
        f"codec that rotates loses {times} times less there. First: {names}.",
        f"Rotating these alone, all tensors together lose {energy_share(mixed)} instead of {energy_share(without)} of "
        "gradient energy at the same bits.",
    ]
    return sentences if found.measured else [*sentences, _CLOSED]


def rotation_rows(found: Rotation | None) -> list[Record]:
    """The comparison for other programs, a row for each tensor."""
    if found is None:
        return []
    about = {"bits": found.bits, "measured": found.measured}
    return [{**about, **flat(one), "ratio": one.ratio, "verdict": one.verdict} for one in found.known]


def _saved(layer: LayerRotation) -> float:
    return layer.energy * (layer.plain_error - layer.rotated_error)


def _change(layer: LayerRotation) -> str:
    rotated, plain = energy_share(layer.rotated_error), energy_share(layer.plain_error)
    return f"{rotated} with {layer.rotated}, {plain} with {layer.plain}"


def rotation_table(found: Rotation, shown: Collection[str]) -> Table:
    """One line per tensor: the best codec with and without a rotation, and the verdict.

    Args:
        found: the comparison.
        shown: names of the tensors that have a line.
    """

    def error(label: str, value: float) -> Cell:
        return Cell(energy_share(value), label) if label else NOTHING

    columns = [
        (Column("tensor", "parameter name", numeric=False), lambda one: one.tensor),
        (Column("energy", "part of the total ||g||²", rank=2), lambda one: format_cell(one.energy, ".1%")),
        (
            Column("rotated", "least error of the codecs that rotate, at these bits of this tensor"),
            lambda one: error(one.rotated, one.rotated_error),
        ),
        (
            Column("not rotated", "least error of the codecs that do not"),
            lambda one: error(one.plain, one.plain_error),
        ),
        (
            Column("ratio", "error rotated over error not rotated; below 1 the rotation pays", rank=1),
            lambda one: one.ratio,
        ),
        (
            Column("verdict", numeric=False),
            lambda one: Cell(one.verdict, mark="best" if one.verdict == "rotate" else "") if one.known else NOTHING,
        ),
    ]
    notes = [
        "Shares of the tensor's energy lost, by codecs without bias and memory. Same: they differ by less than 2%.",
    ]
    left = len(found.layers) - len(shown)
    if left:
        notes.append(f"{count(left, 'tensor')} with less energy left out; -o FILE has all.")
    return Table.of(
        f"Rotate or not, at {bits_in_words(found.bits)}",
        [layer for layer in found.layers if layer.tensor in shown],
        columns,
        notes=tuple(notes if found.measured else [*notes, _CLOSED]),
        place="layers",
    )
