"""Whether the processes of a run saw the same gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from gtrace.trace.reader import Trace


class Agreement(NamedTuple):
    """Gradients of the same tensor at the same step on several ranks, told apart by checksums; none is read.

    Attributes:
        compared: gradients that at least two ranks have.
        equal: those of them that are the same, bit for bit, on all ranks that have them.
    """

    compared: int
    equal: int


def agreement(trace: Trace, stage: str) -> Agreement:
    """Compare the weight gradients of all ranks.

    Args:
        trace: an open trace.
        stage: compare those that were recorded at this stage, ``local`` or ``reduced``.
    """
    places: dict[tuple[int, str], list[int]] = {}
    for info in trace.tensors:
        if info.kind == "weight" and info.stage == stage:
            places.setdefault((info.optimizer, info.name), []).append(info.rank)
    compared = equal = 0
    for (optimizer, name), ranks in places.items():
        told = [trace.statistics(name, kind="weight", optimizer=optimizer, rank=rank) for rank in ranks]
        steps = np.concatenate([numbers["step"] for numbers in told])
        sums = np.concatenate([numbers["crc32c"] for numbers in told])
        _, place, count = np.unique(steps, return_inverse=True, return_counts=True)
        least, most = np.full(count.size, np.iinfo(np.uint32).max, np.uint32), np.zeros(count.size, np.uint32)
        np.minimum.at(least, place, sums)
        np.maximum.at(most, place, sums)
        several = count > 1
        compared += int(several.sum())
        equal += int((several & (least == most)).sum())
    return Agreement(compared, equal)
