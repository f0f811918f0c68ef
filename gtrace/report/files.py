"""Reports, figures and numbers as files: which kind, what may be overwritten, and what other programs read.

Records are JSON, JSON lines, CSV and Parquet; trackers of experiments get the same numbers."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import UsageError, check_output, keep_existing, need_folder, writing
from gtrace.metrics import relative
from gtrace.planning.toml import SUFFIXES as PLAN_SUFFIXES
from gtrace.report import figures
from gtrace.report.analysis.cells import CellTable, read_cells
from gtrace.report.html import to_html
from gtrace.report.inputs import RUN_SUFFIX, SWEEP_SUFFIX, Report, kind_of, make_report
from gtrace.report.names import count, listed, plain
from gtrace.report.sections import SECTIONS, answer, figure_names, figure_specs, sections
from gtrace.report.text import to_latex, to_markdown
from gtrace.runlog import read_runlog
from gtrace.sweep import ResultStore
from gtrace.trace import open_trace
from gtrace.trace.files import write_beside
from gtrace.trace.numbers import numbers_of_trace
from gtrace.trackers import Tracking, of_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from matplotlib.figure import Figure

    from gtrace.report.figures.style import FigureKind
    from gtrace.report.section import Record
    from gtrace.sweep.store import SweepResult


PAGE = ".report.html"
#: what a page of a report has near its beginning, and how far from it
MARK, _HEAD = b'<meta name="generator" content="gtrace ', 1 << 12
FIGURE_KINDS: tuple[FigureKind, ...] = ("png", "svg", "pdf")


def write_drawing(output: Path, draw: Callable[[], Figure], *, force: bool) -> Path:
    """Draw a figure into a file whose suffix says the format: .pdf, .png or .svg.

    ``draw`` is called once it is known that the file can be written.

    Raises:
        UsageError: another suffix, or no such folder.
        OutputExistsError: the file exists and ``force`` is off.
    """
    kind = next((kind for kind in FIGURE_KINDS if output.suffix.lower() == f".{kind}"), None)
    if kind is None:
        raise UsageError(f"{output}: a figure is written as .pdf, .png, .svg")
    check_output(output, force=force)
    put(output, figures.style.render(draw(), kind))
    return output


def write_html(
    path: Path | str,
    sweeps: Sequence[Path | str | SweepResult] = (),
    runs: Sequence[Path | str | Sequence[dict[str, Any]]] = (),
    *,
    traces: Sequence[Path | str] = (),
    title: str | None = None,
    force: bool = False,
) -> Path:
    """Write one self-contained page on sweeps and training runs.

    Args:
        path: where to; its folder must exist.
        sweeps: result stores, or sweeps in memory.
        runs: run logs, or their records.
        traces: traces to list the contents of.
        title: heading of the page.
        force: replace what is there.

    Returns:
        ``path``.

    Raises:
        TraceError: an input is missing, foreign, damaged or from a newer version.
        OutputExistsError: ``path`` exists and ``force`` is off.
        UsageError: there is no such folder.
    """
    return write_report(make_report(sweeps, runs, traces, title), Path(path), force=force)[0]


def write_report(report: Report, output: Path, *, force: bool = False) -> list[Path]:
    """Write a report as the suffix of ``output`` says: a page, tables of any kind, or a folder with everything.

    A folder gets the page, the tables as Markdown, LaTeX, JSON lines and CSV (``configurations.csv``, ``groups.csv``,
    ``runs.csv``, ``savings.csv``, those that there are), and every figure as PNG, SVG and PDF. Nothing is written when
    anything would be overwritten that may not be, and every file appears whole or not at all.

    Returns:
        The files, the page or table first.

    Raises:
        OutputExistsError: a file exists and ``force`` is off.
        UsageError: unknown suffix, or no such folder.
    """
    kind = output_kind(output)
    if kind:
        check_output(output, force=force)
        put(output, _render(report, kind))
        return [output]
    need_folder(output)
    specs = figure_specs(report)
    page = output / "report.html"
    drawings = [output / f"{name}.{suffix}" for name in specs for suffix in FIGURE_KINDS]
    texts = [page, *(page.with_suffix(kind) for kind in (".md", ".tex", ".jsonl"))]
    tables = {output / f"{name}.csv": rows for name, rows in csv_tables(report).items()}
    keep_existing(*texts, *tables, *drawings, force=force)

    # Rendering is what takes time and may be interrupted: the folder appears after it.
    contents = {path: _render(report, path.suffix) for path in texts}
    contents |= {path: csv_text(rows).encode() for path, rows in tables.items()}
    for name, spec in specs.items():
        figure = spec.draw()
        for suffix in FIGURE_KINDS:
            contents[output / f"{name}.{suffix}"] = figures.style.render(figure, suffix)
    with writing(output):
        output.mkdir(exist_ok=True)
    for path, data in contents.items():
        put(path, data)
    return [*contents]


def folder_in_words(report: Report) -> str:
    """What a folder holds: ``5 figures, each as PNG, SVG and PDF``."""
    kinds = listed([kind.upper() for kind in FIGURE_KINDS])
    tables = "tables as Markdown, LaTeX, CSV and JSON lines"
    return f"{count(len(figure_names(report)), 'figure')}, each as {kinds}; {tables}"


def output_kind(output: Path) -> str:
    """``.html``, ``.md``, ``.csv``, or an empty string for a folder.

    Raises:
        UsageError: another suffix.
    """
    if output.is_dir() or not (output.suffix or output.exists()):
        return ""
    if output.suffix.lower() not in _RENDERERS:
        kinds = f"{', '.join(_RENDERERS)} or into a folder (a name without suffix)"
        raise UsageError(f"{output}: a report is written as {kinds}")
    return output.suffix.lower()


def default_page(first: Path) -> Path:
    """Where the page on these results goes when nobody says: ``NAME.report.html`` in the current folder."""
    name = first.resolve().name
    known = (SWEEP_SUFFIX, RUN_SUFFIX, ".zarr.zip", ".zarr", ".h5", ".hdf5", *PLAN_SUFFIXES)
    suffix = next((suffix for suffix in known if name.endswith(suffix) and name != suffix), "")
    return Path(name.removesuffix(suffix) + PAGE)


def _render(report: Report, kind: str) -> bytes:
    made = _RENDERERS[kind](report)
    return made if isinstance(made, bytes) else made.encode()


def check_page(path: Path, *, force: bool) -> None:
    """Refuse to replace what no earlier report wrote.

    Raises:
        OutputExistsError: a folder, or a file that is not a page of a report while ``force`` is off.
    """
    if path.is_file() and not force:
        with path.open("rb") as file:
            force = MARK in file.read(_HEAD)
    keep_existing(path, force=force)


def put(path: Path, data: bytes) -> None:
    """Write beside the place and move in, so that a reader never sees half a file."""
    with writing(path):
        write_beside(str(path), data)


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
    ``layer_choice``, ``rotation``, ``group``, ``pair``, ``side_by_side``, ``run``, ``seeds``, ``pooled_seeds``,
    ``saving``, ``tensor``, ``plan``, ``planned``.
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
        remedy = "pip install pyarrow, or take -o .csv or .jsonl"
        raise UsageError(f"-o .parquet needs pyarrow, which is not installed: {remedy}") from None
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


def send_results(paths: Sequence[Path], to: str) -> dict[Path, int]:
    """Send every step of traces, sweeps and run logs to a tracker, e.g. ``tensorboard:runs``.

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


def _steps_of(path: Path, kind: str) -> Iterator[tuple[dict[str, float], int]]:
    if kind == "run":
        for record in read_runlog(path):
            yield from of_record(record)
    elif kind == "trace":
        with open_trace(path) as trace:
            yield from numbers_of_trace(trace)
    else:
        yield from _of_sweep(read_cells(ResultStore.load(path).selected))


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
                "noise_ratio": (cells.columns["noise_ratio"][codec, used] * noise, noise),
            }
            yield (
                {f"gtrace/sweep/{spec}/{name}": float(relative(*map(np.sum, pair))) for name, pair in sums.items()},
                step,
            )


#: suffix -> what makes the file
_RENDERERS: dict[str, Callable[[Report], str | bytes]] = {
    ".html": to_html,
    ".md": to_markdown,
    ".csv": to_csv,
    ".jsonl": to_json_lines,
    ".parquet": to_parquet,
    ".tex": to_latex,
}
