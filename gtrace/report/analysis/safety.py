"""Is a codec safe? Its error beside the noise that gradients have anyway, and what that does to the batch size.

Everything is a ratio of sums over cells and steps, weighted as in the rest of the report. Averaging over M workers
divides the gradient noise and a codec's variance by M alike, so their ratio holds for any number of workers; a bias
stays, and is held against the expected gradient itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from gtrace.noise import equivalent_batch
from gtrace.report.analysis.cells import Sums, divide
from gtrace.report.names import number
from gtrace.report.statistics import UNKNOWN, Interval, ratio_of_sums

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from numpy.typing import NDArray

    from gtrace.report.analysis.cells import CellTable


SafetyVerdict = Literal["safe", "at risk", "cannot tell"]
#: A codec whose noise is certainly below this part of the gradient noise is safe: it costs a tenth of the batch.
SAFE_RATIO = 0.1
#: Bias over the norm of the expected gradient up to which descent stays descent: a cosine of at least 0.995 to it.
SAFE_BIAS = 0.1
#: No layer with a hundredth of all elements may have more noise from the codec than from its batch.
LAYER_RATIO, LAYER_SHARE = 1.0, 0.01
#: Steps that a point of a curve over training sums up, as a part of all steps.
_WINDOW = 20
#: Workers of the papers' SuperSGD, where the trace does not say how many there are.
WORKERS = 4
#: Samples that an equivalent batch is stated for where nobody says how many a step has.
PER = 100.0
#: A bias below this part of the error is what rounding leaves of a difference.
_ROUNDING = 1e-9
NOT_ASKED = "the sweep was made by a gtrace that did not look for gradient noise; sweep again with --force"


@dataclass(frozen=True, slots=True)
class Judgement:
    """What gradient noise says about one configuration.

    Attributes:
        verdict: safe, at risk, or cannot tell.
        reason: in one sentence, without its stop.
        ratio: noise ratio, variance of Q(g) over the noise of g, with its interval over steps; unknown where nobody
            can say how much of the error is bias.
        bias: norm of the bias over that of the expected gradient, 0 for an unbiased codec.
        bounded: the bias is not known, and ``bias`` is what it is at most.
        worst: the tensor with the largest noise ratio, empty where none is known.
        worst_ratio: of it.
    """

    verdict: SafetyVerdict
    reason: str
    ratio: Interval = UNKNOWN
    bias: float = math.nan
    bounded: bool = False
    worst: str = ""
    worst_ratio: float = math.nan


@dataclass(frozen=True, slots=True)
class Safety:
    """Gradient noise of a sweep, and what it says about each configuration.

    Attributes:
        why: why nothing can be said, empty where something can.
        sources: what the noise was estimated from: ``micro-batches``, ``ranks``.
        noise: tr Cov(g) / ||g||^2 over all cells, with its interval over steps.
        noise_per_step: (steps,) the same at each step.
        noise_per_tensor: (tensors,) the same of each tensor.
        workers: of the line of several workers in full precision.
        batch: samples of a step over all workers, NaN where nobody says.
        cells: tensor-steps of which the noise is known.
        judged: of each configuration, in their order.
        ratio_per_step: (configurations, steps) noise ratio, each over a window of steps.
        ratio_per_tensor: (configurations, tensors) noise ratio over all steps.
    """

    why: str = NOT_ASKED
    sources: tuple[str, ...] = ()
    noise: Interval = UNKNOWN
    noise_per_step: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    noise_per_tensor: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    workers: int = WORKERS
    batch: float = math.nan
    cells: int = 0
    judged: tuple[Judgement, ...] = ()
    ratio_per_step: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))
    ratio_per_tensor: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 0)))

    @property
    def known(self) -> bool:
        """Whether there is a yardstick at all."""
        return not self.why

    @property
    def stated_batch(self) -> float:
        """The batch that equivalent batches are stated for."""
        return self.batch if math.isfinite(self.batch) else PER

    def equivalent(self, ratio: Interval) -> tuple[float, float, float]:
        """Equivalent batch size of a noise ratio, and between which sizes it lies."""
        size = self.stated_batch
        return (
            equivalent_batch(size, ratio.estimate),
            equivalent_batch(size, ratio.high),
            equivalent_batch(size, max(ratio.low, 0.0)),
        )


def judge(
    table: CellTable,
    used: NDArray[np.bool_],
    weights: NDArray[np.float64],
    order: NDArray[np.int64],
    provenance: Mapping[str, Any],
    batch: float = math.nan,
) -> Safety:
    """Hold the errors of a sweep against its gradient noise.

    Args:
        table: C configurations, K cells.
        used: (C, K) which cells each configuration is summed over.
        weights: (steps,) part of training that each step represents.
        order: (C,) configurations in the order of the analysis.
        provenance: of the sweep.
        batch: samples of a step over all workers; NaN takes what the trace says.
    """
    about = provenance.get("noise")
    about = about if isinstance(about, dict) else {"why": NOT_ASKED}
    there = np.isfinite(table.noise)
    used = used & there
    if not used.any():
        return Safety(str(about.get("why") or "the gradient noise is known at none of the tensors and steps compared"))
    noise = np.broadcast_to(np.where(there, table.noise, 0.0), used.shape)
    signal = np.broadcast_to(np.where(there, table.signal, 0.0), used.shape)
    # A gradient that is zero on every worker has neither noise nor error.
    variance = np.where((noise == 0) & (table.squared_error == 0), 0.0, table.noise_ratio * noise)
    split: NDArray[np.bool_] = np.asarray(np.all(np.isfinite(variance) | ~used, axis=1))
    square = table.squared_error - np.where(split[:, None], variance, 0.0)
    square = np.where(square > _ROUNDING * table.squared_error, square, 0.0)
    variance = np.where(split[:, None], variance, np.nan)
    sums = Sums(table, used, weights)
    steps, tensors = len(table.steps), len(table.tensors)
    by_step = {
        name: sums.totals(values, table.step, steps)
        for name, values in (("variance", variance), ("noise", noise), ("signal", signal), ("bias", square))
    }
    energy = sums.totals(table.energy, table.step, steps)
    tensor_noise = sums.totals(noise, table.tensor, tensors)
    per_tensor = divide(sums.totals(variance, table.tensor, tensors), tensor_noise, tensor_noise > 0)
    # The noise is the gradient's, whoever encodes it: the configuration with most cells shows it.
    best = int(np.argmax(used.sum(axis=1)))
    tensor_energy = sums.totals(table.energy, table.tensor, tensors)
    judged = []
    for c in order:
        ratio = ratio_of_sums(by_step["variance"][c], by_step["noise"][c]) if split[c] else UNKNOWN
        bias = ratio_of_sums(by_step["bias"][c], by_step["signal"][c])
        judged.append(_judgement(table, ratio, bias, per_tensor[c], bounded=not split[c]))
    attrs = provenance.get("trace_attrs")
    attrs = attrs if isinstance(attrs, dict) else {}
    return Safety(
        why="",
        sources=tuple(map(str, about.get("from", ()))),
        noise=ratio_of_sums(by_step["noise"][best], energy[best]),
        noise_per_step=divide(by_step["noise"][best], energy[best], energy[best] > 0),
        noise_per_tensor=divide(tensor_noise[best], tensor_energy[best], tensor_energy[best] > 0),
        workers=_positive(attrs.get("world_size"), above=1) or WORKERS,
        batch=batch if math.isfinite(batch) else float(_positive(attrs.get("batch_size")) or math.nan),
        cells=int(used[best].sum()),
        judged=tuple(judged),
        ratio_per_step=_windows(by_step["variance"], by_step["noise"])[order],
        ratio_per_tensor=per_tensor[order],
    )


def _positive(value: object, above: int = 0) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > above else 0


def _windows(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> NDArray[np.float64]:
    """(C, S) ratios of sums over the steps around each, because one step's noise is itself not known well."""
    width = max(1, top.shape[1] // _WINDOW)
    kernel = np.ones(width)
    sums = [np.stack([np.convolve(row, kernel, mode="same") for row in rows]) for rows in (top, bottom)]
    return np.where(bottom > 0, divide(sums[0], sums[1], sums[1] > 0), np.nan)


def _judgement(
    table: CellTable, ratio: Interval, square: Interval, layers: NDArray[np.float64], *, bounded: bool
) -> Judgement:
    """The verdict on one configuration, from its noise ratio and its squared bias over the expected gradient's."""
    share = table.elements / max(1, int(table.elements.sum()))
    large = np.flatnonzero(np.isfinite(layers) & (share >= LAYER_SHARE))
    worst = int(large[np.argmax(layers[large])]) if large.size else -1
    name, worst_ratio = (table.tensors[worst], float(layers[worst])) if worst >= 0 else ("", math.nan)
    # Sums of unbiased estimates may be negative where the expected gradient is lost in its noise.
    bias = math.sqrt(square.estimate) if square.estimate >= 0 else math.inf
    most = math.sqrt(square.high) if square.known and square.high >= 0 else math.inf
    verdict, reason = _verdict(ratio, bias, most, name, worst_ratio, bounded=bounded)
    return Judgement(verdict, reason, ratio, bias, bounded, name, worst_ratio)


def _verdict(
    ratio: Interval, bias: float, most: float, layer: str, layer_ratio: float, *, bounded: bool
) -> tuple[SafetyVerdict, str]:
    if bounded and bias == 0:
        return "safe", "it has no error"
    if bounded and most < SAFE_BIAS:
        return "safe", f"all of its error is at most {_part(most)} of the expected gradient"
    if bounded:
        return "cannot tell", "how much of its error is bias, which no average shrinks, is not known; train to find out"
    if not ratio.known:
        return "cannot tell", f"no interval: {ratio.why}"
    cost, least, most_lost = (_part(r / (1 + r)) for r in (ratio.estimate, max(ratio.low, 0.0), ratio.high))
    if bias > 0 and not most < SAFE_BIAS:
        size = f"is {number(bias)} of" if math.isfinite(bias) else "is large beside"
        return "cannot tell", f"its bias {size} the expected gradient, and no average shrinks it"
    if ratio.low >= SAFE_RATIO:
        return "at risk", f"predicted to cost {cost} of the batch (at least {least})"
    if ratio.high >= SAFE_RATIO:
        return (
            "cannot tell",
            f"predicted to cost {cost} of the batch, anything from {least} to {most_lost}; capture more steps",
        )
    if layer_ratio > LAYER_RATIO:
        return "at risk", f"in {layer} its noise is {number(layer_ratio)} times the gradient's"
    biased = f"; its bias is {_part(bias)} of the expected gradient" if bias > 0 else ""
    return "safe", f"predicted to cost {cost} of the batch (at most {most_lost}){biased}"


def _part(share: float) -> str:
    return f"{number(100 * share, 2)}%"


def cheapest_safe(judged: Sequence[Judgement], bits: Sequence[float]) -> int:
    """Which configuration is safe with the fewest bits; -1 for none."""
    safe = [k for k, found in enumerate(judged) if found.verdict == "safe" and math.isfinite(bits[k])]
    return min(safe, key=lambda k: bits[k], default=-1)
