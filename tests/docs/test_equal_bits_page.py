"""``docs/error-at-equal-bits.md``: every number of its words is one of its tables, or of the facts about its models."""

import json
import re
import sys

import pytest
from helpers_docs import DOCS, ROOT

from gtrace.report.names import number

RESULT = json.loads((ROOT / "benchmarks" / "results" / "reference-table.json").read_text())
PAGE = (DOCS / "error-at-equal-bits.md").read_text()


@pytest.fixture(scope="module")
def tables():
    pytest.importorskip("docutils", reason="the docs group is not installed: pip install 'gradtrace[docs]'")
    sys.path.insert(0, str(DOCS / "_ext"))
    try:
        from generated import MARK, equal_bits
    finally:
        sys.path.remove(str(DOCS / "_ext"))
    asked = [found[2].strip() for found in MARK.finditer(PAGE)]
    assert asked == ["leaders", "rotation", "levels", "families"]
    return {part: equal_bits(part) for part in asked}


def test_every_number_in_words_is_in_a_table(tables):
    shown = " ".join(tables.values())
    said = re.findall(r"(?<![\d.])\d+(?:\.\d+)?%", PAGE)
    assert len(said) > 5
    assert [number for number in said if number not in shown and number != "2%"] == []
    for name, one in RESULT["traces"].items():
        assert f"| `{name}` |" in PAGE
        assert f"{one['parameters']:,} parameters" in PAGE


def test_the_leader_is_the_least_of_those_without_bias(tables):
    errors = RESULT["traces"]["gpt"]["errors"]["huffman"]
    biased = RESULT["traces"]["gpt"]["biased"]
    error, label = min((row[2], label) for label, row in errors.items() if row[2] and label not in biased)
    (line,) = [line for line in tables["leaders"].splitlines() if line.startswith("| `gpt` | Huffman")]
    assert f"**`{label}`** {number(100 * error)}%" in line


def test_no_code_is_below_the_bound():
    rows = [row for one in RESULT["traces"].values() for row in one["entropy"] if row["bound"] is not None]
    assert rows
    for row in rows:
        assert row["bound"] < min(row["ecq"], row["qsgdinf"])
