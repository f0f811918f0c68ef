"""Other packages' methods beside gtrace's own: GRACE, torch's hooks, torchao, hivemind, numcodecs."""

import sys
import textwrap
import types

import numpy as np
import pytest
import torch

import gtrace
from gtrace.codecs.plugins import load_plugin
from gtrace.coding import ENVELOPE_BYTES

G = np.random.default_rng(0).standard_normal((24, 40)).astype(np.float32)


@pytest.fixture
def load(tmp_path, registry):
    """Load a plugin's text; its codecs are gone after the test."""

    def loaded(text):
        path = tmp_path / "peers_file.py"
        path.write_text("from gtrace.codecs.peers import *\n" + textwrap.dedent(text))
        return [cls.name for cls in load_plugin(path)]

    return loaded


@pytest.mark.framework_case("numcodecs: filters as codecs", packages=("numcodecs",))
def test_numcodecs(load):
    load("""
        from numcodecs import BitRound, FixedScaleOffset, Zstd
        rounded = Numcodecs(BitRound(3), Zstd())
        scaled = Numcodecs(FixedScaleOffset(offset=0, scale=10, dtype="<f4", astype="i1"))
    """)
    sent = gtrace.compress(G, "scaled")
    assert sent.bits == 8
    assert np.array_equal(sent.values, np.round(G * 10).astype(np.int8).astype(np.float32) / 10)
    rounded = gtrace.compress(G, "rounded")
    assert (abs(rounded.values - G) <= abs(G) / 16).all()
    assert 6 < rounded.bits < 14
    # The bytes alone are enough: not only the process that made them can decode them.
    codec = gtrace.codec("rounded")
    assert not codec.declared
    assert np.array_equal(codec.decode(b"", rounded.payload, G.size), rounded.values.ravel())


@pytest.mark.framework_case("torch: hooks of DistributedDataParallel as codecs")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_hooks_of_torch(load):
    before = torch.distributed.all_reduce
    load("""
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook, quantization_hooks
        fp16_hook = DdpHook(default_hooks.fp16_compress_hook)
        quantized = DdpHook(quantization_hooks.quantization_pertensor_hook)
        low_rank = DdpHook(powerSGD_hook.powerSGD_hook, lambda: powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=2, start_powerSGD_iter=0, use_error_feedback=False, warm_start=False))
    """)
    half = torch.from_numpy(G).half().float().numpy()
    assert np.array_equal(gtrace.compress(G, "fp16_hook").values, half)
    for name, bits in (("fp16_hook", 16), ("low_rank", 32 * 2 * (24 + 40) / G.size)):
        assert gtrace.compress(G, name).bits == pytest.approx(bits), name
    # A scale and a zero point beside 8 bits a value.
    quantized = gtrace.compress(G, "quantized")
    assert quantized.bits == pytest.approx(8 + 64 / G.size)
    assert abs(quantized.values - G).max() <= (G.max() - G.min()) / 255 * 0.51
    assert np.linalg.matrix_rank(gtrace.compress(G, "low_rank").values) == 2
    assert gtrace.compress(G, "low_rank", seed=1).payload == gtrace.compress(G, "low_rank", seed=1).payload
    assert torch.distributed.all_reduce is before
    assert not torch.distributed.is_initialized()


GRACE = """
    import torch

    class LargestAndMean:  # as grace_dl.dist's compressors: it returns tensors, sends one itself, and remembers
        def __init__(self, ratio):
            self.ratio, self.memory = ratio, {}

        def compress(self, tensor, name):
            flat = tensor.flatten()
            noise = self.memory.setdefault(name, torch.empty(1).normal_())
            torch.distributed.all_reduce(noise)
            _, indices = torch.topk(flat.abs(), max(1, int(flat.numel() * self.ratio)), sorted=False)
            return (torch.gather(flat, 0, indices), indices.int()), (tensor.size(), noise)

        def decompress(self, tensors, ctx):
            values, indices = tensors
            return torch.zeros(ctx[0].numel()).scatter_(0, indices.long(), values).view(ctx[0]) + 0 * ctx[1]
"""


