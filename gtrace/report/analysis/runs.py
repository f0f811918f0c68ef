"""Training runs of a run log: curves, ends, and what a policy chose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np

from gtrace.report.statistics import UNKNOWN, Interval, bootstrap, holm, t_interval
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


#: More curves than this cannot be told apart.
MOST_SHADOWS = 8


def worst_shadows(run: LoggedRun) -> list[ShadowCurve]:
    """The curves with the lowest mean cosine, in the order of the model; those that have none come last."""
    order = sorted(run.shadow, key=lambda curve: float(np.nan_to_num(known_mean(curve.cosine), nan=2.0)))
    kept = {curve.tensor for curve in order[:MOST_SHADOWS]}
    return [curve for curve in run.shadow if curve.tensor in kept]


#: the running mean of the loss spans this part of the run
WINDOW = 0.05
#: more changes than these are put into one range
_SHOWN = 7


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """Mean of the last ``window`` values, of fewer at the start."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    end = np.arange(1, len(values) + 1)
    start = np.maximum(end - window, 0)
    return np.asarray((total[end] - total[start]) / (end - start), dtype=np.float64)


def common_loss(runs: Sequence[LoggedRun]) -> float:
    """A training loss that every finished run reached: the highest of their final ones; NaN without one.

    Rounded up to three digits, so that it can be written down.
    """
    worst = max((run.final_loss for run in runs if run.finished and not run.diverged), default=math.nan)
    if not (math.isfinite(worst) and worst > 0):
        return math.nan
    unit = 10.0 ** (math.floor(math.log10(worst)) - 2)
    return float(f"{math.ceil(worst / unit) * unit:.3g}")


def seconds_to_loss(run: LoggedRun, loss: float) -> float:
    """Simulated seconds until the running mean of the training loss, over a twentieth of the run, is at ``loss``.

    NaN if it never is, or where no time was simulated. The first steps, before a whole window, do not count.
    """
    known = np.isfinite(run.loss)
    window = max(int(known.sum() * WINDOW), 1)
    reached = np.flatnonzero(running_mean(run.loss[known], window)[window - 1 :] <= loss)
    return float(run.sim_seconds[known][window - 1 + reached[0]]) if reached.size else math.nan


def chosen_bits(run: LoggedRun) -> str:
    """The bits that a policy chose, with the step each began at: ``2, 3 from 15, 4 from 40``; empty without one."""
    bits = run.codec_bits[np.isfinite(run.codec_bits)].astype(int)
    if not bits.size:
        return ""
    steps = run.steps[np.isfinite(run.codec_bits)]
    changes = np.flatnonzero(np.diff(bits)) + 1
    if changes.size <= _SHOWN:
        return ", ".join([str(bits[0]), *(f"{bits[k]} from {steps[k]}" for k in changes)])
    return f"{bits.min()} to {bits.max()}, mean {bits.mean():.2f}, last {bits[-1]}"


