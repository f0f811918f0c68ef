"""``gtrace reproduce``: the papers' experiments in miniature."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.console import echo, plain_table, status_line
from gtrace.cli.options import options
from gtrace.errors import OutputExistsError, UsageError
from gtrace.settings import option

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace_experiments.reproduce.experiment import Experiment


@dataclass(frozen=True)
class ReproduceSettings:
    """The options of ``gtrace reproduce``."""

    output: Path = option(
        Path("reproduction"),
        help="Folder for results; finished ones that are there are kept.",
    )
    page: Path | None = option(
        None, help="The page, .html or .md.  [default: index.html in the folder; NAME.html for one]"
    )
    quick: bool = option(False, help="A smoke test in seconds each; verdicts mean nothing.")
    full: bool = option(
        False, help="The paper's own model, data and length; stopped, the same command goes on from there."
    )
    seed: int = option(0, minimum=0, help="Of everything random.")
    force: bool = option(False, help="Do finished experiments again.")
    as_json: bool = option(False, help="Print the list or the verdicts as JSON.")


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="list|all|NAME...")
@options(ReproduceSettings)
def command(settings: ReproduceSettings, names: tuple[str, ...]) -> None:
    """Repeat experiments of the papers in miniature, and judge them by criteria stated beforehand.

    Each takes at most ten minutes on two cores and writes its result as NAME.json; one page with figures, the papers'
    published numbers and a verdict for each puts them together: reproduced, partly, or not reproduced. A pattern as
    'zipml-*' means several.

    \b
    Examples:
      gtrace reproduce list
      gtrace reproduce lognormal-table2
      gtrace reproduce 'mcgq-*' -o mcgq
      gtrace reproduce all --page reproduction.md
    """
    from gtrace_experiments.reproduce import choose_experiments, experiment_names, load_experiment
    from gtrace_experiments.reproduce.full import FULL, full_size

    if names in ((), ("list",)):
        _list([load_experiment(name) for name in experiment_names()], as_json=settings.as_json)
        return
    chosen = choose_experiments(names)
    if settings.full:
        # A pattern means those of its experiments that have a second size.
        chosen = [name for name in chosen if name in FULL] or chosen
        full_size(chosen[0])
    output = settings.output
    # What can be wrong in the arguments is said before anything takes minutes.
    place = settings.page or output / (f"{chosen[0]}.html" if len(chosen) == 1 else "index.html")
    if place.suffix not in (".html", ".md"):
        raise UsageError(f"--page {place}: ends in neither .html nor .md")
    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output}: is a file and was left untouched; choose another -o")
    if place.is_dir():
        raise OutputExistsError(f"{place}: is a folder and was left untouched; choose another --page")

    from gtrace_experiments.reproduce.experiment import Context
    from gtrace_experiments.reproduce.page import held, write_page
    from gtrace_experiments.reproduce.runner import estimate, kept_result, run_experiment, write_result

    output.mkdir(parents=True, exist_ok=True)
    shown = []
    for name in chosen:
        experiment = load_experiment(name)
        stem = f"{name}-full" if settings.full else name
        context = Context(
            settings.seed,
            settings.quick,
            lambda line, name=name: status_line(f"{name}: {line}"),  # type: ignore[misc]
            full_size(name) if settings.full else None,
            output / stem if settings.full and not settings.quick else None,
        )
        path = output / f"{stem}.json"
        result = None if settings.force else kept_result(path, experiment, context)
        if result is None:
            status_line(f"{name}: {experiment.title}")
            if context.folder is not None and context.full is not None:
                hours = estimate(experiment, context) / 3600 if context.full.task else 0.0
                echo(
                    f"{name}: {context.full.data}: {_long(hours)} of one core in all; what is done is kept in "
                    f"{context.folder}, and the same command goes on from there",
                    err=True,
                )
                if settings.force:
                    shutil.rmtree(context.folder, ignore_errors=True)
                context.folder.mkdir(exist_ok=True)
            result = run_experiment(experiment, context)
            write_result(path, result)
        status_line("")
        if not settings.as_json:
            verdict = click.style(result.outcome.verdict, bold=True)
            click.echo(f"{name}: {verdict} ({held(result)} criteria)")
        shown.append((experiment, result))
        # After each, so that an interrupted run leaves a page of what it finished.
        place.parent.mkdir(parents=True, exist_ok=True)
        write_page(place, shown, output)
    if settings.as_json:
        click.echo(json.dumps({"page": str(place), "results": [result.to_json() for _, result in shown]}))
    else:
        click.echo(f"page: {place.resolve()}")


def _long(hours: float) -> str:
    """Hours as a person says them."""
    if hours < 1:
        return f"about {60 * hours:.0f} min" if hours else "some minutes"
    return f"about {hours:.0f} h" if hours < 100 else f"about {hours / 24:,.0f} days"


def _list(experiments: Sequence[Experiment], *, as_json: bool) -> None:
    if as_json:
        rows = [{"name": e.name, "title": e.title, "paper": e.paper, "where": e.where} for e in experiments]
        click.echo(json.dumps(rows))
        return
    from rich.console import Console

    table = plain_table()
    for heading in ("experiment", "what", "paper"):
        table.add_column(heading, overflow="fold")
    for e in experiments:
        table.add_row(e.name, e.title, f"{e.paper.split(',')[0]}, {e.where}")
    Console(highlight=False).print(table)
    click.echo("FPGA timing and tomography of the ZipML paper are not repeated.")
