"""Options of ``gtrace train`` that are about a SCRIPT."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")

_OPTIONS = (
    click.option(
        "--rule",
        "rules",
        multiple=True,
        metavar="GLOB=CODEC",
        help="For a SCRIPT: another codec for some tensors, as in bias=none; the first that fits counts.",
    ),
    click.option(
        "--exchange",
        type=click.Choice(["allgather", "two-shot"]),
        default="allgather",
        show_default=True,
        help="For a SCRIPT whose ranks train together: every payload to all, or to the rank that sums a piece up.",
    ),
    click.option(
        "--levels",
        metavar="NAME",
        help="For such a SCRIPT: own for each rank's own levels, or common for those that fit the sum of all ranks' "
        "sketches.  [default: own]  With --quantize: where the weights' levels lie: optimal, uniform, xnor, or "
        "several with commas.  [default: optimal]",
    ),
    click.option(
        "--compare-every",
        type=click.IntRange(min=0),
        default=100,
        show_default=True,
        metavar="N",
        help="For such a SCRIPT: every so many steps all-reduce the gradients in float32 and bfloat16 beside it; "
        "0: never.",
    ),
)


def script_options(function: F) -> F:
    """The options of a SCRIPT, in the order of the help."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
