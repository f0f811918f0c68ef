"""Choosing tensors and steps of a trace by what a command line says."""

from __future__ import annotations

import fnmatch
from typing import TYPE_CHECKING

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.trace.format import SECOND_MOMENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.trace.info import TensorInfo
    from gtrace.trace.reader import Trace


def choose_infos(
    trace: Trace,
    globs: Sequence[str] = (),
    *,
    kind: str | None = None,
    optimizer: int | None = None,
    rank: int | None = None,
) -> list[TensorInfo]:
    """Tensors of a trace by kind, optimizer, rank, and shell patterns on their names.

    None is any kind of gradient; second moments have to be asked for.

    Raises:
        UsageError: nothing is left, or a pattern matches nothing.
    """
    infos = [
        info
        for info in trace.tensors
        if (info.kind == kind if kind is not None else info.kind != SECOND_MOMENT)
        and optimizer in (None, info.optimizer)
        and rank in (None, info.rank)
    ]
    if not infos:
        # Says what there is instead, when nothing is left by the options.
        trace.scalars(kind=kind, optimizer=optimizer, rank=rank)
    names = [info.name for info in infos]
    # Of one optimizer the names need not tell it from others.
    own = "" if optimizer is None else f"opt{optimizer}/"
    matching: set[int] = set()
    for glob in globs:
        found = [k for k, name in enumerate(names) if fnmatch.filter({name, name.removeprefix(own)}, glob)]
        if not found:
            raise UsageError(f"--tensors: no tensor matches '{glob}'; {suggest(glob, names)}")
        matching.update(found)
    return [info for k, info in enumerate(infos) if not globs or k in matching]


def choose_steps(
    trace: Trace, infos: Sequence[TensorInfo], steps: Sequence[int] | None = None, most: int = 16
) -> frozenset[int]:
    """The steps asked for that are there; without any asked for, at most ``most``, spread over those recorded.

    The first and the last are among them. Steps are spread over the tensors together, so that all are seen at the
    same ones.

    Raises:
        UsageError: none of the steps asked for is there.
    """
    there = np.unique(np.concatenate([np.empty(0, np.int64), *(steps_of(trace, info) for info in infos)]))
    if steps is not None:
        chosen = frozenset(there.tolist()).intersection(steps)
        if not chosen:
            span = f"it has {there.size} steps from {there[0]} to {there[-1]}" if there.size else "it has no steps"
            raise UsageError(f"--steps: none of these steps is in the trace; {span}")
        return chosen
    places = np.unique(np.linspace(0, max(there.size - 1, 0), min(most, there.size)).round().astype(np.int64))
    return frozenset(there[places].tolist())


def steps_of(trace: Trace, info: TensorInfo) -> NDArray[np.int64]:
    """Steps at which a tensor is present, int64[n], rising."""
    return trace.steps(info.name, kind=info.kind, optimizer=info.optimizer, rank=info.rank)
