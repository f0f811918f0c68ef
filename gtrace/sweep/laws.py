"""Which law the gradients of a trace follow: fits of every tensor over steps, and what they say together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from gtrace.fitting.magnitudes import LAWS, Fit, Magnitudes, fit_magnitudes
from gtrace.trace.choose import steps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gtrace.trace import TensorInfo, Trace

#: With fewer non-zero elements, sampling alone puts a Kolmogorov-Smirnov distance above 0.05: out of averages.
FEW = 100


@dataclass(frozen=True, slots=True)
class LayerLaws:
    """One tensor over steps.

    Attributes:
        info: the tensor.
        steps: int64[s], rising.
        fits: what was fitted at each of them.
    """

    info: TensorInfo
    steps: NDArray[np.int64]
    fits: tuple[Fit, ...]

    @property
    def mu_log2(self) -> NDArray[np.float64]:
        """Mean of log2 |g| at each step, float64[s]; nan where all of it is zero."""
        return np.array([fit.mu_log2 for fit in self.fits])

    @property
    def sigma_log2(self) -> NDArray[np.float64]:
        """Standard deviation of log2 |g| at each step, float64[s]."""
        return np.array([fit.sigma_log2 for fit in self.fits])

    @property
    def counts(self) -> NDArray[np.int64]:
        """Non-zero elements at each step, int64[s]."""
        return np.array([fit.count for fit in self.fits], np.int64)

    @property
    def judged(self) -> NDArray[np.bool_]:
        """At which steps there are enough elements, and not all equal, to tell laws apart, bool[s]."""
        return np.array([fit.count >= FEW and fit.sigma > 0 for fit in self.fits], np.bool_)

    @property
    def distances(self) -> NDArray[np.float64]:
        """Distance to each law at each step, float64[s, laws] in the order of ``LAWS``."""
        return np.array([[fit.ks[name] for name in LAWS] for fit in self.fits]).reshape(len(self.fits), len(LAWS))

    @property
    def mean_distances(self) -> dict[str, float]:
        """Mean distance to each law over the steps; nan where there is none."""
        return _means(self.distances)

    @property
    def best(self) -> str:
        """The law with the least mean distance, an empty string without any."""
        return _least(self.mean_distances)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the layers say together.

    Attributes:
        distances: law -> mean distance over layers and steps, each of them counting the same.
        nearest: law -> at how many layers and steps it is the nearest.
        cells: layers and steps that were judged.
        layers: layers that were judged at any step.
        left_out: layers with too few elements at every step.
    """

    distances: dict[str, float]
    nearest: dict[str, int]
    cells: int
    layers: int
    left_out: int

    @property
    def best(self) -> str:
        """The law with the least mean distance, an empty string without any."""
        return _least(self.distances)


def follow_laws(
    trace: Trace,
    infos: Sequence[TensorInfo],
    steps: frozenset[int],
    *,
    look: Callable[[TensorInfo, int, NDArray[np.float32], Magnitudes, Fit], None] | None = None,
) -> list[LayerLaws]:
    """Fit every law to every tensor at these steps; one gradient is held at a time.

    Args:
        trace: where the gradients are.
        infos: which tensors.
        steps: at which steps; a tensor that is absent at all of them is left out.
        look: called with (tensor, step, gradient, its magnitudes, fit) for what else is to be measured in this pass.
    """
    found = []
    for info in infos:
        there = np.array([step for step in steps_of(trace, info).tolist() if step in steps], np.int64)
        fits = []
        for step in there.tolist():
            values = trace.read(info.name, step, kind=info.kind, optimizer=info.optimizer, rank=info.rank)
            magnitudes = Magnitudes.of(values)
            fit = fit_magnitudes(magnitudes)
            fits.append(fit)
            if look is not None:
                look(info, step, values, magnitudes, fit)
        if fits:
            found.append(LayerLaws(info, there, tuple(fits)))
    return found


def judge(layers: Sequence[LayerLaws]) -> Verdict:
    """Average the distances of all layers and steps that have enough elements."""
    cells = [layer.distances[layer.judged] for layer in layers]
    known = np.concatenate([np.empty((0, len(LAWS))), *cells])
    nearest = np.bincount(np.nanargmin(known, axis=1), minlength=len(LAWS)) if len(known) else np.zeros(len(LAWS), int)
    judged = sum(1 for cell in cells if len(cell))
    return Verdict(
        _means(known), dict(zip(LAWS, nearest.tolist(), strict=True)), len(known), judged, len(layers) - judged
    )


def verdict_sentences(verdict: Verdict) -> list[str]:
    """In plain words, which law fits best on average and how much, the answer first."""
    if not verdict.cells:
        return [f"No tensor has the {FEW} non-zero elements that it takes to tell laws apart."]
    best, distances = verdict.best, verdict.distances
    other = "normal" if best != "normal" else "lognormal"
    times = distances[other] / distances[best]
    ratio = f"{times:.1f} times" if times >= 1.95 else f"{times:.2f} times"
    layers = f"{verdict.layers} {'layer' if verdict.layers == 1 else 'layers'}"
    first = (
        f"The {best} law fits best on average: mean KS distance {distances[best]:.3f}, the {other} law's is "
        f"{distances[other]:.3f}, {ratio} as far ({layers}, {verdict.cells} gradients)."
    )
    ranked = sorted(verdict.nearest.items(), key=lambda item: -item[1])
    wins = ", ".join(f"{name} {number}" for name, number in ranked if number)
    sentences = [first, f"Nearest law by number of gradients: {wins}."]
    if best not in ("lognormal", "normal"):
        sentences.insert(1, f"The lognormal law's mean distance is {distances['lognormal']:.3f}.")
    if verdict.left_out:
        left = f"{verdict.left_out} {'layer' if verdict.left_out == 1 else 'layers'}"
        sentences.append(f"Not in the averages: {left} with fewer than {FEW} non-zero elements.")
    return sentences


def _means(distances: NDArray[np.float64]) -> dict[str, float]:
    out = {}
    for k, name in enumerate(LAWS):
        known = distances[:, k][np.isfinite(distances[:, k])]
        out[name] = float(known.mean()) if known.size else math.nan
    return out


def _least(distances: dict[str, float]) -> str:
    known = {name: distance for name, distance in distances.items() if distance == distance}
    return min(known, key=known.__getitem__) if known else ""
