"""Codecs with memory need consecutive steps: refused, left out of ``all``, or replayed burst by burst."""

import json
import subprocess
import sys

import pytest
from helpers_sweep import write_trace

import gtrace
from gtrace.errors import UsageError
from gtrace.sweep.bursts import any_burst, start_of

MEMORY = ["ef:topk:ratio=0.1", "mem-sgd:ratio=0.1"]


@pytest.fixture(scope="module")
def gaps(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("gaps") / "gaps.zarr", steps=(0, 10, 20))


def test_bursts():
    steps = (0, 1, 2, 10, 11, 20)
    assert [start_of(steps, index) for index in range(6)] == [0, 0, 0, 3, 3, 5]
    assert any_burst([steps], {2})
    assert any_burst([steps], {10})
    assert not any_burst([steps], {20})
    assert not any_burst([(0, 2), (1, 3)], {0, 1, 2, 3})


def test_memory_without_consecutive_steps_is_refused(gaps, tmp_path):
    out = tmp_path / "out.db"
    with pytest.raises(UsageError, match=r"ef:topk:ratio=0.1, mem-sgd:ratio=0.1 keep memory .*--steps 1000\+50"):
        gtrace.run_sweep(gaps, ["qsgd:bits=3", *MEMORY], output=out)
    assert not out.exists()
    # A burst that is not swept does not help.
    mixed = write_trace(tmp_path / "mixed.zarr", steps=(0, 1, 10))
    with pytest.raises(UsageError, match="keeps memory"):
        gtrace.run_sweep(mixed, MEMORY[:1], steps=[10])
    found = gtrace.run_sweep(mixed, MEMORY[:1], steps=[1, 10])
    assert set(found["step"]) == {1, 10}
    assert all("open loop" in note for note in found["note"])


def test_nothing_is_replayed_in_expectation(gaps):
    found = gtrace.run_sweep(gaps, ["qsgd:bits=3", *MEMORY], draws=0, tensors=["fc.bias"])
    assert set(found["codec"]) == {"qsgd:bits=3"}


def test_memory_is_left_out_where_asked(gaps):
    found = gtrace.run_sweep(gaps, ["qsgd:bits=3", *MEMORY], tensors=["fc.bias"], leave_out=True)
    assert set(found["codec"]) == {"qsgd:bits=3"}
    assert found.provenance["left_out_codecs"] == MEMORY
    assert len(found.warnings) == 1
    assert found.warnings[0].startswith("left out: ef:topk:ratio=0.1, mem-sgd")
    with pytest.raises(UsageError, match="keep memory"):
        gtrace.run_sweep(gaps, MEMORY, leave_out=True)


def test_command_line(gaps, tmp_path):
    def run(methods):
        command = [sys.executable, "-m", "gtrace", "sweep", str(gaps), "--tensors", "fc.bias", "--bits", "3", "--json"]
        command += ["-o", str(tmp_path / "out.db"), "--methods", methods]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    refused = run("mem-sgd")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "mem-sgd keeps memory" in refused.stderr
    whole = run("all")
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr.count("left out: ") == 1
    assert whole.stderr.count("\n") == 1
    assert "qsgd:bits=3" in json.loads(whole.stdout)["codecs"]
    assert "mem-sgd" not in json.loads(whole.stdout)["codecs"]
