"""A writer that is killed at any moment leaves a trace that opens, with every committed step right."""

import json
import os
import subprocess
import sys
from pathlib import Path

from helpers_trace import check_gradients, loss

import gtrace
from gtrace.trace import open_trace
from gtrace.trace.check import check_trace, repair_trace

HERE = Path(__file__).parent


def kill_writers(*arguments):
    """What the writers had done when they were killed."""
    package = Path(gtrace.__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": f"{HERE.parent}{os.pathsep}{package}"}
    command = [sys.executable, HERE / "killed_writers.py", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
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


def killed(*arguments):
    """The reports of killed writers, and how many steps each left; none leaves fewer than one killed before it."""
    reports = kill_writers(*arguments)
    assert reports[-1]["finished"]
    lengths = [check(report) for report in reports]
    assert lengths == sorted(lengths)
    return reports, lengths


def test_killed_at_every_moment_that_changes_what_a_reader_sees(tmp_path):
    """Every third of them: files that are moved in, and appends to the journal, whole and cut off."""
    _, lengths = killed(tmp_path, ".zarr", 6, 3)
    assert len(lengths) > 20
    assert set(lengths) == set(range(7))


def test_killed_while_the_journal_is_emptied(tmp_path):
    """From the 60th step of 66 on; with the 64th, all rows go into chunks."""
    _, lengths = killed(tmp_path, ".zarr", 66, 7, 240)
    assert lengths[0] < 64
    assert lengths.count(63) > 1
    assert lengths[-1] == 66


def test_killed_while_sketches_are_written(tmp_path):
    assert set(killed(tmp_path, ".sketch.zarr", 3, 3)[1]) == {0, 1, 2, 3}


def test_hdf5_killed_while_it_is_closed(tmp_path):
    """Until the file is whole and in its place, the folder is there."""
    reports, lengths = killed(tmp_path, ".h5", 6, 3)
    assert set(lengths) == set(range(7))
    assert {Path(report["path"]).is_file() for report in reports if report["committed"] == 6} == {False, True}
    paths = [Path(report["path"]) for report in reports]
    for path in [path for path in paths if path.exists()]:
        repair_trace(path)
        assert path.is_file()
        assert check_trace(path).clean
        assert not list(tmp_path.glob(f".{path.name}.*"))
    assert [check(report) for report in reports] == lengths
