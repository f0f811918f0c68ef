"""What a sweep is made of: jobs, settings that they share, and blocks of what they give. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np

from gtrace.fitting.pooling import WINDOW, poolable
from gtrace.sweep.store import RowTable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from gtrace.codecs import Codec, TensorSums
    from gtrace.codecs.assignment import Coding
    from gtrace.sweep.store import Row
    from gtrace.trace.rows import BlockSample


Refit = Literal["pooled", "previous", "each", "once"]
Nonfinite = Literal["skip", "zero", "error"]
#: the tensors that a codec shares something out among; None for all of the sweep
Among: TypeAlias = "tuple[str, ...] | None"
#: the columns that say whose rows they are
Name: TypeAlias = "Mapping[str, Any]"
#: the codecs of a step with the draws that are missing
Wanted: TypeAlias = "tuple[tuple[Codec, tuple[int, ...]], ...]"
#: tensor, step, what, JSON-ready value
Detail = tuple[str, int, str, object]
#: tensor, step, codec, draw, stage, seconds
Timing = tuple[str, int, str, int, str, float]


class Fitting(NamedTuple):
    """The steps that fit a codec.

    Attributes:
        steps: their indices, the latest one last.
        pooled: whether their decayed mean does, even if it is one step; otherwise it is one step itself.
    """

    steps: tuple[int, ...]
    pooled: bool = False

    def label(self, index: int, steps: Sequence[int]) -> str:
        """What rows of step ``index`` call it."""
        if self.pooled:
            return f"pooled {len(self.steps)} step{'s' * (len(self.steps) > 1)}"
        (place,) = self.steps
        if place == index:
            return "itself"
        return "previous" if place == index - 1 else f"step {steps[place]}"


@dataclass(frozen=True, slots=True)
class Totals:
    """What rows need to know of a tensor without its values.

    Attributes:
        size: number of values.
        energy: ||g||^2 over the finite ones.
        mean_abs: mean |g|, non-finite ones taken as zero.
        sums: what parts of it have to know of the whole, where its values were looked at.
    """

    size: int
    energy: float
    mean_abs: float
    sums: TensorSums | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One tensor's share of a sweep.

    Attributes:
        tensor: its name.
        dtype_bits: bits per element of the run's own dtype.
        steps: ascending steps that the trace holds for it.
        wanted: (index into ``steps``, codecs with the draws that are missing), steps ascending.
        sketched: there are stored sketches and no values, so expectations alone.
        chunked: values are taken chunk by chunk and never held as a whole.
        size: the most elements that it has at a step.
        sample: the blocks of which there are values, None where that is all.
        shape: of the gradient in training, None if it is not one parameter's or not all of it is stored.
        windows: first and last index of each window, see :func:`windows_of`.
        final: its last wanted step is the last that the sweep asks of the tensor, and not only the last of a part.
        among: of its codecs that allocate.
        names: spec -> the names under which its rows are wanted, when these are not only the codec's own.
    """

    tensor: str
    dtype_bits: int
    steps: tuple[int, ...]
    wanted: tuple[tuple[int, tuple[tuple[Codec, tuple[int, ...]], ...]], ...]
    sketched: bool = False
    chunked: bool = False
    size: int = 0
    sample: BlockSample | None = None
    shape: tuple[int, ...] | None = None
    windows: tuple[tuple[int, int], ...] = ()
    final: bool = True
    among: Among = None
    names: Mapping[str, tuple[Name, ...]] = field(default_factory=dict, hash=False)

    def values(self, wanted: Wanted) -> int:
        """The work of one step, see :class:`Block`."""
        return (self.size + OVERHEAD) * len(wanted)


#: elements that take as long as what has to be done for each tensor at each step, whatever its size
OVERHEAD = 1 << 12


@dataclass(frozen=True, slots=True)
class Block:
    """What one tensor at one step gave, in rows and in tables of rows: the unit that is committed.

    ``values`` is the work behind it: elements times codecs, and :data:`OVERHEAD` elements for what any tensor takes.
    """

    rows: list[Row]
    times: list[Timing]
    warnings: list[str] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
    tables: list[RowTable] = field(default_factory=list)
    values: int = 0

    def named(self, names: Mapping[str, tuple[Name, ...]]) -> Block:
        """The same rows under all names that they are wanted under: one encoding serves a codec and its plans."""
        rows = [{**row, **name} for row in self.rows for name in names.get(row["codec"], ({},))]
        times = [
            (tensor, step, name.get("codec", codec), draw, stage, seconds)
            for tensor, step, codec, draw, stage, seconds in self.times
            for name in names.get(codec, ({},))
        ]
        tables = []
        for table in self.tables:
            whose = [
                (place, {**own, **name})
                for place, own in enumerate(table.identities)
                for name in names.get(own["codec"], ({},))
            ]
            places = [place for place, _ in whose]
            columns = {
                name: values[places] if isinstance(values, np.ndarray) else values
                for name, values in table.columns.items()
            }
            tables.append(RowTable([identity for _, identity in whose], columns))
        return replace(self, rows=rows, times=times, tables=tables)


