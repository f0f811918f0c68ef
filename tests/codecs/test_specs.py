"""Specs: what they mean, how they are written back, and what is said about wrong ones."""

import dataclasses

import numpy as np
import pytest

import gtrace
from gtrace.codecs.levels import QsgdInf
from gtrace.codecs.mcgq import Mcgq
from gtrace.codecs.rotation import Rotate
from gtrace.codecs.spec import parse_spec, register_wrapper, split_specs, wrapper_names
from gtrace.codecs.wrappers import ErrorFeedback
from gtrace.errors import UsageError
from gtrace.sketch import MomentSketch
from gtrace.sweep import expand
from gtrace.types import State


def test_specs_are_taken_apart_and_put_together():
    wrappers = (("ef", {}), ("rotate", {"block": "256"}))
    assert parse_spec(" ef : rotate:block=256: qsgdinf:bits=3") == (wrappers, "qsgdinf", {"bits": "3"})
    assert gtrace.codec("ef:rotate:block=256:qsgdinf:bits=3") == ErrorFeedback(Rotate(QsgdInf(bits=3), block=256))
    assert gtrace.codec("ef:qsgdinf", bits=3) == gtrace.codec("ef:qsgdinf:bits=3")
    assert str(ErrorFeedback(Rotate(QsgdInf(bits=3), block=1024))) == "ef:rotate:qsgdinf:bits=3"
    assert dataclasses.replace(gtrace.codec("rotate:qsgd"), block=8).name == "rotate:qsgd"


def test_lists_of_specs():
    found = split_specs("ef:qsgd,bits=3,bucket_size=64,momentum:beta=0.5,dampening=0.1:none")
    assert found == ["ef:qsgd:bits=3,bucket_size=64", "momentum:beta=0.5,dampening=0.1:none"]
    with pytest.raises(UsageError, match="belongs to no codec"):
        split_specs("bits=3:qsgd")


@pytest.mark.parametrize(
    ("spec", "canonical", "bits"),
    [
        ("fp:scale=best", "fp:bits=8", 8),
        ("fp:bits=5,scale=max,law=normal", "fp:bits=5,law=normal,scale=max", 5),
        ("fp:format=e3m2,bits=6", "fp:e3m2", 6),
        ("fp:1-3-2", "fp:e3m2", 6),
        ("fp:e3m2,scale=mean,rounding=stochastic", "fp:e3m2,scale=mean,rounding=stochastic", 6),
        ("fp:mxfp4,block=32,scale=floor", "fp:mxfp4", 4),
        ("fp:e2m1,scale=e4m3", "fp:e2m1,scale=e4m3,block=16", 4),
        ("fp:e5m2,exponent=14", "fp:e5m2,exponent=14", 8),
    ],
)
def test_formats_imply_bits_blocks_and_scales(spec, canonical, bits):
    c = gtrace.codec(spec)
    assert (str(c), c.parameters["bits"]) == (canonical, bits)
    assert gtrace.codec(canonical) == c


