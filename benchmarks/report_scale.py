"""Time and memory of a report on a large sweep: python benchmarks/report_scale.py [LAYERS STEPS CONFIGURATIONS].

Makes a store of LAYERS x STEPS x CONFIGURATIONS expectations (200 x 50 x 70 by default: 700,000 rows) with values as a
sweep of a deep network has them, then measures reading it, summing it up, putting it into words and writing the page
with its figures, each in a process of its own, so that peaks of memory do not add up. The last two times are those
of everything from the start of loading.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

BITS = range(2, 9)
METHODS = ("qsgd", "qsgdinf", "nuqsgd", "alq", "alq-n", "amq", "amq-n", "zipml", "minmax", "rotate:qsgdinf")
STAGES = ("load", "analyze", "report", "page")


def make(path: Path, layers: int, steps: int, configurations: int) -> None:
    """A store with smooth curves of error over bits, layers of many sizes, and steps that drift."""
    from gtrace.sweep import EXPECTATION, ResultStore

    random = np.random.default_rng(0)
    sizes = (2 ** random.uniform(5, 22, layers)).astype(int)
    hardness = np.exp(random.normal(0, 0.5, layers))
    codecs = [(method, bits) for method in METHODS for bits in BITS][:configurations]
    factor = dict(zip(METHODS, np.exp(random.normal(0, 0.3, len(METHODS))), strict=True))
    store = ResultStore.create(path, {"command": "benchmark"}, "scale", force=True)
    for layer in range(layers):
        rows = []
        for step in range(steps):
            energy = float(sizes[layer] * 1e-4 * math.exp(-step / 20) * math.exp(random.normal(0, 0.5)))
            drift = math.exp(random.normal(0, 0.05)) * (1 + step / steps)
            for method, bits in codecs:
                variance = float(factor[method] * hardness[layer] * drift * 8.0 * 3.6 ** (2 - bits))
                total = 0.4 + 0.8 * (bits - 1) + float(random.normal(0, 0.01))
                rows.append(
                    {
                        "tensor": f"block.{layer}.weight",
                        "step": 100 * step,
                        "codec": f"{method}:bits={bits}",
                        "draw": EXPECTATION,
                        "method": method,
                        "bits": bits,
                        "params": json.dumps({"bits": bits, "bucket_size": 8192}),
                        "n": int(sizes[layer]),
                        "energy": energy,
                        "squared_error": variance * energy,
                        "relative_variance": variance,
                        "bits_fixed": float(bits),
                        "bits_entropy": 0.95 * total,
                        "bits_huffman": total,
                        "bits_total": total,
                        "ratio_float32": 32 / total,
                        "fitted_on": "previous" if step else "itself",
                    }
                )
        store.add(rows)
    store.close()


def measure(stage: str, path: Path) -> None:
    """Print seconds, peak memory and what came out, for the stages up to ``stage``."""
    import io

    from rich.console import Console

    from gtrace.report import analyze, make_report, print_report, write_report
    from gtrace.report.files import to_json
    from gtrace.report.text import to_markdown
    from gtrace.sweep import ResultStore

    begin = start = time.perf_counter()
    if stage in ("load", "analyze"):
        result = ResultStore.load(path)
    if stage == "analyze":
        begin = time.perf_counter()
        analyze(result)
    if stage in ("report", "page"):
        begin = start
        report = make_report([path])
        print_report(report, Console(file=io.StringIO(), width=160))
        to_markdown(report)
        to_json(report)
    if stage == "page":
        page = write_report(report, path.with_name("page.html"))[0]
        print(f"page of {page.stat().st_size / 1e6:.1f} MB")
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{stage:>8}  {seconds:6.2f} s  peak {peak:5.0f} MiB")


def main() -> None:
    layers, steps, configurations = (int(v) for v in sys.argv[1:4]) if len(sys.argv) > 3 else (200, 50, 70)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scale.sweep.db"
        begin = time.perf_counter()
        make(path, layers, steps, configurations)
        rows = layers * steps * configurations
        print(f"{rows:,} rows made in {time.perf_counter() - begin:.0f} s, {path.stat().st_size / 1e6:.0f} MB")
        for stage in STAGES:
            subprocess.run([sys.executable, __file__, "--stage", stage, str(path)], check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--stage"]:
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
