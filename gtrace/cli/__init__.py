"""The command line. Only click is imported here; each command's module is loaded when it is called."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TextIO

import click
from click.shell_completion import shell_complete

from gtrace import __version__
from gtrace.cli.groups import COMMANDS, TopLevel
from gtrace.errors import EXIT_INTERRUPTED, EXIT_OK, GtraceError, UsageError, printable

if TYPE_CHECKING:
    from collections.abc import Sequence


#: which completion a shell asks for
_COMPLETE = "_GTRACE_COMPLETE"


@click.group(
    cls=TopLevel,
    table=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="gtrace COMMAND --help shows the options of a command, with an example.",
)
@click.version_option(__version__, prog_name="gtrace")
def gtrace() -> None:
    """Find out whether to compress the gradients of your training, with what, and at how many bits.

    \b
    A first look, and then your own training:
      gtrace demo                 everything on a shipped sample
      gtrace capture train.py     records train.zarr; the script runs unchanged
      gtrace sweep train.zarr     measures compression methods on it
      gtrace report               says which one to use, and what it costs
    """


def main(args: Sequence[str] | None = None) -> Any:
    """Run the command line; every error that is not a bug ends in one line on stderr and its exit code."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # It was closed. Else the next file that is opened takes its number, and what a child prints.
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - as long as the process
    stderr = sys.stderr  # a script that is captured may put something else in its place
    try:
        code = _run(sys.argv[1:] if args is None else [*args])
    except (click.exceptions.Abort, EOFError, KeyboardInterrupt) as error:
        # A terminal shows Ctrl-C as ^C: the message gets a line of its own.
        before = "" if isinstance(error, click.exceptions.Abort) else "\n"
        _say("interrupted; finished work is kept.", stderr, before)
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        shown = "commands" if context and isinstance(context.command, click.Group) else "options"
        where = f" ({context.command_path} --help shows the {shown})" if context else ""
        _say(f"{' '.join(error.format_message().split())}{where}", stderr)
        code = error.exit_code
    except GtraceError as error:
        _say(str(error), stderr)
        code = error.exit_code
    except BrokenPipeError:
        # The reader (head, less) has seen enough.
        code = _stop_printing()
    except OSError as error:
        code = _refused_by_the_system(error, stderr)
    try:
        # A captured script may have closed it, or put something in its place that has no such thing.
        getattr(None if getattr(sys.stdout, "closed", False) else sys.stdout, "flush", int)()
    except BrokenPipeError:
        # What was printed last was short enough to wait in a buffer.
        code = code or _stop_printing()
    except OSError as error:
        code = _refused_by_the_system(error, stderr)
    sys.exit(code if isinstance(code, int) else 0)


def _run(args: list[str]) -> Any:
    """What a command returns. Not by ``gtrace.main``, which gives a closed pipe an exit code of 1."""
    if wanted := os.environ.get(_COMPLETE):
        return shell_complete(gtrace, {}, "gtrace", _COMPLETE, wanted)
    try:
        with gtrace.make_context("gtrace", args) as context:
            return gtrace.invoke(context)
    except click.exceptions.Exit as end:
        return end.exit_code
    except SystemExit as end:
        # rich answers a closed pipe with an exit of its own.
        raise end.__context__ if isinstance(end.__context__, BrokenPipeError) else end from None


#: what the system may refuse whatever gtrace does: what could not be done, and what helps
_REFUSALS = (
    dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EFBIG), ("write", "free some space, or write somewhere else"))
    | dict.fromkeys((errno.EACCES, errno.EPERM), ("use it", "ask for the permission, or choose another place"))
    | {errno.EROFS: ("write", "choose another place"), errno.EIO: ("use it", "the disk or the network share fails")}
    | {errno.ENAMETOOLONG: ("use it", "choose a shorter name")}
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


#: characters of a message's beginning and end that are shown
_SHOWN = 2000


def _say(message: str, stderr: TextIO, before: str = "") -> None:
    """One line on stderr, in which nothing that a file said can act on a terminal."""
    text = printable(message)
    if len(text) > 2 * _SHOWN:
        text = f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"
    with suppress(OSError, ValueError):  # full, or closed by a captured script; the exit code says it, too
        click.echo(f"{before}gtrace: {text}", file=stderr)


def _stop_printing() -> int:
    """A closed pipe is a normal end; what is still in buffers goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
    return EXIT_OK