@pytest.mark.framework_case("GRACE's interface, without the package: compressors as codecs")
def test_grace(load, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "grace_like", None)
    monkeypatch.delitem(sys.modules, "grace_like")
    (tmp_path / "grace_like.py").write_text(textwrap.dedent(GRACE))
    load("""
        from grace_like import LargestAndMean
        top = Grace(LargestAndMean(0.1))
    """)
    # What a compressor sends by itself counts, and nothing stays in its memory.
    first, again = gtrace.compress(G, "peers_file"), gtrace.compress(G, "peers_file")
    assert first.bits == pytest.approx((64 * 96 + 32) / G.size)
    assert first.payload == again.payload != gtrace.compress(G, "peers_file", seed=1).payload
    kept = abs(G) >= np.sort(abs(G).ravel())[-96]
    assert np.array_equal(first.values, np.where(kept, G, 0))
    assert gtrace.codec("peers_file").declared


class Message:
    """What protobuf's generated class offers: fields, and bytes."""

    def __init__(self, buffer, size):
        self.buffer, self.size = buffer, size

    def SerializeToString(self):  # noqa: N802
        return bytes([self.size]) + self.buffer

    @classmethod
    def FromString(cls, data):  # noqa: N802
        return cls(data[1:], data[0])


@pytest.mark.framework_case("hivemind's interface, without the package: compressions as codecs")
def test_hivemind(load, monkeypatch):
    base = types.ModuleType("hivemind_base")
    base.CompressionInfo = types.SimpleNamespace(from_tensor=lambda tensor: ("about", tensor.shape))
    base.runtime_pb2 = types.SimpleNamespace(Tensor=Message)
    base.CompressionBase = type("CompressionBase", (), {"message": Message, "__module__": base.__name__})
    monkeypatch.setitem(sys.modules, base.__name__, base)
    (name,) = load("""
        import numpy as np, torch
        from hivemind_base import CompressionBase

        class Float16Compression(CompressionBase):  # as hivemind.compression.floating
            def compress(self, tensor, info, allow_inplace=False):
                assert info == ("about", tensor.shape)
                return self.message(tensor.half().numpy().tobytes(), len(tensor) % 256)

            def extract(self, serialized_tensor):
                return torch.as_tensor(np.frombuffer(serialized_tensor.buffer, np.float16).astype(np.float32))

        half = Hivemind(Float16Compression())
    """)
    sent = gtrace.compress(G, name)
    assert np.array_equal(sent.values, G.astype(np.float16).astype(np.float32))
    assert len(sent.payload) == ENVELOPE_BYTES + 1 + 2 * G.size
    assert not gtrace.codec(name).declared


def test_a_tensor_subclass(load):
    (name,) = load("""
        import torch

        class Scaled:  # what torchao's tensors offer
            def __init__(self, data, scale):
                self.data, self.scale, self.shape, self.stride = data, scale, data.shape, data.stride

            def __tensor_flatten__(self):
                return ["data", "scale"], None

            @staticmethod
            def __tensor_unflatten__(inner, about, shape, stride):
                return Scaled(inner["data"], inner["scale"])

            def dequantize(self):
                return self.data.float() * self.scale

        def make(rows):
            scale = rows.abs().amax(1, keepdim=True) / 127
            return Scaled((rows / scale.clamp_min(1e-30)).round().to(torch.int8), scale)

        ours = Torchao(make)
    """)
    odd = G.ravel()[:70]
    sent = gtrace.compress(odd, name)
    assert sent.bits == 3 * (32 * 8 + 32) / 70
    assert sent.values.shape == (70,)
    assert abs(sent.values - odd).max() <= abs(odd).max() / 127 * 0.51


@pytest.mark.framework_case("torchao: formats as codecs", packages=("torchao",))
@pytest.mark.filterwarnings("ignore")
def test_torchao_itself(load):
    pytest.importorskip("torchao", reason="torchao is not installed")
    load("""
        import torch
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        mxfp8 = Torchao(lambda rows: MXTensor.to_mx(rows, torch.float8_e4m3fn, 32))
        mxfp4 = Torchao(lambda rows: MXTensor.to_mx(rows, torch.float4_e2m1fn_x2, 32))
    """)
    for name, bits, error in (("mxfp8", 8.25, 0.002), ("mxfp4", 4.25, 0.03)):
        sent = gtrace.compress(G, name)
        assert sent.bits == bits
        assert sent.error < error
