"""Size, time and error of traces of sketches, beside full ones; prints the table of docs/sketch-traces.md.

python benchmarks/bench_sketch_traces.py [--elements 8000000] [--steps 3]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import gtrace
from gtrace.sweep import EXPECTATION, expand
from gtrace.trace import SketchPlan, create_trace, sketch_trace
from gtrace.trace.convert import disk_bytes
from gtrace.trace.sketches import DEFAULT_SKETCHES

METHODS = "qsgd,qsgdinf,nuqsgd,natural,terngrad,alq,alq-n,alqg,amq,amq-n,zipml"
LAWS = {
    "normal": lambda rng, n: rng.standard_normal(n, np.float32) * np.float32(1e-3),
    "lognormal, sigma 2": lambda rng, n: (rng.lognormal(-8, 2, n) * rng.choice([-1, 1], n)).astype(np.float32),
    "Student t, 3": lambda rng, n: rng.standard_t(3, n).astype(np.float32),
}


def write_full(path: Path, law: str, elements: int, steps: int) -> float:
    rng = np.random.default_rng(0)
    rows = [LAWS[law](rng, elements) for _ in range(steps)]
    started = time.perf_counter()
    with create_trace(path, force=True) as writer:
        for step, row in enumerate(rows):
            writer.append(step, "w", row)
            writer.commit(step)
    return time.perf_counter() - started


def expectations(path: Path, refit: str) -> tuple[dict[tuple[int, str], float], float]:
    codecs = expand(METHODS, {"bits": [2, 3, 4]})
    started = time.perf_counter()
    rows = gtrace.run_sweep(path, codecs, draws=0, refit=refit, jobs=1).rows()
    found = {(r["step"], r["codec"]): r["relative_variance"] for r in rows if r["draw"] == EXPECTATION}
    return found, time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=8_000_000)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        small = folder / "warm.zarr"
        write_full(small, "normal", 100_000, 2)
        expectations(small, "each")
        for law in LAWS:
            full = folder / "full.zarr"
            spent = write_full(full, law, args.elements, args.steps)
            truth = {refit: expectations(full, refit) for refit in ("each", "previous")}
            sweep = truth["each"][1]
            print(f"\n{law}: full {disk_bytes(full) / 1e6:.1f} MB, written in {spent:.2f} s, swept in {sweep:.2f} s")
            for mantissa in (4, 6, 8, 10):
                out = folder / f"{mantissa}.zarr"
                plan = SketchPlan.parse(DEFAULT_SKETCHES, mantissa)
                started = time.perf_counter()
                done = sketch_trace(full, out, sketch=plan, force=True)
                spent = time.perf_counter() - started
                errors = {}
                for refit, (values, _) in truth.items():
                    found, sweep = expectations(out, refit)
                    errors[refit] = max(abs(found[key] / value - 1) for key, value in values.items() if value)
                values = 4 * args.elements * args.steps
                print(
                    f"  {mantissa:2d} bits: {done.bytes_after / 1e3 / args.steps:7.0f} kB a step, "
                    f"{done.bytes_after / values:.3%} of float32, sketched in {spent:.2f} s, swept in {sweep:.2f} s, "
                    f"largest relative error {errors['each']:.1e} (levels of the same step), "
                    f"{errors['previous']:.1e} (of the step before)"
                )


if __name__ == "__main__":
    main()
