"""Version 1 of the trace format, the same for both backends; ``docs/trace-format.md`` describes it in prose."""

from __future__ import annotations

import hashlib
import re
import string
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

import numpy as np

from gtrace.errors import TraceError, UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import NDArray

    #: called between pieces of work that take long together; returns whether what can be done later is wanted now
    Beat = Callable[[], bool]
    #: called with damage that leaves other parts readable; it may raise
    Tolerate = Callable[[TraceError], None]


VERSION = 1

#: kind of gradient -> name of its groups, the default kind first.
KINDS = {
    "weight": "weight_grad",
    "neural": "neural_grad",
    "second_moment": "second_moment",
    "update": "update",
    "outer": "outer_grad",
    "momentum": "momentum",
}
#: The kind without gradients: Adam's running means of squared gradients, element by element.
SECOND_MOMENT = "second_moment"

#: Numbers about a step that a commit may hold, float64, NaN if unknown.
SCALARS = ("loss", "lr", "grad_scale", "found_inf", "clip_norm", "micro_batches", "time")


class ColumnType(NamedTuple):
    """How a (step, tensor) array is stored: its type, and the fill value for absent tensors."""

    dtype: np.dtype[Any]
    fill: float


#: Numbers about one tensor at one step, so that many questions need no gradient.
STATISTICS = {
    "present": ColumnType(np.dtype("<u1"), 0),
    "norm2": ColumnType(np.dtype("<f8"), float("nan")),
    "absmax": ColumnType(np.dtype("<f8"), float("nan")),
    "zeros": ColumnType(np.dtype("<i8"), -1),
    "nonfinite": ColumnType(np.dtype("<i8"), -1),
    "crc32c": ColumnType(np.dtype("<u4"), 0),
}

#: The same for kinds of gradient with a varying number of elements: stored elements, original elements.
LENGTHS = {"n_valid": ColumnType(np.dtype("<i8"), -1), "n_total": ColumnType(np.dtype("<i8"), -1)}

#: Numbers about one tensor at one step that only some captures record. A stream has those of its first commit.
EXTRAS = dict.fromkeys(
    (
        # of the whole gradient, if only a sample of it is stored: sums of magnitudes and of squares of the finite
        # values, the largest magnitude, and how many values are not finite
        "whole_norm1",
        "whole_norm2",
        "whole_absmax",
        "whole_nonfinite",
        # sum of the optimizer's running means of squared gradients, before this step
        "second_moment",
        # learning rate and momentum of the tensor's parameter group, if the optimizer has several groups
        "group_lr",
        "group_momentum",
        # steps that the optimizer had done before this one
        "optimizer_step",
        # micro-batches that were accumulated, the sum of their squared norms, and the squared norm of their sum
        "replicas",
        "replicas_norm2",
        "replicas_sum_norm2",
    ),
    STATISTICS["norm2"],
)

#: attribute of each node of an HDF5 trace: all its attributes as one JSON object
METADATA = "metadata"

VALUES = np.dtype("<f4")
BYTES = np.dtype("u1")
#: attribute of a tensor stored as sketches instead of values, and of the root if all large ones are
SKETCH = "sketch"
STEP = ColumnType(np.dtype("<i8"), -1)
SCALAR = ColumnType(np.dtype("<f8"), float("nan"))

#: bytes of a chunk with several rows, most rows in one, and bytes of a chunk of a long row
_CHUNK_BYTES = 256 * 1024
_MOST_ROWS = 64
_ELEMENTS = 16 * 1024 * 1024 // VALUES.itemsize
#: rows of a chunk of the arrays along ``step``
STEP_ROWS = 1024
_TABLE_BYTES = 64 * 1024
_FEWEST_COLUMNS = 16
_TABLE_COLUMNS = 1024

#: Limits of a reader: bytes of a decoded chunk of a tensor, and of a decoded chunk of anything else.
MAX_CHUNK_BYTES = 64 * 1024 * 1024
MAX_TABLE_CHUNK_BYTES = 1024 * 1024

_RANK = re.compile(r"rank(\d{5,9})")
_STREAM = re.compile(rf"({'|'.join(KINDS.values())})(?:_opt([1-9]\d{{0,8}}))?")


class StreamKey(NamedTuple):
    """One sequence of steps: the gradients of one kind of one optimizer on one rank."""

    rank: int = 0
    kind: str = "weight"
    optimizer: int = 0

    @property
    def rank_group(self) -> str:
        """Name of the rank's group."""
        return f"rank{self.rank:05d}"

    @property
    def group(self) -> str:
        """Name of the stream's group inside its rank's group."""
        return KINDS[self.kind] + (f"_opt{self.optimizer}" if self.optimizer else "")

    @property
    def order(self) -> tuple[int, int, int]:
        """Sorts streams: by rank, by kind in the order of ``KINDS``, by optimizer."""
        return self.rank, list(KINDS).index(self.kind), self.optimizer

    @classmethod
    def parse(cls, rank_group: str, group: str) -> StreamKey | None:
        """The stream with these two group names, or None for groups of another purpose."""
        rank, stream = _RANK.fullmatch(rank_group), _STREAM.fullmatch(group)
        if rank is None or stream is None:
            return None
        kind = next(kind for kind, name in KINDS.items() if name == stream[1])
        return cls(int(rank[1]), kind, int(stream[2] or 0))


