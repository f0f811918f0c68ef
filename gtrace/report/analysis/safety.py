"""Is a codec safe? What its noise costs by the end of training, as a batch size, and what its bias takes of the way.

The prediction is that of :mod:`gtrace.noise`: the codec's noise and the gradient's own, filtered by curvature over the
horizon. Its likely value convicts a codec, and its worse end clears one; docs/noise.md has how often either was wrong.
If it is not known, the plain ratio of the two variances is left: measured, codecs cost less than it says, so it can
clear a codec but not convict one. Ratios are of sums over cells and steps, weighted as in the rest of the
report. Averaging over M workers divides both variances by M, but not a bias, which is compared with the expected
gradient.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.noise import Dynamics, NoiseCosts, NoisePrediction, cost, predict, shorter_steps
from gtrace.report.analysis.cells import Sums, divide
from gtrace.report.names import count, number
from gtrace.report.statistics import UNKNOWN, Interval, ratio_of_sums
from gtrace.sweep.noise_cost import noise_costs
from gtrace.trace.facts import OPTIMIZERS, OptimizerFacts
from gtrace.trace.format import SKETCH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gtrace.kernels import Flags, Floats, Ints
    from gtrace.sweep import SweepResult


SafetyVerdict = Literal["safe", "at risk", "cannot tell"]
#: Part of the batch, and of a step's progress, that a safe codec costs at most, and one at risk more.
SAFE_COST = 0.1
#: Steps from which on lost progress counts: a bias and shorter steps add up, and over 20 steps signs and codecs under
#: Adam often train faster (docs/noise.md).
MANY_STEPS = 100
#: Share by which a safe codec's noise makes Adam's steps shorter at most: what a tenth less of the batch does to
#: gradients that are all noise. Training from the start is slower by more than that (docs/noise.md).
SAFE_SHORTER = 0.05
#: Share up to which a higher learning rate is advised to make up for it.
MADE_UP = 0.5
#: Bias over the norm of the expected gradient up to which descent stays descent: a cosine of at least 0.995 to it.
SAFE_BIAS = 0.1
#: Noise over the energy of the average gradient up to which a prediction is believed: nine times as much made training
#: from the start diverge where little cost was predicted (docs/noise.md).
MOST_NOISE = 4.0
#: A smaller part of the batch, or of a step's progress, can't be seen in a training.
SEEN = 0.005
#: With a smaller part of the batch left nothing is learned.
HOPELESS_BATCH = 0.02
#: Parts in words; the nearest one counts.
_PARTS = {
    0.01: "about 1%",
    0.02: "about 2%",
    0.05: "about a twentieth",
    0.1: "about a tenth",
    0.2: "about a fifth",
    1 / 3: "about a third",
    0.5: "about half",
    2 / 3: "about two thirds",
    0.8: "about four fifths",
    0.9: "about nine tenths",
    1.0: "nearly all",
}
#: A gradient whose norm is below this multiple of the quantization noise trains worse (Chmiel et al. 2025, FP4 All the
#: Way, abstract; arXiv 2505.19115): then the noise is more than a third of the gradient's energy.
LEAST_OVER_NOISE = math.sqrt(3)
#: Workers of the papers' SuperSGD, where the trace does not say how many there are.
WORKERS = 4
#: A bias below this part of the error is what rounding leaves of a difference.
_ROUNDING = 1e-9
NOT_ASKED = "the sweep was made by a gtrace that did not look for gradient noise; sweep again with --force"
NOT_MEASURED = "this sweep did not measure it; sweep again, on a trace with three consecutive steps"


@dataclass(frozen=True, slots=True)
class Outlook:
    """What the cost of noise is predicted from.

    Attributes:
        why: why it can't be predicted, and what to do about it, in one clause; empty if it can.
        costs: what the sweep measured; the batch of its gradients is known.
        dynamics: the optimizer.
        horizon: number of steps.
        batch: samples of a step over all workers.
        workers: whose average is taken.
        assumed: neither the user nor the trace says how many steps there are; it is as many as were captured.
    """

    why: str = NOT_MEASURED
    costs: NoiseCosts | None = None
    dynamics: Dynamics | None = None
    horizon: int = 0
    batch: float = math.nan
    workers: int = 1
    assumed: bool = False

    def predict(self, spec: str) -> NoisePrediction | None:
        """What a codec is predicted to cost; None if that was not measured."""
        if self.costs is None or self.dynamics is None or spec not in self.costs.codecs:
            return None
        codec = self.costs.codecs.index(spec)
        found = predict(self.costs, codec, self.dynamics, self.horizon, batch=self.costs.batch)
        shorter = self.shorter(dict.fromkeys(self.costs.tensors, spec))
        if self.dynamics.averaging and self.costs.memory(codec):
            # What arrives late and at once is in v, too; elements of small gradients get most of it.
            shorter = math.nan
        # Averaging divides both noises by the number of workers.
        return found._replace(batch=self.batch, shorter=shorter)

    def shorter(self, specs: Mapping[str, str]) -> float:
        """Share by which the noise of each tensor's codec makes Adam's steps shorter; 0 under other optimizers."""
        if self.costs is None or self.dynamics is None or not self.dynamics.averaging:
            return 0.0
        return shorter_steps(self.costs, [specs.get(name, "") for name in self.costs.tensors], self.workers)

    def parts(self) -> dict[tuple[str, str], float]:
        """Part of each codec's cost that is in each tensor, by spec and tensor."""
        if self.costs is None or self.dynamics is None:
            return {}
        found = cost(self.costs, self.dynamics, self.horizon, self.costs.batch)
        whole = np.broadcast_to(found.sum(axis=1, keepdims=True), found.shape)
        names = [(spec, tensor) for spec in self.costs.codecs for tensor in self.costs.tensors]
        return dict(zip(names, divide(found, whole, whole > 0).ravel().tolist(), strict=True))


