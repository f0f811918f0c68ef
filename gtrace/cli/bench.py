"""``gtrace study bench`` and ``gtrace study predict``: a codec against all others, and a measure against the loss."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gtrace.cli.console import echo, status_line, stdout_console
from gtrace.cli.groups import complete_spec
from gtrace.cli.options import PLUGIN, Command, load_plugins, options, print_json
from gtrace.errors import UsageError, check_output
from gtrace.report.names import literal
from gtrace.settings import option


@dataclass(frozen=True)
class _BenchSettings:
    plugin: tuple[Path, ...] = option((), **PLUGIN)
    at: float | None = option(
        None, type=click.FloatRange(min=0.01, max=32), help="Bits of the first table.  [default: 3]"
    )
    quick: bool = option(False, help="A smoke test in seconds, on one small network; for no paper.")
    jobs: int | None = option(None, minimum=1, help="Workers.  [default: all processors]")
    output: tuple[Path, ...] = option((), help="Also write the tables: x.md or x.tex.")
    force: bool = option(False, help="Overwrite.")
    as_json: bool = option(False, help="Print every number as JSON instead.")


@click.command("bench", cls=Command)
@click.argument("codecs", nargs=-1, required=True, metavar="CODEC...", shell_complete=complete_spec)
@options(_BenchSettings)
def bench(settings: _BenchSettings, codecs: tuple[str, ...]) -> None:
    """Compare CODEC with every built-in codec at equal measured bits, by a fixed protocol.

    CODEC is a Python file with codecs of your own, which is run, or a spec: of such a file given with --plugin, of an
    installed package, or built in. What a spec leaves open, as bits, runs over the protocol's ranges. Gradients are
    those of a CNN, an LSTM and a transformer, early and late in training, trained here with fixed seeds; they and the
    rows of built-in codecs are kept in the cache folder. Without PyTorch gradients are made by formulas, and the output
    says so.

    \b
    Examples:
      gtrace study bench dither.py
      gtrace study bench dither:bits=4 qsgdinf:bucket_size=64 --plugin dither.py -o dither.md -o dither.tex
      gtrace study bench qsgdinf --quick
    """
    for path in settings.output:
        if path.suffix not in (".md", ".tex"):
            raise UsageError(f"{path}: tables are written as .md or .tex")
        check_output(path, force=settings.force)
    load_plugins(settings.plugin)
    from gtrace.codecs import split_specs
    from gtrace.codecs.plugins import load_plugin
    from gtrace.report.files import put
    from gtrace.report.text import LATEX_PREAMBLE, latex_table, markdown_table
    from gtrace.workflows.bench import FULL, QUICK, bench_json, bench_lines, bench_tables, run_bench

    specs = []
    for word in codecs:
        specs += [found.name for found in load_plugin(word)] if word.endswith(".py") else split_specs(word)
    result = run_bench(specs, QUICK if settings.quick else FULL, at=settings.at, jobs=settings.jobs, say=status_line)
    status_line("")
    tables, lines = bench_tables(result), bench_lines(result)
    for path in settings.output:
        if path.suffix == ".md":
            text = [f"# {', '.join(result.mine)} against the built-in codecs", ""]
            text += [line for table in tables for line in markdown_table(table)]
            text += [f"{line}\n" for line in lines]
        else:
            text = [LATEX_PREAMBLE, *(f"% {literal(line)}" for line in lines)]
            text += [line for table in tables for line in ("", *latex_table(table))]
        put(path, ("\n".join(text).rstrip("\n") + "\n").encode())
    if settings.as_json:
        print_json(bench_json(result))
        return
    from rich.console import Console

    from gtrace.report.text import print_tables

    print_tables(tables, Console(), notes=lines)
    for path in settings.output:
        echo(path)


def _share(_context: click.Context, _option: click.Parameter, text: str) -> float:
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 < value <= 1.0:
        raise UsageError(f"--first: '{text}' is not a share of the steps; write e.g. 10%.")
    return value


@dataclass(frozen=True)
class _PredictSettings:
    first: float = option("100%", type=str, metavar="SHARE", callback=_share, help="Steps whose measures count.")
    exclude: tuple[str, ...] = option((), metavar="GLOB", help="Leave codecs out, e.g. 'ef:*'.")
    output: Path | None = option(None, help="Draw the measures over the losses: .png, .svg, .pdf.")
    force: bool = option(False, help="Replace an existing figure.")
    as_json: bool = option(False, help="Print JSON instead of a table.")


@click.command("predict", cls=Command, epilog="Example: gtrace study predict digits-mlp-compare.jsonl -o predicts.svg")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@options(_PredictSettings)
def predict(settings: _PredictSettings, runs: tuple[Path, ...]) -> None:
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
        from gtrace.report.files import write_drawing

        write_drawing(output, lambda: draw_chart(predicting.chart(found)), force=settings.force)
    if settings.as_json:
        print_json({"first": first, "studies": [predicting.as_json(study) for study in found]})
        return
    from gtrace.report.text import print_tables

    print_tables([predicting.table(found)], stdout_console(), sentences=[study.sentence for study in found])
    if output is not None:
        echo(str(output))
