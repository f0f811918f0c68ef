"""Codes, decoded values and payloads of the torch path against the host's kernels: on the CPU, and on a GPU if any."""

import numpy as np
import pytest
import torch
from helpers_training import heavy

import gtrace
from gtrace.codecs.levels import TernGrad
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import counter
from gtrace.kernels.norms import power_sum
from gtrace.sketch import MomentSketch
from gtrace.training import device, vectors

CPU = torch.device("cpu")
PLACES = [CPU, torch.device("cuda")] if torch.cuda.is_available() else [CPU]
SPECS = (
    "qsgd:bits=2",
    "qsgd:bits=4",
    "qsgd:bits=15",
    "qsgd:bits=15,zero=false",
    "qsgd:norm=l1,coder=elias",
    "qsgd:bucket_size=none",
    "qsgdinf:bits=3",
    "qsgdinf:bits=3,zero=false",
    "qsgdinf:tail=exact,coder=fixed",
    "terngrad",
    "nuqsgd:bits=4",
    "nuqsgd:bits=8",
    "nuqsgd:bits=3,zero=false",
    "natural",
    "alq:bits=3",
    "alq-n:bits=4,zero=false",
    "alq:bits=6,coder=delta",
    "amq:bits=3",
    "amq-n:bits=7,zero=false",
    "zipml:bits=4",
    "zipml:bits=7",
)


def small_buckets(spec):
    if "bucket_size" in spec or spec == "natural":
        return gtrace.codec(spec)
    return gtrace.codec(spec + (",bucket_size=64" if ":" in spec else ":bucket_size=64"))


def fitted(codec, values):
    return codec.fit(codec.init(values.size), MomentSketch.from_spec(values, codec.needs), 0)


def assert_equal(codec, state, values, key):
    """The payload is the host's to the byte, and so are the decoded values."""
    payload, shared = codec.encode(state, values, key), codec.shared(state)
    expected = codec.decode(shared, payload, values.size)
    for place in PLACES:
        given = torch.from_numpy(values.copy()).to(place)
        assert device.encode(codec, state, given, key) == payload
        assert given.cpu().numpy().tobytes() == values.tobytes()
        decoded = device.decode(codec, shared, payload, values.size, place)
        assert decoded.dtype == torch.float32
        assert decoded.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("spec", SPECS)
def test_a_million_values_become_the_same_bytes(spec):
    codec = gtrace.codec(spec)
    values = heavy(1_000_003)
    high, low = np.random.default_rng(len(spec)).integers(0, 2**64, 2, np.uint64).tolist()
    assert_equal(codec, codec.init(values.size), values, (high, low))
    assert_equal(codec, fitted(codec, values), values, (low, high))


