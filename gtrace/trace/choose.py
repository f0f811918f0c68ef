"""Chooses tensors and steps of a trace by command-line options, and compares the processes of a run."""

from __future__ import annotations

import contextlib
import fnmatch
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.errors import TraceError, UsageError, suggest
from gtrace.trace.files import HDF5_SUFFIXES, is_gtrace_zarr
from gtrace.trace.format import SECOND_MOMENT

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from gtrace.trace.reader import TensorInfo, Trace


def newest_trace(folder: Path) -> Path:
    """The trace of a folder that was written last, perhaps one that is being written; TraceError if there is none."""
    files = [path for suffix in HDF5_SUFFIXES for path in folder.glob(f"*{suffix}")]
    traces = [path for path in [*files, *folder.glob("*.zarr")] if path.is_file() or is_gtrace_zarr(path)]
    if not traces:
        raise TraceError(f"no trace in {folder.absolute()}: `gtrace capture SCRIPT` makes one, or name a trace")
    return max(traces, key=_written)


def _written(path: Path) -> float:
    """When a trace was last changed: its rows are in files further down."""
    changed = [path.stat().st_mtime]
    for place in path.glob("rank*/*/step/*"):
        with contextlib.suppress(FileNotFoundError):
            changed.append(place.stat().st_mtime)
    return max(changed)


def choose_infos(
    trace: Trace,
    globs: Sequence[str] = (),
    *,
    kind: str | None = None,
    optimizer: int | None = None,
    rank: int | None = None,
) -> list[TensorInfo]:
    """Tensors of a trace by kind, optimizer, rank, and shell patterns on their names.

    None means any kind of gradient; second moments must be named.

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
        # If the options leave nothing, this names what the trace holds.
        trace.scalars(kind=kind, optimizer=optimizer, rank=rank)
    # With one optimizer, names need no number to be unique.
    own = "" if optimizer is None else f"opt{optimizer}/"
    chosen = matching([info.name for info in infos], globs, own)
    return [info for info in infos if not globs or info.name in chosen]


def matching(names: Sequence[str], globs: Sequence[str], own: str = "", option: str = "--tensors") -> set[str]:
    """The names that fit one of the globs, with ``own`` in front or without. A name fits itself, as ``w[0]`` does.

    Raises:
        UsageError: no name fits one of the globs.
    """
    chosen: set[str] = set()
    for glob in globs:
        both = ((name, {name, name.removeprefix(own)}) for name in names)
        found = {name for name, spelled in both if glob in spelled or fnmatch.filter(spelled, glob)}
        if not found:
            raise UsageError(f"{option}: no tensor matches '{glob}'; {suggest(glob, names)}")
        chosen |= found
    return chosen


def choose_steps(
    trace: Trace, infos: Sequence[TensorInfo], steps: Sequence[int] | None = None, most: int = 16
) -> frozenset[int]:
    """The given steps that are there; if none are given, at most ``most``, spread over the recorded ones.

    The first and the last are among them. All tensors share the same steps.

    Raises:
        UsageError: none of the given steps is there.
        TraceError: the trace has no steps at all.
    """
    chosen = wanted_steps(trace, frozenset[int]().union(*(steps_of(trace, info).tolist() for info in infos)), steps)
    if steps is not None:
        return chosen
    there = sorted(chosen)
    places = np.linspace(0, len(there) - 1, min(most, len(there))).round().astype(np.int64).tolist()
    return frozenset(there[place] for place in places)


def wanted_steps(trace: Trace, there: frozenset[int], steps: Sequence[int] | None) -> frozenset[int]:
    """Those of the given steps that are there; all that are there if none are given. Errors as :func:`choose_steps`."""
    if not there:
        raise TraceError(f"{trace.path}: the trace is empty: no gradients were captured into it.")
    chosen = there if steps is None else there.intersection(steps)
    if not chosen:
        span = f"it has {len(there)} step{'s' * (len(there) > 1)} from {min(there)} to {max(there)}"
        raise UsageError(f"--steps: none of these steps is in the trace; {span}")
    return chosen


def steps_of(trace: Trace, info: TensorInfo) -> NDArray[np.int64]:
    """Steps at which a tensor is present, int64[n], ascending."""
    return trace.steps(info.name, **info.stream._asdict())


class Agreement(NamedTuple):
    """Gradients of the same tensor and step on several ranks, compared by checksum; no gradient is read.

    Attributes:
        compared: gradients that at least two ranks have.
        equal: those that are the same, bit for bit, on all ranks that have them.
        step: the first step with a difference, None if all are the same.
        tensor: a tensor that differs there.
    """

    compared: int
    equal: int
    step: int | None = None
    tensor: str | None = None


def agreement(trace: Trace, stage: str) -> Agreement:
    """Compare the weight gradients of all ranks that were recorded at a stage, ``local`` or ``reduced``.

    Different parts of a sharded tensor are not compared, and neither are a process and its replacement after a
    restart.
    """
    places: dict[tuple[int, str, tuple[str, ...], str], list[int]] = {}
    for info in trace.tensors:
        if info.kind == "weight" and info.stage == stage:
            key = info.optimizer, info.name, part_of(info), str(info.attrs.get("restart"))
            places.setdefault(key, []).append(info.rank)
    compared = equal = 0
    first: tuple[int, str] | None = None
    for (optimizer, name, _, _), ranks in places.items():
        tables = [trace.statistics(name, kind="weight", optimizer=optimizer, rank=rank) for rank in ranks]
        steps = np.concatenate([numbers["step"] for numbers in tables])
        sums = np.concatenate([numbers["crc32c"] for numbers in tables])
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
    """The part of a sharded tensor that a rank holds: its positions along mesh dimensions that are not replicas."""
    placements, place = info.attrs.get("placements"), info.attrs.get("place")
    if not isinstance(placements, (list, tuple)) or not isinstance(place, (list, tuple)):
        return ()
    return tuple(f"{what} {where}" for what, where in zip(placements, place, strict=False) if what != "Replicate()")
