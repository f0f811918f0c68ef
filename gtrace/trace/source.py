"""Sources of a trace (Zarr, HDF5, memory, a repair): their streams, and whole arrays for rewriting a trace."""

from __future__ import annotations

import math
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from gtrace.errors import TraceError, UsageError, printable
from gtrace.trace import format as layout
from gtrace.trace.files import FORMAT
from gtrace.trace.journal import JournalRows, in_journal
from gtrace.trace.rows import BlockSample
from gtrace.trace.sketches import SketchPlan, stored_bytes, values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.format import ArrayForm, ColumnType, StreamKey, TensorSpec, Tolerate


def refuse(error: TraceError) -> None:
    """The default reaction to damage: raise the error."""
    raise error


@contextmanager
def tolerated(tolerate: Tolerate) -> Iterator[None]:
    """A block in which damage ends the block and is reported, by an error or otherwise."""
    try:
        yield
    except TraceError as error:
        tolerate(error)


class StoredArray(Protocol):
    """An array of a stream on disk, with the step as its first axis."""

    shape: tuple[int, ...]

    def read(self, rows: slice, about: str, columns: slice | None = None) -> NDArray[Any]:
        """Some rows, with all of their columns or some; TraceError if the file cannot hold them."""


class Stream:
    """The committed part of one stream when the trace was opened. Safe to use from several threads.

    Its rows are in arrays, and the last ones perhaps in a journal. ``tolerate`` is called with damage that leaves other
    parts readable; by default it raises.

    Attributes:
        steps: steps of the committed rows, int64, ascending.
        specs: all its tensors, by index.
        tensors: those that are present at a committed step.
    """

    def __init__(self, key: StreamKey, where: str, tolerate: Tolerate = refuse) -> None:
        self.key = key
        self.where = where
        self.tolerate = tolerate
        self.steps: NDArray[np.int64] = np.empty(0, np.int64)
        self.specs: list[TensorSpec] = []
        self.tensors: tuple[TensorSpec, ...] = ()
        self._statistics: dict[str, NDArray[Any]] = {}
        #: names of arrays, and those of the tensors by index
        self._names: Collection[str] = ()
        self._tensors: dict[int, StoredArray] = {}
        self._journal = JournalRows((), 0, where, tolerate)

    def _table(self, name: str, ndim: int, column: ColumnType) -> StoredArray:
        """One of the arrays other than tensors; TraceError if it is missing or has another form."""
        raise KeyError(name)

    @property
    def _base(self) -> int:
        """Number of rows that are in arrays."""
        return self.steps.size - len(self._journal.entries)

    def has(self, name: str) -> bool:
        """Whether it has this (step, tensor) array."""
        return name in self._names or any(name in entry.record.statistics for entry in self._journal.entries)

    def scalar(self, name: str) -> NDArray[np.float64]:
        """One of ``format.SCALARS``: (committed rows,), NaN where unknown."""
        out = np.full(self.steps.size, np.nan)
        if base := self._base:
            out[:base] = self._table(name, 1, layout.SCALAR).read(slice(0, base), name).reshape(-1)
        out[base:] = [entry.record.scalars[name][0] for entry in self._journal.entries]
        return out

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """The rows that come with ``row`` at no further cost: number of the first, (rows, elements).

        Those are the rows of its chunk; for a tensor in several chunks that row alone, and for a sketched one, too:
        uint8 (1, number of its bytes).
        """
        if row >= self._base and in_journal(spec):
            return row, self._journal.values(spec, row)[None]
        about = self.about(spec, row)
        if spec.sketched:
            return row, stored_bytes(lambda part: self._read_part(spec, row, part), spec, about)[None]
        first, stop = row, row + 1
        if spec.parts == 1:
            first -= row % spec.chunk_rows
            # The chunk may lack rows that the journal has.
            stop = max(stop, min(first + spec.chunk_rows, self._base))
        return first, self._tensors[spec.index].read(slice(first, stop), about)

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row in its stored parts, for a tensor without sketches."""
        if row >= self._base and in_journal(spec):
            yield self._journal.values(spec, row)
            return
        for part in range(spec.parts):
            yield self._read_part(spec, row, part)

    def _read_part(self, spec: TensorSpec, row: int, part: int) -> NDArray[Any]:
        start = part * spec.chunk_elements
        columns = slice(start, min(start + spec.chunk_elements, spec.size))
        values: NDArray[Any] = self._tensors[spec.index].read(slice(row, row + 1), self.about(spec, row), columns)[0]
        return values

    @cached_property
    def scalars(self) -> dict[str, NDArray[np.float64]]:
        """name -> one value per committed row."""
        return {name: self.scalar(name) for name in layout.SCALARS}

    def statistic(self, name: str) -> NDArray[Any]:
        """One of the (step, tensor) arrays: (committed rows, at least as many columns as the last tensor's index)."""
        if name not in self._statistics:
            column = layout.statistic_column(name)
            table = np.full((self.steps.size, self._columns), column.fill, column.dtype)
            if base := self._base:
                array = self._table(name, 2, column)
                width = min(array.shape[1], self._columns)
                table[:base, :width] = array.read(slice(0, base), name, slice(0, width))
            for row, entry in enumerate(self._journal.entries, base):
                values = entry.record.statistics.get(name, np.empty((1, 0)))[0, : self._columns]
                table[row, : values.size] = values
            self._statistics[name] = table
        return self._statistics[name]

    def optional(self, name: str) -> NDArray[Any] | None:
        """One of the (step, tensor) arrays, None if the stream does not have it."""
        return self.statistic(name) if self.has(name) else None

    def about(self, spec: TensorSpec, row: int) -> str:
        """Tensor and step, for messages."""
        return f"tensor '{printable(spec.name)}', step {self.steps[row]}"

    def lengths(self, spec: TensorSpec, rows: NDArray[Any] | slice) -> dict[str, NDArray[np.int64]]:
        """``n_valid`` and ``n_total`` of a tensor at rows at which it is present; its size if they are not stored.

        Raises:
            TraceError: they are negative, or there are more valid elements than a row or the gradient has.
        """
        steps = self.steps[rows]
        stored = {name: self.optional(name) if self.key.kind == "neural" else None for name in layout.LENGTHS}
        whole = values_of(spec.attrs, steps) if spec.sketched else np.full(steps.size, spec.size, np.int64)
        found = {
            name: whole.copy() if table is None else table[rows, spec.index].astype(np.int64)
            for name, table in stored.items()
        }
        valid, total = found["n_valid"], found["n_total"]
        if stored["n_total"] is None:
            sample = BlockSample.read(spec.attrs.get("sample"))
            total[:] = valid if sample is None else sample.total
        most = np.iinfo(np.int64).max if spec.sketched else spec.size
        wrong = np.flatnonzero((valid < 0) | (valid > most) | (valid > total))
        if wrong.size:
            row = wrong[0]
            raise TraceError(
                f"{self.where}: tensor '{printable(spec.name)}', step {steps[row]}: {valid[row]} valid elements of "
                f"{total[row]} in a row of {spec.size}; the trace is damaged"
            )
        return found

    def _committed(self, where: str, stored: NDArray[Any], rows: int | None = None) -> NDArray[np.int64]:
        """The steps of the committed rows: those before the first -1, at most ``rows``; they end if steps fall."""
        unused = np.flatnonzero(stored < 0)
        steps = np.ascontiguousarray(stored[: unused[0]] if unused.size else stored, np.int64)[:rows]
        falls = np.flatnonzero(np.diff(steps) <= 0)
        if falls.size:
            self.tolerate(TraceError(f"{where}: steps do not ascend; the trace is damaged"))
            steps = steps[: falls[0] + 1]
        return steps

    def _accept(self, found: Iterable[TensorSpec]) -> None:
        """Take the tensors with metadata, numbered 0, 1, ...; drop those that contradict others."""
        taken: dict[str | int, TensorSpec] = {}
        for spec in sorted(found, key=lambda spec: spec.index):
            shared = [what for what in ("name", "index") if getattr(spec, what) in taken]
            if shared:
                self.tolerate(TraceError(f"{self.where}: two tensors have one {shared[0]}; damaged or foreign"))
            else:
                taken |= {spec.name: spec, spec.index: spec}
                self.specs.append(spec)
        missing = next((number for number, spec in enumerate(self.specs) if spec.index != number), None)
        if missing is not None:
            self._lost(missing)

    @property
    def _columns(self) -> int:
        """One column more than there are tensors, so that a lost tensor is noticed."""
        return max((spec.index + 1 for spec in self.specs), default=0) + 1

    def _lost(self, number: int) -> None:
        error = TraceError(f"{self.where}: the metadata of tensor number {number} is missing; the trace is damaged")
        self.tolerate(error)

    def _find_present(self) -> None:
        with tolerated(self.tolerate):
            present = np.atleast_1d(self.statistic("present").any(axis=0))
            if present[self._columns - 1 :].any():
                self._lost(self._columns - 1)
            self.tensors = tuple(spec for spec in self.specs if present[spec.index])


class MemoryStream(Stream):
    """A stream with its tables in memory: (rows,) of ``scalars``, and (rows, tensors) of every array that it has.

    ``read`` implements ``read_rows``.
    """

    def __init__(
        self,
        key: StreamKey,
        steps: NDArray[np.int64],
        specs: list[TensorSpec],
        scalars: Mapping[str, NDArray[np.float64]],
        tables: dict[str, NDArray[Any]],
        read: Callable[[TensorSpec, int], tuple[int, NDArray[Any]]],
    ) -> None:
        super().__init__(key, "(in memory)")
        self.steps = steps
        self.specs = specs
        self._scalars = scalars
        self._statistics = self._names = tables
        self._read = read
        self._find_present()

    def scalar(self, name: str) -> NDArray[np.float64]:
        """One of the numbers about the steps."""
        return self._scalars[name]

    def read_rows(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        """Call ``read``."""
        return self._read(spec, row)

    def read_pieces(self, spec: TensorSpec, row: int) -> Iterator[NDArray[np.float32]]:
        """One row as a whole."""
        yield self._read(spec, row)[1][0]


@dataclass
class TraceSource:
    """A trace that can be read, its ``streams`` in the order of ``StreamKey.order``; ``held`` stays open meanwhile.

    ``ranks`` has the attributes of each process's group, by the group's name. Safe to use from several threads.
    """

    path: str
    attrs: Mapping[str, Any]
    streams: Sequence[Stream]
    held: ExitStack = field(default_factory=ExitStack)
    ranks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.streams = sorted(self.streams, key=lambda stream: stream.key.order)

    def close(self) -> None:
        """Close the held resources."""
        self.held.close()


def check_root(path: str, attrs: Mapping[str, Any]) -> None:
    """TraceError if the attributes are not those of a trace, or a newer gtrace wrote it."""
    if attrs.get("format") != FORMAT:
        raise TraceError(
            f"{path}: not a gtrace trace; make one with gtrace capture SCRIPT, or gtrace trace import FILES"
        )
    version = attrs.get("version")
    if type(version) is not int or version < 1:
        raise TraceError(f"{path}: version {printable(str(version)[:40])} of the trace format is not valid; damaged")
    if version > layout.VERSION:
        raise TraceError(
            f"{path}: written by a newer gtrace (trace format {version}; this one reads {layout.VERSION}); upgrade"
        )


def attribute_fault(attrs: Mapping[str, Any], size: int) -> str | None:
    """The fault in the attributes of a tensor with ``size`` stored elements, None without a fault."""
    for name, (fits, words) in layout.ATTRIBUTES.items():
        if name in attrs and not fits(attrs[name]):
            return f"attribute '{name}' is {words}"
    for name, read in ((layout.SKETCH, SketchPlan.read), ("sample", BlockSample.read)):
        try:
            if name in attrs:
                read(attrs[name])
        except UsageError as error:
            return f"attribute '{name}': {error}"
    shape, sample, sketched = attrs["shape"], attrs.get("sample"), layout.SKETCH in attrs
    blocks = BlockSample.read(sample)
    if blocks is not None and (sketched or (blocks.size, blocks.total) != (size, math.prod(shape))):
        return f"attribute 'sample': does not choose {size} elements of a tensor of shape {shape}"
    if not sketched and sample is None and math.prod(shape) != size:
        return f"{size} elements of a tensor of shape {shape}, without attribute 'sample'"
    return None


def tensor_spec(where: str, entry: str, attrs: Mapping[str, Any], size: int, chunks: tuple[int, ...]) -> TensorSpec:
    """The description of a stored tensor from its attributes; TraceError if one is missing or has another type."""
    fault = attribute_fault({"name": None, "index": None, "shape": None, **attrs}, size)
    if fault is not None:
        raise TraceError(f"{where}: {fault}; damaged or foreign")
    return layout.TensorSpec(attrs["index"], attrs["name"], entry, size, chunks[0], chunks[1], attrs)


class WholeArray(NamedTuple):
    """One array of a stream.

    Attributes:
        form: how it is stored.
        rows: length of the first axis.
        blocks: the rows of each chunk in turn, fewer at the end; None for fill values alone. Blocks of a matrix
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
        # A missing chunk reads as NaN: values that a run never records cost nothing.
        silent = form.entry in layout.SCALARS and bool(np.isnan(table).all())
        yield WholeArray(form, rows, _table_blocks(table, form.chunks[0], silent))


def _table_blocks(table: NDArray[Any], height: int, silent: bool) -> Iterator[NDArray[Any] | None]:
    for start in range(0, len(table), height):
        yield None if silent else table[start : start + height]


def _tensor_blocks(
    stream: Stream, spec: TensorSpec, present: NDArray[np.bool_], height: int
) -> Iterator[NDArray[Any] | None]:
    """The rows of each chunk, NaN for an absent tensor; None if it is absent in all of them.

    Rows of sketches, one in each chunk, are cut to their length.
    """
    first, held = 0, np.empty((0, 0))
    for start in range(0, present.size, height):
        there = np.flatnonzero(present[start : start + height])
        if not there.size or spec.size == 0:
            yield None
            continue
        count = min(height, present.size - start)
        # A single row needs no second copy.
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
    """The tensor with another index, and with the chunk size that a writer chooses."""
    rows, elements = layout.chunking(spec.size)
    if spec.sketched:
        elements = spec.chunk_elements
    if spec.chunk_rows == 1:
        rows = 1
    return replace(spec, index=index, chunk_rows=rows, chunk_elements=elements, attrs={**spec.attrs, "index": index})
