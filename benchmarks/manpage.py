"""Writes ``docs/gtrace.1``, the manual page that the wheel installs, from the table of commands.

python benchmarks/manpage.py
"""

from __future__ import annotations

from pathlib import Path

import gtrace
from gtrace import errors
from gtrace.cli.groups import COMMANDS, SUBCOMMANDS

FILE = Path(__file__).resolve().parents[1] / "docs" / "gtrace.1"
#: exit codes in the words of docs/reference/cli.md
CODES = {
    0: "done",
    1: "a bug of gtrace: a traceback",
    errors.EXIT_USAGE: "wrong usage",
    errors.EXIT_INPUT: "an input is missing, foreign or damaged, or a result could not be written",
    errors.EXIT_EXISTS: "refused to overwrite; --force replaces",
    errors.EXIT_SCRIPT: "the captured or trained script failed",
    errors.EXIT_INTERRUPTED: "interrupted; what was finished is kept",
}


def text(words: str) -> str:
    """Words of which roff reads none as a request."""
    return words.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("\n.", "\n\\&.")


def item(term: str, meaning: str) -> str:
    """An entry of a list."""
    return f".TP\n.B {text(term)}\n{text(meaning)}\n"


def made() -> str:
    """The page."""
    commands = []
    for name, (_, line) in COMMANDS.items():
        commands.append(item(name, line))
        commands += [item(f"{name} {sub}", said) for sub, (_, said) in SUBCOMMANDS.get(name, {}).items()]
    examples = (
        ("gtrace demo", "See all of it on a shipped sample, in a folder demo."),
        ("gtrace capture train.py", "Record the gradients of a script in train.zarr."),
        ("gtrace sweep train.zarr", "Measure eight methods; results are in train.sweep.db."),
        ("gtrace report", "Read the newest results of this folder."),
    )
    return "".join(
        [
            f'.\\" Made by benchmarks/manpage.py.\n.TH GTRACE 1 "" "gtrace {gtrace.__version__}"\n',
            ".SH NAME\ngtrace \\- measure what gradient compression would do to a training run\n",
            ".SH SYNOPSIS\n.B gtrace\n.I COMMAND\n[\\fIARGUMENTS\\fR]\n",
            ".SH DESCRIPTION\n",
            text(
                "gtrace records the gradients of a training run, replays them through compression methods, and says "
                "which one to use, at how many bits, or that none is needed. gtrace COMMAND --help has the common "
                "options of a command, --help-all has all.\n"
            ),
            ".SH COMMANDS\n",
            *commands,
            ".SH EXIT STATUS\n",
            *[item(str(code), meaning) for code, meaning in CODES.items()],
            ".SH FILES\n",
            item("SCRIPT.zarr", "a trace: a folder, which gtrace trace pack makes one file"),
            item("TRACE.sweep.db", "results of a sweep, an SQLite file"),
            item("gtrace.toml", "settings of a folder, such as cluster"),
            ".SH EXAMPLES\n",
            *[item(command, meaning) for command, meaning in examples],
        ]
    )


if __name__ == "__main__":
    FILE.write_text(made(), encoding="utf-8")
