"""What noise costs, predicted and trained: six tasks, three optimizers, three horizons, eight codecs.

Run with ``OMP_NUM_THREADS=1 python benchmarks/noise_evidence.py``. It trains what the cache does not hold yet, computes
the predictions, and writes benchmarks/results/noise-evidence.json, the figures in docs/noise/ and the tables of
docs/noise.md. ``--only train`` or ``--only judge`` does one half; ``--only verdicts`` asks again for the verdict on
each point of the result file, which takes minutes and none of the trainings.

From one checkpoint per task and optimizer (trained in full precision at batch 64), training goes on for 20, 100 and 400
steps: in full precision at batches of 4 to 256, and with each codec at batch 64. There is one worker. Every tensor is
encoded by itself (biases and norms as one), but the whole gradient as one by rotation and by codecs that choose
positions. All runs of a seed draw the same samples: batch 4 is the beginning of batch 8, and codecs see the batches of
64. What counts is the exact loss over the fixed training set.

The *measured batch* of a codec is the batch in full precision that has its loss. Losses between the batches of the
ladder are interpolated linearly in one over the batch, because noise is; neighbors of the mean ladder that are out of
order are pooled. Its interval holds every batch whose loss differs by less than two standard errors (over seeds,
paired).

CRITERIA, written down before the first run:

1. A point (task, optimizer, horizon, codec) is *resolved* if its interval ends inside the ladder on both sides and
   spans a factor of at most RESOLVED. Points whose whole interval or estimate leaves the ladder are bounds; they are
   counted apart: a prediction agrees with a bound if it is outside the ladder on that side, or inside by less than 1.5.
2. A prediction is *within 1.5* (or 2) of a resolved point if the larger of predicted and measured batch (the estimate,
   not the interval) is at most 1.5 (2) times the smaller.
3. A way of predicting *holds* for an optimizer and a horizon if 3 of 4 resolved points are within 1.5 and 9 of 10 are
   within 2. This is judged for the five unbiased codecs only. The other three are shown apart: topk and ef:topk have a
   bias, which is not noise, and nothing is claimed for them; for signsgd the answer is expected to be "not known".
4. All ways are judged alike: the filtered ratio with the model at hand (Gauss-Newton), the filtered ratio from what a
   trace holds (64 gradients of 16 samples at the checkpoint, or bursts of consecutive steps after it), the plain ratio
   tr(S_q) / tr(S_g), tr(H S_q) / tr(H S_g), and "no cost", which always says 64. A way that does not beat "no cost"
   says nothing. Nothing but the checkpoint, gradients there and codecs' errors goes into a prediction, and it has no
   constant that is fitted to the measured batches. In text a sample is a character, not a window.
5. For the ladder itself, predicted and measured excess loss over batch 256 in full precision are compared in the same
   way, with the same factors, wherever the measured excess is more than four standard errors.

Learning rates were set beforehand; whether training in full precision is stable at them was looked at in short runs,
for all but fashion-vit, whose rates are PyTorch's customary ones and were not looked at. terngrad is not among the
codecs, since without clipping it is qsgdinf with 2 bits. A criterion that is changed later is marked as such here.

CHANGED after six seeds of digits-mlp with SGD, whose intervals were too wide at 100 and 400 steps (16 of 24 points
unresolved): the loss at a horizon is the mean of five readings in its last fifth, not one reading at its end. The
criteria are the same.

ADDED after the first results: moments of curvature, for few samples of noise. Curvature along the samples' own
directions, which "sweep" and "trace" took at first, was far too large; both are now what gtrace does, and judged by the
same criteria. AdamW's "trace" predicts losses, as "model" does: a ratio leaves out that noise makes its steps smaller.
The number and order of the seeds followed the time that was left. "measured 43 or less" in a table is not among the
criteria, nor are the ends of the intervals, whose width was chosen by them.

ADDED later: the verdict on each point that follows from what is predicted. That the likely value convicts a codec, that
a bias or shorter steps do, and from which number of steps on, was chosen with these points; a tenth was the limit
before.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import nn
from torch.nn import functional

from gtrace import codec, create_trace, run_sweep
from gtrace.noise import Dynamics, filtered_ratio, impulse_weight
from gtrace.noise import predict as predicted_cost
from gtrace.report.analysis.safety import SAFE_COST, Outlook, verdict_on
from gtrace.report.figures import style
from gtrace.sketch import MomentSketch
from gtrace.sweep.noise_cost import noise_costs
from gtrace.trace import OptimizerFacts
from gtrace.training.tasks import sample_file
from gtrace.training.tasks.images import DigitsMLP, fashion_folder, read_idx
from gtrace.types import Key

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "noise-evidence.json"
TITLE = "What noise costs, measured and predicted"
NOTE = (
    "The batch in full precision with the loss of each codec at batch 64, with an interval of two standard errors, and "
    "what each way predicts. Made by `python benchmarks/noise_evidence.py`; docs/noise.md says what it means."
)
HORIZONS = (20, 100, 400)
#: (steps, seeds) in the order in which they run; the last groups only if time allows
SEEDS = (
    (400, range(3)),
    (20, range(12, 24)),
    (400, range(3, 5)),
    (400, range(5, 6)),
    (400, range(6, 7)),
    (400, range(7, 8)),
)
BATCH = 64
LADDER = (4, 8, 16, 32, 64, 128, 256)
UNBIASED = ("qsgdinf:bits=2", "nuqsgd:bits=3", "alq:bits=3", "rotate:qsgdinf:bits=2", "randomk:ratio=0.1")
BIASED = ("topk:ratio=0.1", "ef:topk:ratio=0.05", "signsgd")
CODECS = UNBIASED + BIASED
#: codecs with levels are fitted every 20 steps, from the first on
REFIT = 20
#: task -> optimizer -> learning rate
RATES = {
    "digits-mlp": {"sgd": 0.1, "momentum": 0.01, "adamw": 2e-3},
    "digits-cnn": {"sgd": 0.1, "momentum": 0.01, "adamw": 2e-3},
    "char-lstm": {"sgd": 1.0, "momentum": 0.1, "adamw": 4e-3},
    "char-transformer": {"sgd": 0.2, "momentum": 0.02, "adamw": 2e-3},
    "fashion-cnn": {"sgd": 0.05, "momentum": 0.005, "adamw": 2e-3},
    "fashion-vit": {"sgd": 0.1, "momentum": 0.01, "adamw": 1e-3},
}
OPTIMIZERS = ("sgd", "momentum", "adamw")
#: steps in full precision before the checkpoint
WARM_UP = {"digits": 400, "fashion": 600, "char": 1000}
FACTORS = (1.5, 2.0)
MARKERS = dict(zip(OPTIMIZERS, "os^", strict=True))
OPTIMIZER_COLORS = dict(zip(OPTIMIZERS, ("blue", "orange", "green"), strict=True))
HORIZON_COLORS = dict(zip(HORIZONS, ("#56b4e9", "#0072b2", "#d55e00"), strict=True))
RESOLVED = 2.0
#: readings of the loss whose mean counts, in the last fifth of a horizon
READINGS = 5
HOLDS = (0.75, 0.9)
#: codecs that see the whole gradient as one vector; the others see every tensor by itself
WHOLE = ("rotate:qsgdinf:bits=2", "randomk:ratio=0.1", "topk:ratio=0.1", "ef:topk:ratio=0.05")
#: characters in a window
LENGTH = 16
#: loss of a run that diverged
LIMIT = 20.0
#: draws of each codec's error, classes drawn for each window, bursts, and micro-batches with their samples
DRAWS, LABELS, BURSTS, MICRO, MICRO_SIZE = 256, 8, 32, 64, 16
#: first steps of the bursts of six that are swept
STARTS = (0, 30, 60, 90)
#: directions of curvature that are kept for AdamW, whose curvature depends on the noise
LEADING = 700


class Recurrent(nn.Module):
    """Characters to scores of the next one."""

    def __init__(self, characters):
        super().__init__()
        self.embedding = nn.Embedding(characters, 12)
        self.lstm = nn.LSTM(12, 20, batch_first=True)
        self.head = nn.Linear(20, characters)

    def forward(self, codes):
        return self.head(self.lstm(self.embedding(codes))[0])


class Block(nn.Module):
    """Attention with two heads and a linear layer of twice the width, each after a norm and beside a shortcut."""

    def __init__(self, width, causal):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.causal = causal

    def forward(self, x):
        n, length, width = x.shape
        q, k, v = self.attention(self.norm1(x)).view(n, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Characters(nn.Module):
    """Characters to scores of the next one, by attention."""

    def __init__(self, characters):
        super().__init__()
        self.embedding, self.places = nn.Embedding(characters, 16), nn.Embedding(LENGTH, 16)
        self.block, self.norm, self.head = Block(16, causal=True), nn.LayerNorm(16), nn.Linear(16, characters)

    def forward(self, codes):
        return self.head(self.norm(self.block(self.embedding(codes) + self.places.weight)))


class Patches(nn.Module):
    """Images of 12x12 pixels to ten scores, by attention among nine patches."""

    def __init__(self):
        super().__init__()
        self.patch, self.places = nn.Linear(16, 16), nn.Embedding(9, 16)
        self.block, self.norm, self.head = Block(16, causal=False), nn.LayerNorm(16), nn.Linear(16, 10)

    def forward(self, images):
        n = len(images)
        patches = images.view(n, 3, 4, 3, 4).transpose(2, 3).reshape(n, 9, 16)
        return self.head(self.norm(self.block(self.patch(patches) + self.places.weight)).mean(1))


def digits():
    images, classes = DigitsMLP()._train
    return images, classes


def fashion(side):
    folder, size = fashion_folder(), 2048
    images = read_idx(folder / "train-images-idx3-ubyte.gz", 0x803)[:size].astype(np.float32)
    classes = torch.from_numpy(read_idx(folder / "train-labels-idx1-ubyte.gz", 0x801)[:size].astype(np.int64))
    images = torch.from_numpy((images - images.mean()) / images.std())
    return functional.adaptive_avg_pool2d(images, side)[:, None], classes


def characters():
    """1,024 windows of the sonnets in lower case; what is no letter is a space, a line's end or a dot."""
    text = sample_file("sonnets.txt").read_text(encoding="ascii").lower()
    text = "".join(c if c.isalpha() or c in " \n" else "." for c in text)
    codes = torch.from_numpy(np.unique(np.array(list(text)), return_inverse=True)[1].astype(np.int64))
    starts = torch.arange(1024) * (len(codes) - LENGTH - 1) // 1024
    windows = codes[starts[:, None] + torch.arange(LENGTH + 1)]
    return windows[:, :-1], windows[:, 1:]


