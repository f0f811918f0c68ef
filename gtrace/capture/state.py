"""What an optimizer remembers, as far as errors of gradients are judged by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from gtrace.host.sharded import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from gtrace.host.rounds import Rounds


def second_moments(optimizer: Optimizer | Rounds, parameters: Sequence[torch.Tensor]) -> list[float]:
    """Sum over the elements of Adam's running mean of squared gradients, ``exp_avg_sq``, in float64.

    Divided by the number of elements it is the square of the typical amount by which Adam divides; it is not
    corrected for its start at zero.

    Args:
        optimizer: one that keeps ``exp_avg_sq`` (Adam, AdamW, NAdam, RAdam), or any other.
        parameters: of it.

    Returns:
        one number per parameter, NaN where there is none (yet).
    """
    state = getattr(optimizer, "state", {})
    sums: list[torch.Tensor | None] = []
    for parameter in parameters:
        mean = state[parameter].get("exp_avg_sq") if parameter in state else None
        sums.append(local_part(mean).sum(dtype=torch.float64) if isinstance(mean, torch.Tensor) else None)
    there = [value for value in sums if value is not None]
    # One transfer for all of them: on another device each would make training wait.
    devices = {value.device for value in there}
    numbers = iter(torch.stack(there).tolist() if len(devices) == 1 else [float(value) for value in there])
    return [math.nan if value is None else next(numbers) for value in sums]
