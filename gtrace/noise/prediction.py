"""What a codec's noise costs by the end of training, predicted from what a sweep measured.

Noise of a codec with covariance S_q costs tr(W S_q) after T steps, noise of the gradient tr(W S_g), with W = w_T(G) and
the curvature G (:func:`gtrace.noise.impulse_weight`). Their ratio r says which batch in full precision would be as
noisy: B / (1 + r). Averaging over workers divides both by their number, so the ratio of one worker is that of all.

A bias is not noise. What it takes of the progress of a step is stated apart. With error feedback errors do not add up:
the weights are off by the rate times what the memory still owes (Stich and Karimireddy 2020), however long training is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.noise.quadrature import (
    between,
    filtered_costs,
    gauss_nodes,
    impulse_weight,
    moments,
    noise_moments,
    shares_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from numpy.typing import ArrayLike, NDArray

    from gtrace.trace.facts import OptimizerFacts

#: What the bounds of a ratio are widened by: with it 9 of 10 of the measured batches in docs/noise.md agree.
MISS = 3.0
#: optimizers that divide by the root of a second moment
ADAM = ("Adam", "AdamW", "NAdam")
#: Lost progress up to which a bias is left out. With more, topk and signs were worth 5 to 174 of 64 (docs/noise.md).
_SLIGHT = 0.02
#: What a memory owes may grow this much from the middle of a window to its end; more, and it is still filling.
_FILLING = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Dynamics:
    """How an optimizer answers to noise in gradients.

    Attributes:
        lr: learning rate, the mean over the horizon.
        momentum: in [0, 1); beta1 of Adam.
        nesterov: Nesterov's momentum.
        averaging: the first moment is an average, as Adam's. Curvature and noise are then those in weights that are
            divided by s = (sqrt(v) + eps)^(-1/2), with v the second moment.
        weight_decay: in the gradient, added to the curvature.
        decay: decoupled, as AdamW's.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False
    averaging: bool = False
    weight_decay: float = 0.0
    decay: float = 0.0

    @classmethod
    def of(cls, facts: OptimizerFacts, lr: float) -> Dynamics:
        """The dynamics of an optimizer that a trace tells about, at a rate.

        Raises:
            ValueError: the theory does not cover this optimizer, or the trace does not say which one it is.
        """
        decay = facts.weight_decay or 0.0
        if facts.kind == "SGD":
            # torch's dampening scales what enters the momentum.
            scale = 1.0 - (facts.dampening or 0.0) if facts.momentum else 1.0
            return cls(lr=lr * scale, momentum=facts.momentum or 0.0, nesterov=bool(facts.nesterov), weight_decay=decay)
        if facts.kind in ADAM:
            decoupled = facts.decoupled if facts.decoupled is not None else facts.kind == "AdamW"
            beta = 0.9 if facts.betas is None else facts.betas[0]
            outside, inside = (decay, 0.0) if decoupled else (0.0, decay)
            return cls(lr=lr, momentum=beta, averaging=True, decay=outside, weight_decay=inside)
        raise ValueError("the optimizer is not known" if facts.kind is None else f"there is no theory for {facts.kind}")

    def weight(self, curvature: ArrayLike, steps: int) -> NDArray[np.float64]:
        """w_T(h); curvature above half the limit of stability counts as half of it.

        Training runs at such rates, so a curvature beyond them was overestimated from few samples.
        """
        gain = 1 - self.momentum if self.averaging else 1.0
        limit = 2 * (1 + self.momentum) / gain / self.lr
        if self.nesterov:
            limit /= 1 + 2 * self.momentum
        return impulse_weight(
            np.minimum(curvature, limit / 2),
            steps,
            self.lr,
            self.momentum,
            nesterov=self.nesterov,
            averaging=self.averaging,
            decay=self.decay,
        )

    @property
    def displacement(self) -> float:
        """How far a gradient of one moves the weight in the end, without curvature."""
        return self.lr if self.averaging else self.lr / (1 - self.momentum)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseCosts:
    """What a sweep measured for predictions: C codecs, T tensors, n directions of gradient noise.

    Attributes:
        codecs: specs.
        tensors: names.
        noise: float64[n, n], Gram matrix D D^T over all tensors; a row of D has the covariance of the gradient's noise.
        gram: float64[C, T, n, n], D S_q D^T of a tensor, with S_q the diagonal covariance of the codec's error. With
            memory: (D m) (D m)^T, with m what the memory owes after some steps.
        variance: float64[C, T], tr S_q; with memory ||m||^2. NaN where a codec was not measured on a tensor.
        lost: float64[C, T], minus the inner product of error and a gradient with independent noise.
        signal: float64[T], the same of gradient and gradient.
        growth: float64[C], with memory: ||m||^2 at the end of the steps over that in the middle; NaN without.
        unbiased: of each codec.
        source: ``consecutive steps`` or ``ranks``: what the directions are from.
        batch: samples behind one gradient, NaN if unknown.
        optimizer: what the trace says about it, see :meth:`gtrace.trace.OptimizerFacts.describe`.
        lr: mean learning rate over the captured part of training, NaN if unknown.
        last: the last captured step.
        tokens: of one sample, if samples are sequences, otherwise 1: the loss is a mean over batch x tokens.
    """

    codecs: tuple[str, ...]
    tensors: tuple[str, ...]
    noise: NDArray[np.float64]
    gram: NDArray[np.float64]
    variance: NDArray[np.float64]
    lost: NDArray[np.float64]
    signal: NDArray[np.float64]
    growth: NDArray[np.float64]
    unbiased: tuple[bool, ...]
    source: str
    batch: float
    optimizer: Mapping[str, Any]
    lr: float
    last: int
    tokens: int = 1

    def memory(self, codec: int) -> bool:
        """Whether a codec remembers what it owes."""
        return bool(np.isfinite(self.growth[codec]))


