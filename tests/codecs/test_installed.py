"""Codecs by entry point: found by name, loaded late, and never able to break gtrace."""

import sys

import pytest
from helpers_installed import write_package, write_sample

import gtrace
from gtrace.codecs import codec_class, plugins, split_specs
from gtrace.errors import ScriptError, UsageError

HALF = """
from dataclasses import dataclass
from gtrace.codecs import Fp16

@dataclass(frozen=True)
class Half(Fp16):
    name = "{name}"
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages; what is loaded from it is forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(plugins, "_INSTALLED", {})
    before = set(sys.modules)
    yield folder
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def test_a_codec_is_known_by_name_and_loaded_only_then(site):
    write_sample(site)
    assert "dither" in plugins.installed_names()
    assert "dither" not in gtrace.codec_names()
    assert split_specs("ef:dither,bits=3,qsgd") == ["ef:dither:bits=3", "qsgd"]
    assert "dither" not in sys.modules
    c = gtrace.codec("ef:dither:bits=3")
    assert str(c) == "ef:dither:bits=3"
    assert plugins.origin_of(type(c.inner)) == plugins.Origin("dither", "gtrace-dither 0.1", "dither:Dither")
    assert plugins.package_versions([c, gtrace.codec("qsgd")]) == {"gtrace-dither": "0.1"}
    assert "dither" not in gtrace.codec_names()
    with pytest.raises(UsageError, match=r"no codec 'dithre'; did you mean dither\?"):
        gtrace.codec("dithre")


@pytest.mark.parametrize(
    ("entry", "target", "source", "error", "said"),
    [
        ("mine", "nowhere:Half", "", ScriptError, "cannot load nowhere:Half: ModuleNotFoundError"),
        ("mine", "mod:Half", "x = (", ScriptError, r"SyntaxError: .* \(mod.py, line 1\)"),
        ("mine", "mod:dataclass", HALF.format(name="mine"), UsageError, "is not a codec class"),
        ("mine", "mod:Half", HALF.format(name="yours"), UsageError, "the name of its class is 'yours'"),
    ],
)
def test_a_broken_package_costs_one_line_and_nothing_else(site, entry, target, source, error, said):
    write_package(site, "broken", {entry: target}, {"mod": source})
    with pytest.raises(error, match=said) as caught:
        codec_class(entry)
    assert str(caught.value).startswith(f"codec {entry} of the package broken 0.1: ")
    assert "\n" not in str(caught.value)
    assert str(gtrace.codec("qsgd:bits=3")) == "qsgd:bits=3"


def test_names_of_gtrace_come_first_and_a_name_belongs_to_one_package(site):
    write_package(site, "thief", {"qsgd": "mod:Half"}, {"mod": HALF.format(name="qsgd")})
    assert codec_class("qsgd").__module__ == "gtrace.codecs.levels"
    assert plugins.installed_names() == ()
    for package in ("one", "two"):
        write_package(site, package, {"mine": f"mod_{package}:Half"}, {f"mod_{package}": HALF.format(name="mine")})
    with pytest.raises(UsageError, match=r"codec mine: one 0.1 and two 0.1 bring it; uninstall one"):
        codec_class("mine")
