"""Options, summary and run log for a program that does not know about the codec."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gtrace.errors import GtraceError
from gtrace.runlog import RunLogWriter, read_runlog, versions
from gtrace.trackers import Tracking, of_record
from gtrace.training.ddp import RankOptions
from gtrace.training.exchange import Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gtrace.codecs.assignment import CodecTable
    from gtrace.torch_hooks.hooks import OptimizerStep
    from gtrace.training.ddp import AllReduceComparison


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions(RankOptions):
    """Options of a program's training in JSON values, so that they can be passed to launched processes.

    The fields of :class:`~gtrace.training.ddp.RankOptions` are the options of its ranks, if it has any.

    Attributes:
        log: path of the run log.
        codec: spec of the codec; for a table its name.
        rules: (pattern, spec) for some tensors.
        min_size: tensors with fewer elements go uncompressed.
        every: steps that each process makes alone between exchanges of what its weights changed, see
            :class:`gtrace.training.outer.OuterRounds`; None to exchange gradients at every step.
        workers: number of separately keyed encodings of the same gradient that are averaged.
        argv: the program, for the log.
        launch: a word of this launch, so that its processes do not overwrite each other's logs.
        plugins: files with codecs of the user's own.
        table: what ``CodecTable.describe`` says of a table; None if there is one codec.
        plan: the file that it is from.
        watched: the gradients are left as they are, and the log has losses alone: the baseline.
        to: a tracker for the numbers of each step.
    """

    log: str
    codec: str
    rules: tuple[tuple[str, str], ...] = ()
    min_size: int = 0
    every: int | None = None
    workers: int = 1
    argv: tuple[str, ...] = ()
    launch: str = ""
    plugins: tuple[str, ...] = ()
    table: dict[str, Any] | None = None
    plan: str = ""
    watched: bool = False
    to: str | None = None


@dataclass(slots=True)
class ScriptSummary:
    """The result of a program's training.

    Attributes:
        steps: optimizer steps that used gradients from the codec.
        optimizers: number of optimizers with such steps.
        elements: number of values of all tensors.
        tally: summed over the steps, of this process.
        codec_seconds: CPU time of the codec in the steps that ``seconds`` covers.
        seconds: CPU time of this process after the first step.
        rank: rank of this process, None if there is only one.
        world_size: number of processes that trained together.
        exchanged: gradients traveled between ranks as bytes.
        comparisons: with plain all-reduces of the same gradients.
        log: path of the run log; None if this process wrote none.
        warnings: the printed warnings.
    """

    steps: int = 0
    optimizers: int = 0
    elements: int = 0
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    codec_seconds: float = 0.0
    rank: int | None = None
    world_size: int = 1
    exchanged: bool = False
    comparisons: list[AllReduceComparison] = field(default_factory=list)
    log: Path | None = None
    warnings: list[str] = field(default_factory=list)


class ScriptLog:
    """Writes one record per step; only the first of several ranks writes.

    Args:
        summary: of the program's training so far.
        tensors: name -> elements, of all tensors so far.
        on_record: called with every record.
        warn: called once if nothing can be written; training continues.
    """

    def __init__(
        self,
        options: ScriptOptions,
        rules: CodecTable,
        summary: ScriptSummary,
        tensors: Mapping[str, int],
        on_record: Callable[[dict[str, Any]], None] | None,
        warn: Callable[[str], None],
    ) -> None:
        self._options, self._rules, self._warn = options, rules, warn
        self._summary, self._tensors = summary, tensors
        self._on_record = on_record
        self._writer: RunLogWriter | None = None
        self._broken = False
        self._label = {"run": str(rules), "seed": options.seed}
        self._loss = math.nan
        self._has_loss = False
        self._tracking = None if options.to is None else Tracking(options.to, lambda error: warn(str(error)))

    def step(self, step: OptimizerStep, tally: Tally, comparison: AllReduceComparison | None, seconds: float) -> None:
        """Record one optimizer step and its exchange."""
        self._loss = step.loss
        self._has_loss = self._has_loss or step.micro_batches > 0
        measured: dict[str, float] = {}
        if not self._summary.exchanged:
            measured["relative_variance"] = tally.relative_variance
        elif comparison is not None:
            names = ("relative_variance", "bf16_variance", "bf16_seconds", "float32_seconds")
            measured = {name: getattr(comparison, name) for name in names}
        record = {
            "type": "step",
            **self._label,
            "step": step.step,
            "stream": step.stream,
            "loss": step.loss,
            "lr": step.lr,
            **tally.record(),
            "frame_bits": tally.frame_bits,
            "down_bits": tally.down_bits,
            "wire_bytes": tally.wire_bytes,
            "seconds": seconds,
            "wire_seconds": tally.wire_seconds,
            **measured,
        }
        if not self._summary.rank:
            self._append(record)
            if self._tracking is not None:
                norm = {"norm": math.sqrt(tally.energy)} if tally.energy else {}
                self._tracking.log(of_record({**record, **norm}))
        if self._on_record is not None:
            self._on_record(record)

    def close(self) -> Path | None:
        """End the log; returns its path."""
        if self._tracking is not None:
            self._tracking.close()
        if self._writer is None:
            return None
        summary = self._summary
        for text in summary.warnings:
            self._append({"type": "warning", "text": text})
        self._append(
            {
                "type": "end",
                **self._label,
                "steps": summary.steps,
                "loss": self._loss,
                "accuracy": None,
                "bits": summary.tally.bits,
                "ratio": summary.tally.ratio,
                "diverged": self._has_loss and not math.isfinite(self._loss),
                "seconds": summary.seconds,
            }
        )
        self._writer.close()
        return self._writer.path

    def _append(self, record: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            if self._writer is None:
                self._writer = RunLogWriter(self._path(), self._study(), force=True)
            self._writer.write(record["type"], **record)
        except GtraceError as error:
            self._broken = True
            self._warn(f"{error}; training goes on without a run log")

    def _path(self) -> Path:
        """The path to write: another name if a process of the same launch has taken this one."""
        path = Path(self._options.log)
        number = 1
        while path.exists() and self._is_ours(path):
            number += 1
            path = Path(self._options.log).with_name(f"{Path(self._options.log).stem}-{number}.jsonl")
        return path

    def _is_ours(self, path: Path) -> bool:
        try:
            return bool(read_runlog(path)[0].get("launch") == self._options.launch)
        except GtraceError:
            return False

    def _command(self) -> str:
        """The command line that repeats this training, launcher aside."""
        options, default = self._options, ScriptOptions(log="", codec="")
        words = ["gtrace", "train", *(("--plan", options.plan) if options.plan else ("--codec", options.codec))]
        for pattern, spec in options.rules:
            words += ["--rule", f"{pattern}={spec}"]
        names = ("every", "min_size", "workers", "seed", "refit", "nonfinite", "exchange", "levels", "compare_every")
        for name in names:
            if getattr(options, name) != getattr(default, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        return shlex.join([*words, *options.argv])

    def _study(self) -> dict[str, Any]:
        options, summary = self._options, self._summary
        table = self._rules.describe()
        return {
            "command": self._command(),
            "task": next((word for word in options.argv if not word.startswith("-")), ""),
            "workers": options.workers if not summary.exchanged else 1,
            "world_size": summary.world_size,
            "exchange": options.exchange if summary.exchanged else None,
            "levels": options.levels if summary.exchanged else None,
            "seed": options.seed,
            "runs": [self._label["run"]],
            "steps": None,
            **{name: table[name] for name in ("codec", "rules", "min_size")},
            "plans": [table] if self._rules.tensors else None,
            "refit": str(options.refit),
            "nonfinite": options.nonfinite,
            "kind": "outer" if options.every else "weight",
            "every": options.every,
            "parameters": sum(self._tensors.values()),
            "tensors": dict(self._tensors),
            "launch": options.launch,
            "versions": {**versions(), "torch": torch.__version__},
        }
