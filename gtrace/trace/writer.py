"""Writing a trace, whatever holds it."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from gtrace import __version__
from gtrace.errors import TraceError, UsageError, suggest
from gtrace.trace.checks import attribute_fault
from gtrace.trace.format import (
    FORMAT,
    KINDS,
    SCALARS,
    VALUES,
    VERSION,
    StreamKey,
    TensorSpec,
    chunking,
    statistics_of,
)
from gtrace.trace.names import encode_name, printable
from gtrace.trace.ragged import SAMPLE, cut, room
from gtrace.trace.statistics import row_statistics
from gtrace.trace.storage import Record

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike
    from types import TracebackType

    from numpy.typing import ArrayLike, NDArray

    from gtrace.trace.storage import Sink

#: Bytes of unfinished chunks that a writer holds at most; tensors that would exceed them get chunks of one
#: row.
_OPEN_CHUNK_BYTES = 256 * 1024 * 1024

Status = Literal["complete", "interrupted"]


def _from_numpy(value: object) -> object:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _attributes(given: Mapping[str, object], what: str) -> dict[str, Any]:
    """The attributes as they will be read back.

    Raises:
        UsageError: JSON has no word for one of them.
    """
    out = {}
    for key, value in given.items():
        if not key or not key.isprintable():
            raise UsageError(f"{what}: attribute name {key!r} is no printable text")
        try:
            out[key] = json.loads(json.dumps(value, allow_nan=False, default=_from_numpy))
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"{what}: attribute '{key}' cannot be stored ({error}); use text, finite numbers, lists, objects"
            ) from None
    return out


def root_attrs(given: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of a new trace.

    Raises:
        UsageError: one of those given is the format's own, or cannot be stored.
    """
    own = {"format": FORMAT, "version": VERSION, "status": "writing", "gtrace_version": __version__}
    for key in given:
        if key in own:
            raise UsageError(f"attribute '{key}' is set by the trace itself")
    return own | _attributes(given, "trace")


class _Stream:
    """Bookkeeping of one stream: its tensors, its committed rows, and the row that is being put together."""

    def __init__(self, kind: str) -> None:
        self.columns = statistics_of(kind)
        self.specs: dict[str, TensorSpec] = {}
        self.rows = 0
        self.last_step = -1
        self.pending: int | None = None
        self.values: dict[int, dict[str, float]] = {}

    def statistics(self) -> dict[str, NDArray[Any]]:
        """One value per tensor and statistic of the pending row."""
        table = {name: np.full(len(self.specs), c.fill, c.dtype) for name, c in self.columns.items()}
        for index, row in self.values.items():
            table["present"][index] = 1
            for name, value in row.items():
                table[name][index] = value
        return table


