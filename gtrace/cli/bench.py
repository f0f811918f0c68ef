"""``gtrace study bench``: a codec of one's own against every built-in one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from gtrace.cli.completion import complete_spec
from gtrace.cli.console import echo, status_line
from gtrace.cli.options import PLUGIN, Command, check_output, load_plugins, options, print_json
from gtrace.errors import UsageError
from gtrace.settings import option

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class BenchSettings:
    """The options of ``gtrace study bench``."""

    plugin: tuple[Path, ...] = option((), **PLUGIN)
    at: float | None = option(
        None, type=click.FloatRange(min=0.01, max=32), help="Bits of the first table.  [default: 3]"
    )
    quick: bool = option(False, help="A smoke test in seconds, on one small network; for no paper.")
    jobs: int | None = option(None, minimum=1, help="Workers.  [default: all processors]")
    output: tuple[Path, ...] = option((), names=("-o", "--output"), help="Also write the tables: x.md or x.tex.")
    force: bool = option(False, help="Overwrite.")
    as_json: bool = option(False, names=("--json",), help="Print every number as JSON instead.")


@click.command("bench", cls=Command)
@click.argument("codecs", nargs=-1, required=True, metavar="CODEC...", shell_complete=complete_spec)
@options(BenchSettings)
def command(settings: BenchSettings, codecs: tuple[str, ...]) -> None:
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
    from gtrace.report.render.files import put
    from gtrace.report.render.latex import latex_comment, latex_preamble, latex_table
    from gtrace.report.render.markdown import markdown_table
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
            text = [latex_preamble(), *map(latex_comment, lines)]
            text += [line for table in tables for line in ("", *latex_table(table))]
        put(path, ("\n".join(text).rstrip("\n") + "\n").encode())
    if settings.as_json:
        print_json(bench_json(result))
        return
    from rich.console import Console

    from gtrace.report.render.text import print_tables

    print_tables(tables, lines, Console())
    for path in settings.output:
        echo(path)
