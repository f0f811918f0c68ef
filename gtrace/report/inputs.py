"""Find out what a path holds, and read everything that a report needs from it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.errors import TraceError, UsageError
from gtrace.planning.plan import is_plan, load_plan
from gtrace.planning.toml import SUFFIXES as PLAN_SUFFIXES
from gtrace.report.analysis.runs import RunLogAnalysis, analyze_runs, pool_runs
from gtrace.report.analysis.savings import Savings, savings_of_runs, savings_of_sweep
from gtrace.report.analysis.sweep import SideBySide, SweepAnalysis, analyze, compare_sweeps
from gtrace.report.analysis.tensors import TensorGroup, group_tensors
from gtrace.report.analysis.traces import TraceSummary, summarize_trace
from gtrace.report.names import number, pick
from gtrace.runlog import read_runlog
from gtrace.sweep.store import ResultStore, SweepResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.costs import Cluster
    from gtrace.planning import Plan
    from gtrace.report.analysis.cells import Coder
    from gtrace.report.analysis.evidence import PairedComparison

SWEEP_SUFFIX = ".sweep.db"
RUN_SUFFIX = ".jsonl"
_SQLITE = b"SQLite format 3\0"
_HDF5 = b"\x89HDF\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that a report shows.

    Attributes:
        title: heading of the page.
        sweeps: sections on codecs, in the order given.
        runs: sections on training.
        traces: sections on traces that nothing was measured on.
        plans: sections on plans.
        side_by_side: every further sweep against the first.
        pools: names of run logs of the same task, and these put together.
        pairs: configurations that the reader named, compared within each sweep, in the order of ``sweeps``.
        groups: of tensors that the reader named, of each sweep likewise.
        savings: what the codecs of the sweeps and run logs save between the ranks that the reader named.
    """

    title: str
    sweeps: tuple[SweepAnalysis, ...] = ()
    runs: tuple[RunLogAnalysis, ...] = ()
    traces: tuple[TraceSummary, ...] = ()
    plans: tuple[Plan, ...] = ()
    side_by_side: tuple[SideBySide, ...] = ()
    pools: tuple[tuple[tuple[str, ...], RunLogAnalysis], ...] = ()
    pairs: tuple[tuple[PairedComparison, ...], ...] = ()
    groups: tuple[tuple[TensorGroup, ...], ...] = ()
    savings: tuple[Savings, ...] = ()

    def savings_of(self, sweep: SweepAnalysis) -> Savings | None:
        """What the codecs of a sweep save, if the reader named ranks."""
        return next((savings for savings in self.savings if savings.name == sweep.name), None)

    @property
    def sections(self) -> int:
        """How many inputs there are."""
        return len(self.sweeps) + len(self.runs) + len(self.traces) + len(self.plans)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a reader asked of sweeps, beside what they hold.

    Attributes:
        pairs: specs of configurations to be compared within each sweep as they are.
        groups: of tensors, as :func:`gtrace.report.analysis.tensors.group_tensors` reads them.
        batch: samples of a step over all workers, of every sweep; NaN takes what the traces say.
        cluster: for which savings are computed, if it has a compute time; its ranks are the workers.
        workers: for how many codecs are compared; None takes those of the run that was captured.
        coder: that turns symbols into bits, the same for all codecs.
        horizon: number of steps over which costs of noise are predicted; None takes the rest of the training.
    """

    pairs: Sequence[tuple[str, str]] = ()
    groups: Sequence[str] = ()
    batch: float = math.nan
    cluster: Cluster | None = None
    workers: int | None = None
    coder: Coder = "huffman"
    horizon: int | None = None


def make_report(
    sweeps: Sequence[Path | str | SweepResult] = (),
    runs: Sequence[Path | str | Sequence[dict[str, Any]]] = (),
    traces: Sequence[Path | str] = (),
    title: str | None = None,
    *,
    plans: Sequence[Path | str | Plan] = (),
    asked: Asked = Asked(),
) -> Report:
    """Read and sum up results whose kind is known.

    Args:
        sweeps: result stores, or sweeps that are in memory.
        runs: run logs, or their records.
        traces: traces, of which the table of contents is read.
        title: heading; made from the names when left out.
        plans: files, or plans that are in memory.
        asked: which comparisons, for whom.

    Raises:
        TraceError: one of them is missing, foreign, damaged or from a newer version.
        UsageError: a pair names a configuration that a sweep lacks, groups cannot be formed, or there is no sweep.
    """
    if asked.pairs and not sweeps:
        raise UsageError("--pair compares configurations of a sweep; pass a .sweep.db")
    if asked.groups and not sweeps:
        raise UsageError("--group sums up a sweep by groups of its tensors; pass a .sweep.db")
    files = [Path(p).name for p in (*sweeps, *runs, *traces) if isinstance(p, (str, Path))]

    def named(source: object, kind: str, place: int, several: bool) -> str:
        """The file's name, the whole path if two inputs have the same name; a number for what is in memory."""
        if not isinstance(source, (str, Path)):
            return f"{kind} {place + 1}" if several else kind
        name = Path(source).name
        return str(source) if files.count(name) > 1 else name or str(source)

    by = pick(asked, "workers", "coder")
    read_sweeps, grouped, read_runs = [], [], []
    for k, sweep in enumerate(sweeps):
        result = sweep if isinstance(sweep, SweepResult) else ResultStore.load(Path(sweep)).selected
        name = named(sweep, "sweep", k, len(sweeps) > 1)
        read_sweeps.append(analyze(result, name, batch=asked.batch, horizon=asked.horizon, **by))
        if asked.groups:
            grouped.append(tuple(group_tensors(result, asked.groups, **by)))
    for k, run in enumerate(runs):
        records = read_runlog(Path(run)) if isinstance(run, (str, Path)) else run
        read_runs.append(analyze_runs(records, named(run, "run", k, len(runs) > 1)))
    read_traces = [summarize_trace(Path(trace), named(trace, "trace", 0, False)) for trace in traces]
    read_plans = [load_plan(plan) if isinstance(plan, (str, Path)) else plan for plan in plans]
    names = [*(s.name for s in read_sweeps), *(r.name for r in read_runs)]
    names += [*(t.name for t in read_traces), *(p.name for p in read_plans)]
    savings: list[Savings | None] = []
    if asked.cluster is not None:
        timed = [(sweep, sweep.timed(asked.cluster)[0]) for sweep in read_sweeps]
        savings += [savings_of_sweep(sweep, cluster) for sweep, cluster in timed if cluster.step_time]
        if asked.cluster.step_time is not None:
            savings += [savings_of_runs(log, asked.cluster) for log in read_runs]
    return Report(
        title or _title(names, read_sweeps),
        tuple(read_sweeps),
        tuple(read_runs),
        tuple(read_traces),
        tuple(read_plans),
        tuple(compare_sweeps(read_sweeps[0], other) for other in read_sweeps[1:]),
        pool_runs(read_runs),
        tuple(sweep.compare(asked.pairs) for sweep in read_sweeps) if asked.pairs else (),
        tuple(grouped),
        tuple(one for one in savings if one is not None),
    )


