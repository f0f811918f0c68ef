"""The end of a capture: Ctrl-C while the last steps are being written, and a disk that does not answer."""

import json
import os
import re
import signal
import threading
import time

import pytest
import torch
from helpers_capture import Command, write_script
from helpers_hooks import descend

from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.options import EveryStep
from gtrace.capture.writer import AsyncWriter
from gtrace.trace import open_trace

#: training is over long before its steps are written
SLOW = """
    import sys, time, torch
    from gtrace.capture.writer import AsyncWriter

    write = AsyncWriter._write
    def slowly(self, row):
        time.sleep(0.04)
        write(self, row)
    AsyncWriter._write = slowly

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
            capture = trace.attrs["capture"]
            assert capture["unwritten"] == {"0": f"{len(steps)}-29" if len(steps) < 29 else "29"}, json.dumps(capture)


def test_training_does_not_wait_for_a_disk_that_never_answers(tmp_path, monkeypatch):
    monkeypatch.setattr("gtrace.capture.waiting.PATIENCE", 0.2)
    monkeypatch.setattr("gtrace.capture.writer.PATIENCE", 0.2)
    answer, said = threading.Event(), []
    monkeypatch.setattr(AsyncWriter, "_write", lambda *_: answer.wait())
    options = CaptureOptions(tmp_path / "run.zarr", EveryStep(), queue_bytes=2 * 44)
    session = CaptureSession(options, say=said.append)
    model = torch.nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.start([optimizer], [model])
    descend(model, optimizer, 8, 10, steps=20)
    summary = session.finish("complete")
    answer.set()
    assert (summary.rows, summary.dropped) == (0, 18)
    first, *_, last = said
    assert "no step was written for a while; steps are left out until the disk goes on" in first
    assert "the disk does not answer; the trace stays as it is" in last
