"""Options declared once: a field of a dataclass that holds its help, its default and what it may be.

The command line makes its options from such a class, and a call from Python takes the same fields by name.
"""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

_C = TypeVar("_C", bound=type)

#: what ``--kind`` chooses -> what it is called in a sentence
KINDS = {
    "weight": "weight gradients",
    "neural": "neural gradients",
    "update": "weight updates",
    "outer": "outer gradients",
    "momentum": "momentum buffers",
}
#: ``--kind`` of commands that read a trace
KIND: dict[str, Any] = {
    "choices": tuple(KINDS),
    "metavar": "KIND",
    "help": f"What to read: {', '.join(KINDS)}.  [default: weight, else the first of these that the trace has]",
}


def option(default: Any = dataclasses.MISSING, *, help: str, **about: Any) -> Any:  # noqa: A002
    """A field of a settings class.

    Args:
        default: its value when it is not given; without one it must be given.
        help: one sentence for a user.
        about: how the command line takes it, for example ``minimum``, ``choices`` or ``metavar``; see
            :func:`gtrace.cli.options.options`.
    """
    return dataclasses.field(default=default, metadata={"help": help, **about})


def nested(cls: type) -> Any:
    """A field that holds the options of another settings class, in their place among the others."""
    return dataclasses.field(default_factory=cls, metadata={"settings": cls})


def documented(cls: _C) -> _C:
    """Add the help of every field to the class's docstring."""
    lines = [f"    {field.name}: {' '.join(field.metadata['help'].split())}" for field in dataclasses.fields(cls)]
    cls.__doc__ = f"{(cls.__doc__ or '').rstrip()}\n\nAttributes:\n" + "\n".join(lines)
    return cls
