"""What a shell offers after TAB.

The scripts are click's: ``_GTRACE_COMPLETE=bash_source gtrace`` prints one. A shell calls gtrace at every TAB, so
nothing here may import numpy, numba or torch. Importing the codecs would: their names are read from the classes' text.
"""

from __future__ import annotations

import re
from importlib import metadata, resources
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

#: how a codec's class says its name, after the decorators, by which a prefix differs
_NAME = re.compile(r'^((?:@[^\n]*\n)+)class (?:(?!^class ).)*?^    name = "([\w-]+)"$', re.MULTILINE | re.DOTALL)
_PREFIXES = ("@prefix\n", "@register_wrapper\n")


def built_in() -> tuple[list[str], list[str]]:
    """Names of gtrace's own codecs, and of its prefixes."""
    codecs: list[str] = []
    prefixes: list[str] = []
    for file in (resources.files("gtrace") / "codecs").iterdir():
        if file.name.endswith(".py"):
            for decorators, name in _NAME.findall(file.read_text(encoding="utf-8")):
                (prefixes if decorators.startswith(_PREFIXES) else codecs).append(name)
    return sorted(codecs), sorted(prefixes)


def _codecs() -> list[str]:
    """Names of codecs, those of installed packages among them."""
    return sorted({*built_in()[0], *(entry.name for entry in metadata.entry_points(group="gtrace.codecs"))})


def complete_codec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The name of a codec or a prefix."""
    del context, parameter
    return [name for name in (*_codecs(), *built_in()[1]) if name.startswith(incomplete)]


def complete_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """A spec: prefixes with their colon, then a codec."""
    del context, parameter
    head, colon, word = incomplete.rpartition(":")
    prefixes = built_in()[1]
    if colon and head.rpartition(":")[2] not in prefixes:
        return []
    return [f"{head}{colon}{name}" for name in (*_codecs(), *(f"{p}:" for p in prefixes)) if name.startswith(word)]


def complete_specs(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The last of a list of specs with commas; a sweep also takes all."""
    head, comma, word = incomplete.rpartition(",")
    found = complete_spec(context, parameter, word)
    if parameter.name == "methods" and context.command.name == "sweep" and "all".startswith(word):
        found.append("all")
    return [f"{head}{comma}{spec}" for spec in found]


def complete_task(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The name of a built-in task."""
    del context, parameter
    from gtrace.training.tasks import task_names

    return [name for name in task_names() if name.startswith(incomplete)]


def complete_figure(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The name of a figure of a report."""
    del context, parameter
    from gtrace.report.figures import FIGURES

    return [name for name in FIGURES if name.startswith(incomplete)]
