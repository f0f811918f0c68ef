"""docs/reliability.md names tests that exist, programs and fuzzing targets."""

import ast
import json
import re
from pathlib import Path

import pytest
from fuzz.targets import MAKERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_the_page_names_many():
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_fuzzing_targets_of_the_table():
    """A codec that is new has not been fuzzed for long; all else has."""
    told = {run["target"] for run in json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())}
    assert {name for name in MAKERS if not name.startswith("decoder-")} <= told <= set(MAKERS)
