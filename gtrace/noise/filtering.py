"""What noise in gradients has cost after some steps: noise filtered by curvature over a horizon."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray


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
