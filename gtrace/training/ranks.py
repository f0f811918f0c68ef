"""The codecs of one rank: its messages go to the other ranks, and received ones are decoded and averaged.

Every exchange here is a generator, see :mod:`gtrace.training.frames`. It runs on all ranks with the same tensors in the
same order, and its result has the same bytes on all.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np

from gtrace.codecs import codec as build_codec
from gtrace.codecs.link import Message, Receiver, Sender, allocate, sharing
from gtrace.coding import ENVELOPE_BYTES
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError
from gtrace.training import vectors
from gtrace.training.exchange import Tally
from gtrace.training.frames import HEADER_BYTES, NotFinite, join, split

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import CodecTable
    from gtrace.codecs.link import LinkOptions
    from gtrace.sketch import MomentSketch
    from gtrace.training.frames import Collectives, Exchanging, SimulatedRank
    from gtrace.training.vectors import Vector
    from gtrace.types import Role

    #: float32[n]; a mark for values that are not finite; None for nothing to send
    Values: TypeAlias = Vector | NotFinite | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank sums up, or all of it.

    Attributes:
        name: name of the piece; the tensor's if it is all of it.
        device: device on which it is encoded and decoded; None for the host.
        shape: the parameter's shape, if the piece is all of it and the shape is known.
        start: first element.
        owner: the rank that sums it up, if the tensor is split.
    """

    name: str
    codec: Codec
    size: int
    device: torch.device | None = None
    shape: tuple[int, ...] | None = None
    start: int = 0
    owner: int = 0

    def filled(self, value: float) -> Vector:
        """The same value everywhere, at the piece's place."""
        return vectors.placed(np.full(self.size, value, np.float32), self.device)

    def mean(self, arrived: Sequence[Values]) -> Vector:
        """The codec's aggregate of what several ranks sent: NaN if one of them could not send."""
        decoded = [one for one in arrived if sendable(one)]
        spoilt = any(isinstance(one, NotFinite) for one in arrived)
        if decoded and not spoilt:
            return vectors.aggregate(self.codec, decoded)
        return self.filled(math.nan if spoilt else 0.0)


