"""The laws run on somebody's own codec: by class or instance, and a failure says what is wrong."""

from dataclasses import dataclass

import numpy as np
import pytest

import gtrace
from gtrace import testing
from gtrace.codecs import Codec, Composed, Fp16, PowerSgd, QsgdInf, parameter
from gtrace.coding.fixed import read_floats
from gtrace.errors import PayloadError, UsageError
from gtrace.testing import check_codec, check_mean, tensors


@dataclass(frozen=True)
class Needy(Fp16):
    """A field that is no parameter."""

    name = "needy"
    levels: int = 3


def made(base, **own):
    return dataclass(frozen=True)(type(own.get("name", "taken").title(), (base,), {"__module__": __name__, **own}))


def test_a_codec_may_write_a_body_of_its_own():
    def read(self, shared, body, flags, size):
        if shared or flags or len(body) != 4 * size:
            raise PayloadError("payload body has another length")
        return read_floats(body)

    check_codec(made(Composed, name="raw", write=lambda self, state, x, key: (x.tobytes(), 0), read=read), spike=False)


def test_a_class_is_taken_as_well_as_an_instance():
    check_codec(made(Fp16, name="honest"))
    check_codec(made(Fp16, name="honest")())


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (type("Unfinished", (Codec,), {}), "Unfinished: it must define decode, encode"),
        (Needy, r"Needy: write levels as gtrace.codecs.parameter\("),
        (made(QsgdInf), "another codec has this name, gtrace.codecs.levels.QsgdInf"),
        (
            made(Fp16, name="dividing", decode=lambda *all: np.zeros(1) / 0),
            r"RuntimeWarning: .* \(test_testing.py, line",
        ),
        (made(QsgdInf, name="losing", init=lambda self, size, shape=None: QsgdInf.init(self, size)), "lost the shape"),
        (made(Fp16, name="a,b"), "letters, digits, '_', '-' and '.', not 'a,b'"),
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


def test_types_of_parameters_may_be_classes():
    """As they are in a file without annotations from the future."""
    kinds = {"__annotations__": {"share": float, "steps": int | None, "on": bool, "word": str}}
    fields = {"share": 0.5, "steps": None, "on": True, "word": "a"}
    body = {
        name: parameter(value, "a number", minimum=0.0 if name == "share" else None) for name, value in fields.items()
    }
    kind = dataclass(frozen=True)(type("Typed", (Fp16,), {**kinds, **body, "name": "typed"}))
    assert kind().parameters == fields
    assert kind(share="0.25", steps="3", on="no").parameters == {"share": 0.25, "steps": 3, "on": False, "word": "a"}
    with pytest.raises(UsageError, match="share=x is not a number"):
        kind(share="x")
    with pytest.raises(UsageError, match="share=-1 is out of range"):
        kind(share=-1)
