"""What a sweep in expectation costs: more configurations, fitting, draws, and two jobs. All ratios, in one process.

    OMP_NUM_THREADS=1 python benchmarks/bench_sweep.py

CPU time of the whole process, least of several alternating turns, so that a busy machine slows all equally; wall
time for jobs alone. The trace has tensors of a million elements, Student t with four degrees of freedom.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

import gtrace
from gtrace.codecs import codec
from gtrace.codecs.level_sets import LevelSets
from gtrace.metrics import Reference
from gtrace.sketch import MomentSketch, SketchSet
from gtrace.sweep import ResultStore, expand, replay, sources
from gtrace.trace import Trace

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.codecs import Codec

SIZE = 1_000_000


def write(path: Path, tensors: int, steps: int) -> None:
    """Tensors of a million elements."""
    rng = np.random.default_rng(0)
    with gtrace.create_trace(path) as writer:
        for step in range(steps):
            for number in range(tensors):
                writer.append(step, f"layer{number}", (rng.standard_t(4, SIZE) * 0.01).astype(np.float32))
            writer.commit(step)


def fixed_grids() -> list[Codec]:
    """Seventy configurations with fixed grids on one norm and bucket size."""
    grids = [codec("qsgd", bits=bits) for bits in range(2, 9)]
    return grids + [codec("nuqsgd", bits=bits, p=p / 10) for p in range(1, 10) for bits in range(2, 9)]


def scan(path: Path, *, sketch: bool) -> None:
    """Read every gradient of a trace, and sketch it."""
    with gtrace.open_trace(path) as trace:
        for info in trace.tensors:
            for step in trace.steps(info.name).tolist():
                values = trace.read(info.name, step)
                if sketch:
                    MomentSketch.of(values, "l2", 8192)


def least(tasks: dict[str, Callable[[], object]], turns: int, clock: Callable[[], float]) -> dict[str, float]:
    """The least time of each task, which take turns; the first turn is for compilers and caches."""
    best = dict.fromkeys(tasks, float("inf"))
    for turn in range(turns + 1):
        for name, task in tasks.items():
            start = clock()
            task()
            if turn:
                best[name] = min(best[name], clock() - start)
    return best


#: where time goes: what is clocked -> the functions that do it
STAGES: dict[str, tuple[tuple[object, str], ...]] = {
    "read": ((Trace, "read"),),
    "totals and checks of values": ((sources, "count_nonfinite"), (Reference, "__init__")),
    "sketch": ((MomentSketch, "from_spec"), (SketchSet, "of_values")),
    "closed forms": ((LevelSets, "judge"), (LevelSets, "fit"), (LevelSets, "expect"), (LevelSets, "differ")),
    "rows": ((replay, "expected_columns"),),
    "store": ((ResultStore, "create"), (ResultStore, "add"), (ResultStore, "close")),
    "load": ((ResultStore, "load"),),
}


def stages(sweep: Callable[[], object], turns: int) -> dict[str, float]:
    """Least CPU seconds of each stage of a sweep with one job, in its own thread, and of what is left."""
    spent: dict[str, float] = {}

    def clocked(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*given, **named)
            finally:
                spent[stage] += time.thread_time() - start

        return timed

    best: dict[str, float] = {}
    with ExitStack() as stack:
        for stage, places in STAGES.items():
            for owner, name in places:
                raw = vars(owner)[name]
                # A class method is bound already when it is asked for by its name.
                shared = isinstance(raw, classmethod)
                timed = clocked(stage, getattr(owner, name) if shared else raw)
                stack.enter_context(mock.patch.object(owner, name, staticmethod(timed) if shared else timed))
        for turn in range(turns + 1):
            spent.update(dict.fromkeys(STAGES, 0.0))
            start = time.process_time()
            sweep()
            whole = time.process_time() - start
            found = {**spent, "everything else": whole - sum(spent.values()), "whole": whole}
            if turn:
                best = found if not best or whole < best["whole"] else best
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tensors", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gtrace-bench-") as folder:
        path = Path(folder) / "run.zarr"
        write(path, given.tensors, given.steps)
        many = fixed_grids()
        fitted = expand("alq,alq-n,amq,amq-n,zipml", {"bits": list(range(2, 9))})

        def sweep(codecs: list[Codec], *, draws: int = 0, jobs: int = 1, optimal: bool = False) -> object:
            return gtrace.run_sweep(path, codecs, draws=draws, jobs=jobs, optimal=optimal)

        cpu = least(
            {
                "read": lambda: scan(path, sketch=False),
                "read and sketch": lambda: scan(path, sketch=True),
                "1 configuration": lambda: sweep(many[:1]),
                f"{len(many)} configurations": lambda: sweep(many),
                f"{len(fitted)} with fitting": lambda: sweep(fitted),
                f"{len(fitted)} with fitting, beside the optimum": lambda: sweep(fitted, optimal=True),
                "1 configuration, 1 draw": lambda: sweep(many[2:3], draws=1),
            },
            given.turns,
            time.process_time,
        )
        cells = given.tensors * given.steps
        base, whole = cpu["1 configuration"], cpu["read and sketch"]
        print(f"{cells} gradients of {SIZE} elements; CPU time, load average {os.getloadavg()[0]:.1f}")
        print("| | ms per gradient | times 1 configuration | throughput against read and sketch |")
        print("|---|---|---|---|")
        for name, seconds in cpu.items():
            print(f"| {name} | {1e3 * seconds / cells:.2f} | {seconds / base:.2f} | {whole / seconds:.2f} |")
        print("| stage of | " + " | ".join(f"{n} configuration{'s' * (n > 1)}" for n in (1, len(many))) + " |")
        print("|---|---|---|")
        found = [stages(partial(sweep, chosen), given.turns) for chosen in (many[:1], many)]
        for stage in found[0]:
            print(f"| {stage} | " + " | ".join(f"{1e3 * each[stage] / cells:.2f}" for each in found) + " |")
        wall = least(
            {"1 job": lambda: sweep(many[2:9], draws=1), "2 jobs": lambda: sweep(many[2:9], draws=1, jobs=2)},
            2,
            time.perf_counter,
        )
        print(f"2 jobs: {wall['1 job'] / wall['2 jobs']:.2f} times 1 job (wall), load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
