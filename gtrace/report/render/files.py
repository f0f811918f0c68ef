"""Reports and figures as files: which kind, what may be overwritten, and moving them into place whole."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.errors import OutputExistsError, UsageError
from gtrace.planning.toml import SUFFIXES as PLAN_SUFFIXES
from gtrace.report import figures
from gtrace.report.inputs import RUN_SUFFIX, SWEEP_SUFFIX, Report, make_report
from gtrace.report.names import count, listed
from gtrace.report.render.html import to_html
from gtrace.report.render.latex import to_latex
from gtrace.report.render.markdown import to_markdown
from gtrace.report.render.records import csv_tables, csv_text, to_csv, to_json_lines, to_parquet
from gtrace.report.sections import draw, figure_names, figure_specs
from gtrace.trace.files import write_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.figure import Figure

    from gtrace.report.figures.svg import FigureKind
    from gtrace.sweep.store import SweepResult


PAGE = ".report.html"
#: what a page of a report has near its beginning, and how far from it
MARK, _HEAD = b'<meta name="generator" content="gtrace ', 1 << 12
FIGURE_KINDS: tuple[FigureKind, ...] = ("png", "svg", "pdf")
_FIGURE_SUFFIXES = (".pdf", ".png", ".svg")


def write_figure(report: Report, name: str, output: Path, *, force: bool = False) -> Path:
    """Draw one figure into a file whose suffix says the format: .pdf, .png or .svg.

    Raises:
        UsageError: no such figure, another suffix, or no such folder.
        OutputExistsError: the file exists and ``force`` is off.
    """
    return write_drawing(output, lambda: draw(report, name), force=force)


def write_drawing(output: Path, draw: Callable[[], Figure], *, force: bool = False) -> Path:
    """Draw any figure into a file, see :func:`write_figure`; ``draw`` is called once nothing stands in the way.

    Raises:
        UsageError: another suffix, or no such folder.
        OutputExistsError: the file exists and ``force`` is off.
    """
    if output.suffix.lower() not in _FIGURE_SUFFIXES:
        raise UsageError(f"{output}: a figure is written as {', '.join(_FIGURE_SUFFIXES)}")
    _need_folder(output)
    refuse([output], force=force)
    kind = next(kind for kind in FIGURE_KINDS if output.suffix.lower() == f".{kind}")
    put(output, figures.svg.render(draw(), kind))
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
        force: replace what stands there.

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
    ``runs.csv``, those that there are), and every figure as PNG, SVG and PDF. Nothing is written when anything would be
    overwritten that may not be, and every file appears whole or not at all.

    Returns:
        The files, the page or table first.

    Raises:
        OutputExistsError: a file exists and ``force`` is off.
        UsageError: unknown suffix, or no such folder.
    """
    kind = output_kind(output)
    _need_folder(output)
    if kind:
        refuse([output], force=force)
        put(output, _render(report, kind))
        return [output]
    specs = figure_specs(report)
    page = output / "report.html"
    drawings = [output / f"{name}.{suffix}" for name in specs for suffix in FIGURE_KINDS]
    texts = [page, *(page.with_suffix(kind) for kind in (".md", ".tex", ".jsonl"))]
    tables = {output / f"{name}.csv": rows for name, rows in csv_tables(report).items()}
    refuse([*texts, *tables, *drawings], force=force)

    # Rendering is what takes time and may be interrupted: the folder appears after it.
    contents = {path: _render(report, path.suffix) for path in texts}
    contents |= {path: csv_text(rows).encode() for path, rows in tables.items()}
    for name, spec in specs.items():
        figure = spec.draw()
        for suffix in FIGURE_KINDS:
            contents[output / f"{name}.{suffix}"] = figures.svg.render(figure, suffix)
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
        raise UsageError(
            f"{output}: a report is written as {', '.join(_RENDERERS)} or into a folder (a name without suffix)"
        )
    return output.suffix.lower()


def default_page(first: Path) -> Path:
    """Where the page on these results goes when nobody says: ``NAME.report.html`` in the current folder."""
    name = first.resolve().name
    for suffix in (SWEEP_SUFFIX, RUN_SUFFIX, ".zarr.zip", ".zarr", ".h5", ".hdf5", *PLAN_SUFFIXES):
        if name.endswith(suffix) and name != suffix:
            name = name.removesuffix(suffix)
            break
    return Path(name + PAGE)


#: suffix -> what makes the file
_RENDERERS: dict[str, Callable[[Report], str | bytes]] = {
    ".html": to_html,
    ".md": to_markdown,
    ".csv": to_csv,
    ".jsonl": to_json_lines,
    ".parquet": to_parquet,
    ".tex": to_latex,
}


def _render(report: Report, kind: str) -> bytes:
    made = _RENDERERS[kind](report)
    return made if isinstance(made, bytes) else made.encode()


def _need_folder(output: Path) -> None:
    if not output.parent.is_dir():
        raise UsageError(f"{output}: the folder {output.parent} does not exist; create it or choose another -o")


def refuse(paths: Sequence[Path], *, force: bool) -> None:
    """Raise :class:`OutputExistsError` for a folder, and for a file unless ``force`` is on."""
    for path in paths:
        if path.is_dir():
            raise OutputExistsError(f"{path}: is a folder and was left untouched; choose another -o")
        if path.exists() and not force:
            raise OutputExistsError(f"{path} already exists. Use --force to replace it or -o to write elsewhere.")


def check_page(path: Path, *, force: bool) -> None:
    """Refuse to replace what no earlier report wrote.

    Raises:
        OutputExistsError: a folder, or a file that is not a page of a report while ``force`` is off.
    """
    if path.is_file() and not force:
        with path.open("rb") as file:
            force = MARK in file.read(_HEAD)
    refuse([path], force=force)


def put(path: Path, data: bytes) -> None:
    """Write beside the place and move in, so that a reader never sees half a file."""
    try:
        write_beside(str(path), data)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another -o") from None
