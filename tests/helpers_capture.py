"""Shared by the tests of hooks and of capture: captured blocks, scripts in a folder, and processes that run them."""

import atexit
import fcntl
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import torch

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.options import every_step

SAMPLES = Path(__file__).resolve().parent.parent / "samples"


class Captured:
    """A captured block, every step of it unless options say otherwise; what the user is told is kept."""

    def __init__(self, path, **options):
        self.path, self.said, self.expected = path, [], {}
        options = {"policy": every_step()} | options
        self.session = CaptureSession(CaptureOptions(path, **options), say=self.said.append)

    def __enter__(self):
        self.session.start()
        return self

    def __exit__(self, *_):
        self.summary = self.session.finish("complete")

    @functools.cached_property
    def trace(self):
        return gtrace.open_trace(self.path)

    def watch(self, optimizer, number=0):
        """Keep, by a hand-written hook, the gradients that each step of an optimizer finds."""
        steps = self.expected.setdefault(number, [])

        def keep(*_):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            steps.append([None if p.grad is None else p.grad.detach().clone() for p in parameters])

        optimizer.register_step_pre_hook(keep)
        return optimizer

    def sgd(self, model):
        return self.watch(torch.optim.SGD(model.parameters(), lr=0.1))

    def check(self, names, number=0):
        """Every gradient that the hook kept is in the trace, bit for bit, and nothing else is."""
        for place, name in enumerate(names):
            kept = {step: row[place] for step, row in enumerate(self.expected[number]) if row[place] is not None}
            assert self.trace.steps(name, optimizer=number).tolist() == list(kept)
            for step, gradient in kept.items():
                dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
                real = torch.view_as_real(dense) if dense.is_complex() else dense
                found = self.trace.read(name, step, optimizer=number)
                assert found.tobytes() == real.to(torch.float32).reshape(-1).numpy().tobytes()
        assert sorted(t.name for t in self.trace.tensors if t.optimizer == number) == sorted(names)
        assert self.said == []
        return self.trace


def environment():
    """Of child processes: one thread, and no rank left over from a launcher."""
    kept = {name: value for name, value in os.environ.items() if name != "RANK"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def write_script(path, source):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    return path


def run_python(*args, cwd, timeout=120):
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


@functools.cache
def _zygote():
    """What ``tests/zygote.py`` takes requests from."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, Path(__file__).with_name("zygote.py"), str(theirs.fileno())]
        process = subprocess.Popen(command, env=environment(), pass_fds=[theirs.fileno()])

    def end():
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


class Command:
    """A process of ``gtrace``, or of another module, that begins with torch imported; one at a time.

    With ``together``, stdout is what a terminal would show, stderr too. With ``terminal``, both go to that descriptor.

    Attributes:
        pid: its id.
        stdout: what it prints, as it comes.
        returncode: how it ended; negative after a signal, None before ``end``.
    """

    def __init__(self, *args, cwd, module="gtrace", env=None, together=False, terminal=None):
        self._stderr = os.fdopen(os.memfd_create("stderr"), "w+")
        # Ranks that share its position without a lock would write over each other's lines.
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_APPEND)
        self.returncode = None
        read, write = os.pipe()
        self.stdout = os.fdopen(read)
        told = json.dumps([str(cwd), env or environment(), [module, *map(str, args)]]).encode()
        with open(os.devnull) as nothing, os.fdopen(write, "w") as written:
            out = written.fileno() if terminal is None else terminal
            errors = out if together or terminal is not None else self._stderr.fileno()
            socket.send_fds(_zygote(), [told], [nothing.fileno(), out, errors])
        self.pid = int(_zygote().recv(64))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.returncode is None:
            self.stdout.close()  # a child of the process may go on, and hold the other end
            self.end(signal.SIGKILL)

    def end(self, by=None):
        """Its end, which a signal may bring about, and what it printed that was not read yet, if ``stdout`` is open."""
        if by is not None:
            os.kill(self.pid, by)
        self.returncode = int(_zygote().recv(64))
        with closing(self.stdout), self._stderr as errors:
            errors.seek(0)
            printed = "" if self.stdout.closed else self.stdout.read()
            return subprocess.CompletedProcess([], self.returncode, printed, errors.read())


def run_gtrace(*args, **options):
    """The end of a ``Command``."""
    with Command(*args, **options) as command:
        return command.end()


def but_first_line(err):
    """What a capture prints to stderr, without the line that comes after the first recorded step."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("gtrace: recording "))
