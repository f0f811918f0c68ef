"""Rewrites a finished trace: into shards (fewer files), from Zarr to HDF5 and back, or into sketches."""

from __future__ import annotations

import math
import os
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.errors import OutputExistsError, TraceError, UsageError, keep_inputs
from gtrace.trace.choose import choose_infos
from gtrace.trace.files import check_place, disk_bytes, move_in, new_beside, place_for
from gtrace.trace.format import EXTRAS, SKETCH, StreamKey
from gtrace.trace.journal import refuse_living
from gtrace.trace.reader import TensorInfo, Trace, open_source, open_trace
from gtrace.trace.remote import RemoteFiles, is_hdf5, place_of
from gtrace.trace.sketches import DEFAULT_SKETCHES, SketchPlan, SketchRow
from gtrace.trace.writer import TraceWriter, create_trace
from gtrace.trace.zarr import write_zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gtrace.trace.source import TraceSource


def pack_trace(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, force: bool = False) -> Path:
    """Rewrite a finished trace with the same content and fingerprint.

    Args:
        path: the trace.
        out: the new trace: ``.zarr`` for shards, ``.h5`` or ``.hdf5`` for HDF5. By default the shards replace a Zarr
            trace once they are complete.
        force: replace a trace at ``out``.

    Returns:
        the path of the new trace.

    Raises:
        UsageError: the trace is not finished, there is nothing to pack, or it is not on this machine and there is
            no ``out``.
        OutputExistsError: something is at ``out`` and ``force`` is off, or it is not a trace.
        TraceError: the trace is damaged, or the new one cannot be written.
    """
    place = place_of(path)
    if isinstance(place, Path):
        place = Path(os.path.realpath(place))
    elif out is None:
        raise UsageError(f"{path}: is not on this machine and can only be read; -o NAME.zarr packs it here")
    target = place_for(place if out is None else out)
    with closing(open_source(place)) as source:
        if source.attrs.get("status") not in ("complete", "interrupted"):
            raise UsageError(f"{path}: not finished, or its writer was killed; see `gtrace trace check --repair`")
        if out is None and is_hdf5(target):
            raise UsageError(f"{path}: HDF5 is already a single file; -o NAME.zarr makes a Zarr trace of it")
        if target == place and out is not None and not force:
            raise OutputExistsError(f"{out}: is the trace itself; leave out -o to replace it")
        if target != place:
            keep_inputs(out or target, place)
            check_place(target, force=force)
        with new_beside(target, "pack", f"{target}:") as new:
            write_source(source, new, hdf5=is_hdf5(target), sharded=True)
            with Trace(open_source(new)) as written:
                if written.fingerprint != Trace(source).fingerprint:
                    raise TraceError(f"{new}: reads back differently; the disk is at fault, and {path} is unchanged")
            move_in(new, target, force=force or target == place)
    return target if out is None else Path(out)


def write_source(source: TraceSource, new: Path, *, hdf5: bool, sharded: bool) -> None:
    """Write a finished trace as a new HDF5 file, or as a Zarr folder in shards or in a writer's chunks."""
    if hdf5:
        # h5py takes long to load, and most traces do not need it.
        from gtrace.trace.hdf5 import write_hdf5

        write_hdf5(source, new)
    else:
        write_zarr(source, str(new), sharded=sharded)


#: attributes of a trace that describe its own file
_OWN = ("format", "version", "status", "gtrace_version", SKETCH)


@dataclass(frozen=True, slots=True)
class SketchSummary:
    """The result of :func:`sketch_trace`.

    Attributes:
        path: the new trace.
        plan: the sketches that it holds.
        sketched: number of tensors stored as sketches.
        raw: number of tensors stored as values, because those take less room.
        bytes_before: size of the full trace, None if it is at an address that cannot be listed.
        bytes_after: size of the new trace.
    """

    path: Path
    plan: SketchPlan
    sketched: int
    raw: int
    bytes_before: int | None
    bytes_after: int