class ArrayForm(NamedTuple):
    """How an array with the step as its first axis is stored.

    Attributes:
        entry: its name on disk.
        column: type and fill value.
        columns: length of the second axis; 1 without one.
        chunks: shape of a chunk.
        dimensions: names of the axes.
        attributes: the array's attributes.
    """

    entry: str
    column: ColumnType
    columns: int
    chunks: tuple[int, ...]
    dimensions: tuple[str, ...]
    attributes: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How one tensor is stored in its stream.

    Attributes:
        index: its column in the (step, tensor) arrays.
        name: its name in the run.
        entry: its name on disk.
        size: elements of a row; for a sketched tensor the largest possible number of bytes in a row.
        chunk_rows: rows of a chunk.
        chunk_elements: elements of a row in one chunk.
        attrs: its metadata, as JSON values.
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
        """Type of the elements, and the fill value."""
        return column_of(self.attrs)

    @property
    def parts(self) -> int:
        """Number of chunks in one row."""
        return -(-self.size // self.chunk_elements)

    @property
    def form(self) -> ArrayForm:
        """How its array is stored."""
        chunks, dimensions = (self.chunk_rows, self.chunk_elements), ("step", self.entry + DIMENSION_SUFFIX)
        return ArrayForm(self.entry, self.column, self.size, chunks, dimensions, self.attrs)


def column_of(attrs: Mapping[str, Any]) -> ColumnType:
    """How the elements of a tensor with these attributes are stored, with the fill value."""
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
    """Rows and columns of a chunk of a (step, tensor) array for a stream that starts with ``tensors`` tensors.

    Rows are a multiple of 64, because a writer puts rows into chunks at least once in 64 rows.

    >>> table_chunking(8), table_chunking(100_000)
    ((512, 16), (64, 1024))
    """
    columns = min(max(tensors, _FEWEST_COLUMNS), _TABLE_COLUMNS)
    return min(max(_TABLE_BYTES // (8 * columns) // 64, 1) * 64, STEP_ROWS), columns


def table_forms(statistics: Iterable[str], tensors: int) -> list[ArrayForm]:
    """How the other arrays are stored: (step, tensor) arrays, numbers about steps, and ``step`` last."""
    chunks = table_chunking(tensors)
    return [
        *(ArrayForm(name, statistic_column(name), tensors, chunks, ("step", "tensor")) for name in statistics),
        *(ArrayForm(name, SCALAR, 1, (STEP_ROWS,), ("step",)) for name in SCALARS),
        ArrayForm("step", STEP, 1, (STEP_ROWS,), ("step",)),
    ]


class Rows(NamedTuple):
    """The content of a commit about consecutive rows of a stream.

    Attributes:
        steps: int64[n], the training steps.
        scalars: name -> float64[n], for every name in ``format.SCALARS``.
        statistics: name -> (n, tensors that the stream knows so far): the names of ``format.statistics_of``, and those
            ``format.EXTRAS`` that every commit of the stream has.
    """

    steps: NDArray[np.int64]
    scalars: Mapping[str, NDArray[np.float64]]
    statistics: Mapping[str, NDArray[Any]]


def go_on() -> bool:
    """The beat of a caller that waits for the end."""
    return True


def are_lengths(value: object, least: int = 0) -> TypeGuard[list[int]]:
    """Whether a JSON value is a list of integers, each at least ``least``."""
    return isinstance(value, list) and all(type(n) is int and n >= least for n in value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


#: attributes of a tensor that readers rely on: a check for each, and words for the fault
ATTRIBUTES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "name": (lambda value: _is_text(value) and value != "", "not text"),
    "index": (lambda value: type(value) is int and value >= 0, "not a column number"),
    "shape": (are_lengths, "not a list of lengths"),
    "aliases": (lambda value: isinstance(value, list) and all(map(_is_text, value)), "not a list of names"),
    "dtype": (_is_text, "not text"),
    "module_type": (_is_text, "not text"),
    "stage": (_is_text, "not text"),
    "sample": (lambda value: value is None or isinstance(value, dict), "not an object"),
}

#: names of arrays in a group that are not tensors, and names reserved for the groups of later versions
RESERVED = frozenset(("step", "tensor", "call", "zarr.json", *SCALARS, *STATISTICS, *LENGTHS))

#: the element dimension of a tensor is its name on disk plus this suffix; no tensor's own name ends with it
DIMENSION_SUFFIX = ".i"

#: file systems allow 255 bytes, some encrypted ones 143; a dimension suffix must fit as well
MAX_ENTRY = 120
_KEPT = 100

_PLAIN = frozenset((string.ascii_letters + string.digits + "_-.").encode())


def encode_name(name: str) -> str:
    """The name under which a tensor is stored in its group, in Zarr and in HDF5.

    Bytes of its UTF-8 form other than ASCII letters, digits, ``_``, ``-`` and ``.`` become ``%XX``. Names
    that a file system, Zarr or the format itself would interpret get one more character encoded. An
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
    *_, kept = takewhile(lambda start: len(start) <= _KEPT, accumulate(parts))
    return f"{kept}~{hashlib.blake2b(raw, digest_size=8).hexdigest()}"
