"""What an optimizer remembers, as far as errors of gradients are judged by it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from gtrace.capture.buffers import as_real_dense
from gtrace.torch_hooks.sharded import local_part

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.optim import Optimizer

    from gtrace.torch_hooks.rounds import Rounds


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
    means = _means(optimizer, parameters)
    sums = [None if mean is None else mean.sum(dtype=torch.float64) for mean in means]
    return _as_numbers(sums)


class MomentsOf(NamedTuple):
    """Adam's running mean of squared gradients of one parameter, and what turns it into the step's divisor.

    Attributes:
        mean: ``exp_avg_sq`` as it is, real and strided.
        done: steps that the optimizer has done with this parameter; NaN where it does not say.
        decay: of the mean.
        eps: added to its root.
    """

    mean: torch.Tensor
    done: float
    decay: float
    eps: float


def moments_of(optimizer: Optimizer | Rounds, parameters: Sequence[torch.Tensor]) -> list[MomentsOf | None]:
    """What :func:`second_moments` sums up, None where there is none (yet) of the parameter's own shape."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    state = getattr(optimizer, "state", {})
    found: list[MomentsOf | None] = []
    means = _means(optimizer, parameters)
    steps = _as_numbers(
        [None if mean is None else state[p].get("step") for mean, p in zip(means, parameters, strict=True)]
    )
    for parameter, mean, done in zip(parameters, means, steps, strict=True):
        if mean is None or mean.shape != local_part(parameter).shape:
            found.append(None)
            continue
        group = groups[id(parameter)]
        betas = group.get("betas", (0.0, 1.0))
        found.append(MomentsOf(as_real_dense(mean), done, float(betas[1]), float(group.get("eps", 0.0))))
    return found


def _means(optimizer: Optimizer | Rounds, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    state = getattr(optimizer, "state", {})
    found = [state[parameter].get("exp_avg_sq") if parameter in state else None for parameter in parameters]
    return [local_part(mean) if isinstance(mean, torch.Tensor) else None for mean in found]


def _as_numbers(values: Sequence[torch.Tensor | float | None]) -> list[float]:
    """NaN for None, with one transfer for those on a device: each of its own would make training wait."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    together = len({(value.device, value.dtype) for value in tensors}) == 1
    numbers = iter(torch.stack(tensors).tolist() if together else [float(value) for value in tensors])
    return [
        next(numbers) if isinstance(value, torch.Tensor) else math.nan if value is None else float(value)
        for value in values
    ]
