"""A process that a captured program launched, from its import of torch to its end; here it is this one."""

import multiprocessing.util
import os
import signal
import sys
import traceback

import pytest
import torch
from helpers_hooks import quadratic, weight

from gtrace.capture import session
from gtrace.trace import open_trace
from gtrace.trace.shared import parts


class Process:
    """What the launched process does, and when it ends."""

    def __init__(self, path, monkeypatch):
        self.path, self.hooked, self.ends = path, [], []
        monkeypatch.setattr(sys, "excepthook", lambda *error: self.hooked.append(error))
        monkeypatch.setattr(session, "before_shutdown", self.ends.append)

    def start(self, **settings):
        session.start({"path": str(self.path), "run": "word", "settings": settings, "attrs": {"argv": ["x"]}})

    def train(self, steps=2):
        self.weight = weight(1.0, 1.0, 1.0)
        self.optimizer = torch.optim.SGD([self.weight], lr=0.5)
        for _ in range(steps):
            self.optimizer.zero_grad()
            quadratic(self.weight).backward()
            self.optimizer.step()

    def end(self):
        for end in self.ends:
            end()
            end.__self__._exits.close()

    def live(self, steps=2, **settings):
        """From the import of torch to the end."""
        self.start(**settings)
        self.train(steps)
        self.end()


@pytest.fixture
def process(path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = os._exit, signal.getsignal(signal.SIGTERM)
    process = Process(path, monkeypatch)
    yield process
    process.end()
    assert (os._exit, signal.getsignal(signal.SIGTERM)) == before


@pytest.mark.parametrize(("code", "status"), [(None, "complete"), (0, "complete"), (3, "interrupted")])
def test_a_proper_end_and_one_that_no_finally_sees(code, status, process):
    leave = os._exit
    process.start()
    process.train()
    assert os._exit is not leave
    if code is not None:
        assert process.ends[0].__self__.leave(code) == code
        assert [part["status"] for part in parts(process.path)] == [status]
    process.end()  # what comes afterwards changes nothing
    assert [part["status"] for part in parts(process.path)] == [status]
    with open_trace(process.path) as trace:
        assert trace.scalars()["step"].tolist() == [0, 1]
        assert (trace.attrs["run"], trace.attrs["argv"]) == ("word", ["x"])


def test_an_exception_that_nobody_catches_shows_no_frame_of_capture(process):
    process.start()
    process.train()
    try:
        process.optimizer.step(lambda: 1 / 0)
    except ZeroDivisionError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    sys.excepthook(ValueError, ValueError("without a traceback"), None)
    process.end()
    assert [part["status"] for part in parts(process.path)] == ["interrupted"]
    (kind, error, frames), (_, _, none) = process.hooked
    assert (kind, type(error), none) == (ZeroDivisionError, ZeroDivisionError, None)
    files = [frame.filename for frame in traceback.extract_tb(frames)]
    assert files[0] == files[-1] == __file__
    assert not any(os.path.join("gtrace", "torch_hooks") in file for file in files)


def test_what_stops_capture_does_not_stop_the_program(process, capsys):
    process.start(steps="rubbish")
    assert capsys.readouterr().err.startswith("gtrace: warning: capture could not start: UsageError: ")
    assert process.ends == []
    process.train()
    assert not process.path.exists()


@pytest.mark.parametrize(("steps", "said"), [(2, 1), (0, 0)])
def test_patterns_that_match_nothing(steps, said, process, capsys):
    """A process that records nothing at all does not know the names."""
    process.live(steps, exclude=["nothing*"])
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("gtrace: warning: ")]
    assert len(warnings) == said
    assert all("nothing*" in line for line in warnings)


@pytest.mark.parametrize("exiting", [True, False])
def test_what_the_writer_made_after_multiprocessing_cleaned_up(exiting, process, monkeypatch):
    calls = []
    monkeypatch.setattr(multiprocessing.util, "_exiting", exiting)
    monkeypatch.setattr(multiprocessing.util, "_run_finalizers", lambda: calls.append(1))
    process.live()
    assert calls == [1] * exiting


def test_several_processes_cannot_write_hdf5(process, tmp_path, capfd, gtrace_here, monkeypatch):
    process.path = process.path.with_suffix(".h5")
    process.live()
    refused = "an HDF5 trace cannot take the steps of several processes; choose a name that ends in .zarr"
    assert refused in capfd.readouterr().err
    assert not process.path.exists()
    # A rank is told before it starts.
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = gtrace_here("capture", "-o", "run.h5", "train.py")
    assert code == 2
    assert err == "gtrace: run.h5: 2 processes cannot write one HDF5 file; choose a name that ends in .zarr\n"


@pytest.mark.parametrize("machines", [1, 2])
def test_the_word_of_a_run_over_several_machines_and_the_budget_of_its_processes(machines, process, monkeypatch):
    world = 2 * machines
    for name, value in {"RANK": 1, "LOCAL_WORLD_SIZE": 2, "WORLD_SIZE": world}.items():
        monkeypatch.setenv(name, str(value))
    process.live(steps=4, every=1, budget=world * 2 * 12)
    with open_trace(process.path) as trace:
        assert trace.scalars(rank=1)["step"].tolist() == [0, 1]
        assert trace.attrs["writers"] == world
        assert (trace.attrs["run"] == "word") == (machines == 1)
        assert trace.attrs.get("launchers") == (None if machines == 1 else ["word"])
