"""Training with quantized weights: forward and backward see a few levels, the optimizer steps float32 weights.

The gradient with respect to the quantized weights is applied unchanged to the float32 ones (straight-through
estimator). The first and the last layer, biases and norms stay exact, and weights are rounded to the nearest level,
like in XNOR-Net (Rastegari et al., 2016), on which ZipML (Zhang et al., 2017, section 4) builds.
"""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np
import torch

from gtrace.errors import UsageError, suggest
from gtrace.fitting import optimal_levels
from gtrace.kernels import norms as _norms

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from numpy.typing import NDArray
    from torch import nn

    from gtrace.schedule import RefitSchedule

#: optimal: ZipML's levels for the tensor's own weights; uniform: evenly spaced up to the largest magnitude on both
#: sides; xnor: these, times the factor that leaves the least squared error (XNOR-Net, equation 6, for any count)
Placement: TypeAlias = Literal["optimal", "uniform", "xnor"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)
MOST_LEVELS = 256


@dataclass(frozen=True, slots=True)
class WeightLevels:
    """Placement (of ``PLACEMENTS``) and count (2 to 256) of a weight tensor's levels, negative ones and zero included.

    Raises:
        UsageError: another placement or count.

    >>> WeightLevels.parse("optimal5")
    WeightLevels(placement='optimal', count=5)
    """

    placement: Placement
    count: int

    def __post_init__(self) -> None:
        if self.placement not in PLACEMENTS:
            raise UsageError(f"levels of weights: '{self.placement}' is unknown; {suggest(self.placement, PLACEMENTS)}")
        if not 2 <= self.count <= MOST_LEVELS:
            raise UsageError(f"levels of weights: {self.count} is not between 2 and {MOST_LEVELS}")

    @classmethod
    def parse(cls, text: str) -> WeightLevels:
        """Read a placement and a count, e.g. ``optimal5``."""
        found = re.fullmatch(r"([a-z]+)(\d+)", text)
        if found is None:
            raise UsageError(f"levels of weights: '{text}' needs a placement and a count, e.g. optimal5.")
        return cls(found[1], int(found[2]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        return f"{self.placement}{self.count}"

    @property
    def bits(self) -> float:
        """Bits of one weight."""
        return math.log2(self.count)

    def fit(self, weights: NDArray[np.float32]) -> NDArray[np.float64]:
        """Levels for finite float32[n], in units of its largest magnitude: ascending, at most ``count`` of them.

        Optimal levels have the least expected error of stochastic rounding; nearest rounding has less on any levels.
        """
        if self.placement == "optimal":
            return optimal_levels(weights, self.count, method="sketch")
        return np.linspace(-1.0, 1.0, self.count)

    def round(self, weights: NDArray[np.float32], levels: NDArray[np.float64]) -> NDArray[np.float32]:
        """float32[n] moved to the nearest of the levels (in units of the largest magnitude), ties downwards."""
        scale = float(np.abs(weights).max())
        places = (levels * scale).astype(np.float32)
        middles = (places[1:] + places[:-1]) / 2
        # For few levels, comparing with every midpoint is faster than a binary search.
        if middles.size < 16:
            codes = np.zeros(weights.shape, np.uint8)
            for middle in middles:
                codes += weights > middle
        else:
            codes = np.searchsorted(middles, weights).astype(np.uint8)
        rounded: NDArray[np.float32] = places[codes]
        if self.placement == "xnor":
            rounded *= np.float32(_dot(weights, rounded) / _dot(rounded, rounded))
        return rounded


class QuantizedWeights:
    """The quantized weights of one model: all with two or more dimensions, except the first and the last layer's.

    Levels are in units of a tensor's largest magnitude, which is measured again every time; the levels are
    fitted at the steps of a schedule, the first time at once. A tensor that is all zero or not finite stays as it is.

    Attributes:
        error: ||quantized - weights||^2 / ||weights||^2 over all of them, at their last use; NaN without any.

    Raises:
        UsageError: fewer than three layers, or weights that are not float32 on the CPU.
    """

    def __init__(self, model: nn.Module, levels: WeightLevels | None, refit: RefitSchedule) -> None:
        self.levels = levels
        self._parameters = {} if levels is None else inner_weights(model)
        self.error = math.nan
        self._refit = refit
        self._fitted: dict[str, NDArray[np.float64]] = {}
        self._due = -1
        self.fit(0)

    def fit(self, step: int) -> None:
        """Fit the levels if the schedule asks for it at this step."""
        due = self._refit.latest(step)
        if self.levels is None or (self._fitted and due <= self._due):
            return
        self._due = due
        for name, parameter in self._parameters.items():
            weights = _flat(parameter)
            scale = np.abs(weights).max()
            if 0 < scale < np.inf:
                self._fitted[name] = self.levels.fit(weights / scale)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model computes with quantized weights; afterwards it has its float32 ones back."""
        exact = {name: parameter.data for name, parameter in self._parameters.items()}
        error = energy = 0.0
        try:
            for name, parameter in self._parameters.items():
                weights = _flat(parameter)
                if self.levels is None or name not in self._fitted or not 0 < np.abs(weights).max() < np.inf:
                    continue
                rounded = self.levels.round(weights, self._fitted[name])
                error += float(_norms.power_sum(rounded - weights, 2))
                energy += float(_norms.power_sum(weights, 2))
                parameter.data = torch.from_numpy(rounded).view(parameter.shape)
            self.error = error / energy if energy else math.nan
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.data = exact[name]

    def describe(self) -> dict[str, Any]:
        """Levels, bits per weight, number of quantized weights, and their tensors."""
        bits = 32.0 if self.levels is None else self.levels.bits
        elements = sum(p.numel() for p in self._parameters.values())
        return {"levels": str(self.levels), "bits": bits, "elements": elements, "tensors": list(self._parameters)}

    def to_arrays(self) -> dict[str, Any]:
        """The state for later steps, besides the weights."""
        return {"due": self._due, "levels": dict(self._fitted)}

    def load_arrays(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`to_arrays`."""
        self._due, self._fitted = saved["due"], dict(saved["levels"])


def inner_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters with two or more dimensions, by name, without those of the first and the last layer with any."""
    layers: list[dict[str, nn.Parameter]] = []
    for prefix, module in model.named_modules():
        own = {
            f"{prefix}.{name}" if prefix else name: parameter
            for name, parameter in module.named_parameters(recurse=False)
            if parameter.ndim >= 2 and parameter.requires_grad
        }
        if own:
            layers.append(own)
    if len(layers) < 3:
        raise UsageError(
            f"quantize: the first and the last layer stay exact, and this model has {len(layers)} with weights; "
            "choose a deeper one"
        )
    found = {name: parameter for layer in layers[1:-1] for name, parameter in layer.items()}
    for name, parameter in found.items():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise UsageError(
                f"quantize: {name} is {parameter.dtype} on {parameter.device}; float32 on the CPU is needed"
            )
    return found


def _flat(parameter: nn.Parameter) -> NDArray[np.float32]:
    return parameter.detach().contiguous().view(-1).numpy()


def _dot(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """Dot product in float64, independent of the number of threads."""
    return float(np.multiply(a, b, dtype=np.float64).sum())
