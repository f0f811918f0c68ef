"""Writes a trace to any backend."""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import os
import threading
import time
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from gtrace import __version__
from gtrace.errors import UsageError, printable, suggest
from gtrace.trace import format as layout
from gtrace.trace.files import FORMAT, Storing, place_for, start_folder, write_error
from gtrace.trace.format import EXTRAS, KINDS, SCALARS, SKETCH, Rows, StreamKey, TensorSpec, go_on
from gtrace.trace.journal import refuse_living, together
from gtrace.trace.rows import (
    SAMPLE,
    RowStatistics,
    checksum_bytes,
    row_statistics,
    row_width,
    rows_statistics,
    sample_indices,
)
from gtrace.trace.sketches import SketchPlan, SketchRow, values_of
from gtrace.trace.source import MemoryStream, TraceSource, attribute_fault
from gtrace.trace.zarr import ZarrSink, ZarrStreamSink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from os import PathLike

    from numpy.typing import ArrayLike, NDArray

    from gtrace.trace.format import Beat, ColumnType

    TraceSink: TypeAlias = "ZarrSink | _MemorySink"
    StreamSink: TypeAlias = "ZarrStreamSink | _MemorySink"

#: dtype -> its name; numpy makes one each time it is asked
_name_of: Callable[[np.dtype[Any]], str] = functools.cache(operator.attrgetter("name"))
#: Limit on the bytes of unfinished chunks that a writer holds; tensors beyond it get chunks of one
#: row.
_OPEN_CHUNK_BYTES = 256 * 1024 * 1024


def _from_numpy(value: object) -> object:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def attributes(given: Mapping[str, object], what: str) -> dict[str, Any]:
    """The attributes in the form in which they will be read back; UsageError if JSON cannot hold one of them."""
    out = {}
    for key, value in given.items():
        if not key or not key.isprintable():
            raise UsageError(f"{what}: attribute name {key!r} is not printable text")
        try:
            out[key] = json.loads(json.dumps(value, allow_nan=False, default=_from_numpy))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{what}: attribute '{key}' cannot be stored ({error}); use text, finite numbers, lists, objects"
            ) from None
    return out


def _float32_values(array: ArrayLike, name: str) -> tuple[NDArray[np.float32], list[int], str]:
    """Flat float32 values, and the original shape and type."""
    array, kind = _of_torch(array)
    try:
        given = np.asarray(array)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"tensor '{printable(name)}': numpy cannot take it ({error}); pass an array") from error
    if given.dtype.kind not in "fiub":
        raise UsageError(f"tensor '{printable(name)}': {given.dtype} values; a trace needs real numbers")
    if given.dtype == np.float32:
        values = np.ascontiguousarray(given).reshape(-1)
    else:
        # A float64 beyond float32 becomes infinite here, and is counted as infinite.
        with np.errstate(over="ignore", invalid="ignore"):
            values = np.ascontiguousarray(given, np.float32).reshape(-1)
    return values, list(given.shape), kind or _name_of(given.dtype)


def _of_torch(array: Any) -> tuple[Any, str]:
    """A torch tensor in a form that numpy can use, and its type; anything else unchanged. Does not import torch."""
    if not (hasattr(array, "detach") and hasattr(array, "to_dense")):
        return array, ""
    tensor, kind = array.detach().to_dense().cpu(), str(array.dtype).removeprefix("torch.")
    # numpy has no bfloat16 and no 8-bit floats, but float32 can represent all of their values.
    return (tensor.float() if "float" in kind and kind not in ("float32", "float64") else tensor), kind


def _extras_of(given: Mapping[str, float], name: str) -> dict[str, float]:
    for what in given:
        if what not in EXTRAS:
            raise UsageError(f"tensor '{printable(name)}': unknown number '{what}'; {suggest(what, EXTRAS)}")
    return {what: float(value) for what, value in given.items()}


