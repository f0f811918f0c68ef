"""Error at 1, 2, 3 and 4 measured bits of all families on four real traces, under each coder, and who leads where.

    python benchmarks/reference_table.py FOLDER

Trains four models for 142 steps each and captures four of them: a CNN on the UCI digits, a ResNet-8 on Fashion-MNIST,
a character transformer of two blocks on Shakespeare's sonnets, and a GPT of four blocks on the same text. Then it
sweeps every family of codecs that keeps no memory between steps, and some behind a rotation, and writes
benchmarks/results/reference-table.json, which docs/error-at-equal-bits.md shows. Traces and rows that are in
the folder already are kept.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch

import gtrace
from gtrace.codecs import split_specs
from gtrace.fitting.entropy import least_error
from gtrace.report.analysis.families import at_bits
from gtrace.report.analysis.sweep import analyze
from gtrace.sweep import expand
from gtrace.training.tasks import load_task
from gtrace.training.tasks.text import LENGTH, CharTransformer

RESULT = Path(__file__).resolve().parent / "results" / "reference-table.json"
STEPS, CAPTURED, SEED = 142, "20+2,140+2", 0
TARGETS = (1.0, 2.0, 3.0, 4.0)
CODERS = ("fixed", "huffman", "entropy")
#: parts of the values that a sparsifier sends for about 1 to 4 bits, and zeros that pruning aims at
KEPT = (0.02, 0.03, 0.05, 0.08, 0.1, 0.13)
#: what is beside ``all``: fewer bits than 2, and a rotation before codecs that have none
MORE = (
    "eden:bits=1,eden:bits=1.5,eden:bits=2.5,ecq:bits=1,ecq:bits=1.5,ecq:bits=2.5,rotate:qsgdinf,rotate:nuqsgd,"
    "rotate:zipml,rotate:intn,rotate:signsgd:scale=energy"
)
#: buckets of the two codecs by default, and bins an octave of the density behind the bound, as a power of two
BUCKET, BINS = 8192, 2
#: tensors with at least this part of the energy must have a code on both sides
MOST_ENERGY = 0.9
#: codecs with 16 bits, and those that find the levels of alq by gradient descent, which takes twenty times as long
LEFT_OUT = ("none", "fp16", "bf16", "alqg", "alqg-n")


class Gpt(torch.nn.Module):
    """Characters to the scores of the next one: four pre-norm blocks of causal attention on 128 features."""

    def __init__(self, characters: int, width: int = 128, heads: int = 4, blocks: int = 4) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(characters, width)
        self.places = torch.nn.Embedding(LENGTH, width)
        block = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = torch.nn.TransformerEncoder(block, blocks, torch.nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = torch.nn.Linear(width, characters, bias=False)
        self.head.weight = self.embedding.weight
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                # GPT-2's initialization, smaller where a block adds to what it got.
                ends = ("out_proj.weight", "linear2.weight")
                torch.nn.init.normal_(weight, 0.0, 0.02 / math.sqrt(2 * blocks) if name.endswith(ends) else 0.02)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """int64[n, t] -> float32[n, t, characters]."""
        x = self.embedding(codes) + self.places.weight[: codes.shape[1]]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(codes.shape[1])
        return self.head(self.blocks(x, mask=mask, is_causal=True))


class CharGpt(CharTransformer):
    """The task of the character transformer with a GPT."""

    name = "char-gpt"

    def model(self) -> Gpt:
        """A fresh network."""
        return Gpt(len(self._alphabet))


#: name -> what it is, and its task
MODELS = {
    "digits-cnn": ("CNN on the UCI digits", lambda: load_task("digits-cnn")),
    "resnet8": ("ResNet-8 on Fashion-MNIST", lambda: load_task("fashion-resnet8")),
    "char-transformer": ("transformer of 2 blocks on Shakespeare's sonnets", lambda: load_task("char-transformer")),
    "gpt": ("GPT of 4 blocks on Shakespeare's sonnets", CharGpt),
}


def capture(name, path):
    """Train a model on its task and capture it."""
    task = MODELS[name][1]()
    torch.manual_seed(SEED)
    model, random = task.model(), np.random.default_rng(SEED)
    optimizer = task.optimizer(model, task.recipe.lr)
    with gtrace.capture.record(model, optimizer, path, steps=CAPTURED):
        for _ in range(STEPS):
            optimizer.zero_grad()
            task.loss(model, task.batch(random, task.recipe.batch_size)).backward()
            if task.recipe.clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.recipe.clip)
            optimizer.step()


def codecs():
    """Every configuration that is swept."""
    ranges = {"bits": list(range(2, 9)), "ratio": list(KEPT), "sparsity": [1 - kept for kept in KEPT]}
    found = expand(["all", *split_specs(MORE)], ranges)
    return [one for one in found if not (one.stateful or one.linear or one.name in LEFT_OUT)]


def errors_of(result, name):
    """coder -> family -> error at each target, None where it is not measured; and the families whose error is bias."""
    found, biased = {}, set()
    for coder in CODERS:
        analysis = analyze(result, name, TARGETS, coder=coder)
        found[coder] = {
            family.label: [at.variance if math.isfinite(at.variance) else None for at in family.at]
            for family in analysis.families
            if any(math.isfinite(at.variance) for at in family.at)
        }
        for family in analysis.families:
            if any(analysis.configurations[i].bias > 0 for i in family.members):
                biased.add(family.label)
    return found, sorted(biased)


def rotation_of(result, name):
    """Whether rotation pays at each target, with Huffman codes."""
    rows = []
    for target in TARGETS:
        found = analyze(result, name, [target]).rotation
        known = () if found is None else found.known
        gaining = [one for one in known if one.verdict == "rotate"]
        whole = sum(one.energy for one in known)
        rows.append(
            {
                "bits": target,
                "tensors": len(known),
                "rotate": len(gaining),
                "energy": sum(one.energy for one in gaining),
                "ratios": sorted(one.ratio for one in known),
                "plain": sum(one.energy * one.plain_error for one in known) / whole if whole else None,
                "rotated": sum(one.energy * one.rotated_error for one in known) / whole if whole else None,
                "mixed": sum(one.energy * min(one.plain_error, one.rotated_error) for one in known) / whole
                if whole
                else None,
            }
        )
    return rows


def entropy_of(path):
    """qsgdinf, and with the Huffman bits that it takes for each gradient ecq and the bound on any unbiased code.

    Levels are fitted to each gradient itself, since what fits cost over time is another question.
    """
    bits = [*range(2, 11)]
    codecs = [*(f"qsgdinf:bits={b}" for b in bits), *(f"ecq:bits={b / 2:g}" for b in range(1, 17))]
    output = path.with_suffix(".levels.sweep.db")
    result = gtrace.run_sweep(path, codecs, output=output, refit="each", noise=False, optimal=False, jobs=1)
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    wanted = ("tensor", "step", "codec", "draw", "n", "energy", "squared_error", "bits_huffman")
    for tensor, step, spec, draw, n, energy, error, sent in zip(*(result[c].tolist() for c in wanted), strict=True):
        row = cells.setdefault((tensor, step), {}).setdefault(spec, [n, energy, math.nan, math.nan])
        # Expected errors and measured bits, as in a report.
        row[3 if draw >= 0 else 2] = sent if draw >= 0 else error
    sums = np.zeros((len(bits), 6))
    with gtrace.open_trace(path) as trace:
        for (tensor, step), rows in cells.items():
            values = trace.read(tensor, step)
            sketch = gtrace.MomentSketch.of(values, norm="linf", bucket_size=BUCKET).coarsen(BINS)
            others = [(row[3], row[2]) for spec, row in rows.items() if spec.startswith("ecq")]
            for k, b in enumerate(bits):
                n, energy, error, sent = rows[f"qsgdinf:bits={b}"]
                other = at_bits(*zip(*others, strict=True), sent).variance
                sums[k, :2] += sent * n, n
                if math.isfinite(other):
                    sums[k, 2:] += error, other, least_error(sketch, sent), energy
    whole = sums[:, 5].max()
    kept = sums[sums[:, 5] >= MOST_ENERGY * whole]
    curves = {name: (kept[:, 2 + k] / kept[:, 5]).tolist() for k, name in enumerate(("qsgdinf", "ecq", "bound"))}
    taken = (kept[:, 0] / kept[:, 1]).tolist()
    rows = []
    for target in TARGETS:
        row = {name: at_bits(taken, errors, target) for name, errors in curves.items()}
        known = all(math.isfinite(at.variance) and not at.elsewhere for at in row.values())
        rows.append({"bits": target, **{name: at.variance if known else None for name, at in row.items()}})
    return rows


def measure(name, folder):
    """Everything about one model."""
    path, sweep = folder / f"{name}.zarr", folder / f"{name}.sweep.db"
    started = time.process_time()
    if not path.exists():
        capture(name, path)
    result = gtrace.run_sweep(path, codecs(), output=sweep, noise=False, optimal=False, jobs=1)
    errors, biased = errors_of(result, name)
    with gtrace.open_trace(path) as trace:
        found = {
            "about": MODELS[name][0],
            "parameters": sum(info.size for info in trace.tensors),
            "tensors": len(trace.tensors),
            "steps": np.unique(result["step"]).tolist(),
            "configurations": len(set(result["codec"].tolist())),
            "errors": errors,
            "biased": biased,
            "rotation": rotation_of(result, name),
            "entropy": entropy_of(path),
        }
    print(f"{name}: {time.process_time() - started:.0f} s of CPU")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", nargs="*", choices=list(MODELS), help="these models; the others keep their numbers")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    found = json.loads(RESULT.read_text())["traces"] if args.only and RESULT.exists() else {}
    found |= {name: measure(name, args.folder) for name in args.only or MODELS}
    about = {"targets": TARGETS, "gtrace": gtrace.__version__, "torch": torch.__version__, "seed": SEED}
    RESULT.write_text(json.dumps({**about, "traces": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
