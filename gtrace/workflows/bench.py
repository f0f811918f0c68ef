"""Run the protocol: the built-in codecs once, their rows kept; the codecs in question every time. Then its tables."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import shutil
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import gtrace
from gtrace.codecs import Codec, codec, codec_class, codec_names, parameter_fields, parse_spec
from gtrace.codecs.plugins import origin_of, plugin_of
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.report.analysis.families import at_bits, bd_rate, envelope
from gtrace.report.analysis.sweep import SweepAnalysis, analyze
from gtrace.report.names import MISSING, number, signed_percent
from gtrace.report.section import Cell, Column, Table
from gtrace.runlog import versions
from gtrace.sweep import SweepResult, expand, run_sweep
from gtrace.sweep.cluster import build
from gtrace.trace import create_trace, open_trace
from gtrace.trace.check import check_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from gtrace.kernels import Floats


@dataclass(frozen=True)
class BenchResult:
    """What the protocol measured."""

    protocol: Protocol
    #: the codecs in question, as given
    specs: tuple[str, ...]
    #: labels of their families, and of the built-in ones
    mine: tuple[str, ...]
    others: tuple[str, ...]
    #: with one analysis each
    traces: tuple[StandardTrace, ...]
    analyses: tuple[SweepAnalysis, ...]
    #: (mine, other) -> one duel per trace
    duels: dict[tuple[str, str], tuple[Duel, ...]]
    #: (mine) -> one number of bits per trace at which the first table compares
    targets: dict[str, tuple[float, ...]]
    #: of what the numbers depend on
    versions: dict[str, str]


def run_bench(
    specs: Sequence[str],
    protocol: Protocol,
    *,
    at: float | None = None,
    jobs: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> BenchResult:
    """Compare codecs with every built-in one at equal measured bits.

    What a spec leaves open runs over the protocol's ranges. ``at`` are the measured bits per coordinate of the first
    table, the protocol's by default; a codec of one configuration is compared at its own bits.
    """
    asked = [protocol.configurations(spec) for spec in specs]
    built_in = protocol.built_in()
    own = {str(item) for items in asked for item in items}
    with cache_folder() as folder:
        traces = standard_traces(protocol, folder, say)
        results = []
        for trace in traces:
            say(f"{trace.name}: {len(own)} configurations in question, {len(built_in)} built in")
            results.append(_sweep(trace, protocol, built_in, [c for items in asked for c in items], folder, jobs))
    targets = (protocol.at if at is None else at,)
    analyses = tuple(analyze(result, trace.name, targets) for result, trace in zip(results, traces, strict=True))
    labels = list(dict.fromkeys(family.label for analysis in analyses for family in analysis.families))
    asked_for = {c.family for analysis in analyses for c in analysis.configurations if c.spec in own}
    mine = tuple(label for label in labels if label in asked_for)
    others = tuple(label for label in labels if label not in mine)
    # Each trace again, with the bits of codecs that have no others to choose.
    members = {label: [[c.bits for c in a.configurations if c.family == label] for a in analyses] for label in mine}
    wanted = {label: tuple(b[0] if len(b) == 1 else targets[0] for b in each) for label, each in members.items()}
    analyses = tuple(
        analyze(result, trace.name, sorted({targets[0], *(wanted[label][k] for label in mine)}))
        for k, (result, trace) in enumerate(zip(results, traces, strict=True))
    )
    curves = [
        {f.label: [(c.bits, c.error) for c in (a.configurations[i] for i in f.members)] for f in a.families}
        for a in analyses
    ]
    duels = {
        (one, other): tuple(duel(found.get(one, []), found.get(other, [])) for found in curves)
        for one in mine
        for other in others
    }
    return BenchResult(
        protocol, tuple(specs), mine, others, tuple(traces), analyses, duels, wanted, _versions(specs, traces)
    )


def _sweep(
    trace: StandardTrace,
    protocol: Protocol,
    built_in: Sequence[Codec],
    asked: Sequence[Codec],
    folder: Path,
    jobs: int | None,
) -> SweepResult:
    """Rows of all codecs on a trace. Those of built-in ones are kept; others may have changed since the last time."""
    kept = folder / f"{trace.path.stem}-{protocol.name}-{build().replace('+', '-')}.sweep.db"
    with tempfile.TemporaryDirectory(prefix=".running-", dir=folder) as name:
        path = Path(name) / kept.name

        def run(codecs: Sequence[Codec]) -> SweepResult:
            return run_sweep(
                trace.path, codecs, draws=protocol.draws, seed=protocol.seed, optimal=False, jobs=jobs, output=path
            )

        if kept.exists():
            shutil.copy(kept, path)
            with contextlib.suppress(TraceError, OutputExistsError):  # damaged: it is made again
                return run([*built_in, *asked])
            path.unlink(missing_ok=True)
        run(built_in)
        beside = Path(name) / "kept"
        shutil.copy(path, beside)
        for old in folder.glob(f"{trace.path.stem}-{protocol.name}-*.sweep.db"):  # of other versions
            old.unlink(missing_ok=True)
        os.replace(beside, kept)
        return run([*built_in, *asked])


def _versions(specs: Sequence[str], traces: Sequence[StandardTrace]) -> dict[str, str]:
    found = {**versions(), "source": build().partition("+")[2]}
    for spec in specs:
        parsed = parse_spec(spec)
        cls = codec_class(parsed.name)
        origin, file = origin_of(cls), plugin_of(cls)
        if origin is not None or file is not None:
            found[parsed.name] = origin.package if origin is not None else file.name  # type: ignore[union-attr]
    return found | {"gradients": traces[0].source}


class Duel(NamedTuple):
    """A codec against another on one trace."""

    #: relative variance over the other's at equal bits, the geometric mean over the bits that both reach; below 1 the
    #: first has less error. NaN if there are no such bits.
    error: float
    #: least and most of these bits per coordinate; the same where one of the two has a single configuration
    low: float
    high: float
    #: bits over the other's at equal error, the mean of its logarithm (Bjontegaard); NaN without two curves
    rate: float


def duel(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> Duel:
    """Compare two codecs, each given as (bits per coordinate, relative variance) of its configurations.

    Errors are log-interpolated between neighbours by measured bits, however far apart, never extrapolated, and averaged
    over the bits that both curves reach. A codec of one configuration is compared at its own bits.

    >>> round(duel([(2, 0.4), (4, 0.1)], [(2, 0.8), (4, 0.2)]).error, 9)
    0.5
    >>> [round(number, 9) for number in duel([(3, 0.1)], [(2, 0.4), (4, 0.1)])[:3]]
    [0.5, 3, 3]
    """
    first, second = ([(b, v) for b, v in points if v > 0 and math.isfinite(v * b)] for points in (one, other))
    if not first or not second:
        return Duel(math.nan, math.nan, math.nan, math.nan)
    if 1 in (len(first), len(second)):
        knots = [min(points[0][0] for points in (first, second) if len(points) == 1)]
    else:
        low, high = max(min(first)[0], min(second)[0]), min(max(first)[0], max(second)[0])
        knots = sorted({low, high, *(b for b, _ in (*first, *second) if low <= b <= high)}) if low < high else []
    logs = np.array([math.log(_at(first, bits) / _at(second, bits)) for bits in knots])
    if not knots or not np.isfinite(logs).all():
        return Duel(math.nan, math.nan, math.nan, math.nan)
    # Linear between knots, so the trapezoids are the integral.
    mean = float(logs[0]) if len(knots) == 1 else float(np.trapezoid(logs, knots)) / (knots[-1] - knots[0])
    curves = [envelope(*zip(*points, strict=True)) for points in (first, second)]
    return Duel(math.exp(mean), knots[0], knots[-1], 1 + bd_rate(curves[0], curves[1]).change)


def _at(points: Sequence[tuple[float, float]], bits: float) -> float:
    return at_bits([b for b, _ in points], [v for _, v in points], bits, math.inf).variance


@dataclass(frozen=True, slots=True)
class Model:
    """A built-in task that is trained for its gradients, and its name in tables."""

    name: str
    task: str
    batch_size: int


@dataclass(frozen=True)
class Protocol:
    """How codecs are compared. Whoever changes a number gives it another name."""

    name: str
    models: tuple[Model, ...]
    #: early and late -> the consecutive steps whose gradients are encoded. Levels are fitted on the step before, and
    #: codecs with memory are replayed over them.
    phases: Mapping[str, Sequence[int]]
    #: of weights, batches and encodings
    seed: int = 0
    #: encodings of each tensor at each step
    draws: int = 1
    #: parameter -> values that a codec is run with where its spec does not fix them
    ranges: Mapping[str, tuple[Any, ...]] = field(
        default_factory=lambda: {
            "bits": (2, 3, 4, 5, 6, 8),
            "ratio": (0.01, 0.03, 0.1, 0.3),
            "sparsity": (0.5, 0.8, 0.9, 0.95),
            "rank": (1, 2, 4, 8),
            "bin_size": (50, 500),
        }
    )
    #: codec -> its own ranges: those that fit by gradient descent, to the levels of the others
    slow: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(
        default_factory=lambda: {"alqg": {"bits": (2, 3, 4)}, "alqg-n": {"bits": (2, 3, 4)}}
    )
    #: measured bits per coordinate of the first table
    at: float = 3.0

    def built_in(self) -> list[Codec]:
        """Every configuration of every built-in codec; float32 itself is none to compare with."""
        names = [n for n in codec_names() if codec_class(n).__module__.startswith("gtrace.") and n != "none"]
        return [item for name in names for item in self.configurations(name)]

    def configurations(self, spec: str) -> list[Codec]:
        """What is run of a spec: each value of the ranges that it leaves open and that the codec takes."""
        parsed = parse_spec(spec)
        ranges = self.slow.get(parsed.name, self.ranges)
        known = {item.name for item in parameter_fields(codec_class(parsed.name))} - set(parsed.given)
        taken: dict[str, list[Any]] = {}
        for name in known & set(ranges):
            for value in ranges[name]:
                with contextlib.suppress(UsageError):  # beyond what this codec takes; the others are left
                    codec(spec, **{name: value})
                    taken.setdefault(name, []).append(value)
        return expand([spec], taken, asked={})


_MODELS = (Model("CNN", "digits-cnn", 16), Model("LSTM", "char-lstm", 8), Model("transformer", "char-transformer", 8))

FULL = Protocol("gtrace-bench-1", _MODELS, {"early": range(4, 8), "late": range(296, 300)})
#: a smoke test in seconds, whose numbers belong in no paper
QUICK = replace(
    FULL,
    name="gtrace-bench-1-quick",
    models=_MODELS[:1],
    phases={"early": range(4, 6), "late": range(48, 50)},
    ranges={"bits": (2, 3, 4, 6), "ratio": (0.01, 0.1, 0.3), "sparsity": (0.8, 0.95), "rank": (2, 8)},
)


#: what the gradients depend on beside the protocol
_SOURCES = ("training/plain.py", "training/tasks/*.py", "workflows/bench.py")


class StandardTrace(NamedTuple):
    """A trace of the protocol: model and phase, where it is kept, what its gradients come from, and its size.

    Equal fingerprints of gradients give equal results on any machine.
    """

    name: str
    path: Path
    source: str
    fingerprint: str
    tensors: int
    elements: int
    steps: int


@contextmanager
def cache_folder() -> Iterator[Path]:
    """``$XDG_CACHE_HOME/gtrace/bench``, or a folder for this run alone where nothing can be kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gtrace" / "bench"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.path.isdir(folder) and os.access(folder, os.W_OK):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="gtrace-bench-") as name:
        yield Path(name)


