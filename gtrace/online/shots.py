"""How tensors travel between ranks: in one shot to all, or in two through the rank that sums a piece up."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

import numpy as np
import torch

from gtrace.codecs import codec as build_codec
from gtrace.coding import ENVELOPE_BYTES
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.online import vectors
from gtrace.online.checkpoint import as_arrays, as_tensors
from gtrace.online.exchange import Tally
from gtrace.online.frames import HEADER_BYTES, NOT_FINITE, NotFinite, join, pack, split, unpack
from gtrace.online.links import Message, Receiver, Sender

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gtrace.codecs import Codec
    from gtrace.codecs.table import CodecTable
    from gtrace.online.collectives import Collectives
    from gtrace.online.schedule import RefitSchedule
    from gtrace.online.vectors import Vector
    from gtrace.types import Role

    #: float32[n]; what stands for values that are not finite; None for nothing to send
    Values: TypeAlias = Vector | NotFinite | None


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank sums up, or all of it.

    Attributes:
        name: of the piece; the tensor's where it is all of it.
        owner: the rank that sums it up.
        start: first element.
        stop: one beyond the last.
        codec: what it goes through.
        device: where it is encoded and decoded; None for the host.
    """

    name: str
    owner: int
    start: int
    stop: int
    codec: Codec
    device: torch.device | None = None

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start


