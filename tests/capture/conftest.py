"""Shared by the tests of capture: commands that run in this process, since importing torch takes most of a new one."""

import contextlib
import os
import runpy
import sys

import pytest

from gtrace.cli import main


@pytest.fixture
def path(tmp_path):
    """Of the trace."""
    return tmp_path / "run.zarr"


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Samples are not counted in a process that has compiled something, which other tests do."""
    compiled = sys.modules.get("torch._dynamo.utils")
    if compiled is not None:
        compiled.counters.clear()


@pytest.fixture
def gtrace_here(tmp_path, monkeypatch, capfd):
    """Run a ``gtrace`` command in this process, in the test's folder: exit code, stdout, stderr."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # put back at the end
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)

    def run(*args):
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main([*map(str, args)])
        return ended.value.code, *capfd.readouterr()

    return run


@pytest.fixture
def weights_without(tmp_path, monkeypatch):
    """What a script saves as ``weights.pt`` when nobody watches it."""

    def run(script):
        monkeypatch.chdir(tmp_path)
        with contextlib.suppress(SystemExit):
            runpy.run_path(os.fspath(script), run_name="__main__")
        return (tmp_path / "weights.pt").read_bytes()

    return run