def standard_traces(protocol: Protocol, folder: Path, say: Callable[[str], None]) -> list[StandardTrace]:
    """The traces of a protocol, in the order of its models and phases; what is not in ``folder`` is made."""
    trained = util.find_spec("torch") is not None
    source = f"torch {metadata.version('torch')}" if trained else "formulas (no torch)"
    found = []
    for model in protocol.models:
        digest = _digest(protocol, model, source)
        paths = {phase: folder / f"{model.task}-{phase}-{digest}.zarr" for phase in protocol.phases}
        if not all(map(_whole, paths.values())):
            say(f"{model.name}: {'training for its' if trained else 'making'} gradients")
            _make(protocol, model, paths)
        for phase, path in paths.items():
            with open_trace(path) as trace:
                elements = sum(info.size for info in trace.tensors)
                steps = len(protocol.phases[phase])
                about = (path, source, trace.fingerprint, len(trace.tensors), elements, steps)
                found.append(StandardTrace(f"{model.name} {phase}", *about))
    return found


def _whole(path: Path) -> bool:
    """Whether a trace is kept there, every value as it was written."""
    try:
        return not check_trace(path).faults
    except TraceError:
        return False


def _make(protocol: Protocol, model: Model, paths: dict[str, Path]) -> None:
    """Beside their places, then moved in: an interrupted run leaves nothing, and two runs do not disturb each other."""
    folder = next(iter(paths.values())).parent
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as name:
        making = {phase: Path(name) / path.name for phase, path in paths.items()}
        if util.find_spec("torch") is not None:
            from gtrace.training.plain import record_task

            steps = {making[phase]: tuple(protocol.phases[phase]) for phase in paths}
            record_task(model.task, steps, batch_size=model.batch_size, seed=protocol.seed)
        else:
            for phase, path in making.items():
                late, size = phase == "late", model.batch_size
                make_trace(model.task, path, protocol.phases[phase], late=late, batch_size=size, seed=protocol.seed)
        for phase, path in paths.items():
            shutil.rmtree(path, ignore_errors=True)
            os.replace(making[phase], path)


