"""How well does the noise cost of gtrace.noise predict training? Six tasks, three optimizers, three horizons, eight codecs.

Run with ``OMP_NUM_THREADS=1 python benchmarks/noise_evidence.py``. It trains what the cache does not hold yet, computes
the predictions, and writes benchmarks/results/noise-evidence.json, the figures in docs/noise/ and the tables of
docs/noise.md. ``--only train`` or ``--only judge`` does one half.

From one checkpoint per task and optimizer (trained in full precision at batch 64), training goes on for 20, 100 and 400
steps: in full precision at batches of 4 to 256, and with each codec at batch 64, one worker, every tensor
by itself (biases and norms as one), but the whole gradient as one for rotation and for codecs that choose positions. All runs of a seed draw the same samples: batch 4 is the beginning of
batch 8, and codecs see the batches of 64. What counts is the exact loss over the fixed training set.

The *measured batch* of a codec is the batch in full precision that has its loss. Losses between the batches of the ladder
are interpolated linearly in one over the batch, because noise is; neighbors of the mean ladder that are out of order are
pooled. Its interval holds every batch whose loss differs by less than two standard errors (over seeds, paired).

CRITERIA, written down before the first run:

1. A point (task, optimizer, horizon, codec) is *resolved* if its interval ends inside the ladder on both sides and spans
   a factor of at most RESOLVED. Points whose whole interval or estimate leaves the ladder are bounds; they are counted
   apart: a prediction agrees with a bound if it is outside the ladder on that side, or inside by less than 1.5.
2. A prediction is *within 1.5* (or 2) of a resolved point if the larger of predicted and measured batch (the estimate, not
   the interval) is at most 1.5 (2) times the smaller.
3. A way of predicting *holds* for an optimizer and a horizon if 3 of 4 resolved points are within 1.5 and 9 of 10 are
   within 2. This is judged for the five unbiased codecs only. The other three are shown apart: topk and ef:topk have a bias,
   which is not noise, and nothing is claimed for them; for signsgd the answer is expected to be "not known".
4. All ways are judged alike: the filtered ratio with the model at hand (Gauss-Newton), the filtered ratio from what a
   trace holds (64 gradients of 16 samples at the checkpoint, or bursts of consecutive steps after it), the plain ratio
   tr(S_q) / tr(S_g), tr(H S_q) / tr(H S_g), and "no cost", which always says 64. A way that does not beat "no cost" says
   nothing. Nothing but the checkpoint, gradients there and codecs' errors goes into a prediction, and it has no constant that
   is fitted to the measured batches. In text a sample is a character, not a window.
5. For the ladder itself, predicted and measured excess loss over batch 256 in full precision are compared in the same way,
   with the same factors, wherever the measured excess is more than four standard errors.

Learning rates were set beforehand; whether training in full precision is stable at them was looked at in short runs, for
all but fashion-vit, whose rates are PyTorch's customary ones and were not looked at. terngrad is not among the
codecs, since without clipping it is qsgdinf with 2 bits. A criterion that is changed later is marked as such here.

CHANGED after six seeds of digits-mlp with SGD, whose intervals were too wide at 100 and 400 steps (16 of 24 points unresolved): the
loss at a horizon is the mean of five readings in its last fifth, not one reading at its end. The criteria are the same.
"""

import argparse
import functools
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from gtrace import codec
from gtrace.noise import filtered_ratio, impulse_weight
from gtrace.sketch import MomentSketch
from gtrace.training.tasks import sample_file
from gtrace.training.tasks.images import DigitsMLP, fashion_folder, read_idx
from gtrace.types import Key

HORIZONS = (20, 100, 400)
#: (steps, seeds) in the order in which they run; the last group only if time allows
SEEDS = ((400, range(6)), (100, range(6, 12)), (20, range(12, 24)), (400, range(24, 32)))
BATCH = 64
LADDER = (4, 8, 16, 32, 64, 128, 256)
UNBIASED = ("qsgdinf:bits=2", "nuqsgd:bits=3", "alq:bits=3", "rotate:qsgdinf:bits=2", "randomk:ratio=0.1")
BIASED = ("topk:ratio=0.1", "ef:topk:ratio=0.05", "signsgd")
CODECS = UNBIASED + BIASED
#: codecs with levels are fitted at the first step and after every so many
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
    """horizon -> run -> float64[seeds] losses, the seeds in the same order for all runs; diverged ones count as LIMIT."""
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


