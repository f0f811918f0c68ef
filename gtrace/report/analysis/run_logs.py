"""A run log summed up, and run logs of the same task put together."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError
from gtrace.report.analysis.runs import BASELINE, LoggedRun, RankCosts, SeedGroup, ShadowCurve, known_mean, seed_groups
from gtrace.report.names import count, listed
from gtrace.report.statistics import FEWEST_SEEDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class RunPool:
    """Run logs of the same task put together.

    Attributes:
        task: name of what was trained.
        workers: number of workers of every run.
        averaged: whose gradients were averaged, in words.
        neural: bits are those of the gradients inside the backward passes.
        logs: names of the run logs.
        groups: one per codec, the uncompressed one first.
        notes: what was left out.
    """

    task: str
    workers: int
    averaged: str
    neural: bool
    logs: tuple[str, ...]
    groups: tuple[SeedGroup, ...]
    notes: tuple[str, ...]


def pool_runs(logs: Sequence[RunLogAnalysis]) -> tuple[RunPool, ...]:
    """Run logs of the same task, number of workers and kind put together; those that stand alone are left out."""
    alike: dict[tuple[str, int, str, bool], list[RunLogAnalysis]] = {}
    for log in logs:
        alike.setdefault((log.task, log.workers, log.averaged, log.neural), []).append(log)
    pools = []
    for (task, workers, averaged, neural), found in alike.items():
        if len(found) < 2:
            continue
        runs = [run for log in found for run in log.runs]
        notes = []
        unfinished = sum(not run.finished for run in runs)
        if unfinished:
            notes.append(f"{unfinished} runs that did not finish are left out.")
        seen = [(run.spec, run.seed) for run in runs if run.finished]
        twice = sorted({f"{spec} with seed {seed}" for spec, seed in seen if seen.count((spec, seed)) > 1})
        if twice:
            notes.append(f"In several logs, counted once: {listed(twice)}.")
        names = tuple(log.name for log in found)
        pools.append(RunPool(task, workers, averaged, neural, names, seed_groups(runs), tuple(notes)))
    return tuple(pools)


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
        exchange = self.study.get("exchange")
        if exchange:
            return f"{count(_world_size(self.study), 'rank')} ({exchange})"
        if self.study.get("world_size") is not None and self.workers > 1:
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
    world = _world_size(study) if study.get("exchange") else 0
    grouped: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for record in records[1:]:
        if record["type"] in ("step", "eval", "end", "shadow", "measure"):
            if "run" not in record:
                raise TraceError(f"{name}: a {record['type']} record names no run; the run log is damaged")
            seed = int(_number(record, "seed", name, missing=0.0))
            grouped.setdefault((str(record["run"]), seed), []).append(record)
    runs = [_run(spec, seed, found, workers, world, name) for (spec, seed), found in grouped.items()]
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


def _world_size(study: Mapping[str, Any]) -> int:
    """Processes that trained together, as the study says."""
    world = study.get("world_size")
    return max(world, 1) if isinstance(world, int) else 1


def _run(spec: str, seed: int, records: list[Mapping[str, Any]], workers: int, world: int, name: str) -> LoggedRun:
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
        ranks=_ranks(steps, world, name) if world else None,
    )


def _ranks(steps: list[Mapping[str, Any]], world: int, name: str) -> RankCosts:
    """Sums over the steps of the rank that wrote the log; each rank sends on one of ``world`` equal parts."""
    column = partial(_column, name, steps)
    keys = ("bits", "bits_float32", "down_bits", "wire_bytes")
    bits, float32, down, given = (float(np.nansum(column(key))) for key in keys)
    values, down, bf16 = float32 / 32, world * down, column("bf16_variance")
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


def _column(name: str, records: list[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
    return np.array([_number(r, key, name) for r in records], dtype=np.float64)


def _notes(runs: Sequence[LoggedRun], study: Mapping[str, Any], workers: int) -> Iterator[str]:
    """How the runs ended, what they do not prove, and how far what one program did speaks for real ranks."""
    unfinished = [f"{run.spec} (step {run.last_step})" for run in runs if not run.finished]
    if unfinished:
        yield f"Not finished: {', '.join(unfinished)}."
    diverged = [run.spec for run in runs if run.diverged]
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
