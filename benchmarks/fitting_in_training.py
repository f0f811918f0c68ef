"""What fitting levels at every step costs beside a training step: ResNet-8 on 28x28 images, 4 simulated workers.

Run with ``OMP_NUM_THREADS=1 python benchmarks/fitting_in_training.py``. CPU time; the images are noise, only their size
counts here.
"""

import argparse
import statistics
import time

import numpy as np
import torch
from torch import nn

import gtrace
from gtrace.training import Exchange

DEFAULT = ["zipml:bits=3", "zipml:bits=3,scope=model", "alq:bits=3", "alq:bits=3,scope=model", "qsgdinf:bits=3"]


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outside),
        )
        plain = inside == outside and stride == 1
        self.skip = nn.Identity() if plain else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


def resnet8():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, 1),
        Block(16, 32, 2),
        Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("codecs", nargs="*", default=DEFAULT)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = resnet8()
    size = sum(p.numel() for p in model.parameters())
    exchanges = {spec: Exchange(gtrace.codec(spec), args.workers, refit="every") for spec in args.codecs}
    spent = {spec: [] for spec in args.codecs}
    whole = {spec: [] for spec in args.codecs}
    steps = []
    for step in range(args.steps + 1):
        started = time.process_time()
        gradients = []
        for _ in range(args.workers):
            model.zero_grad()
            x, y = torch.randn(args.batch, 1, 28, 28), torch.randint(10, (args.batch,))
            nn.functional.cross_entropy(model(x), y).backward()
            gradients.append({n: p.grad.numpy().reshape(-1).copy() for n, p in model.named_parameters()})
        seconds = time.process_time() - started
        for spec, exchange in exchanges.items():
            tally = exchange.step(step, gradients).tally
            if step:  # the first compiles
                spent[spec].append(tally.fit_seconds)
                whole[spec].append(tally.codec_seconds)
        if step:
            steps.append(seconds)
        mean = {name: np.mean([g[name] for g in gradients], axis=0) for name in gradients[0]}
        with torch.no_grad():
            for name, p in model.named_parameters():
                p -= 0.1 * torch.from_numpy(mean[name].reshape(p.shape).copy())
    base = statistics.median(steps)
    print(f"{size} parameters, {args.workers} workers, batch {args.batch}: {1e3 * base:.0f} ms of CPU a step")
    for spec in args.codecs:
        fit, codec = statistics.median(spent[spec]), statistics.median(whole[spec])
        shares = f"fitting {1e3 * fit:6.1f} ms = {fit / base:6.1%}   codec in all {1e3 * codec:6.1f} ms"
        print(f"{spec:26} {shares} = {codec / base:6.1%}")


if __name__ == "__main__":
    main()
