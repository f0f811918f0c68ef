"""What gradient noise costs a sweep: CPU time with the yardstick over that without it, on traces of one large tensor.

Run with ``python benchmarks/noise_cost.py``; docs/noise.md holds its output.
"""

import tempfile
import time
from pathlib import Path

import numpy as np

from gtrace import create_trace, run_sweep
from gtrace.sweep.gradient_noise import Yardstick

SIZE, STEPS, REPEATS = 1_000_000, 6, 3
SWEEPS = {
    "qsgdinf, 4 bits, 1 draw": (["qsgdinf:bits=4"], 1),
    "alq and qsgdinf, 2 to 8 bits, 1 draw": ([f"{m}:bits={b}" for m in ("alq", "qsgdinf") for b in range(2, 9)], 1),
}


def write(path, ranks, replicas):
    random = np.random.default_rng(0)
    with create_trace(path) as writer:
        for step in range(STEPS):
            for rank in range(ranks):
                values = random.standard_normal(SIZE, dtype=np.float32)
                energy = float(values @ values)
                numbers = {"replicas": 4, "replicas_norm2": energy, "replicas_sum_norm2": energy} if replicas else {}
                writer.append(step, "weight", values, rank=rank, numbers=numbers)
            writer.commit(step)
    return path


def seconds(path, specs, draws):
    spent = []
    for _ in range(REPEATS):
        start = time.process_time()
        run_sweep(path, specs, draws=draws, jobs=1)
        spent.append(time.process_time() - start)
    return min(spent)


def main():
    noise = Yardstick.noise
    print("| trace | sweep | with noise / without |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, ranks, replicas in (("micro-batches", 1, True), ("2 ranks", 2, False), ("8 ranks", 8, False)):
            path = write(Path(folder) / f"{ranks}{replicas}.zarr", ranks, replicas)
            for about, (specs, draws) in SWEEPS.items():
                seconds(path, specs, draws)
                with_noise = seconds(path, specs, draws)
                Yardstick.noise = lambda *_: None
                without = seconds(path, specs, draws)
                Yardstick.noise = noise
                print(f"| {name} | {about} | {with_noise / without:.2f} |", flush=True)


if __name__ == "__main__":
    main()
