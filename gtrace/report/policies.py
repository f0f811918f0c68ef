"""Runs whose bits a policy chose, and how long runs take to a loss that all of them reach."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.report.runs import Run

#: the running mean of the loss spans this part of the run
WINDOW = 0.05
#: more changes than these are put into one range
_SHOWN = 7


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of the last ``window`` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return np.asarray((total[end] - total[start]) / (end - start), dtype=np.float64)


def common_loss(runs: Sequence[Run]) -> float:
    """A training loss that every finished run reached: the highest of their final ones; NaN where there is none.

    Rounded up to three digits, so that it can be written down.
    """
    worst = max((run.final_loss for run in runs if run.finished and not run.diverged), default=math.nan)
    if not (math.isfinite(worst) and worst > 0):
        return math.nan
    unit = 10.0 ** (math.floor(math.log10(worst)) - 2)
    return float(f"{math.ceil(worst / unit) * unit:.3g}")


def seconds_to_loss(run: Run, loss: float) -> float:
    """Simulated seconds until the running mean of the training loss, over a twentieth of the run, is at ``loss``.

    NaN where it never is, or where no time was simulated. The first steps, before a whole window, do not count.
    """
    known = np.isfinite(run.loss)
    window = max(int(known.sum() * WINDOW), 1)
    reached = np.flatnonzero(running_mean(run.loss[known], window)[window - 1 :] <= loss)
    return float(run.sim_seconds[known][window - 1 + reached[0]]) if reached.size else math.nan


def chosen_bits(run: Run) -> str:
    """The bits that a policy chose, with the step each began at: ``2, 3 from 15, 4 from 40``; empty without one."""
    bits = run.codec_bits[np.isfinite(run.codec_bits)].astype(int)
    if not bits.size:
        return ""
    steps = run.steps[np.isfinite(run.codec_bits)]
    changes = np.flatnonzero(np.diff(bits)) + 1
    if changes.size <= _SHOWN:
        return ", ".join([str(bits[0]), *(f"{bits[k]} from {steps[k]}" for k in changes)])
    return f"{bits.min()} to {bits.max()}, mean {bits.mean():.2f}, last {bits[-1]}"
