"""A finished trace array by array, for whoever writes one as a whole: in shards, or as HDF5."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.trace import format as layout

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gtrace.trace.format import ArrayForm, TensorSpec
    from gtrace.trace.source import Stream


class WholeArray(NamedTuple):
    """One array of a stream.

    Attributes:
        form: how it is stored.
        rows: length of the first axis.
        blocks: the rows of each chunk in turn, fewer at the end; None for nothing but fill values. Blocks of a matrix
            may have fewer columns than it has: the others are fill values.
    """

    form: ArrayForm
    rows: int
    blocks: Iterator[NDArray[Any] | None]


def arrays_of(stream: Stream) -> Iterator[WholeArray]:
    """Tensors, numbers about them, numbers about steps, and ``step`` last."""
    rows = stream.steps.size
    present = stream.statistic("present")
    for index, spec in enumerate(stream.tensors):
        new = renumbered(spec, index)
        yield WholeArray(new.form, rows, _tensor_blocks(stream, spec, present[:, spec.index] != 0, new.chunk_rows))
    usual = [name for name in layout.statistics_of(stream.key.kind) if name not in layout.LENGTHS or stream.has(name)]
    names = [*usual, *(name for name in layout.EXTRAS if stream.has(name))]
    indices = [spec.index for spec in stream.tensors]
    for form in layout.table_forms(names, len(indices)):
        if form.entry == "step":
            table: NDArray[Any] = stream.steps
        elif form.entry in layout.SCALARS:
            table = stream.scalar(form.entry)
        else:
            table = stream.statistic(form.entry)[:, indices] if indices else np.empty((rows, 0), form.column.dtype)
        # A chunk that is not there reads as NaN: what a run never says costs nothing.
        silent = form.entry in layout.SCALARS and bool(np.isnan(table).all())
        yield WholeArray(form, rows, _table_blocks(table, form.chunks[0], silent))


def _table_blocks(table: NDArray[Any], height: int, silent: bool) -> Iterator[NDArray[Any] | None]:
    for start in range(0, len(table), height):
        yield None if silent else table[start : start + height]


def _tensor_blocks(
    stream: Stream, spec: TensorSpec, present: NDArray[np.bool_], height: int
) -> Iterator[NDArray[Any] | None]:
    """The rows of each chunk, NaN where the tensor is absent; None where it is absent in all of them.

    Those of sketches, one each, are no longer than they have to be.
    """
    first, held = 0, np.empty((0, 0))
    for start in range(0, present.size, height):
        there = np.flatnonzero(present[start : start + height])
        if not there.size or spec.size == 0:
            yield None
            continue
        count = min(height, present.size - start)
        # A row alone needs no second copy.
        out = None if count == 1 else np.full((count, spec.size), np.nan, np.float32)
        for row in (start + there).tolist():
            # Each stored chunk is decoded once.
            if not first <= row < first + len(held):
                first, held = stream.read_rows(spec, row)
            values = np.ascontiguousarray(held[row - first], spec.column.dtype)
            if out is None:
                out = values[None]
            else:
                out[row - start] = values
        yield out


def renumbered(spec: TensorSpec, index: int) -> TensorSpec:
    """The tensor with another index, in chunks of the size that a writer chooses."""
    rows, elements = layout.chunking(spec.size)
    if spec.sketched:
        elements = spec.chunk_elements
    if spec.chunk_rows == 1:
        rows = 1
    return replace(spec, index=index, chunk_rows=rows, chunk_elements=elements, attrs={**spec.attrs, "index": index})
