"""Every registered codec, in the configurations that differ in code path, obeys every law."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
from helpers_variants import VARIANTS

import gtrace
from gtrace import testing
from gtrace.codecs import parse_spec, wrapper_names
from gtrace.errors import UsageError
from gtrace.types import State

#: edges of parameters beside the usual configurations
_EDGES = """
int8:block_size=1  mcgq:amount=0.05,coder=gamma  mcgq:with_norm=false,coder=omega  topk:ratio=1  randomk:ratio=1
dgc:momentum=0,masking=false  signum:beta=0,scale=none  onebit:bucket_size=1  onebit:bucket_size=100
powersgd:rank=1  powersgd:rank=30,warm=false  ef:none  ef:int8  ef:momentum:terngrad  ef:powersgd
momentum:beta=0.5,dampening=0.5:ef:qsgd:bits=3  rotate:none  rotate:block=2:qsgd:bits=4  rotate:signsgd:scale=energy
rotate:onebit  rotate:terngrad:bucket_size=1000,tail=exact,clip=2.5
momentum:powersgd  accumulate:powersgd  rotate:powersgd  eden:bits=0.01  qsgd:bits=15,norm=linf
"""

#: codecs in parts, besides those
_IN_PARTS = """
qsgd:bits=4,bucket_size=64  alq:bits=3,bucket_size=64  zipml:bits=3,bucket_size=none  signsgd:scale=energy
fp:e4m3  topk  topk:ratio=0.3  topk:chunk=64  topk:coder=fixed,values=intn:bits=2  mem-sgd  dgc:warmup=3
dgc:clip=0.3  eden:bits=0.7,block=64
powersgd  ef-signsgd  ef:qsgd:bits=3,bucket_size=64  ef:topk:ratio=0.02  ef:beta=0.5,decay=0.9,reset=2:signsgd
ef:memory_bits=8:qsgd:bits=3,bucket_size=64  ef:beta=0.8,reset=3,memory_bits=4:topk:ratio=0.1
mcgq  mcgq:bits=4  mcgq:amount=0.05,coder=gamma  mcgq:with_norm=false  accumulate:mcgq  minmax
terngrad:clip=2.5,bucket_size=64  qsgd:bits=3,bucket_size=none,clip=2  ef:alq:bits=3,bucket_size=64,clip=2,tail=exact
ef:minmax  uniform8  ef:uniform8  quantile8  dropping  dropping:ratio=0.3  dropping:ratio=1
thc:block=64  ef:thc:block=32,bits=3  adacomp  adacomp:bin_size=7
eden:block=64  eden:bits=2.3,block=64  ef:eden:bits=1,block=128
ef:alq:bits=3,bucket_size=64  ef21:topk:ratio=0.1  ef21:momentum=0.5:signsgd  accumulate:topk
momentum:ef:signsgd  ef:powersgd:warm=false  rotate:block=64:qsgd:bits=3,bucket_size=64  rotate:block=64:topk
rotate:block=16,signs=fixed:signsgd  ef:rotate:block=64:alq:bits=3,bucket_size=64  rotate:block=16:prune
"""
IN_PARTS = _IN_PARTS.split()

#: as they are before other tests of this process register codecs of their own
CODECS = gtrace.codec_names()
HEAVY = dict(testing.tensors())["heavy"]


def test_every_registered_codec_is_among_the_variants():
    parsed = [parse_spec(spec) for spec in VARIANTS]
    assert {p.name for p in parsed} == set(CODECS)
    assert {name for p in parsed for name, _ in p.wrappers} == set(wrapper_names())


@pytest.mark.parametrize("spec", [*VARIANTS, *_EDGES.split()])
def test_laws(spec):
    c = gtrace.codec(spec)
    assert str(c) == spec or spec in VARIANTS
    testing.check_codec(c, spike=spec.endswith("bucket_size=none"))


@pytest.mark.parametrize("spec", VARIANTS)
def test_a_codec_is_deterministic_exactly_if_its_key_changes_nothing(spec):
    c = gtrace.codec(spec)
    state, _ = testing.fitted(c, HEAVY)
    payloads = [c.encode(state, HEAVY, key) for key in ((1, 2), (3, 4))]
    # Pruning to no zeros leaves one value of this tensor to chance, with a probability of 2e-4.
    lossless = np.allclose(c.decode(c.shared(state), payloads[0], HEAVY.size), HEAVY, rtol=1e-3)
    assert (payloads[0] == payloads[1]) == (c.deterministic or lossless)


@pytest.mark.parametrize("name", [*CODECS, "rotate:qsgdinf:bits=3"])
def test_default_of_every_codec_obeys_the_spike_law(name):
    if gtrace.codec(name).unbiased:
        testing.check_spike(gtrace.codec(name), seed=1, draws=6)


def splits(spec):
    """Whether a codec takes a tensor of 4,950 values in two pieces or more."""
    return (gtrace.codec(spec).part_multiple or math.inf) < 2475


def test_these_take_a_tensor_in_pieces():
    assert all(map(splits, IN_PARTS))


@pytest.mark.parametrize("shape", [(4999,), (50, 99)], ids=["vector", "matrix"])
@pytest.mark.parametrize(
    "spec", [spec for spec in dict.fromkeys([*IN_PARTS, *VARIANTS, *_EDGES.split()]) if splits(spec)]
)
def test_a_tensor_in_pieces_is_sent_like_the_whole(spec, shape, monkeypatch):
    # A choice of values drops what it surely leaves out, matrices are multiplied in blocks of rows, and quantiles are
    # taken of portions that end elsewhere.
    monkeypatch.setattr("gtrace.codecs.sparse.BLOCK", 64)
    monkeypatch.setattr("gtrace.codecs.rotation.BLOCK", 64)
    monkeypatch.setattr("gtrace.codecs.powersgd.BLOCK", 256)
    monkeypatch.setattr("gtrace.codecs.tables._PORTION", 900)
    rng, n = np.random.default_rng(0), math.prod(shape)
    values = (rng.standard_t(3, n) * 0.01 * rng.integers(0, 2, n)).astype(np.float32)
    testing.check_pieces(gtrace.codec(spec), values, shape=shape)


class _Shrinking(type(gtrace.codec("qsgdinf"))):
    """Scales the probability of rounding up: what the laws must notice."""

    def encode(self, state, values, key):
        return super().encode(state, np.asarray(values, np.float32) * np.float32(0.97), key)


def test_the_laws_notice_three_per_cent_of_shrinkage():
    testing.check_expectation(gtrace.codec("qsgdinf:bits=3"), "heavy", HEAVY)
    with pytest.raises(AssertionError, match=r"mean shrinkage|squared error"):
        testing.check_expectation(_Shrinking(bits=3), "heavy", HEAVY)


class _Remembering(type(gtrace.codec("qsgdinf"))):
    """Has a memory, and does not say so."""

    def update(self, state, values, decoded):
        return state.with_arrays(last=decoded)


class _InPlace(type(gtrace.codec("mem-sgd"))):
    def update(self, state, values, decoded):
        state.arrays["residual"][:] = 0
        return state


class _Summing(type(gtrace.codec("qsgdinf"))):
    def aggregate(self, decoded):
        return np.sum(decoded, axis=0)


class _OwnScales(type(gtrace.codec("minmax"))):
    """Gives each piece a scale of its own."""

    def prepare(self, state, pieces, key, sums=None):
        return state


class _Filling(type(gtrace.codec("qsgdinf"))):
    def encode(self, state, values, key):
        return super().encode(state, np.nan_to_num(values), key)


class _Resizing(type(gtrace.codec("qsgdinf"))):
    def encode(self, state, values, key):
        return super().encode(self.init(len(values)), values, key)


class _Weighing(type(gtrace.codec("qsgdinf"))):
    def weighted_error(self, state, sketch, weighted):
        return 2 * super().weighted_error(state, sketch, weighted)


class _Exact(type(gtrace.codec("fp"))):
    def expect(self, state, sketch):
        return dataclasses.replace(super().expect(state, sketch), bias=0.0)


@pytest.mark.parametrize(
    ("wrong", "law", "words"),
    [
        (_Remembering, testing.check_steps, "stateful"),
        (_InPlace, testing.check_steps, "read-only"),
        (_Summing, testing.check_steps, "aggregate"),
        (_OwnScales, testing.check_pieces, "other values than the whole"),
        (_Filling, testing.check_refusals, "NaN"),
        (_Resizing, testing.check_refusals, "too few values"),
        (_Weighing, partial(testing.check_expectation, name="heavy"), "weights of 1"),
        (_Exact, partial(testing.check_expectation, name="heavy"), "all of its error is bias"),
    ],
)
def test_the_laws_notice(wrong, law, words):
    law(wrong.__base__(), values=HEAVY)
    with pytest.raises((AssertionError, ValueError), match=words):
        law(wrong(), values=HEAVY)


def test_workers_with_shared_randomness_are_noticed(monkeypatch):
    real = testing.Key.derive
    monkeypatch.setattr(testing.Key, "derive", lambda seed, **kw: real(seed, **{**kw, "worker": 0}))
    with pytest.raises(AssertionError, match="four workers"):
        testing.check_workers(gtrace.codec("qsgdinf:bits=3"), HEAVY)


@pytest.mark.parametrize(
    ("size", "values", "message"),
    [
        (3, [0.0, np.nan, 1.0], "value 1 is nan"),
        (3, [0.0, 1.0], "2 values for a state of 3"),
        (1, np.array([1j]), "complex"),
    ],
)
def test_encode_refuses_what_it_cannot_take(size, values, message):
    c = gtrace.codec("qsgd")
    with pytest.raises(UsageError, match=message):
        c.encode(c.init(size), values, (1, 2))


def test_a_state_from_another_machine_sends_the_same():
    c = gtrace.codec("ef:alq:bits=3")
    state, _ = testing.fitted(c, HEAVY)
    kept = c.update(state, HEAVY, np.zeros_like(HEAVY)).to_arrays()
    swapped = {name: array.astype(array.dtype.newbyteorder(">")) for name, array in kept.items()}
    found, other = (c.encode(State.from_arrays(arrays), HEAVY, (1, 2)) for arrays in (kept, swapped))
    assert found == other
