"""Optimizers that compute gradients themselves, by a closure: what happens to gradients must happen after it."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def after_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any], then: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of an optimizer's ``step`` with ``then`` called after each evaluation of its closure.

    Args:
        args: of the step, the optimizer first, as a pre-hook gets them.
        kwargs: of the step.
        then: called when gradients are there; at once where there is no closure.

    Returns:
        what the pre-hook returns: new arguments, or None where nothing changes.
    """
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        then()
        return None

    @functools.wraps(closure, updated=())
    def followed() -> object:
        result = closure()
        then()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": followed}
    return (args[0], followed, *args[2:]), kwargs
