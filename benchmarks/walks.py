"""How many functions a gradient goes through: from a trace to a row of a sweep, and from DDP's hook to the wire.

    python benchmarks/walks.py [--list]

A hop is a function of gtrace that Python enters on the way, each counted once; compiled functions and comprehensions
do not count. The way to a row starts when a sweep begins a tensor's step and ends when it hands the rows over: one
codec, its expectation and one encoding, after earlier steps have filled the caches. The way to the wire starts at
``ddp_comm_hook`` and ends at the first collective, in the second step of training. ``own`` counts the functions of
``gtrace/sweep`` and ``gtrace/training`` alone: the road, without the codec, the trace and the metrics that it calls.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np

import gtrace

HOME = str(Path(gtrace.__file__).parent)
CODECS = ("qsgdinf:bits=4", "alq:bits=3", "topk:ratio=0.1")


class Walk:
    """Functions of gtrace that are entered between ``begin`` and ``end``, with the deepest chain of calls."""

    def __init__(self):
        self.hops = {}
        self.depth = self._depth = 0
        self.on = False

    def begin(self):
        """Forget what was seen, and watch."""
        self.hops, self.depth, self._depth, self.on = {}, 0, 0, True

    def profile(self, frame, event, _argument):
        """What ``sys.setprofile`` calls."""
        code = frame.f_code
        if not self.on or event not in ("call", "return") or not code.co_filename.startswith(HOME):
            return
        if code.co_name.startswith("<"):
            return
        self._depth = max(0, self._depth + (1 if event == "call" else -1))
        if event == "call":
            where = Path(code.co_filename).relative_to(HOME)
            self.hops.setdefault(f"{where}:{code.co_qualname}")
            self.depth = max(self.depth, self._depth)


def trace_to_row(spec):
    """The way of one tensor at a later step through one codec."""
    from gtrace.sweep import run
    from gtrace.sweep.replay import Replay

    walk, found = Walk(), []
    blocks = Replay.blocks

    def watched(self):
        made = blocks(self)
        while True:
            walk.begin()
            block = next(made, None)
            walk.on = False
            if block is None:
                return
            found.append((dict(walk.hops), walk.depth))
            yield block

    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "walk.zarr"
        with gtrace.create_trace(path) as writer:
            for step in range(4):
                writer.append(step, "w", rng.standard_normal(4096).astype(np.float32))
                writer.commit(step)
        # Kernels are compiled before the profiler watches, which would slow their compiler down.
        run.run_sweep(path, [spec], jobs=1, optimal=False)
        Replay.blocks = watched
        # One worker is this thread or one of its own.
        threading.setprofile(walk.profile)
        sys.setprofile(walk.profile)
        try:
            run.run_sweep(path, [spec], jobs=1, optimal=False)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            Replay.blocks = blocks
    # The last step closes a window and leaves figures of levels; most steps do neither.
    return found[-2]


def hook_to_wire(spec):
    """The way of one bucket at the second step from DDP's hook to the first collective."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from gtrace.training import State, ddp_comm_hook

    walk, found = Walk(), []
    collectives = ("all_gather", "all_gather_object", "all_reduce", "all_to_all_single", "broadcast")
    kept = {name: getattr(dist, name) for name in collectives}

    def stopping(function):
        def call(*args, **options):
            if walk.on:
                walk.on = False
                found.append((dict(walk.hops), walk.depth))
            return function(*args, **options)

        return call

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        try:
            for name, function in kept.items():
                setattr(dist, name, stopping(function))
            model = DistributedDataParallel(torch.nn.Linear(64, 8, bias=False))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            state = State(spec)

            def hook(held, bucket):
                walk.begin()
                sys.setprofile(walk.profile)
                try:
                    return ddp_comm_hook(held, bucket)
                finally:
                    sys.setprofile(None)

            model.register_comm_hook(state, hook)
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(4, 64)).square().mean().backward()
                optimizer.step()
        finally:
            for name, function in kept.items():
                setattr(dist, name, function)
            dist.destroy_process_group()
    return found[-1]


def main():
    parser = argparse.ArgumentParser(description=inspect.getdoc(sys.modules[__name__]).splitlines()[0])
    parser.add_argument("--list", action="store_true", help="name every function")
    parser.add_argument("--codec", action="append", help="instead of the usual ones")
    args = parser.parse_args()
    ways = [("trace to row", trace_to_row)]
    try:
        import torch.distributed  # noqa: F401
    except ImportError:
        print("the way to the wire needs torch")
    else:
        ways.append(("hook to wire", hook_to_wire))
    print("| way | codec | own | functions | files | deepest chain |\n|---|---|--:|--:|--:|--:|")
    for name, measure in ways:
        for spec in args.codec or CODECS:
            hops, depth = measure(spec)
            files = {hop.partition(":")[0] for hop in hops}
            own = sum(hop.startswith(("sweep/", "training/")) for hop in hops)
            print(f"| {name} | {spec} | {own} | {len(hops)} | {len(files)} | {depth} |")
            if args.list:
                print("\n".join(f"    {hop}" for hop in hops))


if __name__ == "__main__":
    main()
