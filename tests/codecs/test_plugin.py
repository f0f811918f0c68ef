"""Codecs from one's own file: classes, functions, compressor objects, and files that are wrong."""

import sys
import textwrap

import numpy as np
import pytest
from helpers_codecs import once

import gtrace
from gtrace import testing
from gtrace.codecs.base import Codec
from gtrace.codecs.plugins import REMEMBERED, load_plugin
from gtrace.coding import ENVELOPE_BYTES
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
    from typing import ClassVar

    import numpy as np
    from gtrace.codecs import Codec, parameter
    from gtrace.coding import open_envelope, seal

    @dataclass(frozen=True)
    class Power(Codec):
        name: ClassVar[str] = "power2"
        unbiased: ClassVar[bool] = False
        steps: int = parameter(4, "how many", minimum=1)

        def encode(self, state, values, key):
            x = np.asarray(values, np.float32)
            return seal(np.round(x * self.steps).clip(-100, 100).astype(np.int8).tobytes(), codec=self.name,
                        size=x.size, shared=b"")

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
            k = int(self.share * tensor.size)
            places = np.sort(np.argsort(-abs(tensor), kind="stable")[:k]).astype(np.int32)
            return [tensor[places], places], (tensor.size, tensor.shape)

        def decompress(self, tensors, ctx):
            values, places = tensors
            size, shape = ctx
            out = np.zeros(size, np.float32)
            out[places] = values
            return out.reshape(shape)

    compressor = Top(0.1)
