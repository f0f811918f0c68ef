"""What capture costs a training run: blocked time, CPU time and wall time against the same run without it.

    python benchmarks/capture_overhead.py [--pairs N] [--scale F] [--model NAME] [--batch N] [--cores N] [--every N]
                                            [--other CHECKOUT] [--json]

Three models: an MLP with four tensors, the CNN of ``samples/digits_cnn.py`` and a transformer with 3.7 million
parameters. Each is trained with all steps captured, every tenth one, and only the first, in a process of its own.
There, stretches of some seconds without and with capture take turns, so that both see the same machine. With
``--other``, each row comes twice: with the gtrace of that checkout, and right after it with this one. Torch computes
in one thread. Prints the Markdown table of docs/capture-overhead.md, which says what its columns mean. Traces go to a
temporary folder, in BENCH_DIR if that is set, and stay there until the end: where many files were deleted a moment ago,
ext4 takes much processor time to make one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: model -> steps of a stretch, chosen to take one to some seconds on an idle machine
STEPS = {"mlp": 600, "cnn": 300, "transformer": 20}
#: model -> samples of a batch
BATCHES = {"mlp": 256, "cnn": 64, "transformer": 16}
WARM_UP = 5
#: records the first step only
ONLY_FIRST = 10**9
#: steps between that and its stretch, until which each step is timed, and seconds in which the trace is opened
LEAD, OPENING = 100, 0.3


def mlp(batch):
    """Two linear layers, 64 to 128 to 10, SGD with momentum: steps below a millisecond."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    inputs, labels = torch.randn(batch, 64), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, lambda: nn.functional.cross_entropy(model(inputs), labels)


