"""Commands that may not read or write end in one line, and leave everything as it was."""

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from helpers_trace import write_trace

import gtrace
from gtrace.cli import main

NOBODY = 65534
SWEEP = "sweep run.zarr --methods qsgdinf --bits 3"
COMMANDS = [
    "info secret.zarr",
    "report secret.sweep.db -o /dev/null/x.md",
    SWEEP,
    f"{SWEEP} -o new.db",
    f"{SWEEP} -o run.sweep.db --force",
    "pack run.zarr -o packed.zarr",
    "pack run.zarr -o packed.h5",
    "export run.zarr -o all.npz",
    "sketch run.zarr -o small.zarr",
]


@pytest.fixture(scope="module")
def folder():
    """A folder that only its owner may write to, with a trace, a sweep, and a copy of each that nobody may read."""
    # Not pytest's own: others may not even look into that.
    place = Path(tempfile.mkdtemp(prefix="gtrace-permissions-"))
    place.chmod(0o755)
    write_trace(place / "run.zarr")
    gtrace.run_sweep(str(place / "run.zarr"), ["qsgdinf:bits=3"], output=place / "run.sweep.db")
    shutil.copy(place / "run.sweep.db", place / "secret.sweep.db")
    shutil.copytree(place / "run.zarr", place / "secret.zarr")
    for name in ("secret.sweep.db", "secret.zarr"):
        (place / name).chmod(0)
    # Once with all rights, elsewhere: modules that are loaded late may lie where nobody may read.
    with tempfile.TemporaryDirectory() as warm, contextlib.chdir(warm):
        shutil.copytree(place / "run.zarr", "run.zarr")
        for command in COMMANDS:
            with contextlib.suppress(SystemExit):
                main(command.split())
    yield place
    (place / "secret.zarr").chmod(0o755)
    shutil.rmtree(place)


@pytest.fixture
def unprivileged(folder, monkeypatch):
    """This process without the rights of root or of the folder's owner."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder))
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        yield
        os.seteuid(0)
    else:
        folder.chmod(0o555)
        (folder / "run.sweep.db").chmod(0o444)
        yield
        folder.chmod(0o755)


def refused(command, capsys):
    """How a command ends, and the one line that it says."""
    with pytest.raises(SystemExit) as end:
        main(command.split())
    said = capsys.readouterr().err
    assert said.startswith("gtrace: "), said
    assert said.count("\n") == 1, said
    return end.value.code, said


@pytest.mark.parametrize("command", COMMANDS)
def test_one_line(command, unprivileged, folder, capsys):
    before = sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir())
    code, said = refused(command, capsys)
    assert code == 3, said
    assert "Permission denied" in said or "unable to" in said, said
    assert sorted((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "a\x1b[2J"), "a\\x1b[2J: cannot use it (Permission denied)"),
        (OSError(122, "Disk quota exceeded"), "cannot write (Disk quota exceeded)"),
        (OSError(36, "File name too long", "a.html"), "a.html: cannot use it (File name too long); choose a shorter"),
        (OSError(9, "Bad file descriptor"), None),
    ],
)
def test_what_the_system_refuses_anywhere_is_one_line_and_other_errors_are_bugs(error, words, monkeypatch, capsys):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("gtrace.cli.gtrace.make_context", refuse)
    monkeypatch.setattr("gtrace.cli._stop_printing", int)
    if words is None:
        with pytest.raises(OSError, match="Bad file"):
            main(["info"])
        return
    code, said = refused("info", capsys)
    assert code == 2
    assert said.startswith(f"gtrace: {words}")
