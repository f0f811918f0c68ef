"""Which backend holds the trace at a place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.errors import TraceError
from gtrace.trace.checks import refuse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gtrace.trace.storage import Source


def open_source(place: Path, tolerate: Callable[[TraceError], None] = refuse) -> Source:
    """What holds the trace at a place; ``tolerate`` is told of damage that leaves other parts readable.

    Raises:
        TraceError: as of :func:`gtrace.open_trace`, as far as it is not tolerated.
    """
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