class Shots:
    """Every tensor's senders and receivers on this rank.

    Args:
        rules: which codec each tensor goes through.
        seed: of the rounding.
        refit: when codecs are fitted.
        common: fit to the sum of all ranks' sketches, which are exchanged for it.

    Attributes:
        tally: what travelled since it was last replaced, of this rank.
    """

    def __init__(self, rules: CodecTable, seed: int, refit: RefitSchedule, *, common: bool) -> None:
        self.tally = Tally()
        self._rules, self._seed, self._refit, self._common = rules, seed, refit, common
        self._senders: dict[tuple[Role, str], Sender] = {}
        self._receivers: dict[tuple[Role, str, int], Receiver] = {}

    def one(
        self, links: Collectives, names: Sequence[str], values: Sequence[Values], likes: Sequence[Vector], step: int
    ) -> list[Vector]:
        """Every rank's payloads go to all; returns the averages, the same bytes on all ranks.

        Args:
            links: to the other ranks.
            names: of the tensors.
            values: of each, what is to be sent.
            likes: of each, something of the size and of the place that the average is to have.
            step: number of the step.
        """
        whole = [
            Piece(name, links.rank, 0, len(like), self._rules.choose(name, len(like)), _place(like))
            for name, like in zip(names, likes, strict=True)
        ]
        messages = self._encode(links, whole, values, "up", step)
        frames = links.gather(pack(messages))
        gathered = [self._decode(whole, unpack(frame, len(whole)), "up", rank) for rank, frame in enumerate(frames)]
        self._settle(whole, values, gathered[links.rank], "up")
        return [_mean(piece, arrived) for piece, arrived in zip(whole, zip(*gathered, strict=True), strict=True)]

    def two(
        self, links: Collectives, names: Sequence[str], values: Sequence[Values], likes: Sequence[Vector], step: int
    ) -> list[Vector]:
        """Each rank sums up a piece of every tensor and sends the average on; the same bytes on all ranks.

        Args:
            links: to the other ranks.
            names: of the tensors.
            values: of each, what is to be sent.
            likes: of each, something of the size and of the place that the average is to have.
            step: number of the step.
        """
        averages = [vectors.filled(like, len(like), 0.0) for like in likes]
        pieces: list[Piece] = []
        parts: list[Values] = []
        targets: list[Any] = []
        for name, array, average in zip(names, values, averages, strict=True):
            for piece in self._split(name, average, links.size):
                pieces.append(piece)
                parts.append(array[piece.start : piece.stop] if _sendable(array) else array)
                targets.append(average[piece.start : piece.stop])
        messages = self._encode(links, pieces, parts, "up", step)
        # Nobody sends a rank its own pieces back, and memory wants to know how they arrived.
        self._settle(pieces, parts, self._decode(pieces, messages, "up", links.rank), "up")
        owned = [[k for k, piece in enumerate(pieces) if piece.owner == rank] for rank in range(links.size)]
        frames = links.scatter([pack([messages[k] for k in chosen]) for chosen in owned])
        mine = [pieces[k] for k in owned[links.rank]]
        gathered = [self._decode(mine, unpack(frame, len(mine)), "up", rank) for rank, frame in enumerate(frames)]
        sums: list[Values] = []
        for piece, arrived in zip(mine, zip(*gathered, strict=True), strict=True):
            total = _mean(piece, arrived)
            sums.append(NOT_FINITE if vectors.count_nonfinite(total) else total)
        onward = self._encode(links, mine, sums, "down", step)
        for rank, frame in enumerate(links.gather(pack(onward))):
            theirs = [pieces[k] for k in owned[rank]]
            final = self._decode(theirs, unpack(frame, len(theirs)), "down", rank)
            for k, piece, array in zip(owned[rank], theirs, final, strict=True):
                targets[k][:] = _mean(piece, [array])
            if rank == links.rank:
                self._settle(mine, sums, final, "down")
        return averages

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

    def load_lists(self, saved: Mapping[str, Any], rank: int) -> None:
        """Undo :meth:`to_lists` on this rank."""
        self._senders, self._receivers = {}, {}
        for role, name, spec, tensors in saved["senders"]:
            arrays = as_arrays(tensors)
            size = int(arrays["state"]["size"])
            self._sender(Piece(name, rank, 0, size, build_codec(spec)), role, rank).load_arrays(arrays)
        for role, name, sender, spec, size, shared in saved["receivers"]:
            receiver = self._receiver(Piece(name, sender, 0, size, build_codec(spec)), role, sender)
            receiver.shared = shared.numpy().tobytes()

    def _split(self, name: str, like: Vector, ranks: int) -> list[Piece]:
        """Pieces of a tensor: whole buckets, nearly as many for each rank; which rank begins depends on the name."""
        size, place = len(like), _place(like)
        codec = self._rules.choose(name, size)
        bucket = (codec.needs.bucket_size if codec.needs is not None else None) or 1
        blocks = -(-size // bucket)
        parts = max(1, min(ranks, blocks))
        borders = [min(size, bucket * (blocks * k // parts)) for k in range(parts + 1)]
        first = zlib.crc32(name.encode())
        return [
            Piece(name if parts == 1 else f"{name}[{start}:{stop}]", (first + k) % ranks, start, stop, codec, place)
            for k, (start, stop) in enumerate(pairwise(borders))
        ]

    def _sender(self, piece: Piece, role: Role, rank: int) -> Sender:
        sender = self._senders.get((role, piece.name))
        if sender is None:
            sender = self._senders[role, piece.name] = Sender(
                piece.codec, piece.size, tensor=piece.name, worker=rank, seed=self._seed, refit=self._refit, role=role
            )
        return sender

    def _receiver(self, piece: Piece, role: Role, rank: int) -> Receiver:
        receiver = self._receivers.get((role, piece.name, rank))
        if receiver is None:
            receiver = self._receivers[role, piece.name, rank] = Receiver(piece.codec, piece.size)
        return receiver

    def _encode(
        self, links: Collectives, pieces: Sequence[Piece], values: Sequence[Values], role: Role, step: int
    ) -> list[Message | NotFinite | None]:
        if self._common and role == "up":
            self._agree(links, pieces, values, step)
        tally, messages = self.tally, list[Message | NotFinite | None]()
        for piece, array in zip(pieces, values, strict=True):
            if array is None or isinstance(array, NotFinite):
                messages.append(array)
                continue
            sender = self._sender(piece, role, links.rank)
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

    def _agree(self, links: Collectives, pieces: Sequence[Piece], values: Sequence[Values], step: int) -> None:
        """Fit every codec that is due to the sum of all ranks' sketches; the schedule is the same on all of them."""
        due = [
            (piece, array, sender)
            for piece, array in zip(pieces, values, strict=True)
            if (sender := self._sender(piece, "up", links.rank)).due(step)
        ]
        if not due:
            return
        packed = [pack_sketch(sender.summary(array, step)) if _sendable(array) else b"" for _, array, sender in due]
        frame = join(packed)
        self.tally.shared_bits += 8 * sum(map(len, packed))
        self.tally.frame_bits += 8 * (len(frame) - sum(map(len, packed)))
        gathered = [split(frame, len(due)) for frame in links.gather(frame)]
        for (piece, _, sender), sketches in zip(due, zip(*gathered, strict=True), strict=True):
            known = [unpack_sketch(data) for data in sketches if data]
            if not known:
                continue
            total = known[0]
            for other in known[1:]:
                total = total + other
            sender.fit(total, step, agreed=True)
            for rank in range(links.size):
                self._receiver(piece, "up", rank).shared = sender.known

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
        """Tell memory how this rank's own messages arrived, and measure how far off they were."""
        tally = self.tally
        for piece, array, decoded in zip(pieces, values, arrived, strict=True):
            if not (_sendable(array) and _sendable(decoded)):
                continue
            self._senders[role, piece.name].settle(array, decoded)
            wide = vectors.widened(array)
            energy = float(wide @ wide)
            wide -= decoded
            error = float(wide @ wide)
            if role == "up":
                tally.worker_energy += energy
                tally.worker_squared_error += error
                tally.zeros += vectors.count_zeros(decoded)
            else:
                tally.down_energy += energy
                tally.down_squared_error += error


def _mean(piece: Piece, arrived: Sequence[Values]) -> Vector:
    """What the codec makes of what arrived from several ranks: NaN where one of them could not send."""
    decoded = [one for one in arrived if _sendable(one)]
    spoilt = any(isinstance(one, NotFinite) for one in arrived)
    if decoded and not spoilt:
        return vectors.aggregate(piece.codec, decoded)
    value = math.nan if spoilt else 0.0
    if piece.device is None:
        return np.full(piece.size, value, np.float32)
    return torch.full((piece.size,), value, device=piece.device)


def _place(like: Vector) -> torch.device | None:
    return None if isinstance(like, np.ndarray) else like.device


def _sendable(values: Values) -> TypeGuard[Vector]:
    return values is not None and not isinstance(values, NotFinite)
