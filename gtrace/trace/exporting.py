"""Exports a trace for other programs: one ``.npz`` or ``.safetensors`` file per step, or one Parquet table."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace import __version__
from gtrace.errors import OutputExistsError, UsageError, keep_inputs, printable
from gtrace.settings import KINDS
from gtrace.trace.choose import choose_infos, choose_steps
from gtrace.trace.files import check_place, move_in, new_beside
from gtrace.trace.foreign import write_safetensors_header

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.trace.reader import TensorInfo, Trace


FORMATS = ("npz", "safetensors", "parquet")
#: marks a folder of exported files; only such a folder is ever replaced
ABOUT = "about.json"
_FORMAT = "gtrace export"
#: what it says about each tensor
_TOLD = ("name", "shape", "dtype", "size", "kind")
#: Bytes of values in one row group of a Parquet file, unless a single gradient is larger.
_GROUP_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Exported:
    """The result of an export.

    Attributes:
        output: the file or folder.
        steps: the steps in it, rising.
        tensors: names of the tensors in it.
        files: number of files of values.
    """

    output: Path
    steps: tuple[int, ...]
    tensors: tuple[str, ...]
    files: int


@dataclass(frozen=True, slots=True)
class ExportChoice:
    """What to export.

    Attributes:
        tensors: only tensors with names that match one of these shell patterns.
        steps: only these, None for all.
        kind: ``weight`` or ``neural``; by default weight gradients if there are any.
        optimizer: only tensors of this optimizer.
        rank: only this process.
    """

    tensors: Sequence[str] = ()
    steps: Sequence[int] | None = None
    kind: str | None = None
    optimizer: int | None = None
    rank: int | None = None


def export_trace(
    trace: Trace,
    output: str | os.PathLike[str],
    to: str,
    choice: ExportChoice | None = None,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Exported:
    """Write the gradients of a trace as float32 in their shapes, one tensor at a time in memory.

    ``npz`` and ``safetensors``: a folder with one file ``step_N`` per step, the tensors under their true names, and
    ``about.json``. ``parquet``: one table with a row per step and tensor and the columns ``step`` (int64), ``tensor``
    (string), ``shape`` (list of int64) and ``values`` (list of float, flat in C order). A sampled gradient is
    flat, and so is a layer's output with a size that does not fit its shape.

    Args:
        trace: what to export.
        output: the file or folder; it appears only when it is complete.
        to: ``npz``, ``safetensors`` or ``parquet``.
        choice: what to export; None for everything.
        force: replace a file, or a folder of an earlier export.
        progress: called with the number of steps done and of all steps.

    Raises:
        UsageError: nothing is chosen, a tensor exists on several ranks, or pyarrow is missing.
        OutputExistsError: something is at ``output``.
        TraceError: the trace is damaged, or nothing can be written.
    """
    if to not in FORMATS:
        raise UsageError(f"--to {printable(to)}: choose npz, safetensors or parquet")
    choice = choice or ExportChoice()
    kind = choice.kind
    if kind is None:
        kind = next((kind for kind in KINDS if any(info.kind == kind for info in trace.tensors)), None)
    infos = choose_infos(trace, choice.tensors, kind=kind, optimizer=choice.optimizer, rank=choice.rank)
    if not infos:
        raise UsageError(f"{trace.path}: holds no such gradients to export")
    _check_names(infos, to)
    chosen = sorted(choose_steps(trace, infos, choice.steps, most=sys.maxsize))
    rows = _Rows(trace, infos, chosen)
    keep_inputs(output, trace.path)
    place = Path(os.path.realpath(output))
    check_place(place, force=force, is_trace=_is_export, what="an export of gtrace")
    if place.is_dir() and to == "parquet":
        raise OutputExistsError(f"{output}: is a folder, but a table is one file; choose another -o")
    with new_beside(place, "export", f"{output}:") as new:
        if to == "parquet":
            _write_parquet(new, rows, progress)
        else:
            new.mkdir()
            write = _write_npz if to == "npz" else _write_safetensors
            width = max(6, len(str(chosen[-1])))
            for done, step in enumerate(chosen):
                write(new / f"step_{step:0{width}d}.{to}", step, rows)
                os.utime(new)
                if progress is not None:
                    progress(done + 1, len(chosen))
            about = {
                "format": _FORMAT,
                "gtrace_version": __version__,
                "trace": trace.path,
                "fingerprint": trace.fingerprint,
                "steps": chosen,
                "tensors": [{what: getattr(one, what) for what in _TOLD} for one in infos],
            }
            (new / ABOUT).write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n")
        move_in(new, place, force=force)
    names = tuple(dict.fromkeys(info.name for info in infos))
    return Exported(Path(output), tuple(chosen), names, 1 if to == "parquet" else len(chosen))


class _Rows:
    """The chosen gradients, step by step."""

    def __init__(self, trace: Trace, infos: Sequence[TensorInfo], steps: Sequence[int]) -> None:
        self.trace = trace
        self.infos = infos
        self.steps = steps
        self._lengths: list[dict[int, int]] = []
        for info in infos:
            numbers = trace.statistics(info.name, **info.stream._asdict())
            self._lengths.append(dict(zip(numbers["step"].tolist(), numbers["n_valid"].tolist(), strict=True)))

    def at(self, step: int) -> Iterator[tuple[TensorInfo, tuple[int, ...]]]:
        """The tensors that are present at a step, with their shapes at that step."""
        for info, lengths in zip(self.infos, self._lengths, strict=True):
            if step in lengths:
                yield info, _shape(info, lengths[step])

    def read(self, info: TensorInfo, step: int) -> NDArray[np.float32]:
        return self.trace.read(info.name, step, **info.stream._asdict())


def _shape(info: TensorInfo, size: int) -> tuple[int, ...]:
    """The shape of a gradient of ``size`` stored values; the first axis of a neural one is the batch."""
    if math.prod(info.shape) == size:
        return info.shape
    rest = math.prod(info.shape[1:])
    if info.kind == "neural" and info.shape and rest and size % rest == 0:
        return size // rest, *info.shape[1:]
    return (size,)


def _check_names(infos: Sequence[TensorInfo], to: str) -> None:
    seen: dict[str, TensorInfo] = {}
    for info in infos:
        other = seen.setdefault(info.name, info)
        shown = printable(info.name)
        for what in ("rank", "kind"):
            one, two = getattr(other, what), getattr(info, what)
            if one != two:
                raise UsageError(f"tensor '{shown}' exists for {what} {one} and {two}; choose one with --{what}")
        if to == "npz" and "\0" in info.name:
            raise UsageError(f"tensor '{shown}': .npz cannot hold this name; pass --to safetensors")
        if to == "safetensors" and info.name == "__metadata__":
            raise UsageError(f"tensor '{shown}': .safetensors cannot hold this name; pass --to npz")


def _is_export(folder: Path) -> bool:
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("format") == _FORMAT


def _write_npz(path: Path, step: int, rows: _Rows) -> None:
    # Not numpy.savez: it holds all arrays at once and refuses a tensor named "file".
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for info, shape in rows.at(step):
            # A fixed date, so that the same trace gives the same bytes.
            with archive.open(zipfile.ZipInfo(f"{info.name}.npy"), "w", force_zip64=True) as file:
                np.lib.format.write_array(file, rows.read(info, step).reshape(shape), (1, 0), allow_pickle=False)


def _write_safetensors(path: Path, step: int, rows: _Rows) -> None:
    present = list(rows.at(step))
    with path.open("wb") as file:
        arrays = [(info.name, shape) for info, shape in present]
        file.write(write_safetensors_header(arrays, {"step": str(step), "written_by": f"gtrace {__version__}"}))
        for info, _ in present:
            file.write(np.asarray(rows.read(info, step), "<f4").data)


def _write_parquet(path: Path, rows: _Rows, progress: Callable[[int, int], None] | None) -> None:
    try:
        # Not a dependency, and it has no type hints.
        pa: Any = importlib.import_module("pyarrow")
        pq: Any = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError("--to parquet needs pyarrow, which is not installed: pip install pyarrow") from None
    # Offsets of 64 bits: a row group with one gradient may have more than 2^31 values.
    schema = pa.schema(
        [
            ("step", pa.int64()),
            ("tensor", pa.string()),
            ("shape", pa.list_(pa.int64())),
            ("values", pa.large_list(pa.float32())),
        ]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for batch in _batches(rows, progress):
            values = [row[3] for row in batch]
            offsets = np.cumsum([0, *(array.size for array in values)], dtype=np.int64)
            flat = values[0] if len(values) == 1 else np.concatenate(values)
            lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(flat))
            columns = [[row[place] for row in batch] for place in range(3)]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]
            writer.write_table(pa.Table.from_arrays([*arrays, lists], schema=schema))


def _batches(
    rows: _Rows, progress: Callable[[int, int], None] | None
) -> Iterator[list[tuple[int, str, tuple[int, ...], NDArray[np.float32]]]]:
    batch: list[tuple[int, str, tuple[int, ...], NDArray[np.float32]]] = []
    held = 0
    for done, step in enumerate(rows.steps):
        for info, shape in rows.at(step):
            values = rows.read(info, step)
            if batch and held + values.nbytes > _GROUP_BYTES:
                yield batch
                batch, held = [], 0
            batch.append((step, info.name, shape, values))
            held += values.nbytes
        if progress is not None:
            progress(done + 1, len(rows.steps))
    if batch:
        yield batch
