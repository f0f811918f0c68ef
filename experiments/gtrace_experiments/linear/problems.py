"""The objectives of linear models: losses, proximal terms, and polynomials that replace derivatives."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace_experiments.linear import kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector: TypeAlias = NDArray[np.float64]

#: nodes at which polynomials are fitted; a hundred times the highest degree
_NODES = 4096
MAX_DEGREE = 40


@dataclass(frozen=True, slots=True)
class Prox:
    """The term R of the objective, applied after each step as argmin_y ||y - x||^2 / 2 + rate R(y).

    Attributes:
        kind: ``l1`` is strength ||x||_1, ``l2`` is strength ||x||^2 / 2, ``ball`` keeps ||x|| at or below strength.
        strength: positive if there is a term.
    """

    kind: Literal["none", "l1", "l2", "ball"] = "none"
    strength: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in _PROXES:
            raise UsageError(f"prox: '{self.kind}' is unknown; {suggest(self.kind, _PROXES)}")
        if self.kind != "none" and not (math.isfinite(self.strength) and self.strength > 0):
            raise UsageError(f"prox: {self.kind}={self.strength:g} must be positive")

    @classmethod
    def parse(cls, text: str) -> Prox:
        """Read ``l1=0.01``, ``l2=0.01``, ``ball=10`` or ``none``.

        Raises:
            UsageError: none of these.
        """
        kind, _, number = text.partition("=")
        if kind == "none" and not number:
            return cls()
        try:
            return cls(kind, float(number))  # type: ignore[arg-type]
        except ValueError as error:
            if isinstance(error, UsageError):
                raise
            raise UsageError(f"prox: '{text}' is not a valid term; write l1=0.01, l2=0.01, ball=10 or none") from None

    def __str__(self) -> str:
        return self.kind if self.kind == "none" else f"{self.kind}={self.strength:.12g}"

    @property
    def code(self) -> int:
        """As kernels know it."""
        return _PROXES[self.kind]

    def value(self, x: Vector) -> float:
        """R(x); 0 inside of a ball."""
        if self.kind == "l1":
            return self.strength * float(np.abs(x).sum())
        return self.strength * float(x @ x) / 2 if self.kind == "l2" else 0.0


_PROXES = {"none": kernels.NO_PROX, "l1": kernels.L1, "l2": kernels.L2, "ball": kernels.BALL}


@dataclass(frozen=True, slots=True)
class Problem:
    """A loss of the product of sample and model.

    Attributes:
        name: of the task.
        loss: as kernels know it.
        labels: targets are -1 and 1.
        prox: the term unless another is given.
        measure: what the reported loss is, in words.
    """

    name: str
    loss: int
    labels: bool
    measure: str
    prox: Prox = Prox()

    @property
    def squares(self) -> bool:
        """The loss is quadratic: double sampling has no bias, and the optimum a closed form."""
        return self.loss == kernels.LEAST_SQUARES

    @property
    def hinge(self) -> bool:
        """The derivative jumps at a margin of 1, so that quantization can put a sample on the wrong side."""
        return self.loss == kernels.HINGE

    def objective(self, a: NDArray[np.float32], b: Vector, x: Vector, prox: Prox) -> float:
        """Mean loss and R; of least squares the mean squared residual and 2 R, twice what a step descends on.

        Args:
            a: float32[K, n], samples.
            b: float64[K], targets.
            x: float64[n], the model.
            prox: R.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            z = a @ x
            if self.squares:
                return float(np.mean((z - b) ** 2)) + 2 * prox.value(x)
            margin = b * z
            if self.loss == kernels.LOGISTIC:
                return float(np.logaddexp(0, -margin).mean()) + prox.value(x)
            return float(np.maximum(1 - margin, 0).mean()) + prox.value(x)

    def accuracy(self, a: NDArray[np.float32], b: Vector, x: Vector) -> float | None:
        """Fraction of the labels that the sign of the product predicts; None without labels."""
        return float(np.mean((a @ x >= 0) == (b > 0))) if self.labels and len(b) else None

    def optimum(self, a: NDArray[np.float32], b: Vector, prox: Prox) -> float:
        """The least objective, NaN without a closed form."""
        if not self.squares or prox.kind not in ("none", "l2"):
            return math.nan
        wide = a.astype(np.float64)
        if prox.kind == "none":
            x = np.linalg.lstsq(wide, b, rcond=None)[0]
        else:
            ridge = prox.strength * len(b) * np.eye(wide.shape[1])
            x = np.linalg.solve(wide.T @ wide + ridge, wide.T @ b)
        return self.objective(a, b, np.asarray(x, np.float64), prox)

    @property
    def center(self) -> float:
        """The margin at which the derivative bends."""
        return 1.0 if self.hinge else 0.0

    def polynomial(self, degree: int, radius: float, gap: float) -> Vector:
        """Derivative of the loss with respect to the margin, as Chebyshev coefficients of (margin - center) / radius.

        Least squares at the Chebyshev nodes of the interval. Those of the hinge loss's step that are closer to it
        than ``gap`` are left out: no polynomial can follow a jump (ZipML, section 4.3).

        Args:
            degree: of the polynomial; at most MAX_DEGREE.
            radius: half width of the interval of margins around the center.
            gap: half width of what is left out around a jump.

        Returns:
            float64[degree + 1].
        """
        return _chebyshev(self.loss, degree, radius, gap if self.hinge else 0.0).copy()

    def derivative(self, margin: Vector) -> Vector:
        """Derivative of the loss with respect to the margin (product of label and z), float64 of the same shape."""
        if self.loss == kernels.LOGISTIC:
            return -1.0 / (1.0 + np.exp(margin))
        if self.hinge:
            return np.where(margin < 1, -1.0, 0.0)
        return margin - 1.0


@cache
def _chebyshev(loss: int, degree: int, radius: float, gap: float) -> Vector:
    problem = next(one for one in TASKS.values() if one.loss == loss)
    nodes = np.cos(np.pi * (np.arange(_NODES) + 0.5) / _NODES)
    nodes = nodes[np.abs(nodes) * radius >= gap]
    slope = problem.derivative(problem.center + radius * nodes)
    return np.asarray(np.polynomial.chebyshev.chebfit(nodes, slope, degree), np.float64)


TASKS: dict[str, Problem] = {
    "linear": Problem("linear", kernels.LEAST_SQUARES, labels=False, measure="mean squared residual"),
    "lssvm": Problem(
        "lssvm",
        kernels.LEAST_SQUARES,
        labels=True,
        measure="mean squared residual, and the penalty twice",
        prox=Prox("l2", 0.001),
    ),
    "logistic": Problem("logistic", kernels.LOGISTIC, labels=True, measure="logistic loss"),
    "svm": Problem("svm", kernels.HINGE, labels=True, measure="hinge loss"),
}
