"""Shadow passes: what compressed neural gradients do to the weight gradients of the very same batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from gtrace.metrics import ratio

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import NDArray

    from gtrace.training.neural import Batch


@dataclass(frozen=True, slots=True)
class ShadowError:
    """How far one weight gradient is from the exact one of the same batch.

    Attributes:
        tensor: name of the parameter.
        cosine_alone: of the angle to the exact weight gradient, where only the gradients of this layer's own outputs
            are compressed; NaN where none is, or the exact gradient is zero; 0 where the compressed one is.
        error_alone: ||compressed - exact|| / ||exact|| then.
        cosine: the same where all layers are compressed, as in the training step.
        error: the same where all layers are compressed.
    """

    tensor: str
    cosine_alone: float
    error_alone: float
    cosine: float
    error: float


@dataclass(slots=True)
class ShadowSummary:
    """Means over the shadow passes of a run.

    Attributes:
        steps: how many there were.
        seconds: CPU time that they took.
    """

    steps: int = 0
    seconds: float = 0.0
    _found: dict[str, list[ShadowError]] = field(default_factory=dict)

    def add(self, errors: Iterable[ShadowError]) -> None:
        """Take in one shadow pass."""
        self.steps += 1
        for item in errors:
            self._found.setdefault(item.tensor, []).append(item)

    @property
    def tensors(self) -> list[ShadowError]:
        """Per weight gradient the means over the passes, in the order of the model."""
        return [
            ShadowError(name, *(_mean([getattr(item, part) for item in items]) for part in _PARTS))
            for name, items in self._found.items()
        ]

    @property
    def cosine(self) -> float:
        """Mean cosine over the weight gradients, all layers compressed; NaN before the first pass."""
        return _mean([item.cosine for item in self.tensors])

    @property
    def worst(self) -> ShadowError | None:
        """The weight gradient with the lowest mean cosine, all layers compressed."""
        known = [item for item in self.tensors if math.isfinite(item.cosine)]
        return min(known, key=lambda item: item.cosine, default=None)


_PARTS = ("cosine_alone", "error_alone", "cosine", "error")


def shadow(
    batch: Batch,
    loss: torch.Tensor,
    parameters: Mapping[str, torch.nn.Parameter],
    owners: Mapping[str, frozenset[str]],
) -> list[ShadowError]:
    """Compare the weight gradients of a compressed backward pass with exact ones.

    The forward pass is not repeated, so random numbers and running statistics stay as they are. There is one further
    backward pass without compression and one per layer; none of them writes to ``grad``, fits a codec or is counted.

    Args:
        batch: the open batch.
        loss: whose compressed backward pass is over, with its graph retained.
        parameters: name -> parameter; one without ``grad`` is left out.
        owners: parameter name -> the modules that own it.
    """
    held = {name: p for name, p in parameters.items() if p.grad is not None}
    with batch.only(frozenset()):
        exact = _gradients(loss, held)
    layers: dict[frozenset[str], dict[str, torch.nn.Parameter]] = {}
    for name, parameter in held.items():
        layers.setdefault(owners[name], {})[name] = parameter
    alone: dict[str, NDArray[np.float64]] = {}
    for paths, own in layers.items():
        before = batch.previewed
        with batch.only(paths):
            found = _gradients(loss, own)
        if batch.previewed > before:
            alone.update(found)
    errors = []
    for name, parameter in held.items():
        assert parameter.grad is not None
        by_itself = compare(exact[name], alone[name]) if name in alone else (math.nan, math.nan)
        errors.append(ShadowError(name, *by_itself, *compare(exact[name], _wide(parameter.grad))))
    return errors


def compare(exact: NDArray[np.float64], other: NDArray[np.float64]) -> tuple[float, float]:
    """Cosine of the angle between two float64[n], and ||other - exact|| / ||exact||.

    Both are NaN where the exact gradient is zero. Where only the other one is, nothing of the direction is left: 0.
    """
    length, reached = float(np.linalg.norm(exact)), float(np.linalg.norm(other))
    cosine = ratio(float(exact @ other), length * reached) if reached or not length else 0.0
    return cosine, ratio(float(np.linalg.norm(other - exact)), length)


def _gradients(loss: torch.Tensor, parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, NDArray[np.float64]]:
    found = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True)
    return {name: _wide(gradient) for name, gradient in zip(parameters, found, strict=True)}


def _wide(gradient: torch.Tensor) -> NDArray[np.float64]:
    flat: NDArray[np.float64] = gradient.detach().to("cpu", torch.float64).reshape(-1).numpy()
    return flat


def _mean(values: list[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return float(np.mean(known)) if known else math.nan
