"""Replay a trace through codecs and measure what each does."""

from gtrace.sweep.results import COLUMNS, EXPECTATION, ResultStore, SweepResult

__all__ = ["COLUMNS", "EXPECTATION", "ResultStore", "SweepResult"]
