"""Rewrites a finished trace: into shards, which are fewer files, or from Zarr to HDF5 and back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.trace import format as layout
from gtrace.trace.files import beside, check_place, move_in, remove
from gtrace.trace.names import DIMENSION_SUFFIX
from gtrace.trace.opening import open_source
from gtrace.trace.reader import Trace
from gtrace.trace.remote import place_of
from gtrace.trace.repair import Blocks, open_sink, renumbered
from gtrace.trace.storage import Record
from gtrace.trace.zarr_arrays import ShardedArray, group_document, make_group, write_root
from gtrace.trace.zarr_read import is_gtrace_zarr

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from gtrace.trace.format import Column, TensorSpec
    from gtrace.trace.storage import Source, StreamSource


def pack_trace(path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None, *, force: bool = False) -> Path:
    """Rewrite a finished trace with the same content and fingerprint.

    Args:
        path: the trace.
        out: where to: ``.zarr`` for shards, ``.h5`` or ``.hdf5`` for HDF5. By default a Zarr trace is replaced by its
            shards once they are whole.
        force: replace a trace that is at ``out``.

    Returns:
        where it is.

    Raises:
        UsageError: the trace is not finished, there is nothing to pack, or it is not on this machine and there is
            no ``out``.
        OutputExistsError: something is at ``out`` and ``force`` is off, or it is no trace.
        TraceError: the trace is damaged, or the new one cannot be written.
    """
    place = place_of(path)
    if isinstance(place, Path):
        place = Path(os.path.realpath(place))
    elif out is None:
        raise UsageError(f"{path}: is not on this machine, so it is only read; -o NAME.zarr packs it here")
    target = Path(os.path.realpath(place if out is None else out))
    if target.suffix not in (".zarr", ".h5", ".hdf5"):
        raise UsageError(f"{target}: a trace ends in .zarr, .h5 or .hdf5")
    source = open_source(place)
    try:
        if source.attrs.get("status") not in ("complete", "interrupted"):
            raise UsageError(f"{path}: is being written, or its writer was killed; see `gtrace check --repair`")
        if out is None and target.is_file():
            raise UsageError(f"{path}: an HDF5 file is one file already; -o NAME.zarr makes a Zarr trace of it")
        if target == place and out is not None and not force:
            raise OutputExistsError(f"{out}: is the trace itself; leave -o out to replace it")
        if target != place:
            check_place(target, force=force, is_trace=is_gtrace_zarr)
        new = beside(target, "pack")
        try:
            remove(new)
            if target.suffix == ".zarr":
                _write_shards(source, str(new))
            else:
                _write_hdf5(source, new)
            written = Trace(open_source(new))
            try:
                if written.fingerprint != Trace(source).fingerprint:
                    raise TraceError(f"{new}: not what was written; the disk is at fault, and {path} stays as it was")
            finally:
                written.close()
            move_in(new, target, force=force or target == place)
        except OSError as error:
            raise TraceError(f"{target}: cannot be written ({error.strerror or error})") from error
        finally:
            remove(new)
    finally:
        source.close()
    return target if out is None else Path(out)


def _columns(stream: StreamSource) -> dict[str, NDArray[Any]]:
    """name -> (rows, tensors) of each statistic, with the tensors that were committed as columns."""
    indices = [spec.index for spec in stream.tensors]
    return {
        name: stream.statistic(name)[:, indices] if indices else np.empty((stream.steps.size, 0), column.dtype)
        for name, column in {**layout.statistics_of(stream.key.kind), **_extras(stream)}.items()
        if name not in layout.LENGTHS or stream.lengths(name) is not None
    }


def _extras(stream: StreamSource) -> dict[str, Column]:
    """Those of the further numbers that the stream has."""
    return {name: column for name, column in layout.EXTRAS.items() if stream.further(name) is not None}


def _write_hdf5(source: Source, new: Path) -> None:
    sink = open_sink(new, {**source.attrs, "status": "writing"}, is_file=True)
    for stream in source.streams:
        specs = [renumbered(spec, index) for index, spec in enumerate(stream.tensors)]
        for spec in specs:
            sink.add_tensor(stream.key, spec)
        tables, blocks = _columns(stream), Blocks(stream)
        for row, step in enumerate(stream.steps.tolist()):
            statistics = {name: np.ascontiguousarray(table[row]) for name, table in tables.items()}
            for index in np.flatnonzero(statistics["present"]).tolist():
                sink.write_row(stream.key, specs[index], row, blocks.read(stream.tensors[index], row))
            scalars = {name: float(values[row]) for name, values in stream.scalars.items()}
            sink.commit(stream.key, row, Record(step, scalars, statistics))
    sink.close(source.attrs)


def _write_shards(source: Source, root: str) -> None:
    make_group(root, source.attrs)
    gathered: dict[str, Any] = {}
    for stream in source.streams:
        if not stream.steps.size:
            continue
        key = stream.key
        rank, folder = os.path.join(root, key.rank_group), os.path.join(root, key.rank_group, key.group)
        if not os.path.isdir(rank):
            make_group(rank, {"rank": key.rank})
        make_group(folder, key._asdict())
        gathered[key.rank_group] = group_document({"rank": key.rank})
        gathered[f"{key.rank_group}/{key.group}"] = group_document(key._asdict())
        for array in _write_stream(stream, folder):
            gathered[f"{key.rank_group}/{key.group}/{array.entry}"] = array.document
    write_root(root, source.attrs, gathered)


def _write_stream(stream: StreamSource, folder: str) -> Iterator[ShardedArray]:
    rows = stream.steps.size
    tables = _columns(stream)
    for index, spec in enumerate(stream.tensors):
        new = renumbered(spec, index)
        chunks = (new.chunk_rows, new.chunk_elements)
        dimensions = ("step", spec.entry + DIMENSION_SUFFIX)
        place = os.path.join(folder, spec.entry)
        array = ShardedArray(place, spec.column, (rows, spec.size), chunks, dimensions, new.attrs)
        array.write(_blocks(stream, spec, tables["present"][:, index] != 0, chunks[0]))
        yield array
    height, width = layout.table_chunking(len(stream.tensors))
    for name, table in tables.items():
        yield _write_table(
            os.path.join(folder, name), layout.statistic_column(name), table, (height, width), ("step", "tensor")
        )
    for name, values in stream.scalars.items():
        yield _write_table(os.path.join(folder, name), layout.SCALAR, values, (layout.STEP_ROWS,), ("step",))
    yield _write_table(os.path.join(folder, "step"), layout.STEP, stream.steps, (layout.STEP_ROWS,), ("step",))


def _write_table(
    place: str, column: Column, table: NDArray[Any], chunks: tuple[int, ...], dimensions: tuple[str, ...]
) -> ShardedArray:
    array = ShardedArray(place, column, table.shape, chunks, dimensions, {})
    flat = table.reshape(len(table), -1)
    said = not (len(chunks) == 1 and np.isnan(flat).all()) if table.dtype.kind == "f" else True
    array.write(flat[start : start + chunks[0]] if said else None for start in range(0, len(flat), chunks[0]))
    return array


def _blocks(
    stream: StreamSource, spec: TensorSpec, present: NDArray[np.bool_], height: int
) -> Iterator[NDArray[Any] | None]:
    """The rows of each chunk, NaN where the tensor is absent; None where it is absent in all of them.

    Those of sketches, one each, are no longer than they have to be.
    """
    blocks = Blocks(stream)
    for start in range(0, present.size, height):
        there = present[start : start + height]
        if not there.any() or spec.size == 0:
            yield None
            continue
        if spec.sketched:
            yield blocks.read(spec, start)[None]
            continue
        out = np.full((there.size, spec.size), np.nan, np.float32)
        for offset in np.flatnonzero(there).tolist():
            out[offset] = blocks.read(spec, start + offset)
        yield out
