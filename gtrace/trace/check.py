"""Checks everything in a trace and reports faults; repairs a trace by keeping everything that is right."""

from __future__ import annotations

import math
import os
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gtrace.errors import TraceError, UsageError
from gtrace.trace import format as layout
from gtrace.trace.convert import write_source
from gtrace.trace.files import dead_leftovers, move_in, new_beside, remove
from gtrace.trace.format import SKETCH, TensorSpec
from gtrace.trace.journal import NAME, being_written
from gtrace.trace.reader import open_source
from gtrace.trace.remote import is_hdf5, place_of
from gtrace.trace.rows import RowStatistics, checksum, checksum_bytes, row_statistics, verify
from gtrace.trace.sketches import SketchPlan, unpack_row
from gtrace.trace.source import MemoryStream, Stream, TraceSource

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray


T = TypeVar("T")

_NORM_TOLERANCE = 1e-6


class Fault(NamedTuple):
    """One fault.

    Attributes:
        what: the message, one line.
        stream: group of the stream, such as ``rank00000/weight_grad``; empty if it is not about one.
        tensor: name of the tensor, None if it is not about one.
        step: the training step, None if it is not about one.
    """

    what: str
    stream: str = ""
    tensor: str | None = None
    step: int | None = None


@dataclass(frozen=True)
class CheckReport:
    """The result of a check.

    Attributes:
        path: the trace, or its address.
        status: the trace's own status: ``complete``, ``interrupted`` or ``writing``.
        live: a process is writing it now.
        unfinished: its writer was killed: rows are in a journal, or an HDF5 trace is still a folder.
        leftovers: files and folders of killed writers beside it and in it.
        steps: committed steps, of all streams.
        gradients: number of gradients that it should hold.
        wrong: number of these that cannot be read back unchanged.
        faults: all faults, in the order of the trace.
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

    @property
    def clean(self) -> bool:
        """Nothing is wrong and there is nothing to repair."""
        return not (self.faults or self.leftovers or self.unfinished or self.status == "writing") or self.live


def check_trace(path: str | os.PathLike[str]) -> CheckReport:
    """Read every committed value of a trace and verify it.

    If a process is writing the trace, its committed part is checked.

    Args:
        path: the trace; for an address, writers and their leftovers are unknown.

    Raises:
        TraceError: nothing can be read: it is not a trace, a newer gtrace wrote it, or it is damaged as a whole.
    """
    place = place_of(path)
    if isinstance(place, Path):
        place = Path(os.path.realpath(place))
    faults: list[Fault] = []
    with closing(open_source(place, lambda error: faults.append(Fault(str(error))))) as source:
        return _check(path, place, source, faults)[0]


def _check(
    path: str | os.PathLike[str], place: Path | str, source: TraceSource, faults: list[Fault]
) -> tuple[CheckReport, list[MemoryStream]]:
    live = being_written(place)
    gradients = wrong = 0
    streams = []
    for stream in source.streams:
        present, right = _examine(stream, faults)
        gradients += present
        wrong += present - int(right.statistic("present").sum())
        streams.append(right)
    unfinished, leftovers = False, list[Path]()
    if isinstance(place, Path):
        journals = (place / _group(stream) / "step" / NAME for stream in source.streams)
        unfinished = not place.is_file() and (is_hdf5(place) or any(map(os.path.lexists, journals)))
        # Files alone: a tensor's folder may have such a name, too.
        unfinished_files = (path for path in sorted(place.rglob("*.partial")) if path.is_file())
        leftovers = [] if live else [*dead_leftovers(place), *unfinished_files]
    report = CheckReport(
        path=place_of(path),
        status=str(source.attrs.get("status", "interrupted")),
        live=live,
        unfinished=unfinished,
        leftovers=tuple(leftovers),
        steps=sum(stream.steps.size for stream in source.streams),
        gradients=gradients,
        wrong=wrong,
        faults=tuple(faults),
    )
    return report, streams


def _group(stream: Stream) -> str:
    return f"{stream.key.rank_group}/{stream.key.group}"


def _presence(tables: dict[str, NDArray[Any] | None], rows: int, columns: int) -> NDArray[np.bool_]:
    """Which tensors are present at which rows; if that table is damaged, concluded from the others."""
    out = np.zeros((rows, columns), bool)
    known = layout.STATISTICS if tables["present"] is None else {"present": layout.STATISTICS["present"]}
    for name, column in known.items():
        table = tables[name]
        if table is not None:
            there = ~np.isnan(table) if math.isnan(column.fill) else table != column.fill
            out |= there[:, :columns]
    return out


def _examine(stream: Stream, faults: list[Fault]) -> tuple[int, MemoryStream]:
    """The number of gradients that a stream should hold, and the stream with those that are right."""
    group, rows = _group(stream), stream.steps.size

    def readable(read: Callable[[str], T], name: str) -> T | None:
        try:
            return read(name)
        except TraceError as error:
            if name != "present":  # that fault was reported when the stream was opened
                faults.append(Fault(str(error), group))
            return None

    tables = {name: readable(stream.statistic, name) for name in layout.STATISTICS}
    columns = max((spec.index + 1 for spec in stream.specs), default=0)
    present = _presence(tables, rows, columns)
    own = layout.statistics_of(stream.key.kind)
    right = {name: np.full((rows, columns), column.fill, column.dtype) for name, column in own.items()}
    for spec in stream.specs:
        block: tuple[int, NDArray[Any]] = (0, np.empty((0, 0), np.float32))
        for row in range(rows):
            step = int(stream.steps[row])
            cached = block[0] <= row < block[0] + len(block[1])
            if not present[row, spec.index]:
                if cached and not spec.sketched and not np.isnan(block[1][row - block[0]]).all():
                    faults.append(Fault("values although the tensor is absent", group, spec.name, step))
                continue
            try:
                if not cached:
                    block = stream.read_rows(spec, row)
                numbers = _verified(stream, spec, row, block[1][row - block[0]], tables)
            except TraceError as error:
                faults.append(Fault(str(error), group, spec.name, step))
                continue
            for name, value in {"present": 1, **numbers}.items():
                right[name][row, spec.index] = value
            differing = _differing(numbers, tables, row, spec.index)
            if differing:
                faults.append(Fault(f"stored {differing} does not match the values", group, spec.name, step))
    count = int(present[:, [spec.index for spec in stream.specs]].sum())
    scalars = {name: readable(stream.scalar, name) for name in layout.SCALARS}
    kept = right["present"] != 0
    right |= {
        name: np.where(kept, table[:, :columns], column.fill)
        for name, column in layout.EXTRAS.items()
        if (table := readable(stream.optional, name)) is not None
    }
    unknown = np.full(rows, np.nan)
    known = {name: unknown if values is None else values for name, values in scalars.items()}
    return count, MemoryStream(stream.key, stream.steps, stream.specs, known, right, stream.read_rows)


def _verified(
    stream: Stream, spec: TensorSpec, row: int, stored: NDArray[Any], tables: dict[str, NDArray[Any] | None]
) -> dict[str, float]:
    """Numbers about one gradient, from its values, or its sketches and the tables; TraceError if they are damaged."""
    about = stream.about(spec, row)
    numbers: dict[str, float] = {}
    valid = spec.size
    if spec.sketched or stream.key.kind == "neural":
        found = stream.lengths(spec, slice(row, row + 1))
        valid = int(found["n_valid"][0])
        if stream.key.kind == "neural":
            numbers = {name: int(values[0]) for name, values in found.items()}
    crc = tables["crc32c"]
    values: NDArray[Any] = stored if spec.sketched else np.ascontiguousarray(stored[:valid], np.float32)
    computed = checksum_bytes(values) if spec.sketched else checksum(values)
    if crc is not None:
        verify(computed, crc[row, spec.index], about)
    if not spec.sketched:
        return row_statistics(values)._asdict() | numbers
    unpack_row(stored, spec.attrs, SketchPlan.read(spec.attrs[SKETCH]).specs, valid, about)
    # What a sketch does not hold exactly is taken from the tables, if they can be read.
    for name in RowStatistics._fields:
        table = tables[name]
        numbers[name] = layout.STATISTICS[name].fill if table is None else table[row, spec.index].item()
    return numbers | {"crc32c": computed}


def _differing(numbers: dict[str, float], tables: dict[str, NDArray[Any] | None], row: int, column: int) -> str:
    out = []
    for name in RowStatistics._fields:
        table = tables[name]
        if table is not None:
            stored, value = float(table[row, column]), float(numbers[name])
            tolerance = _NORM_TOLERANCE * abs(value) if name == "norm2" else 0.0
            if not abs(stored - value) <= tolerance:
                out.append(name)
    return ", ".join(out)


#: number of faults that the repaired trace keeps in words
_TOLD = 20


@dataclass(frozen=True)
class Repair:
    """The result of a repair.

    Attributes:
        report: the check before it.
        changed: whether there was something to repair.
        backup: path of the damaged trace, None if the repaired one lacks nothing.
    """

    report: CheckReport
    changed: bool
    backup: Path | None


def repair_trace(path: str | os.PathLike[str]) -> Repair:
    """Check a trace and replace it by one that has every gradient that is right, and no other.

    The new trace is written beside the old one and moved in when it is complete. Damaged gradients are absent
    in it; numbers about gradients are computed again. If a gradient or a number about a step is lost, the old trace
    stays beside it, as ``NAME.damaged``. Leftovers of killed writers are deleted.

    Raises:
        UsageError: a process is writing the trace, or it is not on this machine.
        TraceError: nothing can be read, or the new trace cannot be written.
    """
    if isinstance(place_of(path), str):
        raise UsageError(f"{path}: is not on this machine and can only be read; copy it here to repair it")
    place = Path(os.path.realpath(place_of(path)))
    if place.exists() and being_written(place):
        raise UsageError(f"{path}: a program is still writing it; repair it when its run is over")
    faults: list[Fault] = []
    with closing(open_source(place, lambda error: faults.append(Fault(str(error))))) as source:
        report, streams = _check(path, place, source, faults)
        if report.clean:
            return Repair(report, changed=False, backup=None)
        backup = _free_backup(place) if faults else None
        attrs = {**source.attrs, "status": "complete" if report.status == "complete" else "interrupted"}
        if report.faults:
            attrs["repaired"] = {"lost": report.wrong, "faults": [fault.what for fault in report.faults[:_TOLD]]}
        with new_beside(place, "repair", f"{path}: the repaired trace") as new:
            ranks = {
                name: {**part, "status": "interrupted"} if part.get("status") == "writing" else part
                for name, part in source.ranks.items()
            }
            right = TraceSource(str(new), attrs, streams, ranks=ranks)
            write_source(right, new, hdf5=place.is_file() or is_hdf5(place), sharded=False)
            move_in(new, place, force=True, backup=backup)
    for leftover in report.leftovers:
        # Leftovers inside the old folder went with it.
        if os.path.lexists(leftover):
            remove(leftover)
    return Repair(report, changed=True, backup=backup)


def _free_backup(place: Path) -> Path:
    number, free = 2, place.with_name(f"{place.name}.damaged")
    while os.path.lexists(free):
        number, free = number + 1, place.with_name(f"{place.name}.damaged{number}")
    return free
