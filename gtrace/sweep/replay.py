"""One tensor's way through its steps: read once, summarize, fit, encode, decode, compare."""

from __future__ import annotations

import math
import time
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs import Codec, ExpectingCodec, LevelCodec, expecting
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import TraceError
from gtrace.fitting import alq_levels, optimal_levels
from gtrace.fitting.pooling import WINDOW, pooled
from gtrace.kernels.compare import add_error
from gtrace.kernels.norms import count_nonfinite, power_sum
from gtrace.metrics import Reference, relative
from gtrace.sketch import MomentSketch
from gtrace.sweep.batched import MANY, Schedule, Together
from gtrace.sweep.gradient_noise import NOISE
from gtrace.sweep.jobs import (
    Block,
    Detail,
    Fitting,
    Job,
    Settings,
    Source,
    Timing,
    Totals,
    Wanted,
    fitting_steps,
    start_of,
)
from gtrace.sweep.rows import (
    Drawn,
    convergence,
    density,
    draw_row,
    drawn_bias,
    expectation_row,
    identity,
    levels_of,
    relate_to_noise,
    spec_name,
)
from gtrace.sweep.schema import EXPECTATION
from gtrace.sweep.windows import RunningSums, Window
from gtrace.types import Key

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.sweep.allocation import Allocation
    from gtrace.sweep.store import Row, Table
    from gtrace.types import State, SummarySpec

OPEN_LOOP = "open loop: the trace's gradients do not react to the codec"


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


