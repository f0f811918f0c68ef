"""Measures the effect of codecs on the averaged gradient of a training step, with every metric of a trace sweep.

Every exchange of simulated workers has the exact gradients and the aggregate of what arrived,
so everything is measured on the training itself, without changing it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.kernels.compare import distances, weighted_sums
from gtrace.metrics import relative, update_weights
from gtrace.noise import moments, noise_between
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray


class Measurement:
    """Sums over the tensors of one step.

    Args:
        optimizer: its state before the step.
        parameters: name -> parameter, in the order of the model.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self._optimizer, self._parameters = optimizer, parameters
        self._groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        #: CPU time of the measurement
        self.seconds = 0.0
        self._error, self._energy, self._decoded, self._inner = 0.0, 0.0, 0.0, 0.0
        self._noise, self._common = 0.0, 0.0
        self._weighted_error, self._weighted_energy, self._step_error = 0.0, 0.0, 0.0
        self._moved, self._norm1 = 0.0, 0.0

    def add(self, name: str, exact: Sequence[Any], decoded: Sequence[Any], aggregated: Any) -> None:
        """Add one tensor: float32[n] of each worker, exact and decoded, and the aggregate."""
        start = time.thread_time()
        total = np.zeros(aggregated.size)
        for values in exact:
            total += values
        mean = (total / len(exact)).astype(np.float32)
        wide, arrived = mean.astype(np.float64), aggregated.astype(np.float64)
        self._energy += float(wide @ wide)
        self._decoded += float(arrived @ arrived)
        self._inner += float(wide @ arrived)
        arrived -= wide
        self._error += float(arrived @ arrived)
        if len(exact) > 1:
            self._noise += noise_between(moments([exact], len(exact))).variance / len(exact)
            errors = [arrived - values for values, arrived in zip(exact, decoded, strict=True)]
            # Products of different workers' errors: their common part, which no number of workers averages out.
            self._common += noise_between(moments([errors], len(errors))).signal
        else:
            # A single worker says nothing about the variance of gradients and errors.
            self._noise = self._common = math.nan
        self._weigh(self._weights(name, mean), self._weights(name, aggregated), mean, aggregated)
        self._moved += mean.size * float(distances(np.sort(mean), np.sort(aggregated), mean.size, 1.0, 1.0)[0])
        self._norm1 += float(np.abs(wide).sum())
        self.seconds += time.thread_time() - start

    def _weigh(
        self,
        weights: NDArray[np.float64] | None,
        others: NDArray[np.float64] | None,
        mean: NDArray[np.float32],
        aggregated: NDArray[np.float32],
    ) -> None:
        if weights is None or others is None:
            self._weighted_error = self._weighted_energy = self._step_error = math.nan
            return
        error, energy = weighted_sums(mean, aggregated, weights)
        self._weighted_error += error
        self._weighted_energy += energy
        moved = np.sqrt(others) * aggregated - np.sqrt(weights) * mean
        self._step_error += float(moved @ moved)

    def _weights(self, name: str, mean: NDArray[np.float32]) -> NDArray[np.float64] | None:
        """The weight of each element of a tensor, or of the whole model, in Adam's update."""
        parts = list(self._parameters.values()) if name == WHOLE_MODEL else [self._parameters[name]]
        found, start = [], 0
        for parameter in parts:
            state = self._optimizer.state.get(parameter, {})
            if "exp_avg_sq" not in state:
                return None
            group = self._groups[id(parameter)]
            moment = state["exp_avg_sq"].detach().reshape(-1).numpy()
            values = mean[start : start + moment.size]
            start += moment.size
            found.append(update_weights(values, moment, float(group["betas"][1]), group["eps"], float(state["step"])))
        return np.concatenate(found) if start == mean.size else None

    def fields(self) -> dict[str, float]:
        """The metrics, as in the run log; NaN for unknown ones."""
        return {
            "relative_variance": relative(self._error, self._energy),
            "noise_ratio": relative(self._error, self._noise),
            "bias": relative(self._common, self._energy),
            "update_error": relative(self._weighted_error, self._weighted_energy),
            "step_error": relative(self._step_error, self._weighted_energy),
            "w1": relative(self._moved, self._norm1),
            "cosine": self._inner / math.sqrt(self._energy * self._decoded)
            if self._energy * self._decoded > 0
            else math.nan,
        }
