"""Which steps fit what a codec sends at a step, what that fit gave, and what the receiver then holds.

A row of a stateless codec depends on its own step and on those that it was fitted on. A stateful codec also remembers
what it sent since the start of its burst of consecutive steps.
"""

from __future__ import annotations

import math
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from gtrace.codecs import Codec
from gtrace.fitting.pooling import WINDOW, pooled
from gtrace.sketch import MomentSketch
from gtrace.sweep.jobs import Fitting, start_of
from gtrace.sweep.schema import EXPECTATION
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from gtrace.metrics import Reference
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Among, Job, Settings, Totals
    from gtrace.sweep.sources import Source
    from gtrace.sweep.windows import RunningSums
    from gtrace.types import State, SummarySpec


class Ready(NamedTuple):
    """A codec about to encode one step.

    Attributes:
        state: its own.
        shared: what the receiver holds.
        sent: how much of that is news, in bytes.
        fitted: whether anything of the state came out of a fit.
        note: a remark for the row.
    """

    state: State
    shared: bytes
    sent: int
    fitted: bool
    note: str | None = None


class _Fitted(NamedTuple):
    """A stateless codec fitted to a step: its state, whether that set anything, and what a receiver holds."""

    state: State
    fitted: bool
    shared: bytes


class _Memory(NamedTuple):
    """What a stateful codec and its receiver hold after a step.

    Attributes:
        following: index of the next step.
        state: for it.
        shared: what the receiver holds.
        source: what the codec is fitted to, None before its first fit.
        fitted: whether anything of the state came out of a fit.
        views: sketches of what it saw at the steps of its burst, by index, that later steps pool.
    """

    following: int
    state: State
    shared: bytes
    source: Fitting | None = None
    fitted: bool = False
    views: Mapping[int, MomentSketch] = MappingProxyType({})


