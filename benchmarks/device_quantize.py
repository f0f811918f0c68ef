"""Encoding and decoding gradients on a device, as ratios to a copy of the same float32 values on that device.

Run with ``OMP_NUM_THREADS=1 python benchmarks/device_quantize.py [--device cuda]``. Best of several; wall time on a GPU
once it has finished, CPU time on a CPU, where torch's operations show nothing but what they cost there.
"""

import argparse
import platform
import time

import numpy as np
import torch

import gtrace
from gtrace.sketch import MomentSketch
from gtrace.training import device

DEFAULT = ["qsgdinf:bits=3", "qsgd:bits=4", "terngrad", "nuqsgd:bits=4", "natural", "alq:bits=3", "zipml:bits=8"]
KEY = (1, 2)


def finish(place):
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def best(place, function, repeats):
    """Least seconds, and what the last call returned."""
    clock = time.perf_counter if place.type == "cuda" else time.process_time
    times = []
    for _ in range(repeats + 1):
        finish(place)
        start = clock()
        result = function()
        finish(place)
        times.append(clock() - start)
    return min(times[1:]), result


def device_name(place):
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    return f"CPU {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measured(spec, x, on_host, repeats):
    """Bytes of a code, seconds of quantize, pack, decode and of the host's kernels, and whether payloads agree."""
    place = x.device
    codec = gtrace.codec(spec)
    state = codec.fit(codec.init(x.numel()), MomentSketch.from_spec(on_host, codec.needs), 0)
    bucket = codec.bucket_size or x.numel()
    shared = codec.shared(state)

    def quantize():
        scales, norms = device.bucket_scales(x, codec.needs.norm, bucket)
        return device.quantize(codec.parts.grid.rule(state), x, bucket, scales, KEY), norms

    quantizing, (codes, norms) = best(place, quantize, repeats)
    nothing = np.empty(0, np.float32)
    packing, payload = best(
        place, lambda: codec.seal(state, norms, nothing, codes.cpu().numpy().astype(np.uint16)), repeats
    )
    decoding, _ = best(place, lambda: device.decode(codec, shared, payload, x.numel(), place), repeats)
    kernels, expected = best(place, lambda: codec.encode(state, on_host, KEY), repeats)
    return codes.element_size(), (quantizing, packing, decoding, kernels), payload == expected


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", type=int, default=1 << 22)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("codecs", nargs="*", default=DEFAULT)
    args = parser.parse_args()
    place = torch.device(args.device)
    x = torch.randn(args.size, generator=torch.Generator().manual_seed(0)).mul_(1e-3).to(place)
    on_host = x.cpu().numpy()
    out = torch.empty_like(x)
    copy, _ = best(place, lambda: out.copy_(x), args.repeats)
    home, _ = best(place, lambda: x.to("cpu", copy=True), args.repeats)
    print(f"{device_name(place)}: {args.size:,} values; a copy takes {copy * 1e3:.3f} ms, all else is in copies")
    print(f"float32 to the host: {home / copy:.1f}")
    print("quantize: norms and codes; pack: codes to the host and the payload; kernels: all of it on the host\n")
    print(f"{'codec':16}  bytes a code  quantize  pack  decode  kernels  equal")
    for spec in args.codecs:
        width, seconds, equal = measured(spec, x, on_host, args.repeats)
        ratios = "  ".join(f"{one / copy:{places}.1f}" for one, places in zip(seconds, (8, 4, 6, 7), strict=True))
        print(f"{spec:16}  {width:12}  {ratios}  {equal!s:>5}")


if __name__ == "__main__":
    main()
