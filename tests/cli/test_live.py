"""``gtrace capture --live`` and ``gtrace info --follow``: what a terminal gets, and what the script notices."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import numpy as np
import pytest
from helpers_capture import Command, environment, run_python, write_script

from gtrace.cli import watch
from gtrace.cli.capture import WHOLE, LiveView
from gtrace.trace import create_trace

#: What the view writes: its lines with the cursor put back, and the room that it makes for them.
DRAWN = re.compile(rb"\x1b7.*?\x1b8", re.DOTALL)
ROOM = re.compile(rb"(\x1bD)+\x1b\[\d+A")
SCRIPT = """
    import os, sys, time, torch
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        children = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        children = "no child"
    print("\\033[32mbegin", sys.stdout.isatty(), children, "\\033[0m")
    for step in range(5000):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        sys.stdout.write(f"\\r{step % 7:3}%")
        sys.stdout.flush()
        if os.path.exists("enough"):
            break
        time.sleep(0.02)
    print("\\nend")
"""


@pytest.fixture
def terminal(monkeypatch):
    """The two ends of a terminal of 24 rows and 80 columns."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    yield ours, theirs
    os.close(ours)


def read_until(ours, *wanted, limit=120.0):
    """What comes from a terminal, up to the first of some words."""
    data, end = b"", time.monotonic() + limit
    while not any(word in data for word in wanted):
        ready, _, _ = select.select([ours], [], [], max(0.0, end - time.monotonic()))
        assert ready, data[-2000:]
        try:
            data += os.read(ours, 1 << 16)
        except OSError:
            # The last process that wrote to it has ended.
            break
    return data


def test_the_view_is_below_the_output_and_leaves_it_whole(tmp_path, terminal):
    ours, theirs = terminal
    write_script(tmp_path / "train.py", SCRIPT)
    with Command("capture", "--live", "train.py", cwd=tmp_path, terminal=theirs) as command:
        data = read_until(ours, b"steps recorded") + read_until(ours, b"training waited")
        (tmp_path / "enough").touch()
        os.close(theirs)
        data += read_until(ours)
        command.end()
    assert command.returncode == 0
    view = DRAWN.findall(data)
    shown = b"".join(view).decode()
    for text in ("step ", "steps recorded", "loss ", "norm ", "energy ", "training waited ", "on disk"):
        assert text in shown
    # The lines have their place at the end, and the whole terminal scrolls again when all is over.
    assert b"\x1b[1;" in data
    assert b"\x1b[r" in view[-1]
    rest = ROOM.sub(b"", DRAWN.sub(b"", data)).decode().replace("\r\n", "\n")
    rest = re.sub(r"gtrace: (recording|note).*\n|gtrace: \d+ .*\n", "", rest)
    assert re.fullmatch(r"\x1b\[32mbegin True no child \x1b\[0m\n(\r +\d%)+\nend\n", rest), rest


def test_the_view_ends_with_a_training_that_is_killed(tmp_path, terminal):
    ours, theirs = terminal
    write_script(tmp_path / "train.py", SCRIPT)
    with Command("capture", "--live", "train.py", cwd=tmp_path, terminal=theirs) as command:
        os.close(theirs)
        read_until(ours, b"waiting for the first", b"steps recorded")
        command.end(signal.SIGKILL)
        # Up to the end of the last process that has the terminal open.
        assert b"\x1b[r" in read_until(ours)


def test_a_view_that_was_killed_gives_the_terminal_back(tmp_path, terminal, monkeypatch):
    ours, theirs = terminal
    with open(theirs, "w") as errors:
        monkeypatch.setattr(sys, "stderr", errors)
        view = LiveView(tmp_path / "run.zarr", lambda: (0.0, 0.0), print)
        read_until(ours, b"waiting for the first")
        os.kill(view.pid, signal.SIGKILL)
        view.close()
    assert read_until(ours).endswith(WHOLE.encode())


def test_without_a_terminal_one_line_says_so(tmp_path, capfd):
    said = []
    view = LiveView(tmp_path / "run.zarr", lambda: (0.0, 0.0), said.append)
    view.close()
    assert said == ["gtrace: --live needs a terminal as stderr; nothing is shown live"]
    assert capfd.readouterr() == ("", "")


def write_steps(path, steps):
    """A trace of one layer whose loss falls, and its writer, which is not closed."""
    writer = create_trace(path)
    values = np.linspace(-1, 1, 300, dtype=np.float32) ** 3
    for step in range(steps):
        writer.append(step, "fc.weight", values)
        writer.append(step, "fc.bias", values[:10])
        writer.commit(step, loss=2.0 / (step + 1))
    return writer


def test_a_pipe_gets_lines_until_the_capture_ends(tmp_path, succeed):
    writer = write_steps(tmp_path / "run.zarr", 1)

    def go_on():
        time.sleep(0.5)
        writer.append(1, "fc.weight", np.ones(300))
        writer.commit(1, loss=1.0)
        writer.close("interrupted")

    thread = threading.Thread(target=go_on)
    thread.start()
    out, err = succeed("info --follow run.zarr")
    thread.join()
    assert err == ""
    first, last = out.splitlines()[0], out.splitlines()[-1]
    assert first.startswith("run.zarr: step 0, 1 step recorded; loss 2.00; norm ")
    assert last.startswith("run.zarr: step 1, 2 steps recorded, ")
    assert re.search(r"; loss 1.00; norm 17.3; expected error at 4 bits: alq .*%, nuqsgd .*%, qsgdinf .*%;", last)
    assert last.endswith("; interrupted")


def test_a_killed_capture_ends_the_view(tmp_path, succeed, monkeypatch):
    monkeypatch.setattr(watch, "_QUIET", 0.0)
    if (child := os.fork()) == 0:
        write_steps(tmp_path / "run.zarr", 2)
        os._exit(1)
    os.waitpid(child, 0)
    out, _ = succeed("info --follow")
    assert out.splitlines()[-1].endswith("; not finished: its process was killed, or runs on another machine")


def test_ctrl_c_leaves_a_terminal_as_it_was(tmp_path, terminal):
    ours, theirs = terminal
    with write_steps(tmp_path / "run.zarr", 3):
        command = [sys.executable, "-m", "gtrace", "info", "--follow", "run.zarr"]
        child = subprocess.Popen(command, cwd=tmp_path, env=environment(), stdout=theirs, stderr=theirs)
        os.close(theirs)
        data = read_until(ours, b"step 2, 3 steps recorded")
        child.send_signal(signal.SIGINT)
        data += read_until(ours)
        assert child.wait() == 0
    assert data.count(b"\x1b[?25l") == data.count(b"\x1b[?25h") == 1
    assert b"interrupted" not in data
    assert "100.0%    ████████████████  fc" in data.decode()


PRESSED = """
import gtrace.cli.watch
from gtrace.cli import main
press = "import os, signal\\nos.kill(os.getpid(), signal.SIGINT)\\nfor _ in range(10**8): pass"
gtrace.cli.watch.predicted_errors = lambda *_: exec(press)
main(["info", "--follow", "run.zarr"])
"""


def test_ctrl_c_in_the_middle_of_an_import_is_no_error(tmp_path):
    """Modules with dataclasses execute strings."""
    (tmp_path / "pressed.py").write_text(PRESSED)
    with write_steps(tmp_path / "run.zarr", 3):
        done = run_python("-m", "pressed", cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "step 2, 3 steps recorded" in done.stdout
