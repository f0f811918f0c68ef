"""Payloads and decoded values of tensors against the host's kernels: in torch on the CPU, and on a GPU if there is one.

Triton's kernels are tested on a GPU, or anywhere with TRITON_INTERPRET=1 in the environment and the package triton.
"""

import importlib
import os
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from helpers_training import heavy, rank_codecs

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.grids import Rule
from gtrace.codecs.levels import TernGrad
from gtrace.codecs.parts import Scaled
from gtrace.coding import unpack_fixed, width_for
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import counter
from gtrace.kernels.norms import power_sum
from gtrace.sketch import MomentSketch
from gtrace.training import device, torch_kernels, vectors
from gtrace.training.exchange import Exchange
from gtrace.training.ranks import NOT_FINITE, Piece, SimulatedRank, lockstep
from gtrace.training.ways import averaging
from gtrace.training.ways import way as way_of

CPU = torch.device("cpu")
PLACES = [CPU, torch.device("cuda")] if torch.cuda.is_available() else [CPU]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: the interpreter takes milliseconds for a block of a thousand values
MANY = 9_003 if INTERPRETED else 1_000_003
#: kernels, and where they run
WAYS = [(torch_kernels, place) for place in PLACES]
if find_spec("triton") and (INTERPRETED or torch.cuda.is_available()):
    WAYS += [(importlib.import_module("gtrace.training.triton_kernels"), PLACES[-1])]
_SPECS = """
qsgd:bits=2  qsgd:bits=4  qsgd:bits=15  qsgd:bits=15,zero=false  qsgd:norm=l1,coder=elias  qsgd:bucket_size=none
qsgdinf:bits=3  qsgdinf:bits=3,zero=false  qsgdinf:tail=exact,coder=fixed  terngrad
nuqsgd:bits=4  nuqsgd:bits=8  nuqsgd:bits=3,zero=false  natural
alq:bits=3  alq-n:bits=4,zero=false  alq:bits=6,coder=delta  amq:bits=3  amq-n:bits=7,zero=false
zipml:bits=4  zipml:bits=7
"""
SPECS = _SPECS.split()


def small_buckets(spec):
    if "bucket_size" in spec or spec == "natural":
        return gtrace.codec(spec)
    return gtrace.codec(spec + (",bucket_size=64" if ":" in spec else ":bucket_size=64"))


def fitted(codec, values):
    return codec.fit(codec.init(values.size), MomentSketch.from_spec(values, codec.needs), 0)


@pytest.fixture(params=WAYS, ids=[f"{kernels.__name__.rpartition('.')[2]}-{place}" for kernels, place in WAYS])
def place(request, monkeypatch):
    """A device, with the kernels that are tested on it."""
    kernels, found = request.param
    monkeypatch.setattr(device, "kernels_for", lambda kind: kernels)
    return found


def assert_equal(codec, state, values, key, place):
    """The payload is the host's to the byte, and so are the decoded values."""
    payload, shared = codec.encode(state, values, key), codec.shared(state)
    expected = codec.decode(shared, payload, values.size)
    # Not at the start of its memory, like a gradient in a bucket of others.
    given = torch.from_numpy(np.concatenate([values[:1], values])).to(place)[min(1, values.size) :]
    assert device.encode(codec, state, given, key) == payload
    assert given.cpu().numpy().tobytes() == values.tobytes()
    decoded = device.receive(codec, shared, payload, values.size, place)
    assert decoded.dtype == torch.float32
    assert decoded.cpu().numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("spec", SPECS)
def test_many_values_become_the_same_bytes(spec, place):
    codec = gtrace.codec(spec)
    values = heavy(MANY)
    high, low = np.random.default_rng(len(spec)).integers(0, 2**64, 2, np.uint64).tolist()
    assert_equal(codec, codec.init(values.size), values, (high, low), place)
    assert_equal(codec, fitted(codec, values), values, (low, high), place)


