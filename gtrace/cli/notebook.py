"""``%load_ext gtrace``: the cell magic ``%%gtrace_capture`` of notebooks."""

from __future__ import annotations

import functools
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gtrace import capture
from gtrace.capture.options import CaptureSettings
from gtrace.capture.session import print_line
from gtrace.capture.words import result_text
from gtrace.cli.options import Command, options
from gtrace.errors import GtraceError
from gtrace.settings import nested

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class _Cell:
    settings: CaptureSettings = nested(CaptureSettings)


@click.command("%%gtrace_capture", cls=Command, epilog="Example: %%gtrace_capture run.zarr --every 10 --force")
@options(_Cell)
@click.argument("path", default="run.zarr", type=click.Path(path_type=Path))
def _read(target: _Cell, path: Path) -> tuple[Path, CaptureSettings]:
    """Run this cell and record the gradients of everything that it trains in PATH, run.zarr by default."""
    return path, target.settings


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext gtrace`` does in a shell of IPython."""
    shell.register_magic_function(functools.partial(_run_cell, shell), "cell", "gtrace_capture")


def _run_cell(shell: Any, line: str, cell: str) -> None:
    chosen = _reported(shell, lambda: _read.main(shlex.split(line), prog_name=_read.name, standalone_mode=False))
    if not isinstance(chosen, tuple):
        return  # --help, or a mistake
    path, settings = chosen
    arguments = {name: getattr(settings, name) for name in settings.__dataclass_fields__}
    block = _reported(shell, lambda: capture(path, **arguments))  # type: ignore[operator]
    with block as session:
        done = shell.run_cell(cell)
        status = "complete" if done.success else "interrupted"
        session.finish(status)
    print_line(f"gtrace: {result_text(session.settle(status), path)}")


def _reported(shell: Any, function: Callable[[], Any]) -> Any:
    try:
        return function()
    except click.ClickException as error:
        message = error.format_message()
    except GtraceError as error:
        message = str(error)
    shell.show_usage_error(message)
    return None