def outlook_on(
    result: SweepResult, steps: Ints, batch: float, horizon: int | None, workers: int | None = None
) -> Outlook:
    """What the cost of noise is predicted from, of a sweep with these ``steps``, ascending.

    ``batch`` is in samples over all workers; a NaN takes what the trace says of each. Without a ``horizon`` it is the
    rest of the training from the first step on, or as many steps as the run had until the last captured one. Without
    ``workers`` they are those of the run that was captured.
    """
    attrs, costs = trace_attrs(result.provenance), noise_costs(result)
    if costs is None and attrs.get(SKETCH):
        return Outlook("the trace holds sketches instead of gradients; sweep one that holds gradients")
    if costs is None:
        return Outlook()
    workers = workers or workers_of(result.provenance)
    own = costs.batch if math.isfinite(costs.batch) else batch / workers
    if not math.isfinite(own):
        return Outlook("the trace does not have the batch size; add it with --batch-size")
    if not costs.lr > 0:
        return Outlook("the trace does not have the learning rate; capture it again")
    facts = OptimizerFacts.of({OPTIMIZERS: {"0": dict(costs.optimizer)}})
    try:
        dynamics = Dynamics.of(facts, costs.lr)
    except ValueError as error:
        remedy = "capture it again" if facts.kind is None else "train with the codec to find out"
        return Outlook(f"{error}; {remedy}")
    length = OptimizerFacts.of(attrs).length
    if not horizon and length is not None and len(steps):
        horizon = max(length - int(steps[0]), 0)
    return Outlook(
        why="",
        costs=dataclasses.replace(costs, batch=own),
        dynamics=dynamics,
        horizon=horizon or costs.last + 1,
        batch=batch if math.isfinite(batch) else own * workers,
        workers=workers,
        assumed=not horizon,
    )


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is known about the safety of one configuration.

    Attributes:
        verdict: safe, at risk, or cannot tell.
        reason: in one sentence, without its stop.
        prediction: cost of its noise and its bias at the horizon; None if it is not known.
        ratio: variance of Q(g) over the noise of g, with its interval over steps; unknown if the bias is.
        bias: norm of the bias over that of the expected gradient, 0 for an unbiased codec.
        bounded: the bias is not known, and ``bias`` is what it is at most.
        noise: variance of the average that is sent over the energy of the average gradient.
    """

    verdict: SafetyVerdict
    reason: str
    prediction: NoisePrediction | None = None
    ratio: Interval = UNKNOWN
    bias: float = math.nan
    bounded: bool = False
    noise: float = 0.0

    @property
    def in_short(self) -> str:
        """The verdict, and what it comes from if the equivalent batch beside it does not show that."""
        found, cause = self.prediction, ""
        if found is None and self.verdict == "at risk":
            cause = ": bias"
        elif found is not None and found.shorter > SAFE_SHORTER and found.equivalent >= (1 - SAFE_COST) * found.batch:
            cause = ": steps"
        return f"{self.verdict}{cause}"

    @property
    def close(self) -> bool:
        """Whether it is not safe only because the prediction has an interval, or Adam needs another learning rate."""
        found = self.prediction
        if found is None or self.verdict == "safe":
            return False
        likely = found.equivalent >= (1 - SAFE_COST) * found.batch and found.lost <= SAFE_COST
        return likely and found.shorter <= MADE_UP and self.noise <= MOST_NOISE


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
        judged: spec -> what is known of it, in the order of the configurations.
        ratio_per_tensor: (configurations, tensors) noise ratio over all steps.
        outlook: what costs are predicted from.
    """

    why: str = NOT_ASKED
    sources: tuple[str, ...] = ()
    noise: Interval = UNKNOWN
    noise_per_step: Floats = field(default_factory=lambda: np.zeros(0))
    noise_per_tensor: Floats = field(default_factory=lambda: np.zeros(0))
    workers: int = WORKERS
    judged: Mapping[str, Judgement] = field(default_factory=dict)
    ratio_per_tensor: Floats = field(default_factory=lambda: np.zeros((0, 0)))
    outlook: Outlook = field(default_factory=Outlook)

    @property
    def known(self) -> bool:
        """Whether there is a yardstick at all."""
        return not self.why

    def record(self, found: Judgement) -> dict[str, float | None] | None:
        """A prediction for other programs; None without one."""
        prediction = found.prediction
        if prediction is None:
            return None
        return {
            "horizon": self.outlook.horizon,
            "workers": self.outlook.workers,
            "batch": prediction.batch,
            "equivalent_batch": prediction.equivalent,
            "equivalent_batch_low": prediction.least,
            "equivalent_batch_high": prediction.most,
            "lost_progress": prediction.lost,
            "shorter_steps": None if math.isnan(prediction.shorter) else prediction.shorter,
        }


