"""Replay one tensor through its steps: read, fit, expect or send, compare, and write a row for each codec.

Level codecs that want the same sketch go through a step together, and their rows are tables.
"""

from __future__ import annotations

import time
from functools import lru_cache, partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gtrace.codecs import Codec, expecting, level_grid
from gtrace.codecs.level_sets import LevelSets, judged_together, least_errors
from gtrace.errors import TraceError
from gtrace.kernels.compare import add_values
from gtrace.metrics import Reference, relative
from gtrace.sweep.draws import ChunkDraws, Draws, Window
from gtrace.sweep.fits import Fits, Ready, RunningSums
from gtrace.sweep.gradient_noise import NOISE
from gtrace.sweep.gradients import energy_in_pieces
from gtrace.sweep.jobs import Block, Fitting
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
    spec_name,
)
from gtrace.sweep.schema import EXPECTATION, NONFINITE
from gtrace.sweep.sources import Sample, Values, source_of
from gtrace.sweep.store import RowTable

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.level_sets import LevelFit
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
        self._split = {key: (*split(wanted, job), job.values(wanted)) for key, wanted in distinct.items()}
        self._identities = {id(codec): identity(codec) for _, wanted in job.wanted for codec, _ in wanted}
        #: codecs that go together -> index of a step -> the steps that fit them there, and the name of that fit
        self._fittings: dict[LevelSets, dict[int, tuple[Fitting, str]]] = {}
        for groups, _, _ in self._split.values():
            self._fittings.update((group.sets, self._plan(group.sets.codecs[0])) for group in groups)
        self._noise = gradients.noise(job.tensor)
        self._ends = {last: first for first, last in job.windows}
        #: sums of the gradients themselves, and where these are read ahead the energies of their sums, by last step
        self._summed = RunningSums(job.windows)
        self._ahead: dict[int, float | None] = {}
        self._large = job.tensor in gradients.large
        #: the window that ends at the current step, if any
        self._window: Window | None = None
        self._keep = keep if type(self._source) is Values else ()
        self.kept: dict[int, dict[SummarySpec, MomentSketch]] = {}

    def _plan(self, codec: Codec) -> dict[int, tuple[Fitting, str]]:
        """The steps that fit a codec at each wanted step and the one before."""
        steps, settings = self._job.steps, self._settings
        indices = {k for index, _ in self._job.wanted for k in (index - 1, index) if k >= 0}
        fittings = {k: settings.source(codec, k, steps) for k in indices}
        return {k: (fitting, fitting.label(k, steps)) for k, fitting in fittings.items()}

    def blocks(self) -> Iterator[Block]:
        """The rows of each wanted step."""
        for index, wanted in self._job.wanted:
            if self._large and index in self._ends.values():
                self._read_ahead(index)
            block = self._block(index, wanted)
            yield block.named(self._job.names) if self._job.names else block
            if index in self._ends:
                self._draws.forget()

    def _block(self, index: int, wanted: Wanted) -> Block:
        job, step = self._job, self._job.steps[index]
        groups, rest, work = self._split[id(wanted)]
        look = self._fits.look(index)
        reference = look.reference
        common: Row = {"tensor": job.tensor, "step": step, "n": reference.size, "note": None}
        if look.nonfinite:
            common["note"] = self._remark(look.nonfinite, reference.size, step)
            if self._settings.nonfinite == "skip":
                rows = [{**common, **self._identities[id(codec)], "draw": k} for codec, draws in wanted for k in draws]
                return Block(rows, [], values=work)
        common["energy"], common["mean_abs"] = reference.energy, reference.mean_abs
        if isinstance(reference, Reference) and not self._large:
            total = self._summed.at(None, index, reference.size)
            if total is not None:
                add_values(reference.values, total)
        self._window = self._ending(index) if index in self._ends else None
        clock = time.perf_counter()
        # One after the other, while the values and the table of bins are in a cache.
        for group in groups:
            self._fits.sketch(Fitting((index,)), group.sets.needs)
        sketching = time.perf_counter() - clock
        times: list[Timing] = [(job.tensor, step, MANY, EXPECTATION, "sketch", sketching)] if groups else []
        tables = [table for group in groups for table in self._tables(group, index, look, common, times)]
        rows = [row for codec, draws in rest for row in self._rows(codec, draws, index, look, common, times)]
        noise = None if self._noise is None else self._noise(step)
        complete(rows, tables, wanted, job.dtype_bits, noise)
        details = self._details(index, [codec for codec, _ in wanted], reference.size) if self._settings.optimal else []
        if noise is not None:
            details.append((job.tensor, step, NOISE, noise._asdict()))
        if step in self._keep and not look.nonfinite:
            self.kept[step] = self._fits.sketches
        return Block(rows, times, details, tables, work)

    def _remark(self, bad: int, size: int, step: int) -> str:
        """What rows say about values that are not finite.

        Raises:
            TraceError: the settings do not allow them.
        """
        if self._settings.nonfinite == "error":
            where = f"{self._job.tensor} at step {step}: {bad} of {size} gradients are not finite"
            raise TraceError(f"{where}; pass --nonfinite skip or zero, or sweep other --steps")
        return f"{bad}{NONFINITE}{'taken as zero' if self._settings.nonfinite == 'zero' else 'skipped'}"

    def _tables(self, group: Group, index: int, look: Seen, common: Row, times: list[Timing]) -> Iterator[RowTable]:
        """The rows of codecs that go through a step together: their expectations, and each draw."""
        sets, size, fits = group.sets, look.reference.size, self._fits
        plan, where = self._fittings[sets], (self._job.tensor, common["step"], MANY)
        clock = time.perf_counter()
        fitting, label = plan[index]
        fitted = fits.levels(sets, fitting, size)
        sent = fitted.sent
        if index and plan[index - 1][0] == fitting:
            sent = np.zeros_like(sent)
        elif index:
            sent = np.where(sets.differ(fitted, fits.levels(sets, plan[index - 1][0], size)), sent, 0)
        sketch = fits.sketch(Fitting((index,)), sets.needs)
        expected = sets.expect(sets.judge(sketch, fitted.grids), fitted)
        common = {
            **common,
            "bits_shared": 8.0 * sent / max(1, size),
            "fitted_on": np.where(fitted.changed, np.array(label, object), "-"),
        }
        times.append((*where, EXPECTATION, "expect", time.perf_counter() - clock))
        for draw in group.draws:
            clock = time.perf_counter()
            if draw == EXPECTATION:
                optimum = self._optima(sketch, sets, fitted) if self._settings.optimal else None
                columns, errors = expected_columns(common, expected, optimum), expected.squared_error
                if look.weighted is not None:
                    lost = sets.weighted_error(look.weighted[sets.needs], fitted.grids)
                    columns["update_error"] = relative(lost, look.energy)
                total = self._sums.at(sets, index, errors.size) if sets.codecs[0].unbiased else None
                if total is not None:
                    total += errors
                if self._window is not None and sets.codecs[0].unbiased:
                    columns.update(
                        self._lost(self._expected_loss(sets, index, errors, partial(self._errors_of, sets, size)))
                    )
                yield RowTable(group.identities, columns)
                continue
            assert isinstance(look.reference, Reference), "draws need values"
            states, key = fitted.states(size), fits.key(step=common["step"], draw=draw)
            totals = [self._sums.at((id(codec), draw), index, size, always=False) for codec in sets.codecs]
            found = group.encoder.draw(states, look.reference, key, totals)
            columns = drawn_columns({**common, "draw": draw}, sets, found, expected)
            for codec, state, total in zip(sets.codecs, states, totals, strict=True):
                if total is None and index in self._sums.first:
                    self._draws.keep(codec, index, Ready(state, codec.shared(state), {}), look.reference)
            if self._window is not None:
                columns.update(self._lost(np.array(self._draws.lost(sets.codecs, draw, index))))
            times.append((*where, draw, "simulate", time.perf_counter() - clock))
            yield RowTable(group.identities, columns)

    def _errors_of(self, sets: LevelSets, size: int, index: int) -> NDArray[np.float64]:
        """The expected squared errors of codecs that go together at a step."""
        fitting = self._settings.source(sets.codecs[0], index, self._job.steps)
        fitted = self._fits.levels(sets, fitting, size)
        return sets.expect(
            sets.judge(self._fits.sketch(Fitting((index,)), sets.needs), fitted.grids), fitted
        ).squared_error

    def _optima(self, sketch: MomentSketch, sets: LevelSets, fitted: LevelFit) -> NDArray[np.float64] | None:
        """The least error of as many levels as each codec has, float64[sets]; None for values without a norm."""
        if sets.needs.norm == "none" or not sketch.sums.size:
            return None
        sizes, found = fitted.grids.sizes, np.empty(len(sets.codecs))
        for zero in (True, False):
            these = sets.has_zero == zero
            if these.any():
                found[these] = least_errors(sketch, sizes[these].tolist(), zero=zero)
        return found

    def _rows(
        self, codec: Codec, draws: tuple[int, ...], index: int, look: Seen, common: Row, times: list[Timing]
    ) -> Iterator[Row]:
        """A codec's rows; adds the seconds of their stages to the times."""
        size, expects = look.reference.size, expecting(codec)
        common = {**common, **self._identities[id(codec)]}
        if codec.stateful:
            common["note"] = "; ".join(filter(None, (common["note"], OPEN_LOOP)))
        stretch = None
        if isinstance(self._source, Sample):
            stretch = self._source.stretch(codec, index, partial(self._state, codec, index))
        expected = None
        for draw in draws:
            spent = {}
            clock = time.perf_counter()
            if expects and codec.needs is not None and codec.needs not in self._fits.sketches:
                self._fits.sketch(Fitting((index,)), codec.needs)
                spent["sketch"] = time.perf_counter() - clock
                clock = time.perf_counter()
            ready = self._fits.ready(codec, draw, index, size)
            spent["fit"] = time.perf_counter() - clock
            own = {**common, **ready.columns, "draw": draw}
            if ready.note is not None:
                own["note"] = "; ".join(filter(None, (common["note"], ready.note)))
            if expects and codec.needs is not None and expected is None:
                expected = codec.expect(ready.state, self._fits.sketch(Fitting((index,)), codec.needs))
            if draw == EXPECTATION:
                if expected is None:
                    continue
                row = self._expected_row(codec, index, look, own, ready.state, expected)
            else:
                drawn = self._draws.draw(codec, draw, index, ready, look.reference, self._window)
                spent = drawn.spent
                row = draw_row(own, codec, drawn, expected)
                if drawn.window_error is not None:
                    row.update(self._lost(drawn.window_error))
            times.extend((self._job.tensor, common["step"], str(codec), draw, stage, s) for stage, s in spent.items())
            yield row if stretch is None else stretch(row)

    def _expected_row(self, codec: Codec, index: int, look: Seen, own: Row, state: State, expected: Expectation) -> Row:
        """A row of expectations."""
        assert codec.needs is not None
        sketch = self._fits.sketch(Fitting((index,)), codec.needs)
        optimum, grid = None, level_grid(codec)
        if self._settings.optimal and grid is not None and has_optimum(codec) and sketch.sums.size:
            optimum = float(least_errors(sketch, [grid.levels(state).size], zero=grid.zero)[0])
        row = expected_columns(own, expected, optimum)
        if look.weighted is not None:
            lost = codec.weighted_error(state, sketch, look.weighted[codec.needs])
            row["update_error"] = relative(lost, look.energy)
        if codec.unbiased and not codec.stateful:
            errors = np.array([expected.squared_error])
            total = self._sums.at(id(codec), index, 1)
            if total is not None:
                total += errors
            if self._window is not None:
                found = self._expected_loss(id(codec), index, errors, partial(self._errors, codec, look.reference.size))
                row.update(self._lost(float(found[0])))
        return row

    def _read_ahead(self, index: int) -> None:
        """Read all steps of the window that starts at a step at once."""
        last = next(last for last, first in self._ends.items() if first == index)
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
    ) -> NDArray[np.float64]:
        """Expected squared errors summed over the window that ends at a step.

        Errors of unbiased stateless codecs are independent, so their squares add up.
        """
        assert self._window is not None
        total = self._sums.take(key, index)
        if total is None:
            # Added in the order of the steps, as in the running sum.
            total = np.zeros(errors.size)
            for k in range(self._window.first, index):
                total += errors_at(k)
            total += errors
        return total

    def _errors(self, codec: Codec, size: int, index: int) -> NDArray[np.float64]:
        """The expected squared error of a codec at a step."""
        assert codec.needs is not None
        sketch = self._fits.sketch(Fitting((index,)), codec.needs)
        return np.array([codec.expect(self._state(codec, index, size), sketch).squared_error])

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
                found[f"density {spec_name(codec.needs)}"] = density(self._fits.sketch(Fitting((index,)), codec.needs))
        curves = convergence(codecs, self._fits.sketches)
        if curves is not None:
            found["convergence"] = curves
        return [(self._job.tensor, self._job.steps[index], what, value) for what, value in found.items()]


def has_optimum(codec: Codec) -> bool:
    """Whether a codec's levels can be compared with the best ones."""
    return level_grid(codec) is not None and codec.needs is not None and codec.needs.norm != "none"
