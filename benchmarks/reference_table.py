"""Error at 1, 2, 3 and 4 measured bits of all families on four real traces, under each coder, and who leads where.

    python benchmarks/reference_table.py FOLDER

Trains four models for 142 steps each and captures eight of them: a CNN on the UCI digits, a ResNet-8 on Fashion-MNIST,
a character transformer of two blocks on Shakespeare's sonnets, and a GPT of four blocks on the same text. Then it
sweeps every registered codec that keeps no memory between steps, and some behind a rotation, and writes
benchmarks/results/reference-table.json, which docs/reference/error-at-equal-bits.md shows. Traces and sweeps that are
in the folder already are kept.
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
from gtrace.report.analysis.equal_bits import at_bits
from gtrace.report.analysis.sweep import analyze
from gtrace.sweep import ResultStore, expand
from gtrace.training.tasks import load_task
from gtrace.training.tasks.text import LENGTH, CharTransformer

RESULT = Path(__file__).resolve().parent / "results" / "reference-table.json"
STEPS, CAPTURED, SEED = 142, "10+2,60+2,110+2,140+2", 0
TARGETS = (1.0, 2.0, 3.0, 4.0)
CODERS = ("fixed", "huffman", "entropy")
#: parts of the values that a sparsifier sends for about 1 to 4 bits, and zeros that pruning aims at
KEPT = (0.02, 0.03, 0.05, 0.08, 0.1, 0.13)
#: what is beside ``all``: fewer bits than 2, and a rotation before codecs that have none
MORE = (
    "eden:bits=1,eden:bits=1.5,eden:bits=2.5,ecq:bits=1,ecq:bits=1.5,ecq:bits=2.5,rotate:qsgdinf,rotate:nuqsgd,"
    "rotate:zipml,rotate:intn,rotate:signsgd:scale=energy"
)
#: codecs that leave no error, or that run over all tensors together
LEFT_OUT = ("none", "powersgd")


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
    return [one for one in found if not one.stateful and not one.linear and str(one) not in LEFT_OUT]


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


def bound_of(trace, analysis):
    """The least error of any unbiased code with the bits that each qsgdinf sends for each tensor at each step.

    Returns:
        measured bits of each qsgdinf, and the bound on the error of the whole gradient.
    """
    result, weight = analysis[0], dict(zip(analysis[1].steps.tolist(), analysis[1].step_weights.tolist(), strict=True))
    sums: dict[str, np.ndarray] = {}
    sketches = {}
    wanted = ("tensor", "step", "codec", "draw", "method", "n", "energy", "bits_huffman", "bits_shared")
    for tensor, step, spec, draw, method, n, energy, bits, shared in zip(
        *(result[column].tolist() for column in wanted), strict=True
    ):
        if method != "qsgdinf" or draw < 0:
            continue
        if (tensor, step) not in sketches:
            sketches[tensor, step] = gtrace.MomentSketch.of(trace.read(tensor, step), norm="linf", bucket_size=8192)
        sent = bits + (shared or 0.0)
        numbers = np.array([sent * n, n, least_error(sketches[tensor, step], sent), energy])
        sums[spec] = sums.get(spec, 0.0) + weight[step] * numbers
    return [float(s[0] / s[1]) for s in sums.values()], [float(s[2] / s[3]) for s in sums.values()]


def entropy_of(trace, result, name):
    """ecq against qsgdinf at equal Huffman bits, and the bound on any unbiased code."""
    analysis = analyze(result, name, TARGETS)
    families = {family.label: family for family in analysis.families}
    bits, bound = bound_of(trace, (result, analysis))
    rows = []
    for k, target in enumerate(TARGETS):
        row = {
            label: families[label].at[k].variance for label in ("qsgdinf", "zipml", "ecq", "eden") if label in families
        }
        row["bound"] = at_bits(bits, bound, target).variance
        rows.append({"bits": target, **{key: value if math.isfinite(value) else None for key, value in row.items()}})
    return rows


def measure(name, folder):
    """Everything about one model."""
    path, sweep = folder / f"{name}.zarr", folder / f"{name}.sweep.db"
    started = time.process_time()
    if not path.exists():
        capture(name, path)
    if not sweep.exists():
        gtrace.run_sweep(path, codecs(), output=sweep, noise=False, optimal=False, jobs=1)
    result = ResultStore.load(sweep)
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
            "entropy": entropy_of(trace, result, name),
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
