"""Traces: gradients of a run on disk (Zarr v3 or HDF5, with one reader and one writer) or in memory.

Names are loaded on first use: a process that only reads files of other programs needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace.trace.convert import SketchSummary as SketchSummary
    from gtrace.trace.convert import sketch_trace as sketch_trace
    from gtrace.trace.facts import OptimizerFacts as OptimizerFacts
    from gtrace.trace.format import StreamKey as StreamKey
    from gtrace.trace.reader import TensorInfo as TensorInfo
    from gtrace.trace.reader import Trace as Trace
    from gtrace.trace.reader import open_trace as open_trace
    from gtrace.trace.sketches import SketchPlan as SketchPlan
    from gtrace.trace.sketches import SketchRow as SketchRow
    from gtrace.trace.writer import TraceWriter as TraceWriter
    from gtrace.trace.writer import create_trace as create_trace

#: module -> what comes from it
_HOMES = {
    "gtrace.trace.convert": ("SketchSummary", "sketch_trace"),
    "gtrace.trace.facts": ("OptimizerFacts",),
    "gtrace.trace.format": ("StreamKey",),
    "gtrace.trace.reader": ("TensorInfo", "Trace", "open_trace"),
    "gtrace.trace.sketches": ("SketchPlan", "SketchRow"),
    "gtrace.trace.writer": ("TraceWriter", "create_trace"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gtrace.trace' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(home), name)
    return found