def trace_attrs(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a sweep's trace says of its run; empty if the results do not hold it."""
    found = provenance.get("trace_attrs")
    return found if isinstance(found, dict) else {}


def captured(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What its capture said in the end; empty if nothing did."""
    found = trace_attrs(provenance).get("capture")
    return found if isinstance(found, dict) else {}


def workers_of(provenance: Mapping[str, Any]) -> int:
    """Workers of the run that a sweep's trace is of; 1 where nobody says."""
    found = trace_attrs(provenance).get("world_size")
    return found if isinstance(found, int) and not isinstance(found, bool) and found > 1 else 1


def averaged_over(provenance: Mapping[str, Any]) -> int:
    """Ranks whose average the gradients of a sweep were, 1 for those of each rank itself or where nobody says."""
    stages = provenance.get("stages")
    if not isinstance(stages, list):
        stages = [captured(provenance).get("stage")]
    return workers_of(provenance) if "reduced" in stages else 1


def whose_gradient(provenance: Mapping[str, Any]) -> str:
    """Whose gradient the errors of a sweep are about: ``one worker's gradient``."""
    ranks = averaged_over(provenance)
    return "one worker's gradient" if ranks == 1 else f"the average of {count(ranks, 'rank')}' gradients"


def judge(sums: Sums, order: Ints, provenance: Mapping[str, Any], outlook: Outlook) -> Safety:
    """Say of each configuration of a sweep whether it is safe; ``order`` (C,) is that of the analysis."""
    about = provenance.get("noise")
    about = about if isinstance(about, dict) else {"why": NOT_ASKED}
    table = sums.table
    there = np.isfinite(table.noise)
    used = sums.used & there
    if not used.any():
        return Safety(str(about.get("why") or "the gradient noise is known at none of the tensors and steps compared"))
    noise = np.broadcast_to(np.where(there, table.noise, 0.0), used.shape)
    signal = np.broadcast_to(np.where(there, table.signal, 0.0), used.shape)
    # A gradient that is zero on every worker has neither noise nor error.
    variance = np.where((noise == 0) & (table.squared_error == 0), 0.0, table.columns["noise_ratio"] * noise)
    split: Flags = np.asarray(np.all(np.isfinite(variance) | ~used, axis=1))
    square = table.squared_error - np.where(split[:, None], variance, 0.0)
    square = np.where(square > _ROUNDING * table.squared_error, square, 0.0)
    variance = np.where(split[:, None], variance, np.nan)
    sums = Sums(table, used, sums.weights)
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
    judged = {}
    for c in order:
        ratio = ratio_of_sums(by_step["variance"][c], by_step["noise"][c]) if split[c] else UNKNOWN
        bias = ratio_of_sums(by_step["bias"][c], by_step["signal"][c])
        energies = (float(by_step[name][c].sum()) for name in ("variance", "signal", "noise"))
        judged[table.specs[c]] = _judgement(outlook, table.specs[c], ratio, bias, *energies)
    workers = workers_of(provenance)
    return Safety(
        why="",
        sources=tuple(map(str, about.get("from", ()))),
        noise=ratio_of_sums(by_step["noise"][best], energy[best]),
        noise_per_step=divide(by_step["noise"][best], energy[best], energy[best] > 0),
        noise_per_tensor=divide(tensor_noise[best], tensor_energy[best], tensor_energy[best] > 0),
        workers=workers if workers > 1 else WORKERS,
        judged=judged,
        ratio_per_tensor=per_tensor[order],
        outlook=outlook,
    )


def _judgement(
    outlook: Outlook, spec: str, ratio: Interval, square: Interval, variance: float, signal: float, own: float
) -> Judgement:
    bounded = math.isnan(variance)
    # Sums of unbiased estimates may be negative where the expected gradient is lost in its noise.
    bias = math.sqrt(square.estimate) if square.estimate >= 0 else math.inf
    most = math.sqrt(square.high) if square.known and square.high >= 0 else math.inf
    found = outlook.predict(spec)
    if found is not None and found.known:
        verdict, reason = verdict_on(found, outlook.horizon), cost_in_words(found, outlook.horizon)
        energy = outlook.workers * max(signal, 0.0) + own
        noise = variance / energy if variance > 0 and energy > 0 else 0.0
        if verdict == "safe" and noise > MOST_NOISE:
            verdict = "cannot tell"
            reason += f"; its noise has {number(noise, 2)} times the gradient's energy, with which training may diverge"
        return Judgement(verdict, reason, found, ratio, bias, bounded, noise)
    # Without a prediction small errors are safe, and noise of which the plain ratio is small.
    why = outlook.why or (NOT_MEASURED if found is None else found.why)
    verdict, reason = "cannot tell", f"the cost of its noise is not known: {why}"
    # Where the gradient is lost in its noise, progress is not known: a small bias may seem to take all of it.
    large = square.estimate * signal > SAFE_BIAS**2 * (max(signal, 0.0) + own)
    if large and found is not None and verdict_on(found, outlook.horizon) == "at risk":
        verdict, reason = "at risk", f"its bias takes {part_in_words(found.lost)} of each step's progress"
    small = bias == 0 or most < SAFE_BIAS
    lost = ratio.high / (1 + ratio.high) if ratio.known else math.inf
    if small and bounded:
        share = number(100 * most if bias else 0.0, 2)
        verdict, reason = "safe", f"all of its error is at most {share}% of the expected gradient"
    elif small and lost <= SAFE_COST:
        biased = f"; its bias is {number(100 * bias, 2)}% of the expected gradient" if bias > 0 else ""
        costs = f"costs at most {number(100 * lost, 2)}% of the batch" if lost else "adds no noise"
        verdict, reason = "safe", costs + biased
    return Judgement(verdict, reason, None, ratio, bias, bounded)


def verdict_on(found: NoisePrediction, horizon: int) -> SafetyVerdict:
    """The verdict that a prediction gives, for a training of ``horizon`` steps; what costs a tenth decides."""
    limit = (1 - SAFE_COST) * found.batch
    likely = found.most if found.memory else found.equivalent
    slower = found.lost > SAFE_COST or found.shorter > SAFE_COST
    if likely < limit or (slower and horizon >= MANY_STEPS):
        return "at risk"
    return "safe" if found.least >= limit and not slower and found.shorter <= SAFE_SHORTER else "cannot tell"


def cost_in_words(found: NoisePrediction, horizon: int) -> str:
    """What a prediction says, e.g. ``costs about a tenth of the batch over 400 steps (58 of 64; 51 to 61)``."""
    whole = samples(found.batch)
    between = f"{samples(found.least)} to {samples(found.most)}"
    if found.most < HOPELESS_BATCH * found.batch:
        return f"will not train (worth {samples(found.equivalent)} of {whole}; {between})"
    share = 1 - found.equivalent / found.batch
    batch = "nothing that can be seen" if share < SEEN else f"{part_in_words(share)} of the batch"
    progress = "" if found.lost < SEEN else f"; its bias takes {part_in_words(found.lost)} of each step's progress"
    if math.isnan(found.shorter):
        progress += "; what its memory does to Adam's steps is not known"
    elif found.shorter > SAFE_SHORTER:
        progress += f"; its noise {shorter_in_words(found.shorter)}"
    return f"costs {batch} over {horizon:,} steps ({samples(found.equivalent)} of {whole}; {between}){progress}"


def shorter_in_words(share: float) -> str:
    """What noise does to Adam's steps, and what makes up for it."""
    remedy = f" ({rate_in_words(share)} makes up for most of it)" if share <= MADE_UP else ""
    return f"shortens Adam's steps by {part_in_words(share)}{remedy}"


def rate_in_words(share: float) -> str:
    """The learning rate whose steps are as long as without the codec."""
    return f"{number(1 / (1 - share), 2)} times the learning rate"


def part_in_words(share: float) -> str:
    """A part of something, e.g. ``about a tenth``."""
    return _PARTS[min(_PARTS, key=lambda part: abs(part - share))]


def samples(size: float) -> str:
    """An equivalent batch: whole samples from ten on, two digits below."""
    return f"{size:,.0f}" if size >= 9.95 else number(size, 2)
