"""Looks at everything in a trace and says what is wrong; makes one with everything that is right."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import TraceError, UsageError, printable
from gtrace.trace import format as layout
from gtrace.trace.files import beside, dead_leftovers, move_in, remove
from gtrace.trace.finished import HeldRows, renumbered
from gtrace.trace.format import SKETCH, Record
from gtrace.trace.io.remote import is_hdf5, place_of
from gtrace.trace.journal import NAME, being_written
from gtrace.trace.reader import lengths, open_source
from gtrace.trace.rows import RowStatistics, checksum, checksum_bytes, row_statistics
from gtrace.trace.sketches import SketchPlan, unpack_row
from gtrace.trace.zarr_write import ZarrSink, start_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.format import Sink, StreamSource, TensorSpec, TraceSource


_NORM_TOLERANCE = 1e-6


class Fault(NamedTuple):
    """One thing that is wrong.

    Attributes:
        what: the message, one line.
        stream: group of the stream, such as ``rank00000/weight_grad``; empty where it is not about one.
        tensor: name of the tensor, None where it is not about one.
        step: the training step, None where it is not about one.
    """

    what: str
    stream: str = ""
    tensor: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class StreamFindings:
    """What of a stream can be used.

    Attributes:
        stream: where it is read from.
        specs: all its tensors whose metadata are right, by index.
        present: gradients that it says are there.
        right: bool (rows, specs): present, and read back right.
        statistics: (row, spec's place) -> statistics of the values that are right, and their lengths.
        scalars: name -> (rows,), NaN where it could not be read.
        extras: name -> (rows, tensors) of the further numbers that it has and that could be read.
    """

    stream: StreamSource
    specs: Sequence[TensorSpec]
    present: int
    right: NDArray[np.bool_]
    statistics: dict[tuple[int, int], dict[str, float]]
    scalars: dict[str, NDArray[np.float64]]
    extras: dict[str, NDArray[Any]]


@dataclass(frozen=True)
class CheckReport:
    """What a check found.

    Attributes:
        path: the trace, or its address.
        status: as it says itself: ``complete``, ``interrupted`` or ``writing``.
        live: a process is writing it now.
        unfinished: its writer was killed: rows are in a journal, or an HDF5 trace is still a folder.
        leftovers: files and folders of killed writers beside it and in it.
        steps: committed steps, of all streams.
        gradients: gradients that it says are present.
        wrong: gradients among them that do not read back right.
        faults: everything that is wrong, in the order of the trace.
        attrs: what the trace says about itself, without the status.
        streams: what can be used.
    """

    path: Path | str
    status: str
    live: bool
    unfinished: bool
    leftovers: tuple[Path, ...]
    steps: int
    gradients: int
    wrong: int
    faults: tuple[Fault, ...]
    attrs: dict[str, Any] = field(repr=False)
    streams: tuple[StreamFindings, ...] = field(repr=False)

    @property
    def clean(self) -> bool:
        """Nothing is wrong and there is nothing to repair."""
        return not (self.faults or self.leftovers or self.unfinished or self.status == "writing") or self.live


def check_trace(path: str | os.PathLike[str], progress: Callable[[int], None] | None = None) -> CheckReport:
    """Read every committed value of a trace and verify it.

    A trace that is being written is checked as far as it is committed.

    Args:
        path: the trace; at an address nothing is known about writers and what they have left.
        progress: called with the number of gradients that were verified since the call before.

    Raises:
        TraceError: nothing in it can be read: it is no trace, of a newer version, or damaged as a whole.
    """
    place = place_of(path)
    if isinstance(place, Path):
        place = Path(os.path.realpath(place))
    faults: list[Fault] = []
    live = being_written(place)
    source = open_source(place, lambda error: faults.append(Fault(str(error))))
    try:
        findings = tuple(_examine(stream, faults, progress or (lambda count: None)) for stream in source.streams)
        status = str(source.attrs.get("status", "interrupted"))
        return CheckReport(
            path=place_of(path),
            status=status,
            live=live,
            unfinished=_unfinished(place, source),
            leftovers=() if live else tuple(_leftovers(place)),
            steps=sum(found.right.shape[0] for found in findings),
            gradients=sum(found.present for found in findings),
            wrong=sum(found.present - int(found.right.sum()) for found in findings),
            faults=tuple(faults),
            attrs={key: value for key, value in source.attrs.items() if key != "status"},
            streams=findings,
        )
    finally:
        source.close()


def _unfinished(place: Path | str, source: TraceSource) -> bool:
    if isinstance(place, str):
        return False
    if place.is_file():
        return False
    return is_hdf5(place) or any(os.path.lexists(place / _group(stream) / "step" / NAME) for stream in source.streams)


def _leftovers(place: Path | str) -> list[Path]:
    if isinstance(place, str):
        return []
    inside = sorted(place.rglob("*.partial")) if place.is_dir() else []
    return dead_leftovers(place) + inside


def _group(stream: StreamSource) -> str:
    return f"{stream.key.rank_group}/{stream.key.group}"


def _table(stream: StreamSource, name: str, faults: list[Fault]) -> NDArray[Any] | None:
    try:
        return stream.statistic(name)
    except TraceError as error:
        if name != "present":  # that one was told when the stream was opened
            faults.append(Fault(str(error), _group(stream)))
        return None


def _presence(tables: dict[str, NDArray[Any] | None], rows: int, columns: int) -> NDArray[np.bool_]:
    """Where tensors are present; concluded from other tables where that one is damaged."""
    out = np.zeros((rows, columns), bool)

    def mark(where: NDArray[np.bool_]) -> None:
        width = min(columns, where.shape[1])
        out[:, :width] |= where[:, :width]

    present = tables["present"]
    if present is not None:
        mark(present != 0)
        return out
    for name, column in layout.STATISTICS.items():
        table = tables[name]
        if table is not None:
            mark(~np.isnan(table) if math.isnan(column.fill) else table != column.fill)
    return out


def _examine(stream: StreamSource, faults: list[Fault], progress: Callable[[int], None]) -> StreamFindings:
    group = _group(stream)
    specs = sorted(stream.specs, key=lambda spec: spec.index)
    rows = stream.steps.size
    tables = {name: _table(stream, name, faults) for name in layout.STATISTICS}
    columns = max((spec.index + 1 for spec in specs), default=0)
    present = _presence(tables, rows, columns)
    right = np.zeros((rows, len(specs)), bool)
    statistics: dict[tuple[int, int], dict[str, float]] = {}
    for place, spec in enumerate(specs):
        block: tuple[int, NDArray[Any]] = (0, np.empty((0, 0), np.float32))
        for row in range(rows):
            step = int(stream.steps[row])
            cached = block[0] <= row < block[0] + len(block[1])
            if not present[row, spec.index]:
                if cached and not spec.sketched and not np.isnan(block[1][row - block[0]]).all():
                    faults.append(Fault("values where the tensor is absent", group, spec.name, step))
                continue
            try:
                if not cached:
                    block = stream.read_rows(spec, row)
                told = _verified(stream, spec, row, block[1][row - block[0]], tables)
            except TraceError as error:
                faults.append(Fault(str(error), group, spec.name, step))
                continue
            finally:
                progress(1)
            right[row, place] = True
            statistics[row, place] = told
            differing = _differing(told, tables, row, spec.index)
            if differing:
                faults.append(Fault(f"stored {differing} is not that of the values", group, spec.name, step))
    count = int(present[:, [spec.index for spec in specs]].sum())
    return StreamFindings(stream, specs, count, right, statistics, _scalars(stream, faults), _extras(stream, faults))


def _verified(
    stream: StreamSource,
    spec: TensorSpec,
    row: int,
    stored: NDArray[Any],
    tables: dict[str, NDArray[Any] | None],
) -> dict[str, float]:
    """What is known about one gradient, from its values or from its sketches and the tables.

    Raises:
        TraceError: they are not those that were committed.
    """
    about = f"tensor '{printable(spec.name)}', step {stream.steps[row]}"
    told: dict[str, float] = {}
    valid = spec.size
    if spec.sketched or stream.key.kind == "neural":
        found = lengths(stream, spec, slice(row, row + 1))
        valid = int(found["n_valid"][0])
        if stream.key.kind == "neural":
            told = {name: int(values[0]) for name, values in found.items()}
    crc = tables["crc32c"]
    values: NDArray[Any] = stored if spec.sketched else np.ascontiguousarray(stored[:valid], np.float32)
    computed = checksum_bytes(values) if spec.sketched else checksum(values)
    if crc is not None and computed != crc[row, spec.index]:
        raise TraceError(f"{about}: checksum mismatch with the commit record")
    if not spec.sketched:
        return row_statistics(values)._asdict() | told
    unpack_row(stored, spec.attrs, SketchPlan.read(spec.attrs[SKETCH]).specs, valid, about)
    # What a sketch does not tell exactly is taken from the tables, where they can be read.
    for name in RowStatistics._fields:
        table = tables[name]
        told[name] = layout.STATISTICS[name].fill if table is None else table[row, spec.index].item()
    return told | {"crc32c": computed}


def _differing(told: dict[str, float], tables: dict[str, NDArray[Any] | None], row: int, column: int) -> str:
    """Names of the stored statistics that are not those of the values."""
    out = []
    for name in RowStatistics._fields:
        table = tables[name]
        if table is not None:
            stored, value = float(table[row, column]), float(told[name])
            tolerance = _NORM_TOLERANCE * abs(value) if name == "norm2" else 0.0
            if not abs(stored - value) <= tolerance:
                out.append(name)
    return ", ".join(out)


def _extras(stream: StreamSource, faults: list[Fault]) -> dict[str, NDArray[Any]]:
    out = {}
    for name in layout.EXTRAS:
        try:
            table = stream.further(name)
        except TraceError as error:
            faults.append(Fault(str(error), _group(stream)))
            continue
        if table is not None:
            out[name] = table
    return out


def _scalars(stream: StreamSource, faults: list[Fault]) -> dict[str, NDArray[np.float64]]:
    out = {}
    for name in layout.SCALARS:
        try:
            out[name] = stream.scalar(name)
        except TraceError as error:
            faults.append(Fault(str(error), _group(stream)))
            out[name] = np.full(stream.steps.size, np.nan)
    return out


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


def _open_sink(place: Path, attrs: dict[str, Any], *, hdf5: bool) -> Sink:
    """A new trace at a place that is free."""
    if hdf5:
        from gtrace.trace.hdf5 import Hdf5Sink

        return Hdf5Sink(place, attrs, force=False)
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
    new = beside(place, "repair")
    backup = _free_backup(place) if report.faults else None
    try:
        remove(new)
        _rebuild(place, new, report)
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
        # Those inside of a folder went with it.
        if os.path.lexists(leftover):
            remove(leftover)
    return Repair(report, changed=True, backup=backup)


def _free_backup(place: Path) -> Path:
    number, free = 2, place.with_name(f"{place.name}.damaged")
    while os.path.lexists(free):
        number, free = number + 1, place.with_name(f"{place.name}.damaged{number}")
    return free


def _rebuild(place: Path, new: Path, report: CheckReport) -> None:
    status = "complete" if report.status == "complete" else "interrupted"
    attrs = dict(report.attrs)
    if report.faults:
        attrs["repaired"] = {"lost": report.wrong, "faults": [fault.what for fault in report.faults[:_TOLD]]}
    source = open_source(place, lambda error: None)
    sink = _open_sink(new, {**attrs, "status": "writing"}, hdf5=place.is_file() or is_hdf5(place))
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
    blocks = HeldRows(stream)
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
