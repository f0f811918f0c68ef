"""Replay a trace through codecs and measure what each does.

Reading results needs no codec and no trace, so what runs a sweep is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gtrace.sweep.schema import COLUMNS, EXPECTATION
from gtrace.sweep.store import ResultStore, SweepResult

if TYPE_CHECKING:
    from gtrace.sweep.run import SweepOptions, expand, run_sweep

__all__ = ["COLUMNS", "EXPECTATION", "ResultStore", "SweepOptions", "SweepResult", "expand", "run_sweep"]


def __getattr__(name: str) -> Any:
    if name in ("SweepOptions", "expand", "run_sweep"):
        return getattr(importlib.import_module("gtrace.sweep.run"), name)
    raise AttributeError(f"module 'gtrace.sweep' has no attribute {name!r}")
