"""From a training script to a decision: capture, a sweep of a few codecs, a plan and the verdict, in one go."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.capture.probe import ProbeOptions, ProbeTimings
from gtrace.codecs import Codec, expecting
from gtrace.codecs import codec as build_codec
from gtrace.costs import Cluster, time_step
from gtrace.errors import ScriptError, UsageError, check_folder, keep_inputs, need_folder
from gtrace.planning import Budget, Plan, curves_of, make_plan, save_plan
from gtrace.report.analysis.families import PLAIN
from gtrace.report.analysis.savings import PAYLOADS, Savings, savings_of_sweep
from gtrace.report.files import write_report
from gtrace.report.inputs import Asked, make_report
from gtrace.report.names import count
from gtrace.report.verdict import candidates_of, choose, verdict_of
from gtrace.sweep import SweepResult, run_sweep
from gtrace.sweep.quick import BITS, quick_steps
from gtrace.sweep.run import expand
from gtrace.torch_hooks.launcher import Program
from gtrace.trace import Trace, open_trace
from gtrace.trace.facts import StepTimes
from gtrace.trace.files import remove

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from gtrace.report.analysis.sweep import SweepAnalysis
    from gtrace.report.section import Verdict

#: bursts of four steps, further and further apart: noise needs three in a row, and training changes most at first
STEPS = "0+4,8+4,21+4,41+4,74+4,126+4,210+4,344+4"
#: recorded steps that are enough
MOST_STEPS = 32
#: codecs whose closed forms are quick, and bf16; a sweep of its own has more
METHODS = "bf16,qsgdinf,qsgd,nuqsgd,zipml,terngrad,natural"
#: bytes of gradients that are recorded at most
BUDGET = 4_000_000_000
TRACE, SWEEP, PLAN, PAGE, RECORD = "trace.zarr", "sweep.db", "plan.toml", "report.html", "advice.json"
#: seconds that a program may take before its first step, and after the probe has enough
_START, _GRACE = 600.0, 5.0
#: link speeds at which a range is looked at before crossovers are searched between them
_SPEEDS = 17
#: link speeds that differ by less are the same
_SAME_SPEED = 1.01
_CHILD = "import sys; from gtrace.capture.probe import run_probe; sys.exit(run_probe(sys.argv[1]))"


@dataclass(frozen=True, slots=True)
class AdviceOption:
    """One way to exchange gradients: ``float32``, ``bf16``, a codec's spec, or ``plan``; ``bits`` are measured ones."""

    name: str
    bits: float
    #: share of the gradient's energy that it loses after averaging; NaN if not measured
    error: float
    #: of a step on the cluster; NaN without one
    seconds: float


@dataclass(frozen=True, slots=True)
class SpeedRange:
    """Link speeds with the same recommendation: from ``low`` to ``high`` bits per second."""

    low: float
    high: float
    recommendation: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What ``gtrace advise`` found, and its files."""

    target: str
    verdict: Verdict
    #: float32, bf16, the best codec and the plan; the last two if there is one
    options: tuple[AdviceOption, ...]
    #: a codec for every tensor at the codec's bits; None if no codec was measured
    plan: Plan | None
    #: recommendations over a range of link speeds, slowest first; empty if none was asked for
    speeds: tuple[SpeedRange, ...]
    cluster: Cluster | None
    #: measured seconds of a step and of its backward pass, if they are known
    step: float | None
    backward: float | None
    #: of each stage: ``capture``, ``sweep``, ``plan``, ``report``
    seconds: dict[str, float]
    trace: Path
    sweep: Path
    plan_file: Path | None
    page: Path
    #: what a reader must know
    notes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON values; numbers that are not finite are left to the writer."""
        names = ("target", "step", "backward", "seconds", "notes")
        files = {name: getattr(self, name) for name in ("trace", "sweep", "plan_file", "page")}
        return {
            "verdict": asdict(self.verdict),
            **{name: getattr(self, name) for name in names},
            "options": [asdict(one) for one in self.options],
            "speeds": [asdict(one) for one in self.speeds],
            "plan": None if self.plan is None else asdict(self.plan.totals),
            **{name: None if path is None else str(path) for name, path in files.items()},
        }


