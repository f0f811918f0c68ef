"""Subtractive dithering: sender and receiver add and subtract the same noise (Roberts, 1962)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gtrace.buckets import bucket_scales
from gtrace.codecs import Codec, parameter
from gtrace.codecs.base import checked_values
from gtrace.coding import fixed_size, open_envelope, pack_fixed, seal, unpack_fixed
from gtrace.errors import PayloadError


@dataclass(frozen=True)
class Dither(Codec):
    """One step for a whole tensor; the error is uniform noise that knows nothing of the gradient."""

    name: ClassVar[str] = "dither"
    summary: ClassVar[str] = "uniform levels, nearest after noise that the receiver subtracts again"
    formula: ClassVar[str] = "Q(v) = d (round(v / d + u) - u), d = max|v| / (2^(bits-1) - 1), u uniform in [-1/2, 1/2)"
    paper: ClassVar[str] = "Roberts, Picture Coding Using Pseudo-Random Noise, 1962"

    bits: int = parameter(4, "2^bits - 1 levels", minimum=2, maximum=8)

    def noise(self, high, low, size):
        """u, from the two words of the key, which travel in the payload."""
        return np.random.Generator(np.random.Philox(key=[high, low])).random(size) - 0.5

    def encode(self, state, values, key):
        x = checked_values(state, values)
        head = struct.pack("<QQ", *key)
        top = 2 ** (self.bits - 1) - 1
        largest = bucket_scales(x, "linf", None)  # float32[1], or float32[0] of an empty tensor
        if not largest.any():
            return seal(head, codec=self.name, size=x.size, shared=b"")
        codes = np.rint(x.astype(np.float64) / largest * top + self.noise(*key, x.size)).clip(-top, top) + top
        packed = pack_fixed(codes.astype(np.uint16), self.bits)
        return seal(head + largest.tobytes() + packed, codec=self.name, size=x.size, shared=b"")

    def decode(self, shared, payload, size):
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        top = 2 ** (self.bits - 1) - 1
        if flags or len(body) not in (16, 20 + fixed_size(size, self.bits)):
            raise PayloadError(f"dither: a payload of {len(body)} bytes")
        if len(body) == 16:
            return np.zeros(size, np.float32)
        high, low, largest = struct.unpack("<QQf", body[:20])
        if not 0 < largest < np.inf:
            raise PayloadError("dither: the largest magnitude is no positive number")
        codes = unpack_fixed(body[20:], size, self.bits, 2 * top + 1) - float(top)
        out = (codes - self.noise(high, low, size)) / top * largest
        return out.clip(-np.finfo(np.float32).max, np.finfo(np.float32).max).astype(np.float32)
