"""``docs/capture.md`` says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import gtrace
from gtrace.cli.capture import command

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "capture.md").read_text()


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    exec(compile(code, "docs/capture.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out == "['weight', 'bias'] [ 0 10 20 30 40 50 60 70 80 90]\n"
    assert gtrace.open_trace("run.zarr").attrs["model"] == "Linear"


def test_it_tells_every_option():
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
    told = set(re.findall(r"`(--?[a-z]+)", PAGE))
    assert options <= told
