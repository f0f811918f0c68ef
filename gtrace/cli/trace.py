"""``gtrace trace``: what one does with a trace beside measuring it."""

from __future__ import annotations

import click

from gtrace.cli.groups import SUBCOMMANDS, LazyGroup


@click.group("trace", cls=LazyGroup, table=SUBCOMMANDS["trace"], epilog="Example: gtrace trace check run.zarr --repair")
def command() -> None:
    """Look after traces: what is in one, whether it is whole, other formats, smaller copies."""