class RankCodecs:
    """Every tensor's senders and receivers on this rank.

    Args:
        place: this rank among the others; its number is asked for at the first exchange.
        common: fit to the sum of all ranks' sketches, which are exchanged for this.
        first: number of this group's first rank among the workers of all groups, part of the keys.

    Attributes:
        rules: the codec of each tensor.
        tally: this rank's traffic since the tally was last replaced.
        allocates: tensors share something out among themselves, and must be exchanged in one call.
    """

    def __init__(
        self,
        rules: CodecTable,
        options: LinkOptions,
        place: Collectives | SimulatedRank,
        *,
        common: bool,
        first: int = 0,
    ) -> None:
        self.rules, self.tally = rules, Tally()
        self._first = first
        self.allocates = any(codec.allocates for codec in rules.codecs)
        self._options, self.place, self._common = options, place, common
        self._senders: dict[tuple[Role, str], Sender] = {}
        self._receivers: dict[tuple[Role, str, int], Receiver] = {}

    def seen(self, values: Sequence[Values]) -> Exchanging[list[tuple[int, ...]]]:
        """For each tensor what every rank has: 1 for values to send, 2 for values that are not finite, 0 for nothing.

        Raises:
            PayloadError: the ranks' models differ.
        """
        flags = bytes(sendable(array) + 2 * isinstance(array, NotFinite) for array in values)
        self.tally.frame_bits += 8 * len(flags)
        frames = yield [flags] * self.place.size
        if any(len(frame) != len(flags) for frame in frames):
            raise PayloadError("frame: other tensors than here; the ranks differ in their model")
        return list(zip(*frames, strict=True))

    def mean(self, parts: Mapping[int, NDArray[np.float32]]) -> Exchanging[dict[int, NDArray[np.float32]]]:
        """The mean over ranks of each array, all of them in one collective."""
        if not parts:
            return {}
        joined = yield np.concatenate([part.reshape(-1) for part in parts.values()])
        means = np.split(joined, np.cumsum([part.size for part in parts.values()])[:-1])
        return {k: mean.reshape(part.shape) for (k, part), mean in zip(parts.items(), means, strict=True)}

    def to_lists(self) -> dict[str, Any]:
        """Codec states and what receivers hold, as numbers, text and arrays."""
        return {
            "senders": [[role, name, str(one.codec), one.to_arrays()] for (role, name), one in self._senders.items()],
            "receivers": [
                [role, name, rank, str(one.codec), one.to_arrays()]
                for (role, name, rank), one in self._receivers.items()
            ],
        }

    def load_lists(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`to_lists` on the same rank."""
        self._senders, self._receivers = {}, {}
        for role, name, spec, arrays in saved["senders"]:
            size = int(arrays["state"]["size"])
            self.sender(Piece(name, build_codec(spec), size), role).load_arrays(arrays)
        for role, name, sender, spec, arrays in saved["receivers"]:
            size = int(arrays["held"]["size"])
            self._receiver(Piece(name, build_codec(spec), size), role, sender).load_arrays(arrays)

    def sender(self, piece: Piece, role: Role) -> Sender:
        """This rank's sender of a piece, made when first asked for."""
        found = self._senders.get((role, piece.name))
        if found is None:
            rank = self._first + self.place.rank
            found = self._senders[role, piece.name] = Sender(
                piece.codec, piece.size, self._options, tensor=piece.name, worker=rank, shape=piece.shape, role=role
            )
        return found

    def _receiver(self, piece: Piece, role: Role, rank: int) -> Receiver:
        found = self._receivers.get((role, piece.name, rank))
        if found is None:
            found = Receiver(piece.codec, piece.size, self._options.engine)
            self._receivers[role, piece.name, rank] = found
        return found

    def encode(
        self, pieces: Sequence[Piece], values: Sequence[Values], role: Role, step: int
    ) -> Exchanging[list[Message | NotFinite | None]]:
        """This rank's messages for some pieces, fitted first where the schedule says so; counted as ``role`` says."""
        tally, start = self.tally, time.thread_time()
        if self._common and role == "up":
            yield from self._agree(pieces, values, step)
        elif self.allocates:
            pairs = zip(pieces, values, strict=True)
            allocate([(self.sender(piece, role), one) for piece, one in pairs if sendable(one)], step)
            tally.fit_seconds += time.thread_time() - start
        messages: list[Message | NotFinite | None] = []
        for piece, array in zip(pieces, values, strict=True):
            if array is None or isinstance(array, NotFinite):
                messages.append(array)
                continue
            sender = self.sender(piece, role)
            before = sender.fit_seconds
            message = sender.send(array, step)
            messages.append(message)
            tally.fit_seconds += sender.fit_seconds - before
            if role == "up":
                tally.payload_bits += message.payload_bits
                tally.shared_bits += message.shared_bits
            else:
                tally.down_bits += message.payload_bits + message.shared_bits
            tally.envelope_bits += 8 * ENVELOPE_BYTES
        tally.frame_bits += 8 * HEADER_BYTES * len(pieces)
        return messages

    def _agree(self, pieces: Sequence[Piece], values: Sequence[Values], step: int) -> Exchanging[None]:
        """Fit every due codec to the sum of all ranks' sketches; the schedule is the same on all of them."""
        everyone = [(piece, array, self.sender(piece, "up")) for piece, array in zip(pieces, values, strict=True)]
        due = [
            (piece, array, sender)
            for piece, array, sender in everyone
            if sender.due(step) and (sender.codec.allocates or not sender.codec.fits_itself)
        ]
        if not due:
            return
        totals = yield from self._totals(
            [sender.summary(array, step) if sendable(array) else None for _, array, sender in due]
        )
        shares: dict[str, float] = {}
        groups = dict(sharing((sender.codec, (piece, array, sender)) for piece, array, sender in everyone))
        for codec in {sender.codec: None for _, _, sender in due}:
            if codec.allocates:
                members = groups[codec]
                found = yield from self._totals(
                    [sender.sketch(array) if sendable(array) else None for _, array, sender in members]
                )
                known = {piece.name: one for (piece, _, _), one in zip(members, found, strict=True) if one is not None}
                shares.update(zip(known, codec.allocate(list(known.values())), strict=True))
        for (piece, _, sender), total in zip(due, totals, strict=True):
            if total is None:
                continue
            sender.fit(total, step, agreed=True, share=shares.get(piece.name))
            for rank in range(self.place.size):
                self._receiver(piece, "up", rank).shared = sender.known

    def _totals(self, sketches: Sequence[MomentSketch | None]) -> Exchanging[list[MomentSketch | None]]:
        """The sum of all ranks' sketches of each of some values; None if no rank has any."""
        packed = [b"" if sketch is None else pack_sketch(sketch) for sketch in sketches]
        frame, size = join(packed), sum(map(len, packed))
        self.tally.shared_bits += 8 * size
        self.tally.frame_bits += 8 * (len(frame) - size)
        frames = yield [frame] * self.place.size
        gathered = [split(frame, len(packed)) for frame in frames]
        totals: list[MomentSketch | None] = []
        for parts in zip(*gathered, strict=True):
            known = [unpack_sketch(data) for data in parts if data]
            totals.append(functools.reduce(operator.add, known) if known else None)
        return totals

    def decode(
        self, pieces: Sequence[Piece], messages: Sequence[Message | NotFinite | None], role: Role, rank: int
    ) -> list[Values]:
        """One rank's messages."""
        return [
            self._receiver(piece, role, rank).receive(message, piece.device)
            if isinstance(message, Message)
            else message
            for piece, message in zip(pieces, messages, strict=True)
        ]

    def settle(
        self,
        pieces: Sequence[Piece],
        values: Sequence[Values],
        arrived: Sequence[Values],
        role: Role,
        *,
        counted: Role | None = None,
    ) -> None:
        """Pass the decoded values of this rank's own messages to its memory, and measure their error.

        Args:
            counted: ``down`` for the error of sums that go up once more; None for ``role``.
        """
        for piece, array, decoded in zip(pieces, values, arrived, strict=True):
            if sendable(array) and sendable(decoded):
                self.sender(piece, role).settle(array, decoded)
                self.note(array, decoded, counted or role)

    def note(self, array: Vector, decoded: Vector, role: Role) -> None:
        """Measure the error of values that arrived."""
        if role == "up":
            self.tally.add_sent(array, decoded)
            self.tally.zeros += vectors.count_zeros(decoded)
        else:
            self.tally.add_sent_on(array, decoded)


def sendable(values: Values) -> TypeGuard[Vector]:
    """Whether there are values to encode."""
    return values is not None and not isinstance(values, NotFinite)
