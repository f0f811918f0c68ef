"""docs/reliability.md names tests that exist, programs and fuzzing targets."""

import ast
import re
from pathlib import Path

import pytest
from fuzz.targets import MAKERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
TARGETS = PAGE.partition("| target | minutes |")[2]
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)))


def test_the_page_names_many():
    assert len(NAMED) > 40


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_named_test_exists(file, name):
    tree = ast.parse((ROOT / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_fuzzing_targets_of_the_table():
    """A codec that is new has not been fuzzed for long; all else has."""
    told = set(re.findall(r"^\| ([\w-]+) \| [\d.]+ \| [\d.]* \| [\d,]+ \|", TARGETS, re.MULTILINE))
    assert {name for name in MAKERS if not name.startswith("decoder-")} <= told <= set(MAKERS)
