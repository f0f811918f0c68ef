"""Codecs: what turns a gradient into bytes. Every one obeys the laws of :mod:`gtrace.testing`."""

from gtrace.codecs.base import Codec, ExpectingCodec, expecting, parameter, parameter_fields
from gtrace.codecs.casts import Bf16, Fp16, Identity, Int8, MinMax
from gtrace.codecs.chunked import EncodedPart, PartwiseCodec, TensorSums
from gtrace.codecs.engine import LevelCodec
from gtrace.codecs.fp import Fp
from gtrace.codecs.levels import Alq, AlqG, AlqGN, AlqN, Amq, AmqN, Natural, Nuqsgd, Qsgd, QsgdInf, TernGrad, ZipMl
from gtrace.codecs.mcgq import Mcgq
from gtrace.codecs.powersgd import PowerSgd
from gtrace.codecs.prune import Prune, TopKPrune
from gtrace.codecs.registry import (
    codec,
    codec_class,
    codec_names,
    parse_spec,
    register,
    split_specs,
    wrapper_names,
)
from gtrace.codecs.signs import EfSignSgd, OneBit, SignSgd, Signum
from gtrace.codecs.sparse import AdaComp, Dgc, Dropping, MemSgd, RandomK, TopK
from gtrace.codecs.wrappers import Accumulate, ErrorFeedback, Momentum, Rotate

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
    "EncodedPart",
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
