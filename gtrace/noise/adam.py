"""What noise costs under Adam and AdamW, with the model's curvature at hand: predicted losses over a ladder of batches.

Adam divides by the square root of the second moment v, and noise goes into v: a codec costs by its noise and by smaller
steps. So the equivalent batch is not a ratio of variances but read off predicted losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.noise.prediction import impulse_weight

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: batches whose losses are predicted
BATCHES = (4, 8, 16, 32, 64, 128, 256)
_ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamPoint:
    """Where a training with Adam or AdamW is, d weights: its state, curvature and noise.

    Weight decay in the gradient is curvature: rows sqrt(weight_decay) I in ``factors``. Decoupled decay pulls the
    weights back, its pull on the weights of now is left out, since it is the same with a codec and without.

    Attributes:
        gradient: float64[d], the expected gradient.
        momentum: float64[d], ``exp_avg``, corrected for its bias.
        v: float64[d], ``exp_avg_sq``, corrected for its bias.
        done: optimizer steps so far.
        factors: float64[m, d], the Gauss-Newton matrix is ``factors.T @ factors``.
        samples: float64[n, d], noise of single samples' gradients, centered: ``samples.T @ samples / n`` is their
            covariance. With rows that are not in ``factors`` the prediction has less bias.
        lr: learning rate, the mean over the horizon.
        betas: of the optimizer.
        eps: of the optimizer.
        decay: decoupled weight decay, AdamW's.
    """

    gradient: NDArray[np.float64]
    momentum: NDArray[np.float64]
    v: NDArray[np.float64]
    done: int
    factors: NDArray[np.float64]
    samples: NDArray[np.float64]
    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decay: float = 0.0

    def loss(self, steps: int, batch: float, variance: NDArray[np.float64] | None = None) -> float:
        """Predicted loss after some steps, minus the loss now.

        v relaxes from what it is towards the expected square of a gradient, noise included; with the mean of it over
        the horizon, the optimizer is linear: progress of the quadratic, from the momentum that there is, plus
        tr(W (s S s)), s = (sqrt(v) + eps)^(-1/2), with w_T of s G s.

        Args:
            steps: the horizon T.
            batch: samples in a step.
            variance: float64[d], of a codec's error in each element; None without a codec.
        """
        noise = (self.samples**2).mean(axis=0) / batch + (0.0 if variance is None else variance)
        s = self._scale(steps, noise)
        rows = self.factors * s
        found, basis = np.linalg.eigh(rows @ rows.T)
        kept = found > _ROUNDING * max(found[-1], 0.0)
        # Half of what is stable: training is stable, so what is above it is an error of the estimate.
        limit = (1 + self.betas[0]) / (1 - self.betas[0]) / self.lr
        directions = (basis[:, kept] / np.sqrt(found[kept])).T @ rows
        curvature = np.minimum(found[kept], limit)
        weight = impulse_weight(curvature, steps, self.lr, self.betas[0], averaging=True, decay=self.decay)
        along = ((self.samples * s) @ directions.T) ** 2 / batch
        costs = along.mean(axis=0) + (0.0 if variance is None else directions**2 @ (s**2 * variance))
        return self._progress(curvature, directions, s, steps) + float(weight @ costs)

    def _scale(self, steps: int, noise: NDArray[np.float64]) -> NDArray[np.float64]:
        """s, from the mean of v over the horizon."""
        beta, k = self.betas[1], np.arange(1, steps + 1)
        kept = float(np.mean(beta**k * (1 - beta**self.done) / (1 - beta ** (self.done + k))))
        v = kept * self.v + (1 - kept) * (self.gradient**2 + noise)
        return (np.sqrt(v) + self.eps) ** -0.5

    def _progress(
        self, curvature: NDArray[np.float64], directions: NDArray[np.float64], s: NDArray[np.float64], steps: int
    ) -> float:
        """Change of the quadratic's loss without noise."""
        gradient, momentum = s * self.gradient, s * self.momentum
        g, u = directions @ gradient, directions @ momentum
        # The rest of both is flat; the answers to one unit of each are enough.
        flat = [gradient @ gradient - g @ g, gradient @ momentum - g @ u]
        h = np.append(curvature, [0.0, 0.0])
        slope, speed, place = np.append(g, [1.0, 0.0]), np.append(u, [0.0, 1.0]), np.zeros_like(h)
        keep = self.betas[0]
        for _ in range(steps):
            speed = keep * speed + (1 - keep) * (slope + h * place)
            place = (1 - self.lr * self.decay) * place - self.lr * speed
        own = place[:-2]
        return float(g @ own + 0.5 * curvature @ own**2 + place[-2:] @ flat)


class Ladder(NamedTuple):
    """Predicted losses, minus the loss now.

    Attributes:
        batches: samples in a step.
        losses: without a codec, one a batch.
        loss: with the codec.
        equivalent: batch at which training without a codec has the codec's loss; an end of the ladder if it is beyond.
    """

    batches: tuple[int, ...]
    losses: tuple[float, ...]
    loss: float
    equivalent: float


def adam_ladder(
    point: AdamPoint, steps: int, batch: float, variance: NDArray[np.float64], batches: Sequence[int] = BATCHES
) -> Ladder:
    """The batch whose noise costs as much as a codec's, under Adam or AdamW.

    Args:
        point: where training is.
        steps: the horizon, steps that are left.
        batch: samples in a step with the codec, of all workers together.
        variance: float64[d], of the codec's error in each element of the averaged gradient.
        batches: ascending.
    """
    losses = [point.loss(steps, one) for one in batches]
    loss = point.loss(steps, batch, variance)
    # Losses fall with the batch; where the prediction is not that even, the larger batch counts.
    rising = np.maximum.accumulate(losses[::-1])
    # Between two batches noise, and so the loss, is a line in one over the batch.
    equivalent = 1 / float(np.interp(loss, rising, 1 / np.array(batches[::-1], np.float64)))
    return Ladder(tuple(batches), tuple(losses), loss, equivalent)
