"""Stored results of experiments that are damaged or forged are refused in one line."""

import json
import math
import os

import pytest

from gtrace.errors import TraceError
from gtrace_experiments.reproduce.experiment import Chart, Check, Curve, Outcome, Panel, Result, Table
from gtrace_experiments.reproduce.runner import read_result, write_result

CURVE = Curve("a", (1, 2.5, "three"), (0.5, math.nan, 1), low=(0.0, 0.0, 0.0), form="points")
OUTCOME = Outcome(
    checks=(Check("claim", "criterion", "measured", True),),
    tables=(Table("t", ("x", "y"), ((1, "a"), (None, 0.5))),),
    charts=(Chart((Panel((CURVE,), lines=(("full precision", 0.5),)),), "caption"),),
    data="made up",
    notes=("note",),
)
RESULT = Result("made-up", OUTCOME, seed=0, quick=True, digest="0" * 16, versions={"python": "3"}, cpu_seconds=1.5)


@pytest.fixture
def path(tmp_path):
    write_result(tmp_path / "made-up.json", RESULT)
    return tmp_path / "made-up.json"


def refused(path, words):
    with pytest.raises(TraceError) as error:
        read_result(path)
    assert str(error.value).isprintable()
    assert words in str(error.value)


def test_a_field_with_a_default_may_be_missing(path):
    saved = json.loads(path.read_text())
    del saved["outcome"]["tables"][0]["note"]
    path.write_text(json.dumps(saved))
    assert read_result(path).outcome.tables == RESULT.outcome.tables


_CURVE = "outcome charts 0 panels 0 curves 0"


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("version", 2, "another version"),
        ("seed", "0", ".seed is of another type"),
        ("versions", ["python"], ".versions"),
        ("outcome checks 0", {"claim": "x"}, ".outcome.checks has other fields"),
        ("outcome tables 0 rows 0 0", {"x": 1}, ".rows"),
        ("outcome tables 0 rows 0", [1], "a row has 1 cells"),
        (f"{_CURVE} y 0", "high", ".y"),
        (f"{_CURVE} form", "exec", ".form"),
        (f"{_CURVE} y 0", 10**400, "too large"),
        ("outcome charts 0 panels 0 lines 0", ["x"], "shorter"),
        ("outcome more", 1, ".outcome has other fields"),
    ],
)
def test_forged_fields(place, value, words, path):
    saved = part = json.loads(path.read_text())
    *way, last = (int(word) if word.isdigit() else word for word in place.split())
    for name in way:
        part = part[name]
    part[last] = value
    path.write_text(json.dumps(saved))
    refused(path, words)


@pytest.mark.parametrize("text", ["", "[1]", "null", "{}", '"\x1b[2J"', "[" * 100_000])
def test_what_is_no_result(text, path):
    path.write_text(text)
    refused(path, "not the result of an experiment")


def test_what_is_no_file_or_too_large_is_not_read(path, tmp_path):
    os.truncate(path, 100 * 2**30)
    refused(path, "too large")
    os.mkfifo(tmp_path / "pipe.json")
    refused(tmp_path / "pipe.json", "no file")
