"""Bytes between the ranks of a process group, and how many they were."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray


class Collectives:
    """Blocking exchanges of byte strings whose lengths differ from rank to rank, and means of numbers.

    Byte strings go through ``all_to_all_single``, which, unlike ``all_gather``, takes a length for every pair of ranks,
    so that nothing has to be padded: what is counted is what travels.

    Args:
        group: the process group; None for the default one.

    Attributes:
        sent: bytes that this rank gave to collectives for other ranks, the eight that tell a length included.
        seconds: wall time inside of collectives, waiting for others included.
        device: where the backend wants tensors.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.sent = 0
        self.seconds = 0.0
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")

    def scatter(self, parts: Sequence[bytes]) -> list[bytes]:
        """Send ``parts[k]`` to rank k; returns what every rank sent to this one, by rank."""
        start = time.perf_counter()
        lengths = torch.tensor([len(part) for part in parts], dtype=torch.int64, device=self.device)
        theirs = torch.empty_like(lengths)
        dist.all_to_all_single(theirs, lengths, group=self._group)
        outgoing, incoming = lengths.tolist(), theirs.tolist()
        # bytearray and not bytes: torch warns of memory that it may not write to.
        joined = bytearray().join(parts)
        data = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
        arrived = torch.empty(sum(incoming), dtype=torch.uint8, device=self.device)
        dist.all_to_all_single(arrived, data.to(self.device), incoming, outgoing, group=self._group)
        self.sent += sum(outgoing) - outgoing[self.rank] + 8 * (self.size - 1)
        self.seconds += time.perf_counter() - start
        data = arrived.cpu()
        return [part.numpy().tobytes() for part in torch.split(data, incoming)]

    def gather(self, part: bytes) -> list[bytes]:
        """Send the same bytes to all; returns what every rank sent, by rank."""
        return self.scatter([part] * self.size)

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
