"""Codecs that can encode a tensor part by part: what a part must know of the whole, and what it adds to the payload."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from gtrace.codecs.base import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import ArrayLike

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


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor, encoded.

    Attributes:
        payload: the part as a tensor of its own, which ``decode`` takes.
        head: bits of it that the payload of the whole holds too: norms, scales, exact values.
        coded: bits of its symbols; -1 where one of them has no code.
        fixed: bits of its symbols at fixed width, which the whole payload falls back to.
    """

    payload: bytes
    head: int
    coded: int = 0
    fixed: int = 0


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
    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> Part:
        """Encode some consecutive values of a tensor.

        Args:
            state: what :meth:`prepare` returned, with the part's size.
            values: the part, as :meth:`~gtrace.codecs.Codec.encode` takes a tensor.
            key: that of the whole tensor.
            start: how many values of the tensor come before the part, a multiple of ``part_multiple``.
        """

    @staticmethod
    def body_bytes(parts: Iterable[Part]) -> int:
        """Bytes of the whole payload's body, from all parts (their payloads are not looked at)."""
        head, coded, fixed, uncoded = 0, 0, 0, False
        for part in parts:
            head, coded, fixed = head + part.head, coded + part.coded, fixed + part.fixed
            uncoded |= part.coded < 0
        return head // 8 + -(-(fixed if uncoded else coded) // 8)
