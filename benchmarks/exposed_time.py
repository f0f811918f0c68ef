"""The exposed-time model of ``gtrace.costs`` against real steps of two gloo processes on links of a set speed.

    python benchmarks/exposed_time.py [--rounds N] [--json]

Two processes train a small model under DistributedDataParallel. A communication hook hands each bucket to one thread,
which sends its bytes through a gloo collective, and sleeps until a link of the set speed would have been done: so long
per byte and per message. The hook returns a future, so that sending overlaps with the backward pass as on a GPU.

Two models. ``accelerator``: each layer's backward sleeps, as a processor does that waits for an accelerator: it takes a
set time whatever else this machine does. ``processor``: linear layers on this processor, whose backward takes what it
takes. Steps without any exchange take turns with the others.

Each line is one exchange at one speed, medians over the rounds. *Waits*: from the moment at which the slower process
hands over its last bucket, so that no gradient is left to compute, to the end of ``backward``. *By elements*: the same
by the model, which gets how long the gradients of these very steps took, and spreads that over the elements. *By
buckets*: the model gets the time of each bucket, as if its layers had been timed. *Step*: the whole step by
elements, from nothing but the times of steps and backward passes without exchange, over the measured one, less 1.
Writes benchmarks/results/exposed_time.json and .md.

No ``from __future__ import annotations`` here: torch compares the annotations of a hook themselves, not their text.
"""

import argparse
import json
import os
import platform
import queue
import statistics
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gtrace.costs import Cluster, Network, assign_buckets, messages, sent, time_step

RANKS = 2
LATENCY = 1e-3
#: model -> MiB of a bucket, and bits per second of the links
SETTINGS = {
    "accelerator": ((None, 0.25), (25e6, 50e6, 100e6, 200e6)),
    "processor": ((None, 1.0), (50e6, 100e6, 200e6)),
}
#: what is sent -> how, and in how many bits per value
SENT = {"float32": ("allreduce", 32), "bf16": ("allreduce", 16), "4 bits": ("allgather", 4)}
#: elements of the accelerator's layers, the seconds of their backward passes, and the step's other computing
LAYERS, BACKWARD, FORWARD = (10_000, 150_000, 5_000, 200_000, 200_000, 80_000, 40_000, 15_000), 0.12, 0.05
WIDTH, DEPTH, BATCH = 384, 8, 256
WARM_UP = 3
RESULTS = Path(__file__).parent / "results"


class _Waits(torch.autograd.Function):
    """A layer that is computed elsewhere: its backward takes a set time."""

    @staticmethod
    def forward(ctx, values, weight, seconds):
        ctx.seconds, ctx.size = seconds, weight.numel()
        return values + weight[0]

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.seconds)
        return gradient, torch.ones(ctx.size), None


class _Accelerator(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in LAYERS])

    def forward(self, values):
        time.sleep(FORWARD)
        for layer in self.layers:
            values = _Waits.apply(values, layer, BACKWARD * layer.numel() / sum(LAYERS))
        return values


def _model(name):
    if name == "accelerator":
        return _Accelerator(), torch.ones(4)
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))), torch.randn(BATCH, WIDTH)


class Link:
    """One thread that sends buckets, one after the other, no faster than a link of ``bandwidth``.

    A ``bandwidth`` of None lets every bucket arrive at once.
    """

    def __init__(self):
        self.bandwidth, self.exchange, self.bits = None, "allreduce", 32
        self.handed = []
        self._waiting = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, bucket):
        """A future of the bucket's buffer, done when it has arrived."""
        self.handed.append(time.perf_counter())
        future = torch.futures.Future()
        if self.bandwidth is None:
            future.set_result(bucket.buffer())
        else:
            self._waiting.put((bucket.buffer(), future))
        return future

    def _run(self):
        while True:
            buffer, future = self._waiting.get()
            start = time.perf_counter()
            size = buffer.numel() * self.bits / 8
            payload = torch.empty(int(size), dtype=torch.uint8)
            # Each of two ranks sends its payload to the other, whatever the exchange.
            dist.all_gather([torch.empty_like(payload) for _ in range(RANKS)], payload)
            seconds = messages(self.exchange, RANKS) * LATENCY + sent(self.exchange, RANKS, 8 * size) / self.bandwidth
            time.sleep(max(0.0, start + seconds - time.perf_counter()))
            future.set_result(buffer)


