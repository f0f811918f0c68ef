"""``gtrace demo``: the main job on a shipped sample."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gtrace.cli.console import echo
from gtrace.cli.options import Command, options
from gtrace.settings import option


@dataclass(frozen=True)
class DemoSettings:
    """The options of ``gtrace demo``."""

    output: Path = option(Path("demo"), names=("-o", "--output"), help="Folder to fill.")
    force: bool = option(False, help="Replace what an earlier demo wrote there.")


@click.command("demo", cls=Command)
@options(DemoSettings)
def command(settings: DemoSettings) -> None:
    """Capture, sweep, train and report on a shipped sample; ends with the path of the report.

    A small network learns handwritten digits while its gradients are recorded; codecs are then measured on them, and
    one of them is used in training. Each step is shown as the command that does it, in the folder of the demo.

    \b
    Example:
      gtrace demo -o demo
    """
    from gtrace.workflows.demo import run_demo

    page = run_demo(
        settings.output, force=settings.force, say=lambda line: click.secho(line, bold=line.startswith("$"))
    )
    echo(f"\nreport: {page.resolve()}")