class Findings:
    """What predictions are made of, all of it at a checkpoint; cached.

    Attributes:
        each: float32[n, d], the gradient of every training sample (in text, of every window).
        errors: codec -> float32[DRAWS, d], decoded minus exact gradient of batches of 64.
        coded: codec -> float32[DRAWS, d], exact gradients of these batches.
        curvature: float64[d, d], the Gauss-Newton matrix of the training loss, see :func:`gauss_newton`.
        bursts: float32[BURSTS, 3, d], gradients of consecutive steps in full precision after the checkpoint.
        terms: terms of the loss in a sample: 1, or the characters of a window.
    """

    def __init__(self, folder, problem, name):
        self.task, self.name, self.lr = problem.task, name, RATES[problem.task][name]
        self.terms = problem.targets[0].numel()
        self.checkpoint = Checkpoint(folder, problem, name)
        path = folder / f"{problem.task}-{name}.npz"
        if not path.exists():
            self.checkpoint.restore()
            np.savez(path, **self._compute(problem))
        with np.load(path) as saved:
            self.each, self.curvature, self.bursts = saved["each"], saved["curvature"], saved["bursts"]
            self.values, self.vectors = saved["values"], saved["vectors"]
            self.drawn = saved["drawn"]
            self.errors = {spec: saved[spec] for spec in CODECS}
        self.coded = np.stack([self.each[chosen].mean(0) for chosen in self.drawn])
        self.tensors = problem.tensors

    def _compute(self, problem):
        n = len(problem.targets)
        each = np.stack([problem.gradient(slice(k, k + 1)).numpy().copy() for k in range(n)])
        random = np.random.default_rng(0)
        drawn = random.integers(n, size=(DRAWS, BATCH))
        errors = {spec: np.empty((DRAWS, each.shape[1]), np.float32) for spec in CODECS}
        for spec, found in errors.items():
            sender = Coded(spec, problem.tensors, 99)
            for k, chosen in enumerate(drawn):
                exact = each[chosen].mean(0)
                found[k] = exact
                sender.apply(found[k], k)
                found[k] -= exact
        curvature = gauss_newton(problem)
        values, vectors = np.linalg.eigh(curvature)
        optimizer, bursts = self.checkpoint.restore(), []
        for step, chosen in enumerate(samples(problem, 2000, 3 * BURSTS)):
            bursts.append(problem.gradient(chosen[:BATCH]).numpy().copy())
            optimizer.step()
        self.checkpoint.restore()
        return {
            "each": each, "drawn": drawn, "curvature": curvature.astype(np.float32), "values": np.maximum(values, 0),
            "vectors": vectors.astype(np.float32), "bursts": np.stack(bursts).reshape(BURSTS, 3, -1), **errors,
        }  # fmt: skip

    @functools.cached_property
    def noise(self):
        """float32[n, d] whose covariance is that of a sample's gradient."""
        return self.each - self.each.mean(0)

    @functools.cached_property
    def noise_along(self):
        """float64[d]: variance of a batch's gradient along every direction of curvature."""
        return np.square(self.noise @ self.vectors, dtype=np.float64).mean(0) / BATCH

    def errors_along(self, spec):
        """float64[d]: mean squared error of a codec along every direction of curvature."""
        return np.square(self.errors[spec] @ self.vectors, dtype=np.float64).mean(0)

    @property
    def momentum(self):
        return 0.0 if self.name == "sgd" else 0.9


def gauss_newton(problem):
    """float64[d, d]: mean of p_c (d log p_c) (d log p_c)^T over samples and classes c with their probabilities p_c.

    In text, classes are drawn, LABELS times for every window; the characters of a window are independent given the text, so
    the gradients of whole windows are enough.
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
    return lambda h: np.mean(
        [impulse_weight(h, steps, found.lr, momentum=found.momentum) for steps in read_at(horizon)], axis=0
    )


def by_model(found, spec, horizon):
    """The filtered ratio with the Gauss-Newton matrix."""
    w = weight(found, horizon)(found.values)
    return BATCH / (1 + (w @ found.errors_along(spec)) / (w @ found.noise_along))


def micro_batches(found):
    """Gradients of 64 batches of 16 samples, and of the 16 batches of 64 that they make up."""
    chosen = np.random.default_rng(1).integers(len(found.each), size=(MICRO, MICRO_SIZE))
    pieces = np.stack([found.each[part].mean(0) for part in chosen])
    return pieces, pieces.reshape(-1, BATCH // MICRO_SIZE, pieces.shape[1]).mean(1)


def trace_ratio(found, spec, horizon, gradients, size, encoded):
    """The filtered ratio from gradients at the same weights, and errors of a few encoded ones."""
    errors = []
    sender = Coded(spec, found.tensors, 7)
    for step in range(64):
        exact = encoded[step % len(encoded)]
        decoded = exact.copy()
        sender.apply(decoded, step)
        errors.append(decoded - exact)
    errors = np.stack(errors).astype(np.float64)
    x = gradients.astype(np.float64)
    along = x @ errors.T
    ratio = filtered_ratio(
        x @ x.T, along @ along.T / len(errors), float(np.square(errors).sum() / len(errors)), weight(found, horizon),
        samples=size * found.terms, batch=BATCH * found.terms,
    )  # fmt: skip
    return BATCH / (1 + ratio.ratio)


def by_trace(found, spec, horizon):
    """The filtered ratio from 64 gradients of 16 samples at the checkpoint."""
    pieces, encoded = micro_batches(found)
    return trace_ratio(found, spec, horizon, pieces, MICRO_SIZE, encoded)


def by_bursts(found, spec, horizon):
    """The same from second differences of bursts of three steps after the checkpoint."""
    b = found.bursts
    return trace_ratio(found, spec, horizon, (b[:, 0] - 2 * b[:, 1] + b[:, 2]) / math.sqrt(6), BATCH, b[:, 1])


def by_plain_ratio(found, spec, horizon):
    """tr(S_q) / tr(S_g)."""
    return BATCH / (1 + found.errors_along(spec).sum() / found.noise_along.sum())


def by_curvature(found, spec, horizon):
    """tr(H S_q) / tr(H S_g)."""
    return BATCH / (1 + (found.values @ found.errors_along(spec)) / (found.values @ found.noise_along))


def no_cost(found, spec, horizon):
    """Always the batch."""
    return float(BATCH)


WAYS = {
    "model": by_model,
    "trace": by_trace,
    "bursts": by_bursts,
    "plain ratio": by_plain_ratio,
    "tr(HS)": by_curvature,
    "no cost": no_cost,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "gtrace" / "noise-evidence"
    parser.add_argument("--cache", type=Path, default=cache, help="folder of checkpoints and losses")
    parser.add_argument("--only", choices=("train", "judge"))
    parser.add_argument("--until", type=float, default=math.inf, help="start no training after this time (epoch)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.cache.mkdir(parents=True, exist_ok=True)
    if args.only != "judge":
        run_all(args.cache, args.until)


if __name__ == "__main__":
    main()
