"""What libraries log while they work for a capture stays out of the program's log."""

from __future__ import annotations

import contextlib
import logging
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Loggers of what reads and writes traces: each tells at level DEBUG what it does when it is imported and used.
_LOGGERS = ("numcodecs", "zarr.core.sync", "asyncio", "h5py._conv")
_quiet: dict[int, int] = {}


def _not_ours(record: logging.LogRecord) -> bool:
    return record.thread not in _quiet


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """Inside the block, what those libraries log in this thread reaches no handler.

    A program that logs at level DEBUG, to its standard output for example, prints what it would without a capture.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_not_ours)  # once, however often it is added
    thread = threading.get_ident()
    _quiet[thread] = _quiet.get(thread, 0) + 1
    try:
        yield
    finally:
        _quiet[thread] -= 1
        if not _quiet[thread]:
            del _quiet[thread]