class NoisePrediction(NamedTuple):
    """What a codec's noise is predicted to cost at a horizon.

    Attributes:
        ratio: r, cost of the codec's noise over the gradient's; NaN if it is not known.
        low: lower end of its interval, which 9 of 10 measured trainings agreed with.
        high: upper end.
        batch: B.
        lost: share of a step's progress that the bias takes, 0 for an unbiased codec; negative for longer steps.
        known: whether the theory covers this codec.
        why: why not, in one clause.
    """

    ratio: float
    low: float
    high: float
    batch: float
    lost: float = 0.0
    known: bool = True
    why: str = ""

    @property
    def equivalent(self) -> float:
        """The batch whose gradients in full precision cost as much noise."""
        return self.batch / (1 + self.ratio)

    @property
    def least(self) -> float:
        """The lower end of its interval."""
        return self.batch / (1 + self.high)

    @property
    def most(self) -> float:
        """The upper end."""
        return self.batch / (1 + self.low)


def cost(costs: NoiseCosts, dynamics: Dynamics, steps: int, batch: float) -> NDArray[np.float64]:
    """tr(W S_q) of each codec and tensor, which add up over tensors: the loss that a codec's noise costs.

    W is a line through two curvatures, those that the noise of all codecs together has its moments from; so what counts
    of a tensor is its variance, and its variance weighted by the curvature of each element.

    Args:
        costs: measured by a sweep.
        dynamics: of the optimizer.
        steps: the horizon.
        batch: samples behind one gradient.

    Returns:
        float64[C, T]; NaN where a codec was not measured on a tensor.
    """
    batch = batch * costs.tokens
    curved = batch * np.trace(costs.gram, axis1=2, axis2=3) / len(costs.noise)
    own = np.stack([costs.variance, curved], axis=-1)
    shares = shares_of(own, _nodes(costs, batch))
    found = shares @ dynamics.weight(np.array(_nodes(costs, batch)) + dynamics.weight_decay, steps)
    owed = 0.5 * dynamics.displacement**2 * (curved + dynamics.weight_decay * costs.variance)
    memory = np.isfinite(costs.growth)[:, None]
    # Never more than if what a memory owes were lost at each step.
    return np.where(memory, np.minimum(owed, found), found)


def _nodes(costs: NoiseCosts, batch: float) -> tuple[float, float]:
    """Two curvatures for the noise of all codecs, each with the same variance."""
    total = costs.variance.sum(axis=1)
    there = np.isfinite(total) & (total > 0)
    if not there.any():
        return 0.0, 1.0
    every = [moments(costs.noise, costs.gram[k].sum(axis=0), total[k], batch) / total[k] for k in np.flatnonzero(there)]
    mean = np.mean(every, axis=0)
    return gauss_nodes(mean) if mean[1] > 0 else (0.0, 1.0)


def predict(costs: NoiseCosts, codec: int, dynamics: Dynamics, steps: int, *, batch: float) -> NoisePrediction:
    """Predict what a codec's noise costs over the steps that are left.

    Args:
        costs: measured by a sweep.
        codec: its number.
        dynamics: of the optimizer.
        steps: the horizon.
        batch: samples behind one gradient.
    """
    unknown = partial(NoisePrediction, math.nan, math.nan, math.nan, batch, math.nan, False)
    if not np.isfinite(costs.variance[codec]).all():
        return unknown("it was not measured on every tensor")
    lost = 0.0
    if costs.memory(codec):
        if costs.growth[codec] > _FILLING:
            return unknown("its memory was still filling after the captured steps; capture longer bursts")
    elif not costs.unbiased[codec]:
        lost = float(costs.lost[codec].sum() / costs.signal.sum())
        if not abs(lost) <= _SLIGHT:
            part = f"takes {lost:.0%} of" if lost > 0 else f"adds {-lost:.0%} to"
            why = f"its error is a bias that {part} a step's progress, and what that costs by the end is not known"
            return unknown(why)._replace(lost=lost)
    weight = partial(dynamics.weight, steps=steps)
    terms = batch * costs.tokens
    noise = filtered_costs(noise_moments(costs.noise, terms), weight, dynamics.weight_decay)
    if math.isnan(noise[0]):
        return unknown("the gradients are too few, or do not differ")
    variance = float(costs.variance[codec].sum())
    own = filtered_costs(
        moments(costs.noise, costs.gram[codec].sum(axis=0), variance, terms), weight, dynamics.weight_decay
    )
    if costs.memory(codec):
        own = (float(cost(costs, dynamics, steps, batch)[codec].sum()),) * 2
    elif not variance > 0:
        own = (0.0, 0.0)
    elif math.isnan(own[0]):
        return unknown("the captured steps show no curvature along its errors")
    ratio, low, high = between(own, noise)
    return NoisePrediction(ratio, low / MISS, high * MISS, batch, lost)
