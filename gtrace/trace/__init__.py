"""Traces: gradients of a run on disk (Zarr v3 or HDF5, with one reader and one writer) or in memory."""

from __future__ import annotations

from gtrace.trace.convert import SketchSummary, sketch_trace
from gtrace.trace.format import StreamKey
from gtrace.trace.optimizer import OptimizerFacts
from gtrace.trace.reader import TensorInfo, Trace, open_trace
from gtrace.trace.sketches import SketchPlan, SketchRow
from gtrace.trace.writer import TraceWriter, create_trace

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
