"""A short look at a trace, for reports that are given one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtrace.report.names import count

if TYPE_CHECKING:
    from pathlib import Path

    from gtrace.report.laws import LawSection


@dataclass(frozen=True, slots=True)
class TensorSummary:
    """One recorded tensor: name, shape and number of recorded steps."""

    name: str
    shape: tuple[int, ...]
    steps: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """What a trace holds.

    Attributes:
        name: of the file.
        tensors: what was recorded.
        laws: which laws the gradients follow, a section per kind of gradient.
    """

    name: str
    tensors: tuple[TensorSummary, ...]
    laws: tuple[LawSection, ...] = ()

    @property
    def elements(self) -> int:
        """Elements of all tensors together."""
        return sum(t.elements for t in self.tensors)

    @property
    def sentence(self) -> str:
        """One line of plain words, with what to do next."""
        steps = max((t.steps for t in self.tensors), default=0)
        return (
            f"{count(len(self.tensors), 'tensor')}, {count(self.elements, 'element')}, "
            f"up to {count(steps, 'step')} each. `gtrace sweep {self.name}` measures codecs on it."
        )


def summarize_trace(path: Path, name: str) -> TraceSummary:
    """Read the table of contents of a trace, and the gradients of a few steps.

    Raises:
        TraceError: missing, not a trace, damaged, or from a newer version.
    """
    # Zarr and HDF5 are slow to load; a report on a sweep alone does without.
    from gtrace.report.laws import law_sections
    from gtrace.trace import open_trace

    with open_trace(path) as trace:
        found = tuple(
            TensorSummary(
                t.name,
                tuple(int(d) for d in t.shape),
                len(trace.steps(t.name, kind=t.kind, optimizer=t.optimizer, rank=t.rank)),
            )
            for t in trace.tensors
        )
        return TraceSummary(name, found, law_sections(trace))
