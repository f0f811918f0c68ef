"""Version 1 of the trace format, as both backends lay it out; ``docs/trace-format.md`` tells it in prose."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

FORMAT = "gtrace"
VERSION = 1

#: kind of gradient -> name of its groups, the default kind first.
KINDS = {"weight": "weight_grad", "neural": "neural_grad", "second_moment": "second_moment"}
#: The kind that holds no gradients: Adam's running means of squared gradients, element by element.
SECOND_MOMENT = "second_moment"

#: Numbers about a step that a commit may carry, float64 and NaN where unknown.
SCALARS = ("loss", "lr", "grad_scale", "found_inf", "clip_norm", "micro_batches", "time")


class Column(NamedTuple):
    """How a (step, tensor) array is stored: its type, and what stands where a tensor is absent."""

    dtype: np.dtype[Any]
    fill: float


#: Numbers about one tensor at one step, so that looking at a trace reads no gradient.
STATISTICS = {
    "present": Column(np.dtype("<u1"), 0),
    "norm2": Column(np.dtype("<f8"), float("nan")),
    "absmax": Column(np.dtype("<f8"), float("nan")),
    "zeros": Column(np.dtype("<i8"), -1),
    "nonfinite": Column(np.dtype("<i8"), -1),
    "crc32c": Column(np.dtype("<u4"), 0),
}

#: The same for kinds of gradient whose number of elements changes: elements stored, elements that there were.
LENGTHS = {
    "n_valid": Column(np.dtype("<i8"), -1),
    "n_total": Column(np.dtype("<i8"), -1),
}

#: Numbers about one tensor at one step that only some captures know. A stream has those that its first commit tells.
EXTRAS = dict.fromkeys(
    (
        # of the whole gradient, where a sample of it is stored: sums of magnitudes and of squares of the finite
        # values, the largest magnitude, and how many values are not finite
        "whole_norm1",
        "whole_norm2",
        "whole_absmax",
        "whole_nonfinite",
        # sum of the optimizer's running means of squared gradients, as this step finds them
        "second_moment",
        # steps that the optimizer had done before this one
        "optimizer_step",
        # micro-batches that were accumulated, the sum of their squared norms, and the squared norm of their sum
        "replicas",
        "replicas_norm2",
        "replicas_sum_norm2",
    ),
    STATISTICS["norm2"],
)

#: Attributes of an HDF5 trace: all of a node's as one JSON object, those of the root that were set or changed after
#: the start, and the root's status.
METADATA = "metadata"
CLOSING = "closing"
STATUS = "status"

VALUES = np.dtype("<f4")
BYTES = np.dtype("u1")
#: Attribute of a tensor of which summaries are stored instead of values, and of the root where all large ones are so.
SKETCH = "sketch"
STEP = Column(np.dtype("<i8"), -1)
SCALAR = Column(np.dtype("<f8"), float("nan"))

#: Bytes of a chunk that holds several rows, most rows in one, and bytes of a chunk of a long row.
_CHUNK_BYTES = 256 * 1024
_MOST_ROWS = 64
_ELEMENTS = 16 * 1024 * 1024 // VALUES.itemsize
#: Rows of a chunk of the arrays along ``step``.
STEP_ROWS = 1024
_TABLE_BYTES = 64 * 1024
_FEWEST_COLUMNS = 16
_TABLE_COLUMNS = 1024

#: What a reader takes from others: bytes of a decoded chunk of a tensor, of a decoded chunk of anything else,
#: and of a metadata document or attribute.
MAX_CHUNK_BYTES = 64 * 1024 * 1024
MAX_TABLE_CHUNK_BYTES = 1024 * 1024
MAX_METADATA_BYTES = 4 * 1024 * 1024

_RANK = re.compile(r"rank(\d{5,9})")
_STREAM = re.compile(r"(weight_grad|neural_grad|second_moment)(?:_opt([1-9]\d{0,8}))?")


class StreamKey(NamedTuple):
    """One sequence of steps: the gradients of one kind that one optimizer sees on one rank."""

    rank: int = 0
    kind: str = "weight"
    optimizer: int = 0

    @property
    def rank_group(self) -> str:
        """Name of the rank's group."""
        return f"rank{self.rank:05d}"

    @property
    def group(self) -> str:
        """Name of the stream's group inside its rank's."""
        return KINDS[self.kind] + (f"_opt{self.optimizer}" if self.optimizer else "")

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts streams: by rank, weight before neural gradients before second moments, by optimizer."""
        return self.rank, list(KINDS).index(self.kind), self.optimizer

    @classmethod
    def parse(cls, rank_group: str, group: str) -> StreamKey | None:
        """The stream that two group names mean, or None for groups of another purpose."""
        rank, stream = _RANK.fullmatch(rank_group), _STREAM.fullmatch(group)
        if rank is None or stream is None:
            return None
        kind = next(kind for kind, name in KINDS.items() if name == stream[1])
        return cls(int(rank[1]), kind, int(stream[2] or 0))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one tensor is stored in its stream.

    Attributes:
        index: its column in the (step, tensor) arrays.
        name: its true name.
        entry: its name on disk.
        size: elements of a row; of a sketched tensor the most bytes that a row can have.
        chunk_rows: rows of a chunk.
        chunk_elements: elements of a row in one chunk.
        attrs: what its metadata says about it, as JSON values.
    """

    index: int
    name: str
    entry: str
    size: int
    chunk_rows: int
    chunk_elements: int
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sketched(self) -> bool:
        """Whether rows are moment sketches as bytes (``trace.sketched``) instead of values."""
        return SKETCH in self.attrs

    @property
    def column(self) -> Column:
        """Type of the elements, and what stands where there are none."""
        return column_of(self.attrs)

    @property
    def parts(self) -> int:
        """Chunks that one row takes."""
        return -(-self.size // self.chunk_elements)


def column_of(attrs: Mapping[str, Any]) -> Column:
    """How the elements of a tensor with these attributes are stored, and what stands where there are none."""
    return Column(BYTES, 0) if SKETCH in attrs else Column(VALUES, float("nan"))


def statistics_of(kind: str) -> dict[str, Column]:
    """The (step, tensor) arrays that every stream of this kind has."""
    return STATISTICS | LENGTHS if kind == "neural" else STATISTICS


def statistic_column(name: str) -> Column:
    """How any (step, tensor) array is stored."""
    return (STATISTICS | LENGTHS | EXTRAS)[name]


def chunking(size: int) -> tuple[int, int]:
    """Rows and elements of a chunk for rows of ``size`` float32 elements.

    Long rows are cut into equal parts of at most 16 MiB, so that the last one is not mostly padding.

    >>> chunking(10), chunking(10_000), chunking(10_000_000)
    ((64, 10), (6, 10000), (1, 3333334))
    """
    elements = max(size, 1)
    rows = min(max(_CHUNK_BYTES // (elements * VALUES.itemsize), 1), _MOST_ROWS)
    parts = -(-elements // _ELEMENTS)
    return rows, -(-elements // parts)


def table_chunking(tensors: int) -> tuple[int, int]:
    """Rows and columns of a chunk of a (step, tensor) array that starts with so many tensors.

    Rows are a multiple of 64: after so many at most a writer puts them into chunks.

    >>> table_chunking(8), table_chunking(100_000)
    ((512, 16), (64, 1024))
    """
    columns = min(max(tensors, _FEWEST_COLUMNS), _TABLE_COLUMNS)
    return min(max(_TABLE_BYTES // (8 * columns) // 64, 1) * 64, STEP_ROWS), columns
