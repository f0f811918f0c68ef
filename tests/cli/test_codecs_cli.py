"""The pages of codecs, whose words and examples can be read, and codecs of one's own in other commands."""

import json
import shlex

import pytest
from helpers_sweep import PLUGIN, write_trace

from gtrace.cli import gtrace
from gtrace.cli.codecs import describe
from gtrace.codecs import codec_class, codec_names, parse_spec, wrapper_names
from gtrace.codecs.spec import unregister
from gtrace.sweep import ResultStore

NAMES = [*codec_names(), *wrapper_names()]
HEADS = [
    "NAME", "SYNOPSIS", "DESCRIPTION", "FORMULA", "PARAMETERS", "NEEDS", "KIND", "CLOSED FORMS", "PAYLOAD",
    "WHAT TO EXPECT", "EXAMPLES", "SEE ALSO", "PAPER",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_everything(name, succeed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    cls, page = codec_class(name), describe(name)
    shown, _ = succeed("codecs", name)
    lines = shown.splitlines()
    assert [line for line in lines if line in HEADS] == HEADS
    assert ("CORRECTIONS" in lines) == bool(cls.corrections)
    assert max(map(len, lines)) <= 80 + 24  # a spec with all its defaults has no place to break but its commas
    for parameter in page["parameters"]:
        assert f"    {parameter['name']}=" in shown
        assert parameter["help"]
    assert all(vars(cls)[word] for word in ("about", "sends", "behavior", "related"))
    assert all(len(page[part].split()) > 2 for part in ("payload", "expect", "needs"))
    assert set(page["see"]) <= {*NAMES} - {name}


@pytest.mark.parametrize("name", NAMES)
def test_synopsis_and_examples_are_understood(name):
    page = describe(name)
    defaults = page["synopsis"].removesuffix(":CODEC").replace("[", "").replace("]", "")
    made = parse_spec(defaults + ":none" if page["prefix"] else defaults)
    assert name in (made.name, *(wrapper for wrapper, _ in made.wrappers))
    for line in page["examples"]:
        program, command, *words = shlex.split(line)
        assert program == "gtrace"
        found = gtrace.get_command(None, command)
        if command == "study":
            found = found.get_command(None, words.pop(0))
        given = found.make_context(command, words).params
        parse_spec(given.get("methods") or given.get("codec") or given["codecs"][0])


@pytest.fixture
def half(folder):
    """A file with a codec, which later tests of this process must not see."""
    (folder / "half.py").write_text(PLUGIN)
    write_trace(folder / "run.zarr", steps=(0, 1))
    yield
    unregister("half")


def test_two_plain_functions_are_a_codec_of_every_command(succeed, half, tmp_path):
    page, _ = succeed("codecs half --plugin half.py")
    assert "FROM\n    half.py" in page
    assert "PAYLOAD" not in page
    assert "gtrace sweep run.zarr --methods half --plugin half.py\n" in page
    out, _ = succeed("sweep run.zarr --plugin half.py --methods half --json")
    assert json.loads(out)["codecs"] == ["half"]
    rows = ResultStore.load(tmp_path / "run.sweep.db")
    assert set(rows["bits_payload"]) == {16.0}
    assert 0 < max(rows["relative_variance"]) < 1e-5
    out, _ = succeed("train --codec half --plugin half.py --task digits-mlp --steps 3 --json")
    assert json.loads(out)["runs"][1]["run"] == "half"


def test_a_class_without_words_has_a_page_without_empty_parts(succeed, tmp_path):
    (tmp_path / "bare.py").write_text("""
from dataclasses import dataclass
from gtrace.codecs import Fp16

@dataclass(frozen=True)
class Bare(Fp16):
    name = "bare"
    summary = formula = paper = ""
""")
    page, _ = succeed("codecs bare:some=1 --plugin bare.py")
    unregister("bare")
    assert page.startswith("NAME\n    bare\n\nSYNOPSIS\n    bare\n")
    assert not {"DESCRIPTION", "FORMULA", "PAPER"} & set(page.splitlines())


def test_a_broken_plugin_is_one_line(refuse, tmp_path):
    write_trace(tmp_path / "run.zarr", steps=(0,))
    (tmp_path / "bad.py").write_text("x = 1\nraise RuntimeError('no')\n")
    sweep = "sweep run.zarr --methods none --plugin"
    assert refuse(f"{sweep} bad.py", code=5) == "gtrace: plugin bad.py, line 2: RuntimeError: no\n"
    refuse(f"{sweep} missing.py")