def _scalars_of(given: Mapping[str, float | None]) -> dict[str, float]:
    """Every number about a step, NaN if it is not given; ``time`` is now by default."""
    numbers = dict.fromkeys(SCALARS, math.nan) | {"time": time.time()}
    for name, value in given.items():
        if name not in numbers:
            raise UsageError(f"commit: unknown number '{name}' of a step; {suggest(name, SCALARS)}")
        if value is not None:
            numbers[name] = float(value)
    return numbers


class _StreamState:
    """The state of one stream: its tensors, its committed rows, and the pending row."""

    def __init__(self, key: StreamKey) -> None:
        self.key = key
        self.columns: Mapping[str, ColumnType] = layout.statistics_of(key.kind)
        self.specs: dict[str, TensorSpec] = {}
        self.rows = 0
        self.last_step = -1
        self.pending: int | None = None
        self.values: dict[int, dict[str, float]] = {}
        #: made at its first step
        self.sink: StreamSink | None = None

    def add(self, index: int, name: str, statistics: dict[str, float]) -> None:
        for what in statistics:
            if what not in self.columns:
                if self.rows:
                    raise UsageError(f"tensor '{printable(name)}': the first step of its stream had no '{what}'")
                self.columns = {**self.columns, what: EXTRAS[what]}
        self.values[index] = statistics

    def tables(self, rows: int = 1) -> dict[str, NDArray[Any]]:
        return {name: np.full((rows, len(self.specs)), c.fill, c.dtype) for name, c in self.columns.items()}

    def statistics(self) -> dict[str, NDArray[Any]]:
        """One value per statistic and tensor of the pending row: (1, tensors)."""
        table = self.tables()
        for index, row in self.values.items():
            table["present"][:, index] = 1
            for name, value in row.items():
                table[name][:, index] = value
        return table