class Fits:
    """The fits of one tensor's codecs, step by step, with the sketches that they share.

    Steps are indices into the job's steps. The tensor may have another size at each step; memories, which are of one
    size, then start afresh.

    Args:
        source: the tensor.
        job: what is wanted of it.
        settings: among them, which steps fit a codec.
        allocation: what the tensors share out among them.
        sums: gets the errors of stateful codecs that are replayed on the way to a step.

    Attributes:
        needs: the sketches that the job's codecs look at.
    """

    def __init__(
        self, source: Source, job: Job, settings: Settings, allocation: Allocation | None, sums: RunningSums
    ) -> None:
        self._source, self._job, self._settings = source, job, settings
        self._allocation, self._sums = allocation, sums
        self.needs = tuple(dict.fromkeys(c.needs for _, codecs in job.wanted for c, _ in codecs if c.needs is not None))
        self._summaries: dict[int, dict[SummarySpec, MomentSketch]] = {}
        #: decayed means of steps
        self._pools: dict[tuple[Fitting, SummarySpec], MomentSketch] = {}
        #: what codecs without memory see of a step
        self._views: dict[tuple[int, int], MomentSketch] = {}
        self._states: dict[tuple[int, Fitting, int], _Fitted] = {}
        self._memories: dict[tuple[int, int], _Memory] = {}
        self._at = -1

    def look(self, index: int) -> tuple[Reference | Totals, int]:
        """Go on to a step: what its rows are compared with, and how many of its values are not finite."""
        self._at = index
        found = self._summaries.setdefault(index, {})
        reference, bad, sketches = self._source.look(index, [need for need in self.needs if need not in found])
        found.update(sketches)
        return reference, bad

    def forget(self, index: int) -> set[Fitting]:
        """Drop what the step after this one does not need; what fits that is returned."""
        near = range(index, min(index + 2, len(self._job.steps)))
        kept = {self.source(k, spec) for k in near for spec in (None, *self.needs)}
        sources = kept | {Fitting((index,))}
        used = {k for source in sources for k in source.steps}
        alone = {source.steps[0] for source in kept if not source.pooled}
        self._summaries = {
            # What follows from a sketch is many times its size, and a pool wants the sums alone.
            k: found if k in alone else {spec: sketch.bare() for spec, sketch in found.items()}
            for k, found in self._summaries.items()
            if k in used
        }
        self._views = {key: view for key, view in self._views.items() if key[1] in used}
        self._pools = {key: pool for key, pool in self._pools.items() if key[0] in sources}
        self._states = {key: state for key, state in self._states.items() if key[1] in sources}
        return sources

    def known(self, index: int) -> dict[SummarySpec, MomentSketch]:
        """The sketches of a step that are there."""
        return self._summaries.get(index, {})

    def summary(self, index: int, spec: SummarySpec) -> MomentSketch:
        """The sketch of a step."""
        found = self._summaries.setdefault(index, {})
        if spec not in found:
            # A step that is not being gone through, as after a resume, is read once for all that its codecs need.
            needs = (spec,) if index == self._at else {*self.needs, spec}
            found.update(self._source.sketches(index, [need for need in needs if need not in found]))
        return found[spec]

    def sketch(self, source: Fitting, spec: SummarySpec) -> MomentSketch:
        """What a codec is fitted to: a step's sketch, or the pool of several."""
        if not source.pooled:
            return self.summary(source.steps[0], spec)
        found = self._pools.get((source, spec))
        if found is None:
            found = self._pools[source, spec] = pooled(self.summary(k, spec) for k in source.steps)
        return found

    def source(self, index: int, spec: SummarySpec | None, *, itself: bool = False) -> Fitting:
        """What fits the codec that encodes a step and looks at ``spec``; the only place that works this out.

        See :class:`~gtrace.sweep.jobs.Settings` on ``refit``. ``itself``: it is fitted to every tensor itself.
        """
        return Fitting((index,)) if itself else self._settings.source(index, self._job.steps, spec)

    def label(self, index: int, source: Fitting) -> str:
        """What rows call a source."""
        if source.pooled:
            return f"pooled {len(source.steps)} step{'s' * (len(source.steps) > 1)}"
        (step,) = source.steps
        if step == index:
            return "itself"
        return "previous" if step == index - 1 else f"step {self._job.steps[step]}"

    def columns(self, codec: Codec, index: int, ready: Ready, size: int) -> dict[str, object]:
        """What a row says about the fit behind it."""
        source = self._of(codec, index)
        found: dict[str, object] = {
            "bits_shared": 8.0 * ready.sent / max(1, size),
            "fitted_on": self.label(index, source) if ready.shared or ready.fitted else "-",
        }
        share = self._share(codec, source)
        return found if share is None else {**found, "sparsity_asked": share}

    def ready(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A codec as it stands before it encodes ``size`` values of a step."""
        if codec.stateful and draw != EXPECTATION:
            return self._remembering(codec, draw, index, size)
        source = self._of(codec, index)
        state, fitted, shared = self._fitted(codec, source, size)
        if index > 0 and shared:
            before = self._of(codec, index - 1)
            if before == source or self._fitted(codec, before, size).shared == shared:
                return Ready(state, shared, 0, fitted)
        return Ready(state, shared, len(shared), fitted)

    def expecting_state(self, codec: Codec, index: int, size: int) -> State:
        """The state of which a step's expectation is."""
        return self.ready(codec, EXPECTATION, index, size).state

    def settle(
        self,
        codec: Codec,
        draw: int,
        index: int,
        ready: Ready,
        values: NDArray[np.float32],
        arrived: NDArray[np.float32],
    ) -> None:
        """Keep what a stateful codec remembers after it sent a step."""
        following = codec.update(ready.state, values, arrived)
        before, views = self._memories.get((id(codec), draw)), dict[int, MomentSketch]()
        if type(codec).view is not Codec.view and codec.needs is not None and self._of(codec, index + 1).pooled:
            start = start_of(self._job.steps, index)
            if before is not None:
                views = {k: view for k, view in before.views.items() if k >= max(start, index + 1 - WINDOW)}
            views[index] = MomentSketch.from_spec(codec.view(ready.state, values), codec.needs)
        self._memories[id(codec), draw] = _Memory(
            index + 1, following, ready.shared, self._of(codec, index), ready.fitted, views
        )

    def key(self, index: int, draw: int) -> Key:
        """Of an encoding."""
        return Key.derive(self._settings.seed, tensor=self._job.tensor, step=self._job.steps[index], draw=draw)

    def _of(self, codec: Codec, index: int) -> Fitting:
        return self.source(index, codec.needs, itself=codec.fits_itself)

    def _fitted(self, codec: Codec, source: Fitting, size: int) -> _Fitted:
        """The state of a stateless codec for ``size`` values, fitted to steps of whatever size."""
        key = (id(codec), source, size)
        found = self._states.get(key)
        if found is None:
            latest = self._job.steps[source.steps[-1]]
            state, fitted = self._fit(codec, self._init(codec, size), source, latest)
            found = self._states[key] = _Fitted(state, fitted, codec.shared(state))
        return found

    def _init(self, codec: Codec, size: int) -> State:
        """Before the first step; a step of another size has another shape, which is not known."""
        shape = self._job.shape
        return codec.init(size, shape if shape is not None and math.prod(shape) == size else None)

    def _fit(
        self, codec: Codec, state: State, source: Fitting, step: int, views: Mapping[int, MomentSketch] | None = None
    ) -> tuple[State, bool]:
        """Fit a codec to steps, as its innermost part sees them, and say whether that set anything.

        ``views``: what a codec with memory saw at the steps of its burst; of earlier ones it sees what it would
        without memory.
        """
        if codec.needs is None:
            return state, False
        share = self._share(codec, source)
        if share is not None:
            state = codec.with_target(state, share)
        if type(codec).view is Codec.view:
            summary = self.sketch(source, codec.needs)
        elif source.pooled:
            seen = views or {}
            summary = pooled(seen[k] if k in seen else self._view(codec, codec.needs, k) for k in source.steps)
        else:
            values, _ = self._source.values(source.steps[0])
            # What is remembered of another size says nothing about these values.
            memory = state if state.size == values.size else self._init(codec, values.size)
            summary = MomentSketch.from_spec(codec.view(memory, values), codec.needs)
        after = codec.fit(state, summary, step)
        return after, any(state.arrays.get(name) is not array for name, array in after.arrays.items())

    def _view(self, codec: Codec, spec: SummarySpec, index: int) -> MomentSketch:
        """The summary of what a codec that remembers nothing yet sees of a step."""
        key = (id(codec), index)
        if key not in self._views:
            values, _ = self._source.values(index)
            self._views[key] = MomentSketch.from_spec(codec.view(self._init(codec, values.size), values), spec)
        return self._views[key]

    def _share(self, codec: Codec, source: Fitting) -> float | None:
        """The tensor's share at the latest step that fits a codec; None for one that allocates nothing."""
        if self._allocation is None or not codec.allocates:
            return None
        return self._allocation.share(codec, self._job.tensor, self._job.steps[source.steps[-1]], self._job.among)

    def _remembering(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A stateful codec at a step, replayed from the start of the burst if it was not there a step before."""
        start = start_of(self._job.steps, index)
        key = (id(codec), draw)
        memory = self._memories.get(key)
        if start == index:
            self._memories[key] = _Memory(index, self._init(codec, size), b"")
        elif memory is None or memory.following != index:
            self._memories.pop(key, None)
            for k in range(start, index):
                values, bad = self._source.values(k)
                if bad and self._settings.nonfinite == "skip":
                    continue
                ready = self._refitted(codec, self._memories.get(key), k, values.size)
                arrived = codec.simulate(ready.state, values, self.key(k, draw)).values
                self._sums.add((id(codec), draw), k, values, arrived)
                self.settle(codec, draw, k, ready, values, arrived)
        return self._refitted(codec, self._memories.get(key), index, size)

    def _refitted(self, codec: Codec, memory: _Memory | None, index: int, size: int) -> Ready:
        """The state for a step of ``size`` values; memories of another size are dropped."""
        note = None
        if memory is not None and memory.state.size != size:
            note = f"memory starts afresh: {memory.state.size} values became {size}"
        if memory is None or note is not None:
            memory = _Memory(index, self._init(codec, size), b"")
        source = self._of(codec, index)
        state, fitted = memory.state, memory.fitted
        # As in training: what was fitted stays until another step fits it.
        if memory.source != source:
            state, fitted = self._fit(codec, state, source, self._job.steps[index], memory.views)
        shared = codec.shared(state)
        return Ready(state, shared, 0 if shared == memory.shared else len(shared), fitted, note)


class Allocation:
    """Each codec's allocation at each step, worked out once, when the first tensor asks for it.

    A share depends on the gradients of the step and on nothing else: not on who asks first, nor on what a resumed
    sweep has done. Sketches of one step are in memory at a time.

    Args:
        source: where gradients are read.
        steps: tensor -> steps that it is present at.
        codecs: those of a sweep, with the tensors that share out among them; the ones that allocate nothing are
            ignored.
    """

    def __init__(
        self, source: Gradients, steps: Mapping[str, Iterable[int]], codecs: Iterable[tuple[Codec, Among]]
    ) -> None:
        self._source = source
        self._steps = {tensor: frozenset(present) for tensor, present in steps.items()}
        self._codecs = tuple((codec, among) for codec, among in codecs if codec.allocates)
        self._shares: dict[int, dict[tuple[str, Among, str], float]] = {}
        self._lock = threading.Lock()

    def share(self, codec: Codec, tensor: str, step: int, among: Among = None) -> float | None:
        """A tensor's share at the step that a codec is fitted on; None for a codec that allocates nothing."""
        if not codec.allocates:
            return None
        with self._lock:
            if step not in self._shares:
                self._shares[step] = self._allocated(step)
        return self._shares[step][str(codec), among, tensor]

    def _allocated(self, step: int) -> dict[tuple[str, Among, str], float]:
        present = [tensor for tensor, steps in self._steps.items() if step in steps]
        sketches: dict[tuple[SummarySpec, str], MomentSketch] = {}
        out = {}
        for codec, among in self._codecs:
            spec = codec.needs
            tensors = [tensor for tensor in present if among is None or tensor in among]
            if spec is None or not tensors:
                continue
            for tensor in tensors:
                if (spec, tensor) not in sketches:
                    sketches[spec, tensor] = self._source.sketch(tensor, step, spec)
            shares = codec.allocate([sketches[spec, tensor] for tensor in tensors])
            out.update({(str(codec), among, tensor): share for tensor, share in zip(tensors, shares, strict=True)})
        return out
