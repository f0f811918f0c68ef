"""Codecs: what turns a gradient into bytes. Every one obeys the laws of :mod:`gtrace.testing`."""

from gtrace.codecs.accumulate import Accumulate
from gtrace.codecs.adacomp import AdaComp
from gtrace.codecs.base import Codec, ExpectingCodec, expecting, parameter, parameter_fields
from gtrace.codecs.casts import Bf16, Fp16
from gtrace.codecs.chunked import Part, PartwiseCodec, TensorSums
from gtrace.codecs.dgc import Dgc
from gtrace.codecs.dropping import Dropping
from gtrace.codecs.engine import LevelCodec
from gtrace.codecs.feedback import ErrorFeedback
from gtrace.codecs.fp import Fp
from gtrace.codecs.identity import Identity
from gtrace.codecs.int8 import Int8
from gtrace.codecs.levels import Alq, AlqG, AlqGN, AlqN, Amq, AmqN, Natural, Nuqsgd, Qsgd, QsgdInf, TernGrad, ZipMl
from gtrace.codecs.mcgq import Mcgq
from gtrace.codecs.minmax import MinMax
from gtrace.codecs.momentum import Momentum
from gtrace.codecs.onebit import OneBit
from gtrace.codecs.powersgd import PowerSgd
from gtrace.codecs.prune import Prune, TopKPrune
from gtrace.codecs.randomk import RandomK
from gtrace.codecs.registry import (
    codec,
    codec_class,
    codec_names,
    parse_spec,
    register,
    split_specs,
    wrapper_names,
)
from gtrace.codecs.rotate import Rotate
from gtrace.codecs.signs import EfSignSgd, SignSgd, Signum
from gtrace.codecs.topk import MemSgd, TopK

__all__ = [
    "Accumulate",
    "AdaComp",
    "Alq",
    "AlqG",
    "AlqGN",
    "AlqN",
    "Amq",
    "AmqN",
    "Bf16",
    "Codec",
    "Dgc",
    "Dropping",
    "EfSignSgd",
    "ErrorFeedback",
    "ExpectingCodec",
    "Fp",
    "Fp16",
    "Identity",
    "Int8",
    "LevelCodec",
    "Mcgq",
    "MemSgd",
    "MinMax",
    "Momentum",
    "Natural",
    "Nuqsgd",
    "OneBit",
    "Part",
    "PartwiseCodec",
    "PowerSgd",
    "Prune",
    "Qsgd",
    "QsgdInf",
    "RandomK",
    "Rotate",
    "SignSgd",
    "Signum",
    "TensorSums",
    "TernGrad",
    "TopK",
    "TopKPrune",
    "ZipMl",
    "codec",
    "codec_class",
    "codec_names",
    "expecting",
    "parameter",
    "parameter_fields",
    "parse_spec",
    "register",
    "split_specs",
    "wrapper_names",
]
