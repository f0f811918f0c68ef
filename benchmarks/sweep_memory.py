"""Peak memory of a sweep over a synthetic trace, above an interpreter that has gtrace imported.

    python benchmarks/sweep_memory.py FOLDER --gigabytes 1

The trace has two tensors of 16 million elements, some of a million, and many small ones; steps are added until it is as
large as asked. Each measurement is a process of its own with its workers. Its peak is the sum of their proportional set
sizes (PSS of Linux), in which a page that several of them share counts once, sampled fifty times a second.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import gtrace

SIZES = {
    "embedding.weight": 1 << 24,
    "head.weight": 1 << 24,
    **{f"block{k}.mlp.weight": 1 << 20 for k in range(8)},
    **{f"block{k}.attention.weight": 1 << 18 for k in range(16)},
    **{f"block{k}.norm.bias": 1024 for k in range(64)},
}
METHODS = "qsgd,qsgdinf,nuqsgd,alq,terngrad,fp:e4m3"
_SWEEP = "from gtrace.cli import main\ntry:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"


def write(path: Path, gigabytes: float) -> int:
    """Write a trace with about this many bytes of values; returns its number of steps."""
    rng = np.random.default_rng(0)
    steps = max(2, round(gigabytes * 1e9 / (4 * sum(SIZES.values()))))
    with gtrace.create_trace(path) as writer:
        for step in range(steps):
            for name, size in SIZES.items():
                writer.append(step, name, rng.standard_normal(size, np.float32) * np.float32(0.01 / (1 + step)))
            writer.commit(step)
    return steps


def memory(process: int) -> float:
    """Memory in MB of a process and of all that it started; 0 if it has ended."""
    place = Path(f"/proc/{process}")
    try:
        own = int((place / "smaps_rollup").read_text().split("Pss:")[1].split()[0])
        children = [int(child) for task in place.glob("task/*/children") for child in task.read_text().split()]
    except (OSError, IndexError):
        return 0.0
    return own / 1000 + sum(map(memory, children))


def peak(code: str, *arguments: str) -> tuple[float, float]:
    """Peak memory in MB and seconds of a child that runs the code."""
    start, most = time.perf_counter(), 0.0
    body = f"import sys; sys.argv[0] = 'gtrace'; exec({code!r})"
    with subprocess.Popen([sys.executable, "-c", body, *arguments], stdout=subprocess.DEVNULL) as child:
        while child.poll() is None:
            most = max(most, memory(child.pid))
            time.sleep(0.02)
    if child.returncode:
        raise SystemExit(child.returncode)
    return most, time.perf_counter() - start


def main() -> None:
    """Write the trace if it does not exist yet, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--chunk", default=str(1 << 24))
    parser.add_argument("--draws", nargs="+", default=["0", "1"])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    trace = given.folder / f"memory-{given.gigabytes:g}.zarr"
    if not trace.exists():
        write(trace, given.gigabytes)
    small = given.folder / "memory-small.zarr"
    if not small.exists():
        write(small, 0.01)
    # What is compiled on first use takes memory that no other sweep takes.
    peak(_SWEEP, "sweep", str(small), "--methods", METHODS, "--bits", "4", "-o", str(given.folder / "small.sweep.db"))
    (given.folder / "small.sweep.db").unlink()
    base, _ = peak("import gtrace.sweep.run")
    print(f"interpreter with gtrace: {base:.0f} MB; load average {os.getloadavg()[0]:.1f}", flush=True)
    for draws in given.draws:
        out = given.folder / "memory.sweep.db"
        out.unlink(missing_ok=True)
        found, seconds = peak(
            _SWEEP, "sweep", str(trace), "--methods", METHODS, "--bits", "4", "--draws", draws, "--jobs", given.jobs,
            "--chunk", given.chunk, "-o", str(out),
        )  # fmt: skip
        out.unlink()
        print(f"--draws {draws}: {found - base:.0f} MB above it, {seconds:.1f} s", flush=True)


if __name__ == "__main__":
    main()
