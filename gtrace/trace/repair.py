"""Makes a trace that is damaged, or whose writer was killed, usable again, with everything in it that is right."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError, UsageError
from gtrace.trace import format as layout
from gtrace.trace.files import beside, move_in, remove
from gtrace.trace.journal import being_written
from gtrace.trace.opening import open_source
from gtrace.trace.remote import place_of
from gtrace.trace.storage import Record
from gtrace.trace.verify import CheckReport, check_trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gtrace.trace.format import TensorSpec
    from gtrace.trace.storage import Sink, StreamSource
    from gtrace.trace.verify import StreamFindings

_BLOCK_BYTES = 512 * 1024 * 1024
#: Faults that the repaired trace remembers in words.
_TOLD = 20


@dataclass(frozen=True)
class Repair:
    """What a repair did.

    Attributes:
        report: of the check before it.
        changed: whether there was anything to do.
        backup: where the damaged trace is now, None where nothing of it is missing in the repaired one.
    """

    report: CheckReport
    changed: bool
    backup: Path | None


def open_sink(place: Path, attrs: dict[str, Any], *, is_file: bool) -> Sink:
    """A new trace at a place that is free."""
    if is_file:
        from gtrace.trace.hdf5_write import Hdf5Sink

        return Hdf5Sink(place, attrs, force=False)
    from gtrace.trace.zarr_write import ZarrSink, start_folder

    start_folder(place, attrs, force=False)
    return ZarrSink(place)


def repair_trace(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> Repair:
    """Check a trace and put one in its place that has every gradient that is right, and no other.

    The new trace is written beside the old one and moved in when it is whole. Gradients that are damaged are absent
    in it; numbers about gradients are computed anew. Where a gradient or a number about a step is lost, the old trace
    stays beside it, as ``NAME.damaged``. Leftovers of killed writers are deleted.

    Raises:
        UsageError: a process writes the trace now, or it is not on this machine.
        TraceError: nothing in it can be read, or the new one cannot be written.
    """
    if isinstance(place_of(path), str):
        raise UsageError(f"{path}: is not on this machine, so it is only read; copy it here to repair it")
    place = Path(os.path.realpath(place_of(path)))
    if place.exists() and being_written(place):
        raise UsageError(f"{path}: is being written; repair it when its run is over")
    report = check_trace(path, progress)
    if report.clean:
        return Repair(report, changed=False, backup=None)
    is_file = place.is_file()
    new = beside(place, "repair")
    backup = _free_backup(place) if report.faults else None
    try:
        remove(new)
        _rebuild(place, new, report, is_file=is_file)
        if backup is not None:
            os.rename(place, backup)
            try:
                os.rename(new, place)
            except OSError:
                os.rename(backup, place)
                raise
        else:
            move_in(new, place, force=True)
    except OSError as error:
        raise TraceError(f"{path}: the repaired trace cannot be written ({error.strerror or error})") from error
    finally:
        remove(new)
    for leftover in report.leftovers:
        remove(leftover)
    return Repair(report, changed=True, backup=backup)


def _free_backup(place: Path) -> Path:
    number, free = 2, place.with_name(f"{place.name}.damaged")
    while os.path.lexists(free):
        number, free = number + 1, place.with_name(f"{place.name}.damaged{number}")
    return free


def _rebuild(place: Path, new: Path, report: CheckReport, *, is_file: bool) -> None:
    status = "complete" if report.status == "complete" else "interrupted"
    attrs = dict(report.attrs)
    if report.faults:
        attrs["repaired"] = {"lost": report.wrong, "faults": [fault.what for fault in report.faults[:_TOLD]]}
    source = open_source(place, lambda error: None)
    sink = open_sink(new, {**attrs, "status": "writing"}, is_file=is_file)
    try:
        for found in report.streams:
            stream = next(stream for stream in source.streams if stream.key == found.stream.key)
            copy_right(replace(found, stream=stream), sink)
        sink.close({**attrs, "status": status})
    finally:
        source.close()


def copy_right(found: StreamFindings, sink: Sink) -> None:
    """Write the gradients of a stream that are right, row by row, with numbers that were computed from them."""
    stream = found.stream
    kept = np.flatnonzero(found.right.any(axis=0)).tolist()
    specs = [renumbered(found.specs[place], index) for index, place in enumerate(kept)]
    for spec in specs:
        sink.add_tensor(stream.key, spec)
    extras = found.extras
    columns = {**layout.statistics_of(stream.key.kind), **{name: layout.EXTRAS[name] for name in extras}}
    blocks = Blocks(stream)
    for row, step in enumerate(stream.steps.tolist()):
        statistics = {name: np.full(len(specs), column.fill, column.dtype) for name, column in columns.items()}
        for index, place in enumerate(kept):
            if found.right[row, place]:
                sink.write_row(stream.key, specs[index], row, blocks.read(found.specs[place], row))
                statistics["present"][index] = 1
                for name, value in found.statistics[row, place].items():
                    statistics[name][index] = value
                for name, table in extras.items():
                    if found.specs[place].index < table.shape[1]:
                        statistics[name][index] = table[row, found.specs[place].index]
        scalars = {name: float(values[row]) for name, values in found.scalars.items()}
        sink.commit(stream.key, row, Record(step, scalars, statistics))


def renumbered(spec: TensorSpec, index: int) -> TensorSpec:
    """The tensor with another index, in chunks of the size that a writer chooses."""
    rows, elements = layout.chunking(spec.size)
    if spec.sketched:
        elements = spec.chunk_elements
    if spec.chunk_rows == 1:
        rows = 1
    return replace(spec, index=index, chunk_rows=rows, chunk_elements=elements, attrs={**spec.attrs, "index": index})


class Blocks:
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
            if len(rows) > 1 and self._bytes + rows.nbytes <= _BLOCK_BYTES:
                self._held[spec.index] = first, rows
                self._bytes += rows.nbytes
        return np.ascontiguousarray(rows[row - first], spec.column.dtype)
