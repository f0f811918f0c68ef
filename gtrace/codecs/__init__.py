"""Codecs: what turns a gradient into bytes. Every one obeys the laws of :mod:`gtrace.testing`."""

from gtrace.codecs.adaptive import AdaptiveCodec
from gtrace.codecs.alq import Alq, AlqG, AlqGN, AlqN
from gtrace.codecs.amq import Amq, AmqN
from gtrace.codecs.base import Codec, ExpectingCodec, parameter
from gtrace.codecs.identity import Identity
from gtrace.codecs.levels import LevelCodec
from gtrace.codecs.natural import Natural
from gtrace.codecs.nuqsgd import Nuqsgd
from gtrace.codecs.qsgd import Qsgd, QsgdInf
from gtrace.codecs.registry import codec, codec_class, codec_names, register, split_specs
from gtrace.codecs.terngrad import TernGrad
from gtrace.codecs.zipml import ZipMl

__all__ = [
    "AdaptiveCodec",
    "Alq",
    "AlqG",
    "AlqGN",
    "AlqN",
    "Amq",
    "AmqN",
    "Codec",
    "ExpectingCodec",
    "Identity",
    "LevelCodec",
    "Natural",
    "Nuqsgd",
    "Qsgd",
    "QsgdInf",
    "TernGrad",
    "ZipMl",
    "codec",
    "codec_class",
    "codec_names",
    "parameter",
    "register",
    "split_specs",
]
