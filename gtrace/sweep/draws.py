"""Encode a tensor, compare what arrives with what was sent, and add errors up over windows of consecutive steps.

A codec with memory loses much in one step and sends most of it later. So a sweep also compares the sum of what arrived
with the sum of the gradients, over up to ten consecutive steps.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs import Codec, EncodedPart, TensorSums
from gtrace.coding import ENVELOPE_BYTES
from gtrace.kernels.compare import add_error
from gtrace.kernels.norms import BLOCK, power_sum
from gtrace.metrics import Histogram, Reference, RunningComparison
from gtrace.sweep.fits import Fits, Ready, RunningSums, piece_size
from gtrace.sweep.jobs import Job, Totals
from gtrace.sweep.level_draws import PartDraws, draws_in_parts
from gtrace.sweep.limits import draw_obstacle
from gtrace.sweep.rows import Drawn
from gtrace.sweep.schema import EXPECTATION
from gtrace.types import Key, State

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.sources import Values

#: Encodings that share a pass over a tensor in chunks; each holds a histogram of 8 MiB, and each step another.
_TOGETHER = 8
#: histograms of a pass over a whole window
_HISTOGRAMS = 16


class Window(NamedTuple):
    """The window that ends at the current step.

    Attributes:
        first: index of its first step.
        steps: how many it has.
        energy: ||sum of g||^2.
    """

    first: int
    steps: int
    energy: float


class Draws:
    """The encodings of a job, each of all values of a step at once."""

    def __init__(self, gradients: Gradients, job: Job, source: Values, fits: Fits, sums: RunningSums) -> None:
        self._gradients, self._job = gradients, job
        self._source, self._fits, self._sums = source, fits, sums
        #: (codec, draw, index) -> what encoded a step of a window, if the sum of the window is not kept
        self._sent: dict[tuple[int, int, int], Ready] = {}

    def draw(
        self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference | Totals, window: Window | None
    ) -> Drawn:
        """Encode a step once; ``window`` is the one that ends there. Keeps a codec's memory."""
        assert isinstance(reference, Reference), "draws need values"
        values = reference.values
        started = time.perf_counter()
        sent = codec.simulate(ready.state, values, self._fits.key(step=self._job.steps[index], draw=draw))
        ended = time.perf_counter()
        if codec.stateful:
            self._fits.settle(codec, draw, index, values, sent.values)
        total = self._sums.at((id(codec), draw), index, values.size, always=codec.stateful)
        if total is not None:
            add_error(values, sent.values, total)
        elif not codec.stateful and index in self._sums.first:
            self.keep(codec, draw, index, ready, reference)
        clipped = codec.clipping(ready.state, values, sent.values)
        found = reference.compare(sent.values)
        lost = None if window is None else self.lost([codec], draw, index)[0]
        spent = {"simulate": ended - started, "compare": time.perf_counter() - ended}
        return Drawn(found, sent.payload_bytes - ENVELOPE_BYTES, sent.coded, clipped, spent, window_error=lost)

    def forget(self) -> None:
        """Drop what a finished window kept."""
        self._sent.clear()

    def _in_parts(self, codec: Codec) -> bool:
        """Whether a codec can be encoded again a piece at a time."""
        return self._job.sample is None and draw_obstacle(codec, BLOCK) is None

    def keep(self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference) -> None:
        """Keep what encoded a step of a window of which the sum of errors is not kept."""
        if self._in_parts(codec):
            ends = (float(reference.values.min()), float(reference.values.max())) if reference.size else (0.0, 0.0)
            sums = TensorSums(reference.size, reference.norm1, reference.energy, *ends)
            ready = self._prepared(codec, draw, index, ready, sums)
        self._sent[id(codec), draw, index] = ready

    def lost(self, codecs: Sequence[Codec], draw: int, last: int) -> list[float]:
        """||sum of errors||^2 over the window that ends at a step; where the sum was not kept, it is encoded again."""
        sums = [self._sums.take((id(codec), draw), last) for codec in codecs]
        parts = [
            (codec, draw)
            for codec, total in zip(codecs, sums, strict=True)
            if total is None and not codec.stateful and self._in_parts(codec)
        ]
        found = self._losses(parts, range(self._sums.first[last], last + 1)) if parts else {}
        for codec, total in zip(codecs, sums, strict=True):
            if (id(codec), draw) not in found:
                total = self._again(codec, draw, last) if total is None else total
                found[id(codec), draw] = float(power_sum(total, 2))
        return [found[id(codec), draw] for codec in codecs]

    def _prepared(self, item: Codec, number: int, index: int, ready: Ready, sums: TensorSums | None) -> Ready:
        key, size = self._fits.key(step=self._job.steps[index], draw=number), piece_size([item])

        def pieces() -> Iterator[tuple[State, NDArray[np.float32]]]:
            return ((State(x.size, ready.state.arrays), x) for x in self._source.pieces(index, size))

        return ready._replace(state=item.prepare(ready.state, pieces, key, sums))

    def _losses(self, pairs: list[tuple[Codec, int]], steps: range) -> dict[tuple[int, int], float]:
        """||sum of errors||^2 of each encoding over a window: encodes its steps again, a piece of each at a time."""
        tensor, places = self._job.tensor, self._job.steps
        for item, number in pairs:
            for k in steps:
                if (id(item), number, k) not in self._sent:
                    totals = self._gradients.scan(tensor, places[k], [])[0]
                    ready = self._fits.ready(item, number, k, totals.size)
                    self._sent[id(item), number, k] = self._prepared(item, number, k, ready, totals.sums)
        piece = piece_size(item for item, _ in pairs)
        found = {(id(item), number): 0.0 for item, number in pairs}
        start = 0
        for gradients in zip(*(self._gradients.chunks(tensor, places[k], piece) for k in steps), strict=True):
            for item, number in pairs:
                total = np.zeros(gradients[0].size)
                for k, values in zip(steps, gradients, strict=True):
                    ready = self._sent[id(item), number, k]
                    state = State(values.size, ready.state.arrays)
                    part = item.encode_part(state, values, self._fits.key(step=places[k], draw=number), start)
                    add_error(values, part.values, total)
                found[id(item), number] += float(power_sum(total, 2))
            start += gradients[0].size
        return found

    def _again(self, codec: Codec, draw: int, last: int) -> NDArray[np.float64]:
        """The sum of the errors over a window up to a step, float64[n], encoded again."""
        # Codecs with memory were replayed from the start of the burst.
        assert not codec.stateful
        total = None
        for k in range(self._sums.first[last], last + 1):
            values, _ = self._source.values(k)
            total = np.zeros(values.size) if total is None else total
            ready = self._sent.get((id(codec), draw, k)) or self._fits.ready(codec, draw, k, values.size)
            key = self._fits.key(step=self._job.steps[k], draw=draw)
            add_error(values, codec.simulate(ready.state, values, key).values, total)
        assert total is not None
        return total


