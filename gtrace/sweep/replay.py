"""Replay tensors through their steps: read, fit, expect or send, compare, and write a row for each codec.

Level codecs that want the same sketch go through a step together, on several small tensors at once, and their rows are
tables. Arrays over sets hold all codecs of the first tensor, then those of the next one.
"""

from __future__ import annotations

import math
import time
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from gtrace.codecs import Codec, expecting, level_grid
from gtrace.codecs.level_sets import LevelFit, LevelSets, judged_together, least_errors
from gtrace.errors import TraceError
from gtrace.kernels.compare import add_values
from gtrace.kernels.norms import power_sum
from gtrace.metrics import Reference, relative
from gtrace.noise import Noise
from gtrace.sweep.draws import ChunkDraws, Draws, Window
from gtrace.sweep.fits import Allocation, Fits, Ready, RunningSums, StepSketches
from gtrace.sweep.gradient_noise import NOISE
from gtrace.sweep.gradients import Gradients, energy_in_pieces
from gtrace.sweep.jobs import Block, Fitting, Job, Settings, Timing, Totals, Wanted
from gtrace.sweep.level_draws import LevelDraws
from gtrace.sweep.rows import (
    complete,
    convergence,
    density,
    draw_row,
    drawn_columns,
    expected_columns,
    identity,
    levels_of,
)
from gtrace.sweep.schema import EXPECTATION, NONFINITE
from gtrace.sweep.sources import Sample, Seen, Values, source_of
from gtrace.sweep.store import Row, RowTable
from gtrace.trace.sketches import sketch_name
from gtrace.types import WHOLE_MODEL, Expectation, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.grids import Expectations
    from gtrace.sketch import MomentSketch, SketchSet

OPEN_LOOP = "open loop: the trace's gradients do not react to the codec"
#: entry in the table of times for time that several codecs share
MANY = "*"


class Group(NamedTuple):
    """Codecs that want the same sketch and the same draws, with the columns that identify them."""

    sets: LevelSets
    encoder: LevelDraws
    identities: tuple[Row, ...]
    draws: tuple[int, ...]


@lru_cache(maxsize=64)
def _group(codecs: tuple[Codec, ...], draws: tuple[int, ...]) -> Group:
    return Group(LevelSets(codecs), LevelDraws(codecs), tuple(map(identity, codecs)), draws)


def split(wanted: Wanted, job: Job) -> tuple[list[Group], Wanted]:
    """What level codecs do together at a step, and the rest of the work."""
    groups: dict[tuple[SummarySpec | None, bool, tuple[int, ...]], list[Codec]] = {}
    rest = []
    for codec, draws in wanted:
        # Rows in a table cannot be scaled up from a sample; a tensor in chunks is drawn with other codecs.
        if job.sample is None and judged_together(codec):
            together = (EXPECTATION,) * (EXPECTATION in draws) if job.chunked else draws
            groups.setdefault((codec.needs, codec.unbiased, together), []).append(codec)
            draws = tuple(draw for draw in draws if draw not in together)
        if draws:
            rest.append((codec, draws))
    return [_group(tuple(each), draws) for (_, _, draws), each in groups.items() if draws], tuple(rest)


#: what is seen between two steps
_NOTHING = Seen(Totals(0, 0.0, 0.0), 0)
#: elements of the largest tensor that goes through its steps with others, and of all of them together
_SMALL, _TOGETHER = 1 << 13, 1 << 15
#: batches for each of several workers, so that they end together, and the fewest tensors that a batch is cut to
_EACH, _FEWEST = 4, 4


