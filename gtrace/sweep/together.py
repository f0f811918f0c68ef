"""Codecs with fixed levels at one step of a tensor: judged together, their rows as one table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs.level_sets import LevelSets
from gtrace.sweep.rows import expectation_table, identity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.codecs import LevelCodec
    from gtrace.codecs.level_sets import Judged
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.results import Table
    from gtrace.sweep.rows import Row
    from gtrace.types import SummarySpec

#: what the table of times says instead of a codec where many share the time
MANY = "*"


class _Group(NamedTuple):
    sets: LevelSets
    identities: list[Row]


class Schedule(NamedTuple):
    """Which steps have fitted what is sent at a step.

    Attributes:
        source: index of the step that fitted it.
        before: index of the one that fitted what was sent a step earlier; None at the first step.
        label: what the rows call the source.
    """

    source: int
    before: int | None
    label: str


class Together:
    """The expectations of a tensor's codecs with fixed levels, step by step.

    Args:
        summary: the sketch of a step, by index.
    """

    def __init__(self, summary: Callable[[int, SummarySpec], MomentSketch]) -> None:
        self._summary = summary
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._judged: dict[tuple[tuple[int, ...], int], Judged] = {}

    def table(
        self,
        codecs: Sequence[LevelCodec],
        index: int,
        schedule: Schedule,
        common: Row,
        optimum: Callable[[LevelCodec, int], float | None] | None,
        dtype_bits: int,
    ) -> Table:
        """Rows of codecs that want the same sketch.

        Args:
            codecs: at least one.
            index: of the step.
            schedule: of the fits.
            common: the columns that all rows share.
            optimum: the least error of as many levels as a codec has, where that is wanted.
            dtype_bits: bits per element of the run's own dtype.
        """
        # The codecs of a job are the same objects at every step.
        key = tuple(map(id, codecs))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(LevelSets(codecs), [identity(item) for item in codecs])
        sets, size = group.sets, common["n"]
        codes = sets.fit(self._judge(key, schedule.source), size)
        sent = codes.sent
        if schedule.before is not None:
            if schedule.before == schedule.source:
                sent = np.zeros_like(sent)
            else:
                before = sets.fit(self._judge(key, schedule.before), size)
                sent = np.where(sets.differ(codes, before), sent, 0)
        expected = sets.expect(self._judge(key, index), codes)
        best = None if optimum is None else list(map(optimum, codecs, sets.sizes.tolist()))
        fitted_on = [schedule.label if adopted else "-" for adopted in codes.adopted.tolist()]
        return expectation_table(common, group.identities, expected, sent, fitted_on, best, dtype_bits)

    def forget(self, keep: set[int]) -> None:
        """Drop what is known of all steps but these."""
        self._judged = {key: judged for key, judged in self._judged.items() if key[1] in keep}

    def _judge(self, key: tuple[int, ...], index: int) -> Judged:
        found = self._judged.get((key, index))
        if found is None:
            sets = self._groups[key].sets
            found = self._judged[key, index] = sets.judge(self._summary(index, sets.needs))
        return found