def _digest(protocol: Protocol, model: Model, source: str) -> str:
    phases = {phase: list(steps) for phase, steps in protocol.phases.items()}
    digest = hashlib.blake2b(repr((model, phases, protocol.seed, source)).encode(), digest_size=6)
    home = Path(gtrace.__file__).parent
    for pattern in _SOURCES:
        for path in sorted(home.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


#: task -> tensor -> shape; of an embedding only the rows of a batch's words have gradients
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "digits-cnn": {
        "conv1.weight": (32, 9),
        "conv2.weight": (64, 288),
        "fc1.weight": (64, 1024),
        "fc2.weight": (10, 64),
    },
    "char-lstm": {
        "embedding.weight": (61, 32),
        "lstm.weight_ih": (512, 32),
        "lstm.weight_hh": (512, 128),
        "head.weight": (61, 128),
    },
    "char-transformer": {
        "embedding.weight": (61, 64),
        "attention.qkv": (192, 64),
        "attention.out": (64, 64),
        "up.weight": (256, 64),
        "down.weight": (64, 256),
        "head.weight": (61, 64),
    },
}


def make_trace(task: str, path: Path, steps: Sequence[int], *, late: bool, batch_size: int, seed: int) -> None:
    """Write a trace of made gradients, float32."""
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), late])
    spread = 2.0 if late else 0.5
    gains = {
        name: (rng.lognormal(-4, 1, (rows, 1)), rng.lognormal(0, 0.7, (1, columns)))
        for name, (rows, columns) in LAYERS[task].items()
    }
    with create_trace(path) as writer:
        for step in steps:
            for name, (rows, columns) in LAYERS[task].items():
                weight = rng.lognormal(0, spread, (batch_size, 1))
                errors = weight * rng.standard_t(4, (batch_size, rows))
                if name.startswith("embedding"):
                    errors *= rng.random((batch_size, rows)) < 1 / batch_size
                active = np.maximum(rng.normal(0.2, 1, (batch_size, columns)), 0)
                out, inside = gains[name]
                gradient: Floats = out * (errors.T @ active) * inside / weight.sum()
                writer.append(step, name, gradient.astype(np.float32))
            writer.commit(step)


