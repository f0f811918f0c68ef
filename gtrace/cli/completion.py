"""What a shell offers after TAB.

The scripts are click's: ``_GTRACE_COMPLETE=bash_source gtrace`` prints one. A shell calls gtrace at every TAB, so
nothing here may import numpy, numba or torch: names of codecs stand here once more, and a test compares them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

# fmt: off
CODECS = (
    "adacomp", "alq", "alq-n", "alqg", "alqg-n", "amq", "amq-n", "bf16", "dgc", "dropping", "ef-signsgd", "fp",
    "fp16", "int8", "mcgq", "mem-sgd", "minmax", "natural", "none", "nuqsgd", "onebit", "powersgd", "prune",
    "qsgd", "qsgdinf", "randomk", "signsgd", "signum", "terngrad", "topk", "topk-prune", "zipml",
)
PREFIXES = ("accumulate", "ef", "momentum", "rotate")
# fmt: on


def _codecs() -> list[str]:
    """Names of codecs, those of installed packages among them."""
    from importlib import metadata

    return sorted({*CODECS, *(entry.name for entry in metadata.entry_points(group="gtrace.codecs"))})


def complete_codec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """The name of a codec or a prefix."""
    del context, parameter
    return [name for name in (*_codecs(), *PREFIXES) if name.startswith(incomplete)]


def complete_spec(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[str]:
    """A spec: prefixes with their colon, then a codec."""
    del context, parameter
    head, colon, word = incomplete.rpartition(":")
    if colon and head.rpartition(":")[2] not in PREFIXES:
        return []
    return [f"{head}{colon}{name}" for name in (*_codecs(), *(f"{p}:" for p in PREFIXES)) if name.startswith(word)]


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
