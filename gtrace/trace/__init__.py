"""Traces: gradients of a run on disk (Zarr v3 or HDF5, with one reader and one writer) or in memory.

Names are loaded on first use: a process that only reads files of other programs needs none of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace.trace.convert import SketchSummary, sketch_trace
    from gtrace.trace.facts import OptimizerFacts
    from gtrace.trace.format import StreamKey
    from gtrace.trace.reader import TensorInfo, Trace, open_trace
    from gtrace.trace.sketches import SketchPlan, SketchRow
    from gtrace.trace.writer import TraceWriter, create_trace

_HOMES = {
    "OptimizerFacts": "facts",
    "SketchPlan": "sketches",
    "SketchRow": "sketches",
    "SketchSummary": "convert",
    "StreamKey": "format",
    "TensorInfo": "reader",
    "Trace": "reader",
    "TraceWriter": "writer",
    "create_trace": "writer",
    "open_trace": "reader",
    "sketch_trace": "convert",
}

__all__ = [
    "OptimizerFacts",
    "SketchPlan",
    "SketchRow",
    "SketchSummary",
    "StreamKey",
    "TensorInfo",
    "Trace",
    "TraceWriter",
    "create_trace",
    "open_trace",
    "sketch_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gtrace.trace' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(f"gtrace.trace.{_HOMES[name]}"), name)
    return found
