"""Random sparsification: a keyed choice of values, scaled up so that the mean is right."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import CodedBits, ExpectingCodec, Simulated, checked_values, coder_parameter, parameter
from gtrace.codecs.registry import register
from gtrace.codecs.sparse import kept, largest
from gtrace.codecs.wrapper import FLOAT32_MAX
from gtrace.coding import ENVELOPE_BYTES, Block, Floats, decode_floats, expected_floats, open_envelope, seal
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import elementwise as _elementwise
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch

_SEED = struct.Struct("<I")
#: flag of a payload whose values are coded
_CODED = 1


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
    coder: str = coder_parameter()

    def __post_init__(self) -> None:
        super().__post_init__()
        # A fact of the class elsewhere; here it hangs on a parameter.
        object.__setattr__(self, "unbiased", self.scale)

    @property
    def needs(self) -> SummarySpec:
        """Energy and zeros, which every sketch has."""
        return SummarySpec("none", None)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The seed, then the chosen values in the order of their positions; flag 1: their exponents are coded."""
        seed, found = self._drawn(state, values, key)
        flags = _CODED if found.coded else 0
        return seal(_SEED.pack(seed) + found.encode(), codec=self.name, size=state.size, shared=b"", flags=flags)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As :meth:`encode` and :meth:`decode`."""
        seed, found = self._drawn(state, values, key)
        head = 8 * _SEED.size + found.raw
        size = ENVELOPE_BYTES + _SEED.size + len(found.encode())
        return Simulated(
            self._placed(seed, found.values, state.size), size, CodedBits.of(found.block, head, state.size)
        )

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """The values, scaled, in their places."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        if flags & ~_CODED or len(body) < _SEED.size:
            raise PayloadError(f"payload body of {len(body)} bytes with flags {flags:#x} is no seed and values")
        values = decode_floats(body[_SEED.size :], kept(self.ratio, size), coded=bool(flags))
        return self._placed(_SEED.unpack_from(body)[0], values, size)

    def _drawn(self, state: State, values: ArrayLike, key: tuple[int, int]) -> tuple[int, Floats]:
        x = checked_values(state, values)
        seed = key[1] & 0xFFFFFFFF
        return seed, Floats(x[self._chosen(seed, x.size)], coder=self.coder)

    def _placed(self, seed: int, values: NDArray[np.float32], size: int) -> NDArray[np.float32]:
        if self.scale and values.size:
            with np.errstate(over="ignore"):
                values = np.clip(values * np.float32(size / values.size), -FLOAT32_MAX, FLOAT32_MAX)
        out = np.zeros(size, np.float32)
        out[self._chosen(seed, size)] = values
        return out

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """(n/k - 1) ||v||_2^2; unscaled (1 - k/n) ||v||_2^2 and as much less in the mean."""
        if sketch.spec[:3] != self.needs[:3]:
            raise UsageError(f"{self}: wants a sketch of {self.needs}, not of {sketch.spec}")
        n = max(1, round(sketch.size))
        count = kept(self.ratio, round(sketch.size))
        share = max(1, count) / n
        block = Block.signed(expected_floats(sketch.lower, sketch.sums[:, 0], sketch.zeros) * (count / n))
        bits = CodedBits.of(block, 8 * _SEED.size + 23 * count, n)
        return Expectation(
            squared_error=self.weighted_error(state, sketch, sketch),
            bias=0.0 if self.scale else (1 - share) * math.sqrt(sketch.energy),
            sparsity=1 - share * (1 - sketch.zeros / n),
            bits_fixed=bits.fixed,
            bits_entropy=bits.entropy,
            bits_huffman=bits.huffman,
            bits_payload=bits.fixed if self.coder == "fixed" else bits.huffman,
            bits_norms=0.0,
        )

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """A value is lost, or scaled, as likely as any other."""
        del state, sketch
        share = max(1, kept(self.ratio, round(weighted.size))) / max(1, weighted.size)
        return ((1 / share - 1) if self.scale else (1 - share)) * weighted.energy

    def _chosen(self, seed: int, size: int) -> NDArray[np.int64]:
        """Ascending positions: those of the k largest of n random words."""
        digest = hashlib.blake2b(_SEED.pack(seed), digest_size=16, person=b"randomk").digest()
        words = np.empty(size, np.uint32)
        high, low = (np.uint64(int.from_bytes(half, "little")) for half in (digest[:8], digest[8:]))
        _elementwise.fill_words(high, low, words)
        return largest(words, kept(self.ratio, size))
