"""Measures the effect of codecs on the averaged gradient of a training step, with every metric of a trace sweep.

Every exchange of simulated workers has the exact gradients and the aggregate of what arrived,
so everything is measured on the training itself, without changing it.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gtrace.kernels.compare import ascending, distances, weighted_sums
from gtrace.metrics import ratio, relative, update_weights
from gtrace.noise import Dynamics, moments, noise_between
from gtrace.training.plain import seeded_batch
from gtrace.training.tasks import Batch, Task
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray
    from torch import nn

    from gtrace.training.settings import StudySettings
    from gtrace.training.vectors import Vector


class Measurement:
    """Sums over the tensors of one step, before the optimizer makes it; parameters are in the order of the model."""

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
        weights, others = self._weights(name, mean), self._weights(name, aggregated)
        if weights is None or others is None:
            self._weighted_error = self._weighted_energy = self._step_error = math.nan
        else:
            weighted_error, weighted_energy = weighted_sums(mean, aggregated, weights)
            self._weighted_error += weighted_error
            self._weighted_energy += weighted_energy
            change = np.sqrt(others) * aggregated - np.sqrt(weights) * mean
            self._step_error += float(change @ change)
        self._moved += mean.size * float(distances(ascending(mean), ascending(aggregated), mean.size, 1.0, 1.0)[0])
        self._norm1 += float(np.abs(wide).sum())
        self.seconds += time.thread_time() - start

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
            "cosine": ratio(self._inner, math.sqrt(self._energy * self._decoded)),
        }


#: products with the curvature for one vector, vectors of gradient noise, samples behind the curvature
PRODUCTS, NOISES, SAMPLES = 15, 3, 64


class GaussNewton:
    """Products of the Gauss-Newton matrix J' H J with vectors: J of the model's outputs, H of the loss in them.

    J v is the derivative of J' u in u, so there is no need of forward mode. A product takes as long as one to four
    gradients. The loss is the task's criterion; the model does not change, and its mode is kept. Torch raises
    RuntimeError if an operation has no second derivative.
    """

    def __init__(self, task: Task, model: nn.Module, batch: Batch) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        # Fused attention can only be differentiated once.
        with sdpa_kernel(SDPBackend.MATH):
            self._outputs = outputs(model, batch)
        loss = task.criterion(self._outputs, batch[1])
        (self._slope,) = torch.autograd.grad(loss, self._outputs, create_graph=True)
        self._unit = torch.zeros_like(self._outputs, requires_grad=True)
        self._back = torch.autograd.grad(
            self._outputs, self._parameters, self._unit, create_graph=True, materialize_grads=True
        )

    def __call__(self, vector: NDArray[np.float64]) -> NDArray[np.float64]:
        """G v of float64[d], all trained parameters of the model in its order, flat."""
        parts = torch.split(torch.from_numpy(vector.astype(np.float32)), [p.numel() for p in self._parameters])
        shaped = [part.view_as(p) for part, p in zip(parts, self._parameters, strict=True)]
        grad = torch.autograd.grad
        (tangent,) = grad(self._back, self._unit, shaped, retain_graph=True)
        (bent,) = grad(self._slope, self._outputs, tangent, retain_graph=True)
        found = grad(self._outputs, self._parameters, bent, retain_graph=True, materialize_grads=True)
        return torch.cat([part.reshape(-1) for part in found]).double().numpy()


def outputs(model: nn.Module, batch: Batch) -> torch.Tensor:
    """What a model says about a batch, without a change of its buffers, such as means of batch normalization."""
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    return torch.func.functional_call(model, buffers, (batch[0],))


class NoiseAhead:
    """Measures what a codec's noise costs over what the gradient's own noise costs, until the end of training.

    Noise of covariance S costs tr(W S), with W = w_T of the curvature (:func:`gtrace.noise.impulse_weight`). One vector
    x of noise gives x' W x by Lanczos quadrature, and its expectation is tr(W S). Under Adam and AdamW, x and the
    curvature are in coordinates divided by s = (sqrt(v) + eps)^(-1/2).
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, settings: StudySettings) -> None:
        self._task, self._model, self._optimizer, self._settings = task, model, optimizer, settings
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        #: why nothing can be measured in this training, in a clause; empty if it can
        self.why = ""
        if type(task).loss is not Task.loss:
            self.why = f"the loss of {task.name} is not a criterion of the model's outputs"
        elif not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam):
            self.why = f"there is no theory for {type(optimizer).__name__}"

    def ratio(
        self,
        step: int,
        gradients: Sequence[Mapping[str, NDArray[np.float32]]],
        averaged: Mapping[str, Vector],
        clipped: float,
        lr: float,
    ) -> float:
        """r_W of an unbiased codec without memory, before the optimizer's step.

        NaN if it cannot be known: a gradient that is not finite, or no second moment yet. ``clipped`` is the factor by
        which clipping scales the averaged gradient, ``lr`` the mean learning rate of the steps that are left.
        """
        exact = [self._flat(tensors) for tensors in gradients]
        # In float32 like every aggregate, so that an exact exchange has no error.
        error = self._flat(averaged) - np.mean(exact, axis=0).astype(np.float32)
        scale = self._scale()
        if scale is None or not np.isfinite(error).all() or not all(np.isfinite(one).all() for one in exact):
            return float("nan")
        if not error.any():
            return 0.0
        workers = len(exact)
        seed, size = self._settings.seed, self._settings.batch_size
        for worker in range(workers, 1 + NOISES):
            # The gradient that one more worker would have.
            with seeded_batch(self._task, seed, step, worker, size) as batch:
                loss = self._task.criterion(outputs(self._model, batch), batch[1])
                found = torch.autograd.grad(loss, list(self._named.values()), materialize_grads=True)
            exact.append(self._flat(dict(zip(self._named, (part.numpy() for part in found), strict=True))))
        with seeded_batch(self._task, seed, step, max(workers, 1 + NOISES), SAMPLES) as batch:
            try:
                newton = GaussNewton(self._task, self._model, batch)
            except RuntimeError as reason:
                self.why = f"the model cannot be differentiated twice ({str(reason).splitlines()[0]})"
                return float("nan")
        dynamics, decay = self._dynamics(lr)

        def product(vector: NDArray[np.float64]) -> NDArray[np.float64]:
            return scale * (clipped * newton(scale * vector) + decay * scale * vector)

        def cost(vector: NDArray[np.float64]) -> float:
            nodes, weights = quadrature(product, scale * vector, PRODUCTS)
            return float(weights @ dynamics.weight(np.maximum(nodes, 0), self._settings.steps - step))

        # Differences that are independent of each other, each with the covariance of one gradient's noise.
        noises = [(sum(exact[:k]) - k * exact[k]) / np.sqrt(k * (k + 1)) for k in range(1, 1 + NOISES)]
        own = float(np.mean([cost(noise) for noise in noises])) / workers
        return cost(error) / own if own > 0 else float("nan")

    def _flat(self, tensors: Mapping[str, Vector]) -> NDArray[np.float64]:
        """float64[d]: a parameter without gradient counts as zero."""
        parts = (
            np.asarray(tensors[name]).reshape(-1) if name in tensors else np.zeros(p.numel())
            for name, p in self._named.items()
        )
        return np.concatenate(list(parts), dtype=np.float64)

    def _scale(self) -> NDArray[np.float64] | None:
        """float64[d], s; None before Adam's first step."""
        if isinstance(self._optimizer, torch.optim.SGD):
            return np.ones(sum(p.numel() for p in self._named.values()))
        found = {}
        for group, p in self._grouped():
            state = self._optimizer.state.get(p, {})
            moment = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if moment is None:
                return None
            v = moment.double().numpy() / (1 - group["betas"][1] ** float(state["step"]))
            found[p] = ((np.sqrt(v) + group["eps"]) ** -0.5).reshape(-1)
        return np.concatenate([found[p] for p in self._named.values()])

    def _dynamics(self, lr: float) -> tuple[Dynamics, NDArray[np.float64]]:
        """How the optimizer answers to noise, and float64[d], the weight decay that enters the gradient."""
        decay = {p: group["weight_decay"] * (not group.get("decoupled_weight_decay")) for group, p in self._grouped()}
        coupled = np.concatenate([np.full(p.numel(), decay[p]) for p in self._named.values()])
        group = self._optimizer.param_groups[0]
        if isinstance(self._optimizer, torch.optim.SGD):
            # torch's dampening scales what enters the momentum.
            lr *= 1 - group["dampening"] * (group["momentum"] > 0)
            return Dynamics(lr=lr, momentum=group["momentum"], nesterov=group["nesterov"]), coupled
        decoupled = group["weight_decay"] if group.get("decoupled_weight_decay") else 0.0
        return Dynamics(lr=lr, momentum=group["betas"][0], averaging=True, decay=decoupled), coupled

    def _grouped(self) -> Iterator[tuple[dict[str, Any], nn.Parameter]]:
        return ((group, p) for group in self._optimizer.param_groups for p in group["params"])


