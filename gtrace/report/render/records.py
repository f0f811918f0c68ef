"""The numbers of a report for other programs: JSON, CSV, JSON lines, Parquet, and trackers of experiments."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError
from gtrace.metrics import relative
from gtrace.report.analysis.cells import read_cells
from gtrace.report.inputs import kind_of
from gtrace.report.sections import SECTIONS, answer, sections
from gtrace.runlog import read_runlog
from gtrace.sweep import ResultStore
from gtrace.trace import open_trace
from gtrace.trace.numbers import numbers_of_trace
from gtrace.trackers import Tracking, of_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from gtrace.report.analysis.cells import CellTable
    from gtrace.report.inputs import Report
    from gtrace.report.section import Record


def table_records(report: Report) -> list[Record]:
    """One record per configuration of every sweep, or per run of every run log, all with the same fields.

    With groups of tensors there is one per group and configuration.

    Raises:
        UsageError: sweeps and run logs together, or neither: their columns have nothing in common.
    """
    if bool(report.sweeps) == bool(report.runs) or report.traces or report.plans:
        raise UsageError(
            "-o .csv and .parquet hold one kind of table: pass sweeps alone or run logs alone, no traces or plans; "
            ".jsonl holds everything"
        )
    tables = csv_tables(report)
    return tables.get("groups") or tables.get("configurations") or tables.get("runs") or []


def csv_tables(report: Report) -> dict[str, list[Record]]:
    """The tables that have rows, by name: ``configurations`` and ``groups`` of sweeps, ``runs``, and ``savings``."""
    found: dict[str, list[Record]] = {}
    for section in sections(report):
        for name, rows in section.numbers().rows.items():
            found.setdefault(name, []).extend(rows)
    return {name: rows for name, rows in found.items() if rows}


def to_csv(report: Report) -> str:
    """:func:`table_records` as CSV at full precision, empty for what is not known.

    Raises:
        UsageError: sweeps and run logs together, or neither.
    """
    return csv_text(table_records(report))


def csv_text(rows: list[Record]) -> str:
    """Rows as CSV at full precision, empty for what is not known.

    A text that a spreadsheet would run as a formula has a ' before it.
    """
    buffer = io.StringIO()
    if rows:
        writer = csv.DictWriter(buffer, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def _cell(value: Any) -> Any:
    if isinstance(value, str) and len(value) > 1 and value[0] in "=@+-\t\r":
        return f"'{value}"
    return "" if value != value else value


def to_json_lines(report: Report) -> str:
    """One JSON object a line; ``record`` says what it is and ``results`` where it is from. Missing numbers are null.

    Records: ``verdict``, ``configuration``, ``equal_bits``, ``comparison``, ``bd_rate``, ``phase``, ``layer``,
    ``layer_choice``, ``group``, ``pair``, ``side_by_side``, ``run``, ``seeds``, ``pooled_seeds``, ``saving``,
    ``tensor``.
    """
    return "".join(json.dumps(plain(record), ensure_ascii=False) + "\n" for record in all_records(report))


def to_parquet(report: Report) -> bytes:
    """:func:`table_records` as a Parquet file.

    Raises:
        UsageError: sweeps and run logs together, or neither; neither pyarrow nor pandas is there.
    """
    rows = table_records(report)
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    buffer = io.BytesIO()
    try:
        _write_parquet(columns, buffer)
    except ImportError:
        raise UsageError(
            "-o .parquet needs pyarrow, which is not installed: pip install pyarrow, or take -o .csv or .jsonl"
        ) from None
    return buffer.getvalue()


def _write_parquet(columns: dict[str, list[Any]], buffer: io.BytesIO) -> None:
    """With pyarrow, or with pandas and whatever engine it finds; ImportError where there is neither."""
    try:
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import parquet
    except ImportError:
        import pandas as pd

        pd.DataFrame(columns).to_parquet(buffer)
        return
    parquet.write_table(pyarrow.table(columns), buffer)


def all_records(report: Report) -> Iterator[Record]:
    """Everything that a report says, the verdicts first."""
    found = list(sections(report))
    for section in (one for whole in found for one in whole.with_parts):
        verdict = {} if section.verdict is None else dataclasses.asdict(section.verdict)
        yield {"record": "verdict", "results": section.name, **verdict, "sentences": list(section.sentences)}
    for section in found:
        for record in section.numbers().records:
            yield {"record": record["record"], "results": section.name, **record}


def to_json(report: Report) -> dict[str, Any]:
    """Every number of the report at full precision, in dictionaries, lists and arrays; NaN for missing.

    ``verdict`` is that of the first sweep; those of others are with their results.
    """
    verdict = answer(report)
    found: dict[str, Any] = {"title": report.title, "verdict": None if verdict is None else dataclasses.asdict(verdict)}
    found |= {name: [] for name in (*SECTIONS, "groups", "pairs")}
    for section in sections(report):
        for name, entry in section.numbers().json.items():
            found[name].append(entry)
    return found


def plain(value: Any) -> Any:
    """``value`` in types that JSON has; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def send_results(paths: Sequence[Path], to: str) -> dict[Path, int]:
    """Send every step of traces, sweeps and run logs to a tracker.

    Args:
        paths: the results.
        to: the tracker, e.g. ``tensorboard:runs``.

    Returns:
        path -> number of sets of numbers that were sent: one per step, and in sweeps and run logs per codec.

    Raises:
        UsageError: a plan, which has no steps; or the tracker takes no numbers.
        TraceError: a result that cannot be read.
    """
    kinds = {path: kind_of(path) for path in paths}
    for path, kind in kinds.items():
        if kind == "plan":
            raise UsageError(f"{path}: a plan has no steps to send; name a trace, a sweep or a run log")
    tracking = Tracking(to)
    sent = {path: tracking.log(_steps_of(path, kind)) for path, kind in kinds.items()}
    tracking.close()
    return sent


def _steps_of(path: Path, kind: str) -> Iterable[tuple[dict[str, float], int]]:
    if kind == "run":
        return (found for record in read_runlog(path) for found in of_record(record))
    return _of_trace(path) if kind == "trace" else _of_sweep(read_cells(ResultStore.load(path).selected))


def _of_trace(path: Path) -> Iterator[tuple[dict[str, float], int]]:
    with open_trace(path) as trace:
        yield from numbers_of_trace(trace)


def _of_sweep(cells: CellTable) -> Iterator[tuple[dict[str, float], int]]:
    """The whole model's numbers by codec and step, summed over its tensors."""
    for number, step in enumerate(cells.steps.tolist()):
        for codec, spec in enumerate(cells.specs):
            used = np.flatnonzero(cells.measured[codec] & (cells.step == number))
            if not used.size:
                continue
            error, bits, noise = cells.squared_error[codec, used], cells.bits[codec, used], cells.noise[used]
            sums = {
                "error": (error, cells.energy[codec, used]),
                "bits_per_value": (bits * cells.n[codec, used], cells.n[codec, used]),
                "noise_ratio": (cells.noise_ratio[codec, used] * noise, noise),
            }
            yield (
                {f"gtrace/sweep/{spec}/{name}": float(relative(*map(np.sum, pair))) for name, pair in sums.items()},
                step,
            )
