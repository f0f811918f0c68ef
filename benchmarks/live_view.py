"""What ``gtrace capture --live`` costs the training: blocks of steps with the view, and with the view stopped.

    python benchmarks/live_view.py [BLOCKS]

One process trains and records every 5th step throughout. The view is a process of its own, on a terminal that nobody
looks at; once it shows predicted errors, it is stopped and continued by signals for every other block. Prints CPU
time and time of a step with the view over those without.
"""

import fcntl
import os
import pty
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import termios
import time
from pathlib import Path

import torch

from gtrace.capture import record
from gtrace.cli.capture import LiveView

#: of a block: some seconds, so that the view looks at the trace in each
STEPS = 150


def main(blocks):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.environ.setdefault("TERM", "xterm")
    kept = os.dup(2)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = torch.randn(128, 512)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    found = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "run.zarr")
        # Before the trace is there: what the view finds at its start is an earlier one.
        os.dup2(theirs, 2)
        view = LiveView(path, lambda: (0.1, 1.0), print)
        os.dup2(kept, 2)
        with record(model, optimizer, path, every=5):
            for _ in range(40):
                step()
            shown = b""
            while b"expected at" not in shown:
                shown = shown[-100:] + os.read(ours, 1 << 16)
                step()
            reader = subprocess.Popen(["cat"], stdin=ours, stdout=subprocess.DEVNULL)
            for block in range(2 * blocks + 1):
                os.kill(view.pid, signal.SIGCONT if block % 2 else signal.SIGSTOP)
                cpu, wall = time.process_time(), time.perf_counter()
                for _ in range(STEPS):
                    step()
                found[bool(block % 2)].append((time.process_time() - cpu, time.perf_counter() - wall))
            os.kill(view.pid, signal.SIGCONT)
            view.close()
    reader.kill()
    for place, what in enumerate(("CPU time", "time")):
        ratios = [
            on[place] / statistics.mean((before[place], after[place]))
            for on, before, after in zip(found[True], found[False], found[False][1:], strict=False)
        ]
        middle = statistics.mean(ratios)
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        base = 1e3 * statistics.median(one[place] for one in found[False]) / STEPS
        print(f"{what} of a step: {base:.2f} ms without the view, {middle - 1:+.2%} +- {error:.2%} with it")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
