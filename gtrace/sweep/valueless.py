"""Replays that hold no values: from sketches that a trace keeps, or that are made chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.sweep.replay import Replay

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from gtrace.metrics import Reference
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.replay import Totals
    from gtrace.types import SummarySpec


class SketchReplay(Replay):
    """A tensor of which the trace keeps sketches: expectations from them, nothing that needs values."""

    def _look(self, index: int) -> tuple[Reference | Totals, int]:
        return self._source.totals(self._job.tensor, self._job.steps[index])

    def _summary(self, index: int, spec: SummarySpec, values: NDArray[np.float32] | None = None) -> MomentSketch:
        del values
        found = self._summaries.setdefault(index, {})
        if spec not in found:
            found[spec] = self._source.sketch(self._job.tensor, self._job.steps[index], spec)
        return found[spec]


class ChunkReplay(Replay):
    """A tensor that is too large to be held: all sketches of a step in one pass over its chunks."""

    def _look(self, index: int) -> tuple[Reference | Totals, int]:
        wanted = next(codecs for at, codecs in self._job.wanted if at == index)
        specs = dict.fromkeys(codec.needs for codec, _ in wanted if codec.needs is not None)
        found = self._summaries.setdefault(index, {})
        missing = [spec for spec in specs if spec not in found]
        totals, bad, sketches = self._source.scan(self._job.tensor, self._job.steps[index], missing)
        found.update(zip(missing, sketches, strict=True))
        return totals, bad

    def _summary(self, index: int, spec: SummarySpec, values: NDArray[np.float32] | None = None) -> MomentSketch:
        del values
        found = self._summaries.setdefault(index, {})
        if spec not in found:
            found[spec] = self._source.scan(self._job.tensor, self._job.steps[index], [spec])[2][0]
        return found[spec]
