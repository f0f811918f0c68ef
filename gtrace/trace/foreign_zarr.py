"""Arrays of a Zarr store that another program wrote, such as xarray."""

from __future__ import annotations

import json
import math
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError
from gtrace.trace.foreign import Entry, reading
from gtrace.trace.names import printable
from gtrace.trace.zarr_read import is_gtrace_zarr

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

_ROOTS = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")
#: An array may be so much larger than what is stored of it, or have so many bytes.
_RATIO = 1032
_SMALL = 64 * 1024 * 1024


def is_zarr(folder: Path) -> bool:
    """Whether a folder is a Zarr store."""
    return any((folder / name).is_file() for name in _ROOTS)


class ZarrStore:
    """The arrays of a Zarr store of format 2 or 3, but for coordinates other than ``step``."""

    def __init__(self, path: Path) -> None:
        import zarr

        self._path = path
        self._where = printable(str(path))
        if is_gtrace_zarr(path):
            raise TraceError(f"{self._where}: is a gtrace trace already; gtrace sweep takes it as it is")
        self._arrays: dict[str, Any] = {}
        self._rows: dict[str, NDArray[Any]] = {}
        self._folder: Path | None = None
        self._checked: set[str] = set()
        with reading(path), warnings.catch_warnings():
            # Zarr warns of files that it does not know.
            warnings.simplefilter("ignore")
            root = zarr.open(str(path), mode="r")
            members = root.members(max_depth=None) if isinstance(root, zarr.Group) else [("", root)]
            found = {name.replace("/", "."): node for name, node in members if isinstance(node, zarr.Array)}
            told = [Entry(name, tuple(a.shape), a.dtype.name, _dimensions(a)) for name, a in sorted(found.items())]
        entries = []
        for entry in told:
            name = entry.name
            if entry.dimensions == (name.rpartition(".")[2],) and name != "step":
                continue
            self._arrays[name] = found[name]
            entries.append(entry)
        self.entries = tuple(entries)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[Any]:
        """See :class:`TensorFile`."""
        array = self._arrays[entry.name]
        with reading(self._path):
            if entry.name not in self._checked:
                self._check(array, f"{self._where}: array '{printable(entry.name)}'")
                self._checked.add(entry.name)
            if row is None:
                return np.asarray(array[...])
            if array.chunks[0] == 1:
                return np.asarray(array[row])
            return np.array(self._unpacked(entry)[row])

    def _check(self, array: Any, where: str) -> None:
        # Decoding with pickle executes what is stored; numcodecs knows such a filter.
        metadata = {key: told for key, told in array.metadata.to_dict().items() if key != "attributes"}
        if "pickle" in json.dumps(metadata, default=str).lower():
            raise TraceError(f"{where}: is encoded with pickle, which is never loaded; store plain numbers")
        most = (
            max(math.prod(array.shape), math.prod(array.chunks), math.prod(array.shards or ())) * array.dtype.itemsize
        )
        if most > _SMALL and most > _RATIO * array.nbytes_stored():
            raise TraceError(f"{where}: {array.shape} values are declared, {array.nbytes_stored()} bytes are there")

    def _unpacked(self, entry: Entry) -> NDArray[Any]:
        """The array in a file, where chunks hold several rows: each is decoded once."""
        if entry.name not in self._rows:
            assert self._folder is not None
            array = self._arrays[entry.name]
            place = self._folder / f"{len(self._rows)}.npy"
            unpacked = np.lib.format.open_memmap(place, "w+", array.dtype, entry.shape)
            for start in range(0, entry.shape[0], array.chunks[0]):
                unpacked[start : start + array.chunks[0]] = array[start : start + array.chunks[0]]
            self._rows[entry.name] = unpacked
        return self._rows[entry.name]

    def prepare_rows(self, folder: Path) -> None:
        """See :class:`TensorFile`."""
        self._folder = folder

    def close(self) -> None:
        """See :class:`TensorFile`."""
        self._arrays.clear()
        self._rows.clear()


def _dimensions(array: Any) -> tuple[str | None, ...]:
    """Names of the axes: format 3 has a place for them, in format 2 it is xarray's attribute."""
    names = getattr(array.metadata, "dimension_names", None) or array.attrs.get("_ARRAY_DIMENSIONS") or ()
    return tuple(name if isinstance(name, str) else None for name in names)
