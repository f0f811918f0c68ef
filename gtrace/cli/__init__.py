"""The command line. Only click is imported here; each command's module is loaded when it is called."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import click

from gtrace import __version__
from gtrace.errors import EXIT_INTERRUPTED, EXIT_OK, GtraceError, UsageError, printable, suggest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.metadata import EntryPoint
    from typing import TextIO

#: command -> (module that defines it as ``command``, its line in ``gtrace --help``), in the order of use.
COMMANDS = {
    "demo": ("gtrace.cli.demo", "Capture, sweep, train and report on a shipped sample."),
    "advise": ("gtrace.cli.advise", "Say whether to compress, with what, and what it costs: all in one go."),
    "capture": ("gtrace.cli.capture", "Run a training script and record its gradients."),
    "info": ("gtrace.cli.info", "Say what is in a trace."),
    "formats": ("gtrace.cli.formats", "Choose a float format for every layer of a trace."),
    "check": ("gtrace.cli.check", "Verify every value of a trace, and repair it."),
    "pack": ("gtrace.cli.pack", "Rewrite a trace into fewer files, or as HDF5."),
    "sketch": ("gtrace.cli.sketch", "Make a small trace of sketches from a full one."),
    "sweep": ("gtrace.cli.sweep", "Measure codecs on a trace."),
    "report": ("gtrace.cli.report", "Turn results into tables, plots and a page."),
    "plan": ("gtrace.cli.plan", "Choose a codec and bits for every tensor under a budget."),
    "train": ("gtrace.cli.train", "Train with a codec on the gradients."),
    "compare": ("gtrace.cli.compare", "Say which measure of the error predicts the loss of training."),
    "bench": ("gtrace.cli.bench", "Compare a codec of your own with every built-in one."),
    "import": ("gtrace.cli.import_", "Make a trace of arrays that other programs stored."),
    "export": ("gtrace.cli.export", "Write a trace as npz, safetensors or Parquet."),
    "codecs": ("gtrace.cli.codecs", "List the codecs, or explain one."),
}
#: entry points of packages that add commands; each names a pair as in COMMANDS, in a module that imports fast
GROUP = "gtrace.commands"
#: what the package gtrace-experiments adds
EXPERIMENTS = ("reproduce", "linear")


@cache
def added_commands() -> dict[str, EntryPoint]:
    """Commands of other installed packages, by name; nothing of theirs is imported."""
    from importlib import metadata

    return {entry.name: entry for entry in metadata.entry_points(group=GROUP) if entry.name not in COMMANDS}


def use_instead(name: str, arguments: str = "") -> str:
    """Which command of gtrace-experiments to use, and how to install it if it is missing."""
    missing = "" if name in added_commands() else "; first pip install ./experiments in a clone of gtrace"
    return f"use gtrace {name} {arguments}".rstrip() + missing


def command_line(name: str) -> str:
    """The line of a command in ``gtrace --help``; of another package's, why if it cannot be loaded."""
    if name in COMMANDS:
        return COMMANDS[name][1]
    try:
        return _pair(added_commands()[name])[1]
    except UsageError as error:
        return str(error)


def _load(name: str) -> click.Command:
    if name in COMMANDS:
        command = importlib.import_module(COMMANDS[name][0]).command
        assert isinstance(command, click.Command)
        return command
    entry = added_commands()[name]
    try:
        with _of_package(entry):
            command = importlib.import_module(_pair(entry)[0]).command
            if not isinstance(command, click.Command):
                raise TypeError("its command is not a click command")
            return command
    except UsageError as error:
        return _broken(name, error)


def _pair(entry: EntryPoint) -> tuple[str, str]:
    """What another package's entry point names: the module of a command, and its line in the help."""
    with _of_package(entry):
        module, line = entry.load()
        return str(module), str(line)


