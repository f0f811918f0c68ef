"""Run the protocol: the built-in codecs once, their rows kept; the codecs in question every time."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs import codec_class, parse_spec
from gtrace.codecs.plugins import origin_of, plugin_of
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.report.analysis.equal_bits import at_bits, bd_rate, envelope
from gtrace.report.analysis.sweep import analyze
from gtrace.sweep import run_sweep
from gtrace.sweep.cluster import build
from gtrace.sweep.run import versions
from gtrace.workflows.bench.protocol import cache_folder, standard_traces

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.codecs import Codec
    from gtrace.report.analysis.families import Family
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.sweep import SweepResult
    from gtrace.workflows.bench.protocol import Protocol, StandardTrace


@dataclass(frozen=True)
class BenchResult:
    """What the protocol measured.

    Attributes:
        protocol: that was run.
        specs: the codecs in question, as given.
        mine: their families, a label each.
        others: labels of the built-in families.
        traces: that were used.
        analyses: one per trace, in their order.
        duels: (mine, other) -> one duel per trace.
        targets: (mine) -> one number of bits per trace at which the first table compares.
        versions: of what the numbers depend on.
    """

    protocol: Protocol
    specs: tuple[str, ...]
    mine: tuple[str, ...]
    others: tuple[str, ...]
    traces: tuple[StandardTrace, ...]
    analyses: tuple[SweepAnalysis, ...]
    duels: dict[tuple[str, str], tuple[Duel, ...]]
    targets: dict[str, tuple[float, ...]]
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

    Args:
        specs: of the codecs in question; what a spec leaves open runs over the protocol's ranges.
        protocol: what is measured.
        at: measured bits per coordinate of the first table; the protocol's by default. A codec of one configuration
            is compared at its own bits.
        jobs: threads; numbers do not depend on them.
        say: called with a line before whatever takes long.

    Raises:
        UsageError: an unknown codec or parameter.
        ScriptError: a codec's own code failed.
    """
    if not specs:
        raise UsageError("bench: name a codec, e.g. gtrace study bench dither --plugin dither.py")
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
    mine = tuple(label for label in labels if own & {c for a in analyses for c in _specs(a, label)})
    others = tuple(label for label in labels if label not in mine)
    # Each trace again, with the bits of codecs that have no others to choose.
    single = {label: [_only_bits(analysis, label) for analysis in analyses] for label in mine}
    wanted = {label: tuple(bits or targets[0] for bits in single[label]) for label in mine}
    analyses = tuple(
        analyze(result, trace.name, sorted({targets[0], *(wanted[label][k] for label in mine)}))
        for k, (result, trace) in enumerate(zip(results, traces, strict=True))
    )
    curves = [{family.label: _points(analysis, family) for family in analysis.families} for analysis in analyses]
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


def _specs(analysis: SweepAnalysis, label: str) -> set[str]:
    return {c.spec for c in analysis.configurations if c.family == label}


def _points(analysis: SweepAnalysis, family: Family) -> list[tuple[float, float]]:
    members = [analysis.configurations[i] for i in family.members]
    return [(c.bits, c.error) for c in members]


def _only_bits(analysis: SweepAnalysis, label: str) -> float:
    """Measured bits of a family of one configuration, 0 for others."""
    members = [c for c in analysis.configurations if c.family == label]
    return members[0].bits if len(members) == 1 else 0.0


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
    """A codec against another on one trace.

    Attributes:
        error: relative variance over the other's at equal bits, the geometric mean over the bits that both reach; below
            1 the first has less error. NaN if there are no such bits.
        low: least of these bits per coordinate.
        high: most of them; ``low`` where one of the two has a single configuration.
        rate: bits over the other's at equal error, the mean of its logarithm (Bjontegaard); NaN without two curves.
    """

    error: float
    low: float
    high: float
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
    return Duel(math.exp(mean), knots[0], knots[-1], 1 + bd_rate(curves[0], curves[1])[0])


def _at(points: Sequence[tuple[float, float]], bits: float) -> float:
    return at_bits([b for b, _ in points], [v for _, v in points], bits, math.inf).variance