@dataclass(frozen=True)
class Settings:
    """What a row depends on besides the data and the codec.

    Attributes:
        seed: of the encodings.
        refit: which steps' summaries fit a codec, see :meth:`source`.
        nonfinite: what happens to a tensor with NaN or infinite gradients.
        optimal: work out the least error that any levels of the same number could have.
    """

    seed: int = 0
    refit: Refit | tuple[int, ...] = "pooled"
    nonfinite: Nonfinite = "skip"
    optimal: bool = False

    def source(self, codec: Codec, index: int, steps: Sequence[int]) -> Fitting:
        """What fits a codec that encodes step ``index``; the only place that works this out.

        ``pooled``: a decayed mean of the captured steps before, ``WINDOW`` of them at most, whatever gaps lie between
        them; see :mod:`gtrace.fitting.pooling`. Scales and thresholds, which are fitted to magnitudes without a norm,
        follow the step before alone. ``previous``: the preceding captured step alone. Fitting on the tensor
        that is then encoded flatters every adaptive codec; the first step has only itself. ``each``: the step itself,
        also for a codec that fits every tensor to itself. ``once``: the first one. A list of steps: the last listed
        step so far (the first one if there is none).
        """
        if self.refit == "each" or codec.fits_itself:
            return Fitting((index,))
        if self.refit == "pooled" and index > 0 and poolable(codec.needs):
            return Fitting(tuple(range(max(0, index - WINDOW), index)), pooled=True)
        if self.refit in ("pooled", "previous"):
            return Fitting((max(0, index - 1),))
        if self.refit == "once":
            return Fitting((0,))
        due = [k for k, step in enumerate(steps[: index + 1]) if step in self.refit]
        return Fitting((due[-1] if due else 0,))


#: how the warning about codecs that were left out begins
LEFT_OUT = "left out: "
_MOST_NAMED = 4


def start_of(steps: Sequence[int], index: int) -> int:
    """Index of the first step of the burst that the step at ``index`` belongs to; steps rise."""
    while index > 0 and steps[index] - steps[index - 1] == 1:
        index -= 1
    return index


def any_burst(tensors: Iterable[Sequence[int]], wanted: Container[int]) -> bool:
    """Whether a wanted step of any tensor has a neighbour: the step before it, or after it, was captured too.

    Args:
        tensors: the captured steps of each, rising.
        wanted: the steps that are swept.
    """
    return any(
        after - before == 1 and (before in wanted or after in wanted)
        for steps in tensors
        for before, after in pairwise(steps)
    )


def gaps_line(codecs: Sequence[Coding]) -> str:
    """One line about codecs with memory on a trace without consecutive steps, and what to capture instead."""
    specs = [str(item) for item in codecs]
    more = f" and {len(specs) - _MOST_NAMED} more" if len(specs) > _MOST_NAMED else ""
    keep = "keeps" if len(specs) == 1 else "keep"
    return (
        f"{', '.join(specs[:_MOST_NAMED])}{more} {keep} memory from step to step, and no two of these steps are "
        "consecutive: capture bursts with `gtrace capture --steps 1000+50`, or leave out --steps, which records bursts"
    )


#: the most steps in a window
LENGTH = 10


def windows_of(steps: Sequence[int], wanted: Container[int]) -> tuple[tuple[int, int], ...]:
    """The indices of each window's first and last step.

    Windows start at a burst's first captured step and then every ten steps. A step that is not wanted cuts a window.

    Args:
        steps: the captured steps of a tensor, rising.
        wanted: the steps that are swept.

    >>> windows_of(range(13), range(13))
    ((0, 9), (10, 12))
    >>> windows_of((0, 1, 2, 3, 7, 8, 20), {0, 1, 3, 7, 8, 20})
    ((0, 1), (4, 5))
    """
    found: list[tuple[int, int]] = []
    start, first = 0, None
    for index, step in enumerate(steps):
        if index and step != steps[index - 1] + 1:
            start, first = index, None
        if (index - start) % LENGTH == 0 or step not in wanted:
            first = None
        if step in wanted:
            if first is None:
                first = index
            elif found and found[-1][0] == first:
                found[-1] = first, index
            else:
                found.append((first, index))
    return tuple(found)
