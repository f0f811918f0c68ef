"""What whole sweeps take, each in a fresh process: CPU seconds, and nanoseconds per encoded value.

    OMP_NUM_THREADS=1 python benchmarks/sweep_speed.py FOLDER

Three traces of synthetic values (Student t with four degrees of freedom): a small GPT (four blocks of width 256,
vocabulary 1,000, 53 tensors; 12 steps in three bursts; ``--wide``: with fits at 2 to 8 bits, too; ``--every``: under
every method), the shapes of GPT-2 (``--large``: 124 million elements, three steps), and the one that ``gtrace demo``
records (``--demo TRACE``). A value is one element under one codec at one step. Beside it stands the time of one PCG64
float32 in the same turn, so that machines can be compared. Compiled kernels come from the cache: the first turn is
left out.

``--small`` measures cells instead: one codec at one step of one of 250 tensors of 512 values, 12 steps in three
bursts. From the time of a sweep, that of a sweep of ten of the tensors is taken off, and with it the start.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np

import gtrace

#: shapes of a block of width w
BLOCK = {
    "ln_1.weight": ("w",),
    "ln_1.bias": ("w",),
    "attn.qkv.weight": ("3w", "w"),
    "attn.qkv.bias": ("3w",),
    "attn.proj.weight": ("w", "w"),
    "attn.proj.bias": ("w",),
    "ln_2.weight": ("w",),
    "ln_2.bias": ("w",),
    "mlp.fc.weight": ("4w", "w"),
    "mlp.fc.bias": ("4w",),
    "mlp.proj.weight": ("w", "4w"),
    "mlp.proj.bias": ("w",),
}
GPT_STEPS = (*range(100, 104), *range(500, 504), *range(900, 904))
GPT_SWEEP = ("--methods", "qsgdinf,alq,zipml,topk,signsgd", "--bits", "2-5")
GPT_CODECS = 14
ONE = ("--jobs", "1")
#: sweeps of small tensors: what is measured -> options and number of codecs
CELLS = {
    "one codec, expectations": (("--methods", "qsgdinf", "--bits", "4", "--draws", "0", *ONE), 1),
    "7 codecs, expectations": (("--methods", "qsgdinf", "--bits", "2-8", "--draws", "0", *ONE), 7),
    "7 codecs, expectations and a draw": (("--methods", "qsgdinf", "--bits", "2-8", *ONE), 7),
    "12 codecs, 8 of them fitted, and a draw": (("--methods", "qsgdinf,alq,zipml", "--bits", "2-5", *ONE), 12),
}
#: fits of up to 128 magnitudes
WIDE_SWEEP = ("--methods", "alq,mcgq", "--bits", "2-8", *ONE)
#: one configuration of every method
EVERY_SWEEP = ("--methods", "all", "--bits", "4", *ONE)


class Cost(NamedTuple):
    """CPU and wall seconds of a child process."""

    cpu: float
    wall: float


def gpt_shapes(width: int, blocks: int, vocabulary: int, context: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of a GPT's parameters; the output layer shares the embedding and has a bias only when small."""
    sides = {"w": width, "3w": 3 * width, "4w": 4 * width}
    shapes: dict[str, tuple[int, ...]] = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}
    for block in range(blocks):
        shapes |= {f"h.{block}.{name}": tuple(sides[side] for side in shape) for name, shape in BLOCK.items()}
    return shapes | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def write(path: Path, shapes: dict[str, tuple[int, ...]], steps: tuple[int, ...]) -> None:
    """A trace of these shapes; each tensor has a scale of its own."""
    rng = np.random.default_rng(0)
    with gtrace.create_trace(path) as writer:
        for step in steps:
            for shape, name in zip(shapes.values(), shapes, strict=True):
                size = int(np.prod(shape))
                # Student t with four degrees of freedom, in float32 all through.
                chi = rng.standard_gamma(2.0, size, np.float32)
                values = rng.standard_normal(size, np.float32) / np.sqrt(chi / 2) * np.float32(0.01 / (1 + size % 7))
                writer.append(step, name, values.reshape(shape))
            writer.commit(step)


