"""Options of ``gtrace train`` that choose the codec."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gtrace.cli.completion import complete_spec, complete_specs

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_OPTIONS = (
    click.option(
        "--codec", shell_complete=complete_spec, help="A codec or its spec, as in qsgdinf:bits=3,bucket_size=512."
    ),
    click.option(
        "--plan",
        "plans",
        type=click.Path(path_type=Path),
        multiple=True,
        metavar="FILE",
        help="A plan, which names a codec for every tensor; for a task beside --codec or --compare, and again for "
        "more.",
    ),
    click.option(
        "--compare",
        metavar="CODECS",
        shell_complete=complete_specs,
        help="For a task: several codecs in the place of one, as in qsgdinf:bits=3,alq:bits=3,terngrad.",
    ),
    click.option(
        "--bits",
        type=int,
        default=None,
        help="Nominal bits of a codec that has them; with --quantize, of the weights.",
    ),
    click.option("--sparsity", type=float, default=None, help="Sparsity of a codec that has it, as in 0.8."),
)


def choice_options(function: F) -> F:
    """``--codec``, ``--plan``, ``--compare``, ``--bits`` and ``--sparsity``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
