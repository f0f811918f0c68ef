"""The words after ``gtrace``: groups of commands, what a mistyped word may mean, and what a shell offers after TAB.

A command is loaded when it is called. The scripts for a shell are click's: ``_GTRACE_COMPLETE=bash_source gtrace``
prints one. A shell calls gtrace at every TAB, so nothing here may import numpy, numba or torch. Importing the codecs
would: their names are read from the classes' text.
"""

from __future__ import annotations

import importlib
import re
from contextlib import contextmanager
from functools import cache
from importlib import metadata, resources
from typing import TYPE_CHECKING, Any

import click

from gtrace.cli.options import Command
from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from importlib.metadata import EntryPoint


#: what a table of commands holds: name -> (module that defines it as ``command``, or module:name; its line in the help)
_TRACE = {
    "info": ("gtrace.cli.info", "Show what is in a trace."),
    "check": ("gtrace.cli.trace:check", "Verify every value of a trace, and repair it."),
    "pack": ("gtrace.cli.trace:pack", "Rewrite a trace into fewer files, or as HDF5."),
    "sketch": ("gtrace.cli.trace:sketch", "Make a small trace of sketches from a full one."),
    "import": ("gtrace.cli.trace:import_", "Make a trace of arrays that other programs stored."),
    "export": ("gtrace.cli.trace:export", "Write a trace as npz, safetensors or Parquet."),
}
#: the top level, in the order of use
COMMANDS = {
    "demo": ("gtrace.cli.advise:demo", "See all of it on a shipped sample."),
    "advise": ("gtrace.cli.advise", "Find out in one go whether to compress, with what, at what cost."),
    "capture": ("gtrace.cli.capture", "Run your training script and record its gradients."),
    "info": _TRACE["info"],
    "sweep": ("gtrace.cli.sweep", "Measure compression methods on a trace."),
    "report": ("gtrace.cli.report", "Read the results: which method to use, tables, a page."),
    "plan": ("gtrace.cli.plan", "Choose a method and bits for every tensor; show and diff plans."),
    "train": ("gtrace.cli.train", "Train your script, or a built-in task, with a method."),
    "study": ("gtrace.cli.train:study", "Compare methods on built-in tasks, over seeds, by protocol."),
    "codecs": ("gtrace.cli.codecs", "List the compression methods, or explain one."),
    "trace": ("gtrace.cli.trace", "Look after traces: check, pack, sketch, import, export."),
}
#: the commands of each group
SUBCOMMANDS = {
    "plan": {
        "show": ("gtrace.cli.plan:show", "Show what a plan chooses and what it costs."),
        "diff": ("gtrace.cli.plan:diff", "Show where two plans differ."),
        "formats": ("gtrace.cli.formats", "Choose a float format for every layer of a trace."),
    },
    "study": {
        "tasks": ("gtrace.cli.train:tasks", "List the built-in tasks."),
        "compare": ("gtrace.cli.train:compare", "Train a task with several methods side by side."),
        "seeds": ("gtrace.cli.train:seeds", "The same with several seeds, and how sure the differences are."),
        "predict": ("gtrace.cli.bench:predict", "Show which measure of the error predicts the loss of training."),
        "bench": ("gtrace.cli.bench:bench", "Compare a codec of your own with every built-in one."),
    },
    "trace": _TRACE,
}
#: names of the top level that a group took over; they are still read
ALIASES = {"compare": "study predict", "bench": "study bench", "formats": "plan formats"} | {
    name: f"trace {name}" for name in _TRACE if name not in COMMANDS
}
#: entry points of packages that add commands; each names a pair as in COMMANDS, in a module that imports fast
GROUP = "gtrace.commands"
#: what the package gtrace-experiments adds
EXPERIMENTS = ("reproduce", "linear")
#: how a file ends that somebody may give without a command -> the command that reads it
_READERS = {".py": "capture", ".zarr": "info", ".h5": "info", ".sweep.db": "report", ".jsonl": "report"}


@cache
def added_commands() -> dict[str, EntryPoint]:
    """Commands of other installed packages, by name; nothing of theirs is imported."""
    known = (*COMMANDS, *ALIASES)
    return {entry.name: entry for entry in metadata.entry_points(group=GROUP) if entry.name not in known}


def use_instead(name: str, arguments: str = "") -> str:
    """Which command of gtrace-experiments to use, and how to install it if it is missing."""
    missing = "" if name in added_commands() else "; first pip install ./experiments in a clone of gtrace"
    return f"use gtrace {name} {arguments}".rstrip() + missing


def load_command(place: str) -> click.Command:
    """The command at ``module`` or ``module:name``."""
    module, _, name = place.partition(":")
    command = getattr(importlib.import_module(module), name or "command")
    if not isinstance(command, click.Command):
        raise TypeError("its command is not a click command")
    return command


