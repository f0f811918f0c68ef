"""Disks that refuse, wait or never answer, and Ctrl-C at the end: training goes on; the trace says what it lacks."""

import errno
import os
import re
import resource
import signal
import textwrap
import threading
import time

import pytest
import torch
from helpers_capture import Captured, Command, write_script
from helpers_hooks import descend

from gtrace.capture.writer import AsyncWriter
from gtrace.trace import open_trace
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
    raise SystemExit(7)
"""

TRAIN_10 = textwrap.dedent(TRAIN).replace("range(40)", "range(10)").replace("raise SystemExit(7)", "")

SETTLED = """
    import errno, gc, os, resource, time
    from gtrace.capture.writer import AsyncWriter

    def settled(count):
        for writer in [thing for thing in gc.get_objects() if type(thing) is AsyncWriter]:
            while writer._thread.is_alive() and writer.rows.total() + writer.unwritten.count < count:
                time.sleep(0.01)
"""

FULL = """
    writev, pwritev = os.writev, os.pwritev

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def during(step):
        if step in (10, 30):
            settled(step)
        os.writev = full if 10 <= step < 30 else writev
        os.pwritev = full if 10 <= step < 30 else pwritev
"""

#: The system refuses the writes itself, so libraries in C meet it too.
LIMITED = """
    def during(step):
        if step in (10, 39):
            settled(step)
            resource.setrlimit(resource.RLIMIT_FSIZE, (180_000 if step == 10 else -1, -1))
