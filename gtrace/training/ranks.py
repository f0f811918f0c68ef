"""What one rank sends and receives: frames of messages, exchanges as generators, and the codecs of its tensors.

A frame of k messages is k pairs of little-endian uint32, then the bytes that they count: length of the shared bytes
plus one (0 if none travel), and length of the payload (0 if there is no message, 2^32 - 1 if the values are not finite
and were not encoded).

An exchange of one rank is a generator that yields what it sends and receives what arrives: a list with bytes for each
rank, which is answered by those that every rank sent here; or float32[n], which is answered by the mean over ranks.
Real and simulated ranks run the same ones, all ranks with the same tensors in the same order, and the result has the
same bytes on all.
"""

from __future__ import annotations

import functools
import math
import operator
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gtrace.codecs import codec as build_codec
from gtrace.codecs.link import LinkOptions, Message, Receiver, Sender, allocate, sharing
from gtrace.coding import ENVELOPE_BYTES
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError
from gtrace.training import vectors
from gtrace.training.exchange import Tally

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import CodecTable
    from gtrace.sketch import MomentSketch
    from gtrace.training.vectors import Vector
    from gtrace.types import Role

    #: float32[n]; a mark for values that are not finite; None for nothing to send
    Values: TypeAlias = "Vector | NotFinite | None"

T = TypeVar("T")
Exchanging: TypeAlias = Generator["list[bytes] | NDArray[np.float32]", Any, T]


class SimulatedRank(NamedTuple):
    """One of several ranks of one process."""

    rank: int
    size: int


def lockstep(exchanges: Sequence[Exchanging[T]]) -> tuple[list[T], NDArray[np.int64]]:
    """Run the exchanges of all ranks of one process side by side; all yield the same kinds in the same order.

    Returns:
        the result of each, and int64[ranks, ranks], the bytes that each rank (row) sent to each. A mean counts like a
        ring's: 2 (M - 1) / M of the values go to the next rank.
    """
    ranks = len(exchanges)
    results: dict[int, T] = {}
    sent = np.zeros((ranks, ranks), np.int64)
    answers: list[Any] = [None] * ranks
    while len(results) < ranks:
        asked: list[Any] = []
        for rank, exchange in enumerate(exchanges):
            try:
                asked.append(exchange.send(answers[rank]))
            except StopIteration as end:
                results[rank] = end.value
        if not asked:
            continue
        if isinstance(asked[0], np.ndarray):
            mean = np.mean(asked, axis=0, dtype=np.float64).astype(np.float32)
            answers = [mean] * ranks
            for rank in range(ranks):
                sent[rank, (rank + 1) % ranks] += 2 * (ranks - 1) * mean.nbytes // ranks
        else:
            sent += np.array([[len(part) for part in parts] for parts in asked])
            answers = [list(arrived) for arrived in zip(*asked, strict=True)]
    np.fill_diagonal(sent, 0)
    return [results[rank] for rank in range(ranks)], sent


#: bytes of a frame for each message
HEADER_BYTES = 8
_NOT_FINITE = 2**32 - 1


class NotFinite:
    """Marks a gradient with NaN or infinity, instead of a message: the result must be NaN too."""


NOT_FINITE = NotFinite()


def pack(messages: Sequence[Message | NotFinite | None]) -> bytes:
    """The frame of some messages; None for a missing one."""
    headers = np.zeros((len(messages), 2), "<u4")
    bodies = []
    for row, message in enumerate(messages):
        if isinstance(message, NotFinite):
            headers[row, 1] = _NOT_FINITE
        elif message is not None:
            shared = message.shared
            if max(len(message.payload), 0 if shared is None else len(shared) + 1) >= _NOT_FINITE:
                raise PayloadError("frame: a message of 4 GiB or more does not fit; use a codec for smaller tensors")
            headers[row] = 0 if shared is None else len(shared) + 1, len(message.payload)
            bodies += [shared or b"", message.payload]
    return headers.tobytes() + b"".join(bodies)


def unpack(frame: bytes, count: int) -> list[Message | NotFinite | None]:
    """Undo :func:`pack` for a frame of ``count`` messages."""
    if len(frame) < HEADER_BYTES * count:
        raise PayloadError(
            f"frame: {len(frame)} bytes are too few for {count} messages; the ranks differ in their model"
        )
    headers = np.frombuffer(frame, "<u4", 2 * count).reshape(count, 2).astype(np.int64)
    place = HEADER_BYTES * count
    found: list[Message | NotFinite | None] = []
    for shared_length, payload_length in headers.tolist():
        if payload_length in (0, _NOT_FINITE):
            found.append(NOT_FINITE if payload_length else None)
            continue
        shared = None
        if shared_length:
            shared = frame[place : place + shared_length - 1]
            place += shared_length - 1
        found.append(Message(frame[place : place + payload_length], shared))
        place += payload_length
    if place != len(frame):
        raise PayloadError(
            f"frame: {len(frame)} bytes where its headers announce {place}; the ranks differ in their model"
        )
    return found


