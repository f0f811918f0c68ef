"""``gtrace compare``: does what is measured on gradients predict the loss of the training?"""

from __future__ import annotations

from pathlib import Path

import click

from gtrace.cli.options import print_json
from gtrace.errors import UsageError


def _share(_context: click.Context, _option: click.Parameter, text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise UsageError(f"--first: '{text}' is no share of the steps; write 10%")
    return value


@click.command("compare", epilog="Example: gtrace compare digits-mlp-compare.jsonl -o predicts.svg")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--first", default="100%", show_default=True, metavar="SHARE", callback=_share, help="Steps whose measures count."
)
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave codecs out, as in 'ef:*'.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Draw the measures over the losses: .png, .svg, .pdf."
)
@click.option("--force", is_flag=True, help="Replace an existing figure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
def command(
    runs: tuple[Path, ...], first: float, exclude: tuple[str, ...], output: Path | None, force: bool, as_json: bool
) -> None:
    """Relate what was measured on the gradients of RUNS to their final losses.

    RUNS are run logs of gtrace train with several codecs (--compare), best with several --seeds and with --measure. For
    each study and measure: the rank correlation over codecs with the final test loss above that of the uncompressed
    run of the same seed, and its bootstrap interval.
    """
    from gtrace.report import predicting
    from gtrace.runlog import read_runlog

    found = [predicting.predict(read_runlog(run), run.name, first=first, exclude=exclude) for run in runs]
    if output is not None:
        from gtrace.report.figures.charts import draw_chart
        from gtrace.report.render.files import write_drawing

        write_drawing(output, lambda: draw_chart(predicting.chart(found)), force=force)
    if as_json:
        print_json({"first": first, "studies": [predicting.as_json(study) for study in found]})
        return
    from gtrace.cli.columns import stdout_console
    from gtrace.report.render.text import print_table

    print_table(predicting.table(found), [study.sentence for study in found], stdout_console())
    if output is not None:
        click.echo(str(output))
