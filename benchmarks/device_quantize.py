"""Level codecs on a device: the same bytes as on the CPU, and times in copies of the same tensor.

Run with ``python benchmarks/device_quantize.py``; exit code 1 if a byte differs. One unit is a copy from the device to
itself; the least of several rounds, of GPU events on CUDA and of CPU time elsewhere. ``norms``, ``pack`` (round and
pack) and ``unpack`` (unpack, look up and scale) are kernels alone; ``encode`` and ``decode`` go from values to the
payload on the host and back, transfers and checksum included. Without a GPU, ``TRITON_INTERPRET=1`` checks Triton's
kernels in its interpreter, which is too slow to time.
"""

import argparse
import importlib
import os
import platform
import sys
import tempfile
import time
from importlib.util import find_spec

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gtrace
from gtrace.coding import width_for
from gtrace.sketch import MomentSketch
from gtrace.training import device, torch_kernels

DEFAULT = (
    *("qsgdinf:bits=2", "qsgdinf:bits=3", "qsgdinf:bits=4", "qsgdinf:bits=8", "qsgd:bits=4", "qsgd:bits=4,norm=l1"),
    *("qsgdinf:bits=3,zero=false", "terngrad", "nuqsgd:bits=4", "natural", "alq:bits=3", "alq:bits=5", "zipml:bits=8"),
    *("qsgdinf:bits=12", "qsgdinf:bits=3,bucket_size=100", "qsgdinf:bits=3,bucket_size=none"),
)
KEY = (1, 2)
#: calls between two looks at the clock
CALLS = 10
SIZES = (0, 1, 1000, 70_001)


def best(place, function, repeats):
    """Least milliseconds of a call."""
    times = []
    for _ in range(repeats + 1):
        if place.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(CALLS):
                function()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / CALLS)
        else:
            before = time.process_time()
            function()
            times.append((time.process_time() - before) * 1e3)
    return min(times[1:])


def device_name(place):
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def states(codec, on_host):
    """The states before and after a fit; only the first for empty tensors, which fit nothing."""
    first = codec.init(on_host.size)
    return [first, codec.fit(first, MomentSketch.from_spec(on_host, codec.needs), 0)] if on_host.size else [first]


def equal(spec, x):
    """Whether payloads and decoded values are the host's, with and without a fit."""
    codec, on_host = gtrace.codec(spec), x.cpu().numpy()
    for state in states(codec, on_host):
        payload, shared = codec.encode(state, on_host, KEY), codec.shared(state)
        decoded = device.receive(codec, shared, payload, x.numel(), x.device).cpu().numpy()
        expected = codec.decode(shared, payload, x.numel())
        if device.encode(codec, state, x, KEY) != payload or decoded.tobytes() != expected.tobytes():
            return False
    return True


def times(spec, x, repeats):
    """Milliseconds of each part, at fixed width: a fitted code is Huffman's, which the host writes."""
    codec, place = gtrace.codec(spec), x.device
    state = codec.init(x.numel())
    bucket, grid, kernels = codec.bucket_size or x.numel(), codec.parts.grid, device.kernels_for(place.type)
    rule, width = grid.rule(state), width_for(grid.alphabet(state))
    scales = torch.from_numpy(device.bucket_scales(x, codec.needs.norm, bucket)).to(place)
    values, out = torch.from_numpy(grid.signed_values(state)).to(place), torch.empty_like(x)
    packed, payload = kernels.quantize(rule, x, bucket, scales, KEY, width), device.encode(codec, state, x, KEY)

    def norms():
        if codec.needs.norm in ("linf", "none"):
            return kernels.largest(x, bucket)
        return kernels.sums(x, bucket, square=codec.needs.norm == "l2")

    parts = (
        norms,
        lambda: kernels.quantize(rule, x, bucket, scales, KEY, width),
        lambda: kernels.restore(packed, width, values, bucket, scales, out),
        lambda: device.encode(codec, state, x, KEY),
        lambda: device.receive(codec, codec.shared(state), payload, x.numel(), place),
    )
    return width, [best(place, part, repeats) for part in parts]


def over_one_rank(place):
    """Whether the hook leaves the CPU's gradients behind in a group of one rank: NCCL on CUDA, gloo elsewhere."""
    dist.init_process_group(
        "nccl" if place.type == "cuda" else "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/rendezvous",
        rank=0,
        world_size=1,
    )
    found = []
    for where in (torch.device("cpu"), place):
        torch.manual_seed(0)
        model = torch.nn.Linear(300, 200).to(where)
        group = dist.new_group(backend="gloo") if where.type == "cpu" else None
        wrapped = DistributedDataParallel(model, process_group=group)
        wrapped.register_comm_hook(gtrace.training.State("qsgdinf:bits=3", group), gtrace.training.ddp_comm_hook)
        # The gradient of the sum of weights times this is this, on every device.
        fixed = torch.from_numpy(np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32)).to(where)
        wrapped(torch.eye(300, device=where)).mul(fixed.T).sum().backward()
        found.append(model.weight.grad.cpu().numpy().tobytes())
    dist.destroy_process_group()
    return found[0] == found[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, help="values to time; by default 2^26 on CUDA, 2^20 elsewhere")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("codecs", nargs="*", default=DEFAULT)
    args = parser.parse_args()
    place = torch.device(args.device)
    device.DEVICES = frozenset({place.type})
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    ways = [torch_kernels]
    if find_spec("triton") and (place.type == "cuda" or interpreted):
        ways.insert(0, importlib.import_module("gtrace.training.triton_kernels"))
    size = args.size or (1 << 26 if place.type == "cuda" else 1 << 20)
    values = torch.randn(size, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(place)
    out = torch.empty_like(values)
    copy = best(place, lambda: out.copy_(values), args.repeats)
    home = best(place, lambda: values.to("cpu", copy=True), args.repeats)
    print(f"{device_name(place)}, torch {torch.__version__}: a copy of {size:,} values takes {copy:.3f} ms")
    print(f"float32 to the host takes {home / copy:.1f} copies\n")
    wrong = 0
    for kernels in ways:
        device.kernels_for = lambda _, kernels=kernels: kernels
        timed = not (interpreted and kernels is not torch_kernels)
        print(f"{kernels.__name__}, {'times in copies' if timed else 'interpreted'}")
        print(f"{'codec':32} width  norms   pack unpack encode decode  equal")
        for spec in args.codecs:
            same = all(equal(spec, values[:n]) for n in SIZES) and (not timed or equal(spec, values))
            width, parts = times(spec, values, args.repeats) if timed else (0, [])
            wrong += not same
            shown = "".join(f"{one / copy:7.2f}" for one in parts) or " " * 35
            print(f"{spec:32} {width or '-':>5}{shown}  {'yes' if same else 'NO':>5}", flush=True)
        same = over_one_rank(place)
        wrong += not same
        print(f"gradients that DDP's hook leaves behind, one rank: {'equal' if same else 'DIFFERENT'}\n")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