@pytest.mark.parametrize("spec", SPECS)
def test_borders_of_buckets_and_values_of_all_sizes(spec, place, monkeypatch):
    monkeypatch.setattr(torch_kernels, "_CHUNK", 128)
    monkeypatch.setattr(torch_kernels, "WIDTH", 16)
    codec = small_buckets(spec)
    random = np.random.default_rng(3)
    for n, size in enumerate((0, 193) if INTERPRETED else (0, 1, 2, 63, 64, 65, 127, 128, 129, 191, 193, 400)):
        x = heavy(size, n)
        mixed = x.copy()
        mixed[::3] = 0
        cases = [x, np.zeros_like(x), -np.zeros_like(x), mixed, np.repeat(x[:1], size)]
        cases += [np.round(x * 3000) / np.float32(7), np.full(size, np.finfo(np.float32).max) * np.sign(x)]
        cases += [random.integers(-9, 10, size) * np.float32(2**-149), np.ldexp(x, random.integers(-140, 130, size))]
        for values in cases:
            values = np.clip(values, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
            key = tuple(random.integers(0, 2**64, 2, np.uint64).tolist())
            assert_equal(codec, codec.init(size), values, key, place)


def adjacent(size):
    """0, neighbours in float32, and 1: a threshold between two of them is rounded to one of them."""
    near = np.float32(0.9) + np.arange(size - 2, dtype=np.float32) * np.float32(2.0**-24)
    return [0.0, *near.tolist(), 1.0]


@pytest.mark.parametrize(
    "levels", [[0.0], [0.0, 0.3], adjacent(16), adjacent(64), np.linspace(0, 1, 128), np.linspace(0, 1, 129)]
)
def test_any_levels_that_a_state_may_hold(levels, place):
    codec = gtrace.codec("alq:bucket_size=64,norm=linf")
    grid = np.array(levels, np.float32)
    # Whole buckets on the levels, whose largest magnitude is 1.
    on_levels = np.concatenate([np.resize(grid[1:], (40, 63)), np.ones((40, 1))], axis=1).astype(np.float32).reshape(-1)
    values = np.concatenate([on_levels, heavy(5000)]) if grid.size > 1 else heavy(5000)
    assert_equal(codec, codec.init(values.size).with_arrays(levels=grid), values, (5, 6), place)


def test_uniforms_are_those_of_the_counter():
    for high, low in ((0, 0), (2**64 - 1, 2**64 - 1), (123456789, 2**63 + 11)):
        for start in (0, 77, 2**32 - 1000):
            expected = np.empty(1000, np.float32)
            counter.fill_uniform(expected, np.uint64(high), np.uint64(low), start)
            for place in PLACES:
                found = torch_kernels.uniforms(torch_kernels.words(high, low), start, 1000, place)
                np.testing.assert_array_equal(found.cpu().numpy(), expected)


@pytest.mark.parametrize("first", [1.0, 1 + 2.0**-23])
def test_a_norm_whose_rounding_hangs_on_the_order_of_the_sum_is_the_hosts(first, place, monkeypatch):
    # 2^-24 more is halfway to the next float32; what the other terms add is lost one by one and counts together.
    values = np.zeros(64 * 200, np.float32)
    values[0], values[64], values[128::64] = first, 2.0**-24, 2.0**-54
    codec = gtrace.codec("qsgd:norm=l1,bucket_size=none")
    state = codec.init(values.size)
    assert_equal(codec, state, values, (1, 2), place)
    if first == 1:  # the host rounds halfway cases to even: down from here, up from the other
        monkeypatch.setattr(device, "_SLACK", 0.0)
        exact = codec.encode(state, values, (1, 2))
        assert device.encode(codec, state, torch.from_numpy(values).to(place), (1, 2)) != exact


@pytest.mark.parametrize("square", [True, False])
def test_sums_differ_from_the_hosts_by_less_than_the_bound(square, place):
    for size in (1, 70, 8192, 300_001):
        values = heavy(size, size)
        found = float(device.kernels_for("").sums(torch.from_numpy(values).to(place), size, square=square)[0])
        expected = power_sum(values, 2 if square else 1)
        assert abs(found - expected) <= 2.0**-53 * device.sum_depth(size) * expected
        assert expected > 0


RULES = {
    1: Rule("count", mirrored=True, levels=np.ones(1, np.float32)),
    **{bits: Rule("uniform", steps=2 ** (bits - 1) - 1) for bits in range(2, 17)},
}


@pytest.mark.parametrize("bits", RULES)
def test_every_width_in_buckets_of_every_kind(bits, place):
    rule, kernels, key = RULES[bits], device.kernels_for(""), (bits, 7)
    lower, upper = torch_kernels.origins(rule)
    values = np.linspace(-1, 1, lower + upper + 1, dtype=np.float32)
    assert width_for(values.size) == bits
    for size, bucket in ((1, 1), (7, 64), (1000, 1000), (3001, 3), (3001, 1024), (3001, 1000)):
        x = heavy(size, bucket)
        x[::5] = 0
        scales = gtrace.buckets.bucket_scales(x, "linf", bucket)
        expected = rule.packed(Scaled(x, scales, bucket), key, bits)
        given, norms, table = (torch.from_numpy(one).to(place) for one in (x, scales, values))
        packed = kernels.quantize(rule, given, bucket, norms, key, bits)
        assert packed.cpu().numpy().tobytes() == expected
        assert kernels.largest(given, bucket).cpu().numpy().tobytes() == scales.tobytes()
        symbols = unpack_fixed(expected, size, bits, values.size)
        if bits < 16:
            plain = kernels.quantize(rule, given, bucket, norms, key, 0)
            np.testing.assert_array_equal(plain.cpu().numpy(), symbols)
        out = torch.full((size,), np.nan, device=place)
        kernels.restore(packed, bits, table, bucket, norms, out)
        np.testing.assert_array_equal(out.cpu().numpy(), values[symbols] * np.repeat(scales, bucket)[:size])


def test_refused_as_on_the_host(place):
    codec = gtrace.codec("qsgd:bits=4,coder=fixed,bucket_size=2,tail=exact")
    with pytest.raises(UsageError, match="3 values for a state of 4"):
        device.encode(codec, codec.init(4), torch.ones(3, device=place), (0, 0))
    for norm in ("l2", "linf", "l1"):
        for bad in (0, 2):
            values = torch.ones(3, device=place)
            values[bad] = float("nan" if bad else "inf")
            with pytest.raises(UsageError, match=f"value {bad} is"):
                device.encode(gtrace.codec(f"{codec},norm={norm}"), codec.init(3), values, (0, 0))
    with pytest.raises(UsageError, match="value 1 is"):
        device.encode(gtrace.codec("natural"), codec.init(2), torch.tensor([1.0, -np.inf], device=place), (0, 0))
    payload = device.encode(codec, codec.init(3), torch.ones(3, device=place), (0, 0))
    with pytest.raises(PayloadError, match="3 elements where 4"):
        device.receive(codec, b"", payload, 4, place)


def test_a_symbol_that_the_codec_does_not_have_is_refused(place):
    codec = gtrace.codec("qsgdinf:bits=3,coder=fixed")
    state, one = codec.init(9), np.ones(1, np.float32)
    # 7 symbols in 3 bits: the symbol 7 is none of them.
    for coded in (b"\xff" + bytes(3), bytes(2) + b"\xe0\x03"):
        payload = codec.seal(state, one, one[:0], coded, 0)
        with pytest.raises(PayloadError, match="outside the 7"):
            codec.decode(b"", payload, 9)
        with pytest.raises(PayloadError, match="outside the 7"):
            device.receive(codec, b"", payload, 9, place)


class Own(TernGrad):
    def encode(self, state, values, key):
        return super().encode(state, np.abs(values), key)


def test_what_stays_on_the_device(monkeypatch):
    tensor = torch.ones(3, dtype=torch.bfloat16)
    assert isinstance(vectors.flat(tensor, gtrace.codec("qsgd")), np.ndarray)
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
    for spec in SPECS:
        assert isinstance(vectors.flat(tensor, gtrace.codec(spec)), torch.Tensor), spec
    for spec in ("qsgd:clip=2.5", "ef:qsgdinf", "rotate:qsgdinf", "mcgq", "topk:ratio=0.1", "none"):
        assert isinstance(vectors.flat(tensor, gtrace.codec(spec)), np.ndarray), spec
    assert isinstance(vectors.flat(tensor, Own()), np.ndarray)


@pytest.mark.parametrize(
    ("spec", "policy"),
    [("qsgdinf:bits=3", "skip"), ("alq:bits=3,scope=model", "skip"), ("natural", "zero"), ("qsgdinf", "pass")],
)
def test_an_exchange_of_tensors_is_one_of_arrays(spec, policy, on_cpu):
    batches = [
        [{"w": heavy(9000, k).reshape(90, 100), "b": heavy(10, 9 + k)} for k in range(3 * step, 3 * step + 3)]
        for step in range(3)
    ]
    if "scope" not in spec:
        batches[1][1]["b"][[3, 5]] = np.nan, np.inf
    of_arrays, of_tensors = (Exchange(gtrace.codec(spec), 3, seed=4, refit="0,2", nonfinite=policy) for _ in range(2))
    for step, batch in enumerate(batches):
        expected = of_arrays.step(step, batch)
        found = of_tensors.step(step, [{name: torch.from_numpy(a) for name, a in one.items()} for one in batch])
        for name, average in expected.gradients.items():
            assert isinstance(found.gradients[name], torch.Tensor)
            np.testing.assert_array_equal(found.gradients[name].numpy(), average)
        for field in ("payload_bits", "shared_bits", "float32_bits", "zeros", "nonfinite"):
            assert getattr(found.tally, field) == getattr(expected.tally, field)
        assert found.bad == expected.bad
        assert found.tally.relative_variance == pytest.approx(expected.tally.relative_variance)
        assert found.tally.worker_variance == pytest.approx(expected.tally.worker_variance)


NAMES = ("w", "bias", "v", "u")


SIZES = (3000, 40, 200, 70)


TABLE = CodecTable.of("alq:bits=3,bucket_size=64", {"bias": "none"})


TENSORS = [(size, TABLE.choose(name, size)) for name, size in zip(NAMES, SIZES, strict=True)]


def both_ranks(way, common, kept):
    """What both ranks hold after a step, and their tallies; rank 1 has no values to send for the last two tensors."""
    everyone, exchanges = [], []
    for rank in range(2):
        likes = [vectors.flat(kept(heavy(size, 5 * rank + k)), codec) for k, (size, codec) in enumerate(TENSORS)]
        values = [*likes[:2], NOT_FINITE, None] if rank == 1 else likes
        named = zip(NAMES, TENSORS, likes, strict=True)
        whole = [Piece(name, codec, size, vectors.place_of(like)) for name, (size, codec), like in named]
        everyone.append(rank_codecs(SimulatedRank(rank, 2), TABLE, common=common))
        exchanges.append(averaging(everyone[-1], way_of(way), whole, values, 0))
    return lockstep(exchanges)[0], [codecs.tally for codecs in everyone]


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("way", ["allgather", "two-shot"])
def test_ranks_average_tensors_as_they_average_arrays(way, common, on_cpu):
    expected, counted = both_ranks(way, common, lambda values: values)
    found, tallies = both_ranks(way, common, torch.from_numpy)
    for rank in range(2):
        for name, array, tensor in zip(NAMES, expected[rank], found[rank], strict=True):
            assert isinstance(array, np.ndarray)
            assert isinstance(tensor, np.ndarray if name == "bias" else torch.Tensor)
            np.testing.assert_array_equal(tensor, array)
        assert np.isnan(expected[rank][2]).all()
        assert np.isfinite(expected[rank][0]).all()
        for field in ("payload_bits", "shared_bits", "frame_bits", "down_bits", "zeros"):
            assert getattr(tallies[rank], field) == getattr(counted[rank], field)
        assert tallies[rank].worker_variance == pytest.approx(counted[rank].worker_variance)
    np.testing.assert_array_equal(expected[0][0], expected[1][0])
