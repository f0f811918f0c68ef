"""``gtrace train SCRIPT``: a program of the user's own with a codec on its gradients, and beside runs without one."""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.console import echo, print_savings, savings_of_log
from gtrace.cli.options import arguments, file_name, load_plugins, pick, print_json
from gtrace.codecs import Identity, codec
from gtrace.codecs.assignment import CodecTable
from gtrace.errors import EXIT_OK, EXIT_SCRIPT, GtraceError, ScriptError, UsageError, check_output, size_text
from gtrace.report.names import count
from gtrace.runlog import RunLogWriter, read_runlog
from gtrace.torch_hooks.children import after_import, children_call, watch_no_more
from gtrace.torch_hooks.launcher import Outcome, Program, run_program
from gtrace.torch_hooks.processes import before_abrupt_exit, launch_token, launched_place, seed_libraries
from gtrace.training.exchange import node_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gtrace.cli.train_settings import TrainSettings
    from gtrace.codecs.assignment import Coding
    from gtrace.costs import Cluster
    from gtrace.report.analysis.runs import RunLogAnalysis
    from gtrace.report.analysis.savings import Savings
    from gtrace.training.unmodified import ScriptSummary, ScriptTraining


def run_script(settings: TrainSettings, chosen: Coding, script: str, args: tuple[str, ...]) -> int:
    """Run the program with a codec on its gradients; returns the exit code."""
    cluster = settings.cluster.chosen(timed=True)
    program = Program(script, args, settings.is_module)
    program.check()
    log = settings.output or Path(f"{program.stem}-{file_name(str(chosen))}.jsonl")
    if not launched_place().rank:
        check_output(log, script, *settings.plans, *settings.codecs.plugin, force=settings.force)
    setup = {**_setup(settings, chosen, program), "log": str(log.resolve())}

    def conclude(outcome: Outcome, trainings: list[ScriptTraining]) -> int:
        return _conclude(program, outcome, trainings, setup, log, cluster, as_json=settings.as_json)

    return _run(program, setup, conclude, live=not settings.as_json)


def _setup(settings: TrainSettings, chosen: Coding, program: Program) -> dict[str, Any]:
    node_of(settings.exchange)
    if isinstance(chosen, CodecTable) and (settings.rules or settings.min_size):
        raise UsageError(f"{chosen}: a plan names the codec of every tensor; --rule and --min-size are for one codec")
    return {
        "codec": str(chosen),
        "rules": _rules(settings.rules),
        "table": chosen.describe() if isinstance(chosen, CodecTable) else None,
        "plan": str(Path(chosen.source).resolve()) if isinstance(chosen, CodecTable) else "",
        "workers": settings.workers or 1,
        "nonfinite": settings.nonfinite or "pass",
        "argv": program.argv,
        "launch": launch_token() or secrets.token_hex(8),
        "plugins": [str(file.resolve()) for file in settings.codecs.plugin],
        **arguments(settings, "script"),
    }


def _run(
    program: Program, setup: dict[str, Any], conclude: Callable[[Outcome, list[ScriptTraining]], int], *, live: bool
) -> int:
    """Run the program in this process with a codec on its gradients; ``conclude`` gives the exit code."""
    watch_no_more()
    trainings: list[ScriptTraining] = []

    def start() -> None:
        from gtrace.training.unmodified import forks_trained, training

        trainings.append(training(setup, _live() if live else None))
        trainings[0].start()
        held.enter_context(forks_trained(setup))

    def leave(exit_code: int) -> int:
        try:
            return conclude(Outcome(exit_code), trainings)
        except GtraceError as error:
            echo(f"gtrace: {error}", err=True)
            return error.exit_code

    with before_abrupt_exit(leave):
        with (
            contextlib.ExitStack() as held,
            after_import("torch", start),
            children_call("gtrace.training.unmodified", setup),
        ):
            outcome = run_program(program)
        return conclude(outcome, trainings)


