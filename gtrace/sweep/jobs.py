"""What a sweep consists of: jobs, the settings that they share, and blocks of results. All of it can be pickled."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

from gtrace.fitting.pooling import WINDOW, poolable
from gtrace.sweep.store import Row, RowTable

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from gtrace.codecs import Codec, TensorSums
    from gtrace.codecs.assignment import Coding
    from gtrace.trace.rows import BlockSample


Refit = Literal["pooled", "previous", "each", "once"]
Nonfinite = Literal["skip", "zero", "error"]
#: the tensors among which a codec allocates; None for all of the sweep
Among: TypeAlias = "tuple[str, ...] | None"
#: the columns that identify a codec
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
        steps: their indices, the latest last.
        pooled: fit on a decayed mean of these steps (even of one); otherwise on the one step itself.
    """

    steps: tuple[int, ...]
    pooled: bool = False

    def label(self, index: int, steps: Sequence[int]) -> str:
        """The name of this fit in the rows of step ``index``."""
        if self.pooled:
            return f"pooled {len(self.steps)} step{'s' * (len(self.steps) > 1)}"
        (place,) = self.steps
        if place == index:
            return "itself"
        return "previous" if place == index - 1 else f"step {steps[place]}"


@dataclass(frozen=True, slots=True)
class Totals:
    """What rows need to know of a tensor besides its values.

    Attributes:
        size: number of values.
        energy: ||g||^2 over the finite ones.
        mean_abs: mean |g|, non-finite ones taken as zero.
        sums: what parts of it need to know of the whole, if its values were read.
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
        sketched: the trace stores sketches and no values, so only expectations are possible.
        chunked: values are read chunk by chunk and never held whole.
        size: its largest number of elements at any step.
        sample: the stored blocks; None if all values are stored.
        shape: the gradient's shape in training; None if it is not one parameter, or not all of it is stored.
        windows: first and last index of each window, see :func:`windows_of`.
        final: keep the data for figures of levels at its last wanted step, which is then the last one that the sweep
            wants of the tensor, not only of this part.
        among: for codecs that allocate, the tensors that they allocate among.
        names: spec -> the names under which its rows are written, if they are not only the codec's own.
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
    """Results of a batch of tensors at one step, in rows and in tables of rows: the unit that is committed.

    ``values`` is the work behind it: elements times codecs, and :data:`OVERHEAD` elements for what any tensor takes.
    ``cells`` are the tensors.
    """

    rows: list[Row]
    times: list[Timing]
    details: list[Detail] = field(default_factory=list)
    tables: list[RowTable] = field(default_factory=list)
    values: int = 0
    cells: int = 1

    def named(self, names: Mapping[str, tuple[Name, ...]]) -> Block:
        """The same rows under all wanted names: one encoding serves a codec and the plans that use it."""
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
            columns = table.chosen([place for place, _ in whose]).columns
            tables.append(RowTable([identity for _, identity in whose], columns))
        return replace(self, rows=rows, times=times, tables=tables)


@dataclass(frozen=True)
class Settings:
    """What a row depends on besides the data and the codec.

    Attributes:
        seed: seed of the encodings.
        refit: the steps that fit a codec, see :meth:`source`.
        nonfinite: what to do with a tensor that has NaN or infinite gradients.
        optimal: compute the least error that any levels of the same number can have.
    """

    seed: int = 0
    refit: Refit | tuple[int, ...] = "pooled"
    nonfinite: Nonfinite = "skip"
    optimal: bool = False

    def source(self, codec: Codec, index: int, steps: Sequence[int]) -> Fitting:
        """The steps that fit a codec for step ``index``; the only place that decides this.

        ``pooled``: a decayed mean of the captured steps before, at most ``WINDOW`` of them, whatever gaps lie between
        them; see :mod:`gtrace.fitting.pooling`. Scales and thresholds, which are fitted to magnitudes without a norm,
        use the step before alone. ``previous``: the preceding captured step alone. Fitting on the very tensor that is
        then encoded would flatter every adaptive codec; only the first step has no other. ``each``: the step itself,
        also for a codec that fits every tensor to itself. ``once``: the first step. A list of steps: the last listed
        step so far (the first step if there is none).
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


#: the first words of the warning about left-out codecs
LEFT_OUT = "left out: "
_MOST_NAMED = 4


def start_of(steps: Sequence[int], index: int) -> int:
    """Index of the first step of the burst that the step at ``index`` belongs to; ``steps`` ascend."""
    while index > 0 and steps[index] - steps[index - 1] == 1:
        index -= 1
    return index


def any_burst(tensors: Iterable[Sequence[int]], wanted: Container[int]) -> bool:
    """Whether any wanted step has a captured neighbor, one step before or after it.

    Args:
        tensors: the captured steps of each tensor, ascending.
        wanted: the steps that the sweep wants.
    """
    return any(
        after - before == 1 and (before in wanted or after in wanted)
        for steps in tensors
        for before, after in pairwise(steps)
    )


def gaps_line(codecs: Sequence[Coding]) -> str:
    """One line about stateful codecs on a trace without consecutive steps, and what to capture instead."""
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

    Windows start at a burst's first captured step and then every ten steps. An unwanted step ends a window.

    Args:
        steps: the captured steps of a tensor, ascending.
        wanted: the steps that the sweep wants.

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
