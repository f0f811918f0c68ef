"""Every code block and command line of README and docs runs and prints what is shown, or says why it is not run."""

import io
import re
import sqlite3
from contextlib import chdir, closing, redirect_stdout

import click
import pytest
from helpers_docs import PAGES, ROOT, blocks, differs, provide, run_command

from gtrace.cli import gtrace
from gtrace.codecs import split_specs

BLOCKS = {page: blocks(page) for page in PAGES}
RUNNABLE = [page for page, found in BLOCKS.items() if any(b.is_shell or b.language in ("python", "sql") for b in found)]
KNOWN = ("not run: ", "run by: ", "with: ", "file: ", "numbers differ", "generated: ")


@pytest.mark.parametrize("page", RUNNABLE)
def test_blocks_run_and_print_what_is_shown(page, tmp_path, monkeypatch):
    # What runs tests in parallel sets it, and pages show what a pipe gets.
    monkeypatch.delenv("COLUMNS", raising=False)
    if page != "README.md":  # which is for an empty folder
        (tmp_path / "samples").symlink_to(ROOT / "samples")
    printed = ""
    with chdir(tmp_path):
        for block in BLOCKS[page]:
            where = f"{page}:{block.line}"
            if files := block.note("with"):
                provide(tmp_path, files)
            numbers = not any(note.startswith("numbers differ") for note in block.notes)
            if block.reason:
                continue
            if block.language == "python":
                both = io.StringIO()
                if name := block.note("file"):
                    (tmp_path / name).write_text(block.text, encoding="utf-8")
                    continue
                with redirect_stdout(both):
                    exec(compile(block.text, where, "exec"), {"__name__": "docs"})
                printed = both.getvalue()
            elif block.language == "sql":
                with closing(sqlite3.connect(block.note("with"))) as sql:
                    sql.execute(block.text).fetchall()
            elif block.language == "text" and printed:
                wrong = differs(block.text.splitlines(), printed.splitlines(), numbers=numbers)
                assert wrong is None, f"{where}: not printed:\n{wrong}\nbut:\n{printed}"
                printed = ""
            elif block.is_shell:
                for words, shown in block.commands:
                    assert words[0] == "gtrace", f"{where}: {words[0]} is not run; say why in a comment"
                    printed = run_command(words[1:])
                    if any(line.strip() for line in shown):
                        wrong = differs(shown, printed.splitlines(), numbers=numbers)
                        assert wrong is None, f"{where}: {' '.join(words)} does not print:\n{wrong}\nbut:\n{printed}"


@pytest.mark.parametrize("page", RUNNABLE)
def test_what_is_not_run_is_well_formed(page):
    for block in BLOCKS[page]:
        where = f"{page}:{block.line}"
        assert all(note.startswith(KNOWN) for note in block.notes), f"{where}: {block.notes}"
        if block.language == "python":
            compile(block.text, where, "exec")
        for name in re.findall(r"tests/[\w/]+\.py", block.reason or ""):
            assert (ROOT / name).is_file(), f"{where}: {name}"
        if block.reason and block.reason.startswith("run by: "):
            test = ROOT / block.reason.removeprefix("run by: ")
            assert page.rpartition("/")[2] in test.read_text(encoding="utf-8"), (
                f"{where}: {test} does not name the page"
            )
        if block.language in ("bash", "console", "fish", "python", "sh", "zsh"):
            assert block.language == "python" or block.commands or block.reason, f"{where}: not run; say why"
        if not block.is_shell:
            continue
        for words, _ in block.commands:
            if "gtrace" in words:  # perhaps behind a launcher
                check_words(words[words.index("gtrace") + 1 :], where)
            elif words[0] == "python":
                assert words[1].startswith("-") or (ROOT / words[1]).is_file(), f"{where}: {words[1]}"
            elif words[0] == "make":
                assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text(), f"{where}: make {words[1]}"


def check_words(words, where):
    """Commands exist, options are known, codecs can be parsed."""
    if words[0].startswith("-"):
        return
    command, rest = gtrace, list(words)
    while isinstance(command, click.Group):
        assert rest[0] in command.list_commands(None), f"{where}: {rest[0]}"
        command, rest = command.get_command(None, rest[0]), rest[1:]
    context = command.make_context(words[0], list(rest), resilient_parsing=True)
    known = {name for parameter in context.command.params for name in parameter.opts + parameter.secondary_opts}
    own = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    if not any(word.endswith(".py") for word in words):
        assert set(own) <= known | {"--help"}, f"{where}: {set(own) - known}"
    for option in ("--codec", "--compare", "--methods"):
        if option in words and words[0] != "linear":
            assert split_specs(words[words.index(option) + 1]), where


def test_blocks_are_found():
    assert len(RUNNABLE) > 10
    assert {"README.md", "docs/tutorial.md"} <= set(RUNNABLE)
    assert all("_build" not in page for page in PAGES)


def test_a_difference_is_found():
    printed = ["a 1.5", "b 2", "c"]
    for shown in (["a 1.5", "..."], ["...", "b 2", "..."], ["a ...", "b 2", "c"]):
        assert differs(shown, printed, numbers=True) is None
    for shown in (["b ...", "..."], ["b 2"], ["a 1.6", "..."]):
        assert differs(shown, printed, numbers=True) == shown[0]
    assert differs(["a 1.6", "..."], printed, numbers=False) is None
    assert differs(["a 1.6", "b 2", "d"], printed, numbers=False) is not None
