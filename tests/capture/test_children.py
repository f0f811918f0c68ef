"""A process that a captured program launched, from its import of torch to its end; here it is this one."""

import os
import signal
import sys

import pytest
import torch

from gtrace.capture import session
from gtrace.trace import open_trace
from gtrace.trace.shared import parts


class Process:
    """What the launched process does when it ends."""

    def __init__(self, path, monkeypatch):
        self.path = path
        self.hooked = []
        self.ends = []
        monkeypatch.setattr(sys, "excepthook", lambda *error: self.hooked.append(error))
        monkeypatch.setattr(session, "before_shutdown", self.ends.append)

    def start(self, **settings):
        session.start({"path": str(self.path), "run": "word", "settings": settings, "attrs": {"argv": ["x"]}})

    def train(self, steps=2):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for _ in range(steps):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()

    def live(self, steps=2, **settings):
        """From the import of torch to the end."""
        self.start(**settings)
        self.train(steps)
        self.end()

    def end(self):
        (end,) = self.ends
        end()
        end.__self__._exits.close()

    @property
    def status(self):
        (part,) = parts(self.path)
        return part["status"]


@pytest.fixture
def process(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    before = os._exit, signal.getsignal(signal.SIGTERM)
    process = Process(tmp_path / "run.zarr", monkeypatch)
    yield process
    for end in process.ends:
        end()
        end.__self__._exits.close()
    assert (os._exit, signal.getsignal(signal.SIGTERM)) == before


def test_a_proper_end(process):
    process.live()
    assert process.status == "complete"
    with open_trace(process.path) as trace:
        assert trace.scalars()["step"].tolist() == [0, 1]
        assert (trace.attrs["run"], trace.attrs["argv"]) == ("word", ["x"])


def test_an_exception_that_nobody_catches(process):
    process.start()
    try:
        process.train(steps="none")
    except TypeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    process.train()
    sys.excepthook(ValueError, ValueError("without a traceback"), None)
    process.end()
    assert process.status == "interrupted"
    (kind, error, traceback), (_, _, none) = process.hooked
    assert (kind, type(error), none) == (TypeError, TypeError, None)
    assert traceback is error.__traceback__


def test_frames_of_capture_are_not_shown(process):
    process.start()
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    optimizer.step()
    try:
        optimizer.step(lambda: 1 / 0)
    except ZeroDivisionError as error:
        files = []
        sys.excepthook(type(error), error, error.__traceback__)
        traceback = process.hooked[0][2]
        while traceback is not None:
            files.append(traceback.tb_frame.f_code.co_filename)
            traceback = traceback.tb_next
    assert files[0] == files[-1] == __file__
    assert not any(os.path.join("gtrace", "torch_hooks") in file for file in files)
    process.end()


@pytest.mark.parametrize(("code", "status"), [(0, "complete"), (3, "interrupted")])
def test_an_end_that_no_finally_sees(code, status, process):
    leave = os._exit
    process.start()
    process.train()
    assert os._exit is not leave
    assert process.ends[0].__self__.leave(code) == code
    assert process.status == status
    # What comes afterwards changes nothing.
    process.end()
    assert process.status == status


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
    import multiprocessing.util

    calls = []
    monkeypatch.setattr(multiprocessing.util, "_exiting", exiting)
    monkeypatch.setattr(multiprocessing.util, "_run_finalizers", lambda: calls.append(1))
    process.start()
    process.end()
    assert calls == [1] * exiting


def test_several_processes_cannot_write_hdf5(process, capsys):
    process.path = process.path.with_suffix(".h5")
    process.live()
    refused = "an HDF5 trace cannot take the steps of several processes; choose a name that ends in .zarr"
    assert refused in capsys.readouterr().err
    assert not process.path.exists()


def test_a_rank_is_told_of_hdf5_before_it_starts(tmp_path, gtrace_here, monkeypatch):
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = gtrace_here("capture", "-o", "run.h5", "train.py")
    assert code == 2
    assert err == "gtrace: run.h5: 2 processes cannot write one HDF5 file; choose a name that ends in .zarr\n"


@pytest.mark.parametrize("machines", [1, 2])
def test_the_word_of_a_run_over_several_machines(machines, process, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", str(2 * machines))
    process.live()
    attrs = open_trace(process.path).attrs
    assert attrs["writers"] == 2 * machines
    if machines == 1:
        assert (attrs["run"], "launchers" in attrs) == ("word", False)
    else:
        assert attrs["run"] != "word"
        assert attrs["launchers"] == ["word"]


def test_the_processes_of_a_launch_share_the_budget(process, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    process.live(steps=4, every=1, budget=4 * 12)
    with open_trace(process.path) as trace:
        assert trace.scalars(rank=1)["step"].tolist() == [0, 1]