"""


pytestmark = pytest.mark.usefixtures("registry")


@pytest.fixture
def write(tmp_path):
    def written(text, name="mine.py"):
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return path

    return written


def test_two_functions_are_a_codec_named_like_the_file(write):
    (cls,) = load_plugin(write(FUNCTIONS))
    assert cls.name == "mine"
    c = gtrace.codec("mine")
    assert isinstance(c, cls)
    assert str(c) == "mine"
    assert once(c, [1.0, -2.5, 0.1]).tolist() == [1.0, -2.5, float(np.float16(0.1))]
    assert len(c.encode(c.init(9), np.ones(9), (1, 2))) == ENVELOPE_BYTES + 18
    assert not c.declared
    values = np.random.default_rng(0).normal(size=300).astype(np.float32)
    testing.check_spec(c)
    testing.check_round_trip(c, "normal", values)
    testing.check_refusals(c, values)
    assert str(gtrace.codec("ef:rotate:mine")) == "ef:rotate:mine"
    testing.check_round_trip(gtrace.codec("ef:rotate:mine"), "normal", values)


def test_a_compress_that_draws_gets_a_generator_of_the_key(write):
    load_plugin(
        write("""
        import numpy as np

        def compress(values, rng):
            return (values > rng.random(values.size)).astype(np.uint8).tobytes()

        def decompress(data, size):
            return np.frombuffer(data, np.uint8)
        """)
    )
    c, values = gtrace.codec("mine"), np.full(100, 0.5)
    assert np.array_equal(once(c, values), once(c, values))
    assert not np.array_equal(once(c, values), once(c, values, key=(3, 4)))
    assert 30 < once(c, values).sum() < 70


def test_a_class_brings_its_parameters(write):
    (cls,) = load_plugin(write(CLASS))
    assert issubclass(cls, Codec)
    c = gtrace.codec("power2:steps=8")
    assert once(c, [0.5, -0.25]).tolist() == [0.5, -0.25]
    testing.check_spec(c)
    with pytest.raises(UsageError, match="steps=0 is out of range"):
        gtrace.codec("power2:steps=0")


def test_a_class_may_register_itself(write):
    text = CLASS.replace("@dataclass(frozen=True)", "@register\n    @dataclass(frozen=True)")
    path = write(text.replace("import Codec, parameter", "import Codec, parameter, register"))
    for _ in range(2):
        assert [cls.name for cls in load_plugin(path)] == ["power2"]
    assert gtrace.codec_names().count("power2") == 1


def test_a_compressor_object_is_flagged_as_declared(write):
    (cls,) = load_plugin(write(COMPRESSOR))
    c = gtrace.codec("mine")
    assert cls.declared
    assert c.declared
    assert gtrace.codec("ef:mine").declared
    values = np.random.default_rng(1).normal(size=200).astype(np.float32)
    got = once(c, values)
    assert np.count_nonzero(got) == 20
    assert np.array_equal(got[got != 0], values[got != 0])
    assert len(c.encode(c.init(200), values, (1, 2))) == ENVELOPE_BYTES + 20 * 8
    testing.check_round_trip(c, "normal", values)
    testing.check_refusals(c, values)


def test_a_compressors_payload_is_forgotten_after_many_others(write):
    load_plugin(write(COMPRESSOR))
    c = gtrace.codec("mine")
    payloads = [c.encode(c.init(10), np.arange(10) + k, (1, 2)) for k in range(REMEMBERED + 1)]
    assert c.decode(b"", payloads[1], 10).max() == 10
    with pytest.raises(PayloadError, match="not encoded here"):
        c.decode(b"", payloads[0], 10)


def test_a_compressor_whose_file_uses_torch_gets_torchs_tensors(write):
    load_plugin(
        write("""
        import torch

        class HalfCompressor:
            def compress(self, tensor, name):
                assert isinstance(tensor, torch.Tensor) and name == "mine"
                return [tensor.to(torch.bfloat16), tensor.abs().max()], tensor.size()

            def decompress(self, tensors, ctx):
                return tensors[0].view(ctx)
        """)
    )
    c = gtrace.codec("mine")
    values = np.random.default_rng(1).normal(size=200).astype(np.float32)
    assert len(c.encode(c.init(200), values, (1, 2))) == ENVELOPE_BYTES + 2 * 200 + 4
    assert np.array_equal(once(c, values), once(gtrace.codec("bf16"), values))


def test_several_codecs_in_one_file(write):
    found = load_plugin(write(CLASS + FUNCTIONS + COMPRESSOR + "\n    other = Top(0.5)\n", "many.py"))
    assert [cls.name for cls in found] == ["power2", "many", "compressor", "other"]
    values = np.arange(1.0, 11)
    assert np.count_nonzero(once(gtrace.codec("compressor"), values)) == 1
    assert np.count_nonzero(once(gtrace.codec("other"), values)) == 5


def test_imported_functions_are_a_codec_only_where_nothing_else_is(write):
    imported = "from zlib import compress, decompress\n"
    assert [cls.name for cls in load_plugin(write(imported + textwrap.dedent(CLASS)))] == ["power2"]
    assert [cls.name for cls in load_plugin(write(imported, "packed.py"))] == ["packed"]


def test_a_plugin_may_import_its_neighbour(write):
    write("SCALE = 3.0", "neighbour_of_mine.py")
    try:
        load_plugin(
            write("""
            import numpy as np
            from neighbour_of_mine import SCALE

            def compress(values):
                return (values * SCALE).astype(np.float32).tobytes()

            def decompress(data, size):
                return np.frombuffer(data, np.float32) / SCALE
            """)
        )
    finally:
        sys.modules.pop("neighbour_of_mine", None)
    assert once(gtrace.codec("mine"), [1.0, 2.0]).tolist() == [1, 2]
    assert not any("neighbour" in place for place in sys.path)


def test_an_edited_file_replaces_its_codecs(write):
    load_plugin(write(FUNCTIONS))
    load_plugin(write(FUNCTIONS.replace("np.float16)\n", "np.float16) * 2\n")))
    assert once(gtrace.codec("mine"), [1.0]).tolist() == [2]
    with pytest.raises(ScriptError):
        load_plugin(write("raise ValueError('broken')"))
    assert once(gtrace.codec("mine"), [1.0]).tolist() == [2]
    assert gtrace.codec_names().count("mine") == 1
    with pytest.raises(UsageError, match="holds no codec"):
        load_plugin(write("x = 1"))
    assert "mine" in gtrace.codec_names()


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("import numpy\nraise ValueError('two\\nlines')", ScriptError, "mine.py, line 2: ValueError: two lines$"),
        ("x = 1\nfrom nowhere_at_all import y", ScriptError, "line 2: ModuleNotFoundError: No module named"),
        ("x = (\n", ScriptError, "plugin mine.py, line 1: SyntaxError: '\\(' was never closed$"),
        ("import sys\n\nsys.exit(3)", ScriptError, "line 3: SystemExit: 3$"),
        ("def deep():\n    return {}['a']\n\ndeep()", ScriptError, "line 2: KeyError: 'a'$"),
        ("x = 1", UsageError, "plugin mine.py: holds no codec; write a class that extends"),
        ("def compress(values): return b''", UsageError, "holds no codec"),
        (FUNCTIONS.replace("compress", "_compress"), UsageError, "holds no codec"),
        (CLASS.replace('"power2"', '"qsgd"'), UsageError, "codec name 'qsgd' is empty or taken; give it another name"),
        (CLASS.replace('"power2"', '"ef"'), UsageError, "'ef' is empty or taken"),
        (CLASS.replace('"power2"', '"all"'), UsageError, "'all' is not a valid codec name"),
        (CLASS.replace('"power2"', '"a:b"'), UsageError, "'a:b' is not a valid codec name"),
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
    ("text", "message"),
    [
        (
            FUNCTIONS.replace("return values", "x = 1 / 0; return values"),
            "line 5: ZeroDivisionError: division",
        ),
        (FUNCTIONS.replace(".tobytes()", ""), "compress returned ndarray, not bytes"),
        (FUNCTIONS.replace("return np.frombuffer", "return [] and np.frombuffer"), "0 values"),
        (FUNCTIONS.replace("np.frombuffer(data, np.float16)", "np.full(size, np.nan)"), "not finite"),
        (FUNCTIONS.replace("np.frombuffer(data, np.float16)", "['a'] * size"), "no real numbers"),
        (FUNCTIONS.replace("np.frombuffer(data, np.float16)", "data[:-1]"), "no real numbers"),
        (FUNCTIONS.replace("compress(values)", "compress()"), "mine.py: TypeError: compress"),
        (COMPRESSOR.replace("], (tensor.size, tensor.shape)", "]"), "must return a pair"),
        (COMPRESSOR.replace("[tensor[places], places]", "['text', places]"), "TypeError: compress returned a str"),
        (COMPRESSOR.replace("out[places] = values", "out[places] = ctx[7]"), "line 19: IndexError: tuple index"),
        (CLASS.replace("x = np", "raise KeyError(self.steps); x = np"), "mine.py, line 16: KeyError: 4"),
    ],
)
def test_an_error_in_a_call_names_file_and_line(write, text, message):
    (cls,) = load_plugin(write(text))
    with pytest.raises(ScriptError, match=message) as caught:
        once(cls(), np.ones(30))
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 5


def test_refusals_stay_refusals(write, tmp_path):
    load_plugin(write(CLASS))
    with pytest.raises(PayloadError):
        gtrace.codec("power2").decode(b"", b"", 3)
    # Wrong values are refused before the plugin sees them.
    load_plugin(write(FUNCTIONS))
    with pytest.raises(UsageError, match="value 1 is nan"):
        once(gtrace.codec("mine"), [0.0, np.nan])
    with pytest.raises(UsageError, match=r"plugin .*none\.py: no such file"):
        load_plugin(tmp_path / "none.py")
