"""Whether the processes of a run saw the same gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gtrace.trace.info import TensorInfo
    from gtrace.trace.reader import Trace


class Agreement(NamedTuple):
    """Gradients of the same tensor at the same step on several ranks, told apart by checksums; none is read.

    Attributes:
        compared: gradients that at least two ranks have.
        equal: those of them that are the same, bit for bit, on all ranks that have them.
        step: the first step at which some differ, None where all are the same.
        tensor: name of a tensor whose gradients differ there.
    """

    compared: int
    equal: int
    step: int | None = None
    tensor: str | None = None


def agreement(trace: Trace, stage: str) -> Agreement:
    """Compare the weight gradients of all ranks.

    Different parts of a sharded tensor are not compared, and neither are processes with those that took their places
    when they were started again.

    Args:
        trace: an open trace.
        stage: compare those that were recorded at this stage, ``local`` or ``reduced``.
    """
    places: dict[tuple[int, str, tuple[str, ...], str], list[int]] = {}
    for info in trace.tensors:
        if info.kind == "weight" and info.stage == stage:
            key = info.optimizer, info.name, part_of(info), str(info.attrs.get("restart"))
            places.setdefault(key, []).append(info.rank)
    compared = equal = 0
    first: tuple[int, str] | None = None
    for (optimizer, name, _, _), ranks in places.items():
        told = [trace.statistics(name, kind="weight", optimizer=optimizer, rank=rank) for rank in ranks]
        steps = np.concatenate([numbers["step"] for numbers in told])
        sums = np.concatenate([numbers["crc32c"] for numbers in told])
        numbers, place, count = np.unique(steps, return_inverse=True, return_counts=True)
        least, most = np.full(count.size, np.iinfo(np.uint32).max, np.uint32), np.zeros(count.size, np.uint32)
        np.minimum.at(least, place, sums)
        np.maximum.at(most, place, sums)
        several, same = count > 1, least == most
        compared += int(several.sum())
        equal += int((several & same).sum())
        other = numbers[several & ~same]
        if other.size and (first is None or int(other[0]) < first[0]):
            first = int(other[0]), name
    return Agreement(compared, equal, *(first or ()))


def part_of(info: TensorInfo) -> tuple[str, ...]:
    """Which part of a sharded tensor a rank holds: its places along the dimensions of the mesh that are no copies."""
    placements, place = info.attrs.get("placements"), info.attrs.get("place")
    if not isinstance(placements, (list, tuple)) or not isinstance(place, (list, tuple)):
        return ()
    return tuple(f"{what} {where}" for what, where in zip(placements, place, strict=False) if what != "Replicate()")
