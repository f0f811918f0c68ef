"""Bursts of consecutive steps: the only places where a codec that keeps memory can be replayed."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence

    from gtrace.codecs.assignment import Coding

#: how the warning about codecs that were left out begins
LEFT_OUT = "left out: "
_MOST_NAMED = 4


def start_of(steps: Sequence[int], index: int) -> int:
    """Index of the first step of the burst that the step at ``index`` belongs to; steps rise."""
    while index > 0 and steps[index] - steps[index - 1] == 1:
        index -= 1
    return index


def any_burst(tensors: Iterable[Sequence[int]], wanted: Container[int]) -> bool:
    """Whether a wanted step of any tensor has a neighbour: the step before it, or after it, was captured too.

    Args:
        tensors: the captured steps of each, rising.
        wanted: the steps that are swept.
    """
    return any(
        after - before == 1 and (before in wanted or after in wanted)
        for steps in tensors
        for before, after in pairwise(steps)
    )


def gaps_line(codecs: Sequence[Coding]) -> str:
    """One line about codecs with memory on a trace without consecutive steps, and what to capture instead."""
    specs = [str(item) for item in codecs]
    more = f" and {len(specs) - _MOST_NAMED} more" if len(specs) > _MOST_NAMED else ""
    keep = "keeps" if len(specs) == 1 else "keep"
    return (
        f"{', '.join(specs[:_MOST_NAMED])}{more} {keep} memory from step to step, and no two of these steps are "
        "consecutive: capture bursts with `gtrace capture --steps 1000+50`, or leave out --steps, which records bursts"
    )
