"""A finished trace array by array, for whoever writes one as a whole: in shards, or as HDF5."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.trace import format as layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray

    from gtrace.trace.format import ColumnType, StreamSource, TensorSpec

_HELD_BYTES = 512 * 1024 * 1024


class WholeArray(NamedTuple):
    """One array of a stream.

    Attributes:
        entry: its name on disk.
        column: type and fill value.
        shape: of the array.
        chunks: shape of a chunk.
        dimensions: names of the axes.
        attributes: of the array.
        blocks: the rows of each chunk in turn, fewer at the end; None for nothing but fill values. Blocks of a matrix
            may have fewer columns than it has: the others are fill values.
    """

    entry: str
    column: ColumnType
    shape: tuple[int, ...]
    chunks: tuple[int, ...]
    dimensions: tuple[str, ...]
    attributes: Mapping[str, Any]
    blocks: Iterator[NDArray[Any] | None]


def arrays_of(stream: StreamSource) -> Iterator[WholeArray]:
    """Tensors, numbers about them, numbers about steps, and ``step`` last."""
    rows = stream.steps.size
    indices = [spec.index for spec in stream.tensors]
    columns = layout.statistics_of(stream.key.kind) | layout.EXTRAS
    tables = {
        name: stream.statistic(name)[:, indices] if indices else np.empty((rows, 0), column.dtype)
        for name, column in columns.items()
        if (name not in layout.EXTRAS or stream.further(name) is not None)
        and (name not in layout.LENGTHS or stream.lengths(name) is not None)
    }
    for index, spec in enumerate(stream.tensors):
        new = renumbered(spec, index)
        yield WholeArray(
            spec.entry,
            spec.column,
            (rows, spec.size),
            (new.chunk_rows, new.chunk_elements),
            ("step", spec.entry + layout.DIMENSION_SUFFIX),
            new.attrs,
            _tensor_blocks(stream, spec, tables["present"][:, index] != 0, new.chunk_rows),
        )
    chunks = layout.table_chunking(len(stream.tensors))
    for name, table in tables.items():
        yield _table(name, layout.statistic_column(name), table, chunks)
    for name, values in stream.scalars.items():
        yield _table(name, layout.SCALAR, values, (layout.STEP_ROWS,))
    yield _table("step", layout.STEP, stream.steps, (layout.STEP_ROWS,))


def _table(name: str, column: ColumnType, table: NDArray[Any], chunks: tuple[int, ...]) -> WholeArray:
    silent = table.ndim == 1 and table.dtype.kind == "f" and bool(np.isnan(table).all())
    starts = range(0, len(table), chunks[0])
    blocks = (None if silent else table[start : start + chunks[0]] for start in starts)
    return WholeArray(name, column, table.shape, chunks, ("step", "tensor")[: table.ndim], {}, blocks)


def _tensor_blocks(
    stream: StreamSource, spec: TensorSpec, present: NDArray[np.bool_], height: int
) -> Iterator[NDArray[Any] | None]:
    """The rows of each chunk, NaN where the tensor is absent; None where it is absent in all of them.

    Those of sketches, one each, are no longer than they have to be.
    """
    held = HeldRows(stream)
    for start in range(0, present.size, height):
        there = present[start : start + height]
        if not there.any() or spec.size == 0:
            yield None
            continue
        if spec.sketched or there.size == 1:
            yield held.read(spec, start)[None]
            continue
        out = np.full((there.size, spec.size), np.nan, np.float32)
        for offset in np.flatnonzero(there).tolist():
            out[offset] = held.read(spec, start + offset)
        yield out


def renumbered(spec: TensorSpec, index: int) -> TensorSpec:
    """The tensor with another index, in chunks of the size that a writer chooses."""
    rows, elements = layout.chunking(spec.size)
    if spec.sketched:
        elements = spec.chunk_elements
    if spec.chunk_rows == 1:
        rows = 1
    return replace(spec, index=index, chunk_rows=rows, chunk_elements=elements, attrs={**spec.attrs, "index": index})


class HeldRows:
    """Rows of a stream in any order of tensors, each chunk decoded once as long as steps rise."""

    def __init__(self, stream: StreamSource) -> None:
        self._stream = stream
        self._held: dict[int, tuple[int, NDArray[Any]]] = {}
        self._bytes = 0

    def read(self, spec: TensorSpec, row: int) -> NDArray[Any]:
        """One row: float32 values, or sketches as bytes."""
        first, rows = self._held.get(spec.index, (0, ()))
        if not first <= row < first + len(rows):
            first, rows = self._stream.read_rows(spec, row)
            old = self._held.pop(spec.index, None)
            self._bytes -= old[1].nbytes if old else 0
            if len(rows) > 1 and self._bytes + rows.nbytes <= _HELD_BYTES:
                self._held[spec.index] = first, rows
                self._bytes += rows.nbytes
        return np.ascontiguousarray(rows[row - first], spec.column.dtype)
