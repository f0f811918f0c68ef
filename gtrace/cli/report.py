"""``gtrace report``: turn results into tables, plots and a page."""

from __future__ import annotations

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.cluster import chosen_cluster, cluster_options
from gtrace.cli.completion import complete_figure
from gtrace.cli.options import print_json
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from gtrace.costs import Cluster
    from gtrace.report.analysis.cells import Coder

#: Columns of a pipe or a file, where nothing says how wide it is.
PIPE_WIDTH = 160


@click.command("report")
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=None,
    help="A .html page, tables as .md, .tex, .csv, .jsonl or .parquet, or a folder for the page and each figure.  "
    "[default: NAME.report.html here]",
)
@click.option(
    "--group",
    "groups",
    metavar="NAME=GLOB",
    multiple=True,
    help="Sum a sweep up by groups of tensors, too: NAME=GLOB[,GLOB], several times; or the word layer, or tensor.",
)
@click.option(
    "--figure",
    shell_complete=complete_figure,
    metavar="NAME",
    default=None,
    help="Draw one figure alone into -o FILE.pdf, .png or .svg.  [default: NAME.svg here]",
)
@click.option(
    "--pair",
    "pairs",
    nargs=2,
    multiple=True,
    metavar="SPEC SPEC",
    help="Compare two configurations of a sweep as they are, each at its own bits. May be repeated.",
)
@click.option(
    "--batch-size",
    "batch",
    type=click.FloatRange(min=0, min_open=True),
    default=math.nan,
    metavar="N",
    help="Samples of a step, over all workers: the batch that an equivalent one is stated for.  "
    "[default: the trace's, else 100]",
)
@click.option(
    "--coder",
    type=click.Choice(["fixed", "huffman", "entropy"]),
    default="huffman",
    show_default=True,
    help="How the symbols of every codec become bits: at fixed width, with Huffman codes, or at their entropy.",
)
@cluster_options
@click.option("--force", is_flag=True, help="Overwrite a report that is there.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables; no page unless -o asks for it.")
def command(
    results: tuple[Path, ...],
    output: Path | None,
    figure: str | None,
    pairs: tuple[tuple[str, str], ...],
    groups: tuple[str, ...],
    *,
    batch: float,
    coder: Coder,
    force: bool,
    as_json: bool,
    **machines: Any,
) -> None:
    """Say what RESULTS show: which codec has the least error at equal measured bits, where, and how sure that is.

    RESULTS are sweeps (.sweep.db), run logs (.jsonl), traces and plans, each a section of the report. Sweeps are
    compared with the first one, run logs of the same task are put together. Without any, the newest sweep and the
    newest run log in this folder are taken.

    Codecs are compared for --ranks N workers: averaging over them shrinks the variance of an error, but not its bias.
    [default: those of the run that was captured, else 1]  With --network and --step-time, too, the report says what
    each codec saves between so many machines.

    \b
    Examples:
      gtrace report digits_cnn.sweep.db
      gtrace report digits_cnn.sweep.db run.jsonl -o figures
      gtrace report digits_cnn.sweep.db --group 'conv=conv*' --group 'fc=fc*'
      gtrace report a.sweep.db b.sweep.db -o both.md
      gtrace report a.sweep.db --figure rate-distortion -o rate.pdf
      gtrace report a.sweep.db --pair alq:bits=3 zipml:bits=3
      gtrace report a.sweep.db --ranks 64 --coder entropy
      gtrace report a.sweep.db --ranks 8 --network 25Gbit/s --latency 20us --step-time 180ms
    """
    workers = machines["ranks"]
    if workers is not None and workers < 1:
        raise UsageError(f"--ranks: {workers} is not a valid number of workers; it must be at least 1")
    # Alone, --ranks is about errors; savings need the network, too.
    only = all(value is None for name, value in machines.items() if name != "ranks")
    cluster = None if only else chosen_cluster(machines)
    if figure is not None:
        if as_json or pairs or groups:
            raise UsageError("--figure draws one figure alone: leave out --json, --pair and --group")
        draw(list(results), figure, output, cluster, batch=batch, workers=workers, coder=coder, force=force)
    else:
        run(
            list(results),
            output,
            pairs,
            groups,
            cluster,
            batch=batch,
            workers=workers,
            coder=coder,
            force=force,
            as_json=as_json,
        )


def draw(
    results: list[Path],
    figure: str,
    output: Path | None,
    cluster: Cluster | None,
    *,
    batch: float,
    workers: int | None = None,
    coder: Coder = "huffman",
    force: bool,
) -> None:
    """One figure into a file, its path on standard output."""
    from gtrace.report.inputs import load_report
    from gtrace.report.render.files import write_figure

    report = load_report(_given(results), batch=batch, cluster=cluster, workers=workers, coder=coder)
    click.echo(str(write_figure(report, figure, output or Path(f"{figure}.svg"), force=force)))


def _given(results: list[Path]) -> list[Path]:
    """The results named, or the newest ones here, which is said."""
    from gtrace.report.inputs import newest_results

    if results:
        return results
    found = newest_results(Path())
    click.echo(f"taking the newest results in this folder: {' and '.join(map(str, found))}", err=True)
    return found


def run(
    results: list[Path],
    output: Path | None,
    pairs: tuple[tuple[str, str], ...] = (),
    groups: tuple[str, ...] = (),
    cluster: Cluster | None = None,
    *,
    batch: float = math.nan,
    workers: int | None = None,
    coder: Coder = "huffman",
    force: bool,
    as_json: bool,
) -> None:
    """The command without its options' parsing.

    The page is written before anything is printed, because the reader of a pipe (``head``) may go away at any
    time. The tables are printed even when the page may not be written, so that nobody has to ask twice.
    """
    from gtrace.errors import GtraceError
    from gtrace.report.inputs import load_report
    from gtrace.report.render.files import default_page, folder_in_words, output_kind, write_report

    if output is not None:
        output_kind(output)
    results = _given(results)
    report = load_report(
        results, pairs=pairs, groups=groups, batch=batch, cluster=cluster, workers=workers, coder=coder
    )
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
        from gtrace.report.render.records import to_json

        print_json(to_json(report))
    else:
        from gtrace.report.render.text import print_report

        print_report(report, wide_console())
    if refused is not None:
        sys.stdout.flush()
        raise refused
    if written:
        if not as_json:
            click.echo()
        if len(written) > 1:
            click.echo(folder_in_words(report), err=as_json)
        click.echo(str(written[0]), err=as_json)


def wide_console(*, err: bool = False) -> Console:
    """Standard output, or error, as rich sees it; where it is no terminal, wide enough for every column."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else PIPE_WIDTH
    return Console(width=width, highlight=False, emoji=False, markup=False, stderr=err)
