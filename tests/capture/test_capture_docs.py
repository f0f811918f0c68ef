"""``docs/capture.md`` says what the code does, and ``docs/capture-matrix.md`` every case that a test is marked with."""

import re
from pathlib import Path

from helpers_styles import STYLES
from matrix import ROOT

import gtrace
from gtrace.capture.neural import _ROW_BYTES, MOST_CALLS
from gtrace.capture.options import MAX_ELEMENTS
from gtrace.cli.capture import command

MARK = re.compile(r'capture_case\(\s*"([^"]+)"')
PAGE = (Path(__file__).resolve().parents[2] / "docs" / "capture.md").read_text()


def test_its_python_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"<!-- run by: [^>]*-->\n```python\n(.*?)```", PAGE, re.DOTALL):
        exec(compile(code, "docs/capture.md", "exec"), {"__name__": "docs"})
    assert capsys.readouterr().out.splitlines() == [
        "SGD 0.9 32 100",
        "8",
        "[ 0  5 10 15] (1,)",
        "0 Linear [512 512 160] 300",
        "1 ReLU [512 512 160] 300",
        "2 Linear [160 160  50] 160",
        "['weight', 'bias'] [ 0 10 20 30 40 50 60 70 80 90]",
        "(20,)",
    ]
    assert gtrace.open_trace("run.zarr").attrs["model"] == "Linear"


def test_it_tells_every_option():
    options = {name for parameter in command.params for name in parameter.opts if name.startswith("-")}
    told = set(re.findall(r"`(--?[a-z-]+)", PAGE))
    assert options - {"--help-all"} <= told


def test_its_numbers_are_those_of_the_code():
    assert f"up to {MOST_CALLS};" in PAGE
    assert f"by default {MAX_ELEMENTS} " in PAGE
    assert f"at most\n{_ROW_BYTES >> 30} GiB while" in PAGE


def test_the_matrix_tells_every_marked_case():
    tests = Path(__file__).parent.parent
    marked = {name for path in tests.rglob("test_*.py") for name in MARK.findall(path.read_text())}
    rows = [
        line.split(" | ")
        for line in (ROOT / "docs" / "capture-matrix.md").read_text().splitlines()
        if line.startswith("| ")
    ]
    assert {row[0].removeprefix("| ") for row in rows[1:]} == marked | set(STYLES)
    assert {row[-1] for row in rows[1:]} == {"works |"}
    assert all(row[1].startswith("torch ") for row in rows[1:])
