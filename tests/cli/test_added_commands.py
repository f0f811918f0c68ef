"""Commands that installed packages add: gtrace-experiments' own, and packages faked by a folder on the path."""

import pytest
from click.shell_completion import ShellComplete
from helpers_installed import write_package

from gtrace import cli
from gtrace.cli import groups

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
