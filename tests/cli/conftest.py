"""Commands as a user types them, run in this process."""

import sys
from typing import NamedTuple

import pytest

from gtrace.cli import main


class Done(NamedTuple):
    """How a command ended, as of a process."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder that commands run in, which is the test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("COLUMNS", raising=False)
    return tmp_path


@pytest.fixture
def call(folder, monkeypatch, capfd):
    """Run ``gtrace`` with a line of words, and with arguments that are taken as they are."""

    def run(line, *arguments):
        words = [*filter(None, line.split(" ")), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", ["gtrace", *words])
        with pytest.raises(SystemExit) as ended:
            main(words)
        return Done(ended.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def succeed(call):
    """Run ``gtrace`` with words that it takes: its stdout and stderr."""

    def run(*arguments):
        done = call(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr

    return run


@pytest.fixture
def refuse(call):
    """Run ``gtrace`` with words that it refuses in one line, which this returns."""

    def run(*arguments, code=2):
        done = call(*arguments)
        assert (done.returncode, done.stdout) == (code, ""), done.stderr
        assert done.stderr.startswith("gtrace: ")
        assert done.stderr.count("\n") == 1
        return done.stderr

    return run
