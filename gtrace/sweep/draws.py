"""Encodings of a tensor: sent, compared with what was sent, and added up over windows of steps."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np

from gtrace.coding import ENVELOPE_BYTES
from gtrace.kernels.compare import add_error
from gtrace.kernels.norms import BLOCK, power_sum
from gtrace.metrics import Histogram, Reference, RunningComparison
from gtrace.sweep.jobs import Totals
from gtrace.sweep.rows import Drawn
from gtrace.sweep.schema import EXPECTATION
from gtrace.types import State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs import Codec, EncodedPart
    from gtrace.sweep.fits import Fits, Ready
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Job
    from gtrace.sweep.sources import Source
    from gtrace.sweep.windows import RunningSums, Window
    from gtrace.types import Key

#: Encodings that share a pass over a tensor in chunks; each holds a histogram of 8 MiB.
_TOGETHER = 8


class Draws(Protocol):
    """What makes the encodings of a job."""

    def draw(
        self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference | Totals, window: Window | None
    ) -> Drawn:
        """What an encoding of a step gives; ``window`` is the one that ends there."""

    def forget(self) -> None:
        """Drop what was kept for a window that ended."""


class WholeDraws:
    """Encodings of all values of a step at once."""

    def __init__(self, source: Source, fits: Fits, sums: RunningSums) -> None:
        self._source, self._fits, self._sums = source, fits, sums
        #: (codec, index) -> what encoded that step of a window whose sum is not kept
        self._sent: dict[tuple[int, int], Ready] = {}

    def draw(
        self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference | Totals, window: Window | None
    ) -> Drawn:
        """See :class:`Draws`; what a stateful codec remembers is kept, too."""
        assert isinstance(reference, Reference), "draws need values"
        values, key = reference.values, (id(codec), draw)
        started = time.perf_counter()
        sent = codec.simulate(ready.state, values, self._fits.key(index, draw))
        ended = time.perf_counter()
        if codec.stateful:
            self._fits.settle(codec, draw, index, ready, values, sent.values)
        kept = self._sums.add(key, index, values, sent.values, always=codec.stateful)
        if not kept and not codec.stateful and self._sums.covers(index):
            self._sent[id(codec), index] = ready
        found = reference.compare(sent.values)
        clipped = codec.clipping(ready.state, values, sent.values)
        lost = None if window is None else self._loss(codec, draw, index, window.first, values, sent.values)
        spent = {"simulate": ended - started, "compare": time.perf_counter() - ended}
        return Drawn(found, sent.payload_bytes - ENVELOPE_BYTES, sent.coded, clipped, spent, window_error=lost)

    def forget(self) -> None:
        """See :class:`Draws`."""
        self._sent.clear()

    def _loss(
        self,
        codec: Codec,
        draw: int,
        index: int,
        first: int,
        values: NDArray[np.float32],
        arrived: NDArray[np.float32],
    ) -> float:
        """||sum of errors||^2 over the window from ``first`` to a step."""
        total = self._sums.take((id(codec), draw), index)
        if total is None:
            # Codecs with memory were replayed from the start of the burst; others are encoded again.
            assert not codec.stateful
            total = np.zeros(values.size)
            for k in range(first, index):
                before, _ = self._source.values(k)
                ready = self._sent.get((id(codec), k)) or self._fits.ready(codec, draw, k, before.size)
                add_error(before, codec.simulate(ready.state, before, self._fits.key(k, draw)).values, total)
            add_error(values, arrived, total)
        return float(power_sum(total, 2))


class ChunkDraws:
    """Encodings of a tensor chunk by chunk, several of them in one pass."""

    def __init__(self, gradients: Gradients, job: Job, fits: Fits, sums: RunningSums) -> None:
        self._gradients, self._job, self._fits, self._sums = gradients, job, fits, sums
        self._wanted = dict(job.wanted)
        self._drawn: dict[tuple[int, int], Drawn] = {}
        self._sent: dict[tuple[int, int], Ready] = {}

    def draw(
        self, codec: Codec, draw: int, index: int, _ready: Ready, reference: Reference | Totals, window: Window | None
    ) -> Drawn:
        """See :class:`Draws`: this draw, and with it the next ones of the step, in one pass over the tensor."""
        found = self._drawn.pop((id(codec), draw), None)
        if found is None:
            assert isinstance(reference, Totals)
            pairs = [
                (item, number) for item, numbers in self._wanted[index] for number in numbers if number != EXPECTATION
            ]
            first = pairs.index((codec, draw))
            self._pass(pairs[first : first + _TOGETHER], index, reference, window)
            found = self._drawn.pop((id(codec), draw))
        return found

    def forget(self) -> None:
        """See :class:`Draws`."""
        self._sent.clear()

    def _pass(self, pairs: list[tuple[Codec, int]], index: int, totals: Totals, window: Window | None) -> None:
        """Encode every one of the pairs of a codec and a draw."""
        assert totals.sums is not None
        exact = Histogram()
        encodings = {}
        for item, number in pairs:
            ready = self._fits.ready(item, number, index, totals.size)
            state = item.prepare(ready.state, totals.sums)
            if self._sums.covers(index):
                self._sent[id(item), index] = ready._replace(state=state)
            compared = RunningComparison(exact, totals.energy, totals.sums.norm1)
            encodings[id(item), number] = _Encoding(item, state, ready.shared, self._fits.key(index, number), compared)
        start = 0
        for values, weights in self._gradients.weighted_chunks(self._job.tensor, self._job.steps[index]):
            exact.add(values)
            for encoding in encodings.values():
                encoding.add(values, start, weights)
            start += values.size
        self._drawn.update((name, encoding.finish()) for name, encoding in encodings.items())
        if window is not None:
            lost = self._losses(pairs, index, totals.size, window.first)
            self._drawn.update((name, self._drawn[name]._replace(window_error=error)) for name, error in lost.items())

    def _losses(
        self, pairs: list[tuple[Codec, int]], index: int, size: int, first: int
    ) -> dict[tuple[int, int], float]:
        """||sum of errors||^2 of encodings over a window: its steps are encoded again, a piece of each at a time."""
        steps = range(first, index + 1)
        for item, number in pairs:
            for k in steps:
                if (id(item), k) not in self._sent:
                    ready = self._fits.ready(item, number, k, size)
                    sums = self._gradients.scan(self._job.tensor, self._job.steps[k], [])[0].sums
                    assert sums is not None
                    self._sent[id(item), k] = ready._replace(state=item.prepare(ready.state, sums))
        whole = math.lcm(*(item.part_multiple or 1 for item, _ in pairs))
        piece = whole * max(1, BLOCK // whole)
        found = {(id(item), number): 0.0 for item, number in pairs}
        start = 0
        chunks = (self._gradients.chunks(self._job.tensor, self._job.steps[k], piece) for k in steps)
        for gradients in zip(*chunks, strict=True):
            for item, number in pairs:
                total = np.zeros(gradients[0].size)
                for k, values in zip(steps, gradients, strict=True):
                    ready = self._sent[id(item), k]
                    state = State(values.size, ready.state.arrays)
                    part = item.encode_part(state, values, self._fits.key(k, number), start)
                    add_error(values, item.decode(ready.shared, part.payload, values.size), total)
                found[id(item), number] += float(power_sum(total, 2))
            start += gradients[0].size
        return found


class _Encoding:
    """One encoding of a tensor, chunk by chunk.

    Args:
        codec: what encodes.
        state: what :meth:`~gtrace.codecs.Codec.prepare` returned.
        shared: what the receiver holds.
        key: of the encoding.
        compared: takes what comes out.
    """

    def __init__(self, codec: Codec, state: State, shared: bytes, key: Key, compared: RunningComparison) -> None:
        self._codec, self._state, self._shared, self._key, self._compared = codec, state, shared, key, compared
        #: the sum of the parts so far
        self._whole: EncodedPart | None = None
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
        body, coded = self._codec.measured(self._whole, self._size)
        return Drawn(found, body, coded, clipping, self._spent, doubt)
