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
"""

import argparse
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
from gtrace.sketch import MomentSketch
from gtrace.training.tasks import sample_file
from gtrace.training.tasks.images import DigitsMLP, fashion_folder, read_idx
from gtrace.types import Key

HORIZONS = (20, 100, 400)
#: (steps, seeds) in the order in which they run; the last group only if time allows
SEEDS = ((400, range(6)), (100, range(6, 12)), (20, range(12, 40)), (400, range(40, 44)))
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
HOLDS = (0.75, 0.9)
#: codecs that see the whole gradient as one vector; the others see every tensor by itself
WHOLE = ("rotate:qsgdinf:bits=2", "randomk:ratio=0.1", "topk:ratio=0.1", "ef:topk:ratio=0.05")
#: characters in a window
LENGTH = 16


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


def train(problem, optimizer, drawn, batch, coded=None):
    """Losses over the training set at each horizon that is reached."""
    losses = []
    for step, chosen in enumerate(drawn):
        gradient = problem.gradient(chosen[:batch])
        if coded is not None:
            values = gradient.numpy()
            if not np.isfinite(values).all():
                return losses + [math.inf] * (sum(h <= len(drawn) for h in HORIZONS) - len(losses))
            coded.apply(values, step)
        optimizer.step()
        if step + 1 in HORIZONS:
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
