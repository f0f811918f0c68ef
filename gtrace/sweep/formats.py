"""The best float format of each layer of a trace, with drift, saturation and underflow, for recipe designers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import scipy as sp

import gtrace
from gtrace.fitting.floats import FloatFormat, ScaleRule, candidates, scale_exponent
from gtrace.sweep.laws import follow_laws

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.fitting.magnitudes import Fit, Magnitudes
    from gtrace.trace import TensorInfo, Trace

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
    _steps: list[int] = field(default_factory=list)
    _sigmas: list[float] = field(default_factory=list)
    _overshoots: list[float] = field(default_factory=list)
    _tried: dict[FloatFormat, list[tuple[float, int, float, float]]] = field(default_factory=dict)

    def __call__(
        self, _info: TensorInfo, step: int, _values: NDArray[np.float32], magnitudes: Magnitudes, fit: Fit
    ) -> None:
        """Try a gradient; a gradient of zeros is left out."""
        if not fit.count:
            return
        self._steps.append(step)
        self._sigmas.append(fit.sigma_log2)
        predicted = fit.mu_log2 + (fit.sigma_log2 * -float(sp.special.ndtri(1 / fit.count)) if fit.count > 1 else 0.0)
        self._overshoots.append(predicted - math.log2(magnitudes.sorted[-1]))
        for bits in self.bits:
            for form in candidates(bits):
                self._tried.setdefault(form, []).append(_try(form, self.rule, magnitudes, fit))

    def formats(self, info: TensorInfo) -> LayerFormats | None:
        """The formats with the least error averaged over the steps; None if no step had a non-zero element."""
        if not self._steps:
            return None
        chosen = tuple(self._choose(bits) for bits in self.bits)
        overshoots = np.array(self._overshoots)
        return LayerFormats(info, np.array(self._steps, np.int64), np.array(self._sigmas), overshoots, chosen)

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
            "gtrace": gtrace.__version__,
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
