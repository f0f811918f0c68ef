"""Stochastic pruning on a trace: sparsity asked for against what each threshold rule gives, cosine per allocation."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from gtrace.fitting import achieved_sparsity, allocate_sparsity, pruned_cosine, threshold
from gtrace.fitting.sparsity import RULES
from gtrace.kernels import counter
from gtrace.sketch import MomentSketch
from gtrace.types import Key

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.fitting.magnitudes import Fit, Magnitudes
    from gtrace.trace import TensorInfo

#: Sparsities that are asked for.
ASKED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class PruningCell:
    """One gradient, pruned stochastically by every rule at every sparsity.

    Attributes:
        tensor: its name.
        step: of training.
        size: elements, zeros included.
        zeros: fraction of them that is zero already.
        expected: float64[rules, asked], expected fraction of zeros afterwards.
        realized: float64[rules, asked], fraction of zeros in one draw.
        standard_error: float64[rules, asked], standard deviation of a draw's fraction.
    """

    tensor: str
    step: int
    size: int
    zeros: float
    expected: NDArray[np.float64]
    realized: NDArray[np.float64]
    standard_error: NDArray[np.float64]

    @property
    def wanted(self) -> NDArray[np.float64]:
        """What can be had: the sparsity asked for, or the zeros that are there already; float64[asked]."""
        wanted: NDArray[np.float64] = np.maximum(np.array(ASKED), self.zeros)
        return wanted


@dataclass(frozen=True, slots=True)
class Cosines:
    """Size-weighted mean cosine of pruned and whole gradients at one step, by how sparsity is shared out.

    Attributes:
        step: of training.
        homogeneous: float64[asked], every tensor at the sparsity asked for.
        heterogeneous: float64[asked], shared out so that the mean cosine is largest at the same mean sparsity.
    """

    step: int
    homogeneous: NDArray[np.float64]
    heterogeneous: NDArray[np.float64]


@dataclass(slots=True)
class PruningTrial:
    """Collects what pruning does at a few steps while a trace is read.

    Attributes:
        steps: at which steps; others are passed over.
        seed: of the draws.
        cells: what was found.
    """

    steps: frozenset[int]
    seed: int = 0
    cells: list[PruningCell] = field(default_factory=list)
    _sketches: dict[int, list[MomentSketch]] = field(default_factory=dict)

    def __call__(
        self, info: TensorInfo, step: int, values: NDArray[np.float32], _magnitudes: Magnitudes, fit: Fit
    ) -> None:
        """Prune one gradient; all zeros, or what is not finite, says nothing about rules."""
        if step not in self.steps or not fit.count or fit.nonfinite:
            return
        sketch = MomentSketch.of(values, norm="none")
        self._sketches.setdefault(step, []).append(sketch)
        shape = (len(RULES), len(ASKED))
        expected, realized, error = np.empty(shape), np.empty(shape), np.empty(shape)
        uniforms = np.empty(values.size, np.float32)
        key = Key.derive(self.seed, tensor=info.name, step=step)
        counter.fill_uniform(uniforms, np.uint64(key.high), np.uint64(key.low), 0)  # type: ignore[no-untyped-call]
        x = np.abs(values)
        for i, rule in enumerate(RULES):
            for j, asked in enumerate(ASKED):
                alpha = threshold(rule, asked, sketch)
                expected[i, j] = achieved_sparsity(alpha, sketch)
                realized[i, j], error[i, j] = _draw(x, alpha, uniforms)
        self.cells.append(PruningCell(info.name, step, values.size, fit.zeros / values.size, expected, realized, error))

    def cosines(self) -> list[Cosines]:
        """The allocations compared at every step that was seen."""
        found = []
        for step, sketches in sorted(self._sketches.items()):
            same, best = np.empty(len(ASKED)), np.empty(len(ASKED))
            for j, asked in enumerate(ASKED):
                same[j] = _mean_cosine(sketches, [asked] * len(sketches))
                best[j] = _mean_cosine(sketches, allocate_sparsity(sketches, asked).tolist())
            found.append(Cosines(step, same, best))
        return found


def _draw(x: NDArray[np.float32], alpha: float, uniforms: NDArray[np.float32]) -> tuple[float, float]:
    """Fraction of zeros when magnitudes are pruned with these uniforms, and its standard deviation."""
    if alpha <= 0:
        return float(np.count_nonzero(x == 0)) / x.size, 0.0
    survives = np.minimum(x / np.float32(alpha), 1)
    zeros = int(np.count_nonzero(uniforms >= survives))
    spread = float(np.sum(survives * (1 - survives), dtype=np.float64))
    return zeros / x.size, math.sqrt(spread) / x.size


def _mean_cosine(sketches: list[MomentSketch], shares: list[float]) -> float:
    sizes = [sketch.size for sketch in sketches]
    cosines = [pruned_cosine(threshold("exact", s, k), k) for s, k in zip(shares, sketches, strict=True)]
    return float(np.average(cosines, weights=sizes))
