"""Where the time of a sweep goes, stage by stage, before a change and after it, as one picture.

    OMP_NUM_THREADS=1 python benchmarks/sweep_stages.py measure TRACE NAME    # adds NAME to the figures
    python benchmarks/sweep_stages.py draw OUTPUT.svg                         # draws all that were measured

The trace is the small GPT of ``sweep_speed.py``, swept in a process of its own with one job. A thread looks every two
milliseconds at what the others run, and the CPU time since its last look counts for the stage that they are in: the
functions of :data:`WHOLE` and :data:`STAGES` that they are in. ``PYTHONPATH`` may lead to another version of gtrace.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parent / "results" / "sweep-stages.json"
SWEEP = ("--methods", "qsgdinf,alq,zipml,topk,signsgd", "--bits", "2-5", "--jobs", "1")
#: stage -> its files, or functions in them. A stage counts with all that it calls, of several the one named first.
WHOLE = {
    "start, load kernels": ("numba/", "llvmlite/", "importlib"),
    "noise": ("sweep/noise_cost.py", "sweep/gradient_noise.py", "gtrace/noise/"),
    "read": ("gtrace/trace/",),
    "result file": ("sweep/store.py", "sweep/reading.py", "sweep/schema.py"),
}
#: the same for stages that call each other: the innermost counts
STAGES = {
    "fit levels": ("gtrace/fitting/", "replay.py:_optim", "level_sets.py:grids", "grids.py:fit"),
    "sketch": ("gtrace/sketch.py",),
    "encode, decode": ("engine.py:simulate", "sweep/level_draws.py", "parts.py:simulate"),
    "compare, W1": ("gtrace/metrics.py",),
    "sums over windows": ("draws.py:", "gradients.py:energy_of_sum"),
    "closed forms": ("level_sets.py", "engine.py:expect", "replay.py:_expected", "judged_alone"),
}
OTHER = "rows and the rest"
#: innermost functions of threads that wait
WAITING = ("threading.py", "queue.py", "engine.py:run_jobs", "sweep_stages.py")


def stage_of(frame: Any) -> str | None:
    """The stage that a stack is in; None for a thread that waits."""
    places = []
    while frame is not None:
        places.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    if any(name in places[0] for name in WAITING):
        return None
    for stage, names in WHOLE.items():
        if any(name in place for place in places for name in names):
            return stage
    for place in places:
        for stage, names in STAGES.items():
            if any(name in place for name in names):
                return stage
    return OTHER


def watch(arguments: list[str]) -> None:
    """Run ``gtrace`` here and print the CPU seconds of each stage as JSON."""
    spent: Counter[str] = Counter({"start, load kernels": time.process_time()})
    stop = threading.Event()

    def look() -> None:
        me, before = threading.get_ident(), time.process_time()
        while not stop.wait(0.002):
            now = time.process_time()
            stages = [stage_of(frame) for ident, frame in sys._current_frames().items() if ident != me]
            found = [stage for stage in stages if stage is not None]
            for stage in found:
                spent[stage] += (now - before) / len(found)
            if found:
                before = now

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    from gtrace.cli import main

    sys.argv = ["gtrace", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
    stop.set()
    watcher.join()
    print(json.dumps(spent), file=sys.stderr)


def measure(trace: Path, name: str) -> None:
    """Sweep in a child and add its figures."""
    output = trace.with_suffix(".stages.sweep.db")
    run = [sys.executable, __file__, "watch", "sweep", str(trace), *SWEEP, "-o", str(output)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    # An installation keeps the bytecode of its modules.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    for _ in range(2):
        # The first run compiles kernels.
        output.unlink(missing_ok=True)
        done = subprocess.run(run, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
    figures = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    figures[name] = {stage: round(seconds, 2) for stage, seconds in json.loads(done.stderr.splitlines()[-1]).items()}
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
    print(name, figures[name], f"whole: {sum(figures[name].values()):.1f} s")


def draw(output: Path) -> None:
    """One bar for each version, one color for each stage."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt

    figures = json.loads(FIGURES.read_text())
    stages = [*WHOLE, *STAGES, OTHER]
    colors = plt.get_cmap("tab20").colors
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.8 * len(figures)), layout="constrained")
    for row, spent in enumerate(figures.values()):
        left = 0.0
        for stage, color in zip(stages, colors, strict=False):
            seconds = spent.get(stage, 0.0)
            label = stage if row == 0 else None
            axes.barh(row, seconds, left=left, color=color, label=label, edgecolor="white", linewidth=0.5)
            if seconds > 0.03 * max(sum(each.values()) for each in figures.values()):
                axes.text(left + seconds / 2, row, f"{seconds:.1f}", ha="center", va="center", fontsize=8)
            left += seconds
        axes.text(left, row, f"  {left:.1f} s", va="center", fontweight="bold")
    axes.set_yticks(range(len(figures)), figures)
    axes.invert_yaxis()
    axes.set_xlabel("CPU seconds, a GPT of 3.4 M parameters, 12 steps, 14 codecs, one job")
    axes.set_xlim(right=1.08 * max(sum(each.values()) for each in figures.values()))
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(ncols=4, loc="outside upper center", fontsize=8, frameon=False)
    figure.savefig(output)


def main() -> None:
    """Parse and do."""
    if sys.argv[1:2] == ["watch"]:
        watch(sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "draw"))
    parser.add_argument("path", type=Path)
    parser.add_argument("name", nargs="?", default="now")
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.path, given.name)
    else:
        draw(given.path)


if __name__ == "__main__":
    main()