def bench_tables(result: BenchResult) -> list[Table]:
    """Error at equal bits, a table for each number of bits; then each codec in question against all."""
    groups = {targets: [m for m in result.mine if result.targets[m] == targets] for targets in result.targets.values()}
    first = (_at_bits(result, targets, mine) for targets, mine in groups.items())
    return [*first, *(_against(result, label) for label in result.mine)]


def bench_lines(result: BenchResult) -> list[str]:
    """What was measured, by which protocol and versions, in sentences: the caption of a paper's table."""
    protocol = result.protocol
    phases = " and ".join(f"steps {min(s)} to {max(s)} ({phase})" for phase, s in protocol.phases.items())
    models = ", ".join(f"{m.name} ({m.task}, batches of {m.batch_size})" for m in protocol.models)
    listed = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    quick = ["A smoke test: one small network, few steps and configurations. These numbers belong in no paper."]
    return [
        *(quick if protocol.name.endswith("quick") else []),
        f"Protocol {protocol.name}: gradients of {models} at {phases} of training, seed {protocol.seed}; "
        f"{protocol.draws} encoding of each tensor and step, levels fitted on the steps before.",
        f"Versions: {listed}.",
        "Traces: " + "; ".join(f"{t.name} {t.fingerprint[:12]}, {t.elements:,} elements" for t in result.traces) + ".",
        "Equal traces give equal numbers on every machine; training on another processor or with another PyTorch makes "
        "traces that differ a little, so compare these fingerprints.",
    ]