def _load_added(name: str) -> click.Command:
    """Another package's command; one that cannot be loaded lists and completes, and says why when it is run."""
    entry = added_commands()[name]
    try:
        with _of_package(entry):
            return load_command(_pair(entry)[0])
    except UsageError as error:
        broken = error

    def refuse() -> None:
        raise broken

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, anything, refuse, short_help=str(broken), add_help_option=False)


def _pair(entry: EntryPoint) -> tuple[str, str]:
    with _of_package(entry):
        module, line = entry.load()
        return str(module), str(line)


@contextmanager
def _of_package(entry: EntryPoint) -> Iterator[None]:
    """One line for whatever another package raises: the other commands go on."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an error of another package must not stop gtrace's own commands
        package = entry.value if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{entry.name}: cannot load {package} ({reason}); update or uninstall it") from None


class LazyGroup(click.Group):
    """A group, with a ``table`` as in ``SUBCOMMANDS``, that imports a command's module only when the command is run."""

    def __init__(self, *args: Any, table: Mapping[str, tuple[str, str]], **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._table = table

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            click.echo(ctx.get_help())
            ctx.exit()
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(self._table[cmd_name][0]) if cmd_name in self._table else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # What other packages add is looked up only for a word that is not a command of this group.
        known = not args or args[0].startswith("-") or args[0] in self._table or args[0] in self.list_commands(ctx)
        if not known:
            ctx.fail(self.unknown(ctx, args[0]))
        return super().resolve_command(ctx, args)

    def unknown(self, ctx: click.Context, word: str) -> str:
        """The message about a word that is not a command of this group."""
        return f"'{word}' is not a command of {ctx.command_path}; {suggest(word, self._table)}"

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.line(name)) for name in self.list_commands(ctx)])

    def line(self, name: str) -> str:
        """The line of a command in the help."""
        return self._table[name][1]


class TopLevel(LazyGroup):
    """The top level: gtrace's own commands, those that other packages add, and names that groups took over."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *added_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        known = cmd_name in self._table or cmd_name not in added_commands()
        return super().get_command(ctx, cmd_name) if known else _load_added(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] in ALIASES:
            group, name = ALIASES[args[0]].split()
            return f"{group} {name}", load_command(SUBCOMMANDS[group][name][0]), args[1:]
        return super().resolve_command(ctx, args)

    def unknown(self, ctx: click.Context, word: str) -> str:
        if word in EXPERIMENTS:
            return f"'{word}' needs the experiments; {use_instead(word)}"
        for suffix, reader in _READERS.items():
            if word.rstrip("/").endswith(suffix):
                return f"'{word}' is not a command; did you mean gtrace {reader} {word}?"
        below = SUBCOMMANDS.items()
        words = {name: f"{group} {name}" for group, table in below for name in table if name not in COMMANDS}
        hint = suggest(word, [*self.list_commands(ctx), *words], words)
        return f"'{word}' is not a command{f'; {hint}' if hint.startswith('did') else ''}"

    def line(self, name: str) -> str:
        """The line of a command; of another package's, why if it cannot be loaded."""
        try:
            return super().line(name) if name in self._table else _pair(added_commands()[name])[1]
        except UsageError as error:
            return str(error)


def every_command() -> Iterator[tuple[str, click.Command]]:
    """The words behind ``gtrace`` of every command, and the command; those of a group follow it."""
    for name, (place, _) in COMMANDS.items():
        yield name, load_command(place)
        for word, (below, _) in SUBCOMMANDS.get(name, {}).items():
            if word not in COMMANDS:
                yield f"{name} {word}", load_command(below)
    for name in added_commands():
        yield name, _load_added(name)


class CommandWithCommands(Command):
    """A command that has others below it: ``gtrace plan TRACE``, and ``gtrace plan show``."""

    def make_context(self, info_name: str | None, args: list[str], *rest: Any, **extra: Any) -> click.Context:
        table = SUBCOMMANDS[self.name or ""]
        if args and args[0] in table:
            chosen = load_command(table[args[0]][0])
            return chosen.make_context(f"{info_name} {args[0]}", args[1:], *rest, **extra)
        return super().make_context(info_name, args, *rest, **extra)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(
                [(f"{self.name} {word}", line) for word, (_, line) in SUBCOMMANDS[self.name or ""].items()]
            )


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
    return sorted({*built_in()[0], *(entry.name for entry in metadata.entry_points(group="gtrace.codecs"))})


def _completing(names: Callable[[], Iterable[str]]) -> Callable[..., list[str]]:
    """What completes one of some names."""

    def complete(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


complete_codec = _completing(lambda: (*_codecs(), *built_in()[1]))
complete_task = _completing(lambda: importlib.import_module("gtrace.training.tasks").task_names())
complete_figure = _completing(lambda: importlib.import_module("gtrace.report.figures").FIGURES)


def complete_spec(_context: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
    """A spec: prefixes with their colon, then a codec."""
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