def batches(gradients: Gradients, jobs: Sequence[Job], workers: int) -> list[tuple[Job, ...]]:
    """Jobs for one :class:`Replay` each: small tensors that want the same at the same steps, and others alone."""
    found: list[list[Job]] = []
    latest: dict[Hashable, list[Job]] = {}
    small = [job for job in jobs if _goes_along(gradients, job)]
    most = len(small) if workers == 1 else max(_FEWEST, -(-len(small) // (_EACH * workers)))
    for job in small:
        key = job.steps, job.windows, job.dtype_bits, job.among
        batch = latest.get(key, [])
        same = batch and (batch[0].wanted, batch[0].names) == (job.wanted, job.names)
        if not same or len(batch) >= most or sum(each.size for each in batch) + job.size > _TOGETHER:
            batch = latest[key] = []
            found.append(batch)
        batch.append(job)
    return [*map(tuple, found), *((job,) for job in jobs if not _goes_along(gradients, job))]


def _goes_along(gradients: Gradients, job: Job) -> bool:
    """Whether a tensor can go with others."""
    values = job.size <= _SMALL and not (job.sketched or job.chunked or job.sample) and job.tensor != WHOLE_MODEL
    # Gradients of outputs may change their size, and second moments weigh each tensor's errors.
    return values and gradients.kind != "neural" and job.tensor not in gradients.moments


class Replay:
    """Replays tensors through their steps in order, from any source.

    A row of a stateless codec depends on its own step and on those that it was fitted on, so a resumed sweep gives the
    same rows. A stateful codec is replayed from the start of its burst, and sums over a window from the start of the
    window, unless this replay has gone through those steps already.

    Args:
        gradients: the gradients.
        jobs: those of a batch, see :func:`batches`.
        settings: the settings.
        allocation: what tensors share out among themselves.
        keep: tensor -> steps whose sketches to keep.

    Attributes:
        tensors: the replays of single tensors, by name.
    """

    def __init__(
        self,
        gradients: Gradients,
        jobs: Sequence[Job],
        settings: Settings,
        allocation: Allocation | None = None,
        keep: Mapping[str, Collection[int]] = MappingProxyType({}),
    ) -> None:
        self._jobs, self._settings = jobs, settings
        sources = [source_of(gradients, job) for job in jobs]
        wanted = dict.fromkeys(codec.needs for _, each in jobs[0].wanted for codec, _ in each)
        self._needs = [spec for spec in wanted if spec is not None]
        self._sketches = StepSketches(sources, self._needs)
        self._all = []
        for place, (job, source) in enumerate(zip(jobs, sources, strict=True)):
            sums = RunningSums(job.windows)
            fits = Fits(source, job, settings, allocation, sums, self._sketches, place)
            self._all.append(TensorReplay(gradients, job, settings, source, fits, sums, keep.get(job.tensor, ())))
        self.tensors = {tensor.job.tensor: tensor for tensor in self._all}
        # The steps of a job mostly want the same and then refer to one object, which the job keeps.
        distinct = {id(wanted): wanted for _, wanted in jobs[0].wanted}
        self._split = {
            key: (*split(wanted, jobs[0]), sum(job.values(wanted) for job in jobs)) for key, wanted in distinct.items()
        }
        self._ends = {last for _, last in jobs[0].windows}
        #: codecs that go together -> index of a step -> the steps that fit them there, and the name of that fit
        self._fittings: dict[LevelSets, dict[int, tuple[Fitting, str]]] = {}
        for groups, _, _ in self._split.values():
            self._fittings.update((group.sets, self._plan(group.sets.codecs[0])) for group in groups)
        #: fits that the last two steps asked for; and sums over windows, of all tensors end to end
        self._before: dict[Hashable, LevelFit] = {}
        self._recent: dict[Hashable, LevelFit] = {}
        self._sums = self._all[0].sums if len(jobs) == 1 else RunningSums(jobs[0].windows)

    def _plan(self, codec: Codec) -> dict[int, tuple[Fitting, str]]:
        """The steps that fit a codec at each wanted step and the one before."""
        steps, settings = self._jobs[0].steps, self._settings
        indices = {k for index, _ in self._jobs[0].wanted for k in (index - 1, index) if k >= 0}
        fittings = {k: settings.source(codec, k, steps) for k in indices}
        return {k: (fitting, fitting.label(k, steps)) for k, fitting in fittings.items()}

    def blocks(self) -> Iterator[Block]:
        """The rows of each wanted step."""
        names = self._jobs[0].names
        for index, wanted in self._jobs[0].wanted:
            block = self._block(index, wanted)
            yield block.named(names) if names else block
            for tensor in self._all:
                if index in self._ends:
                    tensor.draws.forget()
                if not tensor.look.nonfinite and tensor.common["step"] in tensor.keep:
                    tensor.kept[tensor.common["step"]] = tensor.fits.sketches
                # Never hold the values of two steps at a time.
                tensor.look = _NOTHING

    def _block(self, index: int, wanted: Wanted) -> Block:
        groups, alone, work = self._split[id(wanted)]
        self._before, self._recent = self._recent, {}
        self._sketches.move(index)
        for tensor in self._all:
            made = tensor.begin(index, self._needs)
            if made:
                self._sketches.add(made)
        block = Block([], [], values=work, cells=len(self._jobs))
        spent: list[tuple[int, str, float]] = []
        if groups and not all(tensor.skipped for tensor in self._all):
            clock = time.perf_counter()
            # One after the other, while the values and the table of bins are in a cache.
            for group in groups:
                self._sketches.at(Fitting((index,)), group.sets.needs)
            spent.append((EXPECTATION, "sketch", time.perf_counter() - clock))
            block.tables.extend(table for group in groups for table in self._tables(group, index, spent))
        for tensor in self._all:
            about = tensor.job.tensor, self._jobs[0].steps[index]
            block.times.extend((*about, MANY, draw, stage, seconds / len(self._all)) for draw, stage, seconds in spent)
            if tensor.skipped:
                block.rows.extend(tensor.empty_rows(wanted))
                continue
            rows = [row for codec, draws in alone for row in tensor.rows(codec, draws, block.times)]
            complete(rows, {str(codec) for codec, _ in alone if codec.stateful}, tensor.job.dtype_bits, tensor.noise)
            block.rows.extend(rows)
            if tensor.noise is not None:
                block.details.append((*about, NOISE, tensor.noise._asdict()))
            if self._settings.optimal and tensor.job.final and index == self._jobs[0].wanted[-1][0]:
                block.details.extend((*about, *detail) for detail in tensor.pictured([codec for codec, _ in wanted]))
        return block

    def _fit(self, sets: LevelSets, fitting: Fitting) -> LevelFit:
        """Codecs that go through the current step together, fitted for the tensors' values there."""
        sizes = np.array([tensor.size for tensor in self._all])
        key = sets, fitting, sizes.tobytes()
        found: LevelFit | None = self._recent.get(key) or self._before.get(key)
        if found is None:
            found = sets.fit(self._sketches.at(fitting, sets.needs), sizes)
        self._recent[key] = found
        return found

    def _tables(self, group: Group, index: int, spent: list[tuple[int, str, float]]) -> Iterator[RowTable]:
        """The rows of codecs that go through a step together: their expectations, and each draw.

        Adds draw, stage and seconds to ``spent``.
        """
        sets, tensors, plan = group.sets, self._all, self._fittings[group.sets]
        clock = time.perf_counter()
        fitting, label = plan[index]
        fitted = self._fit(sets, fitting)
        sent = fitted.sent
        if index and plan[index - 1][0] == fitting:
            sent = np.zeros_like(sent)
        elif index:
            sent = np.where(sets.differ(fitted, self._fit(sets, plan[index - 1][0])), sent, 0)
        sketches = self._sketches.at(Fitting((index,)), sets.needs)
        expected = sets.expect(sets.judge(sketches, fitted.grids), fitted)
        common: Row = {
            name: _spread([tensor.common[name] for tensor in tensors], len(sets.codecs)) for name in tensors[0].common
        }
        common["bits_shared"] = 8.0 * sent / np.maximum(1, common["n"])
        common["fitted_on"] = np.where(fitted.changed, np.array(label, object), "-")
        spent.append((EXPECTATION, "expect", time.perf_counter() - clock))
        for draw in group.draws:
            clock = time.perf_counter()
            if draw == EXPECTATION:
                columns = self._expected(sets, index, fitted, sketches, expected, common)
            else:
                columns = self._drawn(group, index, draw, fitted, expected, {**common, "draw": draw})
                spent.append((draw, "simulate", time.perf_counter() - clock))
            noise = [math.nan if each.noise is None else each.noise.variance for each in tensors]
            known = None if all(map(math.isnan, noise)) else Noise(_spread(noise, len(sets.codecs)), 0.0, 0)
            complete([columns], (), tensors[0].job.dtype_bits, known)
            table = RowTable(group.identities * len(tensors), columns)
            if any(tensor.skipped for tensor in tensors):
                skipped = np.repeat([tensor.skipped for tensor in tensors], len(sets.codecs))
                table = table.chosen(np.flatnonzero(~skipped))
            yield table

    def _expected(
        self,
        sets: LevelSets,
        index: int,
        fitted: LevelFit,
        sketches: SketchSet,
        expected: Expectations,
        common: Row,
    ) -> Row:
        """The columns of expectations."""
        optimum = _optima(sketches, sets, fitted) if self._settings.optimal else None
        columns, errors = expected_columns(common, expected, optimum), expected.squared_error
        weighted = [each.look.weighted[sets.needs] for each in self._all if each.look.weighted is not None]
        if weighted:
            lost = sets.weighted_error(weighted[0].alone, fitted.grids)
            columns["update_error"] = relative(lost, self._all[0].look.energy)
        if sets.codecs[0].unbiased:
            total = self._sums.at(sets, index, errors.size)
            if total is not None:
                total += errors
            if any(tensor.window for tensor in self._all):
                lost = self._sums.expected(sets, index, errors, partial(self._errors, sets))
                columns.update(self._lost(lost))
        return columns

    def _drawn(self, group: Group, index: int, draw: int, fitted: LevelFit, expected: Expectations, common: Row) -> Row:
        """The columns of a draw."""
        codecs, tensors = group.sets.codecs, self._all
        references = [cast("Reference", tensor.look.reference) for tensor in tensors]
        bounds = [0, *accumulate(reference.size for reference in references)]
        totals = [self._sums.at((id(codec), draw), index, bounds[-1], always=False) for codec in codecs]
        keys = [tensor.fits.key(step=common["step"], draw=draw) for tensor in tensors]
        found = group.encoder.draw(fitted, references, keys, totals)
        columns = drawn_columns(common, group.sets, found, expected)
        left = [k for k, total in enumerate(totals) if total is None]
        for t, tensor in enumerate(tensors if index in self._sums.first else ()):
            for k in left:
                state = fitted.state(t * len(codecs) + k, tensor.size)
                tensor.draws.keep(codecs[k], draw, index, Ready(state, codecs[k].shared(state), {}), references[t])
        if any(tensor.window for tensor in tensors):
            lost = np.full((len(tensors), len(codecs)), math.nan)
            for k, codec in enumerate(codecs):
                total = self._sums.take((id(codec), draw), index)
                if total is not None:
                    lost[:, k] = [power_sum(total[a:b], 2) for a, b in pairwise(bounds)]
            left = np.flatnonzero(np.isnan(lost).any(axis=0)).tolist()
            for t, tensor in enumerate(tensors if left else ()):
                if tensor.window is not None:
                    lost[t, left] = tensor.draws.lost([codecs[k] for k in left], draw, index)
            columns.update(self._lost(lost.reshape(-1)))
        return columns

    def _lost(self, errors: NDArray[np.float64]) -> Row:
        """The columns about the errors of the windows that end at a step, float64[sets]."""
        windows = [tensor.window for tensor in self._all]
        each = errors.size // len(windows)
        energy = _spread([math.nan if window is None else window.energy for window in windows], each)
        return {
            "window": _spread([None if window is None else window.steps for window in windows], each),
            "window_energy": energy,
            "window_error": np.where(np.isnan(energy), math.nan, errors),
        }

    def _errors(self, sets: LevelSets, index: int) -> NDArray[np.float64]:
        """The expected squared errors of codecs that go together at a step, float64[sets]."""
        fitted = self._fit(sets, self._settings.source(sets.codecs[0], index, self._jobs[0].steps))
        sketches = self._sketches.at(Fitting((index,)), sets.needs)
        return sets.expect(sets.judge(sketches, fitted.grids), fitted).squared_error


def _spread(values: list[Any], each: int) -> Any:
    """What is known of each tensor, for every set: an array, or the value itself if it is the same for all."""
    if len(set(values)) == 1:
        return values[0]
    numbers = all(isinstance(value, int | float) for value in values)
    return np.repeat(np.array(values, None if numbers else object), each)


def _optima(sketches: SketchSet, sets: LevelSets, fitted: LevelFit) -> NDArray[np.float64] | None:
    """The least error of as many levels as each set has, float64[sets]; None for values without a norm."""
    if sets.needs.norm == "none":
        return None
    sizes = fitted.grids.sizes.reshape(len(sketches), -1)
    found = np.full(sizes.shape, math.nan)
    for zero in (True, False):
        these = sets.has_zero == zero
        if these.any():
            found[:, these] = least_errors(sketches, sizes[:, these], zero=zero)
    return found.reshape(-1)


class TensorReplay:
    """One tensor of a replay: what it holds at the current step, and the rows of codecs that go alone.

    Attributes:
        job: the job.
        fits: its fits and sketches.
        draws: its encodings.
        sums: its sums over windows.
        common: columns that all of the step's rows share.
        look: what its source measures at the step.
        size: how many values it has there.
        skipped: it has values that are not finite, and rows without numbers.
        window: the window that ends at the step, if any.
        noise: of the gradient, if it is known.
        keep: the steps of which to keep sketches, if its values are held at once.
        kept: step -> sketches of it that were made, for those of them whose values are finite.
    """

    def __init__(
        self,
        gradients: Gradients,
        job: Job,
        settings: Settings,
        source: Values,
        fits: Fits,
        sums: RunningSums,
        keep: Collection[int],
    ) -> None:
        self._gradients, self.job, self._settings = gradients, job, settings
        self._source, self.fits, self.sums = source, fits, sums
        self.draws = (ChunkDraws if job.chunked else Draws)(gradients, job, source, fits, sums)
        self._noise = gradients.noise(job.tensor)
        self._ends = {last: first for first, last in job.windows}
        #: sums of the gradients themselves, and where these are read ahead the energies of their sums, by last step
        self._summed = RunningSums(job.windows)
        self._ahead: dict[int, float | None] = {}
        self._large = job.tensor in gradients.large
        self.keep = keep if type(self._source) is Values else ()
        self.kept: dict[int, dict[SummarySpec, MomentSketch]] = {}
        self.look, self.size, self.skipped = _NOTHING, 0, False
        self.window: Window | None = None
        self.noise: Noise | None = None

    def begin(self, index: int, needs: Sequence[SummarySpec]) -> Mapping[SummarySpec, MomentSketch]:
        """Go on to a step; returns the sketches that were made on the way."""
        if self._large and index in self._ends.values():
            self._read_ahead(index, needs)
        self.fits.before, self.fits.recent = self.fits.recent, {}
        self.look = look = self._source.look(index, needs)
        self._index, step, reference = index, self.job.steps[index], look.reference
        self.size = reference.size
        self.common: Row = {"tensor": self.job.tensor, "step": step, "n": reference.size, "note": None}
        if look.nonfinite:
            self.common["note"] = self._remark(look.nonfinite, reference.size, step)
        self.skipped = bool(look.nonfinite) and self._settings.nonfinite == "skip"
        self.common["energy"] = math.nan if self.skipped else reference.energy
        self.common["mean_abs"] = math.nan if self.skipped else reference.mean_abs
        self.window = self.noise = None
        if self.skipped:
            return look.sketches
        if isinstance(reference, Reference) and not self._large:
            total = self._summed.at(None, index, reference.size)
            if total is not None:
                add_values(reference.values, total)
        self.window = self._ending(index) if index in self._ends else None
        self.noise = None if self._noise is None else self._noise(step)
        return look.sketches

    def empty_rows(self, wanted: Wanted) -> list[Row]:
        """The rows of a step that is skipped."""
        return [{**self.common, **identity(codec), "draw": draw} for codec, draws in wanted for draw in draws]

    def _remark(self, bad: int, size: int, step: int) -> str:
        """What rows say about values that are not finite.

        Raises:
            TraceError: the settings do not allow them.
        """
        if self._settings.nonfinite == "error":
            where = f"{self.job.tensor} at step {step}: {bad} of {size} gradients are not finite"
            raise TraceError(f"{where}; pass --nonfinite skip or zero, or sweep other --steps")
        return f"{bad}{NONFINITE}{'taken as zero' if self._settings.nonfinite == 'zero' else 'skipped'}"

    def rows(self, codec: Codec, draws: tuple[int, ...], times: list[Timing]) -> Iterator[Row]:
        """A codec's rows of the step; adds the seconds of their stages to the times."""
        index, look, size, expects = self._index, self.look, self.size, expecting(codec)
        common = {**self.common, **identity(codec)}
        if codec.stateful:
            common["note"] = "; ".join(filter(None, (common["note"], OPEN_LOOP)))
        stretch = None
        if isinstance(self._source, Sample):
            stretch = self._source.stretch(codec, index, partial(self._state, codec, index))
        expected = None
        for draw in draws:
            spent = {}
            clock = time.perf_counter()
            if expects and codec.needs is not None and codec.needs not in self.fits.sketches:
                self.fits.sketch(Fitting((index,)), codec.needs)
                spent["sketch"] = time.perf_counter() - clock
                clock = time.perf_counter()
            ready = self.fits.ready(codec, draw, index, size)
            spent["fit"] = time.perf_counter() - clock
            own = {**common, **ready.columns, "draw": draw}
            if ready.note is not None:
                own["note"] = "; ".join(filter(None, (common["note"], ready.note)))
            if expects and codec.needs is not None and expected is None:
                expected = codec.expect(ready.state, self.fits.sketch(Fitting((index,)), codec.needs))
            if draw == EXPECTATION:
                if expected is None:
                    continue
                row = self._expected_row(codec, index, look, own, ready.state, expected)
            else:
                drawn = self.draws.draw(codec, draw, index, ready, look.reference, self.window)
                spent = drawn.spent
                row = draw_row(own, codec, drawn, expected)
                if drawn.window_error is not None:
                    row.update(self._lost(drawn.window_error))
            times.extend((self.job.tensor, common["step"], str(codec), draw, stage, s) for stage, s in spent.items())
            yield row if stretch is None else stretch(row)

    def _expected_row(self, codec: Codec, index: int, look: Seen, own: Row, state: State, expected: Expectation) -> Row:
        """A row of expectations."""
        assert codec.needs is not None
        sketch = self.fits.sketch(Fitting((index,)), codec.needs)
        optimum, grid = None, level_grid(codec)
        if self._settings.optimal and grid is not None and has_optimum(codec) and sketch.sums.size:
            optimum = least_errors(sketch.alone, np.array([[grid.levels(state).size]]), zero=grid.zero).item()
        row = expected_columns(own, expected, optimum)
        if look.weighted is not None:
            lost = codec.weighted_error(state, sketch, look.weighted[codec.needs])
            row["update_error"] = relative(lost, look.energy)
        if codec.unbiased and not codec.stateful:
            errors = np.array([expected.squared_error])
            total = self.sums.at(id(codec), index, 1)
            if total is not None:
                total += errors
            if self.window is not None:
                found = self.sums.expected(id(codec), index, errors, partial(self._errors, codec, look.reference.size))
                row.update(self._lost(float(found[0])))
        return row

    def _read_ahead(self, index: int, needs: Sequence[SummarySpec]) -> None:
        """Read all steps of the window that starts at a step at once."""
        last = next(last for last, first in self._ends.items() if first == index)
        self._ahead[last] = self._energy(index, last, needs if self.job.chunked else None)

    def _energy(self, first: int, last: int, specs: Sequence[SummarySpec] | None = None) -> float | None:
        """||sum of g||^2 over the steps of a window, from the trace."""
        steps, zero = self.job.steps[first : last + 1], self._settings.nonfinite == "zero"
        return self._gradients.energy_of_sum(self.job.tensor, steps, zero=zero, specs=specs)

    def _ending(self, index: int) -> Window | None:
        """The window that ends at a step; None also if the gradients of its steps cannot be summed."""
        first, total = self._ends[index], self._summed.take(None, index)
        if total is not None:
            energy: float | None = energy_in_pieces(total)
        else:
            energy = self._ahead.pop(index) if index in self._ahead else self._energy(first, index)
        return None if energy is None else Window(first, index + 1 - first, energy)

    def _lost(self, error: float) -> Row:
        """The columns about the error of the window that ends at a step."""
        assert self.window is not None
        return {"window": self.window.steps, "window_energy": self.window.energy, "window_error": error}

    def _errors(self, codec: Codec, size: int, index: int) -> NDArray[np.float64]:
        """The expected squared error of a codec at a step."""
        assert codec.needs is not None
        sketch = self.fits.sketch(Fitting((index,)), codec.needs)
        return np.array([codec.expect(self._state(codec, index, size), sketch).squared_error])

    def _state(self, codec: Codec, index: int, size: int) -> State:
        """The state for which a step's expectation is computed."""
        return self.fits.ready(codec, EXPECTATION, index, size).state

    def pictured(self, codecs: Sequence[Codec]) -> Iterator[tuple[str, object]]:
        """The data for figures of levels: too much for every step."""
        for codec in codecs:
            levels = None if codec.stateful else levels_of(codec, self._state(codec, self._index, self.size))
            if levels is not None and codec.needs is not None:
                yield f"levels {codec}", levels
                sketch = self.fits.sketch(Fitting((self._index,)), codec.needs)
                yield f"density {sketch_name(codec.needs)}", density(sketch)
        curves = convergence(codecs, self.fits.sketches)
        if curves is not None:
            yield "convergence", curves


def has_optimum(codec: Codec) -> bool:
    """Whether a codec's levels can be compared with the best ones."""
    return level_grid(codec) is not None and codec.needs is not None and codec.needs.norm != "none"
