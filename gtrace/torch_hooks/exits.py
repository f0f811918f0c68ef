"""Ends of a program that no ``finally`` sees: ``os._exit`` and SIGTERM."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

#: What a shell sees of a process that SIGTERM ended.
TERMINATED = 128 + signal.SIGTERM


def before_shutdown(finish: Callable[[], object]) -> None:
    """Call ``finish`` when the program has ended, while threads can still be started (``atexit`` is too late)."""
    # Loaded first, so that its own callback, after which no executor takes work, comes after this one.
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(finish)  # type: ignore[attr-defined]


@contextlib.contextmanager
def before_abrupt_exit(finish: Callable[[int], int]) -> Iterator[None]:
    """Inside the block, call ``finish`` before this process ends by ``os._exit`` or SIGTERM.

    Children of a fork end as they always did. A SIGTERM handler that is there already, or that the program
    installs, stays in charge.

    Args:
        finish: gets the exit code; what it returns is the one that ``os._exit`` uses.
    """
    owner = os.getpid()
    leave = os._exit

    def exit_after_finish(status: int) -> None:
        if os.getpid() == owner:
            try:
                status = finish(status)
            finally:
                leave(status)
        leave(status)

    def terminate(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if os.getpid() == owner:
                finish(TERMINATED)
        finally:
            os.kill(os.getpid(), number)

    watches_signal = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    os._exit = exit_after_finish  # type: ignore[assignment]
    if watches_signal:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if os._exit is exit_after_finish:
            os._exit = leave
        if watches_signal and signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