def run_one(message: str) -> int:
    """One of several runs of a program, in a process of its own; returns the program's exit code.

    The message is JSON of the program (``target``, ``args``, ``is_module``) and of what to do (``setup``).
    """
    asked = json.loads(message)
    program, setup = Program(asked["target"], tuple(asked["args"]), asked["is_module"]), asked["setup"]

    def conclude(outcome: Outcome, trainings: list[ScriptTraining]) -> int:
        for one in trainings:
            one.finish()
        _clear_line()
        return outcome.exit_code

    load_plugins(tuple(map(Path, setup["plugins"])))
    seed_libraries(setup["script_seed"])
    try:
        return _run(program, setup, conclude, live=True)
    except GtraceError as error:
        echo(f"gtrace: {error}", err=True)
        return error.exit_code


def compare_script(settings: TrainSettings, chosen: list[Coding], script: str, args: tuple[str, ...]) -> int:
    """Run the program without a codec and with each, one after the other, and compare the final losses.

    Returns the exit code.
    """
    cluster = settings.cluster.chosen(timed=True)
    codecs = [one for one in chosen if not isinstance(one, Identity)]
    if not codecs:
        raise UsageError("--codec none is the baseline itself; name a codec to compare with it")
    program = Program(script, args, settings.is_module)
    program.check()
    named = file_name(str(codecs[0])) if len(codecs) == 1 else "compare"
    log = settings.output or Path(f"{program.stem}-{named}.jsonl")
    check_output(log, script, *settings.plans, *settings.codecs.plugin, force=settings.force)
    setup = [{**_setup(settings, one, program), "watched": False} for one in codecs]
    exact = {**_setup(settings, Identity(), program), "rules": [], "watched": True}
    seeds = range(settings.seed, settings.seed + settings.seeds)
    command = shlex.join(["gtrace", *sys.argv[1:]])
    study = {"command": command, "runs": ["none", *map(str, codecs)], "seed": settings.seed}
    runs = _run_all(program, [exact, *setup], seeds, log, study)
    code = _show_comparison(program, runs, log, seeds, as_json=settings.as_json)
    if not settings.as_json:
        print_savings(savings_of_log(log, cluster) if runs.log.runs else None)
    return code


#: holds the seed of a run, for programs that read it
SEED_VARIABLE = "GTRACE_SEED"
_CHILD = "import sys; from gtrace.cli.train_script import run_one; sys.exit(run_one(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class ScriptRuns:
    """The outcome of several runs of a program: all of them summed up, and those that failed."""

    log: RunLogAnalysis
    #: codec, ``none`` for no compression, seed and exit code, which by signal N is 128 + N
    failed: tuple[tuple[str, int, int], ...]
    #: another seed gave the same losses, because the program sets its own: later seeds were left out
    own_seed: bool


def _run_all(
    program: Program, setup: Sequence[dict[str, Any]], seeds: Sequence[int], log: Path, study: dict[str, Any]
) -> ScriptRuns:
    """Run a program once for each seed and each codec, one after the other, with the same arguments.

    ``setup`` are the settings of the process of each codec, of the uncompressed run first, and ``study`` the fields of
    the log's study record that are those of all runs.
    """
    from gtrace.report.analysis.runs import BASELINE, analyze_runs

    if launched_place().rank is not None:
        raise UsageError(
            "--baseline: the launcher has started one process for each rank already; let gtrace start the launcher: "
            "gtrace train --baseline ... -m torch.distributed.run --nproc-per-node 2 train.py"
        )
    found: list[list[dict[str, Any]]] = []
    failed: list[tuple[str, int, int]] = []
    own_seed = False
    runs = [(seed, one) for seed in seeds for one in setup]
    try:
        for number, (seed, one) in enumerate(runs, 1):
            spec = BASELINE if one["watched"] else one["codec"]
            called = "uncompressed" if one["watched"] else spec
            of_seed = f", seed {seed}" if len(seeds) > 1 else ""
            echo(f"gtrace: run {number} of {len(runs)}: {called}{of_seed}", err=True)
            code, records = _run_alone(program, {**one, "seed": seed, "script_seed": seed})
            if code:
                failed.append((spec, seed, code))
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