@dataclass(frozen=True, slots=True)
class ShadowCurve:
    """How far one weight gradient was from the exact one, over the shadow passes of a run.

    Attributes:
        tensor: name of the parameter.
        steps: (P,) training steps of the passes.
        cosine_alone: (P,) of the angle, where only this layer's own output gradients were compressed; NaN for none.
        error_alone: (P,) ||compressed - exact|| / ||exact|| then.
        cosine: (P,) of the angle, where those of all layers were compressed.
        error: (P,) relative error then.
    """

    tensor: str
    steps: NDArray[np.int64]
    cosine_alone: NDArray[np.float64]
    error_alone: NDArray[np.float64]
    cosine: NDArray[np.float64]
    error: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RankCosts:
    """What one rank of a program gave to the others, and what a plain all-reduce in bfloat16 would have been.

    Attributes:
        up_bits: bits per value of its own gradient, payload and shared bytes.
        down_bits: bits per value of the averages that were encoded again and sent to all; NaN without a second shot.
        wire_bytes: all that it gave to collectives for other ranks over the run.
        compared: steps at which the same gradients went through plain all-reduces, too.
        relative_variance: ||average of decoded - exact average||^2 / ||exact average||^2, mean over those steps.
        bf16_variance: the same of the all-reduce in bfloat16.
        codec_seconds: CPU time of its encoding and decoding, mean over the steps after the first, which compiles.
    """

    up_bits: float
    down_bits: float
    wire_bytes: float
    compared: int
    relative_variance: float
    bf16_variance: float
    codec_seconds: float = math.nan


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """One training run.

    Attributes:
        spec: codec; ``none`` for the uncompressed run.
        seed: of the run.
        steps: (S,) training steps that were logged.
        loss: (S,) training loss.
        sent: (S,) bits that one worker has sent up to and with this step.
        bits: (S,) bits per value that one worker has sent in this step; NaN where not logged.
        updates: (U,) of the steps, those at which levels or codes were fitted again.
        sim_seconds: (S,) simulated seconds up to and with this step; NaN where the log holds none.
        relative_variance: (S,) error of the averaged gradient over its energy.
        eval_steps: (E,) steps at which the model was tested.
        accuracy: (E,) test accuracy, NaN where the task has none.
        eval_loss: (E,) test loss.
        eval_sent: (E,) bits that one worker had sent when the model was tested.
        eval_sim_seconds: (E,) simulated seconds then.
        finished: the run ended by itself.
        diverged: the run says that it blew up.
        ratio: bits that float32 would have taken over the bits sent; payload and shared bytes, sent up.
        codec_bits: (S,) bits of the codec that a policy chose; NaN where none did.
        equivalent_batch: (K,) at the measured steps, batch in full precision with the noise of this codec; NaN if
            unknown.
        shadow: one curve for each weight gradient that shadow passes compared.
        ranks: what was exchanged between real ranks, None where no ranks trained together.
    """

    spec: str
    seed: int
    steps: NDArray[np.int64]
    loss: NDArray[np.float64]
    sent: NDArray[np.float64]
    bits: NDArray[np.float64]
    updates: NDArray[np.int64]
    sim_seconds: NDArray[np.float64]
    relative_variance: NDArray[np.float64]
    eval_steps: NDArray[np.int64]
    accuracy: NDArray[np.float64]
    eval_loss: NDArray[np.float64]
    eval_sent: NDArray[np.float64]
    eval_sim_seconds: NDArray[np.float64]
    finished: bool
    diverged: bool
    ratio: float
    codec_bits: NDArray[np.float64]
    equivalent_batch: NDArray[np.float64]
    shadow: tuple[ShadowCurve, ...] = ()
    ranks: RankCosts | None = None

    @property
    def last_step(self) -> int:
        """The last step that was logged, 0 where none was."""
        return int(max(self.steps.max(initial=0), self.eval_steps.max(initial=0)))

    @property
    def final_accuracy(self) -> float:
        """The last test accuracy, NaN without one."""
        return last_known(self.accuracy)

    @property
    def final_eval_loss(self) -> float:
        """The last test loss, NaN without one."""
        return last_known(self.eval_loss)

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps; one mini-batch alone says little."""
        known = self.loss[np.isfinite(self.loss)]
        return float(known[-max(len(known) // 10, 1) :].mean()) if len(known) else math.nan

    @property
    def mean_relative_variance(self) -> float:
        """Mean over steps of the averaged gradient's relative variance, NaN if it was not logged."""
        return known_mean(self.relative_variance)


