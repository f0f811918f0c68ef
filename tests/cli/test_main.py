import json
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gtrace.cli import gtrace
from gtrace.cli.groups import ALIASES, COMMANDS, added_commands, every_command

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
