"""Claims of README and docs that a program can check."""

import re
import tomllib
from pathlib import Path

import pytest

from gtrace.cli import COMMANDS, gtrace
from gtrace.codecs import codec_class, codec_names, wrapper_names
from gtrace.report import figure_names

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", [*codec_names(), *wrapper_names()])
def test_readme_lists_every_codec_with_its_own_summary(name):
    shown = f"`{name}:`" if name in wrapper_names() else f"`{name}`"
    assert f"| {shown} | {codec_class(name).summary} |" in README


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_named_in_readme_or_changelog(name):
    assert f"gtrace {name}" in README + (ROOT / "CHANGELOG.md").read_text()


def test_python_of_the_readme_runs(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    out = capsys.readouterr().out.split()
    assert 0 < float(out[0]) < 1
    assert out[-3:] == ["bits", "per", "coordinate"]


def test_links_between_documents_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
    "line", re.findall(r"^    gtrace (.+)$", (ROOT / "docs" / "cluster.md").read_text(), re.MULTILINE)
)
def test_commands_about_clusters_are_understood(line):
    name, *words = line.split()
    gtrace.get_command(None, name).make_context(name, words)


def test_extras_that_pages_name_are_there():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert set(re.findall(r"gtrace\[(\w+)\]", page.read_text())) <= set(extras)


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
