"""What a writer knows of a stream while it writes it, and how it lays out a tensor that appears."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError
from gtrace.trace.checks import attribute_fault
from gtrace.trace.format import EXTRAS, VALUES, TensorSpec, chunking, statistics_of
from gtrace.trace.names import encode_name, printable
from gtrace.trace.validate import attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from gtrace.trace.format import Column

#: Bytes of unfinished chunks that a writer holds at most; tensors that would exceed them get chunks of one
#: row.
_OPEN_CHUNK_BYTES = 256 * 1024 * 1024


class StreamState:
    """Bookkeeping of one stream: its tensors, its committed rows, and the row that is being put together."""

    def __init__(self, kind: str) -> None:
        self.columns: Mapping[str, Column] = statistics_of(kind)
        self.specs: dict[str, TensorSpec] = {}
        self.rows = 0
        self.last_step = -1
        self.pending: int | None = None
        self.values: dict[int, dict[str, float]] = {}

    def add(self, index: int, name: str, statistics: dict[str, float]) -> None:
        """Note the numbers of a tensor of the pending row.

        Raises:
            UsageError: some are of a kind that the stream's first row had not.
        """
        for what in statistics:
            if what not in self.columns:
                if self.rows:
                    raise UsageError(f"tensor '{printable(name)}': the first step of its stream had no '{what}'")
                self.columns = {**self.columns, what: EXTRAS[what]}
        self.values[index] = statistics

    def statistics(self) -> dict[str, NDArray[Any]]:
        """One value per tensor and statistic of the pending row."""
        table = {name: np.full(len(self.specs), c.fill, c.dtype) for name, c in self.columns.items()}
        for index, row in self.values.items():
            table["present"][index] = 1
            for name, value in row.items():
                table[name][index] = value
        return table


def new_spec(
    index: int, open_bytes: int, name: str, size: int, attrs: Mapping[str, object], first: int | None = None
) -> TensorSpec:
    """How a tensor will be stored.

    Args:
        index: its column.
        open_bytes: bytes of unfinished chunks of the tensors that are there.
        name: its name.
        size: elements, or bytes, of a row.
        attrs: what is told about it, ``shape`` and ``dtype`` at least.
        first: bytes of its first row, where rows are sketches.

    Raises:
        UsageError: the name or an attribute cannot be stored.
    """
    what = f"tensor '{printable(name)}'"
    entry = encode_name(name)
    for key in ("name", "index"):
        if key in attrs:
            raise UsageError(f"{what}: attribute '{key}' is set by the trace itself")
    dtype = str(attrs["dtype"]).removeprefix("torch.")
    told = attributes({key: value for key, value in attrs.items() if value is not None}, what)
    told["dtype"] = dtype
    fault = attribute_fault(told, size)
    if fault is not None:
        raise UsageError(f"{what}: {fault}")
    if first is None:
        rows, elements = chunking(size)
    else:
        # A row is one chunk as a rule, and little of it empty.
        rows, elements = 1, min(size, first + first // 4)
    if rows > 1 and open_bytes + rows * elements * VALUES.itemsize > _OPEN_CHUNK_BYTES:
        rows = 1
    return TensorSpec(index, name, entry, size, rows, elements, {"name": name, "index": index, **told})


def open_chunk_bytes(spec: TensorSpec) -> int:
    """Bytes of the tensor's unfinished chunk that a writer holds."""
    return spec.chunk_rows * spec.chunk_elements * spec.column.dtype.itemsize if spec.chunk_rows > 1 else 0


def other_size(name: str, step: int, size: int, expected: int) -> UsageError:
    """The error about a weight gradient whose size changed."""
    return UsageError(f"tensor '{printable(name)}', step {step}: {size} elements; it began with {expected}")
