"""What a capture says, and that a program prints and logs what it does alone, whatever it does to its streams."""

import re

import pytest
import torch
from helpers_capture import Captured, run_python, write_script
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.options import step_policy

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
