"""Codecs with fixed levels at one step of a tensor: judged together, their rows as one table."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs.level_sets import LevelSets, has_fixed_levels
from gtrace.sweep.jobs import Fitting
from gtrace.sweep.rows import expectation_table, identity
from gtrace.sweep.schema import EXPECTATION

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.codecs.level_sets import Judged
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.jobs import Wanted
    from gtrace.sweep.store import Row, RowTable
    from gtrace.types import SummarySpec

#: what the table of times says instead of a codec where many share the time
MANY = "*"


class Group(NamedTuple):
    """Codecs that want the same sketch, and the columns that say which they are."""

    sets: LevelSets
    identities: tuple[Row, ...]


@lru_cache(maxsize=64)
def _group(codecs: tuple[Codec, ...]) -> Group:
    return Group(LevelSets(codecs), tuple(map(identity, codecs)))


class Schedule(NamedTuple):
    """Which steps have fitted what is sent at a step.

    Attributes:
        source: what fitted it.
        before: what fitted what was sent a step earlier; None at the first step.
        label: what the rows call the source.
    """

    source: Fitting
    before: Fitting | None
    label: str


class Together:
    """The expectations of a tensor's codecs with fixed levels, step by step.

    Args:
        summary: the sketch of what fits a codec: of a step, or of the pool of several.
    """

    def __init__(self, summary: Callable[[Fitting, SummarySpec], MomentSketch]) -> None:
        self._summary = summary
        self._splits: dict[int, tuple[list[Group], Wanted]] = {}
        self._judged: dict[tuple[LevelSets, Fitting], Judged] = {}

    def split(self, wanted: Wanted) -> tuple[list[Group], Wanted]:
        """The expectations that are worked out together, and what is left to do."""
        # The steps of a job mostly want the same, and then name the same object, which the job keeps.
        found = self._splits.get(id(wanted))
        if found is None:
            groups: dict[SummarySpec | None, list[Codec]] = {}
            rest = []
            for codec, draws in wanted:
                if EXPECTATION in draws and has_fixed_levels(codec):
                    groups.setdefault(codec.needs, []).append(codec)
                    draws = tuple(draw for draw in draws if draw != EXPECTATION)
                if draws:
                    rest.append((codec, draws))
            found = self._splits[id(wanted)] = ([_group(tuple(each)) for each in groups.values()], tuple(rest))
        return found

    def table(
        self,
        group: Group,
        index: int,
        schedule: Schedule,
        common: Row,
        optimum: Callable[[Codec, int], float | None] | None,
        dtype_bits: int,
        weighed: tuple[MomentSketch, float] | None = None,
    ) -> RowTable:
        """The rows of a group.

        Args:
            group: of :meth:`split`.
            index: of the step.
            schedule: of the fits.
            common: the columns that all rows share.
            optimum: the least error of as many levels as a codec has, where that is wanted.
            dtype_bits: bits per element of the run's own dtype.
            weighed: the weighted sketch and its energy, where second moments are known.
        """
        sets, size = group.sets, common["n"]
        codes = sets.fit(self._judge(sets, schedule.source), size)
        sent = codes.sent
        if schedule.before is not None:
            if schedule.before == schedule.source:
                sent = np.zeros_like(sent)
            else:
                before = sets.fit(self._judge(sets, schedule.before), size)
                sent = np.where(sets.differ(codes, before), sent, 0)
        expected = sets.expect(self._judge(sets, Fitting((index,))), codes)
        best = None if optimum is None else list(map(optimum, sets.codecs, sets.sizes.tolist()))
        fitted_on = [schedule.label if adopted else "-" for adopted in codes.adopted.tolist()]
        update = None
        if weighed is not None:
            update = sets.weighted_error(weighed[0]), weighed[1]
        return expectation_table(common, group.identities, expected, sent, fitted_on, best, dtype_bits, update)

    def errors(self, group: Group, index: int, size: int) -> NDArray[np.float64]:
        """Expected squared errors of a group at a step, float64[codecs]."""
        judged = self._judge(group.sets, Fitting((index,)))
        return group.sets.expect(judged, group.sets.fit(judged, size)).squared_error

    def forget(self, keep: set[Fitting]) -> None:
        """Drop what is known of all steps and pools but these."""
        self._judged = {key: judged for key, judged in self._judged.items() if key[1] in keep}

    def _judge(self, sets: LevelSets, source: Fitting) -> Judged:
        found = self._judged.get((sets, source))
        if found is None:
            found = self._judged[sets, source] = sets.judge(self._summary(source, sets.needs))
        return found