def advise(
    argv: Sequence[str],
    *,
    is_module: bool,
    asked: Asked,
    speeds: tuple[float, float] | None,
    folder: Path | None,
    seconds: float,
    force: bool,
    say: Callable[[str], None],
) -> Advice:
    """Find out whether a training should compress its gradients, with what, and what that saves and costs.

    Args:
        argv: a script, the name of a module, or the path of a trace; and its arguments.
        is_module: it is the name of a module.
        asked: for which cluster steps are predicted, with its step time if that is not to be measured; horizon, batch.
        speeds: slowest and fastest link, bits per second, between which recommendations are compared.
        folder: for all results; None for ``NAME.advice``.
        seconds: of training that are recorded at most.
        force: use a folder that holds something else, too.
        say: gets one line before each stage.
    """
    target, *args = argv
    path = Path(target)
    is_trace = not is_module and (path.suffix in (".zarr", ".h5", ".hdf5", ".zip") and path.exists())
    program = Program(target, tuple(args), is_module)
    if is_trace:
        if args:
            raise UsageError(f"{target}: a trace takes no arguments")
        open_trace(path).close()
    else:
        program.check()
    name = path.name.removesuffix(".zip").removesuffix(path.suffix) if is_trace else program.stem
    folder = folder or Path(f"{name}.advice")
    if is_trace:
        keep_inputs(folder, path)
    _prepare(folder, force=force)
    taken: dict[str, float] = {}

    @contextlib.contextmanager
    def stage(name: str, text: str = "") -> Iterator[None]:
        if text:
            say(text)
        started = time.monotonic()
        yield
        taken[name] = taken.get(name, 0.0) + time.monotonic() - started

    trace, timings = path, ProbeTimings()
    if not is_trace:
        trace = folder / TRACE
        shown = f"at most {seconds:.0f} s of training, {MOST_STEPS} steps recorded"
        with stage("capture", f"capture: {program.called} ({shown})"):
            timings = _capture(program, folder, seconds, say)
    else:
        _clear(folder, keep=path)
    with open_trace(trace) as opened:
        chosen = quick_steps(opened)
        timings = _recorded(opened) if is_trace else timings
    cluster = _timed(asked.cluster, timings)
    codecs = expand(METHODS, {"bits": list(BITS)})
    with stage("sweep", f"sweep: {len(codecs)} configurations on {count(len(chosen), 'step')}"):
        result = _sweep(trace, codecs, chosen, folder / SWEEP)
    with stage("report", "verdict"):
        asked = replace(asked, cluster=cluster, workers=None if cluster is None else cluster.ranks)
        report = make_report([result], asked=asked)
    analysis = report.sweeps[0]
    savings = None if cluster is None else savings_of_sweep(analysis, cluster)
    verdict = verdict_of(analysis, savings)
    best = _best_codec(analysis, savings)
    plan = plan_file = None
    with stage("plan", "plan"):
        if best is not None:
            plan, plan_file = _plan(result, analysis, best, name), folder / PLAN
            save_plan(plan, plan_file, force=True)
    ranges: tuple[SpeedRange, ...] = ()
    if speeds is not None and cluster is not None:
        ranges = tuple(_speeds(analysis, cluster, *speeds))
    with stage("report"):
        plans = [] if plan_file is None else [plan_file]
        write_report(make_report([folder / SWEEP], asked=asked, plans=plans), folder / PAGE, force=True)
    advice = Advice(
        target=target,
        verdict=verdict,
        options=tuple(_options(analysis, cluster, savings, best, plan)),
        plan=plan,
        speeds=ranges,
        cluster=cluster,
        step=timings.step,
        backward=timings.backward,
        seconds=taken,
        trace=trace,
        sweep=folder / SWEEP,
        plan_file=plan_file,
        page=folder / PAGE,
        notes=tuple(_notes(timings, is_trace=is_trace)),
    )
    (folder / RECORD).write_text(json.dumps({"timings": asdict(timings)}) + "\n", encoding="utf-8")
    return advice