class TraceWriter:
    """Writes a trace step by step: ``append`` gradients, then ``commit`` the step.

    After a commit the step is in the files: it survives the death of the process (not of the machine) and
    readers that open the trace see it. Calls may come from any thread; they take turns. Used in a ``with``
    block, an exception leaves out the step that was not committed and marks the trace as interrupted.
    """

    def __init__(self, sink: Sink, path: str, attrs: Mapping[str, Any]) -> None:
        self.path = path
        self._sink = sink
        self._attrs = dict(attrs)
        self._streams: dict[StreamKey, _Stream] = {}
        self._open_bytes = 0
        self._lock = threading.RLock()
        self._closed = False
        #: Something could not be written, so the trace may miss a part of what it was given.
        self._failed = False
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
        capacity: int | None = None,
        **attrs: object,
    ) -> None:
        """Add one tensor's gradient to a step.

        The values are copied, or written, before this returns; the array is the caller's again. What is
        held in memory does not grow with steps: for tensors below 128 KiB one chunk of at most 256 KiB
        each, 256 MiB in all; larger ones go to the file at once. A step begins with its first ``append``;
        beginning a later one commits it.

        Args:
            step: the training step, rising within each (kind, optimizer, rank).
            name: any non-empty text.
            array: real numbers of any shape, stored flat (C order) as float32.
            kind: ``weight`` or ``neural``.
            optimizer: number of the optimizer that steps this tensor; each has its own steps.
            rank: number of this process among those that train together.
            n_total: (neural) how many elements the gradient had, where ``array`` is a part of it.
            capacity: (neural) elements that a row can hold, told at the tensor's first appearance; a quarter
                more than it has then by default. A gradient may have fewer; of one that has more, a sample
                is kept (``ragged.sample_indices``).
            **attrs: told at the tensor's first appearance, ignored later: ``shape`` and ``dtype`` where
                they are not the array's, ``aliases``, ``module_type``, ``stage`` (``local`` or
                ``reduced``), ``sample``, or any JSON value.

        Raises:
            UsageError: a wrong argument, a step that is committed already, a tensor given twice, or a
                weight gradient with another size.
            TraceError: the files cannot be written.
        """
        with self._lock:
            key = self._key(kind, optimizer, rank)
            stream = self._streams.setdefault(key, _Stream(kind))
            values, shape, dtype = _float32(array, name)
            width, total = room(name, kind, values.size, n_total, capacity)
            spec = stream.specs.get(name)
            if spec is None:
                told = {"shape": shape, "dtype": dtype} | ({"sample": SAMPLE} if kind == "neural" else {}) | attrs
                spec = self._new_spec(stream, name, width, told)
            if kind == "neural":
                values = cut(values, spec.size)
            elif spec.size != values.size:
                raise UsageError(
                    f"tensor '{printable(name)}', step {step}: {values.size} elements; it began with {spec.size}"
                )
            if stream.pending == step and spec.index in stream.values:
                raise UsageError(f"tensor '{printable(name)}', step {step}: appended twice")
            self._begin(key, stream, step)
            if name not in stream.specs:
                with self._storing():
                    self._sink.add_tensor(key, spec)
                stream.specs[name] = spec
                self._open_bytes += _open_chunk_bytes(spec)
            statistics = row_statistics(values)._asdict()
            if kind == "neural":
                statistics |= {"n_valid": values.size, "n_total": total}
            with self._storing():
                self._sink.write_row(key, spec, stream.rows, values)
            stream.values[spec.index] = statistics

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

        Every (kind, optimizer, rank) to which something was appended is committed; with the keywords only
        those that they select. A step without any gradient is recorded too, for the weight gradients of
        optimizer 0 on rank 0 where the keywords do not say otherwise.

        Args:
            step: the step that was appended to.
            kind: as in ``append``.
            optimizer: as in ``append``.
            rank: as in ``append``.
            **scalars: ``loss``, ``lr``, ``grad_scale``, ``found_inf``, ``clip_norm``, ``micro_batches``,
                ``time`` (seconds since 1970; now where it is not given). None means unknown.

        Raises:
            UsageError: a wrong argument, or another step than the one appended to.
            TraceError: the files cannot be written; the step is not committed.
        """
        with self._lock:
            numbers = _scalars(scalars)
            default = self._key(
                "weight" if kind is None else kind,
                0 if optimizer is None else optimizer,
                0 if rank is None else rank,
            )
            chosen = [
                key
                for key, stream in self._streams.items()
                if stream.pending is not None
                and kind in (None, key.kind)
                and optimizer in (None, key.optimizer)
                and rank in (None, key.rank)
            ]
            for key in chosen:
                if self._streams[key].pending != step:
                    raise UsageError(f"commit of step {step}, but step {self._streams[key].pending} was appended to")
            if not chosen:
                self._begin(default, self._streams.setdefault(default, _Stream(default.kind)), step)
                chosen = [default]
            for key in chosen:
                self._commit(key, self._streams[key], numbers)

    def set_attrs(self, **attrs: object) -> None:
        """Set attributes of the trace that are known only later; ``close`` stores them.

        Raises:
            UsageError: an attribute is the format's own, or cannot be stored.
        """
        with self._lock:
            self._check_open()
            told = root_attrs(attrs)
            self._attrs |= {key: told[key] for key in attrs}

    def close(self, status: Status = "complete") -> None:
        """Commit what is pending and finish the trace. Closing again does nothing.

        Args:
            status: ``interrupted`` when the run that was recorded did not reach its end; so it is too when
                something could not be written.

        Raises:
            TraceError: the files cannot be written.
        """
        with self._lock:
            if not self._owned():
                return
            try:
                for key, stream in self._streams.items():
                    if stream.pending is not None:
                        self._commit(key, stream, _scalars({}))
            finally:
                self._finish(status)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        with self._lock:
            if self._owned():
                self._finish("interrupted")

    def _owned(self) -> bool:
        """Whether there is something to close: a forked child holds a copy of a writer whose files are not its own."""
        return not self._closed and os.getpid() == self._pid

    def _finish(self, status: Status) -> None:
        self._closed = True
        with self._storing():
            self._sink.close({**self._attrs, "status": "interrupted" if self._failed else status})

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.path}: the trace was closed; nothing can be added")
        if os.getpid() != self._pid:
            raise UsageError(f"{self.path}: this process was forked from the one that writes the trace")

    def _key(self, kind: str, optimizer: int, rank: int) -> StreamKey:
        self._check_open()
        if kind not in KINDS:
            raise UsageError(f"kind '{printable(kind)}' of gradient; {suggest(kind, KINDS)}")
        for what, number in (("optimizer", optimizer), ("rank", rank)):
            if not 0 <= number < 10**9:
                raise UsageError(f"{what} {number}: must be a number from 0 up")
        return StreamKey(int(rank), kind, int(optimizer))

    def _begin(self, key: StreamKey, stream: _Stream, step: int) -> None:
        """Make ``step`` the pending one; an earlier one that is pending is whole now."""
        if stream.pending == step:
            return
        last = stream.last_step if stream.pending is None else stream.pending
        if not last < step < 2**63:
            came = f", and step {last} came before" if last >= 0 else ""
            raise UsageError(f"{self.path}: step {step}: steps must rise from 0 up{came}")
        if stream.pending is not None:
            self._commit(key, stream, _scalars({}))
        stream.pending = int(step)

    def _commit(self, key: StreamKey, stream: _Stream, scalars: Mapping[str, float]) -> None:
        assert stream.pending is not None
        record = Record(stream.pending, scalars, stream.statistics())
        with self._storing():
            self._sink.commit(key, stream.rows, record)
        stream.last_step, stream.pending = stream.pending, None
        stream.rows += 1
        stream.values = {}

    def _new_spec(self, stream: _Stream, name: str, size: int, attrs: Mapping[str, object]) -> TensorSpec:
        what = f"tensor '{printable(name)}'"
        entry = encode_name(name)
        for key in ("name", "index"):
            if key in attrs:
                raise UsageError(f"{what}: attribute '{key}' is set by the trace itself")
        dtype = str(attrs["dtype"]).removeprefix("torch.")
        told = _attributes({key: value for key, value in attrs.items() if value is not None}, what)
        told["dtype"] = dtype
        fault = attribute_fault(told, size)
        if fault is not None:
            raise UsageError(f"{what}: {fault}")
        index = len(stream.specs)
        rows, elements = chunking(size)
        if rows > 1 and self._open_bytes + rows * elements * VALUES.itemsize > _OPEN_CHUNK_BYTES:
            rows = 1
        return TensorSpec(index, name, entry, size, rows, elements, {"name": name, "index": index, **told})

    @contextmanager
    def _storing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._failed = True
            raise write_error(self.path, error) from error


def write_error(path: str | PathLike[str], error: Exception) -> TraceError:
    """What to raise where a trace cannot be written."""
    # HDF5 puts a report of several lines where the system's word for the error is enough.
    number = getattr(error, "errno", None)
    return TraceError(f"{path}: cannot be written ({os.strerror(number) if number else printable(str(error))})")


def _open_chunk_bytes(spec: TensorSpec) -> int:
    return spec.chunk_rows * spec.chunk_elements * VALUES.itemsize if spec.chunk_rows > 1 else 0


def _float32(array: ArrayLike, name: str) -> tuple[NDArray[np.float32], list[int], str]:
    """Flat float32 values, the shape and the type that they came with."""
    given = np.asarray(array)
    if given.dtype.kind not in "fiub":
        raise UsageError(f"tensor '{printable(name)}': {given.dtype} values; a trace takes real numbers")
    # A float64 beyond float32 becomes infinite here, and is counted as such.
    with np.errstate(over="ignore", invalid="ignore"):
        values = np.ascontiguousarray(given, np.float32).reshape(-1)
    return values, list(given.shape), given.dtype.name


def _scalars(given: Mapping[str, float | None]) -> dict[str, float]:
    numbers = dict.fromkeys(SCALARS, math.nan) | {"time": time.time()}
    for name, value in given.items():
        if name not in numbers:
            raise UsageError(f"commit: no number '{name}' of a step; {suggest(name, SCALARS)}")
        if value is not None:
            numbers[name] = float(value)
    return numbers


def create_trace(
    path: str | PathLike[str], *, force: bool = False, attrs: Mapping[str, Any] | None = None
) -> TraceWriter:
    """Start a trace: a Zarr v3 folder where the path ends in ``.zarr``, an HDF5 file for ``.h5`` and ``.hdf5``.

    An empty trace is in its place when this returns.

    Args:
        path: where; its folder must exist.
        force: replace a trace, or any file, that is there. It goes once the new one has been started beside
            it. A folder that is not a gtrace trace is never touched.
        attrs: what the trace says about itself: JSON values under any names (``argv``, ``model``, ``seed``,
            ...).

    Raises:
        UsageError: another suffix, no such folder, or attributes that cannot be stored.
        OutputExistsError: something is there, and it stays as it was.
        TraceError: nothing can be written there.
    """
    place = Path(os.path.realpath(path))
    start = root_attrs(attrs or {})
    sink: Sink
    try:
        if place.suffix == ".zarr":
            from gtrace.trace.zarr_write import ZarrSink, start_folder

            start_folder(place, start, force=force)
            sink = ZarrSink(place)
        elif place.suffix in (".h5", ".hdf5"):
            from gtrace.trace.hdf5_write import Hdf5Sink

            sink = Hdf5Sink(place, start, force=force)
        else:
            raise UsageError(f"{path}: a trace ends in .zarr, .h5 or .hdf5")
    except (OSError, RuntimeError) as error:
        raise write_error(path, error) from error
    return TraceWriter(sink, os.fspath(path), start)