"""


@pytest.mark.parametrize(
    ("during", "suffix", "reason"),
    [
        (FULL, ".zarr", "No space left on device"),
        (LIMITED, ".zarr", "File too large"),
        (LIMITED, ".h5", "File too large"),
    ],
)
def test_a_disk_that_refuses_for_a_while(during, suffix, reason, tmp_path, gtrace_here, weights_without):
    path = write_script(tmp_path / "train.py", "".join(map(textwrap.dedent, (SETTLED, during, TRAIN))))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        ended, _, err = gtrace_here("capture", "-o", f"run{suffix}", "train.py")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ended == 5
    assert "exit code 7" in err
    (warning,) = [line for line in err.splitlines() if "warning:" in line]
    assert reason in warning
    assert not check_trace(tmp_path / f"run{suffix}").faults
    with open_trace(tmp_path / f"run{suffix}") as trace:
        steps = trace.steps("weight").tolist()
        for step in steps:
            trace.read("weight", step)
        (text,) = trace.attrs["capture"]["unwritten"].values()
        first, last = map(int, text.split("-"))
        assert {step for step in range(40) if step not in steps} == set(range(first, last + 1))
        assert (9 in steps, 29 in steps, trace.status) == (True, False, "interrupted")
        assert during == LIMITED or text == "10-29"
    assert f"{last + 1 - first} steps could not be written" in err
    captured = (tmp_path / "weights.pt").read_bytes()
    assert during == LIMITED or weights_without(path) == captured


def test_drop_leaves_out_steps_instead_of_waiting(path, monkeypatch):
    """The writer is stopped, with room for two rows, until the loop is over."""
    go, write = threading.Event(), AsyncWriter._write
    monkeypatch.setattr(AsyncWriter, "_write", lambda self, row: go.wait() and write(self, row))
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Captured(path, queue_bytes=2 * 44, drop=True) as run:
        descend(model, optimizer, 8, 10, steps=8)
        go.set()
        pool = run.session._recorder._layouts[0].pool
        while pool.free._queue.qsize() < 2:  # both buffers are back
            time.sleep(0.01)
        descend(model, optimizer, 8, 10, steps=2)
    assert (run.summary.rows, run.summary.dropped, run.summary.errors) == (4, 6, 0)
    assert run.trace.steps("weight").tolist() == [0, 1, 8, 9]
    capture = run.trace.attrs["capture"]
    assert (capture["dropped"], capture["drop"], run.trace.status) == ({"0": "2-7"}, True, "complete")


def test_training_does_not_wait_for_a_disk_that_never_answers(path, monkeypatch):
    monkeypatch.setattr("gtrace.capture.buffers.PATIENCE", 0.2)
    monkeypatch.setattr("gtrace.capture.writer.PATIENCE", 0.2)
    answer = threading.Event()
    monkeypatch.setattr(AsyncWriter, "_write", lambda *_: answer.wait())
    with Captured(path, queue_bytes=2 * 44) as run:
        model = torch.nn.Linear(10, 1)
        descend(model, torch.optim.SGD(model.parameters(), lr=0.1), 8, 10, steps=20)
    answer.set()
    assert (run.summary.rows, run.summary.dropped) == (0, 18)
    first, *_, last = run.said
    assert "no step was written for a while; steps are left out until the disk goes on" in first
    assert "the disk does not answer; the trace stays as it is" in last


#: training is over long before its steps are written
SLOW = """
    import time, torch
    from gtrace.capture.writer import AsyncWriter
    from gtrace.trace import TraceWriter

    write = AsyncWriter._write
    AsyncWriter._write = lambda self, row: time.sleep(0.04) or write(self, row)
    TraceWriter.together = lambda *_args, **_options: 1

    w = torch.nn.Parameter(torch.ones(50))
    optimizer = torch.optim.SGD([w], lr=0.1)
    for _ in range(30):
        w.square().sum().backward()
        optimizer.step()
    print("over", flush=True)
    """


@pytest.mark.capture_case("Ctrl-C while the last steps are written")
@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_while_the_last_steps_are_written(presses, suffix, tmp_path):
    write_script(tmp_path / "train.py", SLOW)
    with Command("capture", "-o", f"run{suffix}", "train.py", cwd=tmp_path, together=True) as process:
        while process.stdout.readline() != "over\n":
            pass
        time.sleep(0.1)
        os.kill(process.pid, signal.SIGINT)
        said = process.stdout.readline()
        assert re.fullmatch(r"gtrace: writing the last \d+ steps, press again to drop them\n", said)
        ended = process.end(signal.SIGINT if presses == 2 else None)
    assert ended.returncode == 130
    assert ended.stdout.endswith("gtrace: interrupted; finished work is kept.\n")
    assert "Traceback" not in ended.stdout
    with open_trace(tmp_path / f"run{suffix}") as trace:
        steps = trace.steps(trace.tensors[0].name).tolist()
        assert steps == list(range(len(steps)))
        if presses == 1:
            assert (len(steps), trace.status) == (30, "complete")
        else:
            assert (0 < len(steps) < 30, trace.status) == (True, "interrupted")
            assert f"{30 - len(steps)} steps could not be written" in ended.stdout
            unwritten = trace.attrs["capture"]["unwritten"]
            assert unwritten == {"0": f"{len(steps)}-29" if len(steps) < 29 else "29"}


@pytest.mark.parametrize(("end", "code"), [("", 3), ("raise SystemExit(7)", 5)])
def test_a_disk_without_any_room(end, code, tmp_path, gtrace_here, monkeypatch):
    always_full = textwrap.dedent(FULL).replace("10 <= step < 30", "True")
    write_script(tmp_path / "train.py", textwrap.dedent(SETTLED) + always_full + TRAIN_10 + end)
    for name in ("writev", "pwritev"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back at the end
    ended, _, err = gtrace_here("capture", "-o", "run.zarr", "train.py")
    assert ended == code
    assert "run.zarr: cannot be written (No space left on device); training goes on\n" in err
    assert "nothing was captured: see the warnings above" in err
    assert "is gone" not in err


def about(trace):
    return {info.name: (info.dtype, info.module_type, info.shape) for info in trace.tensors}


def test_whichever_file_has_no_room_only_that_step_is_missing(path, monkeypatch):
    calls, refused = [], 0

    def watched(name):
        function = getattr(os, name)

        def call(*args):
            calls.append(name)
            if len(calls) == refused:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return function(*args)

        return call

    for name in ("mkdir", "writev", "pwritev"):
        monkeypatch.setattr(os, name, watched(name))

    def train(place):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Captured(place, run="word") as captured:
            calls.clear()
            for step in range(4):
                model[0].requires_grad_(step > 1)
                descend(model, optimizer, 2, 4, steps=1)
                captured.session._recorder._writer.drain()
            made = len(calls)
        return captured, made

    expected, made = train(path)
    assert made > 50
    for refused in range(1, made + 1):
        captured, _ = train(path.with_name(f"run{refused}.zarr"))
        with captured.trace as trace:
            # None if there was room in the old place of a file.
            missing = [int(steps) for steps in trace.attrs["capture"]["unwritten"].values()]
            assert captured.summary.rows == 4 - len(missing) >= 3
            assert trace.status == ("interrupted" if missing else "complete")
            assert about(trace) == about(expected.trace)
            for info in trace.tensors:
                steps = [step for step in expected.trace.steps(info.name) if step not in missing]
                assert trace.steps(info.name).tolist() == steps
                for step in steps:
                    assert (trace.read(info.name, step) == expected.trace.read(info.name, step)).all()