@pytest.mark.parametrize("spec", SPECS)
def test_borders_of_buckets_and_values_of_all_sizes(spec, monkeypatch):
    monkeypatch.setattr(device, "_CHUNK", 128)
    monkeypatch.setattr(device, "_WIDTH", 16)
    codec = small_buckets(spec)
    random = np.random.default_rng(3)
    for n, size in enumerate((0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 400)):
        x = heavy(size, n)
        mixed = x.copy()
        mixed[::3] = 0
        cases = (
            x,
            np.zeros_like(x),
            -np.zeros_like(x),
            mixed,
            random.integers(-9, 10, size).astype(np.float32) * np.float32(2**-149),
            np.ldexp(x, random.integers(-140, 130, size)).astype(np.float32),
            np.full(size, np.finfo(np.float32).max) * np.sign(x),
            np.repeat(x[:1], size),
            np.round(x * 3000) / np.float32(7),
        )
        for values in cases:
            values = np.clip(values, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
            assert_equal(codec, codec.init(size), values, tuple(random.integers(0, 2**64, 2, np.uint64).tolist()))


def adjacent(size):
    """0, neighbours in float32, and 1: a threshold between two of them is rounded to one of them."""
    near = np.float32(0.9) + np.arange(size - 2, dtype=np.float32) * np.float32(2.0**-24)
    return [0.0, *near.tolist(), 1.0]


@pytest.mark.parametrize(
    "levels", [[0.0], [0.0, 0.3], adjacent(16), adjacent(64), np.linspace(0, 1, 128), np.linspace(0, 1, 129)]
)
def test_any_levels_that_a_state_may_hold(levels):
    codec = gtrace.codec("alq:bucket_size=64,norm=linf")
    grid = np.array(levels, np.float32)
    # Whole buckets on the levels, whose largest magnitude is 1.
    on_levels = np.concatenate([np.resize(grid[1:], (40, 63)), np.ones((40, 1))], axis=1).astype(np.float32).reshape(-1)
    values = np.concatenate([on_levels, heavy(5000)]) if grid.size > 1 else heavy(5000)
    assert_equal(codec, codec.init(values.size).with_arrays(levels=grid), values, (5, 6))


def test_uniforms_are_those_of_the_counter():
    for high, low in ((0, 0), (2**64 - 1, 2**64 - 1), (123456789, 2**63 + 11)):
        for start in (0, 77, 2**32 - 1000):
            expected = np.empty(1000, np.float32)
            counter.fill_uniform(expected, np.uint64(high), np.uint64(low), start)
            for place in PLACES:
                found = device.uniforms(device._words(high, low), start, 1000, place)
                np.testing.assert_array_equal(found.cpu().numpy(), expected)


@pytest.mark.parametrize("first", [1.0, 1 + 2.0**-23])
def test_a_norm_whose_rounding_hangs_on_the_order_of_the_sum_is_the_hosts(first, monkeypatch):
    # 2^-24 more is halfway to the next float32; what the other terms add is lost one by one and counts together.
    values = np.zeros(64 * 200, np.float32)
    values[0], values[64], values[128::64] = first, 2.0**-24, 2.0**-54
    codec = gtrace.codec("qsgd:norm=l1,bucket_size=none")
    state = codec.init(values.size)
    assert_equal(codec, state, values, (1, 2))
    if first == 1:  # the host rounds halfway cases to even: down from here, up from the other
        monkeypatch.setattr(device, "_SLACK", 0.0)
        assert device.encode(codec, state, torch.from_numpy(values), (1, 2)) != codec.encode(state, values, (1, 2))


@pytest.mark.parametrize("square", [True, False])
def test_sums_differ_from_the_hosts_by_less_than_the_bound(square):
    for size in (1, 70, 8192, 300_001):
        values = heavy(size, size)
        found = float(device.bucket_sums(torch.from_numpy(values), size, square=square)[0])
        expected = power_sum(values, 2 if square else 1)
        assert abs(found - expected) <= 2.0**-53 * device.sum_depth(size) * expected
        assert expected > 0


def test_refused_as_on_the_host():
    codec = gtrace.codec("qsgd:bits=4")
    with pytest.raises(UsageError, match="3 values for a state of 4"):
        device.encode(codec, codec.init(4), torch.ones(3), (0, 0))
    with pytest.raises(UsageError, match="value 1 is nan"):
        device.encode(codec, codec.init(2), torch.tensor([1.0, float("nan")]), (0, 0))
    payload = device.encode(codec, codec.init(3), torch.ones(3), (0, 0))
    with pytest.raises(PayloadError, match="3 elements where 4"):
        device.decode(codec, b"", payload, 4, CPU)


class Own(TernGrad):
    def encode(self, state, values, key):
        return super().encode(state, np.abs(values), key)


def test_what_stays_on_the_device(on_cpu):
    tensor = torch.ones(3)
    for spec in SPECS:
        assert isinstance(vectors.flat(tensor, gtrace.codec(spec)), torch.Tensor), spec
    for spec in ("qsgd:clip=2.5", "ef:qsgdinf", "rotate:qsgdinf", "mcgq", "topk:ratio=0.1", "none"):
        assert isinstance(vectors.flat(tensor, gtrace.codec(spec)), np.ndarray), spec
    assert isinstance(vectors.flat(tensor, Own()), np.ndarray)


def test_tensors_of_the_cpu_are_the_hosts():
    assert isinstance(vectors.flat(torch.ones(3, dtype=torch.bfloat16), gtrace.codec("qsgd")), np.ndarray)
