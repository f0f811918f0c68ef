"""``gtrace demo``: the main job on a shipped sample."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("demo"), show_default=True, help="Folder to fill."
)
@click.option("--force", is_flag=True, help="Replace what an earlier demo wrote there.")
def command(output: Path, *, force: bool) -> None:
    """Capture, sweep, train and report on a shipped sample; ends with the path of the report.

    A small network learns handwritten digits while its gradients are recorded; every codec is then measured on
    them, and one of them is used in training. Each step is shown as the command that does it.

    \b
    Example:
      gtrace demo -o demo
    """
    from gtrace.workflows.demo import run_demo

    page = run_demo(output, force=force, say=lambda line: click.secho(f"\n{line}", bold=True))
    click.echo(f"\nreport: {page.resolve()}")
