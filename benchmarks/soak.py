"""Appends a million small steps to a trace and watches what the writer holds: memory, open files, time per step.

    python benchmarks/soak.py [--steps 1000000] [--suffix .zarr .h5] [-o figures.json]

The writer of a capture that runs for a week must not grow. Each step has two tensors, 40 values in all. Twenty times on
the way the resident memory and the open descriptors of the process are read, by kind of trace; at the end the trace is
opened, all its steps are counted and a few of them are compared with what was written. Prints one line per reading and
one of the outcome; with ``-o`` the same as JSON. The first twentieth is warm-up: growth counts from its end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from gtrace.trace import create_trace, open_trace

SHAPES = {"layer.weight": (4, 8), "layer.bias": (8,)}
READINGS = 20
_PAGE = os.sysconf("SC_PAGE_SIZE")


def gradient(name, step):
    """The gradient of a tensor at a step, cheap and known."""
    return np.full(SHAPES[name], np.float32(step % 4096) / 64 - 17, np.float32)


def held():
    """Resident bytes and open descriptors of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE, len(os.listdir("/proc/self/fd"))


def soak(path, steps, say=lambda _line: None):
    """Write the trace and read the process on the way: a list of (steps, resident bytes, descriptors, seconds)."""
    readings = []
    start = time.perf_counter()
    every = max(1, steps // READINGS)
    with create_trace(path) as writer:
        for step in range(steps):
            for name in SHAPES:
                writer.append(step, name, gradient(name, step))
            writer.commit(step, loss=1.0, lr=0.1)
            if (step + 1) % every == 0:
                resident, descriptors = held()
                readings.append((step + 1, resident, descriptors, time.perf_counter() - start))
                say(
                    f"{path.suffix}: {step + 1:>9,} steps  {resident / 1e6:7.1f} MB  {descriptors} descriptors  "
                    f"{1e6 * readings[-1][3] / (step + 1):.0f} us a step"
                )
    return readings


def verify(path, steps):
    """Raise AssertionError unless the trace holds exactly what was written."""
    with open_trace(path) as trace:
        for name in SHAPES:
            found = trace.steps(name)
            assert np.array_equal(found, np.arange(steps)), f"{path}: steps are missing"
            for step in np.linspace(0, steps - 1, min(steps, 50)).astype(int):
                assert np.array_equal(trace.read(name, int(step)), gradient(name, step).ravel()), f"{path}: step {step}"


def outcome(suffix, steps, readings):
    """What a reader wants to know of one soak."""
    _, first, _, early = readings[0]
    _, last, _, seconds = readings[-1]
    return {
        "suffix": suffix,
        "steps": steps,
        "resident_mb_after_warm_up": round(first / 1e6, 1),
        "resident_mb_at_the_end": round(last / 1e6, 1),
        "growth_bytes_per_step": round((last - first) / (steps - readings[0][0]), 3),
        "descriptors": sorted({reading[2] for reading in readings}),
        "us_per_step_early": round(1e6 * early / readings[0][0], 1),
        "us_per_step_late": round(1e6 * (seconds - readings[-2][3]) / (steps - readings[-2][0]), 1),
        "minutes": round(seconds / 60, 1),
    }


def main():
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--steps", type=int, default=1_000_000)
    options.add_argument("--suffix", nargs="+", default=[".zarr", ".h5"], choices=[".zarr", ".h5"])
    options.add_argument("--folder", type=Path, help="where the traces go for the time being")
    options.add_argument("-o", "--output", type=Path)
    given = options.parse_args()
    found = []
    for suffix in given.suffix:
        with tempfile.TemporaryDirectory(dir=given.folder) as folder:
            path = Path(folder) / f"soak{suffix}"
            readings = soak(path, given.steps, lambda line: print(line, flush=True))
            verify(path, given.steps)
        found.append(outcome(suffix, given.steps, readings))
        print(json.dumps(found[-1]), flush=True)
    if given.output:
        given.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