def bench_json(result: BenchResult) -> dict[str, Any]:
    """Every number, NaN for missing."""
    return {
        "protocol": {
            **{name: getattr(result.protocol, name) for name in ("name", "seed", "draws")},
            "ranges": {name: list(values) for name, values in result.protocol.ranges.items()},
        },
        "versions": result.versions,
        "specs": list(result.specs),
        "traces": [{**t._asdict(), "path": str(t.path)} for t in result.traces],
        "codecs": [
            {
                "trace": trace.name,
                "codec": c.spec,
                "family": c.family,
                "mine": c.family in result.mine,
                **{name: getattr(c, name) for name in ("bits", "relative_variance", "error", "cosine")},
            }
            for trace, analysis in zip(result.traces, result.analyses, strict=True)
            for c in analysis.configurations
        ],
        "against": [
            {"codec": one, "other": other, "trace": trace.name, **duel._asdict()}
            for (one, other), duels in result.duels.items()
            for trace, duel in zip(result.traces, duels, strict=True)
        ],
    }


def _at_bits(result: BenchResult, targets: Sequence[float], mine: Sequence[str]) -> Table:
    """Rows: codecs with a number somewhere, the best on average first. Columns: traces."""
    values: dict[str, list[float]] = {}
    for label in (*mine, *result.others):
        found = []
        for analysis, target in zip(result.analyses, targets, strict=True):
            place = analysis.targets.index(target)
            at = [family.at[place].variance for family in analysis.families if family.label == label]
            found.append(at[0] if at else math.nan)
        if label in mine or np.isfinite(found).any():
            values[label] = found
    table = np.array(list(values.values()))
    lowest = np.nanmin(np.where(np.isfinite(table), table, np.inf), axis=0)
    # A codec that is missing on a trace must not gain by it: it is compared with the best where it is there.
    order = sorted(
        values, key=lambda label: _mean([v / low for v, low in zip(values[label], lowest, strict=True)], math.inf)
    )
    same = len(set(targets)) == 1
    where = f"{targets[0]:.3g} measured bits per coordinate" if same else f"the measured bits of {', '.join(mine)}"
    columns = [Column("codec", numeric=False)]
    for trace, target in zip(result.traces, targets, strict=True):
        columns.append(Column(trace.name if same else f"{trace.name} ({target:.2f})", f"at {target:.4g} bits"))
    rows = [
        (
            Cell(label, mark="best" if label in mine else ""),
            *(
                Cell(number(v), mark="missing" if math.isnan(v) else "best" if v == low else "")
                for v, low in zip(values[label], lowest, strict=True)
            ),
        )
        for label in order
    ]
    out = [label for label in result.others if label not in values]
    bits = {m: [c.bits for a in result.analyses for c in a.configurations if c.family == m] for m in mine}
    away = [
        f"{m} takes {number(min(bits[m]))} to {number(max(bits[m]))} bits: --at compares there."
        for m in mine
        if not np.isfinite(values[m]).any() and bits[m]
    ]
    notes = [
        "Error ||Q(g) - g||² / ||g||², log-interpolated between the configurations of a codec on both sides of these "
        f"bits, at most one nominal bit apart, never extrapolated; {MISSING}: there are none."
    ]
    windows = {analysis.basis.steps_in_words for analysis in result.analyses} - {""}
    if windows:
        notes.append(f"Q(g) - g and g are summed over {' or '.join(sorted(windows))} first: some codecs have memory.")
    notes += away
    if out:
        notes.append(f"Without a number at these bits: {', '.join(out)}.")
    return Table(f"Error at {where}", tuple(columns), tuple(rows), tuple(notes))


