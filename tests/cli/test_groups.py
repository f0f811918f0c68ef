"""The words after gtrace: commands, those of other packages, and what a shell offers after TAB."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner
from helpers_installed import write_package

from gtrace.cli import groups, gtrace
from gtrace.cli.groups import ALIASES, COMMANDS, added_commands, every_command
from gtrace.codecs import codec_names, wrapper_names
from gtrace.report import figure_names
from gtrace.training import task_names

LIGHT = """
import sys
from click.shell_completion import ShellComplete
from gtrace.cli import gtrace, main
heavy = {"numpy", "numba", "torch", "zarr", "h5py", "matplotlib", "scipy", "rich"}
for line in ("--help", "--version", "capture --help", "sweep --help", "train --help", "report -h"):
    try:
        main(line.split())
    except SystemExit as end:
        assert not end.code, line
    assert not heavy & set(sys.modules), line
for line in (
    "sw", "sweep x --methods ef:q", "codecs q", "train --task d", "report --figure r", "bench q", "train --codec q"
):
    *before, last = line.split()
    assert ShellComplete(gtrace, {}, "gtrace", "X").get_completions(before, last), line
    assert not heavy & set(sys.modules), line
"""


def test_help_and_a_tab_load_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("name", "command"), [*every_command()], ids=str)
def test_every_command_has_help_with_an_example_and_ends_with_how_to_see_more(name, command):
    text = f"{command.help}\n{command.epilog or ''}"
    assert re.search(rf"(Examples?|Afterwards):\s+(gtrace|torchrun).*\b{name}\b", text)
    done = CliRunner().invoke(gtrace, [*name.split(), "--help"])
    assert done.exit_code == 0
    shown = done.output.count("\n  -")
    every = CliRunner().invoke(gtrace, [*name.split(), "--help-all"])
    if every.exit_code:
        assert shown <= 12 or name in added_commands()
        return
    more = every.output.count("\n  -") - shown
    assert done.output.endswith(f"\n{more} more option{'s' * (more > 1)}: gtrace {name} --help-all\n")
    assert shown <= 13


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_help_names_every_command_in_the_order_of_use(arguments):
    done = CliRunner().invoke(gtrace, arguments)
    assert done.exit_code == 0
    listed = re.findall(r"^  ([a-z]+)  ", done.output.partition("Commands:\n")[2], re.MULTILINE)
    assert listed[: len(COMMANDS)] == list(COMMANDS)


@pytest.mark.parametrize("name", ALIASES)
def test_earlier_names_of_commands_are_still_read(name):
    done = CliRunner().invoke(gtrace, [name, "--help"])
    assert (done.exit_code, done.output.splitlines()[0].split()[1:4]) == (0, ["gtrace", *ALIASES[name].split()])


#: as they are before other tests of this process register codecs of their own
CODECS = codec_names()


def offered(*words):
    *before, last = words
    found = ShellComplete(gtrace, {}, "gtrace", "_GTRACE_COMPLETE").get_completions(list(before), last)
    return [item.value for item in found]


def script_of(shell):
    asked = {**os.environ, "_GTRACE_COMPLETE": f"{shell}_source"}
    done = subprocess.run([sys.executable, "-m", "gtrace"], capture_output=True, text=True, check=False, env=asked)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes_with_its_script(tmp_path):
    program = tmp_path / "gtrace"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gtrace "$@"\n')
    program.chmod(0o755)
    (tmp_path / "complete.bash").write_text(script_of("bash"))
    typed = "source complete.bash; COMP_WORDS=(gtrace sw); COMP_CWORD=1; _gtrace_completion gtrace"
    asked = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    command = ["bash", "-c", f"{typed}; echo ${{COMPREPLY[@]}}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=asked, cwd=tmp_path)
    assert done.stdout == "sweep\n", done.stderr


COMPLETED = {
    "sw": ["sweep"],
    "codecs qs": ["qsgd", "qsgdinf"],
    "codecs rot": ["rotate"],
    "report --figure rate": ["rate-distortion"],
    "sweep x.zarr --methods qsgd,ef:top": ["qsgd,ef:topk", "qsgd,ef:topk-prune"],
    "plan x.zarr --methods ef:qs": ["ef:qsgd", "ef:qsgdinf"],
    "train --codec rota": ["rotate:"],
    "bench qsgd:b": [],
}


@pytest.mark.parametrize("words", COMPLETED)
def test_a_word_is_completed(words):
    assert offered(*words.split()) == COMPLETED[words]


def test_names_are_those_that_there_are():
    assert groups.built_in() == (sorted(CODECS), sorted(wrapper_names()))
    assert offered("") == gtrace.list_commands(None)
    assert offered("report", "--figure", "") == figure_names()
    assert offered("train", "--task", "") == list(task_names())
    assert "--methods" in offered("sweep", "--me")
    assert offered("sweep", "x.zarr", "--methods", "al")[-1] == "all"
    assert "all" not in offered("train", "--compare", "al")


def test_the_page_offers_what_the_program_offers():
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "cli.md").read_text()
    rows = re.findall(r"^\| `gtrace (.+?)` \| (.+) \|$", page, re.MULTILINE)
    assert len(rows) == 7
    for typed, named in rows:
        assert offered(*typed.split()) == re.findall("`(.+?)`", named), typed


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install a package for one test: its entry points and a module."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(module, source, *names):
        entries = dict.fromkeys(names, f"{module}:COMMAND")
        write_package(tmp_path, "made-up", entries, {module: source}, group=groups.GROUP)
        groups.added_commands.cache_clear()

    yield write
    groups.added_commands.cache_clear()


def test_an_installed_command_is_listed_and_imported_only_when_it_is_run(install, call, refuse):
    """``--help`` imports the module of the pair, not that of the command."""
    install("made_up_pair", "COMMAND = ('made_up_command', 'Say hello.')", "greet", "sweep")
    listed = call("--help").stdout
    assert "  greet      Say hello.\n" in listed
    # gtrace's own commands win over others of their name.
    assert "  sweep      Measure compression methods on a trace.\n" in listed
    assert listed.count("  sweep ") == 1
    said = "greet: cannot load made-up 0.1 (ModuleNotFoundError: No module named 'made_up_command')"
    assert said in refuse("greet")
    assert "'gret' is not a command; did you mean greet" in refuse("gret")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('not\\ntoday')", "RuntimeError: not today"),
        ("", "AttributeError: module 'made_up_broken_1' has no attribute 'COMMAND'"),
        ("command = 3; COMMAND = (__name__, 'A line.')", "TypeError: its command is not a click command"),
    ],
)
def test_a_broken_package_is_one_line_and_stops_nothing_else(install, call, refuse, source, said, request):
    install(f"made_up_broken_{request.node.callspec.indices['source']}", source, "greet")
    err = refuse("greet", "--any", "thing")
    assert err.startswith("gtrace: greet: cannot load made-up 0.1 (")
    assert said in err
    assert "\n  greet " in call("--help").stdout
    assert call("codecs", "qsgd").returncode == 0
    assert offered("gr") == ["greet"]


@pytest.mark.parametrize("line", ["reproduce list", "linear", "train --task linear"])
def test_without_the_experiments_one_line_says_how_to_install_them(monkeypatch, refuse, line):
    monkeypatch.setattr(groups, "added_commands", dict)
    assert "pip install ./experiments in a clone of gtrace" in refuse(*line.split())
