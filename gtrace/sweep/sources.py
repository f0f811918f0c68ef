"""Replays that never hold a tensor: from sketches that a trace keeps, or chunk by chunk."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import numpy as np

from gtrace.codecs import Part, PartwiseCodec
from gtrace.kernels.compare import add_error
from gtrace.kernels.norms import BLOCK, power_sum
from gtrace.metrics import Histogram, RunningComparison
from gtrace.sweep.jobs import Totals
from gtrace.sweep.replay import Replay, Weighed
from gtrace.sweep.rows import Drawn
from gtrace.sweep.schema import EXPECTATION
from gtrace.types import State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs import Codec
    from gtrace.metrics import Reference
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.jobs import Block, Wanted
    from gtrace.sweep.replay import Ready
    from gtrace.types import Key, SummarySpec

#: Encodings that share a pass over a tensor; each holds a histogram of 8 MiB.
_TOGETHER = 8


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

    def _weigh(self, index: int, reference: Reference | Totals) -> Weighed | None:
        del index, reference
        return None


class ChunkReplay(Replay):
    """A tensor that is too large to be held: sketches of a step in one pass over its chunks, draws in another one."""

    def _block(self, index: int, wanted: Wanted) -> Block:
        self._drawn: dict[tuple[str, int], Drawn] = {}
        block = super()._block(index, wanted)
        self._drawn = {}
        return block

    def _look(self, index: int) -> tuple[Reference | Totals, int]:
        specs = self._specs(index)
        found = self._summaries.setdefault(index, {})
        missing = [spec for spec in specs if spec not in found]
        totals, bad, sketches = self._source.scan(self._job.tensor, self._job.steps[index], missing)
        found.update(zip(missing, sketches, strict=True))
        return totals, bad

    def _specs(self, index: int) -> list[SummarySpec]:
        """What the codecs that are wanted at a step need."""
        wanted = next(codecs for at, codecs in self._job.wanted if at == index)
        return list(dict.fromkeys(codec.needs for codec, _ in wanted if codec.needs is not None))

    def _weigh(self, index: int, reference: Reference | Totals) -> Weighed | None:
        del reference
        specs = self._specs(index)
        found = self._source.weigh(self._job.tensor, self._job.steps[index], specs)
        return None if found is None else Weighed(found[0], dict(zip(specs, found[1], strict=True)))

    def _summary(self, index: int, spec: SummarySpec, values: NDArray[np.float32] | None = None) -> MomentSketch:
        del values
        found = self._summaries.setdefault(index, {})
        if spec not in found:
            missing = [need for need in {*self._needs, spec} if need not in found]
            sketches = self._source.scan(self._job.tensor, self._job.steps[index], missing)[2]
            found.update(zip(missing, sketches, strict=True))
        return found[spec]

    def _draw(self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference | Totals) -> Drawn:
        del ready
        found = self._drawn.pop((self._spec(codec), draw), None)
        if found is None:
            assert isinstance(reference, Totals)
            self._draw_on(codec, draw, index, reference)
            found = self._drawn.pop((self._spec(codec), draw))
        return found

    def _draw_on(self, codec: Codec, draw: int, index: int, totals: Totals) -> None:
        """Encode this draw of a codec, and with it the next ones of the step, in one pass over the tensor."""
        assert totals.sums is not None
        wanted = next(codecs for at, codecs in self._job.wanted if at == index)
        pairs = [(item, number) for item, numbers in wanted for number in numbers if number != EXPECTATION]
        first = pairs.index((codec, draw))
        exact = Histogram()
        encodings = {}
        for item, number in pairs[first : first + _TOGETHER]:
            assert isinstance(item, PartwiseCodec)
            ready = self._ready(item, number, index, totals.size)
            state = item.prepare(ready.state, totals.sums)
            if self._sums.covers(index):
                self._sent[self._spec(item), index] = ready._replace(state=state)
            compared = RunningComparison(exact, totals.energy, totals.sums.norm1)
            encodings[self._spec(item), number] = _Encoding(
                item, state, ready.shared, self._key(index, number), compared
            )
        start = 0
        for values, weights in self._source.weighted_chunks(self._job.tensor, self._job.steps[index]):
            exact.add(values)
            for encoding in encodings.values():
                encoding.add(values, start, weights)
            start += values.size
        self._drawn.update((name, encoding.finish()) for name, encoding in encodings.items())
        if self._window is not None:
            lost = self._losses(pairs[first : first + _TOGETHER], index, totals.size, self._window.first)
            self._drawn.update((name, self._drawn[name]._replace(window_error=error)) for name, error in lost.items())

    def _losses(
        self, pairs: list[tuple[Codec, int]], index: int, size: int, first: int
    ) -> dict[tuple[str, int], float]:
        """||sum of errors||^2 of encodings over a window: its steps are encoded again, a piece of each at a time."""
        steps = range(first, index + 1)
        for item, number in pairs:
            for k in steps:
                if (self._spec(item), k) not in self._sent:
                    assert isinstance(item, PartwiseCodec)
                    ready, sums = self._ready(item, number, k, size), self._totals(k).sums
                    assert sums is not None
                    self._sent[self._spec(item), k] = ready._replace(state=item.prepare(ready.state, sums))
        whole = math.lcm(*(getattr(item, "part_multiple", None) or 1 for item, _ in pairs))
        piece = whole * max(1, BLOCK // whole)
        found = {(self._spec(item), number): 0.0 for item, number in pairs}
        start = 0
        chunks = (self._source.chunks(self._job.tensor, self._job.steps[k], piece) for k in steps)
        for gradients in zip(*chunks, strict=True):
            for item, number in pairs:
                assert isinstance(item, PartwiseCodec)
                total = np.zeros(gradients[0].size)
                for k, values in zip(steps, gradients, strict=True):
                    ready = self._sent[self._spec(item), k]
                    state = State(values.size, ready.state.arrays)
                    part = item.encode_part(state, values, self._key(k, number), start)
                    add_error(values, item.decode(ready.shared, part.payload, values.size), total)
                found[self._spec(item), number] += float(power_sum(total, 2))
            start += gradients[0].size
        return found

    def _totals(self, index: int) -> Totals:
        return self._source.scan(self._job.tensor, self._job.steps[index], [])[0]


class _Encoding:
    """One encoding of a tensor, chunk by chunk.

    Args:
        codec: what encodes.
        state: what :meth:`~gtrace.codecs.PartwiseCodec.prepare` returned.
        shared: what the receiver holds.
        key: of the encoding.
        compared: takes what comes out.
    """

    def __init__(
        self, codec: PartwiseCodec, state: State, shared: bytes, key: Key, compared: RunningComparison
    ) -> None:
        self._codec, self._state, self._shared, self._key, self._compared = codec, state, shared, key, compared
        #: the sum of the parts so far
        self._whole: Part | None = None
        self._size = 0
        self._spent = dict.fromkeys(("encode", "decode", "compare"), 0.0)
        self._clipped = [0.0, 0.0]
        self._present = 0
        self._clips = True

    def add(self, values: NDArray[np.float32], start: int, weights: NDArray[np.float64] | None) -> None:
        """Encode, decode and compare values ``start`` and following; see :class:`RunningComparison` on weights."""
        state = State(values.size, self._state.arrays)
        clock = time.perf_counter()
        part = self._codec.encode_part(state, values, self._key, start)
        encoded = time.perf_counter()
        decoded = self._codec.decode(self._shared, part.payload, values.size)
        ended = time.perf_counter()
        self._whole = part if self._whole is None else self._whole + part
        self._size += values.size
        self._compared.add(values, decoded, weights)
        clipping = self._codec.clipping(state, values, decoded) if self._clips else None
        if clipping is None:
            self._clips = False
        else:
            present = int(np.count_nonzero(values))
            self._present += present
            # Shares of whole numbers of values.
            self._clipped = [
                total + round(share * present) for total, share in zip(self._clipped, clipping, strict=True)
            ]
        compared = time.perf_counter()
        for stage, seconds in zip(self._spent, (encoded - clock, ended - encoded, compared - ended), strict=True):
            self._spent[stage] += seconds

    def finish(self) -> Drawn:
        """What came out."""
        found, doubt = self._compared.finish()
        clipping = None
        if self._clips:
            saturated, flushed = (total / max(1, self._present) for total in self._clipped)
            clipping = saturated, flushed
        assert self._whole is not None, "a tensor in chunks has chunks"
        coded = self._codec.coded_bits(self._whole, self._size)
        return Drawn(found, self._codec.body_bytes(self._whole), coded, clipping, self._spent, doubt)
