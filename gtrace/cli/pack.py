"""``gtrace trace pack``: a finished trace in fewer files, or in the other format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from gtrace.cli.console import echo
from gtrace.cli.options import Command, TracePath, options
from gtrace.settings import option


@dataclass(frozen=True)
class PackSettings:
    """The options of ``gtrace trace pack``."""

    output: Path | None = option(
        None,
        names=("-o", "--output"),
        help="Trace to write, .zarr or .h5.  [default: a Zarr trace is replaced by its shards]",
    )
    force: bool = option(False, help="Replace an existing trace.")


@click.command("pack", cls=Command, epilog="Example: gtrace trace pack run.h5 -o run.zarr")
@click.argument("trace", type=TracePath())
@options(PackSettings)
def command(settings: PackSettings, trace: Path | str) -> None:
    """Rewrite a finished TRACE with the same content: Zarr in shards, which are fewer files, or HDF5.

    The new trace is written beside its place and moved in once it is whole and reads back the same.
    """
    from gtrace.trace.convert import pack_trace

    before = f" (before: {_files(trace)} files)" if isinstance(trace, Path) else ""
    packed = pack_trace(trace, settings.output, force=settings.force)
    echo(f"{packed}: {_files(packed)} files, {_size(packed) / 1e6:.1f} MB{before}")


def _files(path: Path) -> int:
    return sum(entry.is_file() for entry in path.rglob("*")) if path.is_dir() else 1


def _size(path: Path) -> int:
    entries = path.rglob("*") if path.is_dir() else [path]
    return sum(entry.stat().st_size for entry in entries if entry.is_file())
