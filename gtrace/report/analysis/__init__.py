"""Results summed up, as numbers: sweeps, run logs, traces, and what is compared in them. Nothing here formats."""

from __future__ import annotations

from gtrace.report.analysis.results import SweepAnalysis
from gtrace.report.analysis.run_logs import RunLogAnalysis, analyze_runs
from gtrace.report.analysis.sweep import analyze

__all__ = ["RunLogAnalysis", "SweepAnalysis", "analyze", "analyze_runs"]
