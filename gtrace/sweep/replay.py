"""One tensor's way through its steps: look, fit, expect or send, compare, and one row for each."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from gtrace.codecs import Codec, expecting, level_grid
from gtrace.errors import TraceError
from gtrace.fitting import alq_levels, optimal_levels
from gtrace.metrics import relative
from gtrace.sweep.batched import MANY, Schedule, Together
from gtrace.sweep.draws import ChunkDraws, WholeDraws
from gtrace.sweep.fits import Fits
from gtrace.sweep.gradient_noise import NOISE
from gtrace.sweep.jobs import Block
from gtrace.sweep.rows import (
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
from gtrace.sweep.sources import source_of
from gtrace.sweep.windows import RunningSums, Window

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence

    from numpy.typing import NDArray

    from gtrace.metrics import Reference
    from gtrace.sweep.batched import Group
    from gtrace.sweep.draws import Draws
    from gtrace.sweep.fits import Allocation, Ready
    from gtrace.sweep.gradients import Gradients
    from gtrace.sweep.jobs import Detail, Job, Settings, Timing, Totals, Wanted
    from gtrace.sweep.sources import Weighed
    from gtrace.sweep.store import Row, RowTable
    from gtrace.types import SummarySpec

OPEN_LOOP = "open loop: the trace's gradients do not react to the codec"


class Replay:
    """A tensor's steps in order, whatever there is of the tensor.

    A row of a stateless codec depends on its own step and on those that it was fitted on, so it comes out the
    same wherever a sweep resumes. A stateful codec is replayed from the start of its burst of consecutive steps, and
    what a window adds up from the start of the window, unless this replay has gone through those steps already.
    """

    def __init__(
        self, gradients: Gradients, job: Job, settings: Settings, allocation: Allocation | None = None
    ) -> None:
        self._gradients, self._job, self._settings = gradients, job, settings
        self._source = source_of(gradients, job)
        self._sums = RunningSums(job.windows)
        self._fits = Fits(self._source, job, settings, allocation, self._sums)
        self._draws: Draws = WholeDraws(self._source, self._fits, self._sums)
        if job.chunked:
            self._draws = ChunkDraws(gradients, job, self._fits, self._sums)
        self._together = Together(self._fits.sketch)
        self._identities = {id(codec): identity(codec) for _, wanted in job.wanted for codec, _ in wanted}
        self._optima: dict[tuple[SummarySpec, int, bool], float] = {}
        self._ends = {last: first for first, last in job.windows}
        #: of the step that is gone through, None if no window ends there
        self._window: Window | None = None
        #: of the step that is gone through, None if second moments are not known
        self._weighed: Weighed | None = None

    def blocks(self) -> Iterator[Block]:
        """Each wanted step's rows."""
        for index, wanted in self._job.wanted:
            yield self._block(index, wanted).named(self._job.names)
            self._together.forget(self._fits.forget(index))
            if index in self._ends:
                self._draws.forget()
            self._optima.clear()

    def _block(self, index: int, wanted: Wanted) -> Block:
        job, settings = self._job, self._settings
        step = job.steps[index]
        reference, bad = self._fits.look(index)
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
        self._weighed = self._source.weigh(index, self._fits.needs)
        self._window = self._ending(index) if index in self._ends else None
        common["energy"] = reference.energy
        common["mean_abs"] = reference.mean_abs
        rows: list[Row] = []
        times: list[Timing] = []
        groups, rest = self._together.split(wanted) if self._source.in_tables else ([], wanted)
        tables = [self._table(group, index, common, times) for group in groups]
        for codec, draws in rest:
            stretch = self._source.stretch(codec, index, partial(self._fits.expecting_state, codec, index))
            for row, spent in self._rows(codec, draws, index, reference, common):
                rows.append(row if stretch is None else stretch(row))
                times.extend((job.tensor, step, row["codec"], row["draw"], stage, s) for stage, s in spent.items())
        details = self._details(index, [codec for codec, _ in wanted], reference.size) if settings.optimal else []
        noise = self._gradients.noise(job.tensor, step)
        if noise is not None:
            relate_to_noise(rows, tables, wanted, noise)
            details.append((job.tensor, step, NOISE, noise._asdict()))
        return Block(rows, times, warnings, details, tables)

    def _table(self, group: Group, index: int, common: Row, times: list[Timing]) -> RowTable:
        """Expectations that are worked out together, from the sketch that they share."""
        needs = group.sets.needs
        clock = time.perf_counter()
        self._fits.summary(index, needs)
        sketched = time.perf_counter()
        weighed = None if self._weighed is None else (self._weighed.sketches[needs], self._weighed.energy)
        source = self._fits.source(index, needs)
        before = self._fits.source(index - 1, needs) if index else None
        schedule = Schedule(source, before, self._fits.label(index, source))
        optimum = partial(self._optimum, index) if self._settings.optimal else None
        table = self._together.table(group, index, schedule, common, optimum, self._job.dtype_bits, weighed)
        if group.sets.codecs[0].unbiased:
            errors = partial(self._together.errors, group, size=common["n"])
            lost = self._expected_loss(group.sets, index, table.numbers["squared_error"], errors)
            if lost is not None:
                table = table._replace(
                    same={**table.same, **self._window_columns()}, numbers={**table.numbers, "window_error": lost}
                )
        spent = {"sketch": sketched - clock, "expect": time.perf_counter() - sketched}
        times.extend((self._job.tensor, common["step"], MANY, EXPECTATION, *stage) for stage in spent.items())
        return table

    def _rows(
        self, codec: Codec, draws: tuple[int, ...], index: int, reference: Reference | Totals, common: Row
    ) -> Iterator[tuple[Row, dict[str, float]]]:
        """A codec's rows with the seconds that their stages took."""
        common = {**common, **self._identities[id(codec)]}
        if codec.stateful:
            common["note"] = "; ".join(filter(None, (common["note"], OPEN_LOOP)))
        expected = None
        for draw in draws:
            clock = time.perf_counter()
            built = expecting(codec) and codec.needs not in self._fits.known(index)
            if expecting(codec) and codec.needs is not None:
                self._fits.summary(index, codec.needs)
            sketched = time.perf_counter()
            ready = self._fits.ready(codec, draw, index, reference.size)
            spent = {"fit": time.perf_counter() - sketched}
            own = {**common, **self._fits.columns(codec, index, ready, reference.size)}
            if ready.note is not None:
                own["note"] = "; ".join(filter(None, (common["note"], ready.note)))
            if expecting(codec) and codec.needs is not None and expected is None:
                expected = codec.expect(ready.state, self._fits.summary(index, codec.needs))
            if draw != EXPECTATION:
                drawn = self._draws.draw(codec, draw, index, ready, reference, self._window)
                norms = None if expected is None else expected.bits_norms
                row = draw_row(own, draw, drawn, norms, self._job.dtype_bits)
                row["relative_bias"] = drawn_bias(codec, expected, row)
                if drawn.window_error is not None:
                    row.update(self._window_columns(), window_error=drawn.window_error)
                yield row, drawn.spent
            elif expected is not None and expecting(codec):
                optimum = None
                grid = level_grid(codec)
                if self._settings.optimal and grid is not None:
                    optimum = self._optimum(index, codec, grid.levels(ready.state).size)
                row = expectation_row(own, expected, optimum, self._job.dtype_bits)
                row.update(self._effects(codec, ready, index, expected.squared_error, reference.size))
                yield row, {"sketch": sketched - clock, **spent} if built else spent

    def _effects(self, codec: Codec, ready: Ready, index: int, error: float, size: int) -> Row:
        """What an expected error means for Adam's update, and over the window that ends at a step."""
        found: Row = {"update_error": None}
        if self._weighed is not None and codec.needs is not None:
            plain, weighted = self._fits.summary(index, codec.needs), self._weighed.sketches[codec.needs]
            lost = codec.weighted_error(ready.state, plain, weighted)
            found["update_error"] = relative(lost, self._weighed.energy)
        if codec.unbiased and not codec.stateful:
            total = self._expected_loss(id(codec), index, np.array([error]), partial(self._errors, codec, size=size))
            if total is not None:
                found.update(self._window_columns(), window_error=float(total[0]))
        return found

    def _ending(self, index: int) -> Window | None:
        """The window that ends at a step; None also if the gradients of its steps have no sum."""
        first = self._ends[index]
        steps = self._job.steps[first : index + 1]
        energy = self._gradients.energy_of_sum(self._job.tensor, steps, zero=self._settings.nonfinite == "zero")
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

    def _errors(self, codec: Codec, index: int, size: int) -> NDArray[np.float64]:
        assert codec.needs is not None
        state = self._fits.ready(codec, EXPECTATION, index, size).state
        return np.array([codec.expect(state, self._fits.summary(index, codec.needs)).squared_error])

    def _details(self, index: int, codecs: Sequence[Codec], size: int) -> list[Detail]:
        """What figures of levels need, at the tensor's last wanted step alone: it is much for every step."""
        if not self._job.final or index != self._job.wanted[-1][0]:
            return []
        found: dict[str, object] = {}
        for codec in codecs:
            levels = None
            if not codec.stateful:
                levels = levels_of(codec, self._fits.ready(codec, EXPECTATION, index, size).state)
            if levels is not None and codec.needs is not None:
                found[f"levels {codec}"] = levels
                found[f"density {spec_name(codec.needs)}"] = density(self._fits.summary(index, codec.needs))
        curves = convergence(codecs, self._fits.known(index))
        if curves is not None:
            found["convergence"] = curves
        return [(self._job.tensor, self._job.steps[index], what, value) for what, value in found.items()]

    def _optimum(self, index: int, codec: Codec, count: int) -> float | None:
        """The least expected error of any ``count`` levels on this very tensor, with the codec's own sketch."""
        grid = level_grid(codec)
        if grid is None or codec.needs is None or not has_optimum(codec):
            return None
        key = (codec.needs, count, grid.zero)
        if key not in self._optima:
            sketch = self._fits.summary(index, codec.needs)
            if not sketch.sums.size:
                return None
            if grid.zero:
                best = optimal_levels(sketch, count, method="sketch")
            else:
                best = alq_levels(sketch, count.bit_length(), zero=False)
            self._optima[key] = sketch.expected_error(best, grid.zero)
        return self._optima[key]


def has_optimum(codec: Codec) -> bool:
    """Whether a codec's levels can be set beside the best ones."""
    return level_grid(codec) is not None and codec.needs is not None and codec.needs.norm != "none"
