"""Codecs from one's own file: classes, functions, compressor objects, and files that are wrong."""

import sys
import textwrap

import numpy as np
import pytest
from helpers_codecs import body, once

import gtrace
from gtrace import testing
from gtrace.codecs.plugins import REMEMBERED, load_plugin
from gtrace.errors import PayloadError, ScriptError, UsageError

FUNCTIONS = """
    import numpy as np

    def compress(values):
        return values.astype(np.float16).tobytes()

    def decompress(data, size):
        return np.frombuffer(data, np.float16)
"""
CLASS = """
    from dataclasses import dataclass
    import numpy as np
    from gtrace.codecs import Codec, parameter
    from gtrace.coding import open_envelope, seal

    @dataclass(frozen=True)
    class Power(Codec):
        name = "power2"
        steps: int = parameter(4, "how many", minimum=1)

        def encode(self, state, values, key):
            x = np.round(np.float32(values) * self.steps).clip(-100, 100).astype(np.int8)
            return seal(x.tobytes(), codec=self.name, size=x.size, shared=b"")

        def decode(self, shared, payload, size):
            body, _ = open_envelope(payload, codec=self.name, size=size, shared=shared)
            return (np.frombuffer(body, np.int8) / self.steps).astype(np.float32)
"""
COMPRESSOR = """
    import numpy as np

    class Top:
        __hash__ = None

        def __init__(self, share):
            self.share = share

        def compress(self, tensor, name):
            places = np.argsort(-abs(tensor), kind="stable")[: int(self.share * tensor.size)].astype(np.int32)
            return [tensor[places], places], tensor.shape

        def decompress(self, tensors, ctx):
            out = np.zeros(ctx, np.float32)
            out[tensors[1]] = tensors[0]
            return out

    compressor = Top(0.1)
"""
VALUES = np.random.default_rng(1).normal(size=200).astype(np.float32)

pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def write(tmp_path):
    def written(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return written


def names(path):
    return [cls.name for cls in load_plugin(path)]


def test_two_functions_are_a_codec_named_like_the_file(write):
    load_plugin(write(FUNCTIONS))
    assert once(gtrace.codec("mine"), [1.0, -2.5, 0.1]).tolist() == [1.0, -2.5, float(np.float16(0.1))]
    assert len(body(gtrace.codec("mine"), np.ones(9))) == 18
    for spec in ("mine", "ef:rotate:mine"):
        c = gtrace.codec(spec)
        testing.check_spec(c)
        testing.check_round_trip(c, "normal", VALUES)
        testing.check_refusals(c, VALUES)


def test_a_compress_that_draws_gets_a_generator_of_the_key(write):
    text = FUNCTIONS.replace("compress(values)", "compress(values, rng)")
    load_plugin(write(text.replace("values.astype", "(values > rng.random(values.size)).astype")))
    c, values = gtrace.codec("mine"), np.full(100, 0.5)
    assert np.array_equal(once(c, values), once(c, values))
    assert not np.array_equal(once(c, values), once(c, values, key=(3, 4)))
    assert 30 < once(c, values).sum() < 70


def test_a_class_brings_its_parameters_and_may_register_itself(write):
    text = CLASS.replace("parameter\n", "parameter, register\n").replace("@dataclass", "@register\n    @dataclass")
    for path in (write(CLASS), write(text)):
        assert names(path) == names(path) == ["power2"]
        assert gtrace.codec_names().count("power2") == 1
    c = gtrace.codec("power2:steps=8")
    assert once(c, [0.5, -0.25]).tolist() == [0.5, -0.25]
    testing.check_spec(c)
    with pytest.raises(UsageError, match="steps=0 is out of range"):
        gtrace.codec("power2:steps=0")


def test_a_compressor_object_is_flagged_as_declared_and_its_payloads_are_forgotten_after_many_others(write):
    load_plugin(write(COMPRESSOR))
    c = gtrace.codec("mine")
    assert c.declared
    assert gtrace.codec("ef:mine").declared
    assert len(body(c, VALUES)) == 20 * 8
    testing.check_round_trip(c, "normal", VALUES)
    testing.check_refusals(c, VALUES)
    payloads = [c.encode(c.init(10), np.arange(10) + k, (1, 2)) for k in range(REMEMBERED + 1)]
    assert c.decode(b"", payloads[1], 10).max() == 10
    with pytest.raises(PayloadError, match="not encoded here"):
        c.decode(b"", payloads[0], 10)


def test_several_codecs_in_one_file(write):
    path = write(CLASS + FUNCTIONS + COMPRESSOR + "\n    other = Top(0.5)\n", "many.py")
    assert names(path) == ["power2", "many", "compressor", "other"]
    assert [np.count_nonzero(once(gtrace.codec(name), VALUES)) for name in ("compressor", "other")] == [20, 100]


def test_an_edited_file_replaces_its_codecs(write):
    load_plugin(write(FUNCTIONS))
    load_plugin(write(FUNCTIONS.replace("np.float16)\n", "np.float16) * 2\n")))
    for text, error in (("raise ValueError('broken')", ScriptError), ("x = 1", UsageError)):
        with pytest.raises(error):
            load_plugin(write(text))
        assert once(gtrace.codec("mine"), [1.0]).tolist() == [2]
        assert gtrace.codec_names().count("mine") == 1


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import numpy\nraise ValueError('two\\nlines')", ScriptError, "mine.py, line 2: ValueError: two lines$"),
        ("import sys\n\nsys.exit(3)", ScriptError, "line 3: SystemExit: 3$"),
        ("def compress(values): return b''", UsageError, "mine.py: holds no codec; write a class that extends"),
        (CLASS.replace('"power2"', '"qsgd"'), UsageError, "codec name 'qsgd' is empty or taken; give it another name"),
        (COMPRESSOR.replace("compressor = Top(0.1)", ""), ScriptError, "TypeError: .*missing 1 required"),
    ],
)
def test_a_wrong_file_is_one_line_and_changes_nothing(write, text, error, message):
    before, modules, places = gtrace.codec_names(), set(sys.modules), list(sys.path)
    with pytest.raises(error, match=message) as caught:
        load_plugin(write(text))
    assert "\n" not in str(caught.value)
    assert gtrace.codec_names() == before
    assert sys.path == places
    assert not {name for name in sys.modules if name.startswith("gtrace_plugin")} - modules


@pytest.mark.parametrize(
    ("text", "part", "other", "message"),
    [
        (FUNCTIONS, "return values", "x = 1 / 0; return values", "line 5: ZeroDivisionError: division"),
        (FUNCTIONS, ".tobytes()", "", "compress returned ndarray, not bytes"),
        (FUNCTIONS, "return np.frombuffer", "return [] and np.frombuffer", "0 values"),
        (FUNCTIONS, "np.frombuffer(data, np.float16)", "np.full(size, np.nan)", "not finite"),
        (COMPRESSOR, "places], tensor.shape", "places]", "must return a pair"),
        (COMPRESSOR, "[tensor[places], places]", "['text', places]", "TypeError: compress returned a str"),
        (COMPRESSOR, "= tensors[0]", "= ctx[7]", "line 16: IndexError: tuple index"),
        (CLASS, "x = np", "raise KeyError(self.steps); x = np", "mine.py, line 13: KeyError: 4"),
    ],
)
def test_an_error_in_a_call_names_file_and_line(write, text, part, other, message):
    (cls,) = load_plugin(write(text.replace(part, other)))
    with pytest.raises(ScriptError, match=message) as caught:
        once(cls(), np.ones(30))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5
