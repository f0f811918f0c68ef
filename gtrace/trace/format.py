"""Version 1 of the trace format, as both backends lay it out; ``docs/trace-format.md`` tells it in prose.

Also the one interface between traces and the backends that hold them: a sink that is written, a source that is read.
"""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gtrace.errors import UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray


FORMAT = "gtrace"
VERSION = 1

#: kind of gradient -> name of its groups, the default kind first.
KINDS = {"weight": "weight_grad", "neural": "neural_grad", "second_moment": "second_moment"}
#: The kind that holds no gradients: Adam's running means of squared gradients, element by element.
SECOND_MOMENT = "second_moment"

#: Numbers about a step that a commit may carry, float64 and NaN where unknown.
SCALARS = ("loss", "lr", "grad_scale", "found_inf", "clip_norm", "micro_batches", "time")


class ColumnType(NamedTuple):
    """How a (step, tensor) array is stored: its type, and what stands where a tensor is absent."""

    dtype: np.dtype[Any]
    fill: float


#: Numbers about one tensor at one step, so that looking at a trace reads no gradient.
STATISTICS = {
    "present": ColumnType(np.dtype("<u1"), 0),
    "norm2": ColumnType(np.dtype("<f8"), float("nan")),
    "absmax": ColumnType(np.dtype("<f8"), float("nan")),
    "zeros": ColumnType(np.dtype("<i8"), -1),
    "nonfinite": ColumnType(np.dtype("<i8"), -1),
    "crc32c": ColumnType(np.dtype("<u4"), 0),
}

