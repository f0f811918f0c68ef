"""``gtrace report``: turn results into tables, plots and a page."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

import gtrace.report
from gtrace.cli.console import echo, wide_console
from gtrace.cli.groups import complete_figure
from gtrace.cli.options import ClusterSettings, Command, HorizonSettings, arguments, options, print_json
from gtrace.errors import UsageError, keep_inputs
from gtrace.report.names import count
from gtrace.settings import nested, option
from gtrace.trackers import check_tracker

if TYPE_CHECKING:
    from gtrace.costs import Cluster
    from gtrace.report.analysis.cells import Coder
    from gtrace.report.inputs import Report


@dataclass(frozen=True)
class _ReportSettings:
    output: Path | None = option(
        None,
        help="A .html page, tables as .md, .tex, .csv, .jsonl or .parquet, or a folder for the page and each figure.  "
        "[default: NAME.report.html here]",
    )
    groups: tuple[str, ...] = option(
        (),
        call=("report",),
        metavar="NAME=GLOB",
        help="Sum a sweep up by groups of tensors, too: NAME=GLOB[,GLOB], several times; or the word layer, or tensor.",
    )
    figure: str | None = option(
        None,
        shell_complete=complete_figure,
        metavar="NAME",
        help="Draw one figure alone into -o FILE.pdf, .png or .svg.  [default: NAME.svg here]",
    )
    pairs: tuple[tuple[str, str], ...] = option(
        (),
        advanced=True,
        call=("report",),
        names=("--pair",),
        type=str,
        nargs=2,
        multiple=True,
        metavar="SPEC SPEC",
        help="Compare two configurations of a sweep as they are, each at its own bits. May be repeated.",
    )
    coder: Coder = option(
        "huffman",
        advanced=True,
        call=("report",),
        choices=("fixed", "huffman", "entropy"),
        help="How the symbols of every codec become bits: at fixed width, with Huffman codes, or at their entropy.",
    )
    ranks: int | None = option(
        None,
        advanced=True,
        minimum=1,
        metavar="N",
        help="Compare codecs for the average of N workers' gradients, if there is no --cluster.",
    )
    to: str | None = option(
        None,
        metavar="TRACKER",
        help="Send the numbers of every step to a tracker instead: tensorboard[:FOLDER], wandb[:PROJECT], "
        "mlflow[:EXPERIMENT] or trackio[:PROJECT].",
    )
    cluster: ClusterSettings = nested(ClusterSettings)
    noise: HorizonSettings = nested(HorizonSettings)
    full: bool = option(False, help="Print every table and note, not only the answer; --group and --pair do, too.")
    force: bool = option(False, help="Replace a file that no earlier report wrote.")
    as_json: bool = option(False, help="Print JSON instead of tables; no page unless -o asks for it.")


@click.command("report", cls=Command)
@click.argument("results", nargs=-1, type=click.Path(path_type=Path))
@options(_ReportSettings)
def command(settings: _ReportSettings, results: tuple[Path, ...]) -> None:
    """Say what RESULTS show: which codec has the least error at equal measured bits, where, and how sure that is.

    RESULTS are sweeps (.sweep.db), run logs (.jsonl), traces and plans, each a section of the report. Sweeps are
    compared with the first one, run logs of the same task are put together. Without any, the newest sweep and the
    newest run log in this folder are taken.

    Codecs are compared for the ranks of --cluster, else for those of the run that was captured: averaging over them
    shrinks the variance of an error, but not its bias. If the cluster has a compute time, the report says what each
    codec saves there. What a codec's noise costs is predicted for the steps of --horizon.

    \b
    Examples:
      gtrace report digits_cnn.sweep.db
      gtrace report digits_cnn.sweep.db run.jsonl -o figures
      gtrace report digits_cnn.sweep.db --group 'conv=conv*' --group 'fc=fc*'
      gtrace report a.sweep.db b.sweep.db -o both.md
      gtrace report a.sweep.db --figure rate-distortion -o rate.pdf
      gtrace report a.sweep.db --pair alq:bits=3 zipml:bits=3
      gtrace report a.sweep.db --horizon 20000
      gtrace report run.zarr a.sweep.db run.jsonl --to tensorboard:runs
      gtrace report a.sweep.db --ranks 64 --coder entropy
      gtrace report a.sweep.db --cluster 8x25Gbit/s,180ms,latency=20us
    """
    if settings.to is not None:
        check_tracker(settings.to)
        if settings != _ReportSettings(to=settings.to):
            raise UsageError("--to sends numbers instead of writing a report: leave out all other options")
        from gtrace.report.files import send_results

        for path, sent in send_results(_given(list(results)), settings.to).items():
            echo(f"{path}: {count(sent, 'set')} of numbers sent to {settings.to}")
        return
    if settings.figure is not None and (settings.as_json or settings.full or settings.pairs or settings.groups):
        raise UsageError("--figure draws one figure alone: leave out --json, --full, --pair and --group")
    text = settings.cluster.cluster
    if text is not None and settings.ranks is not None:
        raise UsageError(f"--ranks {settings.ranks}: --cluster {text} already says how many ranks; leave one out.")
    cluster = settings.cluster.chosen()
    if settings.figure is None:
        _write(settings, list(results), cluster)
        return
    from gtrace.report.files import write_drawing

    report = _report(settings, _given(list(results)), cluster)
    path = settings.output or Path(f"{settings.figure}.svg")
    echo(str(write_drawing(path, partial(gtrace.report.draw, report, settings.figure), force=settings.force)))


def _report(settings: _ReportSettings, results: list[Path], cluster: Cluster | None) -> Report:
    from gtrace.report.inputs import Asked, load_report

    ranks = settings.ranks or (None if cluster is None else cluster.ranks)
    asked = {**arguments(settings, "report"), **arguments(settings.noise, "report")}
    report = load_report(results, asked=Asked(cluster=cluster, workers=ranks, **asked))
    text = settings.cluster.cluster
    if text is not None and cluster is not None and cluster.step_time is None:
        said = dict.fromkeys(sweep.timed(cluster)[1] for sweep in report.sweeps)
        missing = f"--cluster {text} has no compute time, so no step times; add it: {text},180ms"
        for line in filter(None, said) if any(said) else (missing,):
            echo(f"gtrace: {line}", err=True)
    if text is not None and cluster is not None and cluster.step_time and not report.savings:
        raise UsageError(
            "--cluster: these results hold no gradients of weights that went through a codec; pass a .sweep.db or a "
            "run log of gtrace train."
        )
    return report


def _given(results: list[Path]) -> list[Path]:
    from gtrace.report.inputs import newest_results

    if results:
        return results
    found = newest_results(Path())
    echo(f"taking the newest results in this folder: {' and '.join(map(str, found))}", err=True)
    return found


def _write(settings: _ReportSettings, results: list[Path], cluster: Cluster | None) -> None:
    """The answer on standard output, and the page.

    The page is written before anything is printed, because the reader of a pipe (``head``) may go away at any time.
    """
    from gtrace.report.files import check_page, default_page, folder_in_words, output_kind, to_json, write_report

    output, force = settings.output, settings.force
    if output is not None:
        output_kind(output)
    results = _given(results)
    if output is not None:
        keep_inputs(output, *results)
    elif not settings.as_json:
        output = default_page(results[0])
        # A page of an earlier report is replaced; anything else stops the command before it has read the results.
        check_page(output, force=force)
        force = True
    report = _report(settings, results, cluster)
    written = [] if output is None else write_report(report, output, force=force)
    after = [folder_in_words(report)] if len(written) > 1 else []
    after += map(str, written[:1])
    if settings.as_json:
        print_json(to_json(report))
        for line in after:
            echo(line, err=True)
    else:
        from gtrace.report.text import print_report

        print_report(report, wide_console(), full=settings.full or bool(settings.groups or settings.pairs), after=after)
