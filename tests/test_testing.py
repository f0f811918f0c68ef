"""The laws run on somebody's own codec: by class or instance, and a failure says what is wrong."""

from dataclasses import dataclass

import numpy as np
import pytest

import gtrace
from gtrace import testing
from gtrace.codecs import Codec, Fp16, PowerSgd, QsgdInf, parameter
from gtrace.testing import check_codec, check_mean, tensors
from gtrace.types import State


class Bare(Codec):
    """No dataclass."""

    name = "bare"
    bits: int = parameter(3, "bits")

    def encode(self, state, values, key):
        return b""

    def decode(self, shared, payload, size):
        return np.zeros(size, np.float32)


@dataclass(frozen=True)
class Needy(Fp16):
    """A field that is no parameter."""

    name = "needy"
    levels: int = 3


def dividing(self, shared, payload, size):
    return np.zeros(size, np.float32) / 0


def init(self, size, shape=None):
    return QsgdInf.init(self, size)


def made(base, **own):
    return dataclass(frozen=True)(type(own.get("name", "taken").title(), (base,), {"__module__": __name__, **own}))


def test_a_class_is_taken_as_well_as_an_instance():
    check_codec(made(Fp16, name="honest"))
    check_codec(made(Fp16, name="honest")())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (Bare, "Bare: bits is not a parameter yet; put @dataclass"),
        (type("Unfinished", (Codec,), {}), "Unfinished: it must define decode, encode"),
        (Needy, r"Needy: write levels as gtrace.codecs.parameter\("),
        (made(QsgdInf), "another codec has this name, gtrace.codecs.levels.QsgdInf"),
        (
            made(Fp16, name="dividing", decode=dividing),
            r"on one element: RuntimeWarning: .* \(test_testing.py, line \d+\)",
        ),
        (made(QsgdInf, name="losing", init=init), "lost the shape"),
        (made(QsgdInf, name="old", init=lambda self, size: QsgdInf.init(self, size)), "init|positional argument"),
        (int, "int: give a class that extends gtrace.codecs.Codec"),
    ],
)
def test_a_failure_says_what_is_wrong(what, said):
    with pytest.raises(AssertionError, match=said):
        check_codec(what, spike=False)


def test_a_bias_that_is_denied_is_noticed():
    """It says that it is unbiased, and shrinks by three per cent."""
    heavy = dict(tensors())["heavy"]
    check_mean(gtrace.codec("rotate:minmax"), "heavy", heavy)
    boastful = made(Fp16, name="boastful", unbiased=True, decode=lambda *all: Fp16.decode(*all) * np.float32(0.97))
    with pytest.raises(AssertionError, match="mean shrinkage; unbiased = False says so"):
        check_mean(boastful(), "heavy", heavy)


def test_rounds_that_give_workers_different_gradients_are_noticed():
    class Apart(PowerSgd):
        def rounds(self, state, values, key):
            ended = yield from super().rounds(state, values, key)
            return ended._replace(decoded=ended.own)

    testing.check_rounds(PowerSgd(), np.arange(200, dtype=np.float32), shape=(10, 20))
    with pytest.raises(AssertionError, match="different gradients"):
        testing.check_rounds(Apart(), np.arange(200, dtype=np.float32), shape=(10, 20))


def test_a_state_keeps_its_shape():
    state = State(12, {"a": np.ones(2)}, [3, np.int64(4)])
    for one in (state, state.with_arrays(b=np.ones(1)), State.from_arrays(state.to_arrays())):
        assert one.shape == (3, 4)
    assert "shape" not in State(12).to_arrays()
    assert [State.from_arrays(one.to_arrays()).shape for one in (State(12), State(1, {}, ()))] == [None, ()]
    with pytest.raises(ValueError, match="does not have 12 elements"):
        State(12, {}, (5, 2))
