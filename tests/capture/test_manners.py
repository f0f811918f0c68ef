"""What a capture says, and that a program prints and logs what it does alone, whatever it does to its streams."""

import io
import re

import numpy as np
import pytest
import torch
from helpers_capture import Captured, run_python, write_script
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.options import step_policy
from gtrace.capture.session import print_line
from gtrace.capture.summary import CaptureSummary, all_parts
from gtrace.trace.shared import join_trace

LOGGING = """
    import logging, sys
    logging.basicConfig(level=logging.DEBUG, stream=sys.stdout, format="%(name)s: %(message)s")
    import warnings
    warnings.simplefilter("error")
    import torch
    from gtrace.capture import record
    import gtrace.capture.session, gtrace.torch_hooks.hooks
    assert "torch._dynamo" not in sys.modules  # it takes seconds

    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for suffix in ("zarr", "h5"):
        with record(model, optimizer, f"run.{suffix}") as session:
            for _ in range(3):
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        assert session.finish("complete").rows == 3
        logging.debug("recorded " + suffix)
    """


@pytest.mark.capture_case("a program that logs at level DEBUG, with warnings as errors")
def test_libraries_that_log_stay_out_of_the_programs_log(tmp_path):
    write_script(tmp_path / "train.py", LOGGING)
    done = run_python("train.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "root: recorded zarr\nroot: recorded h5\n", "")


@pytest.mark.capture_case("stdout and stderr replaced or closed")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(4)", 5)])
def test_streams_that_a_program_replaces(tmp_path, gtrace_here, end, code):
    source = f"""
        import sys, torch

        class Logger:
            def __init__(self, stream):
                self.stream = stream
            def write(self, text):
                self.stream.write("logged: " + text)

        sys.stdout = Logger(sys.stdout)
        sys.stderr = open("log.txt", "w")
        w = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        for _ in range(3):
            w.sum().backward()
            optimizer.step()
        sys.stdout.write("done\\n")
        sys.stderr.close()
        {end}
        """
    write_script(tmp_path / "train.py", source)
    got, out, err = gtrace_here("capture", "train.py")
    assert (got, out) == (code, "logged: done\n")
    assert (tmp_path / "log.txt").read_text() == ""
    first, last = err.splitlines()
    assert first.startswith("gtrace: recording 1 tensor, ")
    assert "3 steps captured in train.zarr" in last
    assert gtrace.open_trace(tmp_path / "train.zarr").steps("unnamed/opt0.g0.p0").tolist() == [0, 1, 2]


@pytest.mark.capture_case("stdout and stderr replaced or closed")
@pytest.mark.parametrize(("end", "code"), [("", 0), ("sys.exit(4)", 5)])
@pytest.mark.parametrize("close", ["sys.stdout.close(); sys.stderr.close()", "os.closerange(3, 256)"])
def test_what_a_program_closes(tmp_path, close, end, code):
    """The exit code is that of the program, whose descriptors and streams are its own, as are gtrace's."""
    source = f"""
        import os, sys, torch
        w = torch.nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([w], lr=0.1)
        w.sum().backward()
        optimizer.step()
        {close}
        {end}
        """
    write_script(tmp_path / "train.py", source)
    done = run_python("-m", "gtrace", "capture", "train.py", cwd=tmp_path)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert gtrace.open_trace(tmp_path / "train.zarr").steps("unnamed/opt0.g0.p0").tolist() == [0]


@pytest.mark.parametrize("verbose", [True, False])
def test_the_first_line_predicts_and_verbose_goes_on(verbose, path):
    options = CaptureOptions(path, step_policy(None, None), budget=10_000_000, verbose=verbose)
    said, model = [], nn.Linear(40, 50)
    session = CaptureSession(options, say=said.append, status=True)
    session.start()
    descend(model, torch.optim.SGD(model.parameters(), lr=0.01), 8, 40, steps=201)
    assert session.finish("complete").rows == 201
    row = 4 * (40 * 50 + 50)
    most = step_policy(None, None).most(10_000_000 // row)
    assert re.fullmatch(
        rf"gtrace: recording 2 tensors, {row / 1000:.1f} kB a step, copied in [\d.]+ ms; "
        rf"auto keeps at most {most:,} steps \({row * most / 1e6:.1f} MB of the 10.0 MB budget\)",
        said[0],
    )
    assert [line.split(":")[1] for line in said[1:]] == verbose * [" step 99", " step 199"]


def test_the_memory_of_an_optimizer_goes_with_it(path):
    with Captured(path) as run:
        for _ in range(4):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            descend(model, optimizer, 1, 3, steps=1)
        layouts = run.session._recorder._layouts.values()
        assert [layout.pool is None for layout in layouts] == [True, True, True, False]
    assert (run.summary.rows, run.summary.optimizers, run.summary.tensors, run.summary.errors) == (4, 4, 8, 0)
    names = [info.name for info in run.trace.tensors if "weight" in info.name]
    assert names == ["weight", *(f"Linear_{number}.weight" for number in (2, 3, 4))]


OUTCOMES = (
    {"steps_seen": 9, "errors": 1, "skipped_steps": 0, "blocked": 0.25, "over_budget": False},
    {"steps_seen": 7, "errors": 2, "skipped_steps": 3, "blocked": 0.125, "over_budget": True},
)


def write(path, rank, rows, kind="weight", names=("w",), outcome=None, optimizer=0):
    """What one of two processes of a run leaves; without an outcome it was killed."""
    writer, number = join_trace(path, run="a", rank=rank, writers=2)
    place = {"kind": kind, "rank": number, "optimizer": optimizer}
    for step in range(rows):
        for name in names:
            writer.append(step, name, np.ones(3), **place)
        writer.commit(step, **place)
    if outcome is not None:
        writer.set_attrs(capture=outcome)
    writer.close()


def test_the_summary_of_two_processes(path):
    write(path, 0, 2, outcome=OUTCOMES[0])
    alone = CaptureSummary(path, rows=2, errors=7)
    assert all_parts(path, alone) is alone, "what this process recorded alone is its own"
    write(path, 1, 5, names=("w", "v"), outcome=OUTCOMES[1])
    # This one launched the two, and recorded nothing.
    own = CaptureSummary(path, complaints=("its own",), without=("nothing",), backward_passes=1)
    told = all_parts(path, own)
    assert (told.torch_seen, told.ranks, told.rows, told.fewest_rows, told.steps_wanted) == (True, 2, 5, 2, 5)
    assert (told.tensors, told.optimizers, told.neural_rows, told.neural_tensors) == (2, 1, 0, 0)
    assert (told.steps_seen, told.errors, told.skipped_steps) == (9, 3, 3)
    assert (told.blocked, told.over_budget, told.complaints) == (0.25, True, ())
    assert told.bytes == sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    # Everything else is this process's own.
    assert (told.path, told.without, told.backward_passes) == (path, ("nothing",), 1)


def test_a_closed_stderr_stops_nothing(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    with pytest.raises(ValueError, match="closed"):
        closed.write("what print_line runs into")
    assert print_line("gtrace: recording") is None
