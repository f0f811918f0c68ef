"""Options between the options: finer grids for the few tensors whose coarse ones keep a plan from its lower bound.

A plan in whole codecs misses the bound by what is left of the budget where no tensor has a step that small. The
tensors that hold most of the bits or of the error have the largest steps, so these get more grids and bucket sizes
around the ones that were chosen.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from gtrace.codecs.spec import codec as build_codec

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.planning.curves import Curves

#: gap above which finer options are worth their time
WORTH_REFINING = 0.005
#: how often the new choice is looked at again
ROUNDS = 4
#: tensors, or groups, that get them, and grids of each
_MOST_UNITS, _MOST_GRIDS = 4, 12
#: how far from the chosen grid
_SPAN = 1.3
_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, None)


def finer(units: Curves, options: NDArray[np.int64]) -> dict[tuple[str, ...], list[Codec]]:
    """Tensors -> codecs to measure on them.

    Args:
        units: tensors or groups that were planned.
        options: int64[T], what was chosen.
    """
    rows = np.arange(len(options))
    spent, lost = (values[rows, options] for values in units.means())
    share = spent / spent.sum() + lost / max(lost.sum(), np.finfo(np.float64).tiny)
    found = {}
    for u in np.argsort(-share, kind="stable")[:_MOST_UNITS].tolist():
        near = [one for one in _around(build_codec(units.codecs[options[u]])) if not _known(units, u, str(one))]
        if near:
            found[units.members[u]] = near
    return found


def _known(units: Curves, unit: int, spec: str) -> bool:
    return spec in units.codecs and bool(np.isfinite(units.error[unit, :, units.codecs.index(spec)]).any())


def _around(chosen: Codec) -> list[Codec]:
    """Uniform grids around a codec of one; none for others."""
    given = chosen.parameters
    if not {"bits", "steps", "zero", "bucket_size"} <= set(given) or not given["zero"]:
        return []
    steps = given["steps"] or (1 << given["bits"] - 1) - 1
    counts = np.unique(np.geomspace(max(1, steps / _SPAN), steps * _SPAN + 1, _MOST_GRIDS).round().astype(int))
    return [
        # The settings of the codec itself stay: norm, coder, tail.
        dataclasses.replace(chosen, bits=max(2, count.bit_length() + 1), steps=_named(count), bucket_size=bucket)  # type: ignore[call-arg]
        for count in counts.tolist()
        for bucket in _BUCKETS
        if count.bit_length() < 15
    ]


def _named(count: int) -> int | None:
    """A grid's steps as its codec writes them: as many as the bits can tell apart have no name."""
    return None if count + 1 == 1 << count.bit_length() else count
