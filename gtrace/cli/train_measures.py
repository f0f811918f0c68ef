"""Options of ``gtrace train`` that say what is looked at on the way; the training does not depend on them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


def measure_options(function: F) -> F:
    """``--eval-every``, ``--shadow`` and ``--measure``."""
    every = click.IntRange(min=1)
    for option in (
        click.option(
            "--measure",
            type=every,
            metavar="K",
            help="For a task: every K steps measure all that a sweep measures on the averaged gradient, for "
            "gtrace compare.",
        ),
        click.option(
            "--shadow",
            type=every,
            metavar="K",
            help="With --kind neural: every K steps run the backward pass exactly too, and compare the weight "
            "gradients.",
        ),
        click.option("--eval-every", type=every, help="Steps between two tests.  [default: a tenth of the steps]"),
    ):
        function = option(function)
    return function
