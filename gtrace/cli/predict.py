"""``gtrace study predict``: does what is measured on gradients predict the loss of the training?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gtrace.cli.console import echo
from gtrace.cli.options import Command, options, print_json
from gtrace.errors import UsageError
from gtrace.settings import option


def _share(_context: click.Context, _option: click.Parameter, text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise UsageError(f"--first: '{text}' is not a share of the steps; write e.g. 10%.")
    return value


@dataclass(frozen=True)
class PredictSettings:
    """The options of ``gtrace study predict``."""

    first: float = option("100%", type=str, metavar="SHARE", callback=_share, help="Steps whose measures count.")
    exclude: tuple[str, ...] = option((), metavar="GLOB", help="Leave codecs out, e.g. 'ef:*'.")
    output: Path | None = option(
        None, names=("-o", "--output"), help="Draw the measures over the losses: .png, .svg, .pdf."
    )
    force: bool = option(False, help="Replace an existing figure.")
    as_json: bool = option(False, names=("--json",), help="Print JSON instead of a table.")


@click.command("predict", cls=Command, epilog="Example: gtrace study predict digits-mlp-compare.jsonl -o predicts.svg")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@options(PredictSettings)
def command(settings: PredictSettings, runs: tuple[Path, ...]) -> None:
    """Relate what was measured on the gradients of RUNS to their final losses.

    RUNS are run logs of gtrace study compare, best with several --seeds and with --measure. For
    each study and measure: the rank correlation over codecs with the final test loss above that of the uncompressed
    run of the same seed, and its bootstrap interval.
    """
    from gtrace.report import predicting
    from gtrace.runlog import read_runlog

    first, output = settings.first, settings.output
    found = [predicting.predict(read_runlog(run), run.name, first=first, exclude=settings.exclude) for run in runs]
    if output is not None:
        from gtrace.report.figures.charts import draw_chart
        from gtrace.report.render.files import write_drawing

        write_drawing(output, lambda: draw_chart(predicting.chart(found)), force=settings.force)
    if settings.as_json:
        print_json({"first": first, "studies": [predicting.as_json(study) for study in found]})
        return
    from gtrace.cli.console import stdout_console
    from gtrace.report.render.text import print_table

    print_table(predicting.table(found), [study.sentence for study in found], stdout_console())
    if output is not None:
        echo(str(output))
