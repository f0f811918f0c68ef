"""Replay a trace through codecs and measure what each does."""

from gtrace.sweep.grid import expand
from gtrace.sweep.results import COLUMNS, EXPECTATION, ResultStore, SweepResult
from gtrace.sweep.run import run_sweep

__all__ = ["COLUMNS", "EXPECTATION", "ResultStore", "SweepResult", "expand", "run_sweep"]