def test_expand_names_formats_of_the_asked_bits():
    found = [str(c) for c in expand("fp:all,scale=error,fp,fp:e3m2,fp:mxfp4", {"bits": [4, 5]})]
    words = [f"fp:{word},scale=error" for word in ("e2m1", "e3m0", "e2m2", "e3m1", "e4m0")]
    assert found == [*words, "fp:bits=4", "fp:bits=5", "fp:e3m2", "fp:mxfp4"]
    assert [str(c) for c in expand("ef:fp:all,bits=3")] == ["ef:fp:e2m0"]
    assert "fp:bits=2" in [str(c) for c in expand("all", {"bits": [2]})]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ef", "ef goes before a codec; write ef:NAME"),
        ("ef:qsgdnif", r"no codec 'qsgdnif'; did you mean qsgdinf"),
        ("ef:decoy=1:qsgd", "codec ef: no parameter 'decoy'; did you mean decay?"),
        ("rotate:block=8,block=8:qsgd", "block is given twice"),
        ("rotate:block=12:qsgd", "block=12 is not a power of two; try 16"),
        ("rotate:ef:ef21:topk", "rotate: cannot go around ef21:; put ef21: first"),
        ("ef:ef:qsgd", "ef: is there twice; write ef:qsgd:bits=4"),
        ("ef:rotate:momentum:ef:topk", "ef: is there twice; write rotate:momentum:ef:topk"),
        ("none:bits=3", "no parameter 'bits'; none has no parameters"),
        ("qsgdinf:bits=4,steps=8", "steps=8 needs bits=5 or more"),
        ("fp:e9m9", "exponents have 1 to 7 bits"),
        ("fp:e3m2,bits=5", "bits=5 contradicts e3m2"),
        ("fp:block=8,scale=max", "with block=8 choose"),
        ("fp:law=normal", "scale=best follows no law"),
        ("fp:nvfp5", "write eXmY"),
        ("qsgd:bits=x", "bits=x is not an integer"),
        ("qsgd:bits=none", "bits=none is not allowed"),
        ("mcgq:bits=3,delta_k=5", "both set"),
        ("mcgq:amount=0", "at least"),
        ("mcgq:coder=huffman", "coder=huffman is unknown"),
        ("prune:sparsity=1", "below 1"),
        ("natural:bucket_size=0", "bucket_size=0 is unknown; known: none"),
        ("terngrad:clip=inf", "clip=inf is not a finite number"),
        ("mcgq:amount=inf", "amount=inf is not a finite number"),
        ("eden:bits=nan", "bits=nan is not a finite number"),
        ("rotate:block=1:topk", "block=1 is out of range; it must be 2 to 1048576"),
        ("thc:granularity=14", "granularity=14 is below 15, which bits=4 need"),
    ],
)
def test_a_wrong_spec_is_one_line(spec, message):
    with pytest.raises(UsageError, match=message) as caught:
        gtrace.codec(spec)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((lambda spec=spec: gtrace.codec(spec).at_bits(5), "bits") for spec in ("ef:topk", "fp:e4m3")),
        (lambda: gtrace.codec("topk").rounds(State(4), np.ones(4), (1, 2)), "topk: has no rounds"),
        (lambda: gtrace.codec("qsgd").allocate([]), "nothing to allocate"),
        (lambda: gtrace.codec("mcgq").expect(State(4), MomentSketch.of([1.0])), "no closed forms|needs a sketch"),
        (lambda: gtrace.codec("fp:mxfp4").expect(State(1), MomentSketch.of([1.0], "none")), "values share a block"),
        (lambda: register_wrapper(Rotate), "'rotate' is empty or taken"),
    ],
)
def test_what_a_codec_cannot_do(call, message):
    with pytest.raises((UsageError, ValueError), match=message):
        call()
    assert not gtrace.codec("topk").linear
    assert not set(wrapper_names()) & set(gtrace.codec_names())


def test_facts_of_an_instance():
    facts = {
        "rotate:qsgd": (False, True),
        "rotate:signsgd": (False, False),
        "rotate:ef:qsgd": (True, False),
        "mcgq:bits=3": (False, True),
        "mcgq:accumulate=true": (True, False),
        "mcgq:delta_k=10": (True, True),
        "mcgq:with_norm=false": (False, False),
    }
    assert {spec: (gtrace.codec(spec).stateful, gtrace.codec(spec).unbiased) for spec in facts} == facts
    assert (Rotate.stateful, Mcgq.stateful, Mcgq.unbiased) == (False, False, True), "an instance changes its class"


def test_facts_come_from_inside():
    linear = [gtrace.codec(f"{prefix}:powersgd").linear for prefix in ("ef", "ef21", "momentum:ef21")]
    assert linear == [True, False, False]
    assert [gtrace.codec(spec).fits_itself for spec in ("ef:prune", "ef:fp:scale=max")] == [True, False]
    c = gtrace.codec("rotate:block=8:ef:qsgd:bits=3")
    assert c.name == "rotate:ef:qsgd"
    assert (c.parameters["bits"], c.parameters["rotate.block"]) == (3, 8)
