"""What a run log says, as numbers: curves and ends of each training run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError
from gtrace.report.names import count
from gtrace.report.seeds import BASELINE as BASELINE
from gtrace.report.seeds import SeedGroup, seed_groups
from gtrace.report.statistics import FEWEST_SEEDS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray


#: what is an integer, and the largest number of all others
_COUNTS = ("step", "seed", "workers")
_LARGEST = 1e300


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
class Run:
    """One training run.

    Attributes:
        spec: codec; ``none`` for the uncompressed run.
        seed: of the run.
        steps: (S,) training steps that were logged.
        loss: (S,) training loss.
        sent: (S,) bits that one worker has sent up to and with this step.
        bits: (S,) bits per value that one worker has sent in this step; NaN where not logged.
        updates: (U,) of the steps, those at which levels or codes were fitted anew.
        sim_seconds: (S,) simulated seconds up to and with this step; NaN where the log holds none.
        relative_variance: (S,) error of the averaged gradient over its energy.
        eval_steps: (E,) steps at which the model was tested.
        accuracy: (E,) test accuracy, NaN where the task has none.
        eval_loss: (E,) test loss.
        eval_sent: (E,) bits that one worker had sent when the model was tested.
        eval_sim_seconds: (E,) simulated seconds then.
        finished: the run came to its end.
        diverged: the run says that it blew up.
        ratio: bits that float32 would have taken over the bits sent; payload and shared bytes, sent up.
        codec_bits: (S,) bits of the codec that a policy chose; NaN where none did.
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
    shadow: tuple[ShadowCurve, ...] = ()
    ranks: RankCosts | None = None

    @property
    def last_step(self) -> int:
        """The last step that was logged, 0 where none was."""
        return int(max(self.steps.max(initial=0), self.eval_steps.max(initial=0)))

    @property
    def final_accuracy(self) -> float:
        """The last test accuracy, NaN where there is none."""
        return _last(self.accuracy)

    @property
    def final_eval_loss(self) -> float:
        """The last test loss, NaN where there is none."""
        return _last(self.eval_loss)

    @property
    def final_loss(self) -> float:
        """Mean training loss of the last tenth of the steps; one mini-batch alone says little."""
        known = self.loss[np.isfinite(self.loss)]
        return float(known[-max(len(known) // 10, 1) :].mean()) if len(known) else math.nan

    @property
    def mean_relative_variance(self) -> float:
        """Mean over steps of the averaged gradient's relative variance, NaN where it was not logged."""
        return known_mean(self.relative_variance)


@dataclass(frozen=True, slots=True)
class RunLogAnalysis:
    """A run log summed up.

    Attributes:
        name: of the file, for headings.
        task: name of what was trained, empty where the log does not say.
        workers: number of workers.
        runs: in the order of the log, the uncompressed one first.
        notes: what a reader must know about how the numbers came to be.
        warnings: of the training itself.
        study: the first record of the log.
        neural: bits and variances are those of the gradients inside the backward passes.
        groups: the finished runs of each codec over seeds, the uncompressed one first.
    """

    name: str
    task: str
    workers: int
    runs: tuple[Run, ...]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    study: dict[str, Any]
    neural: bool = False
    groups: tuple[SeedGroup, ...] = ()

    @property
    def has_shadow(self) -> bool:
        """Whether shadow passes compared weight gradients in any run."""
        return any(run.shadow for run in self.runs)

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

    def baseline(self, run: Run) -> Run | None:
        """The uncompressed run with the same seed, None where there is none or ``run`` is it."""
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
        if record["type"] in ("step", "eval", "end", "shadow"):
            if "run" not in record:
                raise TraceError(f"{name}: a {record['type']} record names no run; the run log is damaged")
            seed = int(_number(record, "seed", name, missing=0.0))
            grouped.setdefault((str(record["run"]), seed), []).append(record)
    runs = sorted(
        (_run(spec, seed, found, workers, world, name) for (spec, seed), found in grouped.items()),
        key=lambda run: run.spec != BASELINE,
    )
    return RunLogAnalysis(
        name=name,
        task=str(study.get("task") or ""),
        workers=workers,
        runs=tuple(runs),
        notes=(*_notes(runs), *_script_notes(study, workers)),
        warnings=tuple(str(r.get("text", "")) for r in records if r["type"] == "warning"),
        study=study,
        neural=study.get("kind") == "neural",
        groups=seed_groups(runs),
    )


def _world_size(study: Mapping[str, Any]) -> int:
    """Processes that trained together, as the study says."""
    world = study.get("world_size")
    return max(world, 1) if isinstance(world, int) else 1


def _run(spec: str, seed: int, records: list[Mapping[str, Any]], workers: int, world: int, name: str) -> Run:
    steps = sorted((r for r in records if r["type"] == "step"), key=lambda r: _number(r, "step", name))
    evals = sorted((r for r in records if r["type"] == "eval"), key=lambda r: _number(r, "step", name))
    end = next((r for r in records if r["type"] == "end"), None)

    def column(found: list[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
        return np.array([_number(r, key, name) for r in found], dtype=np.float64)

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
    return Run(
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
        shadow=_shadow([r for r in records if r["type"] == "shadow"], name),
        ranks=_ranks(steps, world, name) if world else None,
    )


def _ranks(steps: list[Mapping[str, Any]], world: int, name: str) -> RankCosts:
    """Sums over the steps of the rank that wrote the log; each rank sends on one of ``world`` equal parts."""
    keys = ("bits", "bits_float32", "down_bits", "wire_bytes", "relative_variance", "bf16_variance", "codec_seconds")
    column = {key: np.array([_number(r, key, name) for r in steps], dtype=np.float64) for key in keys}
    values = float(np.nansum(column["bits_float32"])) / 32
    down = world * float(np.nansum(column["down_bits"]))
    compared = np.isfinite(column["bf16_variance"])
    return RankCosts(
        up_bits=float(np.nansum(column["bits"])) / values if values else math.nan,
        down_bits=down / values if down and values else math.nan,
        wire_bytes=float(np.nansum(column["wire_bytes"])),
        compared=int(compared.sum()),
        relative_variance=known_mean(column["relative_variance"][compared]),
        bf16_variance=known_mean(column["bf16_variance"][compared]),
        codec_seconds=known_mean(column["codec_seconds"][1:]),
    )


def _shadow(records: list[Mapping[str, Any]], name: str) -> tuple[ShadowCurve, ...]:
    grouped: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        grouped.setdefault(str(record.get("tensor")), []).append(record)

    def column(found: list[Mapping[str, Any]], key: str) -> NDArray[np.float64]:
        return np.array([_number(r, key, name) for r in found], dtype=np.float64)

    return tuple(
        ShadowCurve(
            tensor=tensor,
            steps=column(found, "step").astype(np.int64),
            cosine_alone=column(found, "cosine_alone"),
            error_alone=column(found, "error_alone"),
            cosine=column(found, "cosine"),
            error=column(found, "error"),
        )
        for tensor, found in grouped.items()
    )


def _notes(runs: Sequence[Run]) -> tuple[str, ...]:
    if not runs:
        return ("The run log holds no training step yet.",)
    notes = []
    unfinished = [f"{run.spec} (step {run.last_step})" for run in runs if not run.finished]
    if unfinished:
        notes.append(f"Not finished: {', '.join(unfinished)}.")
    diverged = [run.spec for run in runs if run.diverged]
    if diverged:
        notes.append(f"Diverged: {', '.join(diverged)}.")
    seeds = {run.seed for run in runs}
    if len(seeds) < FEWEST_SEEDS:
        notes.append(
            f"{'One seed' if len(seeds) == 1 else f'{len(seeds)} seeds'}: this describes what happened "
            "and is no evidence for a difference between codecs."
        )
    if not any(run.spec == BASELINE for run in runs):
        notes.append("There is no uncompressed run to compare with.")
    return tuple(notes)


def _script_notes(study: Mapping[str, Any], workers: int) -> tuple[str, ...]:
    """How far what a program did alone speaks for real ranks."""
    if study.get("world_size") is None or study.get("exchange"):
        return ()
    if workers > 1:
        return ("The encodings that are averaged are of the same gradient: optimistic, since real workers' differ.",)
    return ("One process: no payload left it. Bits are those of the payloads that its gradients went through.",)


def known_mean(values: NDArray[np.float64]) -> float:
    """Mean of the finite values, NaN where there are none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan


def _last(values: NDArray[np.float64]) -> float:
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else math.nan


def _number(record: Mapping[str, Any], key: str, name: str, missing: float | None = None) -> float:
    """``record[key]`` as a float; absent or null becomes ``missing`` or, for all but the step, NaN."""
    value = record.get(key)
    if value is None and (missing is not None or key != "step"):
        return math.nan if missing is None else missing
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TraceError(f"{name}: '{key}' of a {record['type']} record is no number; the run log is damaged")
    # Python's integers have no end, and JSON reads 1e999 as infinite.
    if not abs(value) <= _LARGEST or (key in _COUNTS and (value % 1 or abs(value) > 2**53)):
        raise TraceError(f"{name}: '{key}' of a {record['type']} record is out of range; the run log is damaged")
    return float(value)
