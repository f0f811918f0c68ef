"""Which steps fit what a codec sends at a step, what that fit gave, and what the receiver then holds.

A row of a stateless codec depends on its own step and on those that it was fitted on. A stateful codec also remembers
what it sent since the start of its burst of consecutive steps; its :class:`~gtrace.codecs.link.Sender` holds that.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np

from gtrace.codecs import Codec
from gtrace.codecs.link import LinkOptions, Sender
from gtrace.fitting.pooling import WINDOW, poolable, pooled
from gtrace.kernels.compare import add_error
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch
from gtrace.sweep.jobs import Fitting, start_of
from gtrace.sweep.schema import EXPECTATION
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from numpy.typing import NDArray

    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Among, Job, Settings
    from gtrace.sweep.sources import Seen, Values
    from gtrace.types import State, SummarySpec

T = TypeVar("T")

#: float64 numbers that running sums of codecs without memory hold for a tensor; further codecs are encoded again
_HELD = 1 << 21


class Ready(NamedTuple):
    """A codec about to encode one step.

    Attributes:
        state: its own.
        shared: what the receiver holds.
        columns: what a row says about the fit behind it.
        note: a remark for the row.
    """

    state: State
    shared: bytes
    columns: dict[str, Any]
    note: str | None = None


class _Fitted(NamedTuple):
    """A stateless codec fitted to a step: its state, whether that set anything, and what a receiver holds."""

    state: State
    fitted: bool
    shared: bytes


@dataclass(slots=True)
class _Memory:
    """What a stateful codec and its receiver hold after a step.

    Attributes:
        sender: the codec with its state.
        following: index of the next step.
        fitting: what the codec is fitted to, None before its first fit.
        fitted: whether anything of the state came out of a fit.
        views: sketches of what it saw at the steps of its burst, by index, that later steps pool.
    """

    sender: Sender
    following: int = -1
    fitting: Fitting | None = None
    fitted: bool = False
    views: dict[int, MomentSketch] = field(default_factory=dict)


class RunningSums:
    """Sums over the steps of a window, as far as a replay has come.

    Args:
        windows: of :func:`~gtrace.sweep.jobs.windows_of`.

    Attributes:
        first: index of a step -> that of its window's first step.
    """

    def __init__(self, windows: Iterable[tuple[int, int]]) -> None:
        self.first = {index: first for first, last in windows for index in range(first, last + 1)}
        #: key -> index of the step that comes next, the sum
        self._held: dict[Hashable, tuple[int, NDArray[np.float64]]] = {}

    def at(self, key: Hashable, index: int, size: int, *, always: bool = True) -> NDArray[np.float64] | None:
        """Where a step's ``size`` numbers are to be added, float64[size]; None if the sum is not kept.

        Args:
            key: of the sum.
            index: of the step, whose numbers the caller adds at once.
            size: how many numbers the sum has.
            always: whether the sum is kept however many numbers others hold.
        """
        first = self.first.get(index)
        following, total = self._held.pop(key, (None, None))
        if first == index:
            held = sum(other.size for _, other in self._held.values())
            total = np.zeros(size) if always or held + size <= _HELD else None
        elif first is None or following != index or (total is not None and total.size != size):
            total = None
        if total is not None:
            self._held[key] = index + 1, total
        return total

    def take(self, key: Hashable, index: int) -> NDArray[np.float64] | None:
        """The sum up to and with a step, which is forgotten; None if it was not kept or a step is missing."""
        following, total = self._held.pop(key, (None, None))
        return total if following == index + 1 else None


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
        sketches: of the step that is gone through, as far as they are made.
    """

    def __init__(
        self, source: Values, job: Job, settings: Settings, allocation: Allocation | None, sums: RunningSums
    ) -> None:
        self._source, self._job, self._settings = source, job, settings
        self._allocation, self._sums = allocation, sums
        self.needs = tuple(dict.fromkeys(c.needs for _, codecs in job.wanted for c, _ in codecs if c.needs is not None))
        #: what the step before asked for, and this step does: sketches under their index, and what follows from them
        self._before: dict[Hashable, Any] = {}
        self._recent: dict[Hashable, Any] = {}
        self.sketches: dict[SummarySpec, MomentSketch] = {}
        self._memories: dict[tuple[int, int], _Memory] = {}
        # What is fitted when is said by the settings.
        self._options = LinkOptions(RefitSchedule((0,)), settings.seed)
        self._at = -1

    def look(self, index: int) -> Seen:
        """Go on to a step."""
        self._at = index
        self.sketches = self.recent(index, dict)
        found = self._source.look(index, self.needs)
        self.sketches.update(found.sketches)
        return found

    def end(self) -> None:
        """Leave the step."""
        if self._settings.refit == "pooled":
            # What follows from a sketch is many times its size, and a pool wants the sums alone.
            self.sketches.update({spec: one.bare() for spec, one in self.sketches.items() if poolable(spec)})
        self._before, self._recent = self._recent, {}

    def recent(self, key: Hashable, make: Callable[[], T]) -> T:
        """What was made of late, or is made now; what two steps in a row do not ask for is dropped."""
        if key not in self._recent:
            self._recent[key] = self._before.pop(key) if key in self._before else make()
        found: T = self._recent[key]
        return found

    def summary(self, index: int, spec: SummarySpec) -> MomentSketch:
        """The sketch of a step."""
        found: dict[SummarySpec, MomentSketch] = self.recent(index, dict)
        if spec not in found:
            # A step that is not being gone through, as after a resume, is read once for all that its codecs need.
            needs = (spec,) if index == self._at else {*self.needs, spec}
            found.update(self._source.sketches(index, [need for need in needs if need not in found]))
        return found[spec]

    def sketch(self, fitting: Fitting, spec: SummarySpec) -> MomentSketch:
        """What a codec is fitted to: a step's sketch, or the pool of several."""
        if not fitting.pooled:
            return self.summary(fitting.steps[0], spec)
        return self.recent((fitting, spec), lambda: pooled(self.summary(k, spec).bare() for k in fitting.steps))

    def ready(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A codec before it encodes ``size`` values of a step."""
        if codec.stateful and draw != EXPECTATION:
            return self._remembering(codec, draw, index, size)
        fitting = self._settings.source(codec, index, self._job.steps)
        state, fitted, shared = self.recent((id(codec), fitting, size), partial(self._fit, codec, fitting, size))
        sent = len(shared)
        if index > 0 and shared:
            before = self._settings.source(codec, index - 1, self._job.steps)
            known = self.recent((id(codec), before, size), partial(self._fit, codec, before, size))
            sent = 0 if known.shared == shared else sent
        return Ready(state, shared, self._columns(codec, index, fitting, 8.0 * sent / max(1, size), fitted or shared))

    def settle(
        self, codec: Codec, draw: int, index: int, values: NDArray[np.float32], arrived: NDArray[np.float32]
    ) -> None:
        """Keep what a stateful codec remembers after it sent a step."""
        memory = self._memories[id(codec), draw]
        own_view = type(codec).view is not Codec.view and codec.needs is not None
        if own_view and self._settings.source(codec, index + 1, self._job.steps).pooled:
            assert codec.needs is not None
            first = max(start_of(self._job.steps, index), index + 1 - WINDOW)
            memory.views = {k: view for k, view in memory.views.items() if k >= first}
            memory.views[index] = MomentSketch.from_spec(codec.view(memory.sender.state, values), codec.needs)
        memory.sender.settle(values, arrived)
        memory.following = index + 1

    def key(self, index: int, draw: int) -> Key:
        """Of an encoding."""
        return Key.derive(self._settings.seed, tensor=self._job.tensor, step=self._job.steps[index], draw=draw)

    def _columns(self, codec: Codec, index: int, fitting: Fitting, bits: float, fitted: object) -> dict[str, Any]:
        """What a row says about the fit behind it."""
        found = {"bits_shared": bits, "fitted_on": fitting.label(index, self._job.steps) if fitted else "-"}
        if codec.allocates:
            found["sparsity_asked"] = self._share(codec, fitting)
        return found

    def _fit(self, codec: Codec, fitting: Fitting, size: int) -> _Fitted:
        """A stateless codec for ``size`` values, fitted to steps of whatever size."""
        before = after = codec.init(size, self._shape(size))
        if codec.needs is not None:
            if codec.allocates:
                before = codec.with_target(before, self._share(codec, fitting))
            after = codec.fit(
                before, self._seen(codec, codec.needs, before, fitting), self._job.steps[fitting.steps[-1]]
            )
        return _Fitted(after, _differs(before, after), codec.shared(after))

    def _shape(self, size: int) -> tuple[int, ...] | None:
        """A step of another size has another shape, which is not known."""
        shape = self._job.shape
        return shape if shape is not None and math.prod(shape) == size else None

    def _seen(
        self,
        codec: Codec,
        spec: SummarySpec,
        state: State,
        fitting: Fitting,
        views: Mapping[int, MomentSketch] = MappingProxyType({}),
    ) -> MomentSketch:
        """What a codec is fitted to, as its innermost part sees the steps.

        ``views``: what a codec with memory saw at the steps of its burst; of earlier ones it sees what it would
        without memory.
        """
        if type(codec).view is Codec.view:
            return self.sketch(fitting, spec)
        if fitting.pooled:
            return pooled(views[k] if k in views else self._view(codec, spec, k) for k in fitting.steps)
        values, _ = self._source.values(fitting.steps[0])
        # What is remembered of another size says nothing about these values.
        memory = state if state.size == values.size else codec.init(values.size, self._shape(values.size))
        return MomentSketch.from_spec(codec.view(memory, values), spec)

    def _view(self, codec: Codec, spec: SummarySpec, index: int) -> MomentSketch:
        """The summary of what a codec that remembers nothing yet sees of a step."""

        def made() -> MomentSketch:
            values, _ = self._source.values(index)
            return MomentSketch.from_spec(codec.view(codec.init(values.size, self._shape(values.size)), values), spec)

        return self.recent((id(codec), index), made)

    def _share(self, codec: Codec, fitting: Fitting) -> float:
        """The tensor's share at the latest step that fits a codec."""
        assert self._allocation is not None
        return self._allocation.share(codec, self._job.tensor, self._job.steps[fitting.steps[-1]], self._job.among)

    def _remembering(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A stateful codec at a step, replayed from the start of the burst if it was not there a step before."""
        start = start_of(self._job.steps, index)
        key = (id(codec), draw)
        memory = self._memories.get(key)
        if memory is None or memory.following != index or start == index:
            self._memories.pop(key, None)
            for k in range(start, index):
                values, bad = self._source.values(k)
                if bad and self._settings.nonfinite == "skip":
                    continue
                ready = self._refitted(codec, key, k, values.size)
                arrived = codec.simulate(ready.state, values, self.key(k, draw)).values
                total = self._sums.at(key, k, values.size)
                if total is not None:
                    add_error(values, arrived, total)
                self.settle(codec, draw, k, values, arrived)
        return self._refitted(codec, key, index, size)

    def _refitted(self, codec: Codec, key: tuple[int, int], index: int, size: int) -> Ready:
        """A stateful codec for a step of ``size`` values; memories of another size are dropped."""
        note, memory = None, self._memories.get(key)
        if memory is not None and memory.sender.state.size != size:
            note = f"memory starts afresh: {memory.sender.state.size} values became {size}"
        if memory is None or note is not None:
            sender = Sender(codec, size, self._options, tensor=self._job.tensor, shape=self._shape(size))
            memory = self._memories[key] = _Memory(sender)
        sender, fitting = memory.sender, self._settings.source(codec, index, self._job.steps)
        # As in training: what was fitted stays until another step fits it.
        if memory.fitting != fitting and codec.needs is not None:
            before = sender.state
            summary = self._seen(codec, codec.needs, before, fitting, memory.views)
            sender.fit(summary, self._job.steps[index], share=self._share(codec, fitting) if codec.allocates else None)
            memory.fitted = bool(summary.sums.size) and _differs(before, sender.state)
        memory.fitting = fitting
        shared = codec.shared(sender.state)
        sent = 0 if shared == sender.known else len(shared)
        sender.known = shared
        bits = 8.0 * sent / max(1, size)
        return Ready(sender.state, shared, self._columns(codec, index, fitting, bits, memory.fitted or shared), note)


def _differs(before: State, after: State) -> bool:
    """Whether a fit set anything."""
    return any(before.arrays.get(name) is not array for name, array in after.arrays.items())


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

    def share(self, codec: Codec, tensor: str, step: int, among: Among = None) -> float:
        """A tensor's share at the step that a codec is fitted on."""
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
