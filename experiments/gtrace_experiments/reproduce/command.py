"""``gtrace reproduce``: the papers' experiments in miniature."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from gtrace.errors import OutputExistsError, UsageError


@click.command("reproduce")
@click.argument("names", nargs=-1, metavar="list|all|NAME...")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("reproduction"),
    show_default=True,
    help="Folder for results; finished ones that are there are kept.",
)
@click.option(
    "--page",
    type=click.Path(path_type=Path),
    default=None,
    help="The page, .html or .md.  [default: index.html in the folder; NAME.html for one]",
)
@click.option("--quick", is_flag=True, help="A smoke test in seconds each; verdicts mean nothing.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@click.option("--force", is_flag=True, help="Do finished experiments again.")
@click.option("--json", "as_json", is_flag=True, help="Print the list or the verdicts as JSON.")
def command(
    names: tuple[str, ...], *, output: Path, page: Path | None, quick: bool, seed: int, force: bool, as_json: bool
) -> None:
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
        _list([load_experiment(name) for name in experiment_names()], as_json=as_json)
        return
    chosen = choose_experiments(names)
    # What can be wrong in the arguments is said before anything takes minutes.
    place = page or output / (f"{chosen[0]}.html" if len(chosen) == 1 else "index.html")
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
        context = Context(seed, quick, lambda line, name=name: _progress(f"{name}: {line}"))  # type: ignore[misc]
        path = output / f"{name}.json"
        result = None if force else kept_result(path, experiment, context)
        if result is None:
            _progress(f"{name}: {experiment.title}")
            result = run_experiment(experiment, context)
            write_result(path, result)
        _progress("")
        if not as_json:
            verdict = click.style(result.outcome.verdict, bold=True)
            click.echo(f"{name}: {verdict} ({overview([(experiment, result)])[0][3]} criteria)")
        shown.append((experiment, result))
        # After each, so that an interrupted run leaves a page of what it finished.
        place.parent.mkdir(parents=True, exist_ok=True)
        write_page(place, shown, output)
    if as_json:
        click.echo(json.dumps({"page": str(place), "results": [result.to_json() for _, result in shown]}))
    else:
        click.echo(f"page: {place.resolve()}")


def _list(experiments: list, *, as_json: bool) -> None:  # type: ignore[type-arg]
    if as_json:
        rows = [{"name": e.name, "title": e.title, "paper": e.paper, "where": e.where} for e in experiments]
        click.echo(json.dumps(rows))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("experiment", "what", "paper"):
        table.add_column(heading, overflow="fold")
    for e in experiments:
        table.add_row(e.name, e.title, f"{e.paper.split(',')[0]}, {e.where}")
    Console(highlight=False).print(table)
    click.echo("FPGA timing and tomography of the ZipML paper are not repeated.")


def _progress(line: str) -> None:
    """One line that the next replaces, on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line[:100]}", nl=False, err=True)
