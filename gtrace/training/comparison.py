"""Training with simulated workers: codecs and the uncompressed run, with the same start and the same batches."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gtrace.codecs import Identity
from gtrace.codecs.assignment import CodecTable, Coding, TableLike, coding_of
from gtrace.errors import TraceError, UsageError
from gtrace.runlog import VERSION, RunLogWriter, read_runlog, versions
from gtrace.training import checkpoint
from gtrace.training.exchange import Exchange
from gtrace.training.plain import one_thread
from gtrace.training.run import RunResult, TrainingRun, warning
from gtrace.training.settings import StudyOptions, plan_runs, repeat_command
from gtrace.training.tasks import Task, load_task
from gtrace.training.weights import WeightLevels

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path


class Study:
    """Runs of one task that differ only in codec and seed. The first run of each seed is uncompressed.

    The runs of a seed advance together, step by step, so an interrupted study still compares equal lengths.
    All random numbers come from the seed: two studies with the same arguments on the same machine have equal results.

    Args:
        task: a built-in task's name, or a task.
        codecs: codecs or their specs; tables or plans that name one for each tensor.
        options: how to train.
        settings: fields of :class:`~gtrace.training.settings.StudyOptions` that differ from ``options``.

    Raises:
        UsageError: an unknown task or codec, the same codec or levels twice, a codec with memory or quantized weights
            for kind neural, a policy without a codec that has bits, a model too shallow for quantized weights, or a
            setting out of range.
        TraceError: the task's data are missing.
    """

    def __init__(
        self,
        task: str | Task,
        codecs: Sequence[TableLike],
        options: StudyOptions | None = None,
        **settings: Any,
    ) -> None:
        options = dataclasses.replace(options or StudyOptions(), **settings)
        chosen: list[Coding] = [coding_of(item) for item in codecs]
        chosen = [Identity(), *(item for item in chosen if item != Identity())]
        if len({str(item) for item in chosen}) < len(chosen):
            raise UsageError("codecs: the same codec is named twice")
        if options.kind != "weight" and any(isinstance(item, CodecTable) for item in chosen):
            raise UsageError("plan: it is about gradients of weights; choose kind weight")
        weights = [WeightLevels.parse(item) if isinstance(item, str) else item for item in options.weights]
        self.task = load_task(task) if isinstance(task, str) else task
        self.settings = options.settings(self.task.recipe, weights)
        self._plans = plan_runs(chosen, self.settings)
        # Exchange a small tensor, so that kernels are compiled before times are measured.
        values = np.linspace(-1, 1, 4096, dtype=np.float32).reshape(64, 64) ** 5
        for codec in dict.fromkeys(codec for plan in self._plans for codec in CodecTable.of(plan.codec).codecs):
            Exchange(codec).step(0, [{"": values}])
        self.seeds = tuple(range(options.seed, options.seed + options.seeds))
        self._codecs = chosen
        self._done: list[RunResult] = []
        self._runs = self._begin(options.seed)
        self._seed, self._step = options.seed, 0
        self.warnings: list[str] = []

    def _begin(self, seed: int) -> list[TrainingRun]:
        settings = dataclasses.replace(self.settings, seed=seed)
        first, *others = self._plans
        runs = [TrainingRun(self.task, first, settings)]
        # All begin with the same weights, so the initial model is tested only once.
        loss = runs[0].result.first_loss
        return runs + [TrainingRun(self.task, plan, settings, loss) for plan in others]

    @property
    def quantized(self) -> list[dict[str, Any]]:
        """The tensors with quantized weights, by levels: their bits and elements; empty without any."""
        runs = [run for run in self._runs if run.weights.levels is not None]
        return list({run.weights.levels: run.weights.describe() for run in runs}.values())

    @property
    def results(self) -> list[RunResult]:
        """The results so far, seed by seed, the uncompressed run first."""
        return [*self._done, *(run.result for run in self._runs)]

    def run(
        self,
        log: Path | None = None,
        *,
        force: bool = False,
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Train to the end; after an interruption the log and ``results`` keep what was done.

        With a log there is a checkpoint beside it, written at the start and whenever models are tested, and deleted at
        the end. A study with the same arguments continues from log and checkpoint, with the same weights and records as
        without the interruption (times differ). Neural gradients have no checkpoints.

        Args:
            log: path of the run log; None for no log.
            force: replace an existing log, and start again.
            on_record: called with every record after it was written.

        Raises:
            OutputExistsError: the log exists, this study cannot continue it, and ``force`` is off.
            NonfiniteGradientError: NaN or infinity in a gradient under the policy ``error``.
            TraceError: the checkpoint is damaged, or cannot be written.
        """
        with contextlib.nullcontext() if log is None else self._writer(log, force=force) as writer:
            for record in self.records():
                if record["type"] == "checkpoint":
                    if writer is not None:
                        self._save(writer.path, writer.size)
                    continue
                if writer is not None:
                    writer.write(record["type"], **record)
                if on_record is not None:
                    on_record(record)
        if log is not None:
            checkpoint.path_of(log).unlink(missing_ok=True)

    def can_resume(self, log: Path) -> bool:
        """Whether :meth:`run` would continue this log: the same study, interrupted."""
        if self.settings.kind != "weight" or not (log.exists() and checkpoint.path_of(log).exists()):
            return False
        own = {"type": "study", "version": VERSION, **self.describe()}
        return json.dumps(read_runlog(log)[0], sort_keys=True) == json.dumps(own, sort_keys=True)

    def _writer(self, log: Path, *, force: bool) -> RunLogWriter:
        if not force and self.can_resume(log):
            place = checkpoint.path_of(log)
            saved = checkpoint.load(place)
            try:
                self._load(saved)
                written = saved["log_bytes"]
                if type(written) is not int or not 0 < written <= log.stat().st_size:
                    raise ValueError("a length that the log does not have")
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                # torch and the tasks raise any error on wrong content.
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
                raise TraceError(f"{place}: not a checkpoint of this study ({reason}); remove it") from error
            return RunLogWriter.reopen(log, written)

        def start(size: int) -> None:
            # First, so that a study that is killed at any moment can go on.
            if self.settings.kind == "weight":
                try:
                    self._save(log, size)
                except TraceError as error:
                    raise UsageError(f"{error}; choose another path") from None
            else:
                checkpoint.path_of(log).unlink(missing_ok=True)

        return RunLogWriter(log, self.describe(), force=force, before=start)

    def _save(self, log: Path, size: int) -> None:
        content = {
            "log_bytes": size,
            "seed": self._seed,
            "step": self._step,
            "done": [result.to_plain() for result in self._done],
            "runs": [run.state_dict() for run in self._runs],
            "warnings": list(self.warnings),
        }
        checkpoint.save(checkpoint.path_of(log), content)

    def _load(self, saved: dict[str, Any]) -> None:
        self._done = [RunResult.from_plain(one) for one in saved["done"]]
        self._seed, self._step = saved["seed"], saved["step"]
        self._runs = self._begin(self._seed)
        for run, state in zip(self._runs, saved["runs"], strict=True):
            run.load_state_dict(state)
        self.warnings = list(saved["warnings"])

    @property
    def command(self) -> str:
        """The command line that repeats this study; empty without one."""
        return repeat_command(self.task.name, self._codecs, self.settings)

    def describe(self) -> dict[str, Any]:
        """The fields of the run log's study record."""
        settings = self.settings
        tensors = self._runs[0].tensors
        return {
            "command": self.command,
            "task": self.task.name,
            "workers": settings.workers,
            "seed": settings.seed,
            "seeds": list(self.seeds),
            "runs": [plan.name for plan in self._plans],
            "plans": [item.describe() for item in self._codecs if isinstance(item, CodecTable)] or None,
            "steps": settings.steps,
            "batch_size": settings.batch_size,
            "lr": settings.lr,
            "refit": str(settings.refit),
            "nonfinite": settings.nonfinite,
            "kind": "outer" if settings.joint else settings.kind,
            "shadow": settings.shadow,
            "measure": settings.measure,
            "layers": settings.layers if settings.kind == "neural" else None,
            "optimizer": settings.optimizer or None,
            "every": settings.every,
            "clip": settings.clip,
            "network": None if settings.network is None else str(settings.network),
            "policies": [str(policy) for policy in settings.policies],
            "min_size": settings.min_size,
            "down": settings.down or None,
            "weights": [str(item) for item in settings.weights] or None,
            "parameters": sum(tensors.values()),
            "tensors": tensors,
            "versions": {**versions(), "torch": torch.__version__},
        }

    def records(self) -> Iterator[dict[str, Any]]:
        """Train, and yield the records of the run log as they come; each has its ``type``.

        One of type ``checkpoint`` has no other field: all runs are between two steps, and can be saved.

        Raises:
            NonfiniteGradientError: NaN or infinity in a gradient under the policy ``error``.
        """
        settings = self.settings
        with one_thread():
            if not self._step and self._seed == self.seeds[0]:
                yield from self._kept(warning(text) for run in self._runs for text in run.announce())
            while True:
                for step in range(self._step, settings.steps):
                    for run in self._runs:
                        if not run.result.finished:
                            yield from self._kept(run.advance(step))
                    self._step = step + 1
                    if settings.kind == "weight" and self._step % settings.eval_every == 0:
                        yield {"type": "checkpoint"}
                if self._seed == self.seeds[-1]:
                    return
                self._done += [run.result for run in self._runs]
                self._seed, self._step = self._seed + 1, 0
                self._runs = self._begin(self._seed)

    def _kept(self, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same records; keeps the warnings."""
        for record in records:
            if record["type"] == "warning":
                self.warnings.append(record["text"])
            yield record


def train(
    task: str | Task,
    codecs: Sequence[TableLike],
    *,
    log: Path | None = None,
    force: bool = False,
    **settings: Any,
) -> Study:
    """Train a task with each codec and without, and return the study with its results.

    Args:
        task: a built-in task's name, or a task.
        codecs: codecs, their specs, tables or plans.
        log: path of the run log; None for no log.
        force: replace an existing log.
        settings: see :class:`Study`.

    Raises:
        UsageError: see :class:`Study`.
        OutputExistsError: the log exists and ``force`` is off.
        NonfiniteGradientError: NaN or infinity in a gradient under the policy ``error``.
    """
    study = Study(task, codecs, **settings)
    study.run(log, force=force)
    return study