@contextmanager
def _of_package(entry: EntryPoint) -> Iterator[None]:
    """One line for whatever another package raises: the other commands go on.

    Raises:
        UsageError: the package cannot be loaded.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - an error of another package must not stop gtrace's own commands
        package = entry.value if entry.dist is None else f"{entry.dist.name} {entry.dist.version}"
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UsageError(f"{entry.name}: cannot load {package} ({reason}); update or uninstall it") from None


def _broken(name: str, error: UsageError) -> click.Command:
    """Stands in for a command that cannot be loaded: it lists and completes, and says why when it is run."""

    def refuse() -> None:
        raise error

    anything = {"ignore_unknown_options": True, "allow_extra_args": True}
    return click.Command(name, anything, refuse, short_help=str(error), add_help_option=False)


class _ReaderWentAwayError(Exception):
    """The reader of a pipe (head, less) has seen enough. Not an OSError, to which click gives an exit code of 1."""


@contextmanager
def _reader_may_leave() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _ReaderWentAwayError from None
    except SystemExit as end:
        # rich answers a closed pipe with an exit of its own.
        if isinstance(end.__context__, BrokenPipeError):
            raise _ReaderWentAwayError from None
        raise


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is run."""

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _reader_may_leave():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_leave():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, *added_commands()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return _load(cmd_name) if cmd_name in COMMANDS or cmd_name in added_commands() else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS and args[0] not in added_commands():
            if args[0] in EXPERIMENTS:
                ctx.fail(f"no command '{args[0]}' here; {use_instead(args[0])}")
            ctx.fail(f"no command '{args[0]}'; {suggest(args[0], self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command_line(name)) for name in self.list_commands(ctx)])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with: gtrace demo. Each command has --help with an example.",
)
@click.version_option(__version__, prog_name="gtrace")
def gtrace() -> None:
    """Record the gradients of a training run and measure what every gradient codec would do to them."""


def main(args: Sequence[str] | None = None) -> Any:
    """Run the command line; every error that is not a bug ends in one line on stderr and its exit code."""
    stderr = sys.stderr  # a script that is captured may put something else in its place
    try:
        code = gtrace.main(args=list(args) if args is not None else None, prog_name="gtrace", standalone_mode=False)
    except (click.exceptions.Abort, KeyboardInterrupt):
        _say("interrupted; what was finished is kept", stderr)
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" ({context.command_path} --help shows the options)" if context else ""
        _say(f"{' '.join(error.format_message().split())}{where}", stderr)
        code = error.exit_code
    except GtraceError as error:
        _say(str(error), stderr)
        code = error.exit_code
    except _ReaderWentAwayError:
        code = _stop_printing()
    except OSError as error:
        code = _refused_by_the_system(error, stderr)
    try:
        # What a captured script put in its place may have no such thing.
        getattr(sys.stdout, "flush", int)()
    except BrokenPipeError:
        # What was printed last was short enough to wait in a buffer.
        code = code or _stop_printing()
    except OSError as error:
        code = _refused_by_the_system(error, stderr)
    sys.exit(code if isinstance(code, int) else 0)


#: what the system may refuse whatever gtrace does: what could not be done, and what helps
_REFUSALS = (
    dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ("write", "free some space, or write somewhere else"))
    | dict.fromkeys((errno.EACCES, errno.EPERM), ("use it", "ask for the permission, or choose another place"))
    | {errno.EROFS: ("write", "choose another place"), errno.EIO: ("use it", "the disk or the network share fails")}
)


def _refused_by_the_system(error: OSError, stderr: TextIO) -> int:
    """Said in one line, whatever was being written; any other error of the system is a bug and is raised."""
    if error.errno not in _REFUSALS:
        raise error
    verb, remedy = _REFUSALS[error.errno]
    where = "" if error.filename is None else f"{error.filename}: "
    _say(f"{where}cannot {verb} ({error.strerror}); {remedy}", stderr)
    _stop_printing()
    return UsageError.exit_code


def _say(message: str, stderr: TextIO) -> None:
    """One line on stderr, in which nothing that a file said can act on a terminal."""
    click.echo(f"gtrace: {printable(message)}", file=stderr)


def _stop_printing() -> int:
    """A closed pipe is a normal end; what is still in buffers goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return EXIT_OK
