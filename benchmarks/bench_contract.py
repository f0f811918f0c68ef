"""The speed contract: every hot loop as a ratio, in one process on one core, with pass or miss.

Run with ``make contract``. The table is printed, and written to ``benchmarks/results/contract.md`` with the machine it
was measured on. Ratios are of CPU time, the best of several calls, to a copy of the same float32 values into a
preallocated array, or to np.sort of them; both baselines are taken again beside every line, so that a neighbour on the
machine slows both sides of a ratio. Arrays are larger than the caches, as gradients are that come from memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest
from numpy._core._multiarray_umath import __cpu_features__

import gtrace
from gtrace.buckets import bucket_scales
from gtrace.codecs.fp import FloatFormat
from gtrace.codecs.grids import Rule, SymbolSink
from gtrace.codecs.parts import Scaled
from gtrace.coding import HuffmanCode, huffman_lengths, pack_fixed, packed_room
from gtrace.coding.sparse import PrefixCode
from gtrace.kernels import mcgq, norms, rounding
from gtrace.metrics import Reference
from gtrace.sketch import MomentSketch
from gtrace.trace import Trace

N, BUCKET, KEY = 1 << 24, 8192, (1, 2)


#: units of which more is better
FASTER = ("times np.sort", "times torch")


class Line(NamedTuple):
    """A measured ratio; ``limit`` is the contract's limit, None without one."""

    name: str
    ratio: float
    unit: str
    limit: float | None
    detail: str = ""

    @property
    def faster_is_more(self) -> bool:
        return self.unit in FASTER

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return ""
        kept = self.ratio >= self.limit if self.faster_is_more else self.ratio <= self.limit
        return "pass" if kept else "miss"


#: filled by the tests, printed and written by conftest.py
LINES: list[Line] = []


def best(function, seconds=1.0, least=3):
    """Least CPU seconds of several calls, after one to warm up."""
    function()
    times = []
    end = time.process_time() + seconds
    while len(times) < least or time.process_time() < end:
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_t(4, N).astype(np.float32)


@pytest.fixture(scope="module")
def out(x):
    return np.empty_like(x)


@pytest.fixture
def copy(x, out):
    return best(lambda: np.copyto(out, x), 0.3)


def note(benchmark, name, seconds, base, limit=None, unit="copies", *, elements=N):
    ratio = base / seconds if unit in FASTER else seconds / base
    line = Line(name, ratio, unit, limit, f"{elements / seconds / 1e6:,.0f} M/s")
    LINES.append(line)
    benchmark.extra_info[name.strip()] = {"ratio": round(ratio, 3), "unit": unit, "verdict": line.verdict}
    if not name.startswith(" "):  # a peer, beside the line above it
        benchmark.pedantic(lambda: None, rounds=1)


def fitted(spec, x):
    c = gtrace.codec(spec)
    state = c.init(x.size)
    return c, c.fit(state, MomentSketch.from_spec(x, c.needs), 0) if c.needs else state


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_norms(benchmark, x, copy, norm):
    note(benchmark, f"norms, {norm}, buckets of 8192", best(lambda: bucket_scales(x, norm, BUCKET)), copy)


@pytest.mark.parametrize(("bucket", "norm"), [(BUCKET, "linf"), (BUCKET, "l2"), (None, "linf")])
def test_sketch(benchmark, x, bucket, norm):
    sort = best(lambda: np.sort(x), 0, 3)
    seconds = best(lambda: MomentSketch.of(x, norm, bucket))
    what = f"buckets of {bucket}" if bucket else "one bucket"
    note(benchmark, f"moment sketch, {norm}, {what}", seconds, sort, 2.2, "times np.sort")


def test_expectation_of_a_level_set(benchmark, x):
    sketch = MomentSketch.of(x, "linf", BUCKET)
    rng = np.random.default_rng(0)

    def judge():
        # New levels each time: a sketch remembers what it was asked.
        inner = np.sort(rng.random((100, 6)), axis=1)
        for row in inner:
            sketch.expected_error(np.concatenate([[0], row, [1]]))

    seconds = best(judge) / 100
    note(benchmark, f"expected error of 8 levels ({sketch.rows.size} bins)", seconds, 1e-6, 50, "microseconds")


