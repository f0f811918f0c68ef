"""What compiling kernels costs on a machine without a cache: CPU seconds of each kernel of one sweep.

    OMP_NUM_THREADS=1 python benchmarks/cold_start.py gpt.zarr --methods qsgdinf,alq,zipml,topk,signsgd --bits 2-5

The options are those of ``gtrace sweep``; the trace of the command above is made by ``sweep_speed.py``. The sweep runs
in this process, with an empty folder for compiled kernels. The table goes to results/cold_start.md too.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from numba.core import event

RESULT = Path(__file__).parent / "results" / "cold_start.md"


class Kernels(event.Listener):
    """CPU seconds of each kernel, helpers included."""

    def __init__(self):
        self.depth, self.start = 0, 0.0
        self.seconds, self.signatures = defaultdict(float), Counter()

    def on_start(self, _event):
        if not self.depth:
            self.start = time.process_time()
        self.depth += 1

    def on_end(self, ended):
        self.depth -= 1
        if not self.depth:
            function = ended.data["dispatcher"].py_func
            name = f"{function.__module__.split('.')[-1]}.{function.__name__}"
            self.seconds[name] += time.process_time() - self.start
            self.signatures[name] += 1


def main():
    """Sweep once, print and write the table."""
    kernels = Kernels()
    event.register("numba:compile", kernels)
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        from gtrace.cli import main as gtrace

        start = time.process_time()
        try:
            gtrace(["sweep", *sys.argv[1:], "--jobs", "1", "-o", str(Path(name) / "sweep.db")])
        except SystemExit as done:
            if done.code:
                raise
        whole = time.process_time() - start
    rows = sorted(kernels.seconds.items(), key=lambda row: -row[1])
    lines = [f"| {name} | {kernels.signatures[name]} | {seconds:.2f} |" for name, seconds in rows]
    total = f"| all {len(rows)} | {kernels.signatures.total()} | {sum(kernels.seconds.values()):.2f} |"
    head = f"CPU of the whole process: {whole:.1f} s\n\n| kernel | signatures | CPU s |\n|---|--:|--:|\n"
    text = head + "\n".join([*lines, total]) + "\n"
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
