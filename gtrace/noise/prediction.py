"""What a codec's noise costs by the end of training, predicted from what a sweep measured.

Noise of a codec with covariance S_q costs tr(W S_q) after T steps, noise of the gradient tr(W S_g), with W = w_T(G) and
the curvature G (:func:`impulse_weight`). Their ratio r says which batch in full precision would be as
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

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from numpy.typing import ArrayLike, NDArray

    from gtrace.trace.facts import OptimizerFacts

_ROUNDING = 1e-12
#: Products of this many different samples are needed.
FEWEST = 4
#: What the bounds of a ratio are widened by: with it 9 of 10 of the measured batches in docs/noise.md agree.
MISS = 3.0
#: optimizers that divide by the root of a second moment
ADAM = ("Adam", "AdamW", "NAdam")
#: Lost progress up to which a bias is left out. With more, topk and signs were worth 5 to 174 of 64 (docs/noise.md).
_SLIGHT = 0.02
#: What a memory owes may grow this much from the middle of a window to its end; more, and it is still filling.
_FILLING = 3.0


def impulse_weight(
    curvature: ArrayLike,
    steps: int,
    lr: float,
    momentum: float = 0.0,
    schedule: ArrayLike | None = None,
    *,
    nesterov: bool = False,
    averaging: bool = False,
    decay: float = 0.0,
) -> NDArray[np.float64]:
    """Expected loss that gradient noise of variance one a step has cost after some steps, by curvature.

    In a direction of curvature h, noise at one step moves the weight by a_k after k steps more, and independent noise
    at each of T steps costs w_T(h) = h / 2 * (a_1^2 + ... + a_T^2). Without momentum a_k = lr (1 - lr h)^(k-1): over a
    short horizon w = h lr^2 T / 2, over a long one lr / 4 in every direction with any curvature, and flat directions
    never get there. The optimizer is torch's ``SGD``: v <- momentum v + g, x <- x - lr v. ``Adam`` is the same in
    coordinates that are divided by s = (sqrt(v) + eps)^(-1/2), with ``averaging`` and beta1 as its momentum; curvature
    and noise are s H s and s Sigma s there. Weight decay in the gradient is added to the curvature by the caller.

    Args:
        curvature: h, of any shape, not negative; per weight squared.
        steps: T, at least 1.
        lr: learning rate.
        momentum: in [0, 1).
        schedule: (steps,) factors of the learning rate, the first step first; None for a constant rate.
        nesterov: x <- x - lr (g + momentum v) instead.
        averaging: v <- momentum v + (1 - momentum) g instead, as Adam's first moment.
        decay: decoupled weight decay as AdamW's: x <- (1 - lr decay) x before the rest.

    Returns:
        float64 of the shape of ``curvature``; infinite if the steps are unstable beyond what numbers hold.

    Raises:
        ValueError: a number out of range, or a schedule of another length.
    """
    h = np.asarray(curvature, np.float64)
    if (h < 0).any() or not np.isfinite(h).all():
        raise ValueError("curvature must be finite and not negative")
    if steps < 1 or not lr > 0 or not 0 <= momentum < 1 or decay < 0:
        raise ValueError(f"steps {steps}, lr {lr:g}, momentum {momentum:g} or decay {decay:g} is out of range")
    rates = np.full(1, lr) if schedule is None else lr * np.asarray(schedule, np.float64)
    if schedule is not None and rates.shape != (steps,):
        raise ValueError(f"a schedule of {steps} steps has {steps} factors, not {rates.shape}")
    gain = 1 - momentum if averaging else 1.0

    def linear(rate: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """(..., 2, 2) and (2,): how a step maps weight and momentum, and what noise of one does to them."""
        new = np.stack([gain * h, np.full_like(h, momentum)], axis=-1)
        kept = np.stack([np.full_like(h, 1 - rate * decay), np.zeros_like(h)], axis=-1)
        push, noise = (momentum, gain * (1 + momentum)) if nesterov else (1.0, gain)
        extra = np.stack([gain * h, np.zeros_like(h)], axis=-1) if nesterov else 0.0
        return np.stack([kept - rate * (push * new + extra), new], axis=-2), np.array([-rate * noise, gain])

    with np.errstate(over="ignore", invalid="ignore"):
        total = _constant(*linear(lr), steps) if schedule is None else _scheduled([linear(r) for r in rates], h.shape)
        weight = 0.5 * h * total
    return np.where(np.isfinite(weight), weight, np.inf)


def _constant(step: NDArray[np.float64], noise: NDArray[np.float64], steps: int) -> NDArray[np.float64]:
    """Sum of squared responses of the weight, by doubling: S_2n = S_n + A^n S_n A^nT, S_(n+1) = b b^T + A S_n A^T."""
    first = np.broadcast_to(np.outer(noise, noise), step.shape)
    total, power = first, step
    for bit in bin(steps)[3:]:
        total = total + power @ total @ power.swapaxes(-1, -2)
        power = power @ power
        if bit == "1":
            total = first + step @ total @ step.swapaxes(-1, -2)
            power = power @ step
    return np.asarray(total[..., 0, 0])


def _scheduled(
    steps: Sequence[tuple[NDArray[np.float64], NDArray[np.float64]]], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """The same for steps that differ, from the last one back: how the weight at the end answers to each."""
    answer = np.broadcast_to(np.array([1.0, 0.0]), (*shape, 2))
    total = np.zeros(shape)
    for step, noise in reversed(steps):
        total = total + (answer @ noise) ** 2
        answer = np.squeeze(answer[..., None, :] @ step, -2)
    return total


class FilteredRatio(NamedTuple):
    """What a codec's noise costs over what the gradient's own noise costs, at a horizon.

    Attributes:
        ratio: r_W; the equivalent batch is B / (1 + r_W).
        low: lower end of what the moments of curvature allow.
        high: upper end.
    """

    ratio: float
    low: float
    high: float


def filtered_ratio(
    gram: NDArray[np.float64],
    codec_gram: NDArray[np.float64],
    codec_variance: float,
    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    samples: float,
    batch: float,
    weight_decay: float = 0.0,
) -> FilteredRatio:
    """r_W = tr(W S_q) / tr(W S_g): a codec's noise over the gradient's, each filtered by curvature.

    X holds m gradients at the same weights in its rows. Their covariance times the samples of one is the empirical
    Fisher, close to the Gauss-Newton matrix for losses that are likelihoods. Three small sums over the elements are
    enough, and tensors and chunks add up; see :func:`bounded_ratio`.

    Args:
        gram: (m, m) X X^T, m at least 5.
        codec_gram: (m, m) X S_q X^T with S_q the codec's covariance: diag(variance of each element), or e e^T averaged
            over drawn errors e.
        codec_variance: tr S_q, the codec's variance over all elements.
        weight: w_T(h) for an array of curvatures, e.g. of :func:`impulse_weight`.
        samples: that each of the m gradients is the mean of.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio between two bounds; NaN if the gradients do not differ.

    Raises:
        ValueError: fewer than five gradients.
    """
    if len(gram) < FEWEST + 1:
        raise ValueError(f"curvature needs at least {FEWEST + 1} gradients at the same weights, not {len(gram)}")
    # Orthonormal contrasts of m gradients are m - 1 independent samples of their noise.
    contrasts = contrasts_of(np.ones((1, len(gram)))) * math.sqrt(samples / batch)
    noise, codec = (contrasts @ matrix @ contrasts.T for matrix in (gram, codec_gram))
    if np.trace(noise) * batch / samples <= _ROUNDING * np.trace(gram):
        return FilteredRatio(math.nan, math.nan, math.nan)
    return bounded_ratio(noise, codec, codec_variance, weight, batch=batch, weight_decay=weight_decay)


def contrasts_of(design: NDArray[np.float64]) -> NDArray[np.float64]:
    """Orthonormal rows, float64[n - rank, n], that are orthogonal to every row of float64[m, n]."""
    _, values, rows = np.linalg.svd(design)
    zero = np.finfo(np.float64).eps * max(design.shape) * values.max(initial=0)
    return rows[int((values > zero).sum()) :]


def bounded_ratio(
    gram: NDArray[np.float64],
    codec_gram: NDArray[np.float64],
    codec_variance: float,
    weight: Callable[[NDArray[np.float64]], NDArray[np.float64]],
    *,
    batch: float,
    weight_decay: float = 0.0,
) -> FilteredRatio:
    """r_W from few samples of the noise, whose own directions would all look too steep.

    n samples d of covariance F / B show a curvature that is too large by about tr(F) / n in each of their directions.
    Sums over different samples have no such bias (Kong and Valiant 2017): tr(F S_q) is the mean of B d' S_q d,
    tr(F F S_q) that of B^2 (d' S_q e) (e' d), and so on. From the moments 0 to 3 of curvature follow two quadratures of
    tr(W S_q), by Gauss and Radau, one above and one below it while the moments are exact; the same for the gradient.

    Args:
        gram: (n, n) D D^T, n at least 4.
        codec_gram: (n, n) D S_q D^T.
        codec_variance: tr S_q.
        weight: w_T(h) for an array of curvatures, e.g. of :func:`~gtrace.noise.impulse_weight`.
        batch: samples of the gradient that is encoded.
        weight_decay: L2, added to the curvature of every direction.

    Returns:
        The ratio whose equivalent batch is the geometric mean of those of both quadratures, which are its ends; NaN if
        the samples show no curvature.

    Raises:
        ValueError: fewer than four samples.
    """
    of_codec = moments(gram, codec_gram, codec_variance, batch)
    of_noise = noise_moments(gram, batch)
    return between(*(filtered_costs(one, weight, weight_decay) for one in (of_codec, of_noise)))


def between(codec: tuple[float, float], noise: tuple[float, float]) -> FilteredRatio:
    """The ratio of a codec's costs to those of the gradient's noise, each by both quadratures."""
    ends = sorted(own / other if other > 0 else math.nan for own, other in zip(codec, noise, strict=True))
    return FilteredRatio(math.sqrt(math.prod(1 + end for end in ends)) - 1, *ends)


def moments(
    gram: NDArray[np.float64], codec_gram: NDArray[np.float64], codec_variance: float, batch: float
) -> NDArray[np.float64]:
    """float64[4]: tr(F^k S_q) for k from 0 to 3, without bias; arguments as in :func:`bounded_ratio`.

    Raises:
        ValueError: fewer than four samples.
    """
    n = len(gram)
    if n < FEWEST:
        raise ValueError(f"moments of curvature need at least {FEWEST} samples of noise, not {n}")
    g, q = (matrix - np.diag(np.diag(matrix)) for matrix in (gram, codec_gram))
    two, three = n * (n - 1), n * (n - 1) * (n - 2)
    found = [codec_variance, np.trace(codec_gram) / n, (q * g).sum() / two, (q * (g @ g)).sum() / three]
    return np.array(batch ** np.arange(4.0) * found)


def noise_moments(gram: NDArray[np.float64], batch: float) -> NDArray[np.float64]:
    """float64[4]: tr(F^k S_g) for k from 0 to 3, without bias; arguments as in :func:`bounded_ratio`."""
    n = len(gram)
    g = gram - np.diag(np.diag(gram))
    squares = g @ g
    # Of all closed walks of four steps, those over four different samples.
    walks = (squares**2).sum() - 2 * (np.diag(squares) ** 2).sum() + (g**4).sum()
    two, three, four = n * (n - 1), n * (n - 1) * (n - 2), n * (n - 1) * (n - 2) * (n - 3)
    found = [np.trace(gram) / n, (g * g).sum() / two, (g * squares).sum() / three, walks / four]
    return np.array(batch ** np.arange(4.0) * found)


def filtered_costs(
    moments: NDArray[np.float64], weight: Callable[[NDArray[np.float64]], NDArray[np.float64]], weight_decay: float
) -> tuple[float, float]:
    """Integrals of w from moments 0 to 3: with a node at no curvature, and without; NaN without curvature."""
    if not moments[1] > 0:
        return math.nan, math.nan
    radau, gauss = (
        float(np.dot(weight(np.array(nodes) + weight_decay), shares_of(moments, nodes)))
        for nodes in ((0.0, _steepest(moments)), gauss_nodes(moments))
    )
    return radau, gauss


def _steepest(moments: NDArray[np.float64]) -> float:
    """The curvature whose share, beside no curvature, has moments 1 and 2; all of it if few samples deny the rest."""
    m0, m1, m2, _ = moments.tolist()
    return float(max(m2 / m1, m1 / m0))


def shares_of(moments: NDArray[np.float64], nodes: tuple[float, float]) -> NDArray[np.float64]:
    """How much of moment 0 is at each of two nodes, if moment 1 is right; float64[..., 4] gives float64[..., 2]."""
    low, high = nodes
    steep = (moments[..., 1] - low * moments[..., 0]) / (high - low)
    return np.stack([moments[..., 0] - steep, steep], axis=-1)


def gauss_nodes(moments: NDArray[np.float64]) -> tuple[float, float]:
    """The two curvatures that moments 0 to 3 are those of; the first is 0 if there are no such two."""
    m0, m1, m2, m3 = moments.tolist()
    spread = m0 * m2 - m1**2
    if spread > 0:
        # The nodes are the roots of the second orthogonal polynomial h^2 + c1 h + c0.
        c0, c1 = (m1 * m3 - m2**2) / spread, (m1 * m2 - m0 * m3) / spread
        root = c1**2 - 4 * c0
        if root > 0 and c0 >= 0 and c1 <= 0:
            return (-c1 - math.sqrt(root)) / 2, (-c1 + math.sqrt(root)) / 2
    return 0.0, _steepest(moments)


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
        shorter: share by which the noise makes Adam's steps shorter, 0 under other optimizers.
        memory: whether it is what a memory still owes: often less is lost than the likely value says.
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
    shorter: float = 0.0
    memory: bool = False

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
    nodes = _nodes(costs, batch)
    found = shares_of(own, nodes) @ dynamics.weight(np.array(nodes) + dynamics.weight_decay, steps)
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


def shorter_steps(costs: NoiseCosts, specs: Sequence[str], workers: int = 1) -> float:
    """Share by which the noise of each tensor's codec makes Adam's steps shorter: it is in the second moment v, too.

    In coordinates divided by s an element's energy is the root of v, so sums over elements are enough: steps are
    shorter by 1 - sqrt(E / (E + V)), with E the energy of the average of the workers' gradients and V the variance
    that codecs without bias and memory add to it. An equivalent batch compares noise and does not show that.
    """
    known = {spec: k for k, spec in enumerate(costs.codecs) if costs.unbiased[k] and not costs.memory(k)}
    added = sum(float(costs.variance[known[spec], t]) for t, spec in enumerate(specs) if spec in known)
    noise = np.trace(costs.noise) / len(costs.noise)
    energy = max(float(costs.signal.sum()), 0.0) + noise / workers
    return 1 - math.sqrt(energy / (energy + added / workers)) if energy > 0 else math.nan


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
    return NoisePrediction(ratio, low / MISS, high * MISS, batch, lost, memory=costs.memory(codec))
