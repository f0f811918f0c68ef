"""A trace that lives in memory: for sweeps over arrays and for tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.trace import format as layout
from gtrace.trace.writer import TraceWriter, root_attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.trace.format import Record, StreamKey, TensorSpec


class MemoryStream:
    """What a stream held when it was looked at."""

    def __init__(
        self,
        key: StreamKey,
        specs: Sequence[TensorSpec],
        records: Sequence[Record],
        rows: Mapping[tuple[int, int], NDArray[Any]],
    ) -> None:
        self.key = key
        self.steps: NDArray[np.int64] = np.array([record.step for record in records], np.int64)
        self.scalars: dict[str, NDArray[np.float64]] = {
            name: np.array([record.scalars[name] for record in records], np.float64) for name in layout.SCALARS
        }
        self._rows = rows
        self._statistics: dict[str, NDArray[Any]] = {}
        for name in records[0].statistics if records else layout.statistics_of(key.kind):
            column = layout.statistic_column(name)
            table = np.full((len(records), len(specs)), column.fill, column.dtype)
            for row, record in enumerate(records):
                values = record.statistics[name]
                table[row, : values.size] = values
            self._statistics[name] = table
        present = self._statistics["present"].sum(axis=0)
        self.specs = tuple(specs)
        self.tensors = tuple(spec for spec in specs if present[spec.index])

    def scalar(self, name: str) -> NDArray[np.float64]:
        """(committed rows,) of one of the numbers about the steps."""
        return self.scalars[name]

    def statistic(self, name: str) -> NDArray[Any]:
        """(committed rows, tensors) of one of the statistics."""
        return self._statistics[name]

    def lengths(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the lengths, None for weight gradients."""
        return self._statistics.get(name)

    def further(self, name: str) -> NDArray[Any] | None:
        """(committed rows, tensors) of one of the further numbers, None where no step has it."""
        return self._statistics.get(name)

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """That row."""
        stored = self._rows[spec.index, row][None]
        stored.flags.writeable = False
        return row, stored

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """That row."""
        yield self._rows[spec.index, row]


class MemorySource:
    """A finished trace in memory."""

    path = "(in memory)"

    def __init__(self, attrs: Mapping[str, Any], streams: Iterable[MemoryStream]) -> None:
        self.attrs = attrs
        self.streams = tuple(sorted(streams, key=lambda stream: stream.key.order))

    def close(self) -> None:
        """Nothing is held open."""


class MemorySink:
    """Rows kept as copies."""

    def __init__(self, attrs: Mapping[str, Any]) -> None:
        self._attrs: Mapping[str, Any] = dict(attrs)
        self._specs: dict[StreamKey, list[TensorSpec]] = {}
        self._records: dict[StreamKey, list[Record]] = {}
        self._rows: dict[StreamKey, dict[tuple[int, int], NDArray[Any]]] = {}

    def add_tensor(self, stream: StreamKey, spec: TensorSpec) -> None:
        """Remember the tensor."""
        self._specs.setdefault(stream, []).append(spec)

    def write_row(self, stream: StreamKey, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        """Keep a copy."""
        self._rows.setdefault(stream, {})[spec.index, row] = values.copy()

    def discard(self, stream: StreamKey, row: int, specs: Sequence[TensorSpec]) -> None:
        """Forget the copies."""
        for spec in specs:
            self._rows[stream].pop((spec.index, row), None)

    def commit(self, stream: StreamKey, row: int, record: Record) -> None:
        """Keep the record; rows come in order."""
        self._records.setdefault(stream, []).append(record)

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Keep the final attributes."""
        self._attrs = dict(attrs)

    def source(self) -> MemorySource:
        """What is committed so far, to be read."""
        return MemorySource(
            self._attrs,
            [
                MemoryStream(key, tuple(self._specs.get(key, ())), tuple(records), self._rows.get(key, {}))
                for key, records in self._records.items()
            ],
        )


def source_of(
    tensors: Mapping[str, ArrayLike | Mapping[int, ArrayLike]],
    scalars: Mapping[int, Mapping[str, Any]],
    attrs: Mapping[str, Any],
    kind: str,
) -> MemorySource:
    """A finished trace of arrays; see :meth:`gtrace.trace.Trace.from_arrays`."""
    by_step: dict[int, dict[str, ArrayLike]] = {step: {} for step in scalars}
    for name, given in tensors.items():
        rows = given if hasattr(given, "items") else {0: given}
        for step, array in rows.items():
            by_step.setdefault(step, {})[name] = array
    start = root_attrs(attrs)
    sink = MemorySink(start)
    with TraceWriter(sink, MemorySource.path, start) as writer:
        for step in sorted(by_step):
            for name, array in by_step[step].items():
                writer.append(step, name, array, kind=kind)
            writer.commit(step, kind=kind, **scalars.get(step, {}))
    return sink.source()
