"""Every registered codec, in the configurations that differ in code path, obeys every law."""

import numpy as np
import pytest

import gtrace
from gtrace import testing
from gtrace.codecs import codec_class, parse_spec, wrapper_names
from gtrace.errors import UsageError

VARIANTS = [
    "none",
    "qsgd:bits=2",
    "qsgd:bits=4",
    "qsgd:bits=8,bucket_size=100",
    "qsgd:bits=4,norm=l1",
    "qsgd:bits=3,zero=false",
    "qsgdinf:bits=3",
    "qsgdinf:bits=3,zero=false,bucket_size=none",
    "qsgdinf:bits=4,bucket_size=none",
    "qsgdinf:bits=4,coder=fixed",
    "qsgd:bits=4,coder=elias",
    "qsgdinf:bits=3,zero=false,coder=delta",
    "terngrad:coder=gamma",
    "qsgdinf:bits=4,tail=exact,bucket_size=1000",
    "qsgdinf:bits=10",
    "terngrad",
    "terngrad:clip=2.5",
    "terngrad:bucket_size=none",
    "terngrad:coder=fixed,bucket_size=1",
    "nuqsgd:bits=3",
    "nuqsgd:bits=3,zero=false",
    "nuqsgd:bits=8",
    "nuqsgd:bits=6,zero=false,p=0.7",
    "natural",
    "natural:coder=fixed",
    "alq:bits=3",
    "alq:bits=4,zero=false",
    "alq:bits=3,law=truncnorm,bucket_size=512",
    "alq:bits=3,method=cd,tail=exact,bucket_size=1000",
    "alq-n:bits=4,law=truncnorm-mean,bucket_size=512",
    "alqg:bits=3",
    "alqg-n:bits=3,law=truncnorm,zero=false",
    "amq:bits=3",
    "amq:bits=8,zero=false",
    "amq-n:bits=4,method=gd,law=truncnorm",
    "zipml:bits=3",
    "zipml:bits=6",
    "zipml:bits=4,zero=false,bucket_size=none",
    "zipml:bits=8,coder=fixed,norm=l2",
    "topk",
    "topk:coder=fixed",
    "topk:ratio=0.5",
    "mem-sgd",
    "mem-sgd:ratio=0.1,coder=fixed",
    "dropping",
    "dropping:ratio=0.1,sample=0.05",
    "randomk:ratio=0.25",
    "randomk:ratio=0.25,scale=false",
    "dgc",
    "dgc:ratio=0.01,clip=1,warmup=8",
    "adacomp",
    "adacomp:bin_size=7",
    "signsgd",
    "signsgd:scale=none",
    "signsgd:scale=energy",
    "signum",
    "ef-signsgd",
    "onebit",
    "onebit:bucket_size=none",
    "fp",
    "fp:bits=2",
    "fp:bits=4",
    "fp:bits=5,rounding=stochastic",
    "fp:bits=6,scale=error",
    "fp:bits=4,scale=absmax",
    "fp:bits=7,scale=mean,law=normal",
    "fp:bits=8,scale=error,rounding=stochastic,scope=model",
    "fp:e1m3",
    "fp:e3m0,rounding=stochastic",
    "fp:e7m0",
    "fp:e5m2,exponent=14",
    "fp:e4m3fn",
    "fp:bits=6,block=7",
    "fp:mxfp4",
    "fp:mxfp6,rounding=stochastic",
    "fp:mxfp8e5m2",
    "fp:nvfp4",
    "fp:e2m3,scale=pow2",
    "ef:fp:bits=4",
    "fp16",
    "bf16",
    "int8",
    "int8:block_size=none",
    "minmax",
    "minmax:bits=1",
    "minmax:bits=3",
    "minmax:bits=16",
    "powersgd",
    "powersgd:rank=4,rows=64",
    "prune",
    "prune:sparsity=0.5,threshold=lognormal",
    "prune:threshold=normal",
    "prune:sparsity=0.95,threshold=topk",
    "prune:sparsity=0",
    "topk-prune",
    "topk-prune:sparsity=0.5",
    "mcgq",
    "mcgq:amount=0.1",
    "mcgq:bits=4",
    "mcgq:bits=4,coder=delta",
    "mcgq:accumulate=true,scale=accumulated,coder=omega",
    "mcgq:with_norm=false,delta_k=1000",
    "mcgq:accumulate=true,amount=0.1",
    "ef:qsgdinf:bits=3",
    "ef:topk:ratio=0.05",
    "ef:minmax:bits=2",
    "ef:topk-prune:sparsity=0.9",
    "rotate:prune:allocation=heterogeneous",
    "accumulate:topk:ratio=0.1",
    "accumulate:terngrad",
    "momentum:signsgd",
    "rotate:qsgdinf:bits=3",
    "ef:rotate:signsgd",
    "rotate:ef:signsgd",
    "rotate:rotate:qsgd:bits=3",
]


def test_every_registered_codec_is_among_the_variants():
    parsed = [parse_spec(spec) for spec in VARIANTS]
    assert {p.name for p in parsed} == set(gtrace.codec_names())
    assert {name for p in parsed for name, _ in p.wrappers} == set(wrapper_names())


@pytest.mark.parametrize("spec", VARIANTS)
def test_laws(spec):
    c = gtrace.codec(spec)
    testing.check_codec(c, spike=spec.endswith("bucket_size=none"))


def test_default_of_every_codec_obeys_the_spike_law():
    for name in gtrace.codec_names():
        if gtrace.codec(name).unbiased:
            testing.check_spike(gtrace.codec(name), seed=1)


@pytest.mark.parametrize("name", gtrace.codec_names())
def test_a_codec_describes_itself(name):
    cls = codec_class(name)
    assert cls.summary
    assert cls.formula
    assert cls.paper
    assert cls.__doc__


class _Shrinking(type(gtrace.codec("qsgdinf"))):
    """Scales the probability of rounding up: what the laws must notice."""

    def encode(self, state, values, key):
        x = np.asarray(values, np.float32)
        return super().encode(state, (x * np.float32(0.97)).astype(np.float32), key)


def test_the_laws_notice_three_per_cent_of_shrinkage():
    values = dict(testing.tensors())["heavy"]
    testing.check_expectation(gtrace.codec("qsgdinf:bits=3"), "heavy", values)
    with pytest.raises(AssertionError, match=r"mean shrinkage|squared error"):
        testing.check_expectation(_Shrinking(bits=3), "heavy", values)


def test_workers_with_shared_randomness_are_noticed(monkeypatch):
    real = testing.Key.derive
    monkeypatch.setattr(testing.Key, "derive", lambda seed, **kw: real(seed, **{**kw, "worker": 0}))
    values = dict(testing.tensors())["heavy"]
    with pytest.raises(AssertionError, match="four workers"):
        testing.check_workers(gtrace.codec("qsgdinf:bits=3"), values)


def test_encode_refuses_what_it_cannot_take():
    c = gtrace.codec("qsgd")
    with pytest.raises(UsageError, match="value 1 is nan"):
        c.encode(c.init(3), [0.0, np.nan, 1.0], (1, 2))
    with pytest.raises(UsageError, match="2 values where the state is for 3"):
        c.encode(c.init(3), [0.0, 1.0], (1, 2))
    with pytest.raises(UsageError, match="complex"):
        c.encode(c.init(1), np.array([1j]), (1, 2))
