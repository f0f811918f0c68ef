"""Which law the gradients of a trace follow, what stochastic pruning does to them, and the best float formats."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy as sp

from gtrace import __version__
from gtrace.fitting import achieved_sparsity, allocate_sparsity, pruned_cosine, threshold
from gtrace.fitting.floats import FloatFormat, ScaleRule, candidates, scale_exponent
from gtrace.fitting.magnitudes import LAWS, Fit, Magnitudes, fit_magnitudes
from gtrace.fitting.sparsity import RULES
from gtrace.kernels import counter
from gtrace.sketch import MomentSketch
from gtrace.trace.choose import steps_of
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from gtrace.trace import TensorInfo, Trace


#: With fewer non-zero elements, sampling alone gives Kolmogorov-Smirnov distances above 0.05: not averaged.
FEW = 100


@dataclass(frozen=True, slots=True)
class LayerLaws:
    """The laws of one tensor over steps.

    Attributes:
        info: the tensor.
        steps: int64[s], ascending.
        fits: the fit at each step.
    """

    info: TensorInfo
    steps: NDArray[np.int64]
    fits: tuple[Fit, ...]

    @property
    def mu_log2(self) -> NDArray[np.float64]:
        """Mean of log2 |g| at each step, float64[s]; nan if all of it is zero."""
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
        """Steps with enough elements, not all equal, to compare laws, bool[s]."""
        return np.array([fit.count >= FEW and fit.sigma > 0 for fit in self.fits], np.bool_)

    @property
    def distances(self) -> NDArray[np.float64]:
        """Distance to each law at each step, float64[s, laws] in the order of ``LAWS``."""
        return np.array([[fit.ks[name] for name in LAWS] for fit in self.fits]).reshape(len(self.fits), len(LAWS))

    @property
    def mean_distances(self) -> dict[str, float]:
        """Mean distance to each law over the judged steps; nan without any."""
        return _means(self.distances)

    @property
    def best(self) -> str:
        """The law with the least mean distance, an empty string without any."""
        return _least(self.mean_distances)


@dataclass(frozen=True, slots=True)
class LawVerdict:
    """The result over all layers.

    Attributes:
        distances: law -> mean distance over layers and steps, all with equal weight.
        nearest: law -> number of layers and steps at which it is the nearest.
        cells: number of judged layers and steps.
        layers: number of layers that were judged at any step.
        left_out: number of layers with too few elements at every step.
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
        trace: the trace that holds the gradients.
        infos: the tensors.
        steps: the steps; a tensor that is absent at all of them is left out.
        look: called with (tensor, step, gradient, its magnitudes, fit), for other measurements in the same pass.
    """
    found = []
    for info in infos:
        there = np.array([step for step in steps_of(trace, info).tolist() if step in steps], np.int64)
        fits = []
        for step in there.tolist():
            values = trace.read(info.name, step, **info.stream._asdict())
            magnitudes = Magnitudes.of(values)
            fit = fit_magnitudes(magnitudes)
            fits.append(fit)
            if look is not None:
                look(info, step, values, magnitudes, fit)
        if fits:
            found.append(LayerLaws(info, there, tuple(fits)))
    return found


def judge(layers: Sequence[LayerLaws]) -> LawVerdict:
    """Average the distances of all layers and steps that have enough elements."""
    cells = [layer.distances[layer.judged] for layer in layers]
    known = np.concatenate([np.empty((0, len(LAWS))), *cells])
    nearest = np.bincount(np.nanargmin(known, axis=1), minlength=len(LAWS)) if len(known) else np.zeros(len(LAWS), int)
    judged = sum(1 for cell in cells if len(cell))
    return LawVerdict(
        _means(known), dict(zip(LAWS, nearest.tolist(), strict=True)), len(known), judged, len(layers) - judged
    )


def verdict_sentences(verdict: LawVerdict) -> list[str]:
    """Which law fits best on average, and by how much; the answer first."""
    if not verdict.cells:
        return [f"No tensor has the {FEW} non-zero elements that are needed to compare laws."]
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


#: The sparsities to try.
ASKED = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


@dataclass(frozen=True, slots=True)
class PruningCell:
    """One gradient, pruned stochastically by every rule at every sparsity.

    Attributes:
        tensor: its name.
        step: of training.
        size: elements, zeros included.
        zeros: fraction of elements that are already zero.
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
        """The reachable sparsity: as asked, or the share of zeros before pruning; float64[asked]."""
        wanted: NDArray[np.float64] = np.maximum(np.array(ASKED), self.zeros)
        return wanted


