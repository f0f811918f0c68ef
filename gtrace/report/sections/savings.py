"""What codecs save between ranks, in words, as a table, as a figure and as records."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from gtrace.costs import BUCKET_MIB, FIRST_BUCKET_MIB, WORTHWHILE
from gtrace.report.analysis.families import PREFERRED_BITS
from gtrace.report.analysis.savings import EXCHANGES, HOW, PAYLOADS, Saving, Savings
from gtrace.report.names import MISSING, count, duration, number, pick, size
from gtrace.report.section import NOTHING, Cell, Chart, Curve, Numbers, Panel, Section, Shows, Table, column, words
from gtrace.report.sections.charts import charted, thinned
from gtrace.units import rate_text

if TYPE_CHECKING:
    from collections.abc import Sequence


#: A step that is shorter than another by a smaller part than this is called no faster.
_FASTER = 1 + WORTHWHILE


def savings_verdict(savings: Savings) -> list[str]:
    """What communication costs, what a codec of about three bits saves of it, and which codecs save nothing."""
    cluster = savings.cluster
    float32, bfloat16 = (row.step for row in savings.plain)
    latency = f" and {duration(cluster.network.latency)} a message" if cluster.network.latency else ""
    said = [
        f"On {cluster.ranks} ranks at {rate_text(cluster.network.bandwidth)}{latency}, communication adds "
        f"{duration(float32.exposed)} (float32) or {duration(bfloat16.exposed)} (bf16) to a "
        f"{duration(cluster.computing)} step."
    ]
    if not any(row.over_bfloat16[0] >= _FASTER for row in savings.rows):
        return [*said, f"No codec saves even {WORTHWHILE:.0%} of a step over bf16: there is nothing to gain here."]
    # What was measured says more than what is usually the faster exchange.
    fit = [row for row in savings.rows if row.pareto and row.coding == "measured"]
    fit = fit or [row for row in savings.rows if row.pareto and row.exchange == "two-shot"]
    for row in sorted(fit, key=lambda row: abs(row.bits - PREFERRED_BITS))[:1]:
        coding = f" and codes for {duration(row.step.codec)}" if row.coding else ""
        said.append(
            f"{row.spec} ({number(row.bits)} bits), {HOW[row.exchange]}, adds {duration(row.step.exposed)}{coding}: "
            f"{_times(row.over_float32)} as fast as float32 and {_times(row.over_bfloat16)} as bf16, depending on "
            "overlap."
        )
        if math.isfinite(row.rate_bfloat16) and not row.coding:
            said.append(f"It must encode and decode {_rate(row.rate_bfloat16)} to match bf16.")
    for exchange in PAYLOADS:
        rows = [row for row in savings.rows if row.exchange == exchange]
        idle = [row for row in rows if row.over_bfloat16[0] < _FASTER]
        if idle:
            free = "" if all(row.coding for row in idle) else " even if encoding is free"
            said.append(
                f"With {EXCHANGES[exchange]}, {len(idle)} of {count(len(rows), 'codec')} save less than "
                f"{WORTHWHILE:.0%} over bf16{free}."
            )
    return said


def savings_table(savings: Savings, most: int | None = None) -> Table:
    """Two lines for each codec, of ``most`` of Pareto-optimal ones alone, behind the two that need none."""
    shown: Sequence[Saving] = savings.rows
    if most is not None and len(shown) > most:
        shown = [row for row in shown if row.pareto]
    waits = "how long a step waits for the exchange after the backward pass"
    over = "a step with {} gradients over this one; below: no overlap, ideal overlap"
    columns: list[Shows[Saving]] = [
        words("codec", lambda row: row.spec, "none: gradients as they are"),
        words("exchange", lambda row: EXCHANGES[row.exchange], "how it travels"),
        column("bits", lambda row: number(row.bits), "per value, payload and shared bytes; mean over the elements", 3),
        column("sent per rank", lambda row: size(8 * row.sent_bytes), "bytes in a step", 2),
        column("exposed", lambda row: duration(row.step.exposed), waits, 1),
        column("step", lambda row: duration(row.step.seconds), "computing, waiting and coding", 4),
        column("over float32", lambda row: _ratio(row.over_float32), over.format("float32")),
        column("over bf16", lambda row: _ratio(row.over_bfloat16), over.format("bf16")),
        column("break-even coding", _rate_cell, "values per second encoded and decoded to match bf16; below: float32"),
        column("pays below", _bandwidth, f"network from which on it is not {WORTHWHILE:.0%} faster than bf16", 5),
    ]
    if any(row.coding for row in savings.rows):
        hint = "seconds of encoding and decoding in a step"
        columns.insert(5, column("coding", lambda row: duration(row.step.codec) if row.coding else NOTHING, hint, 1))
    cluster = savings.cluster
    first = "" if cluster.bucket_mb else f", first {FIRST_BUCKET_MIB:g}"
    limit = f"of {cluster.bucket_mb or BUCKET_MIB:g} MiB{first}"
    assumed = ", two thirds of the step," if cluster.backward_time is None else ""
    coding = "No coding time is counted: none was measured"
    if any(row.coding == "measured" for row in savings.rows):
        coding = "Coding: CPU time of a rank as measured in this run"
    elif cluster.codec_rate is not None:
        coding = f"Coding: at {rate_text(cluster.codec_rate, 'values/s')}, as given"
    notes = [
        (
            f"Computed, not measured: {savings.elements:,} gradients in {count(savings.buckets, 'bucket')} ({limit}), "
            f"the last layers' first, sent while a backward pass of {duration(cluster.backward)}{assumed} makes the "
            "others."
        ),
        (
            "Over float32, over bf16: how many times as long a step with these gradients in a ring all-reduce takes. "
            "Below: the same if nothing overlapped, and if exchanges filled the whole backward pass, for both steps."
        ),
        f"{coding}. Break-even coding: values per second you must encode and decode to match bf16; below it float32.",
    ]
    if len(shown) < len(savings.rows):
        left = len({row.spec for row in savings.rows}) - len({row.spec for row in shown})
        notes.append(f"{count(left, 'codec')} with more bits or error than others are left out; -o FILE has them all.")
    rows = (*savings.plain, *shown)
    return Table.of("What codecs save", rows, columns, notes=(*notes, *savings.notes), folded=True)


def _rate_cell(row: Saving) -> Cell:
    rate = Cell(_rate(row.rate_bfloat16), _rate(row.rate_float32))
    if not math.isfinite(row.rate_bfloat16):
        rate = Cell(MISSING, rate.detail.strip(MISSING), "missing", "no codec is fast enough")
    return rate


def _bandwidth(row: Saving) -> Cell:
    known = {0: "nowhere", math.inf: "any speed"}.get(row.bandwidth)
    return NOTHING if math.isnan(row.bandwidth) else Cell(known or rate_text(row.bandwidth, digits=3))


def _ratio(times: tuple[float, float, float]) -> Cell:
    best, serial, ideal = times
    return Cell(f"{number(best)}x", f"{number(serial)}, {number(ideal)}", "" if best >= _FASTER else "quiet")


def _times(times: tuple[float, float, float]) -> str:
    low, high = number(min(times)), number(max(times))
    return f"{number(times[0])} times" + (f" ({low} to {high})" if low != high else "")


def _rate(rate: float) -> str:
    return rate_text(rate, "values/s", 3) if math.isfinite(rate) else MISSING


def savings_records(savings: Savings) -> list[dict[str, Any]]:
    """One record for each line of the table, at full precision: seconds, bytes, elements and bits per second."""
    return [
        {
            **pick(row, "spec", "exchange", "bits", "relative_variance", "sent_bytes"),
            "communication_seconds": row.step.communication,
            "exposed_seconds": row.step.exposed,
            "codec_seconds": row.step.codec if row.coding else math.nan,
            "coding": row.coding,
            "step_seconds": row.step.seconds,
            "step_seconds_no_overlap": row.step.serial,
            "step_seconds_ideal_overlap": row.step.ideal,
            **{
                f"over_{name}{suffix}": value
                for name, times in (("float32", row.over_float32), ("bfloat16", row.over_bfloat16))
                for suffix, value in zip(("", "_no_overlap", "_ideal_overlap"), times, strict=True)
            },
            "break_even_rate_float32": row.rate_float32,
            "break_even_rate_bfloat16": row.rate_bfloat16,
            "break_even_bandwidth": row.bandwidth,
        }
        for row in (*savings.plain, *savings.rows)
    ]


def _chart(savings: Savings) -> Chart:
    """Error against the time of a step, by all-gather and in two shots."""
    methods = {row.family: row.method for row in savings.rows}
    times = {"computing alone": savings.cluster.computing, "bf16": savings.plain[1].step.seconds}
    times["float32"] = savings.plain[0].step.seconds
    marks = tuple((name, 1e3 * seconds) for name, seconds in times.items())
    panels = []
    for exchange in PAYLOADS:
        curves: list[Curve] = []
        for family, method in methods.items():
            rows = [row for row in savings.rows if (row.exchange, row.family) == (exchange, family)]
            points = sorted(
                (1e3 * row.step.seconds, row.relative_variance) for row in rows if row.relative_variance > 0
            )
            curves += thinned(family, [x for x, _ in points], [y for _, y in points], method=method)
        labels = (HOW[exchange], "ms of a step", "relative variance")
        panels.append(Panel(tuple(curves), *labels, log_y=True, marks=marks))
    caption = (
        "Lower and further left is better: each point is one codec, its steps timed by the model of the table. Dotted: "
        "the step without any exchange, and those with plain all-reduces; a codec right of bf16 makes steps longer."
    )
    return Chart(tuple(panels), caption)


def savings_section(savings: Savings, most: int | None = None) -> Section:
    """What codecs save between ranks; ``most`` as of :func:`savings_table`."""
    chart = _chart(savings)
    figure = charted("savings", "Error against the time of a step", chart.caption, chart, folded=True)
    return Section(
        kind=f"Savings between {savings.cluster.ranks} ranks:",
        name=savings.name,
        sentences=tuple(savings_verdict(savings)),
        blocks=(savings_table(savings, most), *([figure] if any(panel.curves for panel in chart.panels) else [])),
        place="network",
        together=True,
        numbers=partial(_numbers, savings),
    )


def savings_json(savings: Savings) -> dict[str, Any]:
    """Every number at full precision."""
    about = {"name": savings.name, "cluster": asdict(savings.cluster), **pick(savings, "elements", "buckets")}
    rows = {"verdict": savings_verdict(savings), "rows": savings_records(savings)}
    return {**about, **rows, "notes": list(savings.notes)}


def _numbers(savings: Savings) -> Numbers:
    rows = [{"results": savings.name, **row} for row in savings_records(savings)]
    records = [{"record": "saving", **row} for row in rows]
    return Numbers({"savings": savings_json(savings)}, records, {"savings": rows})
