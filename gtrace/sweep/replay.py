"""Replay one tensor through its steps: read, fit, expect or send, compare, and write a row for each codec.

Level codecs that want the same sketch go through a step together, and their rows are tables.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs import Codec, expecting, level_grid
from gtrace.codecs.level_sets import LevelSets, judged_together, least_errors
from gtrace.errors import TraceError
from gtrace.kernels.compare import add_values
from gtrace.metrics import Reference, relative
from gtrace.sweep.draws import ChunkDraws, Draws, Window
from gtrace.sweep.fits import Fits, RunningSums
from gtrace.sweep.gradient_noise import NOISE
from gtrace.sweep.gradients import energy_in_pieces
from gtrace.sweep.jobs import Block, Fitting
from gtrace.sweep.level_draws import LevelDraws
from gtrace.sweep.rows import (
    convergence,
    density,
    draw_row,
    drawn_columns,
    expected_columns,
    identity,
    levels_of,
    relate_to_noise,
    spec_name,
)
from gtrace.sweep.schema import EXPECTATION, NONFINITE
from gtrace.sweep.sources import Sample, Values, source_of
from gtrace.sweep.store import RowTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.level_sets import Expectations, Judged, LevelFit
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.fits import Allocation
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Detail, Job, Settings, Timing, Wanted
    from gtrace.sweep.sources import Seen
    from gtrace.sweep.store import Row
    from gtrace.types import Expectation, State, SummarySpec

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


class Replay:
    """Replays a tensor's steps in order, from any source.

    A row of a stateless codec depends on its own step and on those that it was fitted on, so a resumed sweep gives the
    same rows. A stateful codec is replayed from the start of its burst, and sums over a window from the start of the
    window, unless this replay has gone through those steps already.

    Attributes:
        kept: step -> sketches of it that were made, for the steps to ``keep`` whose values are finite and held at once.
    """

    def __init__(
        self,
        gradients: Gradients,
        job: Job,
        settings: Settings,
        allocation: Allocation | None = None,
        keep: Collection[int] = (),
    ) -> None:
        self._gradients, self._job, self._settings = gradients, job, settings
        self._source = source_of(gradients, job)
        self._sums = RunningSums(job.windows)
        self._fits = Fits(self._source, job, settings, allocation, self._sums)
        draws = ChunkDraws if job.chunked else Draws
        self._draws = draws(gradients, job, self._source, self._fits, self._sums)
        # The steps of a job mostly want the same and then refer to one object, which the job keeps.
        distinct = {id(wanted): wanted for _, wanted in job.wanted}
        self._split = {key: split(wanted, job) for key, wanted in distinct.items()}
        self._identities = {id(codec): identity(codec) for _, wanted in job.wanted for codec, _ in wanted}
        self._ends = {last: first for first, last in job.windows}
        #: sums of the gradients themselves, and where these are read ahead the energies of their sums, by last step
        self._summed = RunningSums(job.windows)
        self._ahead: dict[int, float | None] = {}
        #: the window that ends at the current step, if any
        self._window: Window | None = None
        self._keep = keep if type(self._source) is Values else ()
        self.kept: dict[int, dict[SummarySpec, MomentSketch]] = {}

    def blocks(self) -> Iterator[Block]:
        """The rows of each wanted step."""
        for index, wanted in self._job.wanted:
            block = replace(self._block(index, wanted), values=self._job.values(wanted))
            yield block.named(self._job.names) if self._job.names else block
            if index in self._ends:
                self._draws.forget()

    def _block(self, index: int, wanted: Wanted) -> Block:
        job, settings = self._job, self._settings
        step = job.steps[index]
        self._read_ahead(index)
        look = self._fits.look(index)
        reference, bad = look.reference, look.nonfinite
        note = None
        if bad:
            taken = "taken as zero" if settings.nonfinite == "zero" else "skipped"
            where = f"{job.tensor} at step {step}: {bad} of {reference.size} gradients are not finite"
            if settings.nonfinite == "error":
                raise TraceError(f"{where}; pass --nonfinite skip or zero, or sweep other --steps")
            note = f"{bad}{NONFINITE}{taken}"
        common: Row = {"tensor": job.tensor, "step": step, "n": reference.size, "note": note}
        if bad and settings.nonfinite == "skip":
            skipped = [
                {**common, **self._identities[id(codec)], "draw": draw} for codec, draws in wanted for draw in draws
            ]
            return Block(skipped, [])
        common["energy"], common["mean_abs"] = reference.energy, reference.mean_abs
        if isinstance(reference, Reference) and job.tensor not in self._gradients.large:
            total = self._summed.at(None, index, reference.size)
            if total is not None:
                add_values(reference.values, total)
        self._window = self._ending(index) if index in self._ends else None
        rows: list[Row] = []
        times: list[Timing] = []
        groups, rest = self._split[id(wanted)]
        times += self._sketched(groups, index)
        tables = [table for group in groups for table in self._tables(group, index, look, common, times)]
        for codec, draws in rest:
            stretch = None
            if isinstance(self._source, Sample):
                stretch = self._source.stretch(codec, index, partial(self._state, codec, index))
            for row, spent in self._rows(codec, draws, index, look, common):
                rows.append(row if stretch is None else stretch(row))
                times.extend((job.tensor, step, row["codec"], row["draw"], stage, s) for stage, s in spent.items())
        details = self._details(index, [codec for codec, _ in wanted], reference.size) if settings.optimal else []
        noise = self._gradients.noise(job.tensor, step)
        if noise is not None:
            relate_to_noise(rows, tables, wanted, noise)
            details.append((job.tensor, step, NOISE, noise._asdict()))
        if step in self._keep and not bad:
            self.kept[step] = dict(self._fits.sketches)
        self._fits.end()
        return Block(rows, times, details, tables)

    def _sketched(self, groups: Sequence[Group], index: int) -> list[Timing]:
        """Make the sketches of a step one after the other, while its values and the table of bins are in a cache."""
        clock = time.perf_counter()
        for group in groups:
            self._fits.summary(index, group.sets.needs)
        place = self._job.tensor, self._job.steps[index], MANY, EXPECTATION
        return [(*place, "sketch", time.perf_counter() - clock)] if groups else []

    def _tables(self, group: Group, index: int, look: Seen, common: Row, times: list[Timing]) -> Iterator[RowTable]:
        """The rows of codecs that go through a step together: their expectations, and each draw."""
        sets, size, steps = group.sets, look.reference.size, self._job.steps
        clock = time.perf_counter()
        fitting = self._settings.source(sets.codecs[0], index, steps)
        fitted = self._fitted(sets, fitting, size)
        sent = fitted.sent
        before = self._settings.source(sets.codecs[0], index - 1, steps) if index else None
        if before == fitting:
            sent = np.zeros_like(sent)
        elif before is not None:
            sent = np.where(sets.differ(fitted, self._fitted(sets, before, size)), sent, 0)
        expected = sets.expect(self._judged(sets, index, fitting, fitted), fitted)
        common = {
            **common,
            "bits_shared": 8.0 * sent / max(1, size),
            "fitted_on": np.where(fitted.changed, np.array(fitting.label(index, steps), object), "-"),
        }
        where = (self._job.tensor, common["step"], MANY)
        times.append((*where, EXPECTATION, "expect", time.perf_counter() - clock))
        for draw in group.draws:
            if draw == EXPECTATION:
                yield RowTable(group.identities, self._expected_columns(sets, index, look, common, fitted, expected))
                continue
            drawn = self._draws.draw_together(group.encoder, draw, index, fitted, look.reference, self._window)
            columns = drawn_columns({**common, "draw": draw}, sets, drawn, expected, self._job.dtype_bits)
            if drawn.window_error is not None:
                columns.update(self._lost(drawn.window_error))
            times.append((*where, draw, "simulate", drawn.spent))
            yield RowTable(group.identities, columns)

    def _expected_columns(
        self, sets: LevelSets, index: int, look: Seen, common: Row, fitted: LevelFit, expected: Expectations
    ) -> Row:
        """The columns of expectations."""
        optimum = self._optima(index, sets, fitted) if self._settings.optimal else None
        columns = expected_columns(common, expected, optimum, self._job.dtype_bits)
        if look.weighted is not None:
            lost = sets.weighted_error(look.weighted[sets.needs], fitted.grids)
            columns["update_error"] = relative(lost, look.energy)
        if sets.codecs[0].unbiased:
            errors = partial(self._errors_of, sets, look.reference.size)
            total = self._expected_loss(sets, index, expected.squared_error, errors)
            if total is not None:
                columns.update(self._lost(total))
        return columns

    def _fitted(self, sets: LevelSets, fitting: Fitting, size: int) -> LevelFit:
        return self._fits.recent((sets, fitting, size), lambda: sets.fit(self._fits.sketch(fitting, sets.needs), size))

    def _judged(self, sets: LevelSets, index: int, fitting: Fitting, fitted: LevelFit) -> Judged:
        """The levels of a fit on the sketch of a step."""
        sketch = self._fits.summary(index, sets.needs)
        return self._fits.recent((sets, index, fitting), lambda: sets.judge(sketch, fitted.grids))

    def _errors_of(self, sets: LevelSets, size: int, index: int) -> NDArray[np.float64]:
        fitting = self._settings.source(sets.codecs[0], index, self._job.steps)
        fitted = self._fitted(sets, fitting, size)
        return sets.expect(self._judged(sets, index, fitting, fitted), fitted).squared_error

    def _optima(self, index: int, sets: LevelSets, fitted: LevelFit) -> NDArray[np.float64] | None:
        """The least error of as many levels as each codec has, float64[sets]; None for values without a norm."""
        sketch = self._fits.summary(index, sets.needs)
        if sets.needs.norm == "none" or not sketch.sums.size:
            return None
        sizes, found = fitted.grids.sizes, np.empty(len(sets.codecs))
        for zero in (True, False):
            these = sets.has_zero == zero
            if these.any():
                found[these] = least_errors(sketch, sizes[these].tolist(), zero=zero)
        return found

    def _rows(
        self, codec: Codec, draws: tuple[int, ...], index: int, look: Seen, common: Row
    ) -> Iterator[tuple[Row, dict[str, float]]]:
        """A codec's rows, each with the seconds of its stages."""
        size, dtype_bits = look.reference.size, self._job.dtype_bits
        common = {**common, **self._identities[id(codec)]}
        if codec.stateful:
            common["note"] = "; ".join(filter(None, (common["note"], OPEN_LOOP)))
        expected = None
        for draw in draws:
            spent = {}
            clock = time.perf_counter()
            if expecting(codec) and codec.needs is not None and codec.needs not in self._fits.sketches:
                self._fits.summary(index, codec.needs)
                spent["sketch"] = time.perf_counter() - clock
                clock = time.perf_counter()
            ready = self._fits.ready(codec, draw, index, size)
            spent["fit"] = time.perf_counter() - clock
            own = {**common, **ready.columns, "draw": draw}
            if ready.note is not None:
                own["note"] = "; ".join(filter(None, (common["note"], ready.note)))
            if expecting(codec) and codec.needs is not None and expected is None:
                expected = codec.expect(ready.state, self._fits.sketches[codec.needs])
            if draw != EXPECTATION:
                drawn = self._draws.draw(codec, draw, index, ready, look.reference, self._window)
                row = draw_row(own, codec, drawn, expected, dtype_bits)
                if drawn.window_error is not None:
                    row.update(self._lost(drawn.window_error))
                yield row, drawn.spent
            elif expected is not None and expecting(codec):
                yield self._expected_row(codec, index, look, own, ready.state, expected), spent

    def _expected_row(self, codec: Codec, index: int, look: Seen, own: Row, state: State, expected: Expectation) -> Row:
        """A row of expectations."""
        assert codec.needs is not None
        optimum, grid = None, level_grid(codec)
        if self._settings.optimal and grid is not None:
            optimum = self._optimum(index, codec, grid.levels(state).size)
        row = expected_columns(own, expected, optimum, self._job.dtype_bits)
        if look.weighted is not None:
            lost = codec.weighted_error(state, self._fits.sketches[codec.needs], look.weighted[codec.needs])
            row["update_error"] = relative(lost, look.energy)
        if codec.unbiased and not codec.stateful:
            errors = partial(self._errors, codec, look.reference.size)
            total = self._expected_loss(id(codec), index, np.array([expected.squared_error]), errors)
            if total is not None:
                row.update(self._lost(float(total[0])))
        return row

    def _read_ahead(self, index: int) -> None:
        """Read all steps of the window that starts at a step at once, if the tensor is large."""
        last = next((last for first, last in self._job.windows if first == index), None)
        if last is not None and self._job.tensor in self._gradients.large:
            self._ahead[last] = self._energy(index, last, self._fits.needs if self._job.chunked else None)

    def _energy(self, first: int, last: int, specs: Sequence[SummarySpec] | None = None) -> float | None:
        """||sum of g||^2 over the steps of a window, from the trace."""
        steps, zero = self._job.steps[first : last + 1], self._settings.nonfinite == "zero"
        return self._gradients.energy_of_sum(self._job.tensor, steps, zero=zero, specs=specs)

    def _ending(self, index: int) -> Window | None:
        """The window that ends at a step; None also if the gradients of its steps cannot be summed."""
        first, total = self._ends[index], self._summed.take(None, index)
        if total is not None:
            energy: float | None = energy_in_pieces(total)
        else:
            energy = self._ahead.pop(index) if index in self._ahead else self._energy(first, index)
        return None if energy is None else Window(first, index + 1 - first, energy)

    def _lost(self, error: float | NDArray[np.float64]) -> Row:
        """The columns about the error of the window that ends at a step."""
        assert self._window is not None
        return {"window": self._window.steps, "window_energy": self._window.energy, "window_error": error}

    def _expected_loss(
        self,
        key: Hashable,
        index: int,
        errors: NDArray[np.float64],
        errors_at: Callable[[int], NDArray[np.float64]],
    ) -> NDArray[np.float64] | None:
        """Expected squared errors summed over the window that ends at a step; None if no window does.

        Errors of unbiased stateless codecs are independent, so their squares add up.
        """
        total = self._sums.at(key, index, errors.size)
        if total is not None:
            total += errors
        if self._window is None:
            return None
        total = self._sums.take(key, index)
        if total is None:
            # Added in the order of the steps, as in the running sum.
            total = np.zeros(errors.size)
            for k in range(self._window.first, index):
                total += errors_at(k)
            total += errors
        return total

    def _errors(self, codec: Codec, size: int, index: int) -> NDArray[np.float64]:
        assert codec.needs is not None
        expected = codec.expect(self._state(codec, index, size), self._fits.summary(index, codec.needs))
        return np.array([expected.squared_error])

    def _state(self, codec: Codec, index: int, size: int) -> State:
        """The state for which a step's expectation is computed."""
        return self._fits.ready(codec, EXPECTATION, index, size).state

    def _details(self, index: int, codecs: Sequence[Codec], size: int) -> list[Detail]:
        """The data for figures of levels, only at the tensor's last wanted step: it is too much for every step."""
        if not self._job.final or index != self._job.wanted[-1][0]:
            return []
        found: dict[str, object] = {}
        for codec in codecs:
            levels = None if codec.stateful else levels_of(codec, self._state(codec, index, size))
            if levels is not None and codec.needs is not None:
                found[f"levels {codec}"] = levels
                found[f"density {spec_name(codec.needs)}"] = density(self._fits.summary(index, codec.needs))
        curves = convergence(codecs, self._fits.sketches)
        if curves is not None:
            found["convergence"] = curves
        return [(self._job.tensor, self._job.steps[index], what, value) for what, value in found.items()]

    def _optimum(self, index: int, codec: Codec, count: int) -> float | None:
        """The least expected error of any ``count`` levels on this tensor, from the codec's own sketch."""
        grid = level_grid(codec)
        if grid is None or codec.needs is None or not has_optimum(codec):
            return None
        sketch = self._fits.summary(index, codec.needs)
        return float(least_errors(sketch, [count], zero=grid.zero)[0]) if sketch.sums.size else None


def has_optimum(codec: Codec) -> bool:
    """Whether a codec's levels can be compared with the best ones."""
    return level_grid(codec) is not None and codec.needs is not None and codec.needs.norm != "none"
