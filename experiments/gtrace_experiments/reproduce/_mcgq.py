"""What the experiments on Monte Carlo Gradient Quantization have in common: logistic regression with its step rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

import gtrace
from gtrace.coding import ENVELOPE_BYTES
from gtrace.types import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace_experiments.reproduce.experiment import Context

PAPER = "Mordido, Van Keirsbilck and Keller, Monte Carlo Gradient Quantization, CVPR Workshops 2020"
#: points of a curve in an epoch
POINTS = 10
#: logits of the planted model, standard deviation over samples
_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class Logistic:
    """L2-regularized logistic regression: mean log(1 + exp(-b a'x)) + |x|^2 / (2 n), see section 4.1.

    Attributes:
        samples: float32[n, d], rows of unit length as in the data set epsilon.
        labels: float32[n], -1 or 1.
    """

    samples: NDArray[np.float32]
    labels: NDArray[np.float32]

    @classmethod
    def planted(cls, context: Context) -> Logistic:
        """Dense synthetic data, 4000 x 500, with labels drawn from a planted model."""
        n, d = (200, 20) if context.quick else (4000, 500)
        random = np.random.default_rng(context.seed)
        samples = random.standard_normal((n, d), np.float32)
        samples /= np.linalg.norm(samples, axis=1, keepdims=True)
        logits = samples @ random.standard_normal(d, np.float32)
        logits *= _MARGIN / logits.std()
        positive = random.random(n) < 1 / (1 + np.exp(-logits))
        return cls(samples, np.where(positive, np.float32(1), np.float32(-1)))

    def objective(self, x: NDArray[np.floating]) -> float:
        """At float[d]."""
        margins = self.labels * (self.samples @ x)
        return float(np.logaddexp(0, -margins.astype(np.float64)).mean() + x @ x / (2 * len(self.labels)))

    def minimum(self) -> float:
        """The least objective, by Newton's method."""
        n, d = self.samples.shape
        a, x = self.samples.astype(np.float64), np.zeros(d)
        for _ in range(20):
            p = 1 / (1 + np.exp(self.labels * (a @ x)))
            gradient = x / n - a.T @ (self.labels * p) / n
            x -= np.linalg.solve((a.T * (p * (1 - p))) @ a / n + np.eye(d) / n, gradient)
        return self.objective(x)

    def descend(self, spec: str, seed: int, epochs: int = 3) -> tuple[list[float], float]:
        """SGD through a codec, one sample a step, with the paper's step 1 / (1 + t / n).

        Returns:
            the objective at the start and after every tenth of an epoch, and the mean bits of an encoded value.
        """
        n, d = self.samples.shape
        codec = gtrace.codec(spec)
        state, bits = codec.init(d, (d,)), 0
        x = np.zeros(d, np.float32)
        curve = [self.objective(x)]
        order = np.random.default_rng(seed)
        for t, k in enumerate(np.concatenate([order.permutation(n) for _ in range(epochs)])):
            a, b = self.samples[k], self.labels[k]
            gradient = x / np.float32(n) - a * (b / (1 + np.exp(b * (a @ x))))
            payload = codec.encode(state, gradient, Key.derive(seed, tensor="x", step=t))
            decoded = codec.decode(codec.shared(state), payload, d)
            state = codec.update(state, gradient, decoded)
            bits += 8 * (len(payload) - ENVELOPE_BYTES)
            x -= decoded / np.float32(1 + t / n)
            if (t + 1) * POINTS % n == 0:
                curve.append(self.objective(x))
        return curve, bits / (n * epochs * d)
