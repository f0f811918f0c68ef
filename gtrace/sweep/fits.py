"""Choose the steps that fit a codec at each step, fit it, and keep what the receiver then holds.

A row of a stateless codec depends on its own step and on the steps that it was fitted on. A stateful codec also
remembers what it sent since the start of its burst; its :class:`~gtrace.codecs.link.Sender` holds that memory.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.buckets import as_values
from gtrace.codecs import Codec
from gtrace.codecs.link import LinkOptions, PieceArrays, Sender, SentPiece, changed
from gtrace.fitting.pooling import WINDOW, RunningPool, pooled
from gtrace.kernels.compare import add_error
from gtrace.kernels.norms import BLOCK
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch, SketchSet
from gtrace.sweep.jobs import Among, Fitting, Job, Settings, start_of
from gtrace.sweep.schema import EXPECTATION
from gtrace.sweep.sources import Chunks, Values
from gtrace.types import Key, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep.gradients import Gradients

#: float64 values that the running sums of stateless codecs may hold for a tensor; further codecs are encoded again
_HELD = 1 << 23


class Ready(NamedTuple):
    """A codec about to encode one step.

    Attributes:
        state: the codec's state.
        shared: what the receiver holds.
        columns: the row's columns about the fit.
        note: a remark for the row.
    """

    state: State
    shared: bytes
    columns: dict[str, Any]
    note: str | None = None


class _Fitted(NamedTuple):
    """A stateless codec fitted to a step: its state, whether the fit changed it, and what a receiver holds."""

    state: State
    fitted: bool
    shared: bytes


@dataclass(slots=True)
class _Memory:
    """What a stateful codec and its receiver hold after a step.

    Attributes:
        sender: the codec with its state.
        following: index of the next step.
        fitting: the steps that fit the codec, None before its first fit.
        fitted: whether a fit has set any of the state.
        views: index of a step -> sketch of what the codec saw there, for later steps of the burst to pool.
        lost: the sum of errors over a window, of each piece of a tensor that is never held whole.
    """

    sender: Sender
    lost: PieceArrays | None = None
    following: int = -1
    fitting: Fitting | None = None
    fitted: bool = False
    views: dict[int, MomentSketch] = field(default_factory=dict)


def piece_size(codecs: Iterable[Codec]) -> int:
    """Values of a piece over which errors of a window are summed up: never a chunk, which must not show in the sums."""
    whole = math.lcm(*(item.part_multiple or 1 for item in codecs))
    return whole * max(1, BLOCK // whole)


class RunningSums:
    """Sums over the steps of a window, up to the step that the replay has reached.

    Args:
        windows: from :func:`~gtrace.sweep.jobs.windows_of`.

    Attributes:
        first: index of a step -> index of the first step of its window.
    """

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        self.first = {index: first for first, last in windows for index in range(first, last + 1)}
        #: key -> index of the step that comes next, the sum
        self._held: dict[Hashable, tuple[int, NDArray[np.float64]]] = {}

    def at(self, key: Hashable, index: int, size: int, *, always: bool = True) -> NDArray[np.float64] | None:
        """The array to which the caller adds a step's ``size`` numbers, float64[size]; None if the sum is not kept.

        Args:
            key: key of the sum.
            index: index of the step; the caller adds its numbers at once.
            size: length of the sum.
            always: keep the sum however much memory the others take.
        """
        first = self.first.get(index)
        following, total = self._held.pop(key, (None, None))
        if first == index:
            fits = always or sum(other.size for _, other in self._held.values()) + size <= _HELD
            total = np.zeros(size) if fits else None
        elif first is None or following != index or (total is not None and total.size != size):
            total = None
        if total is not None:
            self._held[key] = index + 1, total
        return total

    def expected(
        self,
        key: Hashable,
        index: int,
        errors: NDArray[np.float64],
        errors_at: Callable[[int], NDArray[np.float64]],
    ) -> NDArray[np.float64]:
        """Expected squared errors summed over the window that ends at a step, from the sum or the single steps.

        Errors of unbiased stateless codecs are independent, so their squares add up.
        """
        total = self.take(key, index)
        if total is None:
            # Added in the order of the steps, as in the running sum.
            total = np.zeros(errors.size)
            for k in range(self.first[index], index):
                total += errors_at(k)
            total += errors
        return total

    def take(self, key: Hashable, index: int) -> NDArray[np.float64] | None:
        """Return and forget the sum up to this step; None if it was not kept or a step is missing."""
        following, total = self._held.pop(key, (None, None))
        return total if following == index + 1 else None


class StepSketches:
    """The sketches of tensors that go through their steps together, and the pools of several steps.

    Steps are indices into the jobs' steps. What two steps in a row do not ask for is dropped.

    Args:
        sources: the tensors; only the values of several small ones are sketched together.
        needs: the sketches that their codecs need.
    """

    def __init__(self, sources: Sequence[Values], needs: Sequence[SummarySpec]) -> None:
        self._sources, self._needs = sources, needs
        self._before: dict[tuple[Fitting, SummarySpec], SketchSet] = {}
        self._recent: dict[tuple[Fitting, SummarySpec], SketchSet] = {}
        self._pools: defaultdict[SummarySpec, RunningPool] = defaultdict(RunningPool)
        self._at = -1

    def move(self, index: int) -> None:
        """Go on to a step."""
        self._before, self._recent, self._at = self._recent, {}, index

    def add(self, made: Mapping[SummarySpec, MomentSketch]) -> None:
        """Sketches of the current step that were made with something else, of the one tensor that there is."""
        self._recent.update({(Fitting((self._at,)), spec): sketch.alone for spec, sketch in made.items()})

    def at(self, fitting: Fitting, spec: SummarySpec) -> SketchSet:
        """The sketches of a step, or the pools of several."""
        key = fitting, spec
        found = self._recent.get(key) or self._before.get(key)
        if found is None and fitting.pooled:
            parts = [self.at(Fitting((k,)), spec) for k in fitting.steps]
            found = self._pools[spec].mean(fitting.steps, parts)
            # What was computed from a sketch is many times its size, and a pool needs the sums alone.
            self._recent[Fitting(fitting.steps[-1:]), spec] = parts[-1].bare()
        elif found is None:
            (index,) = fitting.steps
            # After a resume, a step outside the replay is read once for all that its codecs need.
            needs = [spec] if index == self._at else dict.fromkeys([spec, *self._needs])
            known = self._recent.keys() | self._before.keys()
            missing = [need for need in needs if (fitting, need) not in known]
            if len(self._sources) == 1:
                made = {need: one.alone for need, one in self._sources[0].sketches(index, missing).items()}
            else:
                values = [source.values(index)[0] for source in self._sources]
                whole, bounds = np.concatenate(values), np.cumsum([0, *map(len, values)])
                made = {need: SketchSet.of_values(whole, bounds, need) for need in missing}
            self._recent.update({(fitting, need): one for need, one in made.items()})
            found = made[spec]
        self._recent[key] = found
        return found

    def made(self) -> dict[SummarySpec, SketchSet]:
        """Those of the current step, as far as they exist."""
        step = Fitting((self._at,))
        return {spec: self._recent[step, spec] for spec in self._needs if (step, spec) in self._recent}


class Fits:
    """The fits of one tensor's codecs, step by step, with the sketches that they share.

    Steps are indices into the job's steps. The tensor may change its size between steps; memories of the old size are
    then dropped.

    Args:
        source: the tensor.
        job: the job.
        settings: the settings; they say which steps fit a codec.
        allocation: what tensors share out among themselves.
        sums: gets the errors of stateful codecs that are replayed on the way to a step.
        sketches: those of all tensors that go along.
        place: of this tensor among them.

    Attributes:
        before: fits that the step before asked for.
        recent: those that the current one asked for; what two steps in a row do not ask for is dropped.
    """

    def __init__(
        self,
        source: Values,
        job: Job,
        settings: Settings,
        allocation: Allocation | None,
        sums: RunningSums,
        sketches: StepSketches,
        place: int,
    ) -> None:
        self._source, self._job, self._settings = source, job, settings
        self._allocation, self._sums = allocation, sums
        self._sketches, self._place = sketches, place
        #: step and draw -> key of an encoding
        self.key = partial(Key.derive, settings.seed, tensor=job.tensor)
        #: the size of a tensor of the job's shape -> this shape: at a step of another size it is unknown
        self._shapes = {} if job.shape is None else {math.prod(job.shape): job.shape}
        self.before: dict[Hashable, Any] = {}
        self.recent: dict[Hashable, Any] = {}
        self._memories: dict[tuple[int, int], _Memory] = {}
        # The settings say which steps fit a codec.
        self._options = LinkOptions(RefitSchedule((0,)), settings.seed)

    @property
    def sketches(self) -> dict[SummarySpec, MomentSketch]:
        """Those of the current step, as far as they exist."""
        return {spec: found[self._place] for spec, found in self._sketches.made().items()}

    def sketch(self, fitting: Fitting, spec: SummarySpec) -> MomentSketch:
        """The sketch of a step, or the pool of several."""
        return self._sketches.at(fitting, spec)[self._place]

    def ready(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A codec before it encodes ``size`` values of a step."""
        if codec.stateful and draw != EXPECTATION:
            return self._remembering(codec, draw, index, size)
        fitting = self._settings.source(codec, index, self._job.steps)
        state, fitted, shared = self._fit(codec, fitting, size)
        sent = len(shared)
        if index > 0 and shared:
            before = self._settings.source(codec, index - 1, self._job.steps)
            sent = 0 if self._fit(codec, before, size).shared == shared else sent
        return Ready(state, shared, self._columns(codec, index, fitting, 8.0 * sent / max(1, size), fitted or shared))

    def sent(self, codec: Codec, draw: int, index: int) -> Iterator[tuple[SentPiece, NDArray[np.float64] | None]]:
        """Encode a step of a stateful codec piece by piece; once all are taken, it remembers the step.

        With each piece comes the sum of its errors over the window so far, None outside of windows.
        """
        memory, first = self._memories[id(codec), draw], self._sums.first.get(index)
        if self._pools(codec, index + 1):
            self._keep_view(memory, index, self._sketched(codec, index, memory.sender))
        before = None if memory.lost is None or memory.following != index else iter(memory.lost)
        lost = PieceArrays() if first == index or (first is not None and before is not None) else None
        values = partial(self._source.pieces, index, piece_size([codec]))
        for sent in memory.sender.send_pieces(values, self.key(step=self._job.steps[index], draw=draw)):
            total = None
            if lost is not None:
                total = np.zeros(sent.values.size) if first == index or before is None else next(before)["lost"]
                add_error(sent.values, sent.part.values, total)
                lost.add({"lost": total})
            yield sent, total
        memory.lost, memory.following = lost, index + 1

    def _sketched(self, codec: Codec, index: int, sender: Sender | None = None) -> MomentSketch:
        """The sketch of a step as a codec sees it, piece by piece; with an empty memory without a sender."""
        assert codec.needs is not None

        def seen() -> Iterator[NDArray[np.float32]]:
            values, start = self._source.pieces(index, piece_size([codec])), 0
            empty = ((codec.init(x.size), x) for x in values)
            for state, x in empty if sender is None else sender.pieces(values):
                yield as_values(codec.view(state, x, start))
                start += x.size

        return MomentSketch.from_parts(codec.needs, seen)

    def settle(
        self, codec: Codec, draw: int, index: int, values: NDArray[np.float32], arrived: NDArray[np.float32]
    ) -> None:
        """Keep what a stateful codec remembers after it sent a step."""
        memory = self._memories[id(codec), draw]
        if codec.needs is not None and self._pools(codec, index + 1):
            view = MomentSketch.from_spec(codec.view(memory.sender.state, values), codec.needs)
            self._keep_view(memory, index, view)
        memory.sender.settle(values, arrived)
        memory.following = index + 1

    def _pools(self, codec: Codec, index: int) -> bool:
        """Whether a step's fit pools what a stateful codec saw before."""
        own_view = type(codec).view is not Codec.view and codec.needs is not None
        return own_view and self._settings.source(codec, index, self._job.steps).pooled

    def _keep_view(self, memory: _Memory, index: int, view: MomentSketch) -> None:
        first = max(start_of(self._job.steps, index), index + 1 - WINDOW)
        memory.views = {k: kept for k, kept in memory.views.items() if k >= first} | {index: view}

    def _columns(self, codec: Codec, index: int, fitting: Fitting, bits: float, fitted: object) -> dict[str, Any]:
        """The row's columns about the fit."""
        found = {"bits_shared": bits, "fitted_on": fitting.label(index, self._job.steps) if fitted else "-"}
        if codec.allocates:
            found["sparsity_asked"] = self._share(codec, fitting)
        return found

    def _fit(self, codec: Codec, fitting: Fitting, size: int) -> _Fitted:
        """A stateless codec fitted for ``size`` values; the fitting steps may have another size."""
        key = id(codec), fitting, size
        found: _Fitted | None = self.recent.get(key) or self.before.get(key)
        if found is None:
            before = after = codec.init(size, self._shapes.get(size))
            if codec.needs is not None and codec.fits:
                if codec.allocates:
                    before = codec.with_target(before, self._share(codec, fitting))
                summary = self._seen(codec, codec.needs, before, fitting)
                after = codec.fit(before, summary, self._job.steps[fitting.steps[-1]])
            found = _Fitted(after, bool(changed(before.arrays, after.arrays)), codec.shared(after))
        self.recent[key] = found
        return found

    def _seen(
        self,
        codec: Codec,
        spec: SummarySpec,
        state: State | None,
        fitting: Fitting,
        memory: _Memory | None = None,
    ) -> MomentSketch:
        """The sketch that fits a codec: of the steps as its innermost part sees them; without a state, as if new.

        ``memory``: what a stateful codec holds, and saw at the steps of its burst. For earlier steps it uses what it
        would see without memory.
        """
        if type(codec).view is Codec.view:
            return self.sketch(fitting, spec)
        if fitting.pooled:
            views = {} if memory is None else memory.views
            return pooled(views[k] if k in views else self._view(codec, spec, k) for k in fitting.steps)
        if isinstance(self._source, Chunks):
            return self._sketched(codec, fitting.steps[0], None if memory is None else memory.sender)
        values, _ = self._source.values(fitting.steps[0])
        # A memory of another size says nothing about these values.
        if state is None or state.size != values.size:
            state = codec.init(values.size, self._shapes.get(values.size))
        return MomentSketch.from_spec(codec.view(state, values), spec)

    def _view(self, codec: Codec, spec: SummarySpec, index: int) -> MomentSketch:
        """The sketch of a step as a codec with an empty memory sees it."""
        key = id(codec), index
        found: MomentSketch | None = self.recent.get(key) or self.before.get(key)
        if found is None:
            found = self._seen(codec, spec, None, Fitting((index,)))
        self.recent[key] = found
        return found

    def _share(self, codec: Codec, fitting: Fitting) -> float:
        """The tensor's share at the latest step that fits the codec."""
        assert self._allocation is not None
        return self._allocation.share(codec, self._job.tensor, self._job.steps[fitting.steps[-1]], self._job.among)

    def _remembering(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A stateful codec at a step; replayed from the start of the burst if it did not just send the step before."""
        start = start_of(self._job.steps, index)
        key = (id(codec), draw)
        memory = self._memories.get(key)
        if memory is None or memory.following != index or start == index:
            self._memories.pop(key, None)
            for k in range(start, index):
                values: NDArray[np.float32] | None = None
                if isinstance(self._source, Chunks):
                    there, bad = self._source.extent(k)
                else:
                    values, bad = self._source.values(k)
                    there = values.size
                if bad and self._settings.nonfinite == "skip":
                    continue
                ready = self._refitted(codec, key, k, there)
                if values is None:
                    deque(self.sent(codec, draw, k), maxlen=0)
                    continue
                arrived = codec.simulate(ready.state, values, self.key(step=self._job.steps[k], draw=draw)).values
                total = self._sums.at(key, k, values.size)
                if total is not None:
                    add_error(values, arrived, total)
                self.settle(codec, draw, k, values, arrived)
        return self._refitted(codec, key, index, size)

    def _refitted(self, codec: Codec, key: tuple[int, int], index: int, size: int) -> Ready:
        """A stateful codec for a step of ``size`` values; drops a memory of another size."""
        note, memory = None, self._memories.get(key)
        if memory is not None and memory.sender.state.size != size:
            note = f"memory starts afresh: {memory.sender.state.size} values became {size}"
        if memory is None or note is not None:
            sender = Sender(codec, size, self._options, tensor=self._job.tensor, shape=self._shapes.get(size))
            memory = self._memories[key] = _Memory(sender)
        sender, fitting = memory.sender, self._settings.source(codec, index, self._job.steps)
        # Training does the same: a fit stays until the next fit.
        if memory.fitting != fitting and codec.needs is not None:
            before = sender.state
            summary = self._seen(codec, codec.needs, before, fitting, memory)
            sender.fit(summary, self._job.steps[index], share=self._share(codec, fitting) if codec.allocates else None)
            memory.fitted = bool(summary.sums.size and changed(before.arrays, sender.state.arrays))
        memory.fitting = fitting
        shared = codec.shared(sender.state)
        sent = 0 if shared == sender.known else len(shared)
        sender.known = shared
        bits = 8.0 * sent / max(1, size)
        return Ready(sender.state, shared, self._columns(codec, index, fitting, bits, memory.fitted or shared), note)


class Allocation:
    """Each codec's allocation at each step, worked out once, when the first tensor asks for it.

    A share depends only on the gradients of the step, so the order of the tensors and a resume do not change it.
    Sketches of one step are in memory at a time.

    Args:
        source: where gradients are read.
        steps: tensor -> steps that it is present at.
        codecs: the codecs of a sweep, with the tensors that share out among themselves; codecs that do not allocate
            are ignored.
    """

    def __init__(
        self, source: Gradients, steps: Mapping[str, Iterable[int]], codecs: Iterable[tuple[Codec, Among]]
    ) -> None:
        self._source = source
        self._steps = {tensor: frozenset(present) for tensor, present in steps.items()}
        self._codecs = tuple((codec, among) for codec, among in codecs if codec.allocates)
        self._shares: dict[int, dict[tuple[str, Among, str], float]] = {}
        self._lock = threading.Lock()

    def share(self, codec: Codec, tensor: str, step: int, among: Among = None) -> float:
        """A tensor's share at the step that the codec is fitted on."""
        with self._lock:
            if step not in self._shares:
                self._shares[step] = self._allocated(step)
        return self._shares[step][str(codec), among, tensor]

    def _allocated(self, step: int) -> dict[tuple[str, Among, str], float]:
        present = [tensor for tensor, steps in self._steps.items() if step in steps]
        sketches: dict[tuple[SummarySpec, str], MomentSketch] = {}
        found = {}
        for codec, among in self._codecs:
            spec = codec.needs
            tensors = [tensor for tensor in present if among is None or tensor in among]
            if spec is None or not tensors:
                continue
            for tensor in tensors:
                if (spec, tensor) not in sketches:
                    sketches[spec, tensor] = self._source.sketch(tensor, step, spec)
            shares = codec.allocate([sketches[spec, tensor] for tensor in tensors])
            found.update({(str(codec), among, tensor): share for tensor, share in zip(tensors, shares, strict=True)})
        return found
