"""The codecs of one rank: its messages go to the other ranks, and received ones are decoded and averaged.

Every function here is called on all ranks with the same tensors in the same order, and returns the same bytes on all.
"""

from __future__ import annotations

import functools
import math
import operator
import time
import zlib
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch

from gtrace.codecs import codec as build_codec
from gtrace.codecs.base import Averaged, advance
from gtrace.codecs.link import Message, Receiver, Sender, allocate, sharing
from gtrace.coding import ENVELOPE_BYTES
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError
from gtrace.training import vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.exchange import Tally
from gtrace.training.wire import HEADER_BYTES, NOT_FINITE, NotFinite, join, pack, split, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import CodecTable
    from gtrace.codecs.base import Rounds
    from gtrace.codecs.link import LinkOptions
    from gtrace.sketch import MomentSketch
    from gtrace.training.vectors import Vector
    from gtrace.training.wire import Collectives
    from gtrace.types import Role

    #: float32[n]; a mark for values that are not finite; None for nothing to send
    Values: TypeAlias = Vector | NotFinite | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank sums up, or all of it.

    Attributes:
        name: name of the piece; the tensor's if it is all of it.
        codec: the codec.
        size: number of elements.
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
        if self.device is None:
            return np.full(self.size, value, np.float32)
        return torch.full((self.size,), value, device=self.device)

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
        rules: the codec of each tensor.
        options: the options of all links.
        wire: the connection to the other ranks.
        common: fit to the sum of all ranks' sketches, which are exchanged for this.

    Attributes:
        tally: this rank's traffic since the tally was last replaced.
        allocates: tensors share something out among themselves, and must be exchanged in one call.
    """

    def __init__(self, rules: CodecTable, options: LinkOptions, wire: Collectives, *, common: bool) -> None:
        self.tally = Tally()
        self.allocates = any(codec.allocates for codec in rules.codecs)
        self._options, self._wire, self._common = options, wire, common
        self._senders: dict[tuple[Role, str], Sender] = {}
        self._receivers: dict[tuple[Role, str, int], Receiver] = {}

    def all_gather(self, whole: Sequence[Piece], values: Sequence[Values], step: int) -> list[Vector]:
        """Send every rank's payloads to all; returns the averages.

        Args:
            whole: the tensors.
            values: the values of each to send.
            step: number of the step.
        """
        messages = self._encode(whole, values, "up", step)
        frames = self._wire.scatter([pack(messages)] * self._wire.size)
        gathered = [self._decode(whole, unpack(frame, len(whole)), "up", rank) for rank, frame in enumerate(frames)]
        self._settle(whole, values, gathered[self._wire.rank], "up")
        return [piece.mean(arrived) for piece, arrived in zip(whole, zip(*gathered, strict=True), strict=True)]

    def two_shot(self, whole: Sequence[Piece], values: Sequence[Values], step: int) -> list[Vector]:
        """Each rank sums up a piece of every tensor and sends the average on. Arguments are those of `all_gather`."""
        rank, size = self._wire.rank, self._wire.size
        averages = [tensor.filled(0.0) for tensor in whole]
        pieces: list[Piece] = []
        parts: list[Values] = []
        targets: list[Any] = []
        for tensor, array, average in zip(whole, values, averages, strict=True):
            for piece in split_tensor(tensor, size):
                place = slice(piece.start, piece.start + piece.size)
                pieces.append(piece)
                parts.append(array[place] if sendable(array) else array)
                targets.append(average[place])
        messages = self._encode(pieces, parts, "up", step)
        # Nobody sends a rank its own pieces back, but its memory needs the decoded values.
        self._settle(pieces, parts, self._decode(pieces, messages, "up", rank), "up")
        owned = [[k for k, piece in enumerate(pieces) if piece.owner == one] for one in range(size)]
        frames = self._wire.scatter([pack([messages[k] for k in chosen]) for chosen in owned])
        mine = [pieces[k] for k in owned[rank]]
        gathered = [self._decode(mine, unpack(frame, len(mine)), "up", one) for one, frame in enumerate(frames)]
        sums: list[Values] = []
        for piece, arrived in zip(mine, zip(*gathered, strict=True), strict=True):
            total = piece.mean(arrived)
            sums.append(NOT_FINITE if vectors.count_nonfinite(total) else total)
        onward = pack(self._encode(mine, sums, "down", step))
        for one, frame in enumerate(self._wire.scatter([onward] * size)):
            theirs = [pieces[k] for k in owned[one]]
            final = self._decode(theirs, unpack(frame, len(theirs)), "down", one)
            for k, piece, array in zip(owned[one], theirs, final, strict=True):
                targets[k][:] = piece.mean([array])
            if one == rank:
                self._settle(mine, sums, final, "down")
        return averages

    def all_reduce(self, whole: Sequence[Piece], values: Sequence[Values], step: int) -> list[Vector]:
        """Tensors of linear codecs, by all-reduces of their messages. Arguments are those of `all_gather`.

        A tensor that one rank cannot send is sent uncompressed by the others, and no memory changes.

        Raises:
            PayloadError: the ranks' models differ.
        """
        size = self._wire.size
        flags = bytes(sendable(array) + 2 * isinstance(array, NotFinite) for array in values)
        self.tally.frame_bits += 8 * len(flags)
        frames = self._wire.scatter([flags] * size)
        if any(len(frame) != len(flags) for frame in frames):
            raise PayloadError("frame: other tensors than here; the ranks differ in their model")
        averages: dict[int, Vector] = {}
        runs: dict[int, tuple[Vector, Rounds]] = {}
        alone: dict[int, NDArray[np.float32]] = {}
        for k, (piece, array, seen) in enumerate(zip(whole, values, zip(*frames, strict=True), strict=True)):
            if 2 in seen or 1 not in seen:
                averages[k] = piece.mean([NOT_FINITE] if 2 in seen else [])
            elif 0 in seen:
                part = vectors.on_host(array) if sendable(array) else np.zeros(piece.size, np.float32)
                alone[k] = part * np.float32(size / sum(seen))
                self.tally.payload_bits += 32 * piece.size if sendable(array) else 0
            elif sendable(array):
                runs[k] = array, self._sender(piece, "up").rounds(array, step)
        found = self._mean(alone)
        means: dict[int, NDArray[np.float32]] = {}
        while runs:
            messages: dict[int, NDArray[np.float32]] = {}
            for k, (array, run) in list(runs.items()):
                message = advance(run, means.get(k))
                if isinstance(message, Averaged):
                    found[k] = message.decoded
                    self._note(vectors.on_host(array), message.own, "up")
                    del runs[k]
                else:
                    messages[k] = message
                    self.tally.payload_bits += 8 * message.nbytes
            means = self._mean(messages)
        for k, decoded in found.items():
            place = whole[k].device
            averages[k] = decoded if place is None else torch.from_numpy(decoded).to(place)
        return [averages[k] for k in range(len(whole))]

    def _mean(self, parts: Mapping[int, NDArray[np.float32]]) -> dict[int, NDArray[np.float32]]:
        """The mean over ranks of each array, all of them in one collective."""
        if not parts:
            return {}
        joined = self._wire.average(np.concatenate([part.reshape(-1) for part in parts.values()]))
        means = np.split(joined, np.cumsum([part.size for part in parts.values()])[:-1])
        return {k: mean.reshape(part.shape) for (k, part), mean in zip(parts.items(), means, strict=True)}

    def to_lists(self) -> dict[str, Any]:
        """Codec states and what receivers hold, as numbers, text and tensors."""
        return {
            "senders": [
                [role, name, str(one.codec), as_tensors(one.to_arrays())] for (role, name), one in self._senders.items()
            ],
            "receivers": [
                [role, name, rank, str(one.codec), one.size, torch.frombuffer(bytearray(one.shared), dtype=torch.uint8)]
                for (role, name, rank), one in self._receivers.items()
                if one.shared
            ],
        }

    def load_lists(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`to_lists` on the same rank."""
        self._senders, self._receivers = {}, {}
        for role, name, spec, tensors in saved["senders"]:
            arrays = as_arrays(tensors)
            size = int(arrays["state"]["size"])
            self._sender(Piece(name, build_codec(spec), size), role).load_arrays(arrays)
        for role, name, sender, spec, size, shared in saved["receivers"]:
            self._receiver(Piece(name, build_codec(spec), size), role, sender).shared = shared.numpy().tobytes()

    def _sender(self, piece: Piece, role: Role) -> Sender:
        found = self._senders.get((role, piece.name))
        if found is None:
            rank = self._wire.rank
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

    def _encode(
        self, pieces: Sequence[Piece], values: Sequence[Values], role: Role, step: int
    ) -> list[Message | NotFinite | None]:
        tally, start = self.tally, time.thread_time()
        if self._common and role == "up":
            self._agree(pieces, values, step)
        elif self.allocates:
            pairs = zip(pieces, values, strict=True)
            allocate([(self._sender(piece, role), one) for piece, one in pairs if sendable(one)], step)
            tally.fit_seconds += time.thread_time() - start
        messages: list[Message | NotFinite | None] = []
        for piece, array in zip(pieces, values, strict=True):
            if array is None or isinstance(array, NotFinite):
                messages.append(array)
                continue
            sender = self._senders.get((role, piece.name)) or self._sender(piece, role)
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

    def _agree(self, pieces: Sequence[Piece], values: Sequence[Values], step: int) -> None:
        """Fit every due codec to the sum of all ranks' sketches; the schedule is the same on all of them."""
        everyone = [(piece, array, self._sender(piece, "up")) for piece, array in zip(pieces, values, strict=True)]
        due = [
            (piece, array, sender)
            for piece, array, sender in everyone
            if sender.due(step) and (sender.codec.allocates or not sender.codec.fits_itself)
        ]
        if not due:
            return
        totals = self._totals([(sender.summary, array) for _, array, sender in due], step)
        shares: dict[str, float] = {}
        groups = dict(sharing((sender.codec, (piece, array, sender)) for piece, array, sender in everyone))
        for codec in {sender.codec: None for _, _, sender in due}:
            if codec.allocates:
                members = groups[codec]
                found = self._totals([(sender.sketch, array) for _, array, sender in members], step)
                known = {piece.name: one for (piece, _, _), one in zip(members, found, strict=True) if one is not None}
                shares.update(zip(known, codec.allocate(list(known.values())), strict=True))
        for (piece, _, sender), total in zip(due, totals, strict=True):
            if total is None:
                continue
            sender.fit(total, step, agreed=True, share=shares.get(piece.name))
            for rank in range(self._wire.size):
                self._receiver(piece, "up", rank).shared = sender.known

    def _totals(
        self, items: Sequence[tuple[Callable[[Vector, int], MomentSketch], Values]], step: int
    ) -> list[MomentSketch | None]:
        """The sum of all ranks' sketches of each of some values; None if no rank has any."""
        packed = [pack_sketch(sketch(array, step)) if sendable(array) else b"" for sketch, array in items]
        frame, size = join(packed), sum(map(len, packed))
        self.tally.shared_bits += 8 * size
        self.tally.frame_bits += 8 * (len(frame) - size)
        gathered = [split(frame, len(items)) for frame in self._wire.scatter([frame] * self._wire.size)]
        totals: list[MomentSketch | None] = []
        for sketches in zip(*gathered, strict=True):
            known = [unpack_sketch(data) for data in sketches if data]
            totals.append(functools.reduce(operator.add, known) if known else None)
        return totals

    def _decode(
        self, pieces: Sequence[Piece], messages: Sequence[Message | NotFinite | None], role: Role, rank: int
    ) -> list[Values]:
        """One rank's messages."""
        return [
            self._receiver(piece, role, rank).receive(message, piece.device)
            if isinstance(message, Message)
            else message
            for piece, message in zip(pieces, messages, strict=True)
        ]

    def _settle(self, pieces: Sequence[Piece], values: Sequence[Values], arrived: Sequence[Values], role: Role) -> None:
        """Pass the decoded values of this rank's own messages to its memory, and measure their error."""
        for piece, array, decoded in zip(pieces, values, arrived, strict=True):
            if sendable(array) and sendable(decoded):
                self._sender(piece, role).settle(array, decoded)
                self._note(array, decoded, role)

    def _note(self, array: Vector, decoded: Vector, role: Role) -> None:
        if role == "up":
            self.tally.add_sent(array, decoded)
            self.tally.zeros += vectors.count_zeros(decoded)
        else:
            self.tally.add_sent_on(array, decoded)


def split_tensor(tensor: Piece, ranks: int) -> list[Piece]:
    """Pieces of a tensor: whole buckets, nearly as many for each rank; which rank begins depends on the name."""
    bucket = (tensor.codec.needs.bucket_size if tensor.codec.needs is not None else None) or 1
    blocks = -(-tensor.size // bucket)
    parts = max(1, min(ranks, blocks))
    borders = [min(tensor.size, bucket * (blocks * k // parts)) for k in range(parts + 1)]
    first = zlib.crc32(tensor.name.encode())
    return [
        replace(
            tensor,
            name=tensor.name if parts == 1 else f"{tensor.name}[{start}:{stop}]",
            size=stop - start,
            shape=None,
            start=start,
            owner=(first + k) % ranks,
        )
        for k, (start, stop) in enumerate(pairwise(borders))
    ]


def sendable(values: Values) -> TypeGuard[Vector]:
    """Whether there are values to encode."""
    return values is not None and not isinstance(values, NotFinite)
