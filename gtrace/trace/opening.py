"""Which backend holds the trace at a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.errors import TraceError
from gtrace.trace.checks import refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gtrace.trace.storage import Source


def open_source(place: Path | str, tolerate: Callable[[TraceError], None] = refuse) -> Source:
    """What holds the trace at a place; ``tolerate`` is told of damage that leaves other parts readable.

    Args:
        place: a path of this machine, or an address that is none, see :func:`gtrace.trace.remote.place_of`.
        tolerate: by default it raises.

    Raises:
        UsageError: what reads such addresses is not installed.
        TraceError: as of :func:`gtrace.open_trace`, as far as it is not tolerated.
    """
    if isinstance(place, str):
        return _open_remote(place, tolerate)
    try:
        there = place.exists()
    except OSError as error:
        raise TraceError(f"{place}: cannot be read ({error.strerror})") from None
    if not there:
        raise TraceError(f"{place}: no such trace; `gtrace capture SCRIPT` makes one")
    if place.is_dir():
        from gtrace.trace.zarr_read import ZarrSource

        return ZarrSource(place, tolerate)
    if place.is_file():
        from gtrace.trace.hdf5_read import Hdf5Source

        return Hdf5Source(place, tolerate)
    raise TraceError(f"{place}: neither a file nor a folder, so no trace")


def _open_remote(address: str, tolerate: Callable[[TraceError], None]) -> Source:
    from gtrace.trace.remote import RemoteFiles, is_hdf5

    files = RemoteFiles(address)
    if is_hdf5(address):
        from gtrace.trace.hdf5_read import Hdf5Source

        return Hdf5Source(address, tolerate, files.stream(address))
    from gtrace.trace.zarr_read import ZarrSource

    if not files.read_root(address):
        raise TraceError(f"{address}: no such trace; a Zarr trace has a zarr.json there")
    return ZarrSource(address, tolerate, files)
