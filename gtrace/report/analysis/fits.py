"""Levels, the law of the data and the way to them, of each tensor that a sweep kept them for. Plain numbers."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.report.names import natural_order
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep import SweepResult


#: Numbers of levels at which a figure tells methods apart best: 3 and 4 bits, and which of them is preferred.
FEWEST, MOST = 4, 8
#: Panels of a figure of several tensors.
MOST_TENSORS = 4


@dataclass(frozen=True, slots=True)
class Density:
    """How the values r of a tensor lie on a logarithmic axis.

    Attributes:
        law: norm and bucket size that r is relative to, ``l2:8192``.
        edges: (K + 1,) ascending, the last is 1.
        share: (K,) part of all values in each class.
        energy: (K,) part of the squared norm in each class.
        zeros: part of the values that is exactly 0.
        below: part of the values that is not 0 and below the first edge.
    """

    law: str
    edges: NDArray[np.float64]
    share: NDArray[np.float64]
    energy: NDArray[np.float64]
    zeros: float
    below: float

    def quantile(self, part: float) -> float:
        """The upper edge of the class that holds this part of the values above the first edge."""
        total = np.cumsum(self.share)
        if not len(total) or total[-1] <= 0:
            return 1.0
        return float(self.edges[1 + min(int(np.searchsorted(total, part * total[-1])), len(total) - 1)])


@dataclass(frozen=True, slots=True)
class LevelSet:
    """The magnitudes that a configuration rounds to: (L,) ascending, the last is 1."""

    spec: str
    law: str
    levels: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Convergence:
    """The objective of coordinate descent: start -> (sweeps + 1,) values, the first before any sweep.

    Attributes:
        spec: the configuration whose levels were fitted.
        objective: by start.
        best: the least objective that was found.
    """

    spec: str
    objective: dict[str, NDArray[np.float64]]
    best: float

    def excess(self, start: str) -> NDArray[np.float64]:
        """(sweeps + 1,) objective over the best one, less 1, never below 0."""
        return np.maximum(self.objective[start] / self.best - 1, 0)


@dataclass(frozen=True, slots=True)
class TensorFit:
    """What is known of one tensor at the last step of a sweep."""

    tensor: str
    step: int
    densities: tuple[Density, ...]
    levels: tuple[LevelSet, ...]
    convergence: Convergence | None


def read_fits(result: SweepResult) -> tuple[TensorFit, ...]:
    """The details of a sweep, largest tensor first, a whole model's own last."""
    last: dict[str, int] = {}
    for tensor, step, _ in result.details:
        last[tensor] = max(step, last.get(tensor, step))
    size = dict.fromkeys(last, 0.0)
    for name, n in zip(result["tensor"], result["n"], strict=True):
        if name in size:
            size[name] = max(size[name], float(n))
    order = sorted(natural_order(last), key=lambda name: (name == WHOLE_MODEL, -size[name]))
    return tuple(_fit(name, last[name], result.details) for name in order)


def _fit(tensor: str, step: int, details: Mapping[tuple[str, int, str], Any]) -> TensorFit:
    densities, levels, convergence = [], [], None
    for (name, at, what), value in details.items():
        if (name, at) != (tensor, step):
            continue
        kind, _, rest = what.partition(" ")
        if kind == "density":
            edges, share, energy = (np.array(value[key], dtype=np.float64) for key in ("edges", "share", "energy"))
            densities.append(Density(rest, edges, share, energy, float(value["zeros"]), float(value["below"])))
        elif kind == "levels":
            levels.append(LevelSet(rest, str(value["law"]), np.array(value["levels"], dtype=np.float64)))
        elif kind == "convergence" and value["best"] > 0:
            curves = {str(k): np.array(v, dtype=np.float64) for k, v in value["objective"].items()}
            convergence = Convergence(str(value["codec"]), curves, float(value["best"]))
    return TensorFit(tensor, step, tuple(densities), tuple(levels), convergence)


def common_count(fits: Sequence[TensorFit]) -> int:
    """The number of levels at which most configurations can be set side by side; 0 if there are none.

    Of :data:`FEWEST` to :data:`MOST` levels, as long as there are any: two levels are the same for every method,
    and many cannot be told apart.
    """
    counts = Counter(len(own.levels) for fit in fits for own in fit.levels)
    candidates = [n for n in counts if FEWEST <= n <= MOST] or list(counts)
    return max(candidates, key=lambda n: (counts[n], -abs(n - MOST)), default=0)


def tensors_with_levels(fits: Sequence[TensorFit], specs: Collection[str]) -> list[TensorFit]:
    """The tensors of which levels of any of these configurations can be drawn, the largest first."""
    n = common_count(fits)
    return [fit for fit in fits if any(levels_on(fit, density, specs, n) for density in fit.densities)]


def levels_on(fit: TensorFit, density: Density, specs: Collection[str], n: int) -> list[LevelSet]:
    """The ``n`` levels of each of these configurations that belong to a density; none for one that holds nothing."""
    if density.share.sum() <= 0:
        return []
    return [own for own in fit.levels if own.law == density.law and len(own.levels) == n and own.spec in specs]


def tensors_with_convergence(fits: Sequence[TensorFit]) -> list[TensorFit]:
    """The tensors of which the way to the levels is known, the largest first."""
    return [fit for fit in fits if fit.convergence is not None]
