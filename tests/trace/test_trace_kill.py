"""A writer that is killed at any moment leaves a trace that opens, with every committed step right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_trace import SUFFIXES, check_gradients, loss

from gtrace.trace import open_trace

HERE = Path(__file__).parent


def kill_writers(*arguments):
    """What the writers had done when they were killed."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    done = subprocess.run(
        [sys.executable, HERE / "killed_writers.py", *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(report):
    """The trace of a killed writer holds what it had committed, and at most the step that it was committing."""
    path = Path(report["path"])
    if not path.exists():
        assert report["committed"] == 0
        return 0
    with open_trace(path) as trace:
        steps = trace.scalars()["step"].tolist()
        assert steps == list(range(len(steps)))
        assert report["committed"] <= len(steps) <= report["committed"] + 1
        assert trace.scalars()["loss"].tolist() == [loss(step) for step in steps]
        check_gradients(trace, steps)
        if report["finished"]:
            assert trace.status == "complete"
    return len(steps)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_killed_at_random_moments(suffix, tmp_path):
    # More steps than a chunk of the small tensors has rows.
    reports = kill_writers("random", tmp_path, suffix, 70, 12)
    assert len(reports) == 13
    assert len({check(report) for report in reports}) > 3


def test_killed_before_a_file_is_moved_into_its_place(tmp_path):
    """Every fifth of all moments that change what a reader of the folder sees."""
    reports = kill_writers("replace", tmp_path, ".zarr", 6, 5)
    assert reports[-1]["finished"]
    assert len(reports) > 20
    lengths = [check(report) for report in reports]
    assert lengths == sorted(lengths)
    assert set(lengths) == set(range(7))


def test_hdf5_killed_before_the_copy_is_moved_into_its_place(tmp_path):
    """Each tensor that appears makes a new file, which replaces the old one."""
    reports = kill_writers("replace", tmp_path, ".h5", 6, 1)
    assert [check(report) for report in reports] == [0, 0, 2, 6]