def cnn(batch):
    """The sample's network on random images of its size, SGD with momentum."""
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "samples"))
    from digits_cnn import DigitsCNN

    model = DigitsCNN()
    images, labels = torch.randn(batch, 1, 8, 8), torch.randint(10, (batch,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, lambda: torch.nn.functional.cross_entropy(model(images), labels)


def transformer(batch):
    """A language model: 4 layers, width 256, 8 heads, 2,000 tokens, texts of 64, AdamW."""
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
    tokens, targets = torch.randint(2000, (batch, 64)), torch.randint(2000, (batch * 64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return model, optimizer, lambda: torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets)


MODELS = {"mlp": mlp, "cnn": cnn, "transformer": transformer}


def asleep():
    """Seconds that this thread has neither run nor waited for a core, so far: it waited for locks and disks."""
    with open("/proc/thread-self/schedstat") as file:
        _, queued, _ = map(int, file.read().split())
    return time.perf_counter() - time.thread_time() - queued / 1e9


class Stretch:
    """What a number of steps took."""

    def __init__(self):
        self._before = time.perf_counter(), time.process_time(), time.thread_time(), asleep()

    def trained(self):
        """The last step is done."""
        self.loop, _, self.thread, self.asleep = self._since()

    def closed(self):
        """So is what was still to be written."""
        self.wall, self.cpu, _, _ = self._since()

    def _since(self):
        now = time.perf_counter(), time.process_time(), time.thread_time(), asleep()
        return [after - before for after, before in zip(now, self._before, strict=True)]


def worker(name, batch, steps, every, pairs, folder):
    """Pairs of stretches in this process, without capture and with it. Prints their figures as JSON."""
    import torch

    from gtrace.capture import CaptureSession
    from gtrace.capture.options import CaptureSettings, capture_options

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimizer, loss_of = MODELS[name](batch)

    def train(count):
        for _ in range(count):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()

    numbers = itertools.count()
    # What only opening and closing a trace costs does not belong to the steps that are not recorded.
    lead = LEAD if every == ONLY_FIRST else 0

    def measure(count, captured):
        path = Path(folder, f"{next(numbers)}.zarr")
        if captured:
            session = CaptureSession(capture_options(path, CaptureSettings(every=every)))
            session.start([optimizer], [model])
        train(lead)
        time.sleep(OPENING if lead else 0)
        hooks = -session.waited[0] if captured else 0.0
        stretch = Stretch()
        train(count)
        stretch.trained()
        if captured:
            hooks += session.waited[0]
            if lead:
                stretch.closed()
            summary = session.finish("complete")
            if summary.errors or summary.rows != -(-(lead + count) // every):
                raise SystemExit(f"capture failed: {summary}")
        if not (lead and captured):
            stretch.closed()
        return vars(stretch) | {"hooks": hooks}

    # Imports, the first trace of a process, and first touches of memory do not belong to a step.
    train(WARM_UP)
    measure(max(WARM_UP, steps // 4), True)
    out = []
    for pair in range(pairs):
        order = (False, True) if pair % 2 else (True, False)
        found = {captured: measure(steps, captured) for captured in order}
        out.append((found[False], found[True]))
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "pairs": out}))


def run(name, batch, steps, every, cores, pairs, checkout, whole):
    """The figures of one process on a number of cores, with the gtrace of a checkout."""
    command = [sys.executable, __file__, "--worker", name, *map(str, (batch, steps, every, pairs))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(checkout.resolve())}
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    done = subprocess.run(
        [*command, tempfile.mkdtemp(dir=whole)],
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, chosen),
    )
    return json.loads(done.stdout.splitlines()[-1])


def row(name, batch, steps, every, cores, pairs, checkout, whole):
    """One line of the table."""
    found = run(name, batch, steps, every, cores, pairs, checkout, whole)
    more = [1e3 / steps * (captured["cpu"] - plain["cpu"]) for plain, captured in found["pairs"]]

    def median(figure):
        return statistics.median(figure(plain, captured) for plain, captured in found["pairs"])

    return {
        "model": name,
        "parameters": found["parameters"],
        "cores": cores,
        "every": every,
        "step_ms": 1e3 / steps * median(lambda plain, _: plain["thread"]),
        "blocked": median(lambda _, captured: captured["hooks"] / captured["loop"]),
        "asleep": median(
            lambda plain, captured: (
                max(0.0, captured["asleep"] - plain["asleep"]) / (captured["thread"] + captured["asleep"])
            )
        ),
        "thread": median(lambda plain, captured: captured["thread"] / plain["thread"]),
        "cpu": median(lambda plain, captured: captured["cpu"] / plain["cpu"]),
        "more_ms": statistics.median(more),
        # Of a median of normal numbers.
        "error_ms": 1.2533 * statistics.stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0,
        "wall": median(lambda plain, captured: captured["wall"] / plain["wall"]),
    }


def rows(args, checkouts, whole):
    """A line for each model, number of cores, distance of captured steps and checkout."""
    wanted = args.model or STEPS, args.cores or (2, 1), args.every or (1, 10, ONLY_FIRST)
    for name, cores, every in itertools.product(*wanted):
        steps, batch = max(int(STEPS[name] * args.scale), 20), args.batch or BATCHES[name]
        for checkout in checkouts if len(os.sched_getaffinity(0)) >= cores else ():
            found = row(name, batch, steps, every, cores, args.pairs, checkout, whole)
            yield found | {"checkout": checkout.name}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3, help="pairs of stretches for each row (default 3)")
    parser.add_argument("--scale", type=float, default=1.0, help="times as many steps")
    parser.add_argument("--model", action="append", choices=STEPS, help="only this one; may be repeated")
    parser.add_argument("--batch", type=int, help=f"samples of a batch (default {BATCHES})")
    parser.add_argument("--cores", type=int, action="append", choices=(1, 2), help="only so many; may be repeated")
    parser.add_argument("--every", type=int, action="append", help="only this distance of captured steps; likewise")
    parser.add_argument("--other", type=Path, help="another checkout, whose rows come before those of this one")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        name, *numbers, folder = args.worker
        worker(name, *map(int, numbers), folder)
        return
    if not args.json:
        load = os.getloadavg()[0]
        print(f"{os.cpu_count()} cores, load {load:.1f} at the start, {args.pairs} pairs of stretches per row\n")
        print("| model | cores | captured steps | step | blocked | asleep | thread | CPU | more CPU a step | wall |")
        print("|---|---|---|---|---|---|---|---|---|---|")
    here = Path(__file__).parents[1]
    checkouts = [here] if args.other is None else [args.other, here]
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as whole:
        for line in rows(args, checkouts, whole):
            print(json.dumps(line) if args.json else table_row(line, args.other), flush=True)


def table_row(line, other):
    """A line of the table in Markdown; ``other`` is the checkout to compare with, if any."""
    which = {1: "every", ONLY_FIRST: "the first"}.get(line["every"], f"every {line['every']}th")
    which += (", before" if line["checkout"] == other.name else ", now") if other else ""
    return (
        f"| {line['model']} | {line['cores']} | {which} | {line['step_ms']:.2f} ms | "
        f"{line['blocked']:.1%} | {line['asleep']:.1%} | {line['thread']:.2f} | {line['cpu']:.2f} | "
        f"{line['more_ms']:.3f} ± {line['error_ms']:.3f} ms | {line['wall']:.2f} |"
    )


if __name__ == "__main__":
    main()
