"""Scales of short blocks in microscaling formats: measured, sent as one byte each, read back.

OCP Microscaling Formats (MX) Specification v1.0, 2023, and NVIDIA, Pretraining Large Language Models with NVFP4, 2025.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from gtrace.codecs.base import check_finite
from gtrace.errors import PayloadError
from gtrace.fitting.floats import FloatFormat
from gtrace.kernels import norms as _norms

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs.parts import Values

#: powers of two in a byte, by the rule that chooses them, or a float8
BlockScale: TypeAlias = Literal["floor", "ceil", "even", "rceil", "e4m3"]
POWERS: tuple[BlockScale, ...] = ("floor", "ceil", "even", "rceil")
BLOCK_SCALES: tuple[BlockScale, ...] = (*POWERS, "e4m3")
#: block lengths of the published formats
BLOCKS: dict[str, int] = {**dict.fromkeys(POWERS, 32), "e4m3": 16}

_E4M3 = FloatFormat(4, 3, reserved=1)
_BIAS, _MANTISSA = 127, 23
_LARGEST = np.finfo(np.float32).max
#: by their byte
_POWERS = np.ldexp(1.0, np.arange(2 * _BIAS + 1) - _BIAS)
_TENSOR = struct.Struct("<f")


def header_bytes(kind: BlockScale, size: int, block: int) -> int:
    """Bytes of the scales of ``size`` values: one per block, and a float32 for the tensor with e4m3."""
    return -(-size // block) + (_TENSOR.size if kind == "e4m3" else 0)


def measure(kind: BlockScale, form: FloatFormat, x: Values, block: int) -> bytes:
    """The scales of float32[n] as bytes.

    ``floor``: 2^(floor(log2 amax) - emax), as in OCP's standard; the largest values may saturate. ``ceil``: the same
    with log2 rounded up. ``even``: amax first rounded to the elements' mantissa. ``rceil``: the power of two from
    amax / max on, NVIDIA's rule, which saturates none. ``e4m3``: a float32 for the tensor, 1 / (448 max / amax), and
    for each block a float8 e4m3 in units of it, amax / max; divisions and float32 roundings are those of NVIDIA's
    recipe, in its order.

    Raises:
        UsageError: values that are not finite.
    """
    largest = np.empty(-(-x.size // block), np.float32)
    if not _norms.bucket_scales(x, block, _norms.LINF, largest):
        check_finite(x)
    if kind == "e4m3":
        amax = largest.max(initial=np.float32(0.0))
        with np.errstate(over="ignore"):
            encode = min(np.float32(_E4M3.max * form.max) / amax, _LARGEST) if amax else np.float32(1.0)
            ratios = largest / np.float32(form.max) * encode
        return _TENSOR.pack(np.float32(1.0) / encode) + _E4M3.encode(ratios).astype(np.uint8).tobytes()
    if kind == "rceil":
        # The reciprocal in float32, as in the published code.
        fraction, exponent = np.frexp(largest * np.float32(1 / form.max))
        # frexp gives a fraction in [1/2, 1): one more than the floor of the logarithm.
        exponent -= fraction == 0.5
    else:
        bits = largest.view(np.int32)
        if kind == "even":
            # Half of the elements' last place; a carry goes to the exponent.
            bits = bits + (1 << _MANTISSA - form.mantissa - 1)
        exponent = (bits >> _MANTISSA) - _BIAS - (np.frexp(form.max)[1] - 1)
        if kind == "ceil":
            exponent += bits & ((1 << _MANTISSA) - 1) > 0
    exponent = np.where(largest > 0, np.clip(exponent, -_BIAS, _BIAS), -_BIAS)
    return (exponent + _BIAS).astype(np.uint8).tobytes()


def read(kind: BlockScale, data: bytes | memoryview) -> NDArray[np.float64]:
    """The scales encoded in the bytes of :func:`measure`, float64[blocks]; exact.

    Raises:
        PayloadError: a code without a scale, or a tensor's scale that is negative or not finite.
    """
    if kind == "e4m3":
        (tensor,) = _TENSOR.unpack_from(data)
        codes = np.frombuffer(data, np.uint8, offset=_TENSOR.size)
        if not (np.isfinite(tensor) and tensor >= 0) or codes.max(initial=0) > _E4M3.top:
            raise PayloadError("payload holds a scale that is negative or not finite")
        scales: NDArray[np.float64] = _E4M3.exact_levels[codes] * tensor
        return scales
    codes = np.frombuffer(data, np.uint8)
    if codes.max(initial=0) > 2 * _BIAS:
        raise PayloadError("payload holds a scale that is not a number")
    powers: NDArray[np.float64] = _POWERS[codes]
    return powers


def factors_in(kind: BlockScale, data: bytes) -> NDArray[np.float64]:
    """:func:`factors` of the scales in ``data``, from :func:`measure`; each possible byte's is computed once."""
    head = _TENSOR.size if kind == "e4m3" else 0
    every = data[:head] + bytes(range(_E4M3.top + 1 if head else 2 * _BIAS + 1))
    found: NDArray[np.float64] = factors(kind, read(kind, every))[np.frombuffer(data, np.uint8, offset=head)]
    return found


def factors(kind: BlockScale, scales: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factors by which values are multiplied before rounding, float64[blocks], from the scales of :func:`read`.

    With ``e4m3`` they are float32; a block with scale 0 gets at most the largest float32.
    """
    if kind != "e4m3":
        return 1.0 / scales
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1.0) / scales.astype(np.float32)
    out: NDArray[np.float64] = np.minimum(inverse, _LARGEST).astype(np.float64)
    return out
