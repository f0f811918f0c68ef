"""Claims of README and docs that a program can check: names, links, figures, numbers in words, and named tests."""

import ast
import json
import re
import tomllib

import pytest
from fuzz.targets import MAKERS
from helpers_docs import DOCS, ROOT

from gtrace.codecs import codec_class, codec_names, wrapper_names
from gtrace.report import figure_names
from gtrace.report.names import number

README = (ROOT / "README.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
#: as they are before other tests of this process register codecs of their own
NAMES = [*codec_names(), *wrapper_names()]


def test_readme_lists_every_codec_with_its_own_summary_and_numbers():
    rows = re.findall(r"^\| `([\w-]+):?` \| (.*) \| .* \| (\S+) \| (\S+) \|$", README, re.MULTILINE)
    assert [row[:2] for row in rows] == [(name, codec_class(name).summary) for name in NAMES]
    assert all(f"| `{name}:` |" in README for name in wrapper_names())
    for *_, bits, error in rows:
        assert 0 < float(bits) <= 32
        assert float(error) >= 0


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")], ids=str)
def test_links_files_and_extras_are_there(page):
    text = page.read_text()
    for name in re.findall(r"\b((?:tests|benchmarks|gtrace|samples)/[\w/]+\.py)\b", text):
        assert (ROOT / name).is_file() or "NAME" in name, name
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target
    extras = {name for listed in re.findall(r"gradtrace\[([\w,]+)\]", text) for name in listed.split(",")}
    assert extras <= set(PROJECT["project"]["optional-dependencies"])


def test_layers_are_those_that_are_checked():
    (layers,) = [c["layers"] for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"] == "Layers"]
    drawn = (DOCS / "architecture.md").read_text().split("\n\n    cli\n")[1].split("\n\n")[0]
    assert ["cli", *(re.split(r" {3,}", line.strip())[0] for line in drawn.splitlines())] == layers
    listed = re.search(r"^    (cli > .*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert " ".join(listed.split()).split(" > ") == layers


def test_the_page_on_reports_lists_every_figure_by_its_name():
    section = (DOCS / "reading-a-report.md").read_text().split("## The figures\n")[1].split("\n## ")[0]
    named = [name for line in re.findall(r"^- (`[^:]*`):", section, re.MULTILINE) for name in line.split("`")[1::2]]
    assert sorted(named) == sorted(figure_names())


#: tests that the page on reliability names
TESTS = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", (DOCS / "reliability.md").read_text())))


def test_tests_that_the_page_on_reliability_names_exist():
    assert len(TESTS) > 40
    for file, name in TESTS:
        tree = ast.parse((ROOT / file).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (file, name)


def test_fuzzing_targets_of_the_table():
    """A codec that is new has not been fuzzed for long; all else has."""
    fuzzed = {run["target"] for run in json.loads((ROOT / "benchmarks" / "results" / "fuzz.json").read_text())}
    assert {name for name in MAKERS if not name.startswith("decoder-")} <= fuzzed <= set(MAKERS)


EQUAL_BITS = json.loads((ROOT / "benchmarks" / "results" / "reference-table.json").read_text())["traces"]


def test_numbers_of_the_page_on_equal_bits_are_in_its_tables(monkeypatch):
    pytest.importorskip("docutils", reason="the docs group is not installed: pip install 'gradtrace[docs]'")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from generated import MARK, equal_bits

    page = (DOCS / "error-at-equal-bits.md").read_text()
    asked = [found[2].strip() for found in MARK.finditer(page)]
    assert asked == ["leaders", "rotation", "levels", "families"]
    tables = {part: equal_bits(part) for part in asked}
    said, shown = re.findall(r"(?<![\d.])\d+(?:\.\d+)?%", page), " ".join(tables.values())
    assert len(said) > 5
    assert [one for one in said if one not in shown and one != "2%"] == []
    for name, one in EQUAL_BITS.items():
        assert f"| `{name}` |" in page
        assert f"{one['parameters']:,} parameters" in page


def test_no_code_is_below_the_bound():
    rows = [row for one in EQUAL_BITS.values() for row in one["entropy"] if row["bound"] is not None]
    assert rows
    assert all(row["bound"] < min(row["ecq"], row["qsgdinf"]) for row in rows)