#: The same for kinds of gradient whose number of elements changes: elements stored, elements that there were.
LENGTHS = {
    "n_valid": ColumnType(np.dtype("<i8"), -1),
    "n_total": ColumnType(np.dtype("<i8"), -1),
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

#: Attribute of each node of an HDF5 trace: all its attributes as one JSON object.
METADATA = "metadata"

VALUES = np.dtype("<f4")
BYTES = np.dtype("u1")
#: Attribute of a tensor of which summaries are stored instead of values, and of the root where all large ones are so.
SKETCH = "sketch"
STEP = ColumnType(np.dtype("<i8"), -1)
SCALAR = ColumnType(np.dtype("<f8"), float("nan"))

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
        """Whether rows are moment sketches as bytes (``trace.sketches``) instead of values."""
        return SKETCH in self.attrs

    @property
    def column(self) -> ColumnType:
        """Type of the elements, and what stands where there are none."""
        return column_of(self.attrs)

    @property
    def parts(self) -> int:
        """Chunks that one row takes."""
        return -(-self.size // self.chunk_elements)


def column_of(attrs: Mapping[str, Any]) -> ColumnType:
    """How the elements of a tensor with these attributes are stored, and what stands where there are none."""
    return ColumnType(BYTES, 0) if SKETCH in attrs else ColumnType(VALUES, float("nan"))


def statistics_of(kind: str) -> dict[str, ColumnType]:
    """The (step, tensor) arrays that every stream of this kind has."""
    return STATISTICS | LENGTHS if kind == "neural" else STATISTICS


def statistic_column(name: str) -> ColumnType:
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


class Record(NamedTuple):
    """What a commit says about one row of a stream.

    Attributes:
        step: the training step.
        scalars: name -> value, for every name in ``format.SCALARS``.
        statistics: name -> one value per tensor that the stream knows so far: those of ``format.statistics_of``, and
            the same of ``format.EXTRAS`` in every record of a stream.
    """

    step: int
    scalars: Mapping[str, float]
    statistics: Mapping[str, NDArray[Any]]


class Sink(Protocol):
    """Where a writer puts rows. Row ``r`` of a stream counts from the call of ``commit`` on, not before."""

    def add_tensor(self, stream: StreamKey, spec: TensorSpec) -> None:
        """Make room for a tensor; its index follows those that the stream has."""

    def write_row(self, stream: StreamKey, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        """Take one row, float32 filled up with NaN where it is shorter, or bytes; copied or written on return."""

    def discard(self, stream: StreamKey, row: int, specs: Sequence[TensorSpec]) -> None:
        """Forget what was written of these tensors' rows: they will be absent from it, or written again."""

    def commit(self, stream: StreamKey, row: int, record: Record) -> None:
        """Make the row durable and then, as the last thing, visible."""

    def close(self, attrs: Mapping[str, Any]) -> None:
        """Drop what was not committed and store the trace's final attributes."""


class StreamSource(Protocol):
    """The committed part of one stream, as it was when the trace was opened."""

    @property
    def key(self) -> StreamKey:
        """Which stream this is."""

    @property
    def tensors(self) -> Sequence[TensorSpec]:
        """Its tensors that are present at a committed step, by index."""

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """All its tensors, whether they were committed or not."""

    @property
    def steps(self) -> NDArray[np.int64]:
        """Steps of the committed rows, rising."""

    @property
    def scalars(self) -> Mapping[str, NDArray[np.float64]]:
        """name -> one value per committed row."""

    def scalar(self, name: str) -> NDArray[np.float64]:
        """One of ``format.SCALARS``: (committed rows,)."""

    def statistic(self, name: str) -> NDArray[Any]:
        """One of ``format.STATISTICS``: (committed rows, at least as many columns as the last tensor's index)."""

    def lengths(self, name: str) -> NDArray[Any] | None:
        """One of ``format.LENGTHS`` in the same form, None where the stream has none."""

    def further(self, name: str) -> NDArray[Any] | None:
        """One of ``format.EXTRAS`` in the same form, None where the stream has none."""

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """The rows that come with ``row`` at no further cost: number of the first, (rows, elements).

        Of a sketched tensor that row alone, uint8 (1, the bytes that it has).
        """

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row, part by part as it is stored; of a tensor that is not sketched."""


class TraceSource(Protocol):
    """A trace that can be read. Safe to use from several threads."""

    @property
    def path(self) -> str:
        """Where it is, for messages."""

    @property
    def attrs(self) -> Mapping[str, Any]:
        """What the trace says about itself."""

    @property
    def streams(self) -> Sequence[StreamSource]:
        """Its streams, in the order of ``StreamKey.order``."""

    def close(self) -> None:
        """Give back what is held open."""


#: Arrays of a group that are no tensors, and names kept free for the groups of later versions.
RESERVED = frozenset(
    (
        "step",
        "tensor",
        "loss",
        "lr",
        "grad_scale",
        "found_inf",
        "clip_norm",
        "micro_batches",
        "time",
        "present",
        "norm2",
        "absmax",
        "zeros",
        "nonfinite",
        "crc32c",
        "call",
        "n_valid",
        "n_total",
        "zarr.json",
    )
)

#: The element dimension of a tensor is its name on disk and this; no tensor's own name ends so.
DIMENSION_SUFFIX = ".i"

#: File systems stop at 255 bytes, some encrypted ones at 143; a dimension suffix has to fit as well.
MAX_ENTRY = 120
_KEPT = 100

_PLAIN = frozenset((string.ascii_letters + string.digits + "_-.").encode())


def encode_name(name: str) -> str:
    """The name under which a tensor is stored in its group, in Zarr and in HDF5.

    Bytes of its UTF-8 form other than ASCII letters, digits, ``_``, ``-`` and ``.`` become ``%XX``. Names
    that a file system, Zarr or the format itself understands otherwise get one more character encoded. An
    encoded name of more than 120 characters is cut to 100 and ends in ``~`` and a digest of the whole, so
    that no two collide.

    >>> encode_name("fc.weight"), encode_name("unnamed/opt0"), encode_name("step"), encode_name("..")
    ('fc.weight', 'unnamed%2Fopt0', '%73tep', '%2E.')

    Raises:
        UsageError: the name is empty or not valid Unicode.
    """
    if not name:
        raise UsageError("a tensor's name must not be empty")
    try:
        raw = name.encode()
    except UnicodeEncodeError:
        raise UsageError(f"tensor {printable(name)}: the name is not valid Unicode") from None
    parts = [chr(byte) if byte in _PLAIN else f"%{byte:02X}" for byte in raw]
    # A leading dot hides a file or climbs a folder, and Zarr keeps names that start with two underscores.
    if name in RESERVED or name.startswith((".", "__")):
        parts[0] = f"%{raw[0]:02X}"
    if name.endswith(DIMENSION_SUFFIX):
        parts[-1] = f"%{raw[-1]:02X}"
    entry = "".join(parts)
    if len(entry) <= MAX_ENTRY:
        return entry
    kept = ""
    for part in parts:
        if len(kept) + len(part) > _KEPT:
            break
        kept += part
    return f"{kept}~{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
