"""Several messages as one byte string, and exchanges as generators, which real and simulated ranks run.

A frame of k messages is k pairs of little-endian uint32, then the bytes that they count: length of the shared bytes
plus one (0 if none travel), and length of the payload (0 if there is no message, 2^32 - 1 if the values are not finite
and were not encoded).

An exchange of one rank is a generator that yields what it sends and receives what arrives: a list with bytes for each
rank, which is answered by those that every rank sent here; or float32[n], which is answered by the mean over ranks.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from gtrace.codecs.link import Message
from gtrace.errors import PayloadError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

T = TypeVar("T")
Exchanging: TypeAlias = Generator["list[bytes] | NDArray[np.float32]", Any, T]


class SimulatedRank(NamedTuple):
    """One of several ranks of one process."""

    rank: int
    size: int


def lockstep(exchanges: Sequence[Exchanging[T]]) -> tuple[list[T], NDArray[np.int64]]:
    """Run the exchanges of all ranks of one process side by side.

    Args:
        exchanges: one for each rank; all yield the same kinds in the same order.

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
    """The frame of some messages; None for a missing one.

    Raises:
        PayloadError: a message of 4 GiB or more.
    """
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
    """Undo :func:`pack` for a frame of ``count`` messages.

    Raises:
        PayloadError: a frame with another number of messages, or a damaged one.
    """
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
    """Undo :func:`join` for ``count`` strings.

    Raises:
        PayloadError: other lengths than announced.
    """
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
        mean: NDArray[np.float32] = total.cpu().numpy()
        return mean

    def mean(self, values: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The mean over ranks by an all-reduce in the tensor's own type, and its wall time; not counted as sent."""
        start = time.perf_counter()
        total = values / self.size
        dist.all_reduce(total, group=self._group)
        return total, time.perf_counter() - start
