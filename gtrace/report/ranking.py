"""Which method leads, at which bits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gtrace.report.comparison import PREFERRED_BITS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis import Family, SweepAnalysis

#: Methods whose errors differ by less than this are too close to call.
LEVEL = 0.02

#: Without an interval, a method must be better in this part of training to be called better.
MOSTLY = 0.9


def decisive(families: Sequence[Family], targets: Sequence[float]) -> int:
    """Index of the target where most families can be compared, the nearest to three bits of those; or -1."""
    known = [sum(math.isfinite(f.at[k].variance) for f in families) for k in range(len(targets))]
    if not any(known):
        return -1
    return max(range(len(known)), key=lambda k: (known[k], -abs(targets[k] - PREFERRED_BITS)))


def ranked(families: Sequence[Family], target: int) -> list[Family]:
    """The families that can be compared at a target (an index), least variance first."""
    found = [f for f in families if math.isfinite(f.at[target].variance)]
    return sorted(found, key=lambda f: f.at[target].variance)


def decisive_target(analysis: SweepAnalysis) -> int:
    """Index of the target where most methods can be compared, the nearest to three bits of those; or -1."""
    return decisive(analysis.families, analysis.targets)


def ranking(analysis: SweepAnalysis, target: int) -> list[Family]:
    """The families that can be compared at a target (an index), least variance first."""
    return ranked(analysis.families, target)


def leaders(analysis: SweepAnalysis, target: int) -> list[Family]:
    """The families that nobody beats at a target (an index), least variance first.

    A family is beaten when its error is larger than that of the first by more than :data:`LEVEL`, beyond the noise of
    steps. When there is no confidence interval, it must be larger in :data:`MOSTLY` all of training instead.
    """
    found = ranking(analysis, target)
    return [f for f in found if f is found[0] or not _beaten(analysis, found[0], f, target)]


def _beaten(analysis: SweepAnalysis, first: Family, other: Family, target: int) -> bool:
    behind = other.at[target].variance > first.at[target].variance * (1 + LEVEL)
    found = analysis.comparison(first.label, other.label, analysis.targets[target])
    if found is None:
        return behind
    return behind and (found.differs if found.by_elements.known else not found.better < MOSTLY)


def lossless(analysis: SweepAnalysis, family: Family) -> bool:
    """Whether a family makes no error at all, as the uncompressed gradient: there is nothing to compare."""
    values = [analysis.configurations[i].relative_variance for i in family.members]
    return bool(values) and all(value == 0 for value in values)