class _Link(NamedTuple):
    """Where a stateful codec stands after a step.

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


class Weighed(NamedTuple):
    """What Adam's update makes of a tensor at one step.

    Attributes:
        energy: sum w g^2.
        sketches: weighted ones, by what codecs need.
    """

    energy: float
    sketches: dict[SummarySpec, MomentSketch]


class Replay:
    """A tensor's steps in order, with what neighbouring steps share: summaries, fitted states, memories.

    A row of a stateless codec depends on its own step and on those that it was fitted on, so it comes out the
    same wherever a sweep resumes. A stateful codec is replayed from the start of its burst of consecutive steps, and
    what a window adds up from the start of the window, unless this replay has gone through those steps already. The
    tensor may have another size at each step; memories, which are of one size, then start afresh.
    """

    #: Whether rows of closed forms may leave as tables, which nothing changes any more.
    _in_tables = True

    def __init__(self, source: Source, job: Job, settings: Settings, allocation: Allocation | None = None) -> None:
        self._source = source
        self._job = job
        self._settings = settings
        self._allocation = allocation
        self._summaries: dict[int, dict[SummarySpec, MomentSketch]] = {}
        #: decayed means of steps
        self._pools: dict[tuple[Fitting, SummarySpec], MomentSketch] = {}
        #: what codecs without memory see of a step
        self._views: dict[tuple[str, int], MomentSketch] = {}
        self._states: dict[tuple[str, Fitting, int], _Fitted] = {}
        self._needs = list(dict.fromkeys(c.needs for _, codecs in job.wanted for c, _ in codecs if c.needs is not None))
        self._identities = {id(codec): identity(codec) for _, wanted in job.wanted for codec, _ in wanted}
        self._links: dict[tuple[str, int], _Link] = {}
        self._optima: dict[tuple[SummarySpec, int, bool], float] = {}
        self._together = Together(self._sketch)
        self._sums = RunningSums(job.windows)
        self._ends = {last: first for first, last in job.windows}
        #: of the step that is gone through, None where no window ends there
        self._window: Window | None = None
        #: (codec, index) -> what encoded that step of a window
        self._sent: dict[tuple[str, int], Ready] = {}
        #: of the step that is gone through, None where second moments are not known
        self._weighed: Weighed | None = None

    def blocks(self) -> Iterator[Block]:
        """Each wanted step's rows."""
        for index, wanted in self._job.wanted:
            yield self._block(index, wanted).named(self._job.names)
            near = range(index, min(index + 2, len(self._job.steps)))
            near_sources = {
                self._settings.source(k, self._job.steps, spec) for k in near for spec in [None, *self._needs]
            }
            sources = near_sources | {index}
            keep = {k for source in sources for k in fitting_steps(source)}
            self._summaries = {
                # What follows from a sketch is many times its size, and a pool wants the sums alone.
                k: found if k in near_sources else {spec: sketch.bare() for spec, sketch in found.items()}
                for k, found in self._summaries.items()
                if k in keep
            }
            self._views = {key: view for key, view in self._views.items() if key[1] in keep}
            self._pools = {key: pool for key, pool in self._pools.items() if key[0] in sources}
            self._states = {key: state for key, state in self._states.items() if key[1] in sources}
            self._together.forget(sources)
            if index in self._ends:
                self._sent.clear()
            self._optima.clear()

    def _block(self, index: int, wanted: Wanted) -> Block:
        job, settings = self._job, self._settings
        step = job.steps[index]
        reference, bad = self._look(index)
        self._weighed = None
        note, warnings = None, []
        if bad:
            taken = "taken as zero" if settings.nonfinite == "zero" else "skipped"
            where = f"{job.tensor} at step {step}: {bad} of {reference.size} gradients are not finite"
            if settings.nonfinite == "error":
                raise TraceError(f"{where}; pass --nonfinite skip or zero, or sweep other --steps")
            warnings.append(f"{where}; {taken}")
            note = f"{bad} non-finite, {taken}"
        common: Row = {"tensor": job.tensor, "step": step, "n": reference.size, "note": note}
        if bad and settings.nonfinite == "skip":
            skipped = [
                {**common, **self._identities[id(codec)], "draw": draw} for codec, draws in wanted for draw in draws
            ]
            return Block(skipped, [], warnings)
        self._weighed = self._weigh(index, reference)
        self._window = self._ending(index)
        common["energy"] = reference.energy
        common["mean_abs"] = reference.mean_abs
        rows: list[Row] = []
        times: list[Timing] = []
        tables, rest = self._tables(wanted, index, reference, common, times)
        for codec, draws in rest:
            for row, spent in self._codec_rows(codec, draws, index, reference, common):
                rows.append(row)
                times.extend((job.tensor, step, row["codec"], row["draw"], stage, s) for stage, s in spent.items())
        details = self._details(index, [codec for codec, _ in wanted], reference.size) if settings.optimal else []
        noise = self._source.noise(job.tensor, step)
        if noise is not None:
            relate_to_noise(rows, tables, wanted, noise)
            details.append((job.tensor, step, NOISE, noise._asdict()))
        return Block(rows, times, warnings, details, tables)

    def _tables(
        self,
        wanted: Wanted,
        index: int,
        reference: Reference | Totals,
        common: Row,
        times: list[Timing],
    ) -> tuple[list[Table], Wanted]:
        """Expectations that are worked out together, by the sketch that they want, and what is left to do."""
        groups, rest = self._together.split(wanted) if self._in_tables else ([], wanted)
        values = reference.values if isinstance(reference, Reference) else None
        optimum = partial(self._optimum, index) if self._settings.optimal else None
        tables = []
        for group in groups:
            clock = time.perf_counter()
            self._summary(index, group.sets.needs, values)
            sketched = time.perf_counter()
            weighed = None
            if self._weighed is not None:
                weighed = self._weighted(group.sets.needs, reference), self._weighed.energy
            steps, needs = self._job.steps, group.sets.needs
            source = self._settings.source(index, steps, needs)
            before = self._settings.source(index - 1, steps, needs) if index else None
            schedule = Schedule(source, before, self._label(index, source))
            table = self._together.table(group, index, schedule, common, optimum, self._job.dtype_bits, weighed)
            if group.sets.codecs[0].unbiased:
                errors = partial(self._together.errors, group, size=common["n"])
                lost = self._expected_loss(group.sets, index, table.numbers["squared_error"], errors)
                if lost is not None:
                    table = table._replace(
                        same={**table.same, **self._window_columns()}, numbers={**table.numbers, "window_error": lost}
                    )
            tables.append(table)
            spent = {"sketch": sketched - clock, "expect": time.perf_counter() - sketched}
            times.extend((self._job.tensor, common["step"], MANY, EXPECTATION, *stage) for stage in spent.items())
        return tables, rest

    def _codec_rows(
        self, codec: Codec, draws: tuple[int, ...], index: int, reference: Reference | Totals, common: Row
    ) -> Iterator[tuple[Row, dict[str, float]]]:
        values = reference.values if isinstance(reference, Reference) else None
        common = {**common, **self._identities[id(codec)]}
        if codec.stateful:
            common["note"] = "; ".join(filter(None, (common["note"], OPEN_LOOP)))
        expected = None
        needs = codec.needs if expecting(codec) else None
        for draw in draws:
            clock = time.perf_counter()
            built = needs is not None and needs not in self._summaries.get(index, {})
            if needs is not None:
                self._summary(index, needs, values)
            sketched = time.perf_counter()
            ready = self._ready(codec, draw, index, reference.size)
            fitted = time.perf_counter()
            fit: Row = {
                "bits_shared": 8.0 * ready.sent / max(1, reference.size),
                "fitted_on": self._fitted_on(codec, index, ready),
            }
            share = self._share(codec, index)
            if share is not None:
                fit["sparsity_asked"] = share
            if ready.note is not None:
                fit["note"] = "; ".join(filter(None, (common["note"], ready.note)))
            if needs is not None and expected is None:
                assert expecting(codec)
                expected = codec.expect(ready.state, self._summary(index, needs))
            if draw == EXPECTATION:
                if expected is None:
                    continue
                optimum = None
                if self._settings.optimal and isinstance(codec, LevelCodec):
                    optimum = self._optimum(index, codec, codec.levels(ready.state).size)
                row = expectation_row({**common, **fit}, expected, optimum, self._job.dtype_bits)
                assert expecting(codec)
                row["update_error"] = self._update_error(codec, ready.state, index, reference)
                if codec.unbiased and not codec.stateful:
                    errors = partial(self._errors, codec, size=reference.size)
                    lost = self._expected_loss(self._spec(codec), index, np.array([expected.squared_error]), errors)
                    if lost is not None:
                        row.update(self._window_columns(), window_error=float(lost[0]))
                spent = {"fit": fitted - sketched}
                yield row, {"sketch": sketched - clock, **spent} if built else spent
                continue
            drawn = self._draw(codec, draw, index, ready, reference)
            norms = None if expected is None else expected.bits_norms
            row = draw_row({**common, **fit}, draw, drawn, norms, self._job.dtype_bits)
            row["relative_bias"] = drawn_bias(codec, expected, row)
            if drawn.window_error is not None:
                row.update(self._window_columns(), window_error=drawn.window_error)
            yield row, drawn.spent

    def _draw(self, codec: Codec, draw: int, index: int, ready: Ready, reference: Reference | Totals) -> Drawn:
        """Send, compare, and keep what a stateful codec remembers."""
        assert isinstance(reference, Reference), "draws need values"
        values = reference.values
        started = time.perf_counter()
        arrived = codec.simulate(ready.state, values, self._key(index, draw))
        ended = time.perf_counter()
        if codec.stateful:
            self._links[self._spec(codec), draw] = self._linked(
                codec, self._links.get((self._spec(codec), draw)), index, ready, values, arrived.values
            )
        self._keep_error(codec, draw, index, ready, values, arrived.values)
        found = reference.compare(arrived.values)
        clipped = codec.clipping(ready.state, values, arrived.values)
        lost = None if self._window is None else self._loss(codec, draw, index, values, arrived.values)
        spent = {"simulate": ended - started, "compare": time.perf_counter() - ended}
        body = arrived.payload_bytes - ENVELOPE_BYTES
        return Drawn(found, body, arrived.coded, clipped, spent, window_error=lost)

    def _ending(self, index: int) -> Window | None:
        """The window that ends at a step; None also where the gradients of its steps have no sum."""
        first = self._ends.get(index)
        if first is None:
            return None
        steps = self._job.steps[first : index + 1]
        energy = self._source.energy_of_sum(self._job.tensor, steps, zero=self._settings.nonfinite == "zero")
        return None if energy is None else Window(first, len(steps), energy)

    def _window_columns(self) -> Row:
        assert self._window is not None
        return {"window": self._window.steps, "window_energy": self._window.energy}

    def _expected_loss(
        self,
        key: Hashable,
        index: int,
        errors: NDArray[np.float64],
        errors_at: Callable[[int], NDArray[np.float64]],
    ) -> NDArray[np.float64] | None:
        """Expected squared errors added up over the window that ends at a step, None where none does.

        Errors of unbiased codecs without memory are independent of each other, so their squares add up.
        """
        total = self._sums.at(key, index, errors.size)
        if total is not None:
            total += errors
        if self._window is None:
            return None
        total = self._sums.take(key, index)
        if total is None:
            total = np.zeros(errors.size)
            for k in range(self._window.first, index):
                total += errors_at(k)
            total += errors
        return total

    def _errors(self, codec: ExpectingCodec, index: int, size: int) -> NDArray[np.float64]:
        assert codec.needs is not None
        state = self._ready(codec, EXPECTATION, index, size).state
        return np.array([codec.expect(state, self._summary(index, codec.needs)).squared_error])

    def _keep_error(
        self,
        codec: Codec,
        draw: int,
        index: int,
        ready: Ready,
        values: NDArray[np.float32],
        arrived: NDArray[np.float32],
    ) -> None:
        """Add an error to the sum of its window, or keep what it takes to encode the step again."""
        total = self._sums.at((self._spec(codec), draw), index, values.size, always=codec.stateful)
        if total is not None:
            add_error(values, arrived, total)
        elif not codec.stateful and self._sums.covers(index):
            self._sent[self._spec(codec), index] = ready

    def _loss(
        self, codec: Codec, draw: int, index: int, values: NDArray[np.float32], arrived: NDArray[np.float32]
    ) -> float:
        """||sum of errors||^2 over the window that ends at a step."""
        assert self._window is not None
        total = self._sums.take((self._spec(codec), draw), index)
        if total is None:
            # Codecs with memory were replayed from the start of the burst; others are encoded again.
            assert not codec.stateful
            total = np.zeros(values.size)
            for k in range(self._window.first, index):
                before, _ = self._read(k)
                ready = self._sent.get((self._spec(codec), k)) or self._ready(codec, draw, k, before.size)
                add_error(before, codec.simulate(ready.state, before, self._key(k, draw)).values, total)
            add_error(values, arrived, total)
        return float(power_sum(total, 2))

    def _details(self, index: int, codecs: Sequence[Codec], size: int) -> list[Detail]:
        """What figures of levels need, at the tensor's last wanted step alone: it is much for every step."""
        if not self._job.final or index != self._job.wanted[-1][0]:
            return []
        found: dict[str, object] = {}
        for codec in codecs:
            levels = None
            if not codec.stateful:
                levels = levels_of(codec, self._ready(codec, EXPECTATION, index, size).state)
            if levels is not None and codec.needs is not None:
                found[f"levels {codec}"] = levels
                found[f"density {spec_name(codec.needs)}"] = density(self._summary(index, codec.needs))
        curves = convergence(codecs, self._summaries.get(index, {}))
        if curves is not None:
            found["convergence"] = curves
        return [(self._job.tensor, self._job.steps[index], what, value) for what, value in found.items()]

    def _update_error(
        self, codec: ExpectingCodec, state: State, index: int, reference: Reference | Totals
    ) -> float | None:
        """Expected sum w (Q(g) - g)^2 over sum w g^2; None without second moments."""
        if self._weighed is None or codec.needs is None:
            return None
        plain = self._summary(index, codec.needs)
        error = codec.weighted_error(state, plain, self._weighted(codec.needs, reference))
        return relative(error, self._weighed.energy)

    def _weigh(self, index: int, reference: Reference | Totals) -> Weighed | None:
        """Where to gather weighted sketches of a step, with those that need the tensor to be read once more."""
        del index
        assert isinstance(reference, Reference)
        return None if reference.weights is None else Weighed(reference.weighted_energy, {})

    def _weighted(self, spec: SummarySpec, reference: Reference | Totals) -> MomentSketch:
        assert self._weighed is not None
        found = self._weighed.sketches
        if spec not in found:
            assert isinstance(reference, Reference)
            found[spec] = MomentSketch.from_spec(reference.values, spec, weights=reference.weights)
        return found[spec]

    def _look(self, index: int) -> tuple[Reference | Totals, int]:
        """What rows of a step are compared with, and how many of its values are not finite."""
        values, bad = self._read(index)
        step = self._job.steps[index]
        return Reference(values, self._source.update_weights(self._job.tensor, step, values)), bad

    def _read(self, index: int) -> tuple[NDArray[np.float32], int]:
        values = self._source.read(self._job.tensor, self._job.steps[index])
        bad = int(count_nonfinite(values))
        if bad:
            values = np.where(np.isfinite(values), values, np.float32(0))
        return values, bad

    def _key(self, index: int, draw: int) -> Key:
        return Key.derive(self._settings.seed, tensor=self._job.tensor, step=self._job.steps[index], draw=draw)

    def _summary(self, index: int, spec: SummarySpec, values: NDArray[np.float32] | None = None) -> MomentSketch:
        found = self._summaries.setdefault(index, {})
        if spec not in found:
            if values is None:
                # Resumed after this step was done, or fitted on a step that is not swept itself: read it once for all.
                values, _ = self._read(index)
                missing = [need for need in {*self._needs, spec} if need not in found]
                found.update((need, MomentSketch.from_spec(values, need)) for need in missing)
            else:
                found[spec] = MomentSketch.from_spec(values, spec)
        return found[spec]

    def _sketch(self, source: Fitting, spec: SummarySpec) -> MomentSketch:
        """What a codec is fitted to: a step's summary, or the pool of several."""
        if isinstance(source, int):
            return self._summary(source, spec)
        found = self._pools.get((source, spec))
        if found is None:
            found = self._pools[source, spec] = pooled(self._summary(k, spec) for k in source)
        return found

    def _ready(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        if codec.stateful and draw != EXPECTATION:
            return self._remembering(codec, draw, index, size)
        source = self._source_of(codec, index)
        state, fitted, shared = self._fitted(codec, source, size)
        if index > 0 and shared:
            before = self._source_of(codec, index - 1)
            if before == source or self._fitted(codec, before, size).shared == shared:
                return Ready(state, shared, 0, fitted)
        return Ready(state, shared, len(shared), fitted)

    def _fitted(self, codec: Codec, source: Fitting, size: int) -> _Fitted:
        """The state of a stateless codec for ``size`` values, fitted to steps of whatever size."""
        key = (self._spec(codec), source, size)
        found = self._states.get(key)
        if found is None:
            latest = self._job.steps[fitting_steps(source)[-1]]
            state, fitted = self._fit(codec, self._init(codec, size), source, latest)
            found = self._states[key] = _Fitted(state, fitted, codec.shared(state))
        return found

    def _init(self, codec: Codec, size: int) -> State:
        """Before the first step; a step of another size has another shape, which is not known."""
        shape = self._job.shape
        return codec.init(size, shape if shape is not None and math.prod(shape) == size else None)

    def _spec(self, codec: Codec) -> str:
        spec: str = self._identities[id(codec)]["codec"]
        return spec

    def _fit(
        self, codec: Codec, state: State, source: Fitting, step: int, views: Mapping[int, MomentSketch] | None = None
    ) -> tuple[State, bool]:
        """Fit a codec to steps, as its innermost part sees them, and say whether that set anything.

        ``views``: what a codec with memory saw at the steps of its burst; of earlier ones it sees what it would
        without memory.
        """
        if codec.needs is None:
            return state, False
        if self._allocation is not None:
            latest = self._job.steps[fitting_steps(source)[-1]]
            share = self._allocation.share(codec, self._job.tensor, latest, self._job.among)
            if share is not None:
                state = codec.with_target(state, share)
        if type(codec).view is Codec.view:
            summary = self._sketch(source, codec.needs)
        elif isinstance(source, int):
            values, _ = self._read(source)
            # What is remembered of another size says nothing about these values.
            memory = state if state.size == values.size else self._init(codec, values.size)
            summary = MomentSketch.from_spec(codec.view(memory, values), codec.needs)
        else:
            seen = views or {}
            summary = pooled(seen[k] if k in seen else self._view(codec, codec.needs, k) for k in source)
        after = codec.fit(state, summary, step)
        return after, any(state.arrays.get(name) is not array for name, array in after.arrays.items())

    def _view(self, codec: Codec, spec: SummarySpec, index: int) -> MomentSketch:
        """The summary of what a codec that remembers nothing yet sees of a step."""
        key = (self._spec(codec), index)
        if key not in self._views:
            values, _ = self._read(index)
            self._views[key] = MomentSketch.from_spec(codec.view(self._init(codec, values.size), values), spec)
        return self._views[key]

    def _share(self, codec: Codec, index: int) -> float | None:
        if self._allocation is None:
            return None
        latest = self._job.steps[fitting_steps(self._source_of(codec, index))[-1]]
        return self._allocation.share(codec, self._job.tensor, latest, self._job.among)

    def _remembering(self, codec: Codec, draw: int, index: int, size: int) -> Ready:
        """A stateful codec at a step, replayed from the start of the burst where it does not stand there yet."""
        steps = self._job.steps
        start = start_of(steps, index)
        link = self._links.get((self._spec(codec), draw))
        if start == index:
            link = _Link(index, self._init(codec, size), b"")
        elif link is None or link.following != index:
            link = None
            for k in range(start, index):
                values, bad = self._read(k)
                if bad and self._settings.nonfinite == "skip":
                    continue
                ready = self._refitted(codec, link, k, values.size)
                arrived = codec.simulate(ready.state, values, self._key(k, draw)).values
                self._keep_error(codec, draw, k, ready, values, arrived)
                link = self._linked(codec, link, k, ready, values, arrived)
        if link is not None:
            self._links[self._spec(codec), draw] = link
        return self._refitted(codec, link, index, size)

    def _linked(
        self,
        codec: Codec,
        link: _Link | None,
        index: int,
        ready: Ready,
        values: NDArray[np.float32],
        arrived: NDArray[np.float32],
    ) -> _Link:
        """Where a stateful codec stands after it sent a step."""
        following = codec.update(ready.state, values, arrived)
        steps, views = self._job.steps, dict[int, MomentSketch]()
        if type(codec).view is not Codec.view and not isinstance(self._source_of(codec, index + 1), int):
            assert codec.needs is not None
            start = start_of(steps, index)
            if link is not None:
                views = {k: view for k, view in link.views.items() if k >= max(start, index + 1 - WINDOW)}
            views[index] = MomentSketch.from_spec(codec.view(ready.state, values), codec.needs)
        return _Link(index + 1, following, ready.shared, self._source_of(codec, index), ready.fitted, views)

    def _refitted(self, codec: Codec, link: _Link | None, index: int, size: int) -> Ready:
        """The state for a step of ``size`` values; memories of another size are dropped."""
        note = None
        if link is not None and link.state.size != size:
            note = f"memory starts afresh: {link.state.size} values became {size}"
        if link is None or note is not None:
            link = _Link(index, self._init(codec, size), b"")
        source = self._source_of(codec, index)
        state, fitted = link.state, link.fitted
        # As in training: what was fitted stays until another step fits it.
        if link.source != source:
            state, fitted = self._fit(codec, state, source, self._job.steps[index], link.views)
        shared = codec.shared(state)
        return Ready(state, shared, 0 if shared == link.shared else len(shared), fitted, note)

    def _fitted_on(self, codec: Codec, index: int, ready: Ready) -> str:
        if not (ready.shared or ready.fitted):
            return "-"
        return self._label(index, self._source_of(codec, index))

    def _source_of(self, codec: Codec, index: int) -> Fitting:
        return self._settings.source_of(codec, index, self._job.steps)

    def _label(self, index: int, source: Fitting) -> str:
        if not isinstance(source, int):
            return f"pooled {len(source)} step{'s' * (len(source) > 1)}"
        if source == index:
            return "itself"
        return "previous" if source == index - 1 else f"step {self._job.steps[source]}"

    def _optimum(self, index: int, codec: LevelCodec, count: int) -> float | None:
        """The least expected error of any ``count`` levels on this very tensor, with the codec's own sketch."""
        if not has_optimum(codec):
            return None
        key = (codec.needs, count, codec.has_zero)
        if key not in self._optima:
            sketch = self._summary(index, codec.needs)
            if not sketch.sums.size:
                return None
            if codec.has_zero:
                best = optimal_levels(sketch, count, method="sketch")
            else:
                best = alq_levels(sketch, count.bit_length(), zero=False)
            self._optima[key] = sketch.expected_error(best, codec.has_zero)
        return self._optima[key]


def has_optimum(codec: Codec) -> bool:
    """Whether a codec's levels can be set beside the best ones."""
    return isinstance(codec, LevelCodec) and codec.needs.norm != "none"