#: part of the first products below which what is new is rounding
_ROUNDING = 1e-10


def quadrature(
    product: Callable[[NDArray[np.float64]], NDArray[np.float64]], start: NDArray[np.float64], steps: int = 15
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Gauss quadrature by Lanczos (Golub and Meurant 2010, chapter 4; Ubaru, Chen and Saad 2017).

    k products make the sum exact for polynomials f up to degree 2 k - 1. One quadrature serves any number of functions.
    Every vector is made orthogonal to all before it, twice, so no eigenvalue comes up again.

    Args:
        product: v -> G v for a symmetric G, float64[d] to float64[d].
        start: float64[d], x.
        steps: the most products; fewer if they leave nothing new, and then the sum is exact.

    Returns:
        nodes and weights of a sum for x' f(G) x, ``weights @ f(nodes)``; none for x = 0. Nodes ascend between the least
        and the largest eigenvalue of G; weights are not negative, and their sum is ||x||^2.
    """
    size = float(np.linalg.norm(start))
    if size == 0:
        return np.empty(0), np.empty(0)
    basis = np.empty((min(steps, start.size), start.size))
    diagonal, beside = list[float](), list[float]()
    vector, largest = start / size, 0.0
    for k in range(len(basis)):
        basis[k] = vector
        vector = product(vector)
        diagonal.append(float(basis[k] @ vector))
        for _ in range(2):
            vector = vector - (basis[: k + 1] @ vector) @ basis[: k + 1]
        left = float(np.linalg.norm(vector))
        largest = max(largest, abs(diagonal[-1]), left)
        if k + 1 == len(basis) or left <= _ROUNDING * largest:
            break
        beside.append(left)
        vector /= left
    nodes, vectors = np.linalg.eigh(np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1))
    return nodes, size**2 * vectors[0] ** 2