class ChunkDraws(Draws):
    """Encodings of a tensor chunk by chunk, several of them in one pass."""

    def __init__(self, gradients: Gradients, job: Job, source: Values, fits: Fits, sums: RunningSums) -> None:
        super().__init__(gradients, job, source, fits, sums)
        self._wanted = dict(job.wanted)
        #: (codec, draw, index) -> what came out of a pass
        self._drawn: dict[tuple[int, int, int], Drawn] = {}

    def draw(
        self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference | Totals, window: Window | None
    ) -> Drawn:
        """This draw, as in :class:`Draws`, and the next draws, in one pass over the tensor.

        They are those of the step, or of all steps of the window that begins there, so that no step is read again for
        the window's error. Codecs with memory go step by step, one by one.
        """
        if codec.stateful:
            assert isinstance(reference, Totals)
            return self._remembered(codec, draw, index, ready, reference, window)
        found = self._drawn.pop((id(codec), draw, index), None)
        if found is None:
            assert isinstance(reference, Totals)
            pairs = [
                (item, number)
                for item, numbers in self._wanted[index]
                for number in numbers
                if number != EXPECTATION and not item.stateful
            ]
            pairs = pairs[pairs.index((codec, draw)) :]
            ahead = self._window_ahead(index)
            if ahead:
                self._pass(pairs[: _HISTOGRAMS // len(ahead) - 1], ahead)
            else:
                self._pass(pairs[:_TOGETHER], {index: reference}, window)
            found = self._drawn.pop((id(codec), draw, index))
        return found

    def forget(self) -> None:
        """Drop what a finished window kept."""
        super().forget()
        self._gradients.forget(self._job.tensor)

    def _remembered(
        self, codec: Codec, draw: int, index: int, ready: Ready, totals: Totals, window: Window | None
    ) -> Drawn:
        """A step of a codec with memory."""
        tensor, step = self._job.tensor, self._job.steps[index]
        assert totals.sums is not None
        exact = Histogram()
        compared = RunningComparison(exact, totals.energy, totals.sums.norm1)
        encoding = _Encoding(codec, ready, self._fits.key(step=step, draw=draw), compared, np.empty(0))
        weights: Iterator[NDArray[np.float64] | None] = itertools.repeat(None)
        if self._gradients.moments:
            weights = (part for _, part in self._gradients.weighted_chunks(tensor, step, piece_size([codec])))
        lost, known, clock = 0.0, window is not None, time.perf_counter()
        for (sent, total), weight in zip(self._fits.sent(codec, draw, index), weights, strict=False):
            exact.add(sent.values)
            encoding.compare(*sent, weight)
            known = known and total is not None
            lost += 0.0 if total is None else float(power_sum(total, 2))
        drawn = encoding.finish()
        compare = drawn.spent["compare"]
        spent = {"simulate": time.perf_counter() - clock - compare, "compare": compare}
        return drawn._replace(window_error=lost if known else None, spent=spent)

    def _window_ahead(self, index: int) -> dict[int, Totals]:
        """The totals of the steps of the window that begins at a step; empty if they cannot be drawn together."""
        steps = [k for k, first in self._sums.first.items() if first == index]
        same = all(self._wanted.get(k) == self._wanted[index] for k in steps)
        if not (same and 1 < len(steps) <= _HISTOGRAMS // 2):
            return {}
        found = {k: self._gradients.ahead(self._job.tensor, self._job.steps[k]) for k in steps}
        known = {k: totals for k, totals in found.items() if totals is not None}
        return known if len(known) == len(found) else {}

    def _pass(self, pairs: list[tuple[Codec, int]], steps: dict[int, Totals], window: Window | None = None) -> None:
        """Encode each pair of a codec and a draw at these steps: one, or all of a window."""
        items = [item for item, _ in pairs]
        piece = piece_size(items) if len(steps) > 1 else self._gradients.piece(item.part_multiple for item in items)
        totals = [np.empty(piece if len(steps) > 1 else 0) for _ in pairs]
        lost = np.zeros(len(pairs))
        exact = {k: Histogram() for k in steps}
        encodings: dict[int, list[_Encoding | _Drawing]] = {k: [] for k in steps}
        places = self._job.steps
        for k, whole in steps.items():
            assert whole.sums is not None
            for (item, number), total in zip(pairs, totals, strict=True):
                ready = self._fits.ready(item, number, k, whole.size)
                ready = self._prepared(item, number, k, ready, whole.sums)
                if len(steps) == 1 and k in self._sums.first:
                    self._sent[id(item), number, k] = ready
                compared = RunningComparison(exact[k], whole.energy, whole.sums.norm1)
                kind = _Drawing if draws_in_parts(item, ready.state, whole.size) else _Encoding
                encodings[k].append(kind(item, ready, self._fits.key(step=places[k], draw=number), compared, total))
        start, tensor = 0, self._job.tensor
        for pieces in zip(*(self._gradients.weighted_chunks(tensor, places[k], piece) for k in steps), strict=True):
            for total in totals:
                total.fill(0.0)
            for k, (values, weights) in zip(steps, pieces, strict=True):
                exact[k].add(values)
                for encoding in encodings[k]:
                    encoding.add(values, start, weights)
            size = pieces[0][0].size
            lost += [float(power_sum(total[:size], 2)) for total in totals]
            start += size
        for k in steps:
            for (item, number), encoding in zip(pairs, encodings[k], strict=True):
                self._drawn[id(item), number, k] = encoding.finish()
        last = max(steps)
        losses = dict(zip(((id(item), number) for item, number in pairs), lost.tolist(), strict=True))
        if len(steps) == 1:
            losses = {} if window is None else self._losses(pairs, range(window.first, last + 1))
        for (item_id, number), error in losses.items():
            self._drawn[item_id, number, last] = self._drawn[item_id, number, last]._replace(window_error=error)


class _Encoding:
    """One encoding of a tensor, chunk by chunk.

    Args:
        codec: the codec.
        ready: the result of :meth:`~gtrace.codecs.Codec.prepare`, with what the receiver holds.
        key: the key of the encoding.
        compared: takes the decoded values.
        total: float64[most values of a part], to which errors are added; or empty.
    """

    def __init__(
        self, codec: Codec, ready: Ready, key: Key, compared: RunningComparison, total: NDArray[np.float64]
    ) -> None:
        self._codec, self._ready, self._key, self._compared = codec, ready, key, compared
        self._total = total
        #: the sum of the parts so far
        self._whole: EncodedPart | None = None
        self._size = 0
        self._spent = dict.fromkeys(("simulate", "compare"), 0.0)
        self._clipped = [0.0, 0.0]
        self._present = 0
        self._clips = True

    def add(self, values: NDArray[np.float32], start: int, weights: NDArray[np.float64] | None) -> None:
        """Encode and compare values ``start`` and following; see :class:`RunningComparison` on weights."""
        state = State(values.size, self._ready.state.arrays)
        clock = time.perf_counter()
        part = self._codec.encode_part(state, values, self._key, start)
        self._spent["simulate"] += time.perf_counter() - clock
        self.compare(state, values, part, weights)

    def compare(
        self,
        state: State,
        values: NDArray[np.float32],
        part: EncodedPart,
        weights: NDArray[np.float64] | None,
    ) -> None:
        """Compare a part that was encoded with this state."""
        clock, decoded = time.perf_counter(), part.values
        self._whole = part if self._whole is None else self._whole + part
        self._size += values.size
        self._compared.add(values, decoded, weights)
        if self._total.size:
            add_error(values, decoded, self._total[: values.size])
        clipping = self._codec.clipping(state, values, decoded) if self._clips else None
        if clipping is None:
            self._clips = False
        else:
            present = int(np.count_nonzero(values))
            self._present += present
            # Parts with whole numbers of values.
            self._clipped = [
                total + round(share * present) for total, share in zip(self._clipped, clipping, strict=True)
            ]
        self._spent["compare"] += time.perf_counter() - clock

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


class _Drawing:
    """One encoding of a tensor by a level codec, chunk by chunk; see :class:`_Encoding`."""

    def __init__(
        self, codec: Codec, ready: Ready, key: Key, compared: RunningComparison, total: NDArray[np.float64]
    ) -> None:
        self._parts, self._compared = PartDraws(codec, ready.state, key, compared, total), compared
        self._spent = 0.0

    def add(self, values: NDArray[np.float32], start: int, weights: NDArray[np.float64] | None) -> None:
        """Draw values ``start`` and following."""
        clock = time.perf_counter()
        self._parts.add(values, start, weights)
        self._spent += time.perf_counter() - clock

    def finish(self) -> Drawn:
        """What came out."""
        body, coded = self._parts.finish()
        found, doubt = self._compared.finish()
        return Drawn(found, body, coded, None, {"simulate": self._spent}, doubt)
