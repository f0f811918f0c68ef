"""Bytes between the ranks of a process group."""

from __future__ import annotations

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.training.frames import Exchanging

T = TypeVar("T")


class Collectives:
    """Blocking exchanges of byte strings of different lengths, and means of numbers.

    Byte strings go through ``all_to_all_single``, which, unlike ``all_gather``, takes a length for every pair of ranks:
    there is no padding, so the counted bytes are the sent ones.

    Args:
        group: the process group; None for the default one.

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

    def run(self, exchange: Exchanging[T]) -> T:
        """Run this rank's exchange; every rank calls this for the same one."""
        answer: Any = None
        while True:
            try:
                asked = exchange.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            answer = self.average(asked) if isinstance(asked, np.ndarray) else self.scatter(asked)

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