def unscaled(x):
    """Buckets whose largest magnitudes are taken while they are rounded."""
    return Scaled(x, np.empty(-(-N // BUCKET), np.float32), BUCKET, norm=norms.LINF)


@pytest.mark.parametrize("bits", [3, 2, 4, 8])
def test_uniform(benchmark, x, copy, bits):
    rule, v = Rule("uniform", steps=2 ** (bits - 1) - 1), unscaled(x)
    sink = SymbolSink(rounding.PACKED, width=bits, packed=packed_room(N, bits))
    seconds = best(lambda: rule.quantize(v, KEY, 0, sink))
    note(benchmark, f"uniform, {bits} bits, with norms and packing", seconds, copy, 1.7)


def magnitudes(count):
    return np.concatenate([[0], np.geomspace(1e-4, 1, count - 1)]).astype(np.float32)


@pytest.mark.parametrize(("count", "limit"), [(4, 4.5), (8, 4.5), (16, 4.5), (32, 20), (128, 20), (256, 20)])
def test_levels(benchmark, x, copy, count, limit):
    rule = Rule.among(magnitudes(count), mirrored=False)
    width = (2 * count - 2).bit_length()

    def quantize():
        rule.packed(unscaled(x), KEY, width)

    note(benchmark, f"{count} levels, with norms and packing", best(quantize), copy, limit)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15])
def test_decode(benchmark, x, out, copy, width):
    count = max(2, (1 << width) - 1)
    rng = np.random.default_rng(width)
    symbols = np.clip(rng.normal(count / 2, count / 8, N), 0, count - 1).astype(np.uint16)
    packed = np.frombuffer(pack_fixed(symbols, width), np.uint8)
    scales = bucket_scales(x, "linf", BUCKET)
    even = -(np.arange(count - 1, -count, -2) / (count - 1)).astype(np.float32)
    kinds = {f"decode, {width} bits, {count} values of a uniform grid": even}
    if width in (3, 5, 8, 9):  # levels have 256 magnitudes at most
        kinds[f"  decode, {width} bits, {count} values looked up"] = even + even**3
    for name, values in kinds.items():
        seconds = best(lambda values=values: rounding.restore_packed(packed, width, BUCKET, scales, values, out))
        note(benchmark, name, seconds, copy, 1.3)


@pytest.mark.parametrize("spec", ["qsgdinf:bits=3,coder=fixed", "qsgdinf:bits=3", "alq:bits=4", "natural", "terngrad"])
def test_simulate(benchmark, x, copy, spec):
    c, state = fitted(spec, x)
    seconds = best(lambda: c.simulate(state, x, KEY))
    note(benchmark, f"simulate {spec}, checks and memory included", seconds, copy)
    grid = c.parts.grid
    rule, values, decoded = grid.rule(state), grid.signed_values(state), np.empty_like(x)

    def kernel():
        rule.simulate(c.parts.scale.cut(x, state, late=True), KEY, values, decoded)

    note(benchmark, f"  simulate {spec}, over its kernel", seconds, best(kernel), 1.3, "times the kernel")


@pytest.mark.parametrize(
    "spec", ["qsgdinf:bits=3,coder=fixed", "qsgdinf:bits=3", "qsgdinf:bits=3,coder=elias", "fp:e4m3"]
)
@pytest.mark.parametrize("what", ["encode", "decode"])
def test_whole_codecs(benchmark, x, copy, spec, what):
    c, state = fitted(spec, x)
    shared, payload = c.shared(state), c.encode(state, x, KEY)
    call = (lambda: c.encode(state, x, KEY)) if what == "encode" else (lambda: c.decode(shared, payload, N))
    note(benchmark, f"{what} {spec}, checks and envelope included", best(call), copy)


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_huffman(benchmark, x, copy, what):
    symbols = Rule("uniform", steps=3).symbols(unscaled(x), KEY)
    code = HuffmanCode(huffman_lengths(np.bincount(symbols, minlength=7) + 0.1))
    data = code.encode(symbols)
    call = (lambda: code.encode(symbols)) if what == "encode" else (lambda: code.decode(data, N))
    seconds = best(call)
    note(benchmark, f"Huffman {what}, 7 symbols, {8 * len(data) / N:.2f} bits each", seconds, copy)
    if what == "decode":
        note(benchmark, "  Huffman decode: each symbol", seconds / N, 1e-9, 0.5, "nanoseconds", elements=1)


@pytest.mark.parametrize("what", ["encode", "decode"])
def test_prefix_code(benchmark, x, copy, what):
    c, state = fitted("prune:sparsity=0.8", x)
    values = c.decode(c.shared(state), c.encode(state, x, KEY), N)
    code = PrefixCode(float(np.min(np.abs(values[values != 0]))))
    data = code.encode(values)
    call = (lambda: code.encode(values)) if what == "encode" else (lambda: code.decode(data, N))
    note(benchmark, f"prefix code {what}, 80 % zeros", best(call), copy)


def test_mcgq(benchmark, x, copy):
    seconds = best(lambda: gtrace.codecs.mcgq.counts(x, 0.1, 0.25))
    note(benchmark, "mcgq counts, K = 0.1 (the sequential sum in float64, in chains)", seconds, copy, 3)
    starts = np.empty(N // mcgq.CHAIN)
    note(benchmark, "  mcgq: that sum alone", best(lambda: mcgq.absolute_sum(x, 0.0, starts)), copy, 3)


@pytest.mark.parametrize("word", ["e4m3", "e2m1"])
def test_float_format(benchmark, x, copy, word):
    form = FloatFormat.parse(word)
    scales = np.ones(1)
    note(benchmark, f"codes of {word}, one scale", best(lambda: form.encode_blocks(x, N, scales)), copy, 2)
    if word == "e4m3":
        ml_dtypes = pytest.importorskip("ml_dtypes")
        theirs = best(lambda: x.astype(ml_dtypes.float8_e4m3fn))
        note(benchmark, "  ml_dtypes: astype(float8_e4m3fn)", theirs, copy)
        torch = pytest.importorskip("torch")
        torch.set_num_threads(1)
        tensor = torch.from_numpy(x)
        note(benchmark, "  torch: to(float8_e4m3fn)", best(lambda: tensor.to(torch.float8_e4m3fn)), copy)


@pytest.mark.parametrize("word", ["nvfp4", "mxfp4", "mxfp8"])
def test_block_formats(benchmark, x, copy, word):
    c = gtrace.codec(f"fp:{word},coder=fixed")
    state = c.init(N)
    seconds = best(lambda: c.encode(state, x, KEY))
    note(benchmark, f"encode {word} at fixed width, checks and envelope included", seconds, copy, 5)


def test_sorts_of_both_kinds_of_machine(benchmark, x):
    """np.sort with what numpy finds here, and in a fresh process without its sort in AVX-512."""
    here = best(lambda: np.sort(x), 0, 3)
    wide = "AVX512_SKX"
    used = "with" if __cpu_features__.get(wide) else "without"
    note(benchmark, f"np.sort of float32, {used} AVX-512", here / N, 1e-9, None, "nanoseconds", elements=1)
    if used == "with":
        settings = {**os.environ, "NPY_DISABLE_CPU_FEATURES": wide}
        program = (
            "import numpy as np, time; x = np.random.default_rng(0).standard_t(4, 1 << 24).astype(np.float32); "
            "t = [time.process_time() for _ in range(4) if np.sort(x) is not None]; print(min(np.diff(t)))"
        )
        found = subprocess.run([sys.executable, "-c", program], env=settings, capture_output=True, check=True)
        seconds = float(found.stdout) / N
        note(benchmark, "  np.sort of float32, without AVX-512", seconds, 1e-9, None, "nanoseconds", elements=1)


def test_wasserstein(benchmark, x):
    sort = best(lambda: np.sort(x), 0, 3)
    decoded = gtrace.codec("qsgdinf:bits=4").simulate(gtrace.codec("qsgdinf:bits=4").init(N), x, KEY).values
    reference = Reference(x)
    seconds = best(lambda: reference.compare(decoded))
    note(benchmark, "all measures of a decoded tensor, one sort among them", seconds, sort, None, "np.sorts")


@pytest.mark.parametrize("count", [8, 16])
def test_optimal_levels(benchmark, x, count):
    points = np.sort(x[: 1 << 20])
    sort = best(lambda: np.sort(x[: 1 << 20]))
    seconds = best(lambda: gtrace.fitting.optimal_levels(points, count))
    note(benchmark, f"certified optimal levels, 2^20 sorted points, s = {count}", seconds, sort, 5, "np.sorts",
         elements=1 << 20)  # fmt: skip
    if source := os.environ.get("QUIVER"):  # a folder with its repository, built with torch's compiler
        torch = pytest.importorskip("torch")
        from torch.utils import cpp_extension

        file = f"{source}/QUIVER/python_bindings/python_bindings.cpp"
        quiver = cpp_extension.load("quiver_cpp", [file], extra_cflags=["-O2"])
        doubles = torch.from_numpy(points.astype(np.float64))
        seconds = best(lambda: quiver.quiver_exact_accelerated(doubles, count), 0, 3)
        note(benchmark, f"  QUIVER: quiver_exact_accelerated, the same points, s = {count}", seconds, sort, None,
             "np.sorts", elements=1 << 20)  # fmt: skip


def plain_torch(torch, tensor, bits, form):
    """QSGD with the l2 norm as one writes it in torch."""
    steps = 2 ** (bits - 1) - 1
    v = tensor.view(-1, BUCKET)
    norm = v.norm(dim=1, keepdim=True)
    r = v.abs() / norm * steps
    if form == "round":
        code = torch.floor(r + torch.rand_like(r))
    else:
        edges = torch.arange(1, steps + 1, dtype=torch.float32)
        low = torch.bucketize(r, edges, right=True)
        code = low + (torch.rand_like(r) < r - low)
    return v.sign() * code * norm / steps


@pytest.mark.parametrize("form", ["round", "bucketize"])
def test_qsgd_against_plain_torch(benchmark, x, form):
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    tensor = torch.from_numpy(x)
    theirs = best(lambda: plain_torch(torch, tensor, 4, form), 0, 3)
    c = gtrace.codec("qsgd:bits=4")
    state = c.init(N)
    ours = best(lambda: c.simulate(state, x, KEY))
    note(
        benchmark,
        f"qsgd, 4 bits, quantize and dequantize, against torch.rand and {form}",
        ours,
        theirs,
        20,
        "times torch",
    )


def test_a_sweep_is_its_kernels(benchmark, tmp_path):
    """A sweep of one draw over a trace on disk, against what its kernels take on the same tensors."""
    rng = np.random.default_rng(1)
    names = [f"layer{k}.weight" for k in range(6)]
    arrays = {name: rng.standard_t(4, 1 << 21).astype(np.float32) for name in names}
    with gtrace.create_trace(tmp_path / "run.zarr") as writer:
        for step in range(4):
            for name, values in arrays.items():
                writer.append(step, name, values)
            writer.commit(step)
    c = gtrace.codec("qsgd:bits=4")

    def kernels():
        for values in arrays.values():
            state = c.fit(c.init(values.size), MomentSketch.from_spec(values, c.needs), 0)
            Reference(values).compare(c.simulate(state, values, KEY).values)

    with gtrace.open_trace(tmp_path / "run.zarr") as trace:

        def sweep():
            gtrace.run_sweep(trace, ["qsgd:bits=4"], draws=1, jobs=1)

        ours, theirs = best(sweep, 0, 3), 4 * best(kernels, 0, 3)
    note(benchmark, "sweep --draws 1 of qsgd, 4 bits, over its kernels' time", ours, theirs, 3, "times the kernels",
         elements=4 * 6 << 21)  # fmt: skip


def test_many_small_tensors(benchmark):
    """What a tensor and step of a sweep costs where tensors are small: calls, and hardly any kernel."""
    rng = np.random.default_rng(2)
    steps = {step: rng.standard_t(4, 512).astype(np.float32) for step in range(2)}
    trace = Trace.from_arrays({f"layer{k}.weight": steps for k in range(250)})
    seconds = best(lambda: gtrace.run_sweep(trace, ["qsgdinf:bits=4"], draws=0, jobs=1), 0, 3)
    note(benchmark, "a sweep of small tensors, from memory: each tensor and step", seconds / 500, 1e-6, None,
         "microseconds", elements=512)  # fmt: skip
    c = gtrace.codec("qsgdinf:bits=4")
    values, state = steps[0], c.init(512)
    shared, payload = c.shared(state), c.encode(state, steps[0], KEY)
    calls = {"encode": lambda: c.encode(state, values, KEY), "decode": lambda: c.decode(shared, payload, 512)}
    for name, call in calls.items():
        once = best(lambda call=call: [call() for _ in range(100)]) / 100
        note(benchmark, f"  one call: {name} 512 values", once, 1e-6, None, "microseconds", elements=512)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_torch_peers(benchmark, x, copy):
    """What torch itself has to quantize gradients with, among them the kernels of DDP's bf16 compression."""
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    tensor = torch.from_numpy(x)
    ours = best(lambda: gtrace.codec("bf16").encode(gtrace.codec("bf16").init(N), x, KEY))
    note(benchmark, "encode bf16, checks and envelope included", ours, copy)
    note(benchmark, "  torch: to(bfloat16), as DDP's bf16 hook", best(lambda: tensor.to(torch.bfloat16)), copy)
    blocks = tensor.view(-1, BUCKET)

    def int8():
        scale = blocks.abs().amax(dim=1, keepdim=True) / 127
        return torch.round(blocks / scale).to(torch.int8)

    note(benchmark, "  torch: 8 bits in blocks of 8192, to nearest", best(int8), copy)
    largest = float(np.abs(x).max())
    whole = best(lambda: torch.quantize_per_tensor(tensor, largest / 127, 0, torch.qint8))
    note(benchmark, "  torch: quantize_per_tensor, 8 bits, to nearest", whole, copy)
    rows = blocks.abs().amax(dim=1).double() / 127
    zeros = torch.zeros(len(rows), dtype=torch.int64)
    each = best(lambda: torch.quantize_per_channel(blocks, rows, zeros, 0, torch.qint8))
    note(benchmark, "  torch: quantize_per_channel, 8 bits in rows of 8192, scales given", each, copy)
    fake = torch.fake_quantize_per_tensor_affine
    seconds = best(lambda: fake(tensor, largest / 7, 0, -7, 7))
    note(benchmark, "  torch: fake_quantize_per_tensor_affine, 4 bits, to nearest", seconds, copy)
