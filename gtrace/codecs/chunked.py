"""Codecs that can encode a tensor part by part: what a part must know of the whole, and what it adds to the payload."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gtrace.codecs.base import Codec, CodedBits
from gtrace.coding import CodedBlock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    from gtrace.types import State


class TensorSums(NamedTuple):
    """What one pass over a tensor finds out, for methods whose parts share a scale.

    Attributes:
        size: number of values.
        norm1: sum of |v|.
        energy: sum of v^2.
        largest: the largest |v|.
    """

    size: int
    norm1: float
    energy: float
    largest: float


@dataclass(frozen=True, slots=True, eq=False)
class EncodedPart:
    """A part of a tensor, encoded. Parts add up to what is known of their tensor, without its payload.

    Attributes:
        payload: the part as a tensor of its own, which ``decode`` takes.
        head: bits of it that the payload of the whole holds too: norms, scales, exact values.
        coded: bits of its symbols.
        tallies: int64[m], how often each of its symbols occurs; None for a codec without symbols.
    """

    payload: bytes
    head: int
    coded: int = 0
    tallies: NDArray[np.int64] | None = None

    def __add__(self, other: EncodedPart) -> EncodedPart:
        tallies = self.tallies
        if tallies is not None and other.tallies is not None:
            tallies = tallies + other.tallies
        return EncodedPart(b"", self.head + other.head, self.coded + other.coded, tallies)


class PartwiseCodec(Codec):
    """A codec that can encode a tensor part by part, each value as in the tensor as a whole.

    What :meth:`encode_part` makes of parts decodes to the same values as the payload of the whole tensor, and
    :meth:`body_bytes` tells how long that payload is without building it.
    """

    @property
    def part_multiple(self) -> int | None:
        """Parts must be a multiple of so many values long, all but the last; None where there are no parts."""
        return 1

    def prepare(self, state: State, sums: TensorSums) -> State:
        """The state with what parts have to know of the whole tensor; it is for :meth:`encode_part` alone."""
        del sums
        return state

    @abstractmethod
    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """Encode some consecutive values of a tensor.

        Args:
            state: what :meth:`prepare` returned, with the part's size.
            values: the part, as :meth:`~gtrace.codecs.Codec.encode` takes a tensor.
            key: that of the whole tensor.
            start: how many values of the tensor come before the part, a multiple of ``part_multiple``.
        """

    def body_bytes(self, whole: EncodedPart) -> int:
        """Bytes of the whole payload's body, from the sum of all parts."""
        return whole.head // 8 + -(-whole.coded // 8)

    def coded_bits(self, whole: EncodedPart, size: int) -> CodedBits:
        """Bits per value of the whole payload of ``size`` values under each coder, from the sum of all parts."""
        if whole.tallies is None:
            bits = 8.0 * self.body_bytes(whole) / max(1, size)
            return CodedBits(bits, bits, bits)
        return CodedBits.of(CodedBlock.of(whole.tallies), whole.head, size)