def _run_alone(program: Program, setup: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
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


def _show_comparison(program: Program, runs: ScriptRuns, log: Path, seeds: range, *, as_json: bool) -> int:
    from gtrace.report.analysis.runs import final_losses
    from gtrace.report.sections.training import comparison_lines

    failed = [
        f"{'the uncompressed run' if spec == 'none' else spec} failed with exit code {code}"
        + (f" (seed {seed})" if len(seeds) > 1 else "")
        for spec, seed, code in runs.failed
    ]
    for text in failed:
        echo(f"gtrace: {program.called}: {text}", err=True)
    code = EXIT_SCRIPT if runs.failed else EXIT_OK
    compared = final_losses(runs.log.runs, runs.log.groups)
    if as_json:
        document = {
            "output": str(log) if runs.log.runs else None,
            "comparison": [asdict(one) for one in compared],
            "own_seed": runs.own_seed,
            "failed": [dict(zip(("spec", "seed", "exit_code"), one, strict=True)) for one in runs.failed],
        }
        print_json(document)
    if not any(one.seen for one in compared):
        if not runs.failed:
            raise UsageError(
                f"{program.called}: its loss cannot be seen, so nothing is compared; gtrace sees a loss that is one "
                "number on which the program calls backward()"
            )
        return code
    if not as_json:
        for line in comparison_lines(compared, runs.own_seed):
            echo(line)
        shown = shlex.quote(str(log))
        echo(f"{shown}; next: gtrace report {shown}")
    return code


def _rules(texts: tuple[str, ...]) -> list[list[str]]:
    pairs = []
    for text in texts:
        pattern, separator, spec = text.partition("=")
        if not (pattern and separator and spec):
            raise UsageError(f"--rule {text}: write GLOB=CODEC, e.g. bias=none")
        pairs.append([pattern, str(codec(spec))])
    return pairs


def _clear_line() -> None:
    if sys.stderr.isatty():
        click.echo("\x1b[K", nl=False, err=True)


def _live() -> Any:
    """Show every record: one line on a terminal that is written over and over, nothing in a pipe."""
    if not sys.stderr.isatty():
        return None
    shown = [0.0]

    def update(record: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - shown[0] < 1:
            return
        shown[0] = now
        bits = 32 * record["bits"] / record["bits_float32"] if record["bits_float32"] else math.nan
        # The cursor goes back to the start, so that what the program prints next replaces it.
        click.echo(f"\x1b[Kstep {record['step']}  loss {record['loss']:.4g}  {bits:.2f} bits\r", nl=False, err=True)

    return update


def _conclude(
    program: Program,
    outcome: Outcome,
    trainings: list[ScriptTraining],
    setup: dict[str, Any],
    log: Path,
    cluster: Cluster | None,
    *,
    as_json: bool,
) -> int:
    summary = trainings[0].finish() if trainings else None
    _clear_line()
    sys.stdout.flush()
    rank = launched_place().rank
    lines, savings = [], None
    if summary is not None and summary.steps:
        if not rank:
            savings = savings_of_log(summary.log, cluster) if summary.log is not None else None
            lines = list(_lines(summary, setup))
            if as_json:
                print_json(_as_dict(summary, setup, savings))
    elif rank is None and (lines := _of_children(log, setup)):
        savings = savings_of_log(log, cluster)
    for line in lines:
        echo(line, err=True)
    print_savings(savings, err=True)
    if outcome.interrupted:
        raise click.Abort
    if outcome.exit_code:
        failed = f"{program.called} failed with exit code {outcome.exit_code}"
        if rank is None:
            raise ScriptError(failed)
        echo(f"gtrace: {failed}", err=True)
        return outcome.exit_code
    if rank is None and not lines:
        why = "it never imported torch" if summary is None else "it took no step of a torch optimizer"
        raise UsageError(f"{program.target}: nothing went through the codec: {why}")
    return EXIT_OK


def _lines(summary: ScriptSummary, setup: dict[str, Any]) -> Iterator[str]:
    tally, steps, said = summary.tally, summary.steps, count(summary.steps, "step")
    if not tally.float32_bits:
        yield f"gtrace: nothing went through {setup['codec']}: no gradient of {said} was dense and finite"
        return
    each = tally.bits / 8 / steps
    variance = tally.worker_variance
    yield (
        f"gtrace: {said} through {setup['codec']}: {tally.bits_per_element:.2f} bits per value "
        f"({tally.ratio:.1f} times smaller than float32, {tally.ratio / 2:.1f} than bf16), "
        f"{size_text(round(each))} a step"
        + (" from each rank" if summary.exchanged else "")
        + f", relative variance {variance:.3g} of one {'outer gradient' if setup['every'] else 'gradient'}"
    )
    if summary.exchanged:
        yield (
            f"gtrace: {summary.world_size} ranks, {setup['exchange']}: this one gave {size_text(tally.wire_bytes)} to "
            f"collectives for others and spent {1000 * tally.wire_seconds / steps:.3g} ms a step in them, "
            f"{1000 * tally.codec_seconds / steps:.3g} ms of CPU time on the codec"
        )
        if tally.down_bits:
            said = f"gtrace: second shot: {32 * tally.down_bits / tally.float32_bits:.2f} bits per value"
            if tally.down_energy:
                error = tally.down_squared_error / tally.down_energy
                said += f", relative variance {error:.3g} of the averages that this rank sent on"
            yield said
        if summary.comparisons:
            compared = len(summary.comparisons)
            ours = sum(one.relative_variance for one in summary.comparisons) / compared
            bf16 = sum(one.bf16_variance for one in summary.comparisons) / compared
            seconds = sum(one.bf16_seconds for one in summary.comparisons) / compared
            yield (
                f"gtrace: beside it a bf16 all-reduce, at {count(compared, 'step')}: 16 bits, relative variance "
                f"of the average {bf16:.2g} against {ours:.3g}, {1000 * seconds:.3g} ms"
            )
    elif setup["workers"] > 1:
        yield (
            f"gtrace: each gradient is the mean of {setup['workers']} encodings of the same values, variance "
            f"{tally.relative_variance:.3g}; that is optimistic, because real workers' gradients differ"
        )
    if summary.seconds:
        share = summary.codec_seconds / summary.seconds
        yield f"gtrace: the codec took {share:.0%} of the CPU time after the first step"
    if summary.log is not None:
        yield _next(summary.log)


def _of_children(log: Path, setup: dict[str, Any]) -> list[str]:
    # Where processes that the program launched did the training, their run log says it.
    try:
        records = read_runlog(log)
    except GtraceError:
        return []
    if records[0].get("launch") != setup["launch"]:
        return []
    steps = [record for record in records if record["type"] == "step"]
    bits = sum(record["bits"] for record in steps)
    values = sum(record["bits_float32"] for record in steps) / 32
    ranks = records[0]["world_size"]
    said = f"gtrace: {count(len(steps), 'step')} through {setup['codec']} in a launched process"
    if ranks > 1:
        said += f", the first of {ranks} ranks"
    if bits:
        said += f": {bits / values:.2f} bits per value ({32 * values / bits:.1f} times smaller than float32)"
    return [said, _next(log)]


def _next(log: Path) -> str:
    here = Path.cwd()
    shown = shlex.quote(str(log.relative_to(here) if log.is_relative_to(here) else log))
    return f"gtrace: {shown}; next: gtrace report {shown}"


def _as_dict(summary: ScriptSummary, setup: dict[str, Any], savings: Savings | None) -> dict[str, Any]:
    from gtrace.report.sections.savings import savings_json

    tally = summary.tally
    return {
        "output": None if summary.log is None else str(summary.log),
        "codec": setup["codec"],
        "every": setup["every"],
        **pick(summary, "steps", "optimizers", "world_size"),
        "exchange": setup["exchange"] if summary.exchanged else None,
        "workers": setup["workers"],
        "bits_per_value": tally.bits_per_element,
        **pick(tally, "bits", "ratio", "shared_bits", "envelope_bits", "frame_bits", "down_bits", "wire_bytes"),
        **pick(tally, "worker_variance", "wire_seconds"),
        "comparisons": [pick(one, "relative_variance", "bf16_variance") for one in summary.comparisons],
        "savings": savings_json(savings) if savings is not None else None,
        **pick(summary, "seconds", "codec_seconds", "warnings"),
    }
