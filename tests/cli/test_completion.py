"""What a shell offers after TAB, and that it is offered fast."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from gtrace.cli import groups, gtrace
from gtrace.codecs import codec_names, wrapper_names
from gtrace.report import figure_names
from gtrace.training import task_names

#: as they are before other tests of this process register codecs of their own
CODECS = codec_names()


def offered(*words):
    *before, last = words
    found = ShellComplete(gtrace, {}, "gtrace", "_GTRACE_COMPLETE").get_completions(list(before), last)
    return [item.value for item in found]


def test_commands_and_options():
    assert offered("sw") == ["sweep"]
    assert offered("") == gtrace.list_commands(None)
    assert "--methods" in offered("sweep", "--me")
    assert "--quick" in offered("bench", "--")


def script_of(shell):
    asked = {**os.environ, "_GTRACE_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-m", "gtrace"], capture_output=True, text=True, check=False, env=asked)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(("shell", "does"), [("zsh", "compdef _gtrace_completion gtrace"), ("fish", "complete --no-f")])
def test_each_shell_gets_its_script(shell, does):
    script = script_of(shell)
    assert f"_GTRACE_COMPLETE={shell}_complete" in script
    assert does in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_its_script(tmp_path):
    program = tmp_path / "gtrace"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gtrace "$@"\n')
    program.chmod(0o755)
    (tmp_path / "complete.bash").write_text(script_of("bash"))
    typed = (
        "source complete.bash; COMP_WORDS=(gtrace sw); COMP_CWORD=1; _gtrace_completion gtrace; echo ${COMPREPLY[@]}"
    )
    asked = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", typed], capture_output=True, text=True, check=False, env=asked, cwd=tmp_path)
    assert done.stdout == "sweep\n", done.stderr


def test_names_are_those_that_there_are():
    assert groups.built_in() == (sorted(CODECS), sorted(wrapper_names()))
    assert offered("report", "--figure", "") == figure_names()
    assert offered("codecs", "qs") == ["qsgd", "qsgdinf"]
    assert offered("codecs", "rot") == ["rotate"]
    assert offered("train", "--task", "") == list(task_names())
    assert offered("report", "--figure", "rate") == ["rate-distortion"]


@pytest.mark.parametrize(
    "words", [("sweep", "x.zarr", "--methods"), ("plan", "x.zarr", "--methods"), ("train", "--codec"), ("bench",)]
)
def test_specs_are_completed_behind_prefixes(words):
    assert offered(*words, "ef:qs") == ["ef:qsgd", "ef:qsgdinf"]
    assert offered(*words, "rota") == ["rotate:"]
    assert offered(*words, "qsgd:b") == []


def test_lists_of_specs_are_completed_at_their_end():
    assert offered("sweep", "x.zarr", "--methods", "qsgd,ef:top") == ["qsgd,ef:topk", "qsgd,ef:topk-prune"]
    assert offered("sweep", "x.zarr", "--methods", "al")[-1] == "all"
    assert "all" not in offered("train", "--compare", "al")


def test_the_page_offers_what_the_program_offers():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| `gtrace (.+?)` \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for typed, named in rows:
        assert offered(*typed.split()) == re.findall("`(.+?)`", named), typed


def test_a_tab_imports_nothing_heavy():
    lines = [
        ["sw"], ["sweep", "x", "--methods", "ef:q"], ["codecs", "q"], ["train", "--task", "d"],
        ["report", "--figure", "r"], ["bench", "q"], ["train", "--codec", "q"],
    ]  # fmt: skip
    code = (
        "import json, sys\nfrom click.shell_completion import ShellComplete\nfrom gtrace.cli import gtrace\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    found = ShellComplete(gtrace, {}, 'gtrace', 'X').get_completions(words[:-1], words[-1])\n"
        "    assert found, words\n"
        "loaded = {'numpy', 'numba', 'torch', 'matplotlib', 'rich', 'zarr'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(lines)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
