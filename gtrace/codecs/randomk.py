"""Random sparsification: a keyed choice of values, scaled up so that the mean is right."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import ExpectingCodec, checked_values, parameter
from gtrace.codecs.registry import register
from gtrace.codecs.sparse import kept, largest
from gtrace.codecs.wrapper import FLOAT32_MAX
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import select as _select
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch

_SEED = struct.Struct("<I")


@register
@dataclass(frozen=True)
class RandomK(ExpectingCodec):
    """k values drawn without replacement. Their positions follow from a seed of 32 bits in the payload."""

    name: ClassVar[str] = "randomk"
    summary: ClassVar[str] = "values chosen at random, scaled up, the rest zero"
    formula: ClassVar[str] = "Q(v_i) = (n/k) v_i for k random i, else 0; k = max(1, round(ratio n))"
    paper: ClassVar[str] = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018 (rand_k)"
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper's rand_k is not scaled and needs memory: that is ef:randomk:scale=false",
        "positions are not sent: 32 bits of seed name them",
    )

    ratio: float = parameter(0.01, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)
    scale: bool = parameter(True, "multiply by n/k, so that the mean is right")

    def __post_init__(self) -> None:
        super().__post_init__()
        # A fact of the class elsewhere; here it hangs on a parameter.
        object.__setattr__(self, "unbiased", self.scale)

    @property
    def needs(self) -> SummarySpec:
        """Energy and zeros, which every sketch has."""
        return SummarySpec("none", None)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The seed, then the chosen values in float32, in the order of their positions."""
        x = checked_values(state, values)
        seed = key[1] & 0xFFFFFFFF
        chosen = x[self._chosen(seed, x.size)]
        return seal(_SEED.pack(seed) + chosen.astype("<f4").tobytes(), codec=self.name, size=x.size, shared=b"")

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """The values, scaled, in their places."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        count = kept(self.ratio, size)
        if flags or len(body) != _SEED.size + 4 * count:
            raise PayloadError(f"payload body of {len(body)} bytes where {_SEED.size + 4 * count} were expected")
        values = np.frombuffer(body[_SEED.size :], "<f4").astype(np.float32)
        if not np.isfinite(values).all():
            raise PayloadError("payload holds a value that is not finite")
        if self.scale and count:
            with np.errstate(over="ignore"):
                values = np.clip(values * np.float32(size / count), -FLOAT32_MAX, FLOAT32_MAX)
        (seed,) = _SEED.unpack_from(body)
        out = np.zeros(size, np.float32)
        out[self._chosen(seed, size)] = values
        return out

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """(n/k - 1) ||v||_2^2; unscaled (1 - k/n) ||v||_2^2 and as much less in the mean."""
        del state
        if sketch.spec[:3] != self.needs[:3]:
            raise UsageError(f"{self}: wants a sketch of {self.needs}, not of {sketch.spec}")
        n = max(1, sketch.size)
        share = max(1, kept(self.ratio, round(sketch.size))) / n
        bits = 32 * share + 32 / n
        return Expectation(
            squared_error=((1 / share - 1) if self.scale else (1 - share)) * sketch.energy,
            bias=0.0 if self.scale else (1 - share) * math.sqrt(sketch.energy),
            sparsity=1 - share * (1 - sketch.zeros / n),
            bits_fixed=bits,
            bits_entropy=bits,
            bits_huffman=bits,
            bits_payload=bits,
            bits_norms=0.0,
        )

    def _chosen(self, seed: int, size: int) -> NDArray[np.int64]:
        """Ascending positions: those of the k largest of n random words."""
        digest = hashlib.blake2b(_SEED.pack(seed), digest_size=16, person=b"randomk").digest()
        words = np.empty(size, np.uint32)
        high, low = (np.uint64(int.from_bytes(half, "little")) for half in (digest[:8], digest[8:]))
        _select.fill_words(high, low, words)
        return largest(words, kept(self.ratio, size))
