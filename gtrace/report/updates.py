"""Where codecs change places when errors count as they do in Adam's update."""

from __future__ import annotations

import math
from itertools import combinations
from typing import TYPE_CHECKING

from gtrace.report.names import count, number

if TYPE_CHECKING:
    from gtrace.report.analysis import Configuration, SweepAnalysis

#: A factor up to which two numbers are as good as equal.
_LEVEL = 1.05


def update_sentences(analysis: SweepAnalysis) -> list[str]:
    """Whether relative variance and update error order the configurations alike; nothing without second moments."""
    known = [c for c in analysis.configurations if not c.partial and c.relative_variance > 0 and c.update_error > 0]
    pairs = list(combinations(known, 2))
    if not pairs:
        return []
    swapped = [pair for pair in pairs if _swapped(*pair) > math.log(_LEVEL)]
    if not swapped:
        return ["Errors of Adam's update order the configurations as relative variances do."]
    a, b = sorted(max(swapped, key=lambda pair: _swapped(*pair)), key=lambda c: c.relative_variance)
    return [
        f"In Adam's update {len(swapped)} of {count(len(pairs), 'pair')} of configurations change places, "
        f"{_told(a)} and {_told(b)} most of all."
    ]


def _swapped(a: Configuration, b: Configuration) -> float:
    """How far two are apart, as a logarithm, in the measure that separates them less; 0 where both agree."""
    raw = math.log(a.relative_variance / b.relative_variance)
    update = math.log(a.update_error / b.update_error)
    return min(abs(raw), abs(update)) if raw * update < 0 else 0.0


def _told(c: Configuration) -> str:
    return f"{c.spec} (relative variance {number(c.relative_variance)}, update error {number(c.update_error)})"
