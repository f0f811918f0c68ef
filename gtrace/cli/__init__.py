"""The command line. Only click is imported here; each command's module is loaded when it is called."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from gtrace import __version__
from gtrace.errors import EXIT_INTERRUPTED, GtraceError, suggest

if TYPE_CHECKING:
    from collections.abc import Sequence

#: command -> (module that defines it as ``command``, its line in ``gtrace --help``), in the order of use.
COMMANDS = {
    "demo": ("gtrace.cli.demo", "Capture, sweep, train and report on a shipped sample."),
    "capture": ("gtrace.cli.capture", "Run a training script and record its gradients."),
    "info": ("gtrace.cli.info", "Say what is in a trace."),
    "formats": ("gtrace.cli.formats", "Choose a float format for every layer of a trace."),
    "check": ("gtrace.cli.check", "Verify every value of a trace, and repair it."),
    "pack": ("gtrace.cli.pack", "Rewrite a trace into fewer files, or as HDF5."),
    "sketch": ("gtrace.cli.sketch", "Make a small trace of sketches from a full one."),
    "sweep": ("gtrace.cli.sweep", "Measure codecs on a trace."),
    "report": ("gtrace.cli.report", "Turn results into tables, plots and a page."),
    "train": ("gtrace.cli.train", "Train with a codec on the gradients."),
    "import": ("gtrace.cli.import_", "Make a trace of arrays that other programs stored."),
    "export": ("gtrace.cli.export", "Write a trace as npz, safetensors or Parquet."),
    "codecs": ("gtrace.cli.codecs", "List the codecs, or explain one."),
}


class LazyGroup(click.Group):
    """A group that imports a command's module only when that command is run."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(COMMANDS[cmd_name][0]).command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            ctx.fail(f"no command '{args[0]}'; {suggest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


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
    except click.exceptions.Abort:
        click.echo("gtrace: interrupted; what was finished is kept", file=stderr)
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        where = f" ({context.command_path} --help shows the options)" if context else ""
        click.echo(f"gtrace: {error.format_message()}{where}", file=stderr)
        code = error.exit_code
    except GtraceError as error:
        click.echo(f"gtrace: {error}", file=stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        click.echo("gtrace: interrupted; what was finished is kept", file=stderr)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (head, less) went away: not an error, and nothing may be printed any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)
