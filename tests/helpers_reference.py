"""Small pictures of every figure, made from data of a fixed seed, that later ones are compared with.

Run this file to make the pictures anew, after looking at each: ``python tests/helpers_reference.py``.
"""

import tempfile
from pathlib import Path

import numpy as np
from helpers_laws import memory_trace
from helpers_report import RUNS, fit_details, fitted_rows, result_of, rows_of, write_runs
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imsave

from gtrace.report import draw, figure_names, make_report
from gtrace.report.analysis.runs import analyze_runs
from gtrace.report.analysis.sweep import analyze
from gtrace.report.analysis.traces import TraceSummary, law_sections
from gtrace.report.inputs import Report
from gtrace.runlog import read_runlog

FOLDER = Path(__file__).parent / "report" / "reference"
#: Dots per inch of the pictures, and pixels that one block of a comparison is wide and high.
DPI, BLOCK = 40, 4
#: Mean difference of all blocks, and of the worst 0.5 % of blocks, of 1 for black against white.
MEAN, WORST = 0.004, 0.08


def reports():
    """Reports that have every figure between them."""
    rows = rows_of(bits=range(2, 7), steps=(0, 10, 20, 30), draws=1, seed=1)
    yield "", make_report([result_of(rows, provenance={"refit": [0, 20]})])
    yield "fitted-", make_report([result_of(fitted_rows(), details=fit_details())])
    with tempfile.TemporaryDirectory() as folder:
        records = read_runlog(write_runs(Path(folder) / "a.jsonl", steps=60))
    for record in (record for record in records if record["type"] == "step"):
        fitted = record["run"] != "none" and record["step"] % 25 == 0
        record.update(sim_seconds=0.1, fit_seconds=0.01 if fitted else 0.0)
    yield "", Report("run", runs=(analyze_runs(records),))
    yield "", Report("neural", runs=(analyze_runs([{**records[0], "kind": "neural"}, *records[1:], *_shadows()]),))
    yield "", Report("trace", traces=(TraceSummary("t", (), law_sections(memory_trace(kind="weight"))),))
    layers = [f"layers.{k}.{part}" for k in range(30) for part in ("attention.weight", "mlp.weight", "norm.weight")]
    many = analyze(result_of(rows_of(("qsgd", "natural"), [3, 4], layers, (0,), draws=0, seed=2)))
    yield "many-", Report("many", sweeps=(many,))


def _shadows():
    """Shadow passes of two layers and a bias, whose cosines fall towards the first."""
    random = np.random.default_rng(3)
    for step in range(0, 60, 6):
        for k, tensor in enumerate(("conv1.weight", "fc1.weight", "fc1.bias")):
            low, high = 0.9 + 0.04 * k + 0.01 * random.random(2) * (3 - k)
            values = {"cosine_alone": high, "error_alone": 0.1, "cosine": low - step / 1000, "error": 0.4}
            yield {"type": "shadow", "run": RUNS[1], "seed": 0, "step": step, "tensor": tensor, **values}


#: Of a report with a prefix these alone: the others look like those of the first.
_KEPT = {"fitted-": ("levels", "levels-of-other-tensors", "convergence"), "many-": ("layers",)}


def figures():
    """Each figure as (name of its picture, picture)."""
    done = set()
    for prefix, report in reports():
        for name in figure_names(report):
            if f"{prefix}{name}" not in done and name in _KEPT.get(prefix, (name,)):
                done.add(f"{prefix}{name}")
                yield f"{prefix}{name}", picture(draw(report, name))


def picture(figure):
    """(height, width, 3) of 0 to 1."""
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3] / 255


def blocks(image):
    """Means of each colour over squares of pixels: how a letter's edge is smoothed does not matter there."""
    height, width = (n // BLOCK * BLOCK for n in image.shape[:2])
    return image[:height, :width].reshape(height // BLOCK, BLOCK, width // BLOCK, BLOCK, 3).mean(axis=(1, 3))


def difference(image, reference):
    """Mean difference of blocks and of the worst 0.5 % of them."""
    off = np.sort(np.abs(blocks(image) - blocks(reference)).ravel())
    return float(off.mean()), float(off[-max(len(off) // 200, 1) :].mean())


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.png"):
        old.unlink()
    for name, image in figures():
        imsave(FOLDER / f"{name}.png", image, metadata={"Software": None})