def _new_spec(
    index: int, open_bytes: int, name: str, size: int, attrs: Mapping[str, object], first: int | None = None
) -> TensorSpec:
    """How a tensor will be stored, with ``open_bytes`` in unfinished chunks of others.

    Its rows have ``size`` elements; if they are sketches, ``size`` bytes at most, and the first one ``first`` bytes.
    """
    what = f"tensor '{printable(name)}'"
    entry = layout.encode_name(name)
    for key in ("name", "index"):
        if key in attrs:
            raise UsageError(f"{what}: attribute '{key}' is set by the trace itself")
    dtype = str(attrs["dtype"]).removeprefix("torch.")
    stored = attributes({key: value for key, value in attrs.items() if value is not None}, what)
    stored["dtype"] = dtype
    fault = attribute_fault(stored, size)
    if fault is not None:
        raise UsageError(f"{what}: {fault}")
    if first is None:
        rows, elements = layout.chunking(size)
    else:
        # A row is usually one chunk, and little of it is empty.
        rows, elements = 1, min(size, first + first // 4)
    if rows > 1 and open_bytes + rows * elements * layout.VALUES.itemsize > _OPEN_CHUNK_BYTES:
        rows = 1
    return TensorSpec(index, name, entry, size, rows, elements, {"name": name, "index": index, **stored})


def _other_size(name: str, step: int, size: int, expected: int) -> UsageError:
    return UsageError(f"tensor '{printable(name)}', step {step}: {size} elements, but earlier steps have {expected}")


Status = Literal["complete", "interrupted"]


def root_attrs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a new trace; UsageError if one is the format's own, or cannot be stored."""
    stored = attributes(given, "trace")
    if SKETCH in stored:
        SketchPlan.read(stored[SKETCH])
    own = {"format": FORMAT, "version": layout.VERSION, "status": "writing", "gtrace_version": __version__}
    for key in given:
        if key in own:
            raise UsageError(f"attribute '{key}' is set by the trace itself")
    return own | stored


class TraceWriter(AbstractContextManager["TraceWriter"]):
    """Writes a trace step by step: ``append`` gradients, then ``commit`` the step.

    After a commit the step is in the files: it survives the death of the process (not of the machine), and
    readers that open the trace see it. Any thread may call; calls take turns. In a ``with``
    block, an exception drops the uncommitted step and marks the trace as interrupted.
    """

    def __init__(self, sink: TraceSink, path: str, attrs: Mapping[str, Any]) -> None:
        self.path = path
        #: bytes of values and sketches written so far, before compression
        self.stored = 0
        #: called with every commit: the stream, its tensors by column, and what the trace keeps beside their gradients
        self.follower: Callable[[StreamKey, Sequence[str], Rows], None] | None = None
        self._sink = sink
        self._attrs = dict(attrs)
        self._plan = SketchPlan.read(attrs[SKETCH]) if SKETCH in attrs else None
        self._streams: dict[StreamKey, _StreamState] = {}
        self._open_bytes = 0
        self._lock = threading.RLock()
        self._closed = False
        self._storing = Storing(path)
        self._pid = os.getpid()

    def append(
        self,
        step: int,
        name: str,
        array: ArrayLike,
        kind: str = "weight",
        optimizer: int = 0,
        rank: int = 0,
        n_total: int | None = None,
        numbers: Mapping[str, float] | None = None,
        **attrs: object,
    ) -> None:
        """Add one tensor's gradient to a step.

        The values are copied, or written, before this returns; you may then reuse the array. The
        memory in use does not grow with steps: for tensors below 128 KiB one chunk of at most 256 KiB
        each, 256 MiB in all; larger ones go to the file at once. The first ``append`` begins a step;
        beginning a later one commits it.

        Args:
            step: the training step, ascending within each (kind, optimizer, rank).
            name: any non-empty text.
            array: real numbers of any shape, stored flat (C order) as float32.
            kind: ``weight`` or ``neural``.
            optimizer: number of the optimizer that steps this tensor; each has its own steps.
            rank: number of this process among those that train together.
            n_total: (neural) number of elements of the gradient, if ``array`` is a part of it.
            numbers: further numbers about the gradient at this step, for ``Trace.statistics``: names of
                ``format.EXTRAS``. The first step of a stream decides which it has; NaN means unknown.
            **attrs: attributes at the tensor's first appearance, ignored later: ``shape`` and ``dtype`` if
                they differ from the array's, ``aliases``, ``module_type``, ``stage`` (``local`` or
                ``reduced``), ``sample``, or any JSON value. For a neural gradient also ``capacity``: the largest
                number of elements in a row, by default a quarter more than it has now. A gradient may have fewer;
                from a longer one a sample is stored (``rows.sample_indices``).

        Raises:
            UsageError: a wrong argument, a step that is already committed, a tensor given twice, or a
                weight gradient with another size.
            TraceError: the files cannot be written.
        """
        with self._lock:
            stream = self._stream(kind, optimizer, rank)
            values, shape, dtype = _float32_values(array, name)
            further = _extras_of(numbers or {}, name)
            about = {"shape": shape, "dtype": dtype} | attrs
            capacity = about.pop("capacity", None)
            spec = stream.specs.get(name)
            # Buckets of a sampled weight gradient are not the gradient's: it keeps its values.
            whole = kind == "neural" or about.get("sample") is None
            if self._plan is not None and (whole and self._plan.covers(values.size) if spec is None else spec.sketched):
                row = SketchRow.of(values, self._plan.specs)
                total = row.size if n_total is None else n_total
                self._append_row(stream, step, name, row, total, about, further)
                return
            width, total = row_width(name, kind, values.size, n_total, capacity)
            if spec is None:
                if kind == "neural":
                    about = {"sample": SAMPLE} | about
                spec = _new_spec(len(stream.specs), self._open_bytes, name, width, about)
            if kind == "neural":
                if values.size > spec.size:
                    values = values[sample_indices(values.size, spec.size)]
            elif spec.size != values.size:
                raise _other_size(name, step, values.size, spec.size)
            statistics = row_statistics(values)._asdict()
            if kind == "neural":
                statistics |= {"n_valid": values.size, "n_total": total}
            self._put(stream, step, spec, values, statistics | further)

    def append_sketch(
        self,
        step: int,
        name: str,
        row: SketchRow,
        shape: Sequence[int],
        kind: str = "weight",
        optimizer: int = 0,
        rank: int = 0,
        n_total: int | None = None,
        **attrs: object,
    ) -> None:
        """Add sketches of a gradient to a step, in a trace that was created with ``sketch``.

        Args:
            step, name, kind, optimizer, rank, attrs: see ``append``; ``numbers`` may be among ``attrs``.
            row: the sketches that the trace keeps, in their order; of the values of this step, or of this one and
                those after it that are merged with it.
            shape: shape of the gradient at one step.
            n_total: (neural) number of elements of the gradients, if not all of them were summarized.

        Raises:
            UsageError: as in ``append``, or other sketches than the trace stores.
            TraceError: the files cannot be written.
        """
        with self._lock:
            stream = self._stream(kind, optimizer, rank)
            if self._plan is None or tuple(sketch.spec for sketch in row.sketches) != self._plan.specs:
                raise UsageError(
                    f"tensor '{printable(name)}': the trace stores other sketches; see create_trace(sketch=)"
                )
            about: dict[str, Any] = {"shape": list(shape), "dtype": "float32"} | attrs
            further = _extras_of(about.pop("numbers", {}), name)
            self._append_row(stream, step, name, row, row.size if n_total is None else n_total, about, further)

    def together(
        self, count: int, kind: str = "weight", optimizer: int = 0, rank: int = 0, *, last: bool = False
    ) -> int:
        """How many of the next ``count`` steps, perhaps the ``last`` ones, :meth:`extend` commits at once."""
        with self._lock:
            return together(self._stream(kind, optimizer, rank).rows, count, last=last)

    def extend(
        self,
        steps: Sequence[int],
        tensors: Mapping[str, NDArray[np.float32]],
        scalars: Mapping[str, Sequence[float]],
        about: Mapping[str, Mapping[str, Sequence[float]]],
        *,
        kind: str = "weight",
        optimizer: int = 0,
        rank: int = 0,
        last: bool = False,
    ) -> int:
        """Append and commit several steps, each with the same tensors; many small ones cost little more than one.

        Args:
            steps: the training steps, ascending, after those before.
            tensors: name -> float32 (steps, elements), each row contiguous, of tensors that the stream has already.
            scalars: see ``commit``; one number per step, NaN if unknown.
            about: name -> number of ``append`` -> one per step; of all tensors that have any.
            kind, optimizer, rank: see ``append``.
            last: no step of the stream is expected to follow, so none of these goes through the journal.

        Returns:
            how many of the steps, from the first on, are committed: as many as :meth:`together` says.

        Raises:
            UsageError: a wrong argument; nothing was committed.
            TraceError: the files cannot be written; nothing was committed.
        """
        with self._lock:
            stream = self._stream(kind, optimizer, rank)
            if any(a >= b for a, b in itertools.pairwise(steps)) or not tensors.keys() <= stream.specs.keys():
                raise UsageError(f"{self.path}: steps must ascend, and their tensors need an earlier append")
            self._begin(stream, steps[0])
            stream.pending = None
            part = slice(0, together(stream.rows, len(steps), last=last))
            numbers = {name: np.full(part.stop, math.nan) for name in SCALARS}
            numbers |= {name: np.array(values[part], np.float64) for name, values in scalars.items()}
            found = {name: (stream.specs[name], values[part]) for name, values in tensors.items()}
            table = stream.tables(part.stop)
            for name, (spec, values) in found.items():
                if spec.sketched or values.shape != (part.stop, spec.size):
                    raise _other_size(name, steps[0], values.shape[1], spec.size)
                table["present"][:, spec.index] = 1
                for what, column in zip(RowStatistics._fields, rows_statistics(values), strict=True):
                    table[what][:, spec.index] = column
                for what, given in about.get(name, {}).items():
                    if what not in table:
                        raise UsageError(f"tensor '{printable(name)}': the first step of its stream had no '{what}'")
                    table[what][:, spec.index] = given[part]
            sink, rows = self._sink_of(stream), range(stream.rows, stream.rows + part.stop)
            with self._storing:
                try:
                    for spec, values in found.values():
                        sink.write_rows(spec, rows.start, values)
                    self._store(stream, Rows(np.array(steps[part], np.int64), numbers, table))
                except Exception:
                    sink.discard(rows, [spec for spec, _ in found.values()])
                    raise
            self.stored += sum(values.nbytes for _, values in found.values())
            return part.stop

    def commit(
        self,
        step: int,
        *,
        kind: str | None = None,
        optimizer: int | None = None,
        rank: int | None = None,
        **scalars: float | None,
    ) -> None:
        """Make a step durable and visible.

        Every (kind, optimizer, rank) with appended gradients is committed; the keywords limit this to
        those that they select. A step without any gradient is recorded too: by default for the weight gradients of
        optimizer 0 on rank 0.

        Args:
            step: the step of the appended gradients.
            kind, optimizer, rank: see ``append``.
            **scalars: ``loss``, ``lr``, ``grad_scale``, ``found_inf``, ``clip_norm``, ``micro_batches``,
                ``time`` (seconds since 1970; by default now). None means unknown.

        Raises:
            UsageError: a wrong argument, or another step than that of the appended gradients.
            TraceError: the files cannot be written; the step is not committed.
        """
        with self._lock:
            numbers = _scalars_of(scalars)
            default = self._stream("weight" if kind is None else kind, optimizer or 0, rank or 0)
            chosen = [
                stream
                for stream in self._streams.values()
                if stream.pending is not None
                and kind in (None, stream.key.kind)
                and optimizer in (None, stream.key.optimizer)
                and rank in (None, stream.key.rank)
            ]
            for stream in chosen:
                if stream.pending != step:
                    raise UsageError(f"commit of step {step}, but gradients were appended to {stream.pending}")
            if not chosen:
                self._begin(default, step)
            for stream in chosen or [default]:
                self._commit(stream, numbers)

    def discard(self) -> None:
        """Drop the uncommitted steps; their numbers may be used again.

        Raises:
            TraceError: the files cannot be changed.
        """
        with self._lock:
            for stream in self._streams.values():
                if stream.pending is not None:
                    begun = [spec for spec in stream.specs.values() if spec.index in stream.values]
                    stream.pending, stream.values = None, {}
                    if stream.sink is not None:
                        with self._storing:
                            stream.sink.discard(range(stream.rows, stream.rows + 1), begun)

    def set_attrs(self, **attrs: object) -> None:
        """Set attributes of the trace that become known later; ``close`` stores them.

        Raises:
            UsageError: an attribute is the format's own, or cannot be stored.
        """
        with self._lock:
            self._check_open()
            stored = root_attrs(attrs)
            self._attrs |= {key: stored[key] for key in attrs}

    def close(self, status: Status = "complete", beat: Beat = go_on) -> None:
        """Commit the pending step and finish the trace. Closing again does nothing.

        Args:
            status: ``interrupted`` if the recorded run did not reach its end; a failed write also makes it
                ``interrupted``.
            beat: called between pieces of work; if it returns False, an HDF5 trace stays a folder.

        Raises:
            TraceError: the files cannot be written.
        """
        with self._lock:
            if not self._owned():
                return
            try:
                for stream in self._streams.values():
                    if stream.pending is not None:
                        self._commit(stream, _scalars_of({}))
            finally:
                self._finish(status, beat)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        with self._lock:
            if self._owned():
                self._finish("interrupted")

    def _owned(self) -> bool:
        """Whether there is something to close: a forked child has a copy of a writer, but does not own its files."""
        return not self._closed and os.getpid() == self._pid

    def _finish(self, status: Status, beat: Beat = go_on) -> None:
        self._closed = True
        with self._storing:
            self._sink.close({**self._attrs, "status": "interrupted" if self._storing.failed else status}, beat)

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.path}: the trace is closed; nothing can be added")
        if os.getpid() != self._pid:
            raise UsageError(f"{self.path}: this process was forked from the one that is writing the trace")

    def _stream(self, kind: str, optimizer: int, rank: int) -> _StreamState:
        self._check_open()
        stream = self._streams.get(StreamKey(rank, kind, optimizer))
        if stream is None:
            if kind not in KINDS:
                raise UsageError(f"unknown kind '{printable(kind)}' of gradient; {suggest(kind, KINDS)}")
            for what, number in (("optimizer", optimizer), ("rank", rank)):
                if not 0 <= number < 10**9:
                    raise UsageError(f"{what} {number}: must be a number of 0 or more")
            key = StreamKey(int(rank), kind, int(optimizer))
            stream = self._streams[key] = _StreamState(key)
        return stream

    def _begin(self, stream: _StreamState, step: int) -> None:
        """Make ``step`` the pending one; an earlier pending step is complete now."""
        if stream.pending == step:
            return
        last = stream.last_step if stream.pending is None else stream.pending
        if not last < step < 2**63 or step != int(step):
            came = f", and step {last} came before" if last >= 0 else ""
            raise UsageError(f"{self.path}: step {step}: steps must be whole numbers that ascend from 0{came}")
        if stream.pending is not None:
            self._commit(stream, _scalars_of({}))
        stream.pending = int(step)

    def _sink_of(self, stream: _StreamState) -> StreamSink:
        if stream.sink is None:
            stream.sink = self._sink.stream(stream.key)
        return stream.sink

    def _append_row(
        self,
        stream: _StreamState,
        step: int,
        name: str,
        row: SketchRow,
        total: int,
        about: Mapping[str, object],
        further: Mapping[str, float],
    ) -> None:
        assert self._plan is not None
        data = row.pack(self._plan.mantissa)
        spec = stream.specs.get(name)
        if spec is None:
            about = {SKETCH: self._plan.describe(), **about}
            spec = _new_spec(len(stream.specs), self._open_bytes, name, self._plan.row_width(), about, first=data.size)
        statistics = row.statistics() | {"crc32c": checksum_bytes(data)}
        if stream.key.kind == "neural":
            statistics |= {"n_valid": row.size, "n_total": total}
        elif (expected := int(values_of(spec.attrs, np.array([step]))[0])) != row.size:
            raise _other_size(name, step, row.size, expected)
        self._put(stream, step, spec, data, {**statistics, **further})

    def _put(
        self, stream: _StreamState, step: int, spec: TensorSpec, values: NDArray[Any], statistics: dict[str, float]
    ) -> None:
        if stream.pending == step and spec.index in stream.values:
            raise UsageError(f"tensor '{printable(spec.name)}', step {step}: appended twice")
        self._begin(stream, step)
        if spec.name not in stream.specs:
            with self._storing:
                self._sink_of(stream).add_tensor(spec)
            stream.specs[spec.name] = spec
            if spec.chunk_rows > 1:
                self._open_bytes += spec.chunk_rows * spec.chunk_elements * spec.column.dtype.itemsize
        with self._storing:
            self._sink_of(stream).write_rows(spec, stream.rows, values[None])
        self.stored += values.nbytes
        stream.add(spec.index, spec.name, statistics)

    def _commit(self, stream: _StreamState, scalars: Mapping[str, float]) -> None:
        assert stream.pending is not None
        numbers = {name: np.array([value]) for name, value in scalars.items()}
        self._store(stream, Rows(np.array([stream.pending], np.int64), numbers, stream.statistics()))
        stream.pending, stream.values = None, {}

    def _store(self, stream: _StreamState, rows: Rows) -> None:
        with self._storing:
            self._sink_of(stream).commit(stream.rows, rows)
        stream.last_step = int(rows.steps[-1])
        stream.rows += len(rows.steps)
        if self.follower is not None:
            self.follower(stream.key, list(stream.specs), rows)