@dataclass(frozen=True, slots=True)
class Cosines:
    """Size-weighted mean cosine of pruned and whole gradients at one step, with equal and with allocated sparsity.

    Attributes:
        step: of training.
        homogeneous: float64[asked], every tensor at the sparsity asked for.
        heterogeneous: float64[asked], sparsity allocated for the largest mean cosine at the same mean sparsity.
    """

    step: int
    homogeneous: NDArray[np.float64]
    heterogeneous: NDArray[np.float64]


@dataclass(slots=True)
class PruningTrial:
    """Collects the results of pruning at a few steps while a trace is read.

    Attributes:
        steps: the steps to try; others are skipped.
        seed: seed of the draws.
        cells: the results.
    """

    steps: frozenset[int]
    seed: int = 0
    cells: list[PruningCell] = field(default_factory=list)
    _sketches: dict[int, list[MomentSketch]] = field(default_factory=dict)

    def __call__(
        self, info: TensorInfo, step: int, values: NDArray[np.float32], _magnitudes: Magnitudes, fit: Fit
    ) -> None:
        """Prune one gradient; skips a gradient that is all zeros or not finite."""
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
        """The allocations compared, at every step that was tried."""
        found = []
        for step, sketches in sorted(self._sketches.items()):
            same, best = np.empty(len(ASKED)), np.empty(len(ASKED))
            for j, asked in enumerate(ASKED):
                same[j] = _mean_cosine(sketches, [asked] * len(sketches))
                best[j] = _mean_cosine(sketches, allocate_sparsity(sketches, asked).tolist())
            found.append(Cosines(step, same, best))
        return found


def _draw(x: NDArray[np.float32], alpha: float, uniforms: NDArray[np.float32]) -> tuple[float, float]:
    """Fraction of zeros after magnitudes are pruned with these uniforms, and its standard deviation."""
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


#: Version of what ``gtrace plan formats`` writes.
RECIPE_VERSION = 1


@dataclass(frozen=True, slots=True)
class LayerFormat:
    """The best format of ``bits`` bits for one layer, and its result at each step.

    Attributes:
        bits: 1 + E + M.
        format: the one with the least expected relative error, averaged over the steps.
        error: that mean error, E |Q(x) - x| / |x| under the fitted lognormal law.
        second: the second best format, None when there is no other.
        margin: its mean error over that of the best; 1 is a tie, nan without another.
        scale_exponents: int64[s], per step the k of the 2^k by which the gradient is multiplied.
        saturated: float64[s], fraction of the non-zero elements that are clipped at the format's largest number.
        flushed: float64[s], fraction of them that is rounded to zero.
    """

    bits: int
    format: FloatFormat
    error: float
    second: FloatFormat | None
    margin: float
    scale_exponents: NDArray[np.int64]
    saturated: NDArray[np.float64]
    flushed: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerFormats:
    """One tensor: its formats for each number of bits.

    Attributes:
        info: the tensor.
        steps: int64[s], steps with any non-zero element.
        sigma_log2: float64[s], standard deviation of log2 |g| there.
        overshoot: float64[s], octaves from the gradient's largest value up to the lognormal law's. The rule ``max``
            leaves that much of a format's range empty.
        formats: one per number of bits.
    """

    info: TensorInfo
    steps: NDArray[np.int64]
    sigma_log2: NDArray[np.float64]
    overshoot: NDArray[np.float64]
    formats: tuple[LayerFormat, ...]


@dataclass(slots=True)
class FormatTrial:
    """Tries every format of some bits on the gradients of one tensor, step by step.

    Attributes:
        bits: numbers of bits to choose formats for.
        rule: how a scale is chosen; see :func:`gtrace.fitting.floats.scale_exponent`.
    """

    bits: Sequence[int]
    rule: ScaleRule = "max"
    #: step, deviation of log2 |g| and overshoot of each gradient that was tried
    _seen: list[tuple[int, float, float]] = field(default_factory=list)
    _tried: dict[FloatFormat, list[tuple[float, int, float, float]]] = field(default_factory=dict)

    def __call__(
        self, _info: TensorInfo, step: int, _values: NDArray[np.float32], magnitudes: Magnitudes, fit: Fit
    ) -> None:
        """Try a gradient; a gradient of zeros is left out."""
        if not fit.count:
            return
        predicted = fit.mu_log2 + (fit.sigma_log2 * -float(sp.special.ndtri(1 / fit.count)) if fit.count > 1 else 0.0)
        self._seen.append((step, fit.sigma_log2, predicted - math.log2(magnitudes.sorted[-1])))
        for bits in self.bits:
            for form in candidates(bits):
                self._tried.setdefault(form, []).append(_try(form, self.rule, magnitudes, fit))

    def formats(self, info: TensorInfo) -> LayerFormats | None:
        """The formats with the least error averaged over the steps; None if no step had a non-zero element."""
        if not self._seen:
            return None
        steps, sigmas, overshoots = map(np.array, zip(*self._seen, strict=True))
        return LayerFormats(info, steps, sigmas, overshoots, tuple(self._choose(bits) for bits in self.bits))

    def _choose(self, bits: int) -> LayerFormat:
        means = {form: float(np.mean([error for error, *_ in self._tried[form]])) for form in candidates(bits)}
        best, *others = sorted(means, key=means.__getitem__)
        _, exponents, saturated, flushed = zip(*self._tried[best], strict=True)
        return LayerFormat(
            bits,
            best,
            means[best],
            others[0] if others else None,
            means[others[0]] / means[best] if others and means[best] else math.nan,
            np.array(exponents, np.int64),
            np.array(saturated),
            np.array(flushed),
        )