def sketch_trace(
    trace: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    sketch: SketchPlan | str = DEFAULT_SKETCHES,
    tensors: Sequence[str] = (),
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> SketchSummary:
    """Write another trace, with the moment sketches of large tensors and the values of small ones.

    The plan may merge sketches of consecutive recorded steps: their sum is stored at the first of
    them. Small tensors keep every step. A trace of sketches can be made smaller again: wider bins, merged steps.

    Args:
        trace: the trace.
        output: the new one, ``.zarr``, ``.h5`` or ``.hdf5``.
        sketch: norms and bucket sizes, such as ``"l2:8192,linf:8192,none"``; by default what the codecs with
            closed forms need at their default parameters.
        tensors: only tensors with names that match one of these globs.
        force: replace what is at ``output``.
        progress: called with (rows of tensors done, all of them).

    Raises:
        UsageError: a glob that matches nothing, sketches that a trace of sketches does not have, or the trace
            itself as the output.
        OutputExistsError: something is at ``output``.
        TraceError: the trace cannot be read, or the new one not written.
    """
    plan = SketchPlan.parse(sketch) if isinstance(sketch, str) else sketch
    place, target = place_of(trace), place_for(output)
    keep_inputs(output, place)
    if force:
        refuse_living(target)
    check_place(target, force=force)
    with open_trace(trace) as source, new_beside(target, "sketch", f"{output}:") as folder:
        folder.mkdir()
        new = folder / target.name
        infos = choose_infos(source, tensors)
        plan = replace(plan, merged=plan.merged * max(info.merged for info in infos)) if infos else plan
        attrs = {key: value for key, value in source.attrs.items() if key not in _OWN}
        with create_trace(new, attrs=attrs, sketch=plan) as writer:
            tensors_of = [
                (key, [_Rewritten(source, info, plan) for info in infos if info.stream == key])
                for key in source.streams
            ]
            total = sum(tensor.size.size for _, members in tensors_of for tensor in members)
            done = 0
            for key, members in tensors_of:
                if not members and any(info.stream == key for info in source.tensors):
                    continue  # second moments, or tensors that were not asked for
                for count in _copy_stream(source, writer, key, members):
                    done += count
                    os.utime(folder)  # or it seems to be the leftover of a killed writer
                    if progress is not None:
                        progress(done, total)
            if source.status != "complete":
                writer.close("interrupted")
        move_in(new, target, force=force)
    sketched = sum(_keeps_sketches(info, plan) for info in infos)
    before = RemoteFiles(place).total(place) if isinstance(place, str) else disk_bytes(place)
    return SketchSummary(Path(output), plan, sketched, len(infos) - sketched, before, disk_bytes(Path(output)))


def _keeps_sketches(info: TensorInfo, plan: SketchPlan) -> bool:
    # Buckets of a sampled weight gradient are not buckets of the gradient.
    whole = info.kind == "neural" or info.sample is None
    return bool(info.sketches) or (plan.covers(info.size) and whole)


class _Rewritten:
    """Rewrites one tensor for the new trace.

    Attributes:
        size: number of values in each of its rows, int64.
        groups: first step -> indices of the rows that are merged there.
    """

    def __init__(self, source: Trace, info: TensorInfo, plan: SketchPlan) -> None:
        self._source = source
        self._info = info
        self._plan = plan
        self._where = info.stream._asdict()
        numbers = source.statistics(info.name, **self._where)
        self._steps: list[int] = numbers["step"].tolist()
        self.size = numbers["n_valid"]
        self._total = numbers["n_total"]
        self._further = {name: numbers[name] for name in EXTRAS if name in numbers}
        self._name = source.stored_name(info)
        self._sketched = _keeps_sketches(info, plan)
        count = plan.merged // info.merged if self._sketched else 1
        self.groups = {
            self._steps[k]: range(k, min(k + count, len(self._steps))) for k in range(0, len(self._steps), count)
        }

    def append(self, writer: TraceWriter, step: int) -> int:
        """Write the row of a step at which a group begins; returns the number of rows in it."""
        info, rows = self._info, self.groups[step]
        attrs: dict[str, Any] = {
            **info.attrs,
            "shape": list(info.shape),
            "dtype": info.dtype,
            "aliases": list(info.aliases) or None,
            "module_type": info.module_type,
            "stage": None if info.stage == "local" else info.stage,
            # Numbers beside the gradients are about one step each.
            "numbers": {
                name: float(values[rows[0]]) if len(rows) == 1 else math.nan for name, values in self._further.items()
            },
        }
        if info.kind == "neural":
            attrs["n_total"] = int(self._total[rows.start : rows.stop].sum())
        if self._sketched:
            if info.kind == "weight":
                attrs[SKETCH] = self._plan.describe(self._fewer())
            row = self._row(rows[0])
            for index in rows[1:]:
                row = row.merge(self._row(index))
            writer.append_sketch(step, self._name, row, **self._where, **attrs)
        else:
            if info.kind == "neural":
                attrs["capacity"] = info.size
            values = self._source.read(info.name, step, **self._where)
            writer.append(step, self._name, values, **self._where, **attrs, sample=info.sample)
        return len(rows)

    def _row(self, index: int) -> SketchRow:
        name, step = self._info.name, self._steps[index]
        if self._info.sketches:
            return self._source.sketch_row(name, step, self._plan.specs, **self._where)
        return SketchRow.of(self._source.read(name, step, **self._where), self._plan.specs)

    def _fewer(self) -> dict[int, int]:
        """Steps with a row of fewer steps than the plan's number: usually the last one."""
        one = math.prod(self._info.shape)
        counts = {
            step: int(self.size[rows.start : rows.stop].sum()) // max(1, one) for step, rows in self.groups.items()
        }
        return {step: count for step, count in counts.items() if count != self._plan.merged}


def _copy_stream(source: Trace, writer: TraceWriter, key: StreamKey, tensors: Sequence[_Rewritten]) -> Iterator[int]:
    """Write the rows of one stream in the order of their steps; yields the number of tensor rows per step."""
    where = key._asdict()
    scalars = source.scalars(**where)
    merges = any(len(rows) > 1 for tensor in tensors for rows in tensor.groups.values())
    for index, step in enumerate(scalars.pop("step").tolist()):
        taken = [tensor.append(writer, step) for tensor in tensors if step in tensor.groups]
        if taken or not merges:
            numbers = {name: values[index].item() for name, values in scalars.items()}
            writer.commit(step, **where, **numbers)
        yield sum(taken)