def _against(result: BenchResult, label: str) -> Table:
    """One codec in question against every other, wherever the two reach the same bits."""
    columns = (
        Column("against", numeric=False),
        Column("bits", "that both reach", numeric=False, rank=2),
        *(Column(trace.name, "error over the other's at equal bits", rank=1) for trace in result.traces),
        Column("all traces", "geometric mean over traces"),
        Column("bits saved", "for the same error: Bjontegaard difference of rates, mean over traces", rank=3),
    )
    found = {other: result.duels[label, other] for other in result.others}
    met = {other: duels for other, duels in found.items() if any(math.isfinite(d.error) for d in duels)}
    rows = []
    for other, duels in sorted(met.items(), key=lambda item: _mean([d.error for d in item[1]])):
        rate = _mean([d.rate for d in duels])
        rows.append(
            (
                Cell(other),
                Cell(_range(duels)),
                *(_ratio(d.error) for d in duels),
                _ratio(_mean([d.error for d in duels])),
                Cell(MISSING, mark="missing") if math.isnan(rate) else Cell(signed_percent(1 - rate)),
            )
        )
    never = [other for other in found if other not in met]
    notes = [
        f"Error of {label} over the other's at equal measured bits, geometric mean over all bits that both reach; "
        "below 1 it has less error. Codecs of one configuration are compared at its bits.",
        "Bits saved: at equal error (Bjontegaard); negative where it needs more.",
    ]
    if never:
        notes.append(f"No bits that both reach: {', '.join(never)}.")
    return Table(f"{label} against the built-in codecs", columns, tuple(rows), tuple(notes), "Nothing to compare with.")


def _ratio(value: float) -> Cell:
    return Cell(number(value), mark="missing" if math.isnan(value) else "best" if value < 1 else "")


def _range(duels: Sequence[Duel]) -> str:
    low = [d.low for d in duels if math.isfinite(d.low)]
    high = [d.high for d in duels if math.isfinite(d.high)]
    if max(high) - min(low) < 0.05:
        return f"{min(low):.1f}"
    return f"{min(low):.1f}{MISSING}{max(high):.1f}"


def _mean(values: Sequence[float], missing: float = math.nan) -> float:
    known = [math.log(v) for v in values if math.isfinite(v) and v > 0]
    return math.exp(sum(known) / len(known)) if known else missing
