"""The site builds without a warning, its links lead somewhere, and everything public has its place."""

import html
import importlib
import re
import subprocess
import sys
from urllib.parse import unquote, urldefrag

import click
import pytest
from helpers_docs import DOCS, ROOT

import gtrace
from gtrace.cli import gtrace as cli
from gtrace.cli.groups import every_command
from gtrace.codecs import codec_names, wrapper_names

#: as they are before other tests of this process register codecs of their own
CODECS = codec_names()
#: names that are public by the modules that users import them from
MODULES = ("capture", "codecs", "fitting", "planning", "report", "sweep", "trace", "training")
#: names beyond those, which users were promised
PROMISED = (
    *("gtrace.codecs.mcgq.counts", "gtrace.codecs.mcgq.decode_counts", "gtrace.codecs.fp.optimal_format"),
    *("gtrace.distributions.TruncatedNormalMixture", "gtrace.testing.check_codec", "gtrace.types.Key.derive"),
    *("gtrace.MomentSketch.probabilities", "gtrace.errors.TraceError", "gtrace.runlog.read_runlog"),
)


def words(text):
    """Text without markup and without what a browser's layout adds."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).replace("¶", " ").split())


def test_the_site_builds_without_a_warning_and_has_everything(tmp_path):
    """One test, since one build of the site is enough."""
    pytest.importorskip("sphinx", reason="the docs group is not installed: pip install 'gradtrace[docs]'")
    pytest.importorskip("myst_parser", reason="the docs group is not installed: pip install 'gradtrace[docs]'")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-n", "-b", "html"]
    site = tmp_path / "html"
    command += ["-d", str(tmp_path / "doctrees"), str(DOCS), str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    check_links(site, pages)
    for name, _ in every_command():
        assert f'<section id="gtrace-{name.replace(" ", "-")}">' in pages["reference/cli.html"], name
    check_api(" ".join(text for name, text in pages.items() if name.startswith("reference/api/")))
    for name in (*CODECS, *wrapper_names()):
        assert f'<section id="{name}">' in pages["reference/codecs.html"], name


def check_links(site, pages):
    """Every link leads somewhere, and nothing is fetched from elsewhere."""
    anchors = {name: set(re.findall(r'id="([^"]+)"', text)) for name, text in pages.items()}
    count = 0
    for name, text in pages.items():
        for kind, target in re.findall(r'(href|src)="([^"]+)"', text):
            if re.match(r"(https?:)?//", target):
                assert kind == "href", f"{name} fetches {target}"
                continue
            if target.startswith(("mailto:", "data:")):
                continue
            file, fragment = urldefrag(unquote(target))
            found = (site / name).parent / file.partition("?")[0] if file else site / name
            assert found.exists(), f"{name}: {target}"
            to = str(found.resolve().relative_to(site.resolve()))
            if fragment and to in anchors:
                assert fragment in anchors[to], f"{name}: {target}"
            count += 1
    assert count > 1000


def check_api(text):
    """Every public name has its entry."""
    for module in ("", *MODULES):
        for name in importlib.import_module(f"gtrace.{module}" if module else "gtrace").__all__:
            if name in (*MODULES, "__version__", "COLUMNS", "EXPECTATION"):
                continue
            full = f"gtrace.{module}.{name}" if module and name not in gtrace.__all__ else f"gtrace.{name}"
            listed = f">{name}</span></code></p></td>" if module == "codecs" else "\0"
            assert f'id="{full}"' in text or listed in text, full
    for name in PROMISED:
        assert f'id="{name}"' in text, name


def test_exit_codes_are_those_of_the_program():
    text = (DOCS / "reference" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", text, re.MULTILINE)
    codes = {value for name, value in vars(gtrace.errors).items() if name.startswith("EXIT_")}
    assert {int(code) for code, _ in rows} == codes
    for code, raised in rows:
        for name in re.findall(r"`(\w+Error)`", raised):
            assert getattr(gtrace.errors, name).exit_code == int(code)
