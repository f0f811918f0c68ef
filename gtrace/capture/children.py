"""Capture of the Python processes that a captured program launches: torchrun, mp.spawn, accelerate, subprocess."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.capture.options import capture_options
from gtrace.capture.session import CaptureSession, print_line
from gtrace.torch_hooks.children import children_call
from gtrace.torch_hooks.exits import before_abrupt_exit, before_shutdown
from gtrace.torch_hooks.launcher import hide_machinery
from gtrace.torch_hooks.processes import launch_token, spans_machines

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractContextManager
    from types import TracebackType


def captured(path: Path, options: Mapping[str, Any], attrs: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Inside the block, Python processes that are launched record into the trace at ``path``, each its own rank.

    Args:
        path: the trace.
        options: keyword arguments of ``capture_options``.
        attrs: attributes of the trace.
    """
    return children_call(__name__, {"path": str(path), "options": dict(options), "attrs": dict(attrs)})


def start(told: Mapping[str, Any]) -> None:
    """Record in this process until it ends; called when it has imported torch. Nothing here stops the process."""
    try:
        _Child(told).start()
    except Exception as error:  # noqa: BLE001 - the program's import of torch must succeed
        print_line(f"gtrace: warning: capture could not start: {type(error).__name__}: {error}")


class _Child:
    def __init__(self, told: Mapping[str, Any]) -> None:
        chosen = dict(told["options"])
        token = launch_token() if spans_machines() else None
        if token not in (None, chosen["run"]):
            # Every machine has its own process that launches, and all of them write one trace.
            chosen |= {"launcher": chosen["run"], "run": token}
        options = capture_options(Path(told["path"]), **chosen)
        self._session = CaptureSession(options, told["attrs"], launched=True, status=True)
        self._failed = False
        self._exits = contextlib.ExitStack()

    def start(self) -> None:
        self._session.start()
        self._exits.enter_context(before_abrupt_exit(self._leave))
        sys.excepthook = self._watch_excepthook(sys.excepthook)
        before_shutdown(self._end)

    def _watch_excepthook(self, original: Any) -> Any:
        def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
            self._failed = True
            if traceback is not None:
                hide_machinery(error)
                traceback = error.__traceback__
            original(kind, error, traceback)

        return excepthook

    def _leave(self, exit_code: int) -> int:
        self._failed = self._failed or exit_code != 0
        self._end()
        return exit_code

    def _end(self) -> None:
        summary = self._session.finish("interrupted" if self._failed else "complete")
        if summary.complaints and summary.rows:
            print_line(f"gtrace: warning: {'; '.join(summary.complaints)}")
        multiprocessing = sys.modules.get("multiprocessing.util")
        if multiprocessing is not None and multiprocessing._exiting:
            # It has cleaned up already, and what the writer made since (a lock of numcodecs) would be leaked.
            multiprocessing._run_finalizers()