def _prepare(folder: Path, *, force: bool) -> None:
    """A folder for the results. Those of an earlier advice stay until there is something to replace them."""
    check_folder(folder, force=force or (folder / RECORD).exists())
    need_folder(folder)
    folder.mkdir(exist_ok=True)
    (folder / RECORD).touch()


def _clear(folder: Path, *, keep: Path | None = None) -> None:
    """Delete an earlier advice, but for the trace that is read, and nothing else that lies in the folder."""
    for name in (TRACE, SWEEP, f"{SWEEP}-wal", f"{SWEEP}-shm", PLAN, PAGE):
        if keep is None or (folder / name).resolve() != keep.resolve():
            remove(folder / name)


def _capture(program: Program, folder: Path, seconds: float, say: Callable[[str], None]) -> ProbeTimings:
    """Run the program until the probe has enough; its output is shown only if it fails."""
    trace, timings = folder / f"new.{TRACE}", folder / "timings.json"
    remove(trace)
    remove(timings)
    probe = ProbeOptions(str(trace.resolve()), str(timings.resolve()), STEPS, MOST_STEPS, seconds, BUDGET)
    about = {"target": program.target, "args": program.args, "is_module": program.is_module}
    message = json.dumps({**about, "probe": asdict(probe)})
    output = folder / "output.txt"
    with output.open("wb") as stream:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, message],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = _wait(child, timings, seconds)
        except BaseException:
            _end(child)
            raise
    printed = output.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
    if code and not timings.exists():
        say("\n".join(printed[-20:]))
        raise ScriptError(f"{program.called} failed with exit code {code}; the end of its output is above")
    if not trace.exists():
        say("\n".join(printed[-20:]))
        raise UsageError(f"{program.called}: nothing was captured: it took no step of a torch optimizer")
    output.unlink()
    found = ProbeTimings(**json.loads(timings.read_bytes())) if timings.exists() else ProbeTimings()
    timings.unlink(missing_ok=True)
    _clear(folder)
    trace.rename(folder / TRACE)
    return found


def _wait(child: subprocess.Popen[bytes], timings: Path, seconds: float) -> int:
    """Wait for the program; once the probe has enough, end what goes on."""
    limit = time.monotonic() + _START + seconds
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(0.1)
        now = time.monotonic()
        if timings.exists():
            limit = min(limit, now + _GRACE)
        if now > limit:
            return _end(child)


