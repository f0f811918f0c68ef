"""What noise costs over the steps that are left, with the model at hand: curvature by Gauss-Newton products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from gtrace.noise import Dynamics
from gtrace.noise.lanczos import quadrature
from gtrace.training.plain import seeded_batch
from gtrace.training.tasks import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager
    from typing import Any

    from numpy.typing import NDArray
    from torch import nn

    from gtrace.training.settings import StudySettings
    from gtrace.training.tasks import Batch
    from gtrace.training.vectors import Vector

#: products with the curvature for one vector, vectors of gradient noise, samples behind the curvature
PRODUCTS, NOISES, SAMPLES = 15, 3, 64


class GaussNewton:
    """Products of the Gauss-Newton matrix J' H J with vectors: J of the model's outputs, H of the loss in them.

    J v is the derivative of J' u in u, so there is no need of forward mode. A product takes as long as one to four
    gradients.

    Args:
        task: whose criterion is the loss.
        model: in the mode it is in; it does not change.
        batch: the samples.

    Raises:
        RuntimeError: an operation of the model has no second derivative in torch.
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
        """G v.

        Args:
            vector: float64[d], all trained parameters of the model in its order, flat.
        """
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
    found: torch.Tensor = torch.func.functional_call(model, buffers, (batch[0],))
    return found


class NoiseAhead:
    """Measures what a codec's noise costs over what the gradient's own noise costs, until the end of training.

    Noise of covariance S costs tr(W S), with W = w_T of the curvature (:func:`gtrace.noise.impulse_weight`). One vector
    x of noise gives x' W x by Lanczos quadrature, and its expectation is tr(W S). Under Adam and AdamW, x and the
    curvature are in coordinates divided by s = (sqrt(v) + eps)^(-1/2).

    Args:
        task: what is trained.
        model: its model.
        optimizer: its optimizer.
        settings: of the study.

    Attributes:
        why: why nothing can be measured in this training, in a clause; empty if it can.
    """

    def __init__(self, task: Task, model: nn.Module, optimizer: torch.optim.Optimizer, settings: StudySettings) -> None:
        self._task, self._model, self._optimizer, self._settings = task, model, optimizer, settings
        self._named = {name: p for name, p in model.named_parameters() if p.requires_grad}
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

        Args:
            step: number of the step.
            gradients: of each worker, exact.
            averaged: what arrived.
            clipped: factor by which clipping scales the averaged gradient.
            lr: mean learning rate of the steps that are left.

        Returns:
            The ratio; NaN if it cannot be known: a gradient that is not finite, or no second moment yet.
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
        exact += [self._another(step, worker) for worker in range(workers, 1 + NOISES)]
        with self._batch(step, max(workers, 1 + NOISES), SAMPLES) as batch:
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

    def _batch(self, step: int, worker: int, size: int) -> AbstractContextManager[Batch]:
        return seeded_batch(self._task, self._settings.seed, step, worker, size)

    def _another(self, step: int, worker: int) -> NDArray[np.float64]:
        """The gradient that one more worker would have."""
        with self._batch(step, worker, self._settings.batch_size) as batch:
            loss = self._task.criterion(outputs(self._model, batch), batch[1])
            found = torch.autograd.grad(loss, list(self._named.values()), materialize_grads=True)
        return self._flat(dict(zip(self._named, (part.numpy() for part in found), strict=True)))

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
