"""Hot loops beside those of the contract (bench_contract.py), as ratios to a copy, in one process on one core.

Run with ``make benchmarks``. Absolute times mean little on shared machines; the ratio is in ``extra_info``
and is printed at the end. Nothing here asserts a speed.
"""

import time

import numpy as np
import pytest

import gtrace
from gtrace.codecs.fp import FloatFormat
from gtrace.sketch import MomentSketch

N = 1 << 20
KEY = (np.uint64(1), np.uint64(2))


def best(function, repeats=15):
    """Least CPU seconds of several calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).standard_t(4, N).astype(np.float32)


@pytest.fixture(scope="module")
def copy_seconds(x):
    out = np.empty_like(x)
    return best(lambda: np.copyto(out, x))


def report(benchmark, function, **baselines):
    seconds = best(function)
    benchmark.extra_info.update({name: round(seconds / base, 3) for name, base in baselines.items()})
    benchmark.extra_info["million_per_second"] = round(N / seconds / 1e6)
    print(f"\n{benchmark.name}: {dict(benchmark.extra_info)}")
    benchmark.pedantic(function, rounds=5, iterations=1)


@pytest.mark.parametrize("coder", ["fixed", "huffman"])
def test_round_trip(benchmark, x, copy_seconds, coder):
    c = gtrace.codec("qsgdinf", bits=3, coder=coder)
    state = c.fit(c.init(N), MomentSketch.from_spec(x, c.needs), 0)
    shared = c.shared(state)
    report(benchmark, lambda: c.decode(shared, c.encode(state, x, (1, 2)), N), copies=copy_seconds)


@pytest.mark.parametrize("word", ["e4m3", "e5m0"])
@pytest.mark.parametrize("block", [N, 32])
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
def test_float_codes(benchmark, x, copy_seconds, word, block, key):
    form, scales = FloatFormat.parse(word), np.full(N // block, 2.0**-7)
    report(benchmark, lambda: form.encode_blocks(x, block, scales, key), copies=copy_seconds)


@pytest.mark.parametrize("block", [N, 16])
def test_floats_back(benchmark, x, copy_seconds, block):
    form, scales = FloatFormat(4, 3), np.full(N // block, 2.0**-7)
    codes = form.encode_blocks(x, block, scales)
    report(benchmark, lambda: form.decode_blocks(codes, block, scales), copies=copy_seconds)


@pytest.mark.parametrize("spec", ["fp:e4m3", "fp:mxfp4", "fp:nvfp4"])
def test_fp_encode(benchmark, x, copy_seconds, spec):
    c = gtrace.codec(spec)
    state = c.fit(c.init(N), MomentSketch.from_spec(x, c.needs), 0)
    report(benchmark, lambda: c.encode(state, x, (1, 2)), copies=copy_seconds)


def test_fp_expectation(benchmark, x, copy_seconds):
    c = gtrace.codec("fp")
    sketch = MomentSketch.from_spec(x, c.needs)
    state = c.fit(c.init(N), sketch, 0)
    report(benchmark, lambda: c.expect(state, sketch), copies=copy_seconds)
