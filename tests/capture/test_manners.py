"""What a captured program prints and logs is what it prints and logs alone, whatever it does to its streams."""

import logging
import threading

import pytest
import torch
from helpers_capture import Captured, run_python, write_script
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture.writer import quiet_logs

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


def test_only_this_thread_is_quiet(caplog):
    log = logging.getLogger("numcodecs")
    with caplog.at_level(logging.DEBUG), quiet_logs():
        log.debug("ours")
        with quiet_logs():
            log.debug("ours, nested")
        log.debug("ours again")
        other = threading.Thread(target=log.debug, args=("the program's",))
        other.start()
        other.join()
        logging.getLogger("train").debug("the program's, too")
    log.debug("not logged: the level is back")
    with caplog.at_level(logging.DEBUG):
        log.debug("after")
    assert caplog.messages == ["the program's", "the program's, too", "after"]


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


def test_two_optimizers_of_one_backward_pass_share_its_neural_gradients(tmp_path):
    with Captured(tmp_path / "run.zarr", kind="both") as run:
        body, head = nn.Linear(3, 4), nn.Linear(4, 2)
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (body, head)]
        for _ in range(2):
            head(body(torch.randn(2, 3)).tanh()).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert (run.summary.rows, run.summary.neural_rows, run.said) == (4, 2, [])


def test_the_memory_of_an_optimizer_goes_with_it(tmp_path):
    with Captured(tmp_path / "run.zarr") as run:
        for _ in range(4):
            model = nn.Linear(3, 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            descend(model, optimizer, 1, 3, steps=1)
        layouts = run.session._recorder._layouts.values()
        assert [layout.pool is None for layout in layouts] == [True, True, True, False]
    assert (run.summary.rows, run.summary.optimizers, run.summary.tensors, run.summary.errors) == (4, 4, 8, 0)