def child(*arguments: str) -> Cost:
    """Run ``gtrace`` in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # An installation keeps the bytecode of its modules; without it a process compiles them for a second.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    run = [sys.executable, "-m", "gtrace", *arguments]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Cost(cpu, time.perf_counter() - start)


def sweep(trace: Path, *options: str) -> Cost:
    """One sweep into a new file."""
    output = trace.with_suffix(".sweep.db")
    output.unlink(missing_ok=True)
    return child("sweep", str(trace), *options, "-o", str(output))


def cells(folder: Path, turns: int) -> None:
    """Measure :data:`CELLS`, print a table."""
    trace, steps, tensors, few = folder / "small.zarr", GPT_STEPS, 250, 10
    if not trace.exists():
        write(trace, {f"layer{k:03}.bias": (512,) for k in range(tensors)}, steps)
    print("| cells of small tensors | CPU s | us a cell |", "|---|--:|--:|", sep="\n")
    for name, (options, codecs) in CELLS.items():
        some = "--tensors", "layer00?.bias"
        costs = [(sweep(trace, *options).cpu, sweep(trace, *options, *some).cpu) for _ in range(turns + 1)]
        whole, part = map(min, zip(*costs[1:], strict=True))
        print(f"| {name} | {whole:.2f} | {1e6 * (whole - part) / (tensors - few) / len(steps) / codecs:.0f} |")


def random_floats() -> float:
    """Nanoseconds of one float32 of PCG64."""
    rng, best = np.random.Generator(np.random.PCG64(0)), float("inf")
    for _ in range(5):
        start = time.process_time()
        rng.random(1 << 22, np.float32)
        best = min(best, time.process_time() - start)
    return 1e9 * best / (1 << 22)


def main() -> None:
    """Write the traces that are missing, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--wide", action="store_true", help="also a sweep of alq and mcgq at 2 to 8 bits")
    parser.add_argument("--every", action="store_true", help="also a sweep of every method")
    parser.add_argument("--demo", type=Path, help="the trace of gtrace demo")
    parser.add_argument("--small", action="store_true", help="cells of small tensors instead")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.small:
        cells(given.folder, given.turns)
        return
    gpt, large = given.folder / "gpt.zarr", given.folder / "gpt2.zarr"
    small_shapes = {**gpt_shapes(256, 4, 1000, 64), "head.bias": (1000,)}
    large_shapes = gpt_shapes(768, 12, 50257, 1024)
    if not gpt.exists():
        write(gpt, small_shapes, GPT_STEPS)
    if given.large and not large.exists():
        write(large, large_shapes, (0, 1, 2))
    sizes = {
        name: sum(map(int, map(np.prod, shapes.values())))
        for name, shapes in (("gpt", small_shapes), ("gpt2", large_shapes))
    }
    values = sizes["gpt"] * len(GPT_STEPS) * GPT_CODECS
    tasks = {
        "GPT, 14 codecs, 1 job": (lambda: sweep(gpt, *GPT_SWEEP, *ONE), values),
        "GPT, 14 codecs, 2 jobs": (lambda: sweep(gpt, *GPT_SWEEP, "--jobs", "2"), values),
    }
    if given.wide:
        tasks["GPT, alq and mcgq at 2 to 8 bits, 1 job"] = (lambda: sweep(gpt, *WIDE_SWEEP), values)
    if given.every:
        tasks["GPT, every method at 4 bits, 1 job"] = (lambda: sweep(gpt, *EVERY_SWEEP), 0)
    if given.demo is not None:
        tasks["demo's trace, default sweep, 1 job"] = (lambda: sweep(given.demo, *ONE), 0)
        tasks["demo's trace, default sweep, 2 jobs"] = (lambda: sweep(given.demo, "--jobs", "2"), 0)
    if given.large:
        one = ("--methods", "qsgdinf:bits=4", *ONE)
        tasks["GPT-2, qsgdinf at 4 bits, 1 job"] = (lambda: sweep(large, *one), 3 * sizes["gpt2"])
    best: dict[str, Cost] = {}
    unit = float("inf")
    for turn in range(given.turns + 1):
        unit = min(unit, random_floats())
        for name, (task, _) in tasks.items():
            cost = task()
            if turn:
                best[name] = Cost(*map(min, best.get(name, cost), cost))
    print(f"load average {os.getloadavg()[0]:.1f}; one float32 of PCG64: {unit:.2f} ns; least of {given.turns} turns")
    rows = []
    for name, cost in best.items():
        each = 1e9 * cost.cpu / tasks[name][1] if tasks[name][1] else float("nan")
        rows.append([name, f"{cost.cpu:.2f}", f"{cost.wall:.2f}", f"{each:.1f}", f"{each / unit:.1f}"])
    head = "| sweep | CPU s | wall s | ns a value | of one PCG64 float32 |"
    print(head, "|---|--:|--:|--:|--:|", *(f"| {' | '.join(row)} |" for row in rows), sep="\n")


if __name__ == "__main__":
    main()
