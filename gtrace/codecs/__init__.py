"""Codecs turn a gradient into bytes. Every codec obeys the laws of :mod:`gtrace.testing`."""

from gtrace.buckets import TensorSums
from gtrace.codecs.base import Codec, EncodedPart, expecting, kind_of, parameter, parameter_fields
from gtrace.codecs.casts import Bf16, Fp16, Identity, MinMax
from gtrace.codecs.engine import Composed, level_grid, method
from gtrace.codecs.fp import Fp
from gtrace.codecs.levels import (
    Alq,
    AlqG,
    AlqGN,
    AlqN,
    Amq,
    AmqN,
    Ecq,
    Luq,
    Natural,
    Nuqsgd,
    Qsgd,
    QsgdInf,
    TernGrad,
    ZipMl,
)
from gtrace.codecs.mcgq import Mcgq
from gtrace.codecs.plugins import load_plugin
from gtrace.codecs.powersgd import PowerSgd
from gtrace.codecs.prune import Prune, TopKPrune
from gtrace.codecs.rotation import Dct, Eden, Rotate, expected_on_any
from gtrace.codecs.signs import EfSignSgd, OneBit, SignSgd, Signum
from gtrace.codecs.sparse import AdaComp, Dgc, Dropping, MemSgd, RandomK, TopK
from gtrace.codecs.spec import codec, codec_class, codec_names, parse_spec, register, split_specs, wrapper_names
from gtrace.codecs.tables import Dynamic8, Fp4, Int8, IntN, Nf4, Quantile8, Uniform8
from gtrace.codecs.thc import Thc
from gtrace.codecs.wrappers import Accumulate, Ef21, ErrorFeedback, Momentum

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
    "Composed",
    "Dct",
    "Dgc",
    "Dropping",
    "Dynamic8",
    "Ecq",
    "Eden",
    "Ef21",
    "EfSignSgd",
    "EncodedPart",
    "ErrorFeedback",
    "Fp",
    "Fp4",
    "Fp16",
    "Identity",
    "Int8",
    "IntN",
    "Luq",
    "Mcgq",
    "MemSgd",
    "MinMax",
    "Momentum",
    "Natural",
    "Nf4",
    "Nuqsgd",
    "OneBit",
    "PowerSgd",
    "Prune",
    "Qsgd",
    "QsgdInf",
    "Quantile8",
    "RandomK",
    "Rotate",
    "SignSgd",
    "Signum",
    "TensorSums",
    "TernGrad",
    "Thc",
    "TopK",
    "TopKPrune",
    "Uniform8",
    "ZipMl",
    "codec",
    "codec_class",
    "codec_names",
    "expected_on_any",
    "expecting",
    "kind_of",
    "level_grid",
    "load_plugin",
    "method",
    "parameter",
    "parameter_fields",
    "parse_spec",
    "register",
    "split_specs",
    "wrapper_names",
]
