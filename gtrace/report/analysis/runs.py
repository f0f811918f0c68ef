"""Run logs summed up: the curves and ends of their runs, and logs of the same task put together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.errors import TraceError
from gtrace.report.names import count, listed
from gtrace.report.statistics import FEWEST_SEEDS, UNKNOWN, Interval, bootstrap, holm, t_interval
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gtrace.kernels import Floats, Ints


#: the running mean of the loss spans this part of the run
WINDOW = 0.05
#: more changes than these are put into one range
_SHOWN = 7


def running_mean(values: Floats, window: int) -> Floats:
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


@dataclass(frozen=True, slots=True)
class ShadowCurve:
    """How far one weight gradient was from the exact one, over the shadow passes of a run.

    Attributes:
        steps: (P,) training steps of the passes.
        cosine_alone: (P,) of the angle, where only this layer's own output gradients were compressed; NaN for none.
        error_alone: (P,) ||compressed - exact|| / ||exact|| then.
        cosine: (P,) of the angle, where those of all layers were compressed.
        error: (P,) relative error then.
    """

    tensor: str
    steps: Ints
    cosine_alone: Floats
    error_alone: Floats
    cosine: Floats
    error: Floats


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
        equivalent_batch: (K,) at the measured steps, uncompressed batch with the noise of this codec; NaN if unknown.
        shadow: one curve for each weight gradient that shadow passes compared.
        ranks: what was exchanged between real ranks, None where no ranks trained together.
    """

    spec: str
    seed: int
    steps: Ints
    loss: Floats
    sent: Floats
    bits: Floats
    updates: Ints
    sim_seconds: Floats
    relative_variance: Floats
    eval_steps: Ints
    accuracy: Floats
    eval_loss: Floats
    eval_sent: Floats
    eval_sim_seconds: Floats
    finished: bool
    diverged: bool
    ratio: float
    codec_bits: Floats
    equivalent_batch: Floats
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
    def broken(self) -> bool:
        """Whether it blew up: what was finite before is not what it reached."""
        return self.diverged and len(self.loss) > 0 and not math.isfinite(self.loss[-1])

    @property
    def final_eval_loss(self) -> float:
        """The last test loss, NaN without one and for a run that blew up."""
        return math.nan if self.broken else last_known(self.eval_loss)

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps; one mini-batch alone says little. NaN likewise."""
        known = self.loss[np.isfinite(self.loss) & (not self.broken)]
        return float(known[-max(len(known) // 10, 1) :].mean()) if len(known) else math.nan

    @property
    def divergence(self) -> str:
        """From when on the loss was not finite, in words; empty if the run did not blow up."""
        if not self.diverged:
            return ""
        last = self.steps[np.isfinite(self.loss)]
        return f"diverged: no finite loss after step {last[-1]}" if len(last) else "diverged: no finite loss"

    @property
    def mean_relative_variance(self) -> float:
        """Mean over steps of the averaged gradient's relative variance, NaN if it was not logged."""
        return known_mean(self.relative_variance)

    def seconds_to_loss(self, loss: float) -> float:
        """Simulated seconds until the running mean of the training loss, over a twentieth of the run, is at ``loss``.

        NaN if it never is, or where no time was simulated. The first steps, before a whole window, do not count.
        """
        known = np.isfinite(self.loss)
        window = max(int(known.sum() * WINDOW), 1)
        reached = np.flatnonzero(running_mean(self.loss[known], window)[window - 1 :] <= loss)
        return float(self.sim_seconds[known][window - 1 + reached[0]]) if reached.size else math.nan

    @property
    def chosen_bits(self) -> str:
        """The bits that a policy chose, with the step each began at: ``2, 3 from 15, 4 from 40``; empty without one."""
        bits = self.codec_bits[np.isfinite(self.codec_bits)].astype(int)
        if not bits.size:
            return ""
        steps = self.steps[np.isfinite(self.codec_bits)]
        changes = np.flatnonzero(np.diff(bits)) + 1
        if changes.size <= _SHOWN:
            return ", ".join([str(bits[0]), *(f"{bits[k]} from {steps[k]}" for k in changes)])
        return f"{bits.min()} to {bits.max()}, mean {bits.mean():.2f}, last {bits[-1]}"

    def final_difference(self, baseline: LoggedRun) -> Interval:
        """How much higher the final training loss is than another run's, with its interval over steps.

        The last tenth of the steps is paired step by step, so that what a mini-batch does to both counts for nothing.
        Without an interval if the runs have different steps.
        """
        estimate = self.final_loss - baseline.final_loss
        if len(self.steps) != len(baseline.steps) or (self.steps != baseline.steps).any():
            return Interval(estimate, why=f"{len(self.steps)} steps against {len(baseline.steps)}")
        last = max(len(self.steps) // 10, 1)
        paired = self.loss[-last:] - baseline.loss[-last:]
        found = bootstrap(paired, np.ones(last), Key.derive(self.seed, tensor=self.spec))
        return found if math.isfinite(found.estimate) else replace(found, estimate=estimate)


def known_mean(values: Floats) -> float:
    """Mean of the finite values, NaN if there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def last_known(values: Floats) -> float:
    """The last finite value, NaN without one."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


Metric = Literal["test accuracy", "test loss", "training loss"]
#: Spec of the uncompressed run.
BASELINE = "none"
#: metric -> the property of a run that holds it, those that say most first
_VALUES: dict[Metric, str] = {
    "test accuracy": "final_accuracy",
    "test loss": "final_eval_loss",
    "training loss": "final_loss",
}


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

    @property
    def diverged(self) -> int:
        """Seeds without a value."""
        return len(self.values) - int(np.isfinite(self.values).sum())


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
        """Whether there is anything to compare: the loss of both, or what went wrong."""
        return bool(self.went_wrong) or (math.isfinite(self.baseline) and math.isfinite(self.loss))


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
            difference = own[0].final_difference(plain)
        wrong = next(filter(None, (_went_wrong(run, plain) for run in own)), "")
        ends = (group.mean, exact.mean, difference, group.ratio, wrong)
        found.append(FinalLoss(group.spec, seeds, steps, max(steps // 10, 1), *ends))
    return found


def _went_wrong(run: LoggedRun, baseline: LoggedRun) -> str:
    if baseline.diverged:
        return "nothing to compare: the uncompressed run diverged"
    if run.divergence:
        return run.divergence
    known = baseline.loss[np.isfinite(baseline.loss)]
    start = float(known[: max(len(known) // 10, 1)].mean()) if len(known) else math.nan
    if baseline.final_loss < start < run.final_loss:
        return f"learned nothing: final loss {run.final_loss:.4g}, above the {start:.4g} that training began with"
    return ""


#: what is an integer, and the largest number of all others
_COUNTS = ("step", "seed", "workers")
_LARGEST = 1e300


@dataclass(frozen=True, slots=True)
class RunLogAnalysis:
    """A run log summed up.

    Attributes:
        name: of the file, for headings.
        task: name of what was trained, empty where the log does not say.
        workers: number of workers.
        runs: in the order of the log, the uncompressed one first.
        notes: what a reader must know about how the numbers were made.
        warnings: of the training itself.
        study: the first record of the log.
        neural: bits and variances are those of the gradients inside the backward passes.
        groups: the finished runs of each codec over seeds, the uncompressed one first.
    """

    name: str
    task: str
    workers: int
    runs: tuple[LoggedRun, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    study: dict[str, Any]
    neural: bool = False
    groups: tuple[SeedGroup, ...] = ()

    @property
    def linear(self) -> bool:
        """Whether linear models were trained: steps are epochs, and bits are those of samples, models and gradients."""
        return self.study.get("kind") == "linear"

    @property
    def step_name(self) -> str:
        """What the records of the log count."""
        return "epoch" if self.linear else "training step"

    @property
    def has_ranks(self) -> bool:
        """Whether any run exchanged payloads between real ranks."""
        return any(run.ranks is not None for run in self.runs)

    @property
    def averaged(self) -> str:
        """Whose gradients were averaged: ``4 workers``, ``2 ranks (two-shot)``."""
        world, exchange = self.study.get("world_size"), self.study.get("exchange")
        if exchange:
            return f"{count(max(world, 1) if isinstance(world, int) else 1, 'rank')} ({exchange})"
        if world is not None and self.workers > 1:
            return f"{self.workers} encodings of the same gradient"
        return count(self.workers, "worker")

    @property
    def several_seeds(self) -> bool:
        """Whether any codec finished with more than one seed."""
        return any(len(group.seeds) > 1 for group in self.groups)

    def baseline(self, run: LoggedRun) -> LoggedRun | None:
        """The uncompressed run with the same seed, None if there is none or ``run`` is it."""
        if run.spec == BASELINE:
            return None
        return next((r for r in self.runs if r.spec == BASELINE and r.seed == run.seed), None)


def pool_runs(logs: Sequence[RunLogAnalysis]) -> tuple[tuple[tuple[str, ...], RunLogAnalysis], ...]:
    """Names of run logs of the same task, number of workers and kind, and these put together; those alone are left out.

    The notes say what was left out.
    """
    groups: dict[tuple[str, int, str, bool], list[RunLogAnalysis]] = {}
    for log in logs:
        groups.setdefault((log.task, log.workers, log.averaged, log.neural), []).append(log)
    pools = []
    for found in groups.values():
        if len(found) < 2:
            continue
        runs = tuple(run for log in found for run in log.runs)
        notes = []
        unfinished = sum(not run.finished for run in runs)
        if unfinished:
            notes.append(f"{unfinished} runs that did not finish are left out.")
        seen = [(run.spec, run.seed) for run in runs if run.finished]
        twice = sorted({f"{spec} with seed {seed}" for spec, seed in seen if seen.count((spec, seed)) > 1})
        if twice:
            notes.append(f"In several logs, counted once: {listed(twice)}.")
        pool = replace(found[0], runs=runs, notes=tuple(notes), groups=seed_groups(runs))
        pools.append((tuple(log.name for log in found), pool))
    return tuple(pools)


def analyze_runs(records: Sequence[Mapping[str, Any]], name: str = "run") -> RunLogAnalysis:
    """Sum a run log up.

    Args:
        records: as :func:`gtrace.runlog.read_runlog` returns them, the study first.
        name: what the log is called in headings and in errors.

    Raises:
        TraceError: a record lacks what names its run, or holds text where a number belongs.
    """
    study = dict(records[0])
    workers = max(int(_number(study, "workers", name, missing=1.0)), 1)
    ranks = bool(study.get("exchange"))
    grouped: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records[1:]:
        if record["type"] in ("step", "eval", "end", "shadow", "measure"):
            if "run" not in record:
                raise TraceError(f"{name}: a {record['type']} record names no run; the run log is damaged")
            seed = int(_number(record, "seed", name, missing=0.0))
            grouped.setdefault((str(record["run"]), seed), []).append(record)
    runs = [_run(spec, seed, found, workers, ranks, name) for (spec, seed), found in grouped.items()]
    runs.sort(key=lambda run: run.spec != BASELINE)
    return RunLogAnalysis(
        name=name,
        task=str(study.get("task") or ""),
        workers=workers,
        runs=tuple(runs),
        notes=tuple(_notes(runs, study, workers)),
        warnings=tuple(str(r.get("text", "")) for r in records if r["type"] == "warning"),
        study=study,
        neural=study.get("kind") == "neural",
        groups=seed_groups(runs),
    )


def _run(spec: str, seed: int, records: list[Mapping[str, Any]], workers: int, ranks: bool, name: str) -> LoggedRun:
    of = {kind: [r for r in records if r["type"] == kind] for kind in ("step", "eval", "end", "measure", "shadow")}
    steps, evals = (sorted(of[kind], key=lambda r: _number(r, "step", name)) for kind in ("step", "eval"))
    end = of["end"][0] if of["end"] else None
    column = partial(_column, name)
    at = column(steps, "step")
    eval_at = column(evals, "step")
    bits = column(steps, "bits")
    sent = np.cumsum(bits) / workers
    before = np.searchsorted(at, eval_at, side="right")
    uncompressed = column(steps, "bits_float32")
    float32 = float(np.nansum(uncompressed))
    passed = np.cumsum(column(steps, "sim_seconds"))
    total = float(np.nansum(bits))
    ratio = float32 / total if total > 0 and float32 > 0 else math.nan
    if end is not None:
        ended = _number(end, "ratio", name)
        ratio = ended if math.isfinite(ended) else ratio
    return LoggedRun(
        spec=spec,
        seed=seed,
        steps=at.astype(np.int64),
        loss=column(steps, "loss"),
        sent=sent,
        bits=32 * np.divide(bits, uncompressed, out=np.full(len(bits), np.nan), where=uncompressed > 0),
        updates=at[column(steps, "fit_seconds") > 0].astype(np.int64),
        sim_seconds=passed,
        relative_variance=column(steps, "relative_variance"),
        eval_steps=eval_at.astype(np.int64),
        accuracy=column(evals, "accuracy"),
        eval_loss=column(evals, "loss"),
        eval_sent=np.concatenate([[0.0], sent])[before],
        eval_sim_seconds=np.concatenate([[0.0], passed])[before],
        finished=end is not None,
        diverged=bool(end is not None and end.get("diverged")),
        ratio=ratio,
        codec_bits=column(steps, "codec_bits"),
        equivalent_batch=column(of["measure"], "equivalent_batch"),
        shadow=_shadow(of["shadow"], name),
        ranks=_ranks(steps, name) if ranks else None,
    )


def _ranks(steps: list[Mapping[str, Any]], name: str) -> RankCosts:
    """Sums over the steps of the rank that wrote the log."""
    column = partial(_column, name, steps)
    keys = ("bits", "bits_float32", "down_bits", "wire_bytes")
    bits, float32, down, given = (float(np.nansum(column(key))) for key in keys)
    values, bf16 = float32 / 32, column("bf16_variance")
    compared = np.isfinite(bf16)
    return RankCosts(
        up_bits=bits / values if values else math.nan,
        down_bits=down / values if down and values else math.nan,
        wire_bytes=given,
        compared=int(compared.sum()),
        relative_variance=known_mean(column("relative_variance")[compared]),
        bf16_variance=known_mean(bf16[compared]),
        codec_seconds=known_mean(column("codec_seconds")[1:]),
    )


def _shadow(records: list[Mapping[str, Any]], name: str) -> tuple[ShadowCurve, ...]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        grouped.setdefault(str(record.get("tensor")), []).append(record)
    curves = []
    for tensor, found in grouped.items():
        steps = _column(name, found, "step").astype(np.int64)
        numbers = (_column(name, found, key) for key in ("cosine_alone", "error_alone", "cosine", "error"))
        curves.append(ShadowCurve(tensor, steps, *numbers))
    return tuple(curves)


def _column(name: str, records: list[Mapping[str, Any]], key: str) -> Floats:
    return np.array([_number(r, key, name) for r in records], dtype=np.float64)


def _notes(runs: Sequence[LoggedRun], study: Mapping[str, Any], workers: int) -> Iterator[str]:
    unfinished = [f"{run.spec} (step {run.last_step})" for run in runs if not run.finished]
    if unfinished:
        yield f"Not finished: {', '.join(unfinished)}."
    diverged = dict.fromkeys(run.spec for run in runs if run.diverged)
    if diverged:
        yield f"Diverged: {', '.join(diverged)}."
    seeds = {run.seed for run in runs}
    if 0 < len(seeds) < FEWEST_SEEDS:
        few = "One seed" if len(seeds) == 1 else f"{len(seeds)} seeds"
        yield f"{few}: this describes what happened and is no evidence for a difference between codecs."
    if not runs:
        yield "The run log holds no training step yet."
    elif all(run.spec != BASELINE for run in runs):
        yield "There is no uncompressed run to compare with."
    if study.get("world_size") is not None and not study.get("exchange"):
        if workers > 1:
            yield "The encodings that are averaged are of the same gradient: optimistic, since real workers' differ."
        else:
            yield "One process: no payload left it. Bits are those of the payloads that its gradients went through."


def _number(record: Mapping[str, Any], key: str, name: str, missing: float | None = None) -> float:
    """``record[key]`` as a float; absent or null becomes ``missing`` or, for all but the step, NaN."""
    value = record.get(key)
    if value is None and (missing is not None or key != "step"):
        return math.nan if missing is None else missing
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TraceError(f"{name}: '{key}' of a {record['type']} record is not a number; the run log is damaged")
    # Python's integers have no end, and JSON reads 1e999 as infinite.
    if not abs(value) <= _LARGEST or (key in _COUNTS and (value % 1 or abs(value) > 2**53)):
        raise TraceError(f"{name}: '{key}' of a {record['type']} record is out of range; the run log is damaged")
    return float(value)