def build(task):
    """Inputs and targets of the whole training set, and a fresh model."""
    torch.manual_seed(0)
    if task == "digits-mlp":
        inputs, targets = digits()
        layers = (nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
        return inputs, targets, nn.Sequential(*layers)
    if task == "digits-cnn":
        inputs, targets = digits()
        layers = (
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
        )  # fmt: skip
        return inputs.view(-1, 1, 8, 8), targets, nn.Sequential(*layers)
    if task == "fashion-cnn":
        inputs, targets = fashion(14)
        layers = (
            nn.Conv2d(1, 8, 5, 2, 2), nn.ReLU(), nn.Conv2d(8, 12, 3, 2, 1), nn.ReLU(), nn.Flatten(),
            nn.Linear(192, 10),
        )  # fmt: skip
        return inputs, targets, nn.Sequential(*layers)
    if task == "fashion-vit":
        inputs, targets = fashion(12)
        return inputs, targets, Patches()
    inputs, targets = characters()
    kinds = int(inputs.max()) + 1
    return inputs, targets, Recurrent(kinds) if task == "char-lstm" else Characters(kinds)


class Problem:
    """A task's training set and model; the parameters are views into one vector, and so are their gradients.

    Attributes:
        inputs, targets: the fixed training set.
        theta: float32[d], all parameters, matrices first; a leaf whose gradient torch.optim uses.
        tensors: name -> slice of theta; biases and norms are one tensor.
    """

    def __init__(self, task):
        self.task = task
        self.inputs, self.targets, self.model = build(task)
        named = sorted(self.model.named_parameters(), key=lambda item: item[1].dim() < 2)
        self.theta = nn.Parameter(torch.cat([p.detach().flatten() for _, p in named]))
        self.theta.grad = torch.zeros_like(self.theta)
        self.tensors, at = {}, 0
        for name, p in named:
            part = slice(at, at + p.numel())
            p.data, p.grad = self.theta.data[part].view(p.shape), self.theta.grad[part].view(p.shape)
            at = part.stop
            if p.dim() > 1:
                self.tensors[name] = part
        last = max(part.stop for part in self.tensors.values())
        self.tensors["vectors"] = slice(last, at)

    def loss(self, chosen):
        """Mean cross-entropy of some samples."""
        scores = self.model(self.inputs[chosen])
        return functional.cross_entropy(scores.flatten(0, -2), self.targets[chosen].flatten())

    def gradient(self, chosen):
        """float32[d] of some samples' mean loss: the buffer itself, overwritten by the next call."""
        self.theta.grad.zero_()
        self.loss(chosen).backward()
        return self.theta.grad

    def whole_loss(self):
        with torch.no_grad():
            value = self.loss(slice(None)).item()
        return value if math.isfinite(value) else math.inf

    def optimizer(self, name):
        lr = RATES[self.task][name]
        if name == "adamw":
            return torch.optim.AdamW([self.theta], lr=lr, foreach=False)
        return torch.optim.SGD([self.theta], lr=lr, momentum=0.9 if name == "momentum" else 0.0, foreach=False)


class Coded:
    """One worker's codec for all tensors of a problem."""

    def __init__(self, spec, tensors, seed):
        size = max(part.stop for part in tensors.values())
        self.codec, self.seed = codec(spec), seed
        self.tensors = {"all": slice(0, size)} if spec in WHOLE else tensors
        self.states = {name: self.codec.init(part.stop - part.start) for name, part in self.tensors.items()}

    def apply(self, gradient, step):
        """Replace float32[d] by what is decoded."""
        for name, part in self.tensors.items():
            values, state = gradient[part], self.states[name]
            if self.codec.needs is not None and self.codec.fits and step % REFIT == 0:
                state = self.codec.fit(state, MomentSketch.from_spec(values, self.codec.needs), step)
            decoded = self.codec.simulate(state, values, Key.derive(self.seed, tensor=name, step=step)).values
            self.states[name] = self.codec.update(state, values, decoded)
            gradient[part] = decoded


def samples(problem, seed, steps):
    """int64[steps, 256]: the samples of each step, with replacement; a smaller batch is their beginning."""
    random = np.random.default_rng([seed, sorted(RATES).index(problem.task)])
    return torch.from_numpy(random.integers(len(problem.targets), size=(steps, LADDER[-1])))


def read_at(horizon):
    """The steps after which the loss of a horizon is read."""
    return [horizon - k * horizon // 20 for k in range(READINGS - 1, -1, -1)]


def train(problem, optimizer, drawn, batch, coded=None):
    """Losses over the training set, READINGS of each horizon that is reached."""
    losses, wanted = [], [step for horizon in HORIZONS if horizon <= len(drawn) for step in read_at(horizon)]
    for step, chosen in enumerate(drawn):
        gradient = problem.gradient(chosen[:batch])
        if coded is not None:
            values = gradient.numpy()
            if not np.isfinite(values).all():
                return losses + [math.inf] * (len(wanted) - len(losses))
            coded.apply(values, step)
        optimizer.step()
        if step + 1 in wanted:
            losses.append(problem.whole_loss())
    return losses


class Checkpoint:
    """Weights and optimizer state after the warm-up; trained once and then read from the cache."""

    def __init__(self, folder, problem, name):
        path = folder / f"{problem.task}-{name}.pt"
        self.problem, self.name = problem, name
        if not path.exists():
            problem.theta.data.copy_(Problem(problem.task).theta.data)
            optimizer = problem.optimizer(name)
            train(problem, optimizer, samples(problem, 1000, WARM_UP[problem.task.split("-")[0]]), BATCH)
            state = {key: value.clone() for key, value in optimizer.state[problem.theta].items() if value is not None}
            torch.save({"theta": problem.theta.data.clone(), "state": state}, path)
        self.saved = torch.load(path)

    def restore(self):
        """The problem at the checkpoint's weights; returns its optimizer."""
        self.problem.theta.data.copy_(self.saved["theta"])
        optimizer = self.problem.optimizer(self.name)
        optimizer.state[self.problem.theta] = {key: value.clone() for key, value in self.saved["state"].items()}
        return optimizer


def run_all(folder, until):
    """Train what is missing, all tasks for some seeds before any of them for more."""
    problems = {task: Problem(task) for task in RATES}
    for steps, group in SEEDS:
        for task, problem in problems.items():
            for name in OPTIMIZERS:
                checkpoint = Checkpoint(folder, problem, name)
                path = folder / f"{task}-{name}.jsonl"
                done = {json.loads(line)["seed"] for line in path.read_text().splitlines()} if path.exists() else set()
                start = time.thread_time()
                for seed in group:
                    if seed in done:
                        continue
                    if time.time() > until:
                        return
                    drawn = samples(problem, seed, steps)
                    found = {}
                    for run in (*LADDER, *CODECS):
                        coded = None if run in LADDER else Coded(run, problem.tensors, seed)
                        batch = run if run in LADDER else BATCH
                        found[run] = train(problem, checkpoint.restore(), drawn, batch, coded)
                    with path.open("a") as file:
                        file.write(json.dumps({"seed": seed, "losses": found}) + "\n")
                print(
                    f"{task} {name} {steps} steps, seeds to {group[-1]}: {time.thread_time() - start:.0f} s", flush=True
                )


# --- measured ----------------------------------------------------------------------------------------------------


def measured_losses(folder, task, optimizer):
    """horizon -> run -> float64[seeds] losses, in the same order of seeds; diverged ones count as LIMIT."""
    lines = [json.loads(line) for line in (folder / f"{task}-{optimizer}.jsonl").read_text().splitlines()]
    out = {}
    for k, horizon in enumerate(HORIZONS):
        part = slice(k * READINGS, (k + 1) * READINGS)
        there = [line["losses"] for line in lines if len(line["losses"]["4"]) >= part.stop]
        runs = {
            run: np.minimum([np.mean(found[str(run)][part]) for found in there], LIMIT) for run in (*LADDER, *CODECS)
        }
        out[horizon] = runs
    return out


def pooled(means):
    """The nearest falling curve: neighbors that are out of order get their mean."""
    blocks = []
    for value in means:
        blocks.append([value, 1])
        while len(blocks) > 1 and blocks[-1][0] >= blocks[-2][0]:
            (a, n), (b, m) = blocks[-2], blocks[-1]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    return np.concatenate([np.full(n, value) for value, n in blocks])


def measured_batch(ladder, losses):
    """The batch that has these losses, with the batches that differ by less than two standard errors.

    Args:
        ladder: (batches, seeds) losses in full precision.
        losses: (seeds,) losses of a codec.

    Returns:
        The estimate, and the lower and upper end of the interval: the ladder's own ends if it leaves the ladder.
    """
    ladder = ladder + (pooled(ladder.mean(1)) - ladder.mean(1))[:, None]
    sizes = np.geomspace(LADDER[0], LADDER[-1], 400)
    places = np.interp(-1 / sizes, -1 / np.array(LADDER), np.arange(len(LADDER)))
    below = np.minimum(places.astype(int), len(LADDER) - 2)
    share = (places - below)[:, None]
    apart = losses - ((1 - share) * ladder[below] + share * ladder[below + 1])
    mean, error = apart.mean(1), apart.std(1, ddof=1) / math.sqrt(apart.shape[1])
    inside = sizes[np.abs(mean) <= 2 * error]
    # A codec between two sizes of the grid with a tiny error has no size inside.
    estimate = float(np.exp(np.interp(0, mean, np.log(sizes))))
    low, high = (inside.min(), inside.max()) if inside.size else (estimate, estimate)
    return estimate, min(float(low), estimate), max(float(high), estimate)


def kind(estimate, low, high):
    """What a measured point is good for."""
    first, last = LADDER[0], LADDER[-1]
    if estimate <= first * 1.001 and high < last * 0.999:
        return "below"
    if estimate >= last * 0.999 and low > first * 1.001:
        return "above"
    inside = low > first * 1.001 and high < last * 0.999
    return "resolved" if inside and high / low <= RESOLVED else "unresolved"


# --- predicted ---------------------------------------------------------------------------------------------------


class Directions(NamedTuple):
    """What the filter needs to know about curvature: leading directions, and no more than the diagonal of the rest.

    Attributes:
        rows: float32[k, d], R with R^T R the curvature in these directions.
        rest: float64[d], the diagonal of what they leave out.
    """

    rows: np.ndarray
    rest: np.ndarray


class AdamState(NamedTuple):
    """Adam's averages at the checkpoint, float64[d], and the number of its steps."""

    first: np.ndarray
    second: np.ndarray
    steps: int


class Findings:
    """What predictions are made of, all of it at a checkpoint; what takes long is cached.

    Attributes:
        bursts: float32[BURSTS, 3, d], gradients of consecutive steps in full precision after the checkpoint.
        terms: terms of the loss in a sample: 1, or the characters of a window.
        ladders: (way, horizon) -> batch -> predicted loss, less the loss at the checkpoint.
    """

    def __init__(self, folder, problem, name):
        self.task, self.name, self.lr = problem.task, name, RATES[problem.task][name]
        self.terms = problem.targets[0].numel()
        self.checkpoint = Checkpoint(folder, problem, name)
        self.path, self.problem = folder / f"{problem.task}-{name}.npz", problem
        self.tensors, self.ladders, bursts = problem.tensors, {}, []
        optimizer = self.checkpoint.restore()
        for chosen in samples(problem, 2000, 3 * BURSTS):
            bursts.append(problem.gradient(chosen[:BATCH]).numpy().copy())
            optimizer.step()
        self.bursts = np.stack(bursts).reshape(BURSTS, 3, -1)

    @functools.cached_property
    def _saved(self):
        if not self.path.exists():
            self.checkpoint.restore()
            np.savez(self.path, **self._compute())
        with np.load(self.path) as saved:
            return dict(saved)

    def _compute(self):
        n = len(self.problem.targets)
        each = np.stack([self.problem.gradient(slice(k, k + 1)).numpy().copy() for k in range(n)])
        random = np.random.default_rng(0)
        drawn = random.integers(n, size=(DRAWS, BATCH))
        errors = {spec: np.empty((DRAWS, each.shape[1]), np.float32) for spec in CODECS}
        for spec, found in errors.items():
            sender = Coded(spec, self.tensors, 99)
            for k, chosen in enumerate(drawn):
                exact = each[chosen].mean(0)
                found[k] = exact
                sender.apply(found[k], k)
                found[k] -= exact
        curvature = gauss_newton(self.problem)
        values, vectors = np.linalg.eigh(curvature)
        return {
            "each": each, "curvature": curvature.astype(np.float32), "values": np.maximum(values, 0),
            "vectors": vectors.astype(np.float32), **errors,
        }  # fmt: skip

    @property
    def each(self):
        """float32[n, d], the gradient of every training sample (in text, of every window)."""
        return self._saved["each"]

    @property
    def errors(self):
        """Codec -> float32[DRAWS, d], decoded minus exact gradient of batches of 64, and more."""
        return self._saved

    @property
    def curvature(self):
        """float32[d, d], the Gauss-Newton matrix of the training loss, see :func:`gauss_newton`."""
        return self._saved["curvature"]

    @property
    def values(self):
        """Its eigenvalues, ascending."""
        return self._saved["values"]

    @property
    def vectors(self):
        """Its eigenvectors, in columns."""
        return self._saved["vectors"]

    @functools.cached_property
    def noise(self):
        """float32[n, d] whose covariance is that of a sample's gradient."""
        return self.each - self.each.mean(0)

    @functools.cached_property
    def noise_along(self):
        """float64[d]: variance of a batch's gradient along every direction of curvature."""
        return np.square(self.noise @ self.vectors, dtype=np.float64).mean(0) / BATCH

    @functools.cache  # noqa: B019
    def errors_along(self, spec):
        """float64[d]: mean squared error of a codec along every direction of curvature."""
        return np.square(self.errors[spec] @ self.vectors, dtype=np.float64).mean(0)

    @functools.cache  # noqa: B019
    def few_errors(self, spec):
        """float32[64, d]: errors of a codec on the few gradients of a trace."""
        encoded, errors, sender = micro_batches(self)[2], [], Coded(spec, self.tensors, 7)
        for step in range(MICRO):
            decoded = encoded[step % len(encoded)].copy()
            sender.apply(decoded, step)
            errors.append(decoded - encoded[step % len(encoded)])
        return np.stack(errors)

    @functools.cache  # noqa: B019
    def short_cost(self, spec):
        """tr(H S) of a codec's errors, or of single samples' noise."""
        rows, scale = self.noise if spec is None else self.errors[spec], np.float32(1)
        if self.name == "adamw":
            state = self.adam_state
            scale = (1 / (np.sqrt(state.second / (1 - ADAM["beta2"] ** state.steps)) + ADAM["eps"])).astype(np.float32)
        return float(np.square((rows * scale) @ self.vectors, dtype=np.float64).mean(0) @ self.values)

    @functools.cached_property
    def leading(self):
        """The leading directions of curvature."""
        values, vectors = self.values[-LEADING:], self.vectors[:, -LEADING:]
        rest = np.diag(self.curvature) - np.square(vectors, dtype=np.float64) @ values
        return Directions((vectors * np.sqrt(values)).T.astype(np.float32), np.maximum(rest, 0))

    @property
    def adam_state(self):
        saved = self.checkpoint.saved["state"]
        return AdamState(saved["exp_avg"].double().numpy(), saved["exp_avg_sq"].double().numpy(), int(saved["step"]))

    @property
    def facts(self):
        """What a trace says about the optimizer."""
        if self.name == "adamw":
            return OptimizerFacts(kind="AdamW", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True)
        return OptimizerFacts(kind="SGD", momentum=0.9 if self.name == "momentum" else 0.0)

    @property
    def dynamics(self):
        return Dynamics.of(self.facts, self.lr)

    @functools.cached_property
    def swept(self):
        """Whether codecs see the whole gradient -> what `gtrace sweep` measures on a trace of the bursts."""
        gradients = self.bursts.reshape(-1, self.bursts.shape[-1])
        out = {}
        for whole in (False, True):
            tensors = {"all": slice(None)} if whole else self.tensors
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "run.zarr"
                with create_trace(path, attrs={"optimizers": {"0": self.facts.describe()}}) as writer:
                    for step in (start + k for start in STARTS for k in range(6)):
                        for name, part in tensors.items():
                            writer.append(step, name, gradients[step, part])
                        writer.commit(step)
                result = run_sweep(path, [spec for spec in CODECS if (spec in WHOLE) == whole], draws=1)
                out[whole] = noise_costs(result)
        return out


def gauss_newton(problem):
    """float64[d, d]: mean of p_c (d log p_c) (d log p_c)^T over samples and classes c with their probabilities p_c.

    In text, classes are drawn, LABELS times for every window; the characters of a window are independent given the
    text, so the gradients of whole windows are enough.
    """
    rows, terms = [], problem.targets[0].numel()
    random = torch.Generator().manual_seed(0)
    for k in range(len(problem.targets)):
        logs = problem.model(problem.inputs[k : k + 1])[0].log_softmax(-1)
        kinds = logs.shape[-1]
        if terms == 1:
            ways, factors = torch.arange(kinds)[:, None], logs.detach().exp().sqrt()
        else:
            ways = torch.multinomial(logs.detach().exp(), LABELS, replacement=True, generator=random).T
            factors = torch.full((LABELS,), math.sqrt(terms / LABELS))
        logs = logs.reshape(-1, kinds)
        for labels, factor in zip(ways, factors, strict=True):
            problem.theta.grad.zero_()
            (factor * logs.gather(1, labels[:, None]).mean()).backward(retain_graph=True)
            rows.append(problem.theta.grad.numpy().copy())
    total = np.zeros((rows[0].size, rows[0].size))
    for start in range(0, len(rows), 2048):
        block = np.stack(rows[start : start + 2048])
        total += block.T @ block
    return total / len(problem.targets)


def weight(found, horizon):
    """Curvature -> cost of noise of one a step, the mean over the readings of a horizon."""
    return lambda h: np.mean([found.dynamics.weight(h, steps) for steps in read_at(horizon)], axis=0)


class Noise(NamedTuple):
    """A gradient as the optimizer sees it.

    Attributes:
        mean: float64[d], its expectation.
        rows: float32[n, d], deviations from it.
        factor: their mean square times this is its variance.
    """

    mean: np.ndarray
    rows: np.ndarray
    factor: float

    @property
    def variance(self):
        """float64[d]."""
        return self.factor * np.square(self.rows, dtype=np.float64).mean(0)


ADAM = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "decay": 0.01}


def adam_loss(directions, state, gradient, noises, lr, horizon):
    """Predicted loss after some steps of AdamW, less the loss now.

    Args:
        directions: curvature.
        state: Adam's state.
        gradient: float64[d], expectation of the exact gradient.
        noises: list of Noise, independent: of the batch, of the codec.
        lr: learning rate.
        horizon: steps.
    """
    beta1, beta2, steps = ADAM["beta1"], ADAM["beta2"], np.arange(1, horizon + 1)
    target = np.square(noises[0].mean) + sum(noise.variance for noise in noises)
    # The second average without its bias towards zero, the mean over the horizon.
    unbiased = 1 - beta2 ** (state.steps + steps)
    old = float((beta2**steps / unbiased).mean()) * (1.0 if state.steps else 0.0)
    new = float(((1 - beta2**steps) / unbiased).mean())
    scale = 1 / (np.sqrt(old * state.second + new * target) + ADAM["eps"])
    root = np.sqrt(scale)
    rows = (directions.rows * root).astype(np.float32)
    values, vectors = np.linalg.eigh((rows @ rows.T).astype(np.float64))
    there = values > 1e-9 * values[-1]
    values = values[there]
    basis = rows.T @ (vectors[:, there] / np.sqrt(values)).astype(np.float32)
    # Progress without noise, in each direction and in the rest of space, where the loss is a slope.
    push, slope, first = (root * v for v in (noises[0].mean, gradient, state.first))
    inside = [v @ basis for v in (push, slope, first)]
    outside = [v - basis @ part for v, part in zip((push, slope, first), inside, strict=True)]
    y, m = np.zeros(values.size), inside[2].copy()
    flat, flat_m = np.zeros(root.size), outside[2].copy()
    wanted, found = set(read_at(horizon)), []
    for step in steps.tolist():
        m = beta1 * m + (1 - beta1) * (values * y + inside[0])
        y = (1 - lr * ADAM["decay"]) * y - lr * m
        flat_m = beta1 * flat_m + (1 - beta1) * outside[0]
        flat = flat - lr * flat_m
        if step in wanted:
            found.append(float(inside[1] @ y + values @ y**2 / 2 + outside[1] @ flat))
    small = 1e-6 * values[-1]
    options = {"momentum": beta1, "averaging": True, "decay": ADAM["decay"]}
    weights = np.mean([impulse_weight(np.append(values, small), t, lr, **options) for t in read_at(horizon)], axis=0)
    cost = 0.0
    for noise in noises:
        along = noise.factor * np.square((noise.rows * root.astype(np.float32)) @ basis, dtype=np.float64).mean(0)
        cost += float(weights[:-1] @ along)
        cost += float(weights[-1] / small * (directions.rest * scale**2 * noise.variance).sum())
    return float(np.mean(found)) + cost


class View(NamedTuple):
    """A checkpoint as somebody sees it: from the model, or from a trace.

    Attributes:
        directions: curvature.
        state: Adam's state.
        mean: float64[d], expectation of the gradient.
        noise: float32[n, d] whose mean square is the variance of one sample's gradient.
        errors: float32[draws, d] of a codec at batch 64.
    """

    directions: Directions
    state: AdamState
    mean: np.ndarray
    noise: np.ndarray
    errors: np.ndarray


def adam_batch(found, view, horizon, way):
    """The batch in full precision with the predicted loss of the codec; the predicted ladder is kept for the record."""
    sizes = (1, 2, *LADDER, 4 * LADDER[-1])

    def loss(batch, errors=None):
        noises = [Noise(view.mean, view.noise, 1 / batch)]
        if errors is not None:
            bias = errors.mean(0, dtype=np.float64)
            noises[0] = noises[0]._replace(mean=view.mean + bias)
            noises.append(Noise(bias, errors - bias.astype(np.float32), 1.0))
        return adam_loss(view.directions, view.state, view.mean, noises, found.lr, horizon)

    if (way, horizon) not in found.ladders:
        found.ladders[way, horizon] = {size: loss(size) for size in sizes}
    ladder = pooled([found.ladders[way, horizon][size] for size in sizes])
    return float(-1 / np.interp(-loss(BATCH, view.errors), -ladder, -1 / np.array(sizes)))


def by_model(found, spec, horizon):
    """The filtered ratio with the Gauss-Newton matrix; for AdamW with its leading directions."""
    if found.name == "adamw":
        mean = found.each.mean(0, dtype=np.float64)
        view = View(found.leading, found.adam_state, mean, found.noise, found.errors[spec])
        return adam_batch(found, view, horizon, "model")
    w = weight(found, horizon)(found.values)
    return BATCH / (1 + (w @ found.errors_along(spec)) / (w @ found.noise_along))


def micro_batches(found):
    """Gradients of 64 batches of 16 samples at the checkpoint, and of the 16 batches of 64 that they make up."""
    chosen = np.random.default_rng(1).integers(len(found.each), size=(MICRO, MICRO_SIZE))
    pieces = np.stack([found.each[part].mean(0) for part in chosen])
    return pieces - pieces.mean(0), MICRO_SIZE, pieces.reshape(-1, BATCH // MICRO_SIZE, pieces.shape[1]).mean(1)


def by_trace(found, spec, horizon):
    """The filtered ratio from 64 gradients of 16 samples at the checkpoint, and errors of encoded ones."""
    centered, size, encoded = micro_batches(found)
    errors, m = found.few_errors(spec), len(centered)
    if found.name == "adamw":
        noise = centered * np.float32(math.sqrt(size * m / (m - 1)))
        directions = Directions(noise * np.float32(math.sqrt(found.terms / m)), np.zeros(noise.shape[1]))
        # Adam's averages are those of the gradients, had training been here for long.
        mean = encoded.mean(0, dtype=np.float64)
        state = AdamState(mean, np.square(encoded, dtype=np.float64).mean(0), 10**6)
        return adam_batch(found, View(directions, state, mean, noise, errors), horizon, "trace")
    x = centered.astype(np.float64)
    variance = np.square(errors, dtype=np.float64).mean(0)
    ratio = filtered_ratio(
        x @ x.T, (x * variance) @ x.T, float(variance.sum()), weight(found, horizon),
        samples=size * found.terms, batch=BATCH * found.terms,
    )  # fmt: skip
    return BATCH / (1 + ratio.ratio)


def from_sweep(found, spec, horizon):
    """What gtrace predicts from a sweep of a trace of four bursts of six steps after the checkpoint."""
    costs = found.swept[spec in WHOLE]
    place, steps = costs.codecs.index(str(codec(spec))), read_at(horizon)[READINGS // 2]
    return predicted_cost(costs, place, found.dynamics, steps, batch=BATCH * found.terms)


def by_sweep(found, spec, horizon):
    """The estimate of :func:`from_sweep`; NaN where gtrace says that it does not know."""
    return from_sweep(found, spec, horizon).equivalent / found.terms


def lowest(found, spec, horizon):
    """The lower end of its interval."""
    return from_sweep(found, spec, horizon).least / found.terms


def highest(found, spec, horizon):
    """The upper end."""
    return from_sweep(found, spec, horizon).most / found.terms


def verdict(found, spec, horizon):
    """What a codec that trains for so long is called by its prediction.

    A report also looks at the energy of its bias and of its noise, and at the plain ratio where nothing is predicted.
    """
    costs = dataclasses.replace(found.swept[spec in WHOLE], batch=BATCH, tokens=found.terms)
    outlook = Outlook(why="", costs=costs, dynamics=found.dynamics, horizon=horizon, batch=BATCH)
    return verdict_on(outlook.predict(str(codec(spec))), horizon)


def by_plain_ratio(found, spec, horizon):
    """tr(S_q) / tr(S_g)."""
    return BATCH / (1 + found.errors_along(spec).sum() / found.noise_along.sum())


def by_curvature(found, spec, horizon):
    """tr(H S_q) / tr(H S_g); for AdamW with both scaled as the optimizer scales them at the checkpoint."""
    return BATCH / (1 + found.short_cost(spec) / (found.short_cost(None) / BATCH))


def no_cost(found, spec, horizon):
    """Always the batch."""
    return float(BATCH)


WAYS = {
    "model": by_model,
    "trace": by_trace,
    "sweep": by_sweep,
    "plain ratio": by_plain_ratio,
    "tr(HS)": by_curvature,
    "no cost": no_cost,
}
#: the interval of "sweep"
ENDS = {"least": lowest, "most": highest}


# --- judged ------------------------------------------------------------------------------------------------------


def predict(folder, problem, name, again):
    """Predictions and predicted ladders of a task and optimizer, from the cache if they are there."""
    path = folder / f"{problem.task}-{name}-predicted.json"
    known = json.loads(path.read_text()) if path.exists() else {"batches": {}}
    ways = WAYS | ENDS
    missing = [way for way in ways if way not in known["batches"] or way in again]
    if missing:
        found = Findings(folder, problem, name)
        for way in missing:
            known["batches"][way] = {
                spec: {str(horizon): ways[way](found, spec, horizon) for horizon in HORIZONS} for spec in CODECS
            }
        if "model" in missing:
            known["ladder"] = {str(horizon): excess(found, horizon) for horizon in HORIZONS}
        path.write_text(json.dumps(known))
    return known


def excess(found, horizon):
    """Predicted loss at the batches of the ladder over that at the largest, in full precision."""
    if found.name == "adamw":
        losses = [found.ladders["model", horizon][size] for size in LADDER]
        return [loss - losses[-1] for loss in losses]
    cost = float(weight(found, horizon)(found.values) @ found.noise_along) * BATCH
    return [cost * (1 / batch - 1 / LADDER[-1]) for batch in LADDER]


def judge(folder, again):
    """All points and ladders of the trainings that there are."""
    points, ladders = [], []
    for task in RATES:
        for name in OPTIMIZERS:
            if not (folder / f"{task}-{name}.jsonl").exists():
                continue
            predicted = predict(folder, Problem(task), name, again)
            for horizon, runs in measured_losses(folder, task, name).items():
                where = {"task": task, "optimizer": name, "horizon": horizon, "seeds": len(runs[BATCH])}
                ladder = np.stack([runs[batch] for batch in LADDER])
                above = ladder - ladder[-1]
                ladders.append(
                    where
                    | {"loss": ladder.mean(1).tolist(), "measured": above.mean(1).tolist()}
                    | {"error": (above.std(1, ddof=1) / math.sqrt(above.shape[1])).tolist()}
                    | {"predicted": predicted["ladder"][str(horizon)]}
                )
                for spec in CODECS:
                    batch = measured_batch(ladder, runs[spec])
                    found = {way: predicted["batches"][way][spec][str(horizon)] for way in WAYS | ENDS}
                    points.append(where | {"codec": spec, "measured": batch, "kind": kind(*batch), "predicted": found})
            print(f"{task} {name}: judged", flush=True)
    result = {"seeds": [[steps, len(group)] for steps, group in SEEDS], "points": points, "ladders": ladders}
    add_verdicts(folder, result)
    return result


def add_verdicts(folder, result):
    """The verdict on each point, from a sweep after its checkpoint."""
    findings = functools.cache(lambda task, name: Findings(folder, problems(task), name))
    problems = functools.cache(Problem)
    for p in result["points"]:
        p["verdict"] = verdict(findings(p["task"], p["optimizer"]), p["codec"], p["horizon"])


def outcome(point):
    """Whether the measured batch is at most a tenth smaller: yes, no, or the interval does not tell."""
    _, low, high = point["measured"]
    limit = (1 - SAFE_COST) * BATCH
    return "at most a tenth" if low >= limit else "more than a tenth" if high < limit else "not resolved"


def apart(predicted, measured):
    """Factor between two numbers, at least 1; a prediction that is missing is infinitely wrong."""
    return max(predicted / measured, measured / predicted) if math.isfinite(predicted) else math.inf


def shares(points, way):
    """Number of resolved points, and the share of them that a way predicts within each of the factors."""
    factors = np.array([apart(p["predicted"][way], p["measured"][0]) for p in points if p["kind"] == "resolved"])
    return len(factors), [float((factors <= factor).mean()) if factors.size else math.nan for factor in FACTORS]


def on_side(predicted, side):
    """Criterion 1 for points whose measured batch is outside the ladder."""
    return predicted <= LADDER[0] * FACTORS[0] if side == "below" else predicted >= LADDER[-1] / FACTORS[0]


def holds(points, way):
    """Criterion 3."""
    return all(share >= least for share, least in zip(shares(points, way)[1], HOLDS, strict=True))


def table(heads, rows):
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


def percent(points, way):
    count, (near, far) = shares(points, way)
    if not count:
        return "–"
    return f"{'**' if holds(points, way) else ''}{near:.0%} / {far:.0%}{'**' if holds(points, way) else ''}"


def summary(result):
    """The tables of docs/noise.md: name -> Markdown."""
    unbiased = [p for p in result["points"] if p["codec"] in UNBIASED]
    heads = ["optimizer", "steps", "resolved", *WAYS]
    rows = []
    for name in (*OPTIMIZERS, "all"):
        for horizon in (*HORIZONS, "all") if name == "all" else HORIZONS:
            some = [p for p in unbiased if name in (p["optimizer"], "all") and horizon in (p["horizon"], "all")]
            if some:
                count = f"{shares(some, 'model')[0]} of {len(some)}"
                rows.append([name, str(horizon), count, *(percent(some, way) for way in WAYS)])
    by_horizon = table(heads, rows)
    rows = []
    for spec in CODECS:
        some = [p for p in result["points"] if p["codec"] == spec]
        count = f"{shares(some, 'model')[0]} of {len(some)}"
        rows.append([f"`{spec}`", count, *(percent(some, way) for way in WAYS)])
    for task in RATES:
        some = [p for p in unbiased if p["task"] == task]
        if some:
            rows.append([task, f"{shares(some, 'model')[0]} of {len(some)}", *(percent(some, way) for way in WAYS)])
    some = [p for p in unbiased if p["measured"][0] <= BATCH / FACTORS[0]]
    count = f"{shares(some, 'model')[0]} of {len(some)}"
    rows.append([f"measured {BATCH / FACTORS[0]:.0f} or less", count, *(percent(some, way) for way in WAYS)])
    for side, words in (("below", f"below {LADDER[0]}"), ("above", f"above {LADDER[-1]}")):
        if not any(p["kind"] == side for p in unbiased):
            continue
        some = [p for p in unbiased if p["kind"] == side]
        right = (sum(on_side(p["predicted"][way], side) for p in some) for way in WAYS)
        rows.append([f"measured {words}", f"0 of {len(some)}", *(f"{n} agree" for n in right)])
    by_codec = table(["codec, or unbiased codecs on a task", "resolved", *WAYS], rows)
    rows = []
    for name in OPTIMIZERS:
        for horizon in HORIZONS:
            factors = ladder_factors(result, name, horizon)
            near = " / ".join(f"{(np.abs(np.log(factors)) <= math.log(f)).mean():.0%}" for f in FACTORS)
            low, middle, high = np.quantile(factors, [0.05, 0.5, 0.95])
            rows.append([name, str(horizon), str(len(factors)), near, f"{middle:.2f} ({low:.2f} to {high:.2f})"])
    heads = ["optimizer", "steps", "batches", "within 1.5 / 2", "predicted over measured: median (9 of 10)"]
    by_batch = table(heads, rows)
    outcomes = ("at most a tenth", "not resolved", "more than a tenth")
    rows = []
    for horizon in (*HORIZONS, "all"):
        for said in ("safe", "cannot tell", "at risk"):
            some = [outcome(p) for p in result["points"] if said == p["verdict"] and horizon in (p["horizon"], "all")]
            rows.append([str(horizon), said, *(str(some.count(one)) for one in outcomes)])
    verdicts = table(["steps", "verdict", *(f"measured: {one}" for one in outcomes)], rows)
    return {"shares": by_horizon, "codecs": by_codec, "ladder": by_batch, "verdicts": verdicts}


def ladder_factors(result, name, horizon):
    """Predicted over measured excess loss, for batches whose excess is known to four standard errors."""
    out = []
    for found in result["ladders"]:
        if (found["optimizer"], found["horizon"]) == (name, horizon):
            for measured, error, predicted in zip(found["measured"], found["error"], found["predicted"], strict=True):
                if measured > 4 * error > 0:
                    out.append(max(predicted, 1e-12) / measured)
    return np.array(out)


def all_points(result):
    """Every point, one a row."""
    rows = []
    for p in result["points"]:
        estimate, low, high = p["measured"]
        measured = {"below": f"below {LADDER[0]}", "above": f"above {LADDER[-1]}"}.get(
            p["kind"], f"{estimate:.0f} ({low:.0f} to {high:.0f})" + ("" if p["kind"] == "resolved" else ", unresolved")
        )
        cells = (f"{p['predicted'][way]:.0f}" for way in WAYS if way != "no cost")
        rows.append([p["task"], p["optimizer"], str(p["horizon"]), f"`{p['codec']}`", measured, *cells, p["verdict"]])
    ways = (way for way in WAYS if way != "no cost")
    return table(["task", "optimizer", "steps", "codec", "measured batch", *ways, "verdict"], rows)


def scatter(result):
    """Measured against predicted batches, one panel for each way."""
    titles = {
        "model": "Model at hand",
        "sweep": "Sweep, 16 samples of noise",
        "trace": "64 gradients at the same weights",
        "plain ratio": "Plain ratio",
    }
    some = [p for p in result["points"] if p["codec"] in UNBIASED and p["kind"] == "resolved"]
    figure = style.new_figure(7.6, 7.6)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (way, title) in zip(panels.flat, titles.items(), strict=True):
        diagonal(axes, (2, 150))
        for p in some:
            estimate, low, high = p["measured"]
            color, x = HORIZON_COLORS[p["horizon"]], max(p["predicted"][way], 2.2)
            axes.plot([x, x], [low, high], color=color, linewidth=0.6, alpha=0.4)
            axes.plot(x, estimate, MARKERS[p["optimizer"]], color=color, markersize=4.5, markeredgewidth=0, alpha=0.8)
        axes.set_title(f"{title}\n{{:.0%}} within 1.5, {{:.0%}} within 2".format(*shares(some, way)[1]))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(FixedLocator([2, 4, 8, 16, 32, 64, 128]))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(style.plain_number))
    for axes in panels[1]:
        axes.set_xlabel("predicted equivalent batch, of 64")
    for axes in panels[:, 0]:
        axes.set_ylabel("measured, with two standard errors")
    handles = [
        Line2D([], [], color=color, marker="o", linestyle="", label=f"{horizon} steps")
        for horizon, color in HORIZON_COLORS.items()
    ]
    handles += [Line2D([], [], color=style.INK, marker=m, linestyle="", label=name) for name, m in MARKERS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=6, frameon=False)
    return figure


def losses_figure(result):
    """Measured against predicted excess losses in full precision, one panel for each horizon."""
    figure = style.new_figure(9.0, 3.8)
    for axes, horizon in zip(figure.subplots(1, 3, sharex=True, sharey=True), HORIZONS, strict=True):
        diagonal(axes, (3e-4, 3))
        for found in (found for found in result["ladders"] if found["horizon"] == horizon):
            known = np.array(found["measured"]) > 4 * np.maximum(found["error"], 1e-12)
            x, y = np.array(found["predicted"])[known], np.array(found["measured"])[known]
            look = style.hue(OPTIMIZER_COLORS[found["optimizer"]], MARKERS[found["optimizer"]], "-")
            axes.plot(x, y, **look.curve() | {"linewidth": 0.6, "markersize": 3})
        style.log_ticks(axes.xaxis), style.log_ticks(axes.yaxis)
        axes.set(title=f"{horizon} steps", xlabel="predicted excess loss over batch 256")
    figure.axes[0].set_ylabel("measured excess loss")
    handles = [
        Line2D([], [], color=style.hue(color, "o", "-").line, marker=MARKERS[name], label=name)
        for name, color in OPTIMIZER_COLORS.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    return figure


def diagonal(axes, ends):
    """Logarithmic axes with the diagonal and the band of a factor of two."""
    ends = np.array(ends, float)
    axes.fill_between(ends, ends / FACTORS[-1], ends * FACTORS[-1], color=style.GRID, linewidth=0, zorder=0)
    axes.plot(ends, ends, color=style.MUTED, linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)


def write(result):
    """Result file and figures."""
    write_points(result)
    with style.styled():
        for name, figure in (("prediction", scatter(result)), ("ladder", losses_figure(result))):
            figure.savefig(ROOT / "docs" / "noise" / f"{name}.svg", metadata={"Date": None})
    write_tables(summary(result))


def write_points(result):
    """Every point, for programs and for people."""
    RESULT.write_text(json.dumps(rounded(result), indent=1) + "\n")
    RESULT.with_suffix(".md").write_text(f"# {TITLE}\n\n{NOTE}\n\n{all_points(result)}\n")


def write_tables(tables):
    """Tables of docs/noise.md, by name."""
    page = ROOT / "docs" / "noise.md"
    text = page.read_text()
    for name, found in tables.items():
        begin, end = f"<!-- table: {name} -->\n", f"\n<!-- end: {name} -->"
        head, _, rest = text.partition(begin)
        text = head + begin + found + end + rest.partition(end)[2]
    page.write_text(text)


def rounded(value):
    """Four digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, (list, tuple)) else value


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gtrace" / "noise-evidence"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of checkpoints and losses")
    parser.add_argument("--only", choices=("train", "judge", "verdicts"))
    parser.add_argument("--until", type=float, default=math.inf, help="start no training after this time (epoch)")
    parser.add_argument("--again", nargs="*", default=(), choices=tuple(WAYS | ENDS), help="ways to predict again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    if args.only == "verdicts":
        result = json.loads(RESULT.read_text())
        for p in result["points"]:
            p["predicted"] = {way: math.nan if size is None else size for way, size in p["predicted"].items()}
        add_verdicts(args.cache, result)
        write_points(result)
        # Numbers of the result file are rounded, those of the other tables were not.
        write_tables({"verdicts": summary(result)["verdicts"]})
        return
    if args.only != "judge":
        run_all(args.cache, args.until)
    if args.only != "train":
        write(judge(args.cache, args.again))


if __name__ == "__main__":
    main()
