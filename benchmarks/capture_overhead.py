"""What capture costs a training run: blocked time, CPU time and wall time against the same run without it.

    python benchmarks/capture_overhead.py [--pairs N] [--scale F] [--json]

Two models: the CNN of ``samples/digits_cnn.py`` and a transformer with 3.7 million parameters. Each is trained in a
process of its own, by turns without capture and with it (every step, every tenth step), so that both see the same
machine. Torch computes in one thread. ``blocked`` is what training waited for copies and buffers, as a share of its
steps; ``CPU`` is the ratio of the user and system time of the training loop and what follows until the trace is closed,
all threads; ``wall`` is that of its duration. Ratios are medians over pairs of neighbouring runs. ``cores`` 1 pins a
run to a single core, so that the writer has none of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: model -> steps of a run, chosen to take some seconds
STEPS = {"cnn": 400, "transformer": 60}
WARM_UP = 5


def cnn():
    """The sample's network on random images of its size, batches of 64, SGD with momentum."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
    from digits_cnn import DigitsCNN

    model = DigitsCNN()
    images, labels = torch.randn(64, 1, 8, 8), torch.randint(10, (64,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels)


def transformer():
    """A language model: 4 layers, width 256, 8 heads, 2,000 tokens, texts of 64, batches of 16, AdamW."""
    import torch
    from torch import nn

    class LanguageModel(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(2000, 256)
            layer = nn.TransformerEncoderLayer(256, 8, 1024, dropout=0.0, batch_first=True, norm_first=True)
            self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(256, 2000, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.layers(self.embed(tokens)))

    model = LanguageModel()
    tokens, targets = torch.randint(2000, (16, 64)), torch.randint(2000, (16 * 64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, lambda: torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets)


MODELS = {"cnn": cnn, "transformer": transformer}


def worker(name, steps, every, path):
    """One run in this process; ``every`` 0 captures nothing. Prints its figures as JSON."""
    import torch

    from gtrace.capture import CaptureSession
    from gtrace.capture.options import capture_options

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer, loss_of = MODELS[name]()

    def train(count):
        for _ in range(count):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()

    train(WARM_UP)
    if every:
        # Imports and the first trace of a process are no cost of a step.
        session = CaptureSession(capture_options(Path(path, "warm.zarr"), every=1))
        session.start([optimizer], [model])
        train(WARM_UP)
        session.finish("complete")
        session = CaptureSession(capture_options(Path(path, "run.zarr"), every=every))
        session.start([optimizer], [model])
    else:
        train(WARM_UP)
    wall, cpu = time.perf_counter(), time.process_time()
    train(steps)
    looped = time.perf_counter() - wall
    blocked = 0.0
    if every:
        summary = session.finish("complete")
        blocked = summary.blocked
        if summary.errors or summary.rows != -(-steps // every):
            raise SystemExit(f"capture failed: {summary}")
    figures = {
        "wall": time.perf_counter() - wall,
        "cpu": time.process_time() - cpu,
        "step_ms": 1e3 * looped / steps,
        "blocked": blocked,
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    print(json.dumps(figures))


def run(name, steps, every, cores):
    """The figures of one run in a new process on so many cores."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        command = [sys.executable, __file__, "--worker", name, str(steps), str(every), folder]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        chosen = sorted(os.sched_getaffinity(0))[:cores]
        done = subprocess.run(
            command,
            env=environment,
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, chosen),
        )
        return json.loads(done.stdout.splitlines()[-1])


def measure(pairs, scale):
    """A row for each model, distance of captured steps and number of cores."""
    for name in MODELS:
        steps = max(int(STEPS[name] * scale), 20)
        for cores in (2, 1):
            if len(os.sched_getaffinity(0)) < cores:
                continue
            for every in (1, 10):
                runs = [(run(name, steps, 0, cores), run(name, steps, every, cores)) for _ in range(pairs)]
                yield {
                    "model": name,
                    "parameters": runs[0][0]["parameters"],
                    "cores": cores,
                    "every": every,
                    "step_ms": statistics.median(plain["step_ms"] for plain, _ in runs),
                    "blocked": statistics.median(captured["blocked"] for _, captured in runs),
                    "cpu": statistics.median(captured["cpu"] / plain["cpu"] for plain, captured in runs),
                    "wall": statistics.median(captured["wall"] / plain["wall"] for plain, captured in runs),
                }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="pairs of runs for each row (default 5)")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many steps")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, steps, every, path = args.worker
        worker(name, int(steps), int(every), path)
        return
    if not args.json:
        load = os.getloadavg()[0]
        print(f"{os.cpu_count()} cores, load {load:.1f} at the start, {args.pairs} pairs of runs per row\n")
        print("| model | parameters | cores | captured steps | step without | blocked | CPU | wall |")
        print("|---|---|---|---|---|---|---|---|")
    for row in measure(args.pairs, args.scale):
        if args.json:
            print(json.dumps(row), flush=True)
            continue
        which = "every" if row["every"] == 1 else f"every {row['every']}th"
        print(
            f"| {row['model']} | {row['parameters']:,} | {row['cores']} | {which} | {row['step_ms']:.1f} ms | "
            f"{row['blocked']:.1%} | {row['cpu']:.2f} | {row['wall']:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
