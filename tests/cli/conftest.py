"""Commands as a user types them, run in this process."""

import sys
from typing import NamedTuple

import pytest

from gtrace.cli import main

#: a script that trains so many steps, 4 by default, and ends with the code of its second argument
PROGRAM = """
import sys, torch
from torch import nn
print("the script began")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
truth = torch.randn(40, 5)
for step in range(int(sys.argv[1]) if sys.argv[1:] else 4):
    x = torch.randn(32, 40)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), (x @ truth).argmax(1)).backward()
    optimizer.step()
print("the script ended")
sys.exit(int(sys.argv[2]) if len(sys.argv) > 2 else 0)
"""


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
def script(folder):
    """The program as ``train.py``."""
    (folder / "train.py").write_text(PROGRAM)


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
