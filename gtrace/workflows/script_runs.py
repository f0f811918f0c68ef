"""A program of the user's own, run with codecs and without, each run in a process of its own, and their logs as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.errors import UsageError
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.analysis.runs import BASELINE
from gtrace.runlog import RunLogWriter, read_runlog
from gtrace.torch_hooks.processes import launched_place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.report.analysis.run_logs import RunLogAnalysis
    from gtrace.torch_hooks.launcher import Program

#: holds the seed of a run, for programs that read it
SEED_VARIABLE = "GTRACE_SEED"
_CHILD = "import sys; from gtrace.cli.train_script import run_one; sys.exit(run_one(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run whose program failed: its codec, ``none`` for no compression; 128 + N is the exit code by signal N."""

    spec: str
    seed: int
    exit_code: int


@dataclass(frozen=True, slots=True)
class ScriptRuns:
    """The outcome of several runs of a program: all of them summed up, and those that failed."""

    log: RunLogAnalysis
    failed: tuple[FailedRun, ...]
    #: another seed gave the same losses, because the program sets its own: later seeds were left out
    own_seed: bool


def run_all(
    program: Program,
    setup: Sequence[dict[str, Any]],
    seeds: Sequence[int],
    log: Path,
    say: Callable[[str], None],
    *,
    study: dict[str, Any],
) -> ScriptRuns:
    """Run a program once for each seed and each codec, one after the other, with the same arguments.

    Args:
        program: what to run.
        setup: settings of the process of each codec, as :class:`gtrace.training.scriptlog.ScriptOptions`; the first is
            the uncompressed run.
        seeds: of the runs; each is in ``GTRACE_SEED``, and seeds random, numpy and torch before the program starts.
        log: run log to write; an earlier one is replaced.
        say: called with one line before each run.
        study: fields of the log's study record that are those of all runs.
    """
    if launched_place().rank is not None:
        raise UsageError(
            "--baseline: the launcher has started one process for each rank already; let gtrace start the launcher: "
            "gtrace train --baseline ... -m torch.distributed.run --nproc-per-node 2 train.py"
        )
    found: list[list[dict[str, Any]]] = []
    failed: list[FailedRun] = []
    own_seed = False
    runs = [(seed, one) for seed in seeds for one in setup]
    try:
        for number, (seed, one) in enumerate(runs, 1):
            spec = BASELINE if one["watched"] else one["codec"]
            called = "uncompressed" if one["watched"] else spec
            say(f"gtrace: run {number} of {len(runs)}: {called}{f', seed {seed}' if len(seeds) > 1 else ''}")
            code, records = _run(program, {**one, "seed": seed, "script_seed": seed})
            if code:
                failed.append(FailedRun(spec, seed, code))
                # A run that did not finish has no final loss.
                records = [record for record in records if record["type"] != "end"]
            elif not records:
                raise UsageError(f"{program.target}: nothing to compare: it took no step of a torch optimizer")
            if one["watched"]:
                own_seed = bool(found and _losses(records)) and _losses(records) == _losses(found[0])
                if code or own_seed:
                    break
            if records:
                found.append(records)
    finally:
        if found:
            _write(log, found, study)
    records = read_runlog(log) if found else [{"type": "study", **study}]
    return ScriptRuns(analyze_runs(records, log.name), tuple(failed), own_seed)


def _run(program: Program, setup: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """Run the program in a process of its own with this one's streams; its exit code, and the records of its log."""
    with tempfile.TemporaryDirectory(prefix="gtrace-") as folder:
        path = Path(folder) / "run.jsonl"
        message = {"target": program.target, "args": program.args, "is_module": program.is_module}
        child = json.dumps({**message, "setup": {**setup, "log": str(path)}})
        seed = {SEED_VARIABLE: str(setup["script_seed"])}
        code = subprocess.run([sys.executable, "-c", _CHILD, child], env={**os.environ, **seed}, check=False).returncode
        return (128 - code if code < 0 else code), (read_runlog(path) if path.exists() else [])


def _losses(records: list[dict[str, Any]]) -> list[float]:
    return [record["loss"] for record in records if record["type"] == "step" and record["loss"] is not None]


def _write(log: Path, found: list[list[dict[str, Any]]], study: dict[str, Any]) -> None:
    """All runs in one log. What they share is said by the last: where ranks exchanged payloads, it is one of these."""
    about = {name: value for name, value in found[-1][0].items() if name not in ("type", "version", "launch")}
    with RunLogWriter(log, {**about, **study}, force=True) as writer:
        for records in found:
            for record in records[1:]:
                writer.write(record["type"], **{name: value for name, value in record.items() if name != "type"})