def known_mean(values: NDArray[np.float64]) -> float:
    """Mean of the finite values, NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def last_known(values: NDArray[np.float64]) -> float:
    """The last finite value, NaN without one."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def final_difference(run: LoggedRun, baseline: LoggedRun) -> Interval:
    """How much higher a run's final training loss is than another's, with its interval over steps.

    The last tenth of the steps is paired step by step, so that what a mini-batch does to both runs counts for nothing.
    Without an interval if the runs have different steps.
    """
    estimate = run.final_loss - baseline.final_loss
    if len(run.steps) != len(baseline.steps) or (run.steps != baseline.steps).any():
        return Interval(estimate, why=f"{len(run.steps)} steps against {len(baseline.steps)}")
    last = max(len(run.steps) // 10, 1)
    paired = run.loss[-last:] - baseline.loss[-last:]
    found = bootstrap(paired, np.ones(last), Key.derive(run.seed, tensor=run.spec))
    return found if math.isfinite(found.estimate) else replace(found, estimate=estimate)


Metric = Literal["test accuracy", "test loss", "training loss"]
#: Spec of the uncompressed run.
BASELINE = "none"

_FIELDS = ("final_accuracy", "final_eval_loss", "final_loss")
_VALUES: dict[Metric, str] = dict(zip(get_args(Metric), _FIELDS, strict=True))


@dataclass(frozen=True, slots=True)
class SeedGroup:
    """The finished runs of one codec.

    Attributes:
        spec: codec; ``none`` for the uncompressed runs.
        metric: what is averaged.
        seeds: of the runs, ascending.
        values: of the metric, one per seed.
        mean: of the values.
        deviation: standard deviation over seeds, NaN for one.
        interval: of the mean, by Student's t; unknown for fewer than 5 seeds.
        difference: of ``values`` less those of the uncompressed run with the same seed, likewise.
        p_holm: p-value of the difference corrected for all codecs of the group, NaN without one.
        ratio: mean over seeds of float32 bits over bits sent.
    """

    spec: str
    metric: Metric
    seeds: tuple[int, ...]
    values: tuple[float, ...]
    mean: float
    deviation: float
    interval: Interval
    difference: Interval
    p_holm: float
    ratio: float


def seed_groups(runs: Sequence[LoggedRun]) -> tuple[SeedGroup, ...]:
    """Finished runs by codec, the uncompressed one first. Codecs without a finished run are left out.

    Of several runs with the same codec and seed the first counts: a run that is repeated is not a second sample.
    """
    finished: dict[str, dict[int, LoggedRun]] = {}
    for run in sorted(runs, key=lambda run: run.spec != BASELINE):
        if run.finished:
            finished.setdefault(run.spec, {}).setdefault(run.seed, run)
    if not finished:
        return ()
    every = [run for found in finished.values() for run in found.values()]
    metric: Metric = next(
        (name for name, field in _VALUES.items() if any(math.isfinite(getattr(run, field)) for run in every)),
        "training loss",
    )

    def values(found: dict[int, LoggedRun]) -> dict[int, float]:
        return {seed: float(getattr(found[seed], _VALUES[metric])) for seed in sorted(found)}

    exact = values(finished.get(BASELINE, {}))
    groups = []
    for spec, found in finished.items():
        own = values(found)
        numbers = np.array(list(own.values()))
        known = numbers[np.isfinite(numbers)]
        paired = [value - exact[seed] for seed, value in own.items() if seed in exact]
        groups.append(
            SeedGroup(
                spec=spec,
                metric=metric,
                seeds=tuple(own),
                values=tuple(own.values()),
                mean=known_mean(numbers),
                deviation=float(known.std(ddof=1)) if len(known) > 1 else math.nan,
                interval=t_interval(numbers),
                difference=UNKNOWN if spec == BASELINE else t_interval(paired),
                p_holm=math.nan,
                ratio=known_mean(np.array([run.ratio for run in found.values()])),
            )
        )
    corrected = holm([group.difference.p for group in groups])
    return tuple(replace(group, p_holm=float(p)) for group, p in zip(groups, corrected, strict=True))


@dataclass(frozen=True, slots=True)
class FinalLoss:
    """How a program's training with a codec ended, against the uncompressed one.

    Attributes:
        spec: codec.
        seeds: how many were run with it.
        steps: of the first run.
        last: those of them that the final loss is the mean of.
        loss: final training loss, mean over seeds.
        baseline: the same of the uncompressed runs.
        difference: of the two, paired by seed, or by step if there is one seed.
        ratio: float32 bits over bits.
        went_wrong: in words, if the training diverged or learned nothing.
    """

    spec: str
    seeds: int
    steps: int
    last: int
    loss: float
    baseline: float
    difference: Interval
    ratio: float
    went_wrong: str

    @property
    def seen(self) -> bool:
        """Whether there is anything to compare: the loss of both."""
        return math.isfinite(self.baseline) and (math.isfinite(self.loss) or bool(self.went_wrong))


def final_losses(runs: Sequence[LoggedRun], groups: Sequence[SeedGroup]) -> list[FinalLoss]:
    """What each codec's finished runs, ``groups``, reached against the uncompressed ones; nothing without those."""
    exact = next((group for group in groups if group.spec == BASELINE), None)
    if exact is None:
        return []
    plain = next(run for run in runs if run.spec == BASELINE and run.finished)
    found = []
    for group in groups:
        if group.spec == BASELINE:
            continue
        own = [run for run in runs if run.spec == group.spec and run.finished]
        steps, seeds = len(own[0].steps), len(group.seeds)
        difference = group.difference
        if seeds == 1 and own[0].seed == plain.seed:
            difference = final_difference(own[0], plain)
        wrong = next(filter(None, (_went_wrong(run, plain) for run in own)), "")
        ends = (group.mean, exact.mean, difference, group.ratio, wrong)
        found.append(FinalLoss(group.spec, seeds, steps, max(steps // 10, 1), *ends))
    return found


def _went_wrong(run: LoggedRun, baseline: LoggedRun) -> str:
    """That a run diverged, or ended above where the uncompressed one began."""
    if baseline.diverged:
        return "nothing to compare: the uncompressed run diverged"
    if run.diverged:
        last = run.steps[np.isfinite(run.loss)]
        return f"diverged: no finite loss after step {last[-1]}" if len(last) else "diverged: no finite loss"
    known = baseline.loss[np.isfinite(baseline.loss)]
    start = float(known[: max(len(known) // 10, 1)].mean()) if len(known) else math.nan
    if baseline.final_loss < start < run.final_loss:
        return f"learned nothing: final loss {run.final_loss:.4g}, above the {start:.4g} that training began with"
    return ""
