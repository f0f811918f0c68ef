"""Ends captured training runs in every way, at random moments, and checks what is in their traces.

    python benchmarks/killed_captures.py [--runs 50] [--seed 0] [--suffix .zarr .h5]

Each run is a process that trains a small network under ``gtrace capture``, with every step recorded, and ends by
kill -9, SIGTERM, ``os._exit``, an exception or Ctrl-C at a moment drawn at random. The program writes down each
gradient itself, too. A run is right if its trace opens, holds the first steps without a gap and in each of them exactly
what the program wrote down, and if none is missing unless it was killed by -9. A run that ended before anything was
recorded has no trace. Prints a table: runs, right ones, steps taken, steps that are missing (after kill -9 those that
still waited to be written).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gtrace.cli import main as command_line
from gtrace.errors import GtraceError
from gtrace.trace import open_trace

ENDS = ("kill -9", "SIGTERM", "os._exit", "exception", "Ctrl-C")
_SIGNALS = {"kill -9": signal.SIGKILL, "SIGTERM": signal.SIGTERM, "Ctrl-C": signal.SIGINT}
#: The layers of the program.
SHAPES = ((40, 30), (30, 5))

PROGRAM = """
import os, sys, time
import torch

how, after, log = sys.argv[1], int(sys.argv[2]), os.open(sys.argv[3], os.O_WRONLY | os.O_APPEND)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
os.write(int(sys.argv[4]), b".")
step = 0
while True:
    if step == after:
        if how == "exception":
            raise RuntimeError("the program's own")
        if how == "os._exit":
            os._exit(3)
    optimizer.zero_grad()
    model(torch.randn(16, 40)).square().mean().backward()
    os.write(log, b"".join(p.grad.numpy().tobytes() for p in model.parameters()))
    optimizer.step()
    step += 1
"""


class Result(NamedTuple):
    """The result of one run; ``wrong`` is empty if all is right."""

    taken: int
    recorded: int
    wrong: str


def one_run(folder: Path, how: str, suffix: str, rng: random.Random, longest: float) -> Result:
    """Run the program in a forked process, end it, and compare its trace with what it wrote down."""
    script, log, trace = folder / "train.py", folder / "steps", folder / f"run{suffix}"
    script.write_text(PROGRAM)
    log.touch()
    ready, started = os.pipe()
    after = rng.randrange(400) if how not in _SIGNALS else -1
    child = os.fork()
    if child == 0:
        _captured(folder, ["capture", "-o", str(trace), str(script), how, str(after), str(log), str(started)])
    os.close(started)
    os.read(ready, 1)
    os.close(ready)
    if how in _SIGNALS:
        time.sleep(rng.uniform(0, longest))
        os.kill(child, _SIGNALS[how])
    os.waitpid(child, 0)
    return compare(trace, np.fromfile(log, np.float32), surely=how != "kill -9")


def _captured(folder: Path, arguments: list[str]) -> None:
    """The command line in this process, which does not return."""
    code = 70
    # A shell that starts this program in the background has it ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        os.chdir(folder)
        with (
            open(folder / "said", "w") as said,
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            command_line(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def compare(path: Path, written: np.ndarray, *, surely: bool) -> Result:
    """The trace against the gradients that the program wrote down, one step after the other."""
    size = sum(rows * columns + columns for rows, columns in SHAPES)
    taken = written.size // size
    expected = written[: taken * size].reshape(taken, size)
    if not path.exists():
        return Result(taken, 0, f"no trace of {taken} steps" if surely and taken > 1 else "")
    try:
        with open_trace(path) as trace:
            steps = trace.scalars()["step"].tolist()
            if steps != list(range(len(steps))):
                return Result(taken, len(steps), "steps are missing in between")
            for step in steps[:taken]:
                found = np.concatenate([trace.read(info.name, step) for info in trace.tensors])
                if found.tobytes() != expected[step].tobytes():
                    return Result(taken, len(steps), f"step {step} is another one")
    except GtraceError as error:
        return Result(taken, 0, str(error))
    # The step that a signal interrupts may have been written down and not taken.
    lost = taken - len(steps)
    return Result(taken, len(steps), f"{lost} steps are lost" if surely and lost > 1 else "")


def main() -> int:
    """Print the table; 1 where a run was wrong."""
    parser = argparse.ArgumentParser(description="End captures at random moments and check their traces.")
    parser.add_argument("--runs", type=int, default=50, help="for each suffix, spread over the ways to end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=1.0, help="seconds after which a signal comes at the latest")
    parser.add_argument("--suffix", nargs="+", default=[".zarr", ".h5"])
    choice = parser.parse_args()
    # Once, here, and not in each process.
    import gtrace.capture.recorder
    import gtrace.torch_hooks.hooks
    import gtrace.trace.hdf5
    import gtrace.trace.shared  # noqa: F401

    faults = []
    print(f"{'format':8}{'end':12}{'runs':>6}{'right':>7}{'steps':>9}{'missing':>9}")
    for suffix in choice.suffix:
        rng = random.Random(choice.seed)
        results: dict[str, list[Result]] = {how: [] for how in ENDS}
        for number in range(choice.runs):
            how = ENDS[number % len(ENDS)]
            with tempfile.TemporaryDirectory() as folder:
                results[how].append(one_run(Path(folder), how, suffix, rng, choice.longest))
        for how, found in results.items():
            faults += [f"{suffix}, {how}: {result.wrong}" for result in found if result.wrong]
            right = sum(not result.wrong for result in found)
            taken, recorded = (sum(column) for column in list(zip(*found, strict=True))[:2])
            print(f"{suffix:8}{how:12}{len(found):6}{right:7}{taken:9,}{max(taken - recorded, 0):9,}", flush=True)
    print(*faults, sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
