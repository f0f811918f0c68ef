"""A result never replaces what it is made of, and a stream that is closed or full stops no command."""

import shlex
import subprocess
import sys

import numpy as np
import pytest
from helpers_capture import environment
from helpers_trace import write_arrays


@pytest.mark.parametrize(
    "line",
    [
        "sweep --force run.h5 --methods qsgdinf --bits 3 -o run.h5",
        "sweep --force run.h5 --plan plan.toml -o plan.toml",
        "trace export --force run.h5 -o run.h5",
        "report --force log.jsonl -o ./log.jsonl",
        "train --force --codec qsgd --bits 3 -o train.py train.py",
        "train --force --codec qsgd --bits 3 --baseline -o train.py train.py",
        "train --force --plan plan.toml --task digits-mlp --steps 2 -o plan.toml",
    ],
)
def test_a_result_never_takes_the_place_of_what_it_is_made_of(succeed, refuse, folder, script, line):
    write_arrays(folder / "run.zarr", {"w": {0: np.ones(64, np.float32)}})
    succeed("trace pack run.zarr -o run.h5")
    succeed("plan run.h5 --max-bits 3 -o plan.toml")
    succeed("train --codec qsgd --bits 3 -o log.jsonl train.py")
    files = [path for path in folder.iterdir() if path.is_file()]
    before = [path.read_bytes() for path in files]
    assert "is what is being read; give another -o" in refuse(line)
    assert [path.read_bytes() for path in files] == before


@pytest.mark.parametrize(
    "line",
    [
        "sweep run.zarr --methods qsgdinf --bits 3 -o run.zarr/sweep.db",
        "plan run.zarr --max-bits 3 -o run.zarr/plan.toml",
        "formats run.zarr -o run.zarr/formats.toml",
        "trace pack run.zarr -o run.zarr/packed.zarr",
        "trace export run.zarr --to npz -o run.zarr/arrays",
    ],
)
def test_a_result_never_goes_into_the_trace_that_it_is_made_of(refuse, folder, line):
    write_arrays(folder / "run.zarr", {"w": {0: np.ones(64, np.float32)}})
    before = sorted(folder.rglob("*"))
    assert "is inside the trace" in refuse(line)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("info run.zarr --json >&-", 0),
        ("sweep run.zarr --methods qsgdinf --bits 3 2>&-", 0),
        ("plan run.zarr --max-bits 3 2>/dev/full", 0),
        ("info no.zarr 2>/dev/full", 3),
    ],
)
def test_a_stream_that_is_closed_or_full_changes_no_exit_code(tmp_path, line, code):
    write_arrays(tmp_path / "run.zarr", {"w": {0: np.ones(64, np.float32)}})
    program = f"{shlex.quote(sys.executable)} -m gtrace {line}"
    assert subprocess.run(program, shell=True, cwd=tmp_path, env=environment(), check=False).returncode == code