class _MemorySink:
    """A trace of one stream in memory, with the methods of :class:`gtrace.trace.zarr.ZarrSink` and of its streams."""

    def __init__(self) -> None:
        self._key: StreamKey | None = None
        self._specs: list[TensorSpec] = []
        self._commits: list[Rows] = []
        self._values: dict[tuple[int, int], NDArray[Any]] = {}

    def stream(self, key: StreamKey) -> StreamSink:
        self._key = key
        return self

    def add_tensor(self, spec: TensorSpec) -> None:
        self._specs.append(spec)

    def write_rows(self, spec: TensorSpec, row: int, values: NDArray[Any]) -> None:
        self._values[spec.index, row] = kept = values.copy()
        kept.flags.writeable = False

    def discard(self, _rows: range, _specs: Sequence[TensorSpec]) -> None:
        """Nothing fails in memory."""

    def commit(self, _row: int, rows: Rows) -> None:
        self._commits.append(rows)

    def close(self, attrs: Mapping[str, Any], _beat: Beat = go_on) -> None:
        self._attrs = attrs

    def source(self) -> TraceSource:
        if self._key is None:
            return TraceSource("(in memory)", self._attrs, ())
        steps = np.concatenate([one.steps for one in self._commits])
        scalars = {name: np.concatenate([one.scalars[name] for one in self._commits]) for name in SCALARS}
        tables = {}
        for name, column in layout.statistics_of(self._key.kind).items():
            tables[name] = np.full((steps.size, len(self._specs)), column.fill, column.dtype)
            for row, one in enumerate(self._commits):
                known = one.statistics[name][0]  # perhaps of fewer tensors
                tables[name][row, : known.size] = known
        stream = MemoryStream(self._key, steps, self._specs, scalars, tables, self._read)
        return TraceSource("(in memory)", self._attrs, [stream])

    def _read(self, spec: TensorSpec, row: int) -> tuple[int, NDArray[Any]]:
        return row, self._values[spec.index, row]


