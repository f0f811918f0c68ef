"""``gtrace report``: turn results into tables, plots and a page."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.options import print_json

if TYPE_CHECKING:
    from rich.console import Console

#: Columns of a pipe or a file, where nothing says how wide it is.
PIPE_WIDTH = 160


@click.command("report")
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="A .html page, a .md or .csv table, or a folder for the page and each figure as PNG and SVG.  "
    "[default: NAME.report.html here]",
)
@click.option("--force", is_flag=True, help="Overwrite a report that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; no page unless -o asks for it.")
def command(results: tuple[Path, ...], output: Path | None, *, force: bool, as_json: bool) -> None:
    """Say what RESULTS show: which codec makes the least error at equal measured bits, and where.

    RESULTS are sweeps (.sweep.db), run logs (.jsonl) and traces, each a section of the report. Without any,
    the newest sweep and the newest run log in this folder are taken.

    \b
    Examples:
      gtrace report digits_cnn.sweep.db
      gtrace report digits_cnn.sweep.db run.jsonl -o figures
    """
    run(list(results), output, force=force, as_json=as_json)


def run(results: list[Path], output: Path | None, *, force: bool, as_json: bool) -> None:
    """The command without its options' parsing.

    The page is written before anything is printed, because the reader of a pipe (``head``) may go away at any
    time. The tables are printed even when the page may not be written, so that nobody has to ask twice.
    """
    from gtrace.errors import GtraceError
    from gtrace.report.inputs import load_report, newest_results
    from gtrace.report.write import default_page, output_kind, write_report

    if output is not None:
        output_kind(output)
    if not results:
        results = newest_results(Path())
        taken = " and ".join(str(path) for path in results)
        click.echo(f"taking the newest results in this folder: {taken}", err=True)
    report = load_report(results)
    if not as_json:
        output = output or default_page(results[0])
    written: list[Path] = []
    refused: GtraceError | None = None
    if output is not None:
        try:
            written = write_report(report, output, force=force)
        except GtraceError as error:
            refused = error
    if as_json:
        from gtrace.report.export import to_json

        print_json(to_json(report))
    else:
        from gtrace.report.text import print_report

        print_report(report, _console())
    if refused is not None:
        sys.stdout.flush()
        raise refused
    if written:
        if not as_json:
            click.echo()
        if len(written) > 1:
            click.echo(f"{len(written) - 1} figures in {output}", err=as_json)
        click.echo(str(written[0]), err=as_json)


def _console() -> Console:
    """Standard output as rich sees it; where it is no terminal, wide enough for every column."""
    from rich.console import Console

    width = None if sys.stdout.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(width=width, highlight=False, emoji=False, markup=False)
