"""Replay a trace through codecs and measure what each does.

Reading results needs no codec and no trace, so what runs a sweep is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gtrace.sweep.results import COLUMNS, EXPECTATION, ResultStore, SweepResult

if TYPE_CHECKING:
    from gtrace.sweep.run import run_sweep
    from gtrace.sweep.runs import expand

__all__ = ["COLUMNS", "EXPECTATION", "ResultStore", "SweepResult", "expand", "run_sweep"]

_HOMES = {"expand": "gtrace.sweep.runs", "run_sweep": "gtrace.sweep.run"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'gtrace.sweep' has no attribute {name!r}")
