"""The laws run on somebody's own codec: by class or instance, and a failure says what is wrong."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

import gtrace
from gtrace import testing
from gtrace.codecs import Codec, Fp16, PowerSgd, QsgdInf, parameter
from gtrace.testing import check_codec, check_mean, tensors
from gtrace.types import State


class Bare(Codec):
    """No dataclass."""

    name: ClassVar[str] = "bare"
    bits: int = parameter(3, "bits")

    def encode(self, state, values, key):
        return b""

    def decode(self, shared, payload, size):
        return np.zeros(size, np.float32)


@dataclass(frozen=True)
class Dividing(Fp16):
    """Fails in its own code."""

    name: ClassVar[str] = "dividing"

    def decode(self, shared, payload, size):
        return np.zeros(size, np.float32) / 0


@dataclass(frozen=True)
class Needy(Fp16):
    """A field that is no parameter."""

    name: ClassVar[str] = "needy"
    levels: int = 3


@dataclass(frozen=True)
class Taken(QsgdInf):
    """A name that is taken."""


class Unfinished(Codec):
    """Nothing in it."""


@dataclass(frozen=True)
class Boastful(Fp16):
    """Says that it is unbiased, and shrinks by three per cent."""

    name: ClassVar[str] = "boastful"
    unbiased: ClassVar[bool] = True

    def decode(self, shared, payload, size):
        return super().decode(shared, payload, size) * np.float32(0.97)


@dataclass(frozen=True)
class Honest(Fp16):
    """float16 under another name."""

    name: ClassVar[str] = "honest"


def test_a_class_is_taken_as_well_as_an_instance():
    check_codec(Honest)
    check_codec(Honest())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (Bare, "Bare: bits is not a parameter yet; put @dataclass"),
        (Unfinished, "Unfinished: it must define decode, encode"),
        (Needy, r"Needy: write levels as gtrace.codecs.parameter\("),
        (Taken, "another codec has this name, gtrace.codecs.levels.QsgdInf"),
        (Dividing, r"dividing on one element: RuntimeWarning: .* \(test_testing.py, line \d+\)"),
        (int, "int: give a class that extends gtrace.codecs.Codec"),
    ],
)
def test_a_failure_says_what_is_wrong(what, said):
    with pytest.raises(AssertionError, match=said):
        check_codec(what)


def test_a_bias_that_is_denied_is_noticed():
    heavy = dict(tensors())["heavy"]
    check_mean(gtrace.codec("rotate:minmax"), "heavy", heavy)
    with pytest.raises(AssertionError, match="mean shrinkage; unbiased = False says so"):
        check_mean(Boastful(), "heavy", heavy)


def test_a_codec_that_loses_the_shape_is_noticed():
    class Losing(QsgdInf):
        name = "losing"

        def init(self, size, shape=None):
            return super().init(size)

    with pytest.raises(AssertionError, match="lost the shape"):
        testing.check_codec(Losing(), spike=False)


def test_a_codec_whose_init_takes_no_shape_is_noticed():
    class Old(QsgdInf):
        name = "old"

        def init(self, size):
            return super().init(size)

    with pytest.raises(AssertionError, match="init"):
        testing.check_codec(Old(), spike=False)


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
    assert state.shape == (3, 4)
    for one in (state.with_arrays(b=np.ones(1)), State.from_arrays(state.to_arrays())):
        assert one.shape == (3, 4)
    assert "shape" not in State(12).to_arrays()
    assert State.from_arrays(State(12).to_arrays()).shape is None
    assert State.from_arrays(State(1, {}, ()).to_arrays()).shape == ()
    with pytest.raises(ValueError, match="does not have 12 elements"):
        State(12, {}, (5, 2))