def _end(child: subprocess.Popen[bytes]) -> int:
    """End the program and what it launched, politely first, so that the trace is closed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(_GRACE)
    return child.wait()


def _recorded(trace: Trace) -> ProbeTimings:
    """What a trace says about the time of steps: what capture measured, or the times of its recorded steps."""
    times = StepTimes.of(trace.attrs)
    if times.step is not None:
        return ProbeTimings(times.step, times.backward, times.steps, ranks=1 if times.exposed else times.ranks)
    scalars = trace.scalars(**trace.streams[0]._asdict()) if trace.streams else {}
    if "time" not in scalars:
        return ProbeTimings()
    passed = np.diff(scalars["time"])[np.diff(scalars["step"]) == 1]
    middle = float(np.median(passed)) if len(passed) else 0.0
    return ProbeTimings(middle if 0 < middle < np.inf else None)


def _timed(cluster: Cluster | None, timings: ProbeTimings) -> Cluster | None:
    if cluster is None or cluster.step_time is not None:
        return cluster
    if timings.step is None:
        raise UsageError(f"--cluster: the time of a step is not known here; add it, e.g. {cluster},180ms.")
    backward = None if timings.backward is None else min(timings.backward, timings.step)
    return replace(cluster, step_time=timings.step, backward_time=backward)


def _sweep(trace: Path, codecs: Sequence[Codec], steps: Sequence[int], output: Path) -> SweepResult:
    """Closed forms of the codecs that have some, which take a fraction of the time of encodings; others encode once."""
    drawn = [c for c in codecs if not expecting(c)]
    if drawn:
        run_sweep(trace, drawn, steps=steps, draws=1, optimal=False, output=output)
    # All of them last: a report on the file shows what was asked for last.
    return run_sweep(trace, codecs, steps=steps, draws=0, optimal=False, output=output)


def _best_codec(analysis: SweepAnalysis, savings: Savings | None) -> str | None:
    """The recommended codec; if it is not to compress, the best one by the same rule, else the best at about 4 bits."""
    choice = choose(candidates_of(analysis, savings), network=savings is not None)
    for one in (choice.chosen, choice.best):
        if one is not None and one.method not in PLAIN:
            return one.codec
    known = [c for c in analysis.configurations if np.isfinite(c.bits * c.error) and not c.partial]
    found = [c for c in known if c.method not in PLAIN]
    return min(found, key=lambda c: (abs(c.bits - 4) > 1, c.error)).spec if found else None


def _plan(result: SweepResult, analysis: SweepAnalysis, codec: str, name: str) -> Plan:
    bits = next(c.bits for c in analysis.configurations if c.spec == codec)
    curves = curves_of(result)
    curves = curves.only([spec for spec in curves.codecs if spec not in PLAIN or spec == "none"])
    about = {key: result.provenance.get(key, "") for key in ("trace", "trace_fingerprint")}
    return make_plan(curves, Budget("bits", bits, f"{bits:.4g} bits"), name=name, provenance=about)


def _options(
    analysis: SweepAnalysis, cluster: Cluster | None, savings: Savings | None, codec: str | None, plan: Plan | None
) -> Iterator[AdviceOption]:
    found = {one.codec: one for one in candidates_of(analysis, savings)}
    yield AdviceOption("float32", 32.0, 0.0, found["none"].seconds)
    yield AdviceOption("bf16", 16.0, found["bf16"].error, found["bf16"].seconds)
    if codec is not None:
        yield AdviceOption(codec, found[codec].bits, found[codec].error, found[codec].seconds)
    if plan is not None:
        rows = {row.tensor: row for row in plan.tensors}
        unbiased = all(build_codec(row.codec).unbiased for row in plan.tensors)
        error = plan.totals.error / analysis.basis.workers if unbiased else np.nan
        taken = np.nan
        if cluster is not None:
            order = [name for name in analysis.provenance.get("tensors", rows) if name in rows]
            sizes, bits = [rows[name].elements for name in order], [rows[name].bits for name in order]
            taken = min(time_step(sizes, bits, cluster, way).seconds for way in PAYLOADS)
        yield AdviceOption("plan", plan.totals.bits, error, taken)


def _speeds(analysis: SweepAnalysis, cluster: Cluster, low: float, high: float) -> Iterator[SpeedRange]:
    """Recommendations from the slowest to the fastest link; where two meet is searched to 1%."""

    def answer(speed: float) -> str:
        network = replace(cluster.network, bandwidth=speed)
        savings = savings_of_sweep(analysis, replace(cluster, network=network))
        verdict = verdict_of(analysis, savings)
        if verdict.answer == "compress":
            return str(verdict.codec)
        return {32.0: "float32", 16.0: "bf16"}.get(verdict.bits or 0.0, verdict.answer)

    def between(one: float, other: float, first: str, last: str) -> Iterator[tuple[float, str]]:
        if first == last:
            return
        if other / one < _SAME_SPEED:
            yield np.sqrt(one * other), last
            return
        middle = np.sqrt(one * other)
        found = answer(middle)
        yield from between(one, middle, first, found)
        yield from between(middle, other, found, last)

    speeds = np.geomspace(low, high, _SPEEDS).tolist()
    found = [answer(speed) for speed in speeds]
    start, current = low, found[0]
    for k in range(len(speeds) - 1):
        for speed, following in between(speeds[k], speeds[k + 1], found[k], found[k + 1]):
            yield SpeedRange(start, float(speed), current)
            start, current = float(speed), following
    yield SpeedRange(start, high, current)


def _notes(timings: ProbeTimings, *, is_trace: bool) -> Iterator[str]:
    if timings.ranks > 1:
        yield (
            f"the step time has the exchange between {timings.ranks} ranks in it; for computing alone give it: "
            "--cluster 8x25Gbit/s,180ms"
        )
    if is_trace and timings.step is not None and not timings.timed and timings.backward is None:
        yield "the step time is that of recorded steps, and has the time of capture in it"
