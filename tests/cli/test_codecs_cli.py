"""The pages of codecs: every one has everything, and what they print can be run."""

import shlex

import pytest
from click.testing import CliRunner

from gtrace.cli import gtrace
from gtrace.cli.codecs import describe
from gtrace.codecs import codec_class, codec_names, parse_spec, wrapper_names
from gtrace.codecs.spec import unregister

NAMES = [*codec_names(), *wrapper_names()]
HEADS = [
    "NAME", "SYNOPSIS", "DESCRIPTION", "FORMULA", "PARAMETERS", "NEEDS", "KIND", "CLOSED FORMS", "PAYLOAD",
    "WHAT TO EXPECT", "EXAMPLES", "SEE ALSO", "PAPER",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_codec_has_words_of_its_own(name):
    own = vars(codec_class(name))
    assert all(own[word] for word in ("about", "sends", "behavior", "related"))


@pytest.mark.parametrize("name", NAMES)
def test_a_page_says_everything(name):
    shown = CliRunner(env={"COLUMNS": "80"}).invoke(gtrace, ["codecs", name]).output
    lines = shown.splitlines()
    assert [line for line in lines if line in HEADS] == HEADS
    assert ("CORRECTIONS" in lines) == bool(codec_class(name).corrections)
    assert max(map(len, lines)) <= 80 + 24  # a spec with all its defaults has no place to break but its commas
    for parameter in describe(name)["parameters"]:
        assert f"    {parameter['name']}=" in shown
        assert parameter["help"]


@pytest.mark.parametrize("name", NAMES)
def test_words_about_a_codec_lead_somewhere(name):
    page = describe(name)
    assert page["see"]
    assert name not in page["see"]
    assert set(page["see"]) <= set(NAMES)
    assert all(len(page[part].split()) > 2 for part in ("payload", "expect", "needs"))
    defaults = page["synopsis"].removesuffix(":CODEC").replace("[", "").replace("]", "")
    made = parse_spec(defaults + ":none" if page["prefix"] else defaults)
    assert name in (made.name, *(wrapper for wrapper, _ in made.wrappers))


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_are_understood(name, monkeypatch):
    for line in describe(name)["examples"]:
        program, command, *words = shlex.split(line)
        assert program == "gtrace"
        found = gtrace.get_command(None, command)
        if command == "study":
            found = found.get_command(None, words.pop(0))
        context = found.make_context(command, words)
        given = context.params.get("methods") or context.params.get("codec") or context.params["codecs"][0]
        parse_spec(given)


def test_a_file_of_ones_own_has_a_page_too(tmp_path):
    (tmp_path / "half.py").write_text(
        "def compress(values):\n    return values.tobytes()\n\n"
        "def decompress(data, size):\n    import numpy as np\n    return np.frombuffer(data, 'f4')\n"
    )
    try:
        done = CliRunner().invoke(gtrace, ["codecs", "half", "--plugin", str(tmp_path / "half.py")])
    finally:
        unregister("half")
    assert done.exit_code == 0
    assert "FROM\n    half.py" in done.output
    assert "PAYLOAD" not in done.output
