"""Claims of README and docs that a program can check."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

from gtrace.cli import gtrace
from gtrace.codecs import codec, codec_class, codec_names, wrapper_names
from gtrace.report import figure_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
#: as they are before other tests of this process register codecs of their own
NAMES = [*codec_names(), *wrapper_names()]


@pytest.mark.parametrize("name", NAMES)
def test_readme_lists_every_codec_with_its_own_summary(name):
    shown = f"`{name}:`" if name in wrapper_names() else f"`{name}`"
    assert f"| {shown} | {codec_class(name).summary} |" in README


def test_the_table_of_codecs_has_numbers():
    rows = re.findall(r"^\| `([\w-]+):?` \| .* \| .* \| (\S+) \| (\S+) \|$", README, re.MULTILINE)
    assert [name for name, *_ in rows] == NAMES
    for _, bits, error in rows:
        assert 0 < float(bits) <= 32
        assert float(error) >= 0


def test_the_program_that_writes_the_table_knows_every_codec():
    specs = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))["specs"]()
    assert [name for item in specs if (name := item.strip(":")) in NAMES] == NAMES
    for spec in specs.values():
        assert str(codec(spec)) or spec


@pytest.mark.parametrize("name", gtrace.list_commands(None))
def test_every_command_is_named_in_readme_or_changelog(name):
    assert f"gtrace {name}" in README + (ROOT / "CHANGELOG.md").read_text()


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_extras_that_pages_name_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert set(re.findall(r"gtrace\[(\w+)\]", page.read_text())) <= set(extras)


def test_layers_are_those_that_are_checked():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (layers,) = [c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["name"] == "Layers"]
    drawn = (ROOT / "docs" / "architecture.md").read_text().split("\n\n    cli\n")[1].split("\n\n")[0]
    assert ["cli", *(re.split(r" {3,}", line.strip())[0] for line in drawn.splitlines())] == layers
    told = re.search(r"^    (cli > .*?)\n\n", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL)[1]
    assert " ".join(told.split()).split(" > ") == layers


def test_the_two_commands_are_there():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in README
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_the_page_on_reports_lists_every_figure_by_its_name():
    page = (ROOT / "docs" / "reading-a-report.md").read_text()
    section = page.split("## The figures\n")[1].split("\n## ")[0]
    named = [
        name for line in re.findall(r"^- (`[^:]*`):", section, re.MULTILINE) for name in re.findall("`(.*?)`", line)
    ]
    assert sorted(named) == sorted(figure_names())
