"""What M workers see of a codec's error: its bias, and an M-th of its variance, per step or over windows of steps.

Every worker rounds for itself, so averaging divides the variance by their number; a bias stays. A codec with memory
sends later what it leaves out now, so a single step says little about it: what counts is the error of all that has
arrived over a window of consecutive steps. One such codec is enough to compare all of them over windows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import NDArray

    from gtrace.report.analysis.cells import CellTable, Coder


#: How symbols become bits, in words.
CODED = {"fixed": "at fixed width", "huffman": "with Huffman codes", "entropy": "at the entropy of the symbols"}


@dataclass(frozen=True, slots=True)
class ErrorSplit:
    """Errors of cells in two parts, C configurations by K cells.

    Attributes:
        error: bias and variance of one worker.
        bias: the part that more workers do not shrink.
        energy: that both are related to.
    """

    error: NDArray[np.float64]
    bias: NDArray[np.float64]
    energy: NDArray[np.float64]

    @property
    def variance(self) -> NDArray[np.float64]:
        """(C, K) the part that more workers shrink."""
        return self.error - self.bias

    def at(self, workers: int) -> NDArray[np.float64]:
        """(C, K) the error of an average over so many workers."""
        return self.bias + self.variance / workers


def per_step(table: CellTable) -> ErrorSplit:
    """Errors of single steps. Where the bias is not known, all of the error counts as bias."""
    error = table.squared_error
    bias = np.fmin(table.relative_bias**2 * table.energy, error)
    return ErrorSplit(error, np.where(np.isfinite(bias), bias, error), table.energy)


def over_windows(table: CellTable, steps: ErrorSplit) -> ErrorSplit:
    """Errors over windows of consecutive steps, at the cell where each window ends; NaN elsewhere.

    Draws of different steps are independent, so variances of the steps of a window add up. What is left of the
    window's error is bias: of a codec with memory, all of it.
    """
    ends = np.isfinite(table.window) & np.isfinite(table.window_error) & np.isfinite(table.window_energy)
    # Sums over the steps before each, tensor by tensor; the steps of a window follow each other in the table.
    shape = (len(table.specs), len(table.tensors) + 1, len(table.steps) + 1)
    sums = []
    for values in (steps.variance, steps.bias):
        by_step = np.zeros(shape)
        by_step[:, table.tensor, table.step + 1] = np.nan_to_num(values)
        sums.append(by_step.cumsum(axis=2))
    c, k = np.nonzero(ends)
    last = table.step[k] + 1
    first = np.maximum(last - table.window[c, k].astype(np.int64), 0)
    variance, bias = (total[c, table.tensor[k], last] - total[c, table.tensor[k], first] for total in sums)
    error, energy, of_it = (np.full(ends.shape, np.nan) for _ in range(3))
    error[c, k], energy[c, k] = table.window_error[c, k], table.window_energy[c, k]
    # A draw of an unbiased codec is off by variance alone, by more or by less than what is expected.
    of_it[c, k] = np.where(bias == 0, 0.0, np.maximum(error[c, k] - variance, 0.0))
    return ErrorSplit(error, of_it, energy)


@dataclass(frozen=True, slots=True)
class Basis:
    """What the methods of a sweep are compared by.

    Attributes:
        workers: whose average the errors are of.
        coder: that turns symbols into bits.
        window: fewest and most steps of the windows that errors are summed over; None for single steps.
    """

    workers: int = 1
    coder: Coder = "huffman"
    window: tuple[int, int] | None = None

    @property
    def steps_in_words(self) -> str:
        """``7 consecutive steps``, empty for single steps."""
        if self.window is None:
            return ""
        fewest, most = self.window
        return f"{most} consecutive steps" if fewest == most else f"{fewest} to {most} consecutive steps"


def ranked_by(
    table: CellTable, steps: ErrorSplit, windows: ErrorSplit, partial: NDArray[np.bool_], workers: int, coder: Coder
) -> tuple[CellTable, ErrorSplit, Basis]:
    """The table with the errors and energies that methods are compared by, these in two parts, and what they are."""
    remembers = table.memory & ~partial & np.isfinite(windows.error).any(axis=1)
    split, span = steps, None
    if remembers.any():
        split = windows
        lengths = table.window[np.isfinite(windows.error)]
        span = int(lengths.min()), int(lengths.max())
    ranked = replace(table, squared_error=split.at(workers), energy=split.energy)
    return ranked, split, Basis(workers, coder, span)


def workers_of(provenance: Mapping[str, Any]) -> int:
    """Workers of the run that a sweep's trace is of; 1 where nobody says."""
    attrs = provenance.get("trace_attrs")
    found = attrs.get("world_size") if isinstance(attrs, dict) else None
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 1 else 1