def _try(form: FloatFormat, rule: ScaleRule, magnitudes: Magnitudes, fit: Fit) -> tuple[float, int, float, float]:
    """Expected relative error under the fitted law, scale exponent, and the actual fractions saturated and flushed."""
    k = scale_exponent(form, rule, fit.mu_log2, fit.sigma_log2, fit.count, math.log2(magnitudes.sorted[-1]))
    error = form.expected_relative_error(fit.mu_log2 + k, fit.sigma_log2)
    x = magnitudes.sorted
    # Half the smallest number is a tie, and ties go to the even code, which is zero.
    flushed = int(np.searchsorted(x, np.float32(math.ldexp(form.min_positive / 2, -k)), side="right"))
    saturated = fit.count - int(np.searchsorted(x, np.float32(math.ldexp(form.max, -k)), side="right"))
    return error, k, saturated / fit.count, flushed / fit.count


def choose_formats(
    trace: Trace,
    infos: Sequence[TensorInfo],
    steps: frozenset[int],
    bits: Sequence[int],
    rule: ScaleRule = "max",
) -> list[LayerFormats]:
    """The format table of a trace; one gradient is held at a time.

    Args:
        trace: the trace that holds the gradients.
        infos: the tensors; those without a non-zero element at these steps are left out.
        steps: at which steps.
        bits: numbers of bits, each 3 to 8.
        rule: how scales are chosen.

    Raises:
        UsageError: there is no format of these bits, or no such rule.
    """
    found = []
    for info in infos:
        trial = FormatTrial(bits, rule)
        follow_laws(trace, [info], steps, look=trial)
        layer = trial.formats(info)
        if layer is not None:
            found.append(layer)
    return found


def recipe(
    trace: Trace, layers: Sequence[LayerFormats], rule: ScaleRule, options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The format table as plain values, for TOML and JSON.

    Args:
        trace: what it was made from; its fingerprint goes in.
        layers: the rows of the table.
        rule: how scales were chosen.
        options: what else the table depends on.
    """
    return {
        "gtrace_formats": RECIPE_VERSION,
        "provenance": {
            "gtrace": __version__,
            "trace": str(trace.path),
            "fingerprint": trace.fingerprint,
            "scale": rule,
            **(options or {}),
        },
        "layers": [_layer(layer) for layer in layers],
    }


def _layer(layer: LayerFormats) -> dict[str, Any]:
    info = layer.info
    return {
        "tensor": info.name,
        "kind": info.kind,
        "optimizer": info.optimizer,
        "rank": info.rank,
        "steps": [int(layer.steps[0]), int(layer.steps[-1])],
        "steps_seen": len(layer.steps),
        "sigma_log2": _drift(layer.sigma_log2.round(3).tolist()),
        "largest_overshoot_log2": _drift(layer.overshoot.round(2).tolist()),
        "formats": {found.bits: _format(found) for found in layer.formats},
    }


def _format(found: LayerFormat) -> dict[str, Any]:
    return {
        "format": found.format.name,
        "layout": str(found.format),
        "scale_exponent": _drift(found.scale_exponents.tolist()),
        "expected_relative_error": _rounded(found.error),
        "worst_saturated": _rounded(float(found.saturated.max())),
        "worst_flushed": _rounded(float(found.flushed.max())),
        "second": found.second.name if found.second else None,
        "margin": None if math.isnan(found.margin) else round(found.margin, 3),
    }


def _drift(values: list[Any]) -> dict[str, Any]:
    return {"first": values[0], "last": values[-1], "min": min(values), "max": max(values)}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