def _title(names: Sequence[str], sweeps: Sequence[SweepAnalysis]) -> str:
    """The model, its size and the script of the only sweep, if the trace knew them; otherwise the inputs."""
    attrs = sweeps[0].trace_attrs if len(sweeps) == 1 else {}
    model = attrs.get("model")
    if not isinstance(model, str) or not model:
        return f"gtrace report: {', '.join(names)}"
    tensors = sweeps[0].provenance.get("tensors")
    sizes = tensors.values() if isinstance(tensors, dict) else sweeps[0].elements.tolist()
    argv = attrs.get("argv")
    script = f" · {Path(str(argv[0])).name}" if isinstance(argv, list) and argv else ""
    elements = sum(n for n in sizes if isinstance(n, int))
    size = str(elements)
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "B")):
        if elements >= factor:
            size = f"{number(elements / factor, 2 if elements < 100 * factor else 3)} {unit}"
    return f"{model}, {size} parameters{script}"


def load_report(paths: Sequence[Path], title: str | None = None, *, asked: Asked = Asked()) -> Report:
    """Read paths of any kind; what each is, is known from its content.

    Args:
        paths: results and traces.
        title: heading; made from the names when left out.
        asked: which comparisons, for whom.

    Raises:
        TraceError: one of them is missing, foreign, damaged or from a newer version.
        UsageError: pairs or groups that the sweeps do not have.
    """
    kinds = [(path, kind_of(path)) for path in paths]
    of = {name: [path for path, kind in kinds if kind == name] for name in ("sweep", "run", "trace", "plan")}
    return make_report(of["sweep"], of["run"], of["trace"], title, plans=of["plan"], asked=asked)


def kind_of(path: Path) -> str:
    """``sweep``, ``run``, ``trace`` or ``plan``, from the first bytes and not from the name.

    Raises:
        TraceError: there is nothing, or it cannot be read.
    """
    if path.is_dir() or path.suffix == ".zip":
        return "trace"
    if path.exists() and not path.is_file():
        # A pipe would be waited for without end.
        raise TraceError(f"{path}: it is not a file; pass a .sweep.db, a run log or a trace")
    try:
        with path.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise TraceError(f"{path}: {reason}; pass a .sweep.db, a run log or a trace") from None
    if start.startswith(_SQLITE) or path.name.endswith(SWEEP_SUFFIX):
        return "sweep"
    if path.suffix in PLAN_SUFFIXES or is_plan(start):
        return "plan"
    return "trace" if start.startswith(_HDF5) or path.suffix in (".h5", ".hdf5") else "run"


def newest_results(folder: Path) -> list[Path]:
    """The newest sweep and the newest run log of a folder, whichever there are, the newer one first.

    Raises:
        TraceError: there is neither.
    """
    sweeps = [path for path in folder.glob(f"*{SWEEP_SUFFIX}") if path.is_file()]
    logs = [path for path in folder.glob(f"*{RUN_SUFFIX}") if path.is_file() and _is_run_log(path)]
    newest = [max(found, key=_changed) for found in (sweeps, logs) if found]
    if not newest:
        raise TraceError(f"no results in {folder}: `gtrace sweep TRACE` or `gtrace train` makes some, or name a file")
    return sorted(newest, key=_changed, reverse=True)


def _changed(path: Path) -> float:
    """When a result was last written; a sweep that is still running writes to the log beside its file."""
    log = path.with_name(path.name + "-wal")
    return max(p.stat().st_mtime for p in (path, log) if p.exists())


def _is_run_log(path: Path) -> bool:
    """Other programs write .jsonl too; theirs are passed over when nobody asked for them by name."""
    with path.open("rb") as file:
        first = file.readline(1 << 22)
    try:
        record = json.loads(first)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and record.get("type") == "study"
