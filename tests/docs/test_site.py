"""The site builds without a warning, its links lead somewhere, and everything public has its place."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from urllib.parse import unquote, urldefrag

import click
import pytest
from helpers_docs import DOCS, ROOT

import gtrace
from gtrace.cli import COMMANDS
from gtrace.cli import gtrace as cli
from gtrace.codecs import codec_names, wrapper_names
from gtrace.metrics import Comparison
from gtrace.sweep import COLUMNS

#: names that are public by the modules that users import them from
MODULES = ("capture", "codecs", "fitting", "online", "report", "sweep", "trace")
#: columns that say which row it is, and are no metrics
IDENTITY = ("tensor", "step", "codec", "draw", "method", "bits", "params", "n", "fitted_on", "note")


def words(text):
    """Text without markup and without what a browser's layout adds."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("¶", " ").split())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="the docs group is not installed: pip install 'gtrace[docs]'")
    pytest.importorskip("myst_parser", reason="the docs group is not installed: pip install 'gtrace[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]
    done = subprocess.run(
        [*command, "-d", str(out / "doctrees"), str(DOCS), str(out / "html")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="module")
def pages(site):
    return {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}


def test_every_link_leads_somewhere_and_nothing_is_fetched(site, pages):
    anchors = {path: set(re.findall(r'id="([^"]+)"', text)) for path, text in pages.items()}
    count = 0
    for path, text in pages.items():
        for kind, target in re.findall(r'(href|src)="([^"]+)"', text):
            if re.match(r"(https?:)?//", target):
                assert kind == "href", f"{path.name} fetches {target}"
                continue
            if target.startswith(("mailto:", "data:")):
                continue
            file, fragment = urldefrag(unquote(target))
            found = (path.parent / file.partition("?")[0]).resolve() if file else path
            assert found.exists(), f"{path.relative_to(site)}: {target}"
            if fragment and found in anchors:
                assert fragment in anchors[found], f"{path.relative_to(site)}: {target}"
            count += 1
    assert count > 1000


def test_the_reference_of_the_command_line_says_what_help_says(pages, site):
    text = pages[site / "reference" / "cli.html"]
    sections = dict(zip(*[iter(re.split(r'<section id="gtrace-([\w-]+)">', text)[1:])] * 2, strict=True))
    assert list(sections) == list(COMMANDS)
    for name, section in sections.items():
        command = cli.get_command(None, name)
        context = click.Context(command, info_name=name, parent=click.Context(cli, info_name="gtrace"))
        shown, spaceless = words(section), re.sub(r"\s", "", words(section))
        for line in command.get_help(context).splitlines():
            if "Show this message and exit." not in line:
                said = re.sub(r"\s", "", line.removeprefix("Usage:").removesuffix("Options:"))
                assert said in spaceless, (name, line)
        records = [record for p in command.params if (record := p.get_help_record(context))]
        assert len(re.findall("<tr", section)) == len(records) + 1
        assert "gtrace " + name in shown


def test_every_command_has_an_example_of_itself():
    for name in COMMANDS:
        command = cli.get_command(None, name)
        text = f"{command.help}\n{command.epilog or ''}"
        assert re.search(rf"Examples?:\s+(gtrace|torchrun).*\b{name}\b", text), name


@pytest.mark.parametrize("module", ("", *MODULES))
def test_every_public_name_is_in_the_reference(module, pages):
    api = " ".join(text for path, text in pages.items() if path.parent.name == "api")
    found = getattr(gtrace, module) if module in ("capture", "codecs", "fitting", "online", "report") else None
    names = gtrace.__all__ if not module else (found or __import__(f"gtrace.{module}", fromlist=["x"])).__all__
    for name in names:
        if name in (*MODULES, "__version__", "COLUMNS", "EXPECTATION"):
            continue
        full = re.escape(f"gtrace.{module}.{name}" if module and name not in gtrace.__all__ else f"gtrace.{name}")
        listed = f">{name}</span></code></p></td>" if module == "codecs" else "\0"
        assert re.search(rf'id="{full}"', api) or listed in api, f"{module}.{name}"


def test_names_that_are_promised_are_in_the_reference(pages):
    api = " ".join(text for path, text in pages.items() if path.parent.name == "api")
    for name in (
        *("gtrace.fitting.certified_levels", "gtrace.fitting.adaquant", "gtrace.fitting.objective"),
        *("gtrace.codecs.mcgq.counts", "gtrace.codecs.mcgq.decode_counts", "gtrace.codecs.fp.optimal_format"),
        *("gtrace.distributions.TruncatedNormalMixture", "gtrace.testing.check_codec", "gtrace.types.Key.derive"),
        *("gtrace.MomentSketch.probabilities", "gtrace.errors.TraceError", "gtrace.runlog.read_runlog"),
    ):
        assert f'id="{name}"' in api, name


def test_every_codec_has_a_section(pages, site):
    text = pages[site / "reference" / "codecs.html"]
    for name in (*codec_names(), *wrapper_names()):
        assert f'<section id="{name}">' in text, name
    parts = (DOCS / "concepts" / "codec-parts.md").read_text(encoding="utf-8")
    for name in codec_names():
        assert f"`{name}`" in parts, name
    payloads = (DOCS / "reference" / "payloads.md").read_text(encoding="utf-8")
    for name in codec_names():
        assert f"`{name}`" in payloads, name


def test_every_paper_names_its_codecs():
    text = " ".join(path.read_text(encoding="utf-8") for path in (DOCS / "papers").glob("*.md"))
    for name in codec_names():
        assert f"`{name}`" in text or name == "none", name


def test_every_metric_has_a_line():
    text = (DOCS / "reference" / "metrics.md").read_text(encoding="utf-8")
    for name in (*COLUMNS, *Comparison.__dataclass_fields__):
        if name not in IDENTITY:
            assert re.search(rf"^\|[^|]*`{name}`", text, re.MULTILINE), name


def test_exit_codes_are_those_of_the_program():
    text = (DOCS / "reference" / "exit-codes.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", text, re.MULTILINE)
    codes = {value for name, value in vars(gtrace.errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code, _ in rows} == codes
    for code, raised in rows:
        for name in re.findall(r"`(\w+Error)`", raised):
            assert getattr(gtrace.errors, name).exit_code == int(code)


def test_pages_name_files_that_exist():
    for path in DOCS.rglob("*.md"):
        for name in re.findall(
            r"\b((?:tests|benchmarks|gtrace|samples)/[\w/]+\.py)\b", path.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).is_file() or "NAME" in name, f"{path.name}: {name}"
