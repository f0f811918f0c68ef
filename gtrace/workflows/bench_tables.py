"""The result of a bench as tables, lines and JSON."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.report.names import MISSING, number, signed_percent
from gtrace.report.section import Cell, Column, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.workflows.bench import BenchResult, Duel


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
            "name": result.protocol.name,
            "seed": result.protocol.seed,
            "draws": result.protocol.draws,
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
                "bits": c.bits,
                "relative_variance": c.relative_variance,
                "error": c.error,
                "cosine": c.cosine,
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
