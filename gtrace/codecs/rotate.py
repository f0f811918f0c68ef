"""Random rotation before compression: outliers are spread, so that coarse grids fit."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gtrace.codecs.base import Codec, CodedBits, Simulated, checked_values, parameter
from gtrace.codecs.registry import register_wrapper
from gtrace.codecs.wrapper import Wrapper
from gtrace.coding import open_envelope, seal
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import hadamard as _hadamard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Rounds
    from gtrace.types import State

_SEED = struct.Struct("<I")


@register_wrapper
@dataclass(frozen=True)
class Rotate(Wrapper):
    """A seeded randomized Hadamard rotation around any codec: ``rotate:qsgdinf:bits=3``.

    Values are rotated in blocks, encoded, decoded and rotated back. Every encoding has a rotation of its own, whose
    seed travels in 32 bits of the payload. A codec with memory inside would find its memory in other coordinates at
    every step, so around one the rotation stays the same and no seed is sent; memory is better kept outside:
    ``ef:rotate:signsgd``. ``rotate:signsgd:scale=energy`` is DRIVE with Hadamard rotations.
    """

    name: ClassVar[str] = "rotate"
    summary: ClassVar[str] = "a random Hadamard rotation before any codec, undone after it"
    formula: ClassVar[str] = "R'(Q(R v)), R = H D / sqrt(block) per block, D random signs, H the Walsh-Hadamard matrix"
    paper: ClassVar[str] = (
        "Suresh et al., Distributed Mean Estimation with Limited Communication, 2017; "
        "Vargaftik et al., DRIVE: One-bit Distributed Mean Estimation, 2021"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "a tensor is not padded to a power of two: it is rotated in blocks, and a rest in smaller powers of two",
    )

    block: int = parameter(1024, "values that are mixed with each other, a power of two", minimum=2, maximum=1 << 20)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Around a codec with memory the rotation is always the same.
        object.__setattr__(self, "deterministic", self.inner.deterministic and self.inner.stateful)
        if self.block & (self.block - 1):
            raise UsageError(f"codec rotate: block={self.block} is no power of two; try {1 << self.block.bit_length()}")
        # Without memory inside, every worker rotates by signs of its own, and sums mean nothing.
        object.__setattr__(self, "linear", self.inner.linear and self.inner.stateful)

    @property
    def wire_name(self) -> str:
        """Its own: a receiver that does not rotate back must refuse."""
        return self.name

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """The values in the rotation that a codec with memory gets; to others every rotation looks the same."""
        return self._rotated(checked_values(state, values), 0)

    def encode(self, state: State, values: ArrayLike, key: tuple[int, int]) -> bytes:
        """The seed where one is needed, then the body of the inner payload of the rotated values."""
        x = checked_values(state, values)
        seed = 0 if self.inner.stateful else key[1] & 0xFFFFFFFF
        inner_shared = self.shared(state)
        payload = self.inner.encode(self.inner_state(state), self._rotated(x, seed), _inner_key(key))
        body, flags = open_envelope(payload, codec=self.inner.wire_name, size=x.size, shared=inner_shared)
        head = b"" if self.inner.stateful else _SEED.pack(seed)
        return seal(head + body, codec=self.name, size=x.size, shared=inner_shared, flags=flags)

    def decode(self, shared: bytes, payload: bytes, size: int) -> NDArray[np.float32]:
        """Undo :meth:`encode`."""
        body, flags = open_envelope(payload, codec=self.name, size=size, shared=shared)
        seed, head = 0, 0
        if not self.inner.stateful:
            if len(body) < _SEED.size:
                raise PayloadError("payload is too short for the seed of its rotation")
            (seed,) = _SEED.unpack_from(body)
            head = _SEED.size
        wrapped = seal(bytes(body[head:]), codec=self.inner.wire_name, size=size, shared=shared, flags=flags)
        return self._rotated(self.inner.decode(shared, wrapped, size), seed, back=True)

    def simulate(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Simulated:
        """As the codec inside does it, of the rotated values; its payload and the seed are sent."""
        x = checked_values(state, values)
        seed, head = (0, 0) if self.inner.stateful else (key[1] & 0xFFFFFFFF, _SEED.size)
        found = self.inner.simulate(self.inner_state(state), self._rotated(x, seed), _inner_key(key))
        coded = found.coded and CodedBits(*(bits + 8 * head / max(1, x.size) for bits in found.coded))
        return Simulated(self._rotated(found.values, seed, back=True), found.payload_bytes + head, coded)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Let the codec inside take note, in its own coordinates."""
        if not self.inner.stateful:
            return state
        return super().update(state, values, self._rotated(decoded, 0))

    def rounds(self, state: State, values: ArrayLike, key: tuple[int, int]) -> Rounds:
        """Those of the codec inside, rotated back at the end; all workers rotate by the same signs."""
        ended = yield from super().rounds(state, values, key)
        decoded, own = (self._rotated(array, 0, back=True) for array in (ended.decoded, ended.own))
        return ended._replace(decoded=decoded, own=own)

    def aggregate(self, decoded: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
        """The mean: a vote over signs means nothing once they are rotated back."""
        return Codec.aggregate(self, decoded)

    def _rotated(self, x: NDArray[np.float32], seed: int, *, back: bool = False) -> NDArray[np.float32]:
        digest = hashlib.blake2b(_SEED.pack(seed), digest_size=16).digest()
        high, low = (np.uint64(int.from_bytes(half, "little")) for half in (digest[:8], digest[8:]))
        out = np.empty(x.size, np.float32)
        _hadamard.rotate(x, self.block, high, low, back, out)
        return out


def _inner_key(key: tuple[int, int]) -> tuple[int, int]:
    """Another key for the codec inside: a second rotation must not undo the first one's signs."""
    digest = hashlib.blake2b(struct.pack("<QQ", *key), digest_size=16, person=b"rotated").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")
