"""FP-n: small floating-point formats 1-E-M under a power-of-two scale."""

from __future__ import annotations

from gtrace.fitting.floats import FloatFormat, kappa
from gtrace.fitting.formats import (
    ScaleRule,
    format_thresholds,
    optimal_format,
    placed_error,
    scale_exponent,
)
from gtrace.fitting.relative_error import Law

__all__ = [
    "FloatFormat",
    "Law",
    "ScaleRule",
    "format_thresholds",
    "kappa",
    "optimal_format",
    "placed_error",
    "scale_exponent",
]