def source_of(
    tensors: Mapping[str, ArrayLike | Mapping[int, ArrayLike]],
    scalars: Mapping[int, Mapping[str, Any]],
    attrs: Mapping[str, Any],
    kind: str,
) -> TraceSource:
    """A finished trace of arrays; see :meth:`gtrace.trace.Trace.from_arrays`."""
    by_step: dict[int, dict[str, ArrayLike]] = {step: {} for step in scalars}
    for name, given in tensors.items():
        rows = given if hasattr(given, "items") else {0: given}
        for step, array in rows.items():
            by_step.setdefault(step, {})[name] = array
    start = root_attrs(attrs)
    sink = _MemorySink()
    with TraceWriter(sink, "(in memory)", start) as writer:
        for step in sorted(by_step):
            for name, array in by_step[step].items():
                writer.append(step, name, array, kind=kind)
            writer.commit(step, kind=kind, **scalars.get(step, {}))
    return sink.source()


def create_trace(
    path: str | PathLike[str],
    *,
    force: bool = False,
    attrs: Mapping[str, Any] | None = None,
    sketch: SketchPlan | str | None = None,
) -> TraceWriter:
    """Start a trace: a Zarr v3 folder if the path ends in ``.zarr``, an HDF5 file for ``.h5`` and ``.hdf5``.

    An empty trace is in its place when this returns.

    Args:
        path: the new trace; its folder must exist.
        force: replace a trace, or any file, that is there. The old one is deleted once the new one has been started
            beside it. A folder other than a trace is never deleted, nor a trace that a living process writes.
        attrs: attributes of the trace: JSON values under any names (``argv``, ``model``, ``seed``,
            ...).
        sketch: keep moment sketches of large tensors instead of their values, such as ``"l2:8192,linf:8192,none"``
            (norm and bucket size); tensors that take less room as values keep these.

    Raises:
        UsageError: another suffix, no such folder, or attributes that cannot be stored.
        OutputExistsError: something is there; it is kept.
        TraceError: the trace cannot be written.
    """
    place = place_for(path)
    plan = SketchPlan.parse(sketch) if isinstance(sketch, str) else sketch
    if force:
        refuse_living(place)
    start = root_attrs({**(attrs or {}), **({} if plan is None else {SKETCH: plan.describe()})})
    sink: TraceSink
    try:
        if place.suffix == ".zarr":
            start_folder(place, start, force=force)
            sink = ZarrSink(place)
        else:
            from gtrace.trace.hdf5 import Hdf5Sink

            sink = Hdf5Sink(place, start, force=force)
    except (OSError, RuntimeError) as error:
        raise write_error(path, error) from error
    return TraceWriter(sink, os.fspath(path), start)
