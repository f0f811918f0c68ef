"""Peak memory of a sweep over a synthetic trace, above an interpreter that has gtrace imported.

    python benchmarks/sweep_memory.py FOLDER --gigabytes 1
    python benchmarks/sweep_memory.py FOLDER --chunks 513
    python benchmarks/sweep_memory.py FOLDER --memories

The trace has two tensors of 16 million elements, some of a million, and many small ones; steps are added until it is as
large as asked. Each measurement is a process of its own with its workers. Its peak is the sum of their proportional set
sizes (PSS of Linux), in which a page that several of them share counts once, sampled fifty times a second.

With ``--chunks`` the trace has one tensor, of that many chunks of 2^22 elements, which all are one file under many
names: 513 make more than 2^31 elements and take 16 MB of disk. Error, bits and norm must then be those of a trace of
one such chunk.

With ``--memories`` the trace has three steps of one matrix of 84 million elements, more than four chunks of a sweep.
Codecs that choose among all values, remember or turn them go over it, each in a sweep of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import zarr

import gtrace
from gtrace.sweep import ResultStore
from gtrace.trace.rows import checksum_bytes

#: elements of a chunk
CHUNK = 1 << 22

SIZES = {
    "embedding.weight": 1 << 24,
    "head.weight": 1 << 24,
    **{f"block{k}.mlp.weight": 1 << 20 for k in range(8)},
    **{f"block{k}.attention.weight": 1 << 18 for k in range(16)},
    **{f"block{k}.norm.bias": 1024 for k in range(64)},
}
METHODS = "qsgd,qsgdinf,nuqsgd,alq,terngrad,fp:e4m3"
#: they need more than a part of the values, or of what they remember
MEMORIES = ("topk", "mem-sgd", "dgc", "ef:topk", "ef:signsgd", "ef:alq:bits=4", "powersgd", "rotate:qsgd:bits=4")
MEMORIES += ("uniform8", "quantile8", "terngrad:clip=2.5", "thc:bits=4", "adacomp", "ef:memory_bits=8:intn:bits=4")
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


def write_repeated(path: Path, chunks: int) -> None:
    """Write a trace with one tensor of this many equal chunks, which are one file."""
    values = np.random.default_rng(0).standard_normal(CHUNK, np.float32)
    with gtrace.create_trace(path) as writer:
        writer.append(0, "w", values)
        writer.commit(0)
    group = path / "rank00000" / "weight_grad"
    place = group / "w" / "zarr.json"
    document = json.loads(place.read_text())
    document["shape"][1] = document["attributes"]["shape"][0] = chunks * CHUNK
    place.write_text(json.dumps(document))
    crc = 0
    for k in range(chunks):
        crc = checksum_bytes(values.view(np.uint8), crc)
        if k:
            os.link(group / "w" / "c.0.0", group / "w" / f"c.0.{k}")
    for name, factor in (("norm2", chunks), ("zeros", chunks)):
        table = zarr.open_array(group / name)
        table[0, 0] = table[0, 0] * factor
    zarr.open_array(group / "crc32c")[0, 0] = crc


def check_repeated(folder: Path, chunks: int) -> None:
    """Sweep one chunk and many; their rows must agree."""
    rows = []
    for count in (1, chunks):
        path = folder / f"repeated-{count}.zarr"
        write_repeated(path, count)
        out = path.with_suffix(".sweep.db")
        found, seconds = peak(
            _SWEEP, "sweep", str(path), "--methods", "qsgdinf:bucket_size=512,alq:bucket_size=8192", "--bits", "3",
            "--draws", "0", "--jobs", "1", "-o", str(out),
        )  # fmt: skip
        found_rows = ResultStore.load(out).rows()
        rows.append([[row["energy"] / count, row["squared_error"] / count, row["bits_entropy"]] for row in found_rows])
        print(f"{count * CHUNK:,} elements: {found:.0f} MB, {seconds:.0f} s", flush=True)
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4)
    print(f"rows agree: {np.max(np.abs(np.divide(*rows) - 1)):.1e} apart")


def check_memories(folder: Path) -> None:
    """Sweep a large matrix with codecs that see all of it."""
    path, rng = folder / "matrix.zarr", np.random.default_rng(0)
    if not path.exists():
        with gtrace.create_trace(path) as writer:
            for step in range(3):
                writer.append(step, "w", rng.standard_normal((5 << 14, 1024), np.float32) * np.float32(0.01))
                writer.commit(step)
    for spec in MEMORIES:
        out = folder / "matrix.sweep.db"
        out.unlink(missing_ok=True)
        arguments = ("sweep", str(path), "--methods", spec, "--jobs", "1", "-o", str(out))
        # The first compiles kernels.
        found = [peak(_SWEEP, *arguments, "--force") for _ in range(2)][1]
        rows = len(list(ResultStore.load(out).rows()))
        print(f"{spec}: {found[0]:.0f} MB, {found[1]:.1f} s, {rows} rows", flush=True)


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
    parser.add_argument("--chunks", type=int, help="one tensor of so many chunks instead")
    parser.add_argument("--memories", action="store_true", help="one matrix and codecs that see all of it instead")
    parser.add_argument("--jobs", default="2")
    parser.add_argument("--chunk", default=str(1 << 24))
    parser.add_argument("--draws", nargs="+", default=["0", "1"])
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.chunks:
        check_repeated(given.folder, given.chunks)
        return
    if given.memories:
        check_memories(given.folder)
        return
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
