"""A plan for 200 tensors out of 60 options each, from stored sketches: seconds of CPU and wall time.

Run with ``python benchmarks/bench_planning.py``. The trace is made first and not counted; kernels are compiled by a
small plan before. Measured are reading the sketches, all expectations, and the plan with its bounds, its frontier and
its resampled steps.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

import gtrace
from gtrace.planning import Budget, make_plan, measure
from gtrace.sweep import expand

BUCKETS = (512, 8192)


def options():
    """60 options: 29 uniform grids with each bucket size, 1 of powers of two, and exact."""
    steps = sorted({round(2 ** (k / 4)) for k in range(3, 33)})
    specs = [f"qsgdinf:bits={n.bit_length() + 1},steps={n},bucket_size={size}" for n in steps for size in BUCKETS]
    specs += [f"nuqsgd:bits={bits},bucket_size=8192" for bits in range(2, 9)]
    return [codec for spec in specs for codec in expand([spec])][:59]


def write(path, tensors, elements, steps):
    """Layers of a lognormal law, of scales that differ by orders of magnitude, as sketches."""
    rng = np.random.default_rng(0)
    sketch = ",".join([f"l2:{BUCKETS[1]}", *(f"linf:{size}" for size in BUCKETS)])
    with gtrace.create_trace(path, sketch=sketch) as writer:
        for step in range(steps):
            for k in range(tensors):
                scale = np.exp(rng.normal(-6, 1.5))
                values = scale * rng.standard_normal(elements) * np.exp(rng.standard_normal(elements))
                writer.append(step, f"layer{k}.weight", values.astype(np.float32))
            writer.commit(step)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--elements", type=int, default=20_000)
    parser.add_argument("--steps", type=int, default=1)
    args = parser.parse_args()
    codecs = options()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "layers.zarr"
        write(path, args.tensors, args.elements, args.steps)
        for tensors in (["layer0.weight"], None):
            wall, cpu = time.perf_counter(), time.process_time()
            with gtrace.open_trace(path) as trace:
                curves, _ = measure(trace, codecs, tensors=tensors, jobs=1)
            measured = time.process_time() - cpu
            plan = make_plan(curves, Budget("bits", 3.0, "--budget 3bits"), name="bench", provenance={})
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(
        f"{len(curves.tensors)} tensors x {len(curves.codecs)} options, {len(curves.steps)} step(s): {cpu:.2f} s of "
        f"CPU ({measured:.2f} s of them expectations), {wall:.2f} s; gap {plan.totals.gap:.3%}"
    )


if __name__ == "__main__":
    main()