def hook(link: Link, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A function, as torch wants it."""
    return link.send(bucket)


def _rank(rank, name, bucket_mb, rates, rounds, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    model, batch = _model(name)
    sizes = [parameter.numel() for parameter in model.parameters()]
    wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
    link = Link()
    wrapped.register_comm_hook(link, hook)
    choices = [None, *((what, rate) for what in SENT for rate in rates)]
    seen = {choice: [] for choice in choices}
    for number in range(WARM_UP + rounds):
        for choice in choices if number >= WARM_UP else [None]:
            link.bandwidth = None
            if choice is not None:
                (link.exchange, link.bits), link.bandwidth = SENT[choice[0]], choice[1]
            link.handed.clear()
            dist.barrier()
            start = time.perf_counter()
            loss = wrapped(batch).square().mean()
            forward = time.perf_counter()
            loss.backward()
            end = time.perf_counter()
            if number >= WARM_UP:
                seen[choice].append(_of_all(start, forward, *link.handed, end))
    if rank == 0:
        lines = _compare(seen, sizes, bucket_mb, choices[1:])
        settings = {"model": name, "bucket_mb": bucket_mb}
        Path(results).write_text(json.dumps([{**settings, **line} for line in lines]))
    dist.destroy_process_group()


def _of_all(*times):
    """Seconds from the first process's start of a step to the slower one's other times; they share a clock."""
    own = torch.tensor(times, dtype=torch.float64)
    every = [torch.empty_like(own) for _ in range(RANKS)]
    dist.all_gather(every, own)
    first, last = torch.stack(every).aminmax(dim=0)
    start, forward = first[:2].tolist()
    return [forward - start, *(last[2:] - start).tolist()]


def _compare(seen, sizes, bucket_mb, choices):
    alone, backward_alone = _medians((end, ready[-1] - forward) for forward, *ready, end in seen[None])
    closes = np.flatnonzero(np.diff(assign_buckets(sizes, bucket_mb), prepend=-1))[::-1]
    for what, rate in choices:
        exchange, bits = SENT[what]

        def model(step, backward, work=None, exchange=exchange, bits=bits, rate=rate):
            cluster = Cluster(Network(rate, LATENCY), RANKS, step, backward, bucket_mb)
            return time_step(sizes, bits, cluster, exchange, work=work)

        found = []
        for forward, *ready, end in seen[what, rate]:
            backward = ready[-1] - forward
            work = np.zeros(len(sizes))
            work[closes] = np.diff(ready, prepend=forward)
            timed = model(end, backward, work)
            found.append((end, backward, end - ready[-1], model(end, backward).exposed, timed.exposed))
        step, backward, waits, by_elements, by_buckets = _medians(found)
        foretold = model(alone, backward_alone)
        yield {
            "sent": what,
            "bandwidth": rate,
            "step_alone": alone,
            "backward_alone": backward_alone,
            "backward": backward,
            "step": step,
            "step_computed": foretold.seconds,
            "waits": waits,
            "waits_by_elements": by_elements,
            "waits_by_buckets": by_buckets,
            "communication": foretold.communication,
        }


def _medians(rows):
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def table(lines):
    """The lines as Markdown."""
    heads = (
        "model",
        "buckets",
        "link",
        "sent",
        "exchange",
        "waits",
        "by elements",
        "off by",
        "by buckets",
        "off by",
        "step off by",
    )
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * 4}{'---:|' * 7}"
    for one in lines:
        off = [one[name] / one["waits"] - 1 for name in ("waits_by_elements", "waits_by_buckets")]
        cells = [
            one["model"],
            f"{one['bucket_mb']:g} MiB" if one["bucket_mb"] else "default",
            f"{one['bandwidth'] / 1e6:g} Mbit/s",
            one["sent"],
            *(f"{1e3 * one[name]:.1f} ms" for name in ("communication", "waits", "waits_by_elements")),
            f"{off[0]:+.1%}",
            f"{1e3 * one['waits_by_buckets']:.1f} ms",
            f"{off[1]:+.1%}",
            f"{one['step_computed'] / one['step'] - 1:+.1%}",
        ]
        yield f"| {' | '.join(cells)} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind, in turns")
    parser.add_argument("--json", action="store_true", help="print JSON, and write nothing")
    options = parser.parse_args()
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (buckets, rates) in SETTINGS.items():
            for bucket_mb in buckets:
                store, results = Path(folder) / f"store-{name}-{bucket_mb}", Path(folder) / "lines.json"
                arguments = (name, bucket_mb, rates, options.rounds, str(store), str(results))
                mp.spawn(_rank, arguments, nprocs=RANKS)
                lines += json.loads(results.read_text())
    about = {
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the end",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ranks": RANKS,
        "latency": LATENCY,
        "rounds": options.rounds,
    }
    if options.json:
        print(json.dumps({**about, "lines": lines}, indent=1))
        return
    text = "\n".join(table(lines))
    (RESULTS / "exposed_time.json").write_text(json.dumps({**about, "lines": lines}, indent=1) + "\n")
    head = (
        f"# Exposed time, measured and computed\n\n{', '.join(f'{name} {value}' for name, value in about.items())}.\n\n"
    )
    (RESULTS / "exposed_time.md").write_text(head + text + "\n")
    print(text)


if __name__ == "__main__":
    main()
