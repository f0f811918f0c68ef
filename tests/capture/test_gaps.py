"""Steps that are missing in a capture: training goes on, and the trace says which."""

import resource
import textwrap
import threading
import time

import pytest
import torch
from helpers_capture import write_script

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.options import EveryStep
from gtrace.capture.writer import AsyncWriter
from gtrace.trace.check import check_trace

TRAIN = """
    import torch

    torch.manual_seed(0)
    model = torch.nn.Linear(200, 20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(40):
        during(step)
        optimizer.zero_grad()
        model(torch.randn(8, 200)).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "weights.pt")
    raise SystemExit(CODE)
"""

SETTLED = """
    def settled(count):
        import gc, time
        from gtrace.capture.writer import AsyncWriter

        for writer in [thing for thing in gc.get_objects() if type(thing) is AsyncWriter]:
            while writer._thread.is_alive() and writer.rows.total() + writer.unwritten.count < count:
                time.sleep(0.01)
"""

FULL = """
    import errno, os

    writev, pwritev = os.writev, os.pwritev

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def during(step):
        if step in (10, 30):
            settled(step)
        os.writev = full if 10 <= step < 30 else writev
        os.pwritev = full if 10 <= step < 30 else pwritev
"""

LIMITED = """
    import resource

    def during(step):
        if step in (10, 39):
            settled(step)
            resource.setrlimit(resource.RLIMIT_FSIZE, (180_000 if step == 10 else -1, -1))
"""


def script(folder, during, *, code=0):
    source = textwrap.dedent(SETTLED) + textwrap.dedent(during) + textwrap.dedent(TRAIN).replace("CODE", str(code))
    return write_script(folder / "train.py", source)


def warnings(err):
    return [line for line in err.splitlines() if "warning:" in line]


def test_a_disk_that_is_full_for_a_while(tmp_path, gtrace_here, weights_without):
    path = script(tmp_path, FULL, code=7)
    ended, _, err = gtrace_here("capture", "train.py")
    assert ended == 5
    assert "exit code 7" in err
    assert len(warnings(err)) == 1
    assert "No space left on device" in warnings(err)[0]
    assert "20 steps could not be written" in err
    with gtrace.open_trace(tmp_path / "train.zarr") as trace:
        assert trace.steps("weight").tolist() == [*range(10), *range(30, 40)]
        for step in trace.steps("weight").tolist():
            trace.read("weight", step)
        assert trace.attrs["capture"]["unwritten"] == {"0": "10-29"}
        assert trace.status == "interrupted"
    captured = (tmp_path / "weights.pt").read_bytes()
    assert weights_without(path) == captured


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_files_that_may_not_grow(suffix, tmp_path, gtrace_here):
    """The system refuses the writes itself, so libraries in C meet it too."""
    script(tmp_path, LIMITED)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        ended, _, err = gtrace_here("capture", "-o", f"run{suffix}", "train.py")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended == 0, err
    assert len(warnings(err)) == 1
    assert "File too large" in warnings(err)[0]
    assert not check_trace(tmp_path / f"run{suffix}").faults
    with gtrace.open_trace(tmp_path / f"run{suffix}") as trace:
        steps = trace.steps("weight").tolist()
        assert 9 in steps
        assert 30 not in steps
        missing = {step for step in range(40) if step not in steps}
        (text,) = trace.attrs["capture"]["unwritten"].values()
        first, last = map(int, text.split("-"))
        assert missing == set(range(first, last + 1))


def test_an_output_that_becomes_unwritable_before_the_first_step(tmp_path, gtrace_here):
    during = """
        def during(step):
            if step == 0:
                import shutil
                shutil.rmtree("out")
    """
    (tmp_path / "out").mkdir()
    script(tmp_path, during)
    ended, _, err = gtrace_here("capture", "-o", "out/run.zarr", "train.py")
    assert ended == 2
    assert len(warnings(err)) == 1
    assert "does not exist" in warnings(err)[0]
    assert "nothing was captured" in err
    assert (tmp_path / "weights.pt").exists()


def test_drop_leaves_out_steps_instead_of_waiting(tmp_path, monkeypatch):
    """The writer is stopped, with room for two rows, until the loop is over."""
    go, write = threading.Event(), AsyncWriter._write

    def slow(self, row):
        go.wait()
        write(self, row)

    monkeypatch.setattr(AsyncWriter, "_write", slow)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = CaptureOptions(tmp_path / "run.zarr", EveryStep(), queue_bytes=2 * 44, drop=True)
    session = CaptureSession(options)
    session.start([optimizer], [model])
    for step in range(10):
        if step == 8:
            go.set()
            pool = session._recorder._layouts[0].pool
            while pool._free.qsize() < 2:  # both buffers are back
                time.sleep(0.01)
        optimizer.zero_grad()
        model(torch.randn(8, 10)).square().mean().backward()
        optimizer.step()
    summary = session.finish("complete")
    assert (summary.rows, summary.dropped, summary.errors) == (4, 6, 0)
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        assert trace.steps("weight").tolist() == [0, 1, 8, 9]
        assert trace.attrs["capture"]["dropped"] == {"0": "2-7"}
        assert trace.attrs["capture"]["drop"] is True
        assert trace.status == "complete"


def test_the_option_reaches_the_trace(tmp_path, gtrace_here):
    script(tmp_path, "during = print")
    assert "40 steps captured" in gtrace_here("capture", "--drop", "train.py")[2]
    with gtrace.open_trace(tmp_path / "train.zarr") as trace:
        assert trace.attrs["capture"]["drop"] is True
        assert trace.attrs["capture"]["dropped"] == {}
