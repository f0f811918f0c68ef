"""The words after gtrace: commands, those of other packages, and what a shell offers after TAB."""

import json
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

from gtrace import cli
from gtrace.cli import groups, gtrace
from gtrace.cli.groups import ALIASES, COMMANDS, added_commands, every_command
from gtrace.codecs import codec_names, wrapper_names
from gtrace.report import figure_names
from gtrace.training import task_names

HEAVY = ("numpy", "numba", "torch", "zarr", "h5py", "matplotlib", "scipy", "rich")


@pytest.mark.parametrize(
    "args",
    [["--help"], ["--version"], ["capture", "--help"], ["sweep", "--help"], ["train", "--help"], ["report", "-h"]],
)
def test_help_loads_click_and_nothing_heavy(args):
    code = (
        "import sys\nfrom gtrace.cli import main\n"
        f"try:\n    main({args!r})\nexcept SystemExit as e:\n    assert not e.code, e.code\n"
        f"loaded = [m for m in {HEAVY!r} if m in sys.modules]\nassert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [name for name, _ in every_command()])
def test_every_command_has_help_with_an_example_and_ends_with_how_to_see_more(name):
    done = CliRunner().invoke(gtrace, [*name.split(), "--help"])
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"gtrace {name}" in done.output
    shown = done.output.count("\n  -")
    every = CliRunner().invoke(gtrace, [*name.split(), "--help-all"])
    if every.exit_code:
        assert shown <= 12 or name in added_commands()
        return
    more = every.output.count("\n  -") - shown
    assert done.output.endswith(f"\n{more} more option{'s' * (more > 1)}: gtrace {name} --help-all\n")
    assert shown <= 13
    assert every.output.startswith(done.output.rpartition("\n\n")[0].rpartition("\n\n")[0][:200])


def test_train_has_at_most_32_options():
    assert CliRunner().invoke(gtrace, ["train", "--help-all"]).output.count("\n  -") <= 32


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


def test_a_wrong_option_or_a_missing_trace_is_one_line(refuse, tmp_path):
    assert "--mehtods" in refuse("sweep", "--mehtods", "all", "x")
    for command in ("info", "sweep"):
        assert "missing.zarr" in refuse(command, "missing.zarr", code=3)
    assert list(tmp_path.iterdir()) == []


def test_codecs_lists_and_explains(succeed, refuse):
    assert "qsgdinf" in succeed("codecs")[0]
    assert "Ramezani-Kebrya" in succeed("codecs", "nuqsgd")[0]
    assert "did you mean nuqsgd" in refuse("codecs", "nuqsdg")
    assert json.loads(succeed("codecs", "terngrad", "--json")[0])["name"] == "terngrad"


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


GREET = """import click

@click.command("greet")
@click.option("--name", default="you")
def command(name):
    print("hello", name)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Install packages for one test: their entry points and modules."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(entries, modules):
        write_package(tmp_path, "made-up", entries, modules, group=groups.GROUP)
        groups.added_commands.cache_clear()

    yield write
    groups.added_commands.cache_clear()


def call(*arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def test_an_installed_command_is_listed_and_run_and_imported_only_then(install, capsys):
    """``--help`` imports the module of the pair, not that of the command."""
    pair = "COMMAND = ('made_up_command', 'Say hello.')"
    install({"greet": "made_up_pair:COMMAND", "sweep": "made_up_pair:COMMAND"}, {"made_up_pair": pair})
    assert call("--help") == 0
    assert "  greet      Say hello.\n" in (listed := capsys.readouterr().out)
    # gtrace's own commands win over others of their name.
    assert "  sweep      Measure compression methods on a trace.\n" in listed
    assert listed.count("  sweep ") == 1
    assert call("greet") == 2
    assert "greet: cannot load made-up 0.1 (ModuleNotFoundError: No module named 'made_up_command')" in (
        capsys.readouterr().err
    )


def test_its_options_are_its_own(install, capsys):
    install(
        {"greet": "made_up_hello:COMMAND"}, {"made_up_hello": f"{GREET}\nCOMMAND = ('made_up_hello', 'Say hello.')"}
    )
    assert call("greet", "--name", "all") == 0
    assert capsys.readouterr().out == "hello all\n"
    assert call("greet", "--nmae", "all") == 2
    assert call("gret") == 2
    assert "'gret' is not a command; did you mean greet" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("raise RuntimeError('not\\ntoday')", "RuntimeError: not today"),
        ("", "AttributeError: module 'made_up_broken_1' has no attribute 'COMMAND'"),
        ("COMMAND = 3", "TypeError: "),
        ("COMMAND = ('math', 'A line.')", "AttributeError: module 'math' has no attribute 'command'"),
        ("command = 3; COMMAND = (__name__, 'A line.')", "TypeError: its command is not a click command"),
    ],
)
def test_a_broken_package_is_one_line_and_stops_nothing_else(install, capsys, source, said, request):
    module = f"made_up_broken_{request.node.callspec.indices['source']}"
    install({"greet": f"{module}:COMMAND"}, {module: source})
    assert call("greet", "--any", "thing") == 2
    err = capsys.readouterr().err
    assert err.startswith("gtrace: greet: cannot load made-up 0.1 (")
    assert said in err
    assert err.count("\n") == 1
    assert call("--help") == 0
    assert "\n  greet " in capsys.readouterr().out
    assert call("codecs", "qsgd") == 0
    complete = ShellComplete(cli.gtrace, {}, "gtrace", "_GTRACE_COMPLETE")
    assert [item.value for item in complete.get_completions([], "gr")] == ["greet"]


@pytest.mark.parametrize("arguments", [("--task", "svm"), ("svm",)])
def test_linear_models_moved(arguments, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("train", *arguments) == 2
    assert capsys.readouterr().err == (
        "gtrace: linear models have a command of their own; use gtrace linear --task svm\n"
    )


def test_without_the_experiments_one_line_says_how_to_install_them(monkeypatch, capsys):
    monkeypatch.setattr(groups, "added_commands", dict)
    for arguments in (("reproduce", "list"), ("linear",), ("train", "--task", "linear")):
        assert call(*arguments) == 2
        err = capsys.readouterr().err
        assert "pip install ./experiments in a clone of gtrace" in err
        assert err.count("\n") == 1