def join(parts: Sequence[bytes]) -> bytes:
    """Some byte strings as one: their lengths as little-endian uint32, then the strings."""
    return np.array([len(part) for part in parts], "<u4").tobytes() + b"".join(parts)


def split(joined: bytes, count: int) -> list[bytes]:
    """Undo :func:`join` for ``count`` strings."""
    if len(joined) < 4 * count:
        raise PayloadError(f"frame: {len(joined)} bytes are too few for {count} parts; the ranks differ in their model")
    borders = np.concatenate([[0], np.cumsum(np.frombuffer(joined, "<u4", count).astype(np.int64))]) + 4 * count
    if borders[-1] != len(joined):
        raise PayloadError(f"frame: {len(joined)} bytes where its lengths announce {borders[-1]}")
    return [joined[start:stop] for start, stop in pairwise(borders.tolist())]


class Collectives:
    """Blocking exchanges of byte strings of different lengths, and means of numbers.

    Byte strings go through ``all_to_all_single``, which, unlike ``all_gather``, takes a length for every pair of ranks:
    there is no padding, so the counted bytes are the sent ones.

    Attributes:
        sent: bytes that this rank gave to collectives for other ranks, including eight for each length.
        seconds: wall time inside collectives, waiting for others included.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.sent = 0
        self.seconds = 0.0
        self._group = group

    # Queried at the first exchange: a program may create its process group late.
    @cached_property
    def rank(self) -> int:
        """Number of this rank."""
        return dist.get_rank(self._group)

    @cached_property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self._group)

    @cached_property
    def device(self) -> torch.device:
        """The device on which the backend needs tensors."""
        return torch.device("cuda" if dist.get_backend(self._group) == "nccl" else "cpu")

    def __reduce__(self) -> tuple[type[Collectives], tuple[()]]:
        """For pickle: a process group belongs to one process, so the copy uses the default one."""
        return Collectives, ()

    def scatter(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[k]`` to rank k; returns the bytes from every rank, by rank."""
        start = time.perf_counter()
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(lengths)
        dist.all_to_all_single(theirs, lengths, group=self._group)
        outgoing, incoming = lengths.tolist(), theirs.tolist()
        # bytearray instead of bytes: torch warns about read-only memory.
        joined = bytearray().join(parts)
        data = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        arrived = torch.empty(sum(incoming), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(arrived, data.to(self.device), incoming, outgoing, group=self._group)
        self.sent += sum(outgoing) - outgoing[self.rank] + 8 * (self.size - 1)
        self.seconds += time.perf_counter() - start
        data = arrived.cpu()
        return [part.numpy().tobytes() for part in torch.split(data, incoming)]

    def average(self, values: NDArray[np.float32]) -> NDArray[np.float32]:
        """The mean over ranks of float32[n] by an all-reduce, the same bytes on all; counted as sent once."""
        total, seconds = self.mean(torch.from_numpy(values).to(self.device))
        self.sent += values.nbytes if self.size > 1 else 0
        self.seconds += seconds
        return total.cpu().numpy()

    def mean(self, values: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The mean over ranks by an all-reduce in the tensor's own type, and its wall time; not counted as sent."""
        start = time.perf_counter()
        total = values / self.size
        dist.all_reduce(total, group=self._group)
        return total, time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor that one rank, the ``owner``, sums up; or all of it, under the tensor's own name.

    Attributes:
        device: device on which it is encoded and decoded; None for the host.
        shape: the parameter's shape, if the piece is all of it and the shape is known.
        start: first element.
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
        """For each tensor what every rank has: 1 for values to send, 2 for some that are not finite, 0 for nothing."""
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
        """This rank's messages, fitted first if the schedule says so; averages that all send on count on arrival."""
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
        each = ([unpack_sketch(data) for data in parts if data] for parts in zip(*gathered, strict=True))
        return [functools.reduce(operator.add, known) if known else None for known in each]

    def decode(
        self, pieces: Sequence[Piece], messages: Sequence[Message | NotFinite | None], role: Role, rank: int
    ) -> list[Values]:
        """One rank's messages."""
        return [
            self._receiver(piece, role, rank).receive(sent, piece.device) if isinstance(sent, Message) else sent
            for piece, sent in zip(pieces, messages, strict=True)
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

        It is counted as that of ``role``, or as ``counted`` says: ``down`` for sums that go up once more.
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
