"""``gtrace reproduce``: the papers' experiments in miniature."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gtrace.cli.console import plain_table, status_line
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
        names=("-o", "--output"),
        help="Folder for results; finished ones that are there are kept.",
    )
    page: Path | None = option(
        None, help="The page, .html or .md.  [default: index.html in the folder; NAME.html for one]"
    )
    quick: bool = option(False, help="A smoke test in seconds each; verdicts mean nothing.")
    seed: int = option(0, minimum=0, help="Of everything random.")
    force: bool = option(False, help="Do finished experiments again.")
    as_json: bool = option(False, names=("--json",), help="Print the list or the verdicts as JSON.")


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

    if names in ((), ("list",)):
        _list([load_experiment(name) for name in experiment_names()], as_json=settings.as_json)
        return
    chosen = choose_experiments(names)
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
    from gtrace_experiments.reproduce.page import overview, write_page
    from gtrace_experiments.reproduce.runner import kept_result, run_experiment, write_result

    output.mkdir(parents=True, exist_ok=True)
    shown = []
    for name in chosen:
        experiment = load_experiment(name)
        context = Context(settings.seed, settings.quick, lambda line, name=name: status_line(f"{name}: {line}"))  # type: ignore[misc]
        path = output / f"{name}.json"
        result = None if settings.force else kept_result(path, experiment, context)
        if result is None:
            status_line(f"{name}: {experiment.title}")
            result = run_experiment(experiment, context)
            write_result(path, result)
        status_line("")
        if not settings.as_json:
            verdict = click.style(result.outcome.verdict, bold=True)
            click.echo(f"{name}: {verdict} ({overview([(experiment, result)])[0][3]} criteria)")
        shown.append((experiment, result))
        # After each, so that an interrupted run leaves a page of what it finished.
        place.parent.mkdir(parents=True, exist_ok=True)
        write_page(place, shown, output)
    if settings.as_json:
        click.echo(json.dumps({"page": str(place), "results": [result.to_json() for _, result in shown]}))
    else:
        click.echo(f"page: {place.resolve()}")


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
