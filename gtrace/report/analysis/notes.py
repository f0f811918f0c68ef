"""What a reader must know about how the numbers of a sweep came to be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from gtrace.report.analysis.workers import CODED
from gtrace.report.names import count, listed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gtrace.report.analysis.cells import CellTable
    from gtrace.report.analysis.families import Configuration, Labels
    from gtrace.report.analysis.workers import Basis


def sweep_notes(
    table: CellTable,
    common: NDArray[np.bool_],
    configurations: tuple[Configuration, ...],
    labels: Labels,
    basis: Basis,
) -> tuple[str, ...]:
    """What a reader must know about how the numbers of a sweep came to be, one line each.

    Args:
        table: cells of the sweep.
        common: (cells,) which of them are compared.
        configurations: summed up.
        labels: names of families, in the order of ``table.specs``.
        basis: what configurations are compared by.
    """
    if not table.measured.any():
        return ("The column 'note' of the results says why errors are missing.",) if table.specs else ()
    return (
        *_compared(table, common, configurations),
        *_errors(configurations, basis),
        *_sources(configurations, labels, basis),
    )


def _compared(table: CellTable, common: NDArray[np.bool_], configurations: tuple[Configuration, ...]) -> Iterator[str]:
    """What is compared, and what is left out."""
    is_tensor = table.tensor >= 0
    covered = table.covers().any(axis=0)
    holes = int((is_tensor & ~covered).sum())
    if holes:
        yield (
            f"{holes:,} of {int(is_tensor.sum()):,} tensor-steps could not be measured with any codec and "
            "are left out (non-finite gradients, or skipped)."
        )
    empty = [c.spec for c in configurations if c.partial and not c.cells]
    if empty:
        yield f"No error that is a number: {listed(empty)}."
    partial = [c.spec for c in configurations if c.partial and c.cells]
    if partial:
        yield (
            f"Not compared, because measured on too few of the tensors and steps: {listed(partial)}. "
            "Their lines are summed over what they have."
        )
    if common.sum() < covered.sum():
        yield (
            f"Compared over the {int(common.sum()):,} tensor-steps, of {int(covered.sum()):,}, "
            "that every compared codec has."
        )


def _errors(configurations: tuple[Configuration, ...], basis: Basis) -> Iterator[str]:
    """What errors are when they are not those of single steps of one worker."""
    if basis.window is not None:
        yield (
            f"Some codecs have memory, so all are compared by the error of what has arrived over "
            f"{basis.steps_in_words}. The memory's part of it counts as bias."
        )
        without = [c.spec for c in configurations if c.cells and math.isnan(c.error)]
        if without:
            yield f"Not measured over several steps, so not compared: {listed(without)}."
    if basis.workers > 1:
        unknown = [c.spec for c in configurations if c.cells and not c.bias_known]
        if unknown:
            which = "all codecs" if len(unknown) == len(configurations) else listed(unknown)
            yield f"Bias not known, so all of the error counts as bias, which is the most it can be: {which}."


def _sources(configurations: tuple[Configuration, ...], labels: Labels, basis: Basis) -> Iterator[str]:
    """Where bits and errors come from."""
    expected = [c.spec for c in configurations if c.bits_source in ("expected", "mixed")]
    if expected:
        which = "all codecs" if len(expected) == len(configurations) else listed(expected)
        yield f"Bits {CODED[basis.coder]} are computed, not counted on encoded bytes: {which}."
    lacking = [c.spec for c in configurations if math.isnan(c.bits) and c.cells]
    if lacking:
        yield f"No bits known, so not compared at equal bits: {listed(lacking)}."
    drawn = [c.spec for c in configurations if c.error_source in ("measured", "mixed")]
    if drawn:
        which = "all codecs" if len(drawn) == len(configurations) else listed(drawn)
        yield f"Error of the draws, rounding noise included, where there is no closed form: {which}."
    if labels.unreadable:
        yield f"Parameters could not be read from the results: {listed(labels.unreadable)}."


def averaged_over(provenance: Mapping[str, Any]) -> int:
    """Ranks whose average the gradients of a sweep were, 1 for those of each rank itself or where nobody says."""
    attrs = provenance.get("trace_attrs")
    attrs = attrs if isinstance(attrs, dict) else {}
    world = attrs.get("world_size")
    stages = provenance.get("stages")
    if not isinstance(stages, list):
        captured = attrs.get("capture")
        stages = [captured.get("stage")] if isinstance(captured, dict) else []
    return world if "reduced" in stages and isinstance(world, int) and world > 1 else 1


def whose_gradient(provenance: Mapping[str, Any]) -> str:
    """Whose gradient the errors of a sweep are about: ``one worker's gradient``."""
    ranks = averaged_over(provenance)
    return "one worker's gradient" if ranks == 1 else f"the average of {count(ranks, 'rank')}' gradients"
