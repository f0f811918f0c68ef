import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from gtrace.cli import COMMANDS, gtrace, main
from gtrace.errors import UsageError

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


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help_with_an_example(name):
    done = CliRunner().invoke(gtrace, [name, "--help"])
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"gtrace {name}" in done.output


def test_help_names_every_command():
    done = CliRunner().invoke(gtrace, ["--help"])
    for name in COMMANDS:
        assert f"  {name} " in done.output


def test_a_typo_is_answered_with_the_nearest_command(call):
    done = call("swep")
    assert done.returncode == 2
    assert done.stderr.startswith("gtrace: 'swep' is not a command; did you mean sweep?")
    assert done.stderr.count("\n") == 1


def test_a_wrong_option_is_one_line(call):
    done = call("sweep", "--mehtods", "all", "x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "--mehtods" in done.stderr


def test_a_missing_trace_is_one_line_with_exit_3(call, tmp_path):
    for command in ("info", "sweep"):
        done = call(command, "missing.zarr")
        assert done.returncode == 3, done.stderr
        assert done.stderr.count("\n") == 1
        assert "missing.zarr" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_errors_end_with_their_exit_code(monkeypatch, capsys):
    def fail(*args, **kwargs):
        raise UsageError("thing: wrong; do another")

    monkeypatch.setattr(gtrace, "main", fail)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err == "gtrace: thing: wrong; do another\n"


def test_interrupt_is_130(monkeypatch, capsys):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(gtrace, "main", interrupt)
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 130
    assert "kept" in capsys.readouterr().err


def test_codecs_lists_and_explains(call):
    done = call("codecs")
    assert done.returncode == 0
    assert "qsgdinf" in done.stdout
    done = call("codecs", "nuqsgd")
    assert "Ramezani-Kebrya" in done.stdout
    done = call("codecs", "nuqsdg")
    assert done.returncode == 2
    assert "did you mean nuqsgd" in done.stderr
    done = call("codecs", "terngrad", "--json")
    assert json.loads(done.stdout)["name"] == "terngrad"
