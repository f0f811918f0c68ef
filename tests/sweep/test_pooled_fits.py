"""Fits to several steps: which they are, and what codecs with memory see of them."""

import numpy as np
import pytest
from helpers_sweep import pick, rows_of

import gtrace
from gtrace.fitting.pooling import WINDOW, pooled
from gtrace.sketch import MomentSketch
from gtrace.sweep import COLUMNS, EXPECTATION
from gtrace.trace import Trace
from gtrace.types import Key

#: a single step, a long burst, a short one
STEPS = (3, *range(20, 33), *range(90, 93))
SPECS = ["alq:bits=4,bucket_size=64", "ef:zipml:bits=3"]


def gradient(step):
    random = np.random.default_rng([step, 400])
    return (random.standard_t(5, 400) * (1.0 + 0.1 * step)).astype(np.float32)


@pytest.fixture(scope="module")
def trace():
    values = {step: gradient(step) for step in STEPS}
    # What is skipped is no part of a memory.
    values[24] = np.where(np.arange(400) == 7, np.nan, values[24]).astype(np.float32)
    return Trace.from_arrays({"t": values})


@pytest.fixture(scope="module")
def result(trace):
    return gtrace.run_sweep(trace, SPECS, jobs=1)


def test_a_fit_looks_at_the_captured_steps_before_whatever_the_gaps(trace, result):
    chosen = gtrace.codec("alq:bits=4,bucket_size=64")
    sketches = {step: MomentSketch.from_spec(np.nan_to_num(trace.read("t", step)), chosen.needs) for step in STEPS}
    for step in (20, 31, 91):
        place = STEPS.index(step)
        before = STEPS[max(0, place - WINDOW) : place]
        state = chosen.fit(chosen.init(400), pooled(sketches[k] for k in before), step)
        row = pick(result, step=step, codec=str(chosen), draw=EXPECTATION)
        assert row["squared_error"] == chosen.expect(state, sketches[step]).squared_error
        assert row["fitted_on"] == f"pooled {len(before)} step{'s' * (len(before) > 1)}"


def test_a_codec_with_memory_pools_what_it_saw(trace, result):
    """The burst of three steps, driven by hand: without memory before it, with memory inside it."""
    chosen = gtrace.codec("ef:zipml:bits=3")
    views = [
        MomentSketch.from_spec(np.nan_to_num(trace.read("t", step)), chosen.needs) for step in STEPS[: STEPS.index(90)]
    ]
    state = chosen.init(400)
    for step in (90, 91, 92):
        values = trace.read("t", step)
        state = chosen.fit(state, pooled(views[-WINDOW:]), step)
        arrived = chosen.simulate(state, values, Key.derive(0, tensor="t", step=step, draw=0)).values
        row = pick(result, step=step, codec=str(chosen), draw=0)
        wide = values.astype(np.float64)
        assert row["squared_error"] == pytest.approx(float(np.sum((arrived - wide) ** 2)), rel=1e-9)
        views.append(MomentSketch.from_spec(chosen.view(state, values), chosen.needs))
        state = chosen.update(state, values, arrived)


def test_rows_do_not_depend_on_jobs_or_on_an_interruption(trace, result, tmp_path):
    assert rows_of(gtrace.run_sweep(trace, SPECS, jobs=2)) == rows_of(result)
    path = tmp_path / "out.db"
    for steps in ([22, 23, 90], None):
        found = gtrace.run_sweep(trace, SPECS, steps=steps, output=path, jobs=1)
    assert rows_of(found) == rows_of(result)


def by_key(result):
    return {row[:4]: row for row in rows_of(result)}


@pytest.mark.parametrize("steps", [[92], [20, 31], [26, 32, 91]])
def test_rows_are_the_same_wherever_a_sweep_begins(trace, result, steps):
    part = by_key(gtrace.run_sweep(trace, SPECS, steps=steps, jobs=1))
    whole = by_key(result)
    assert len(part) == len(steps) * sum(row[1] == 92 for row in whole)
    # Windows are over the steps that a sweep covers.
    there = [k for k, name in enumerate(COLUMNS) if not name.startswith("window")]
    assert all([whole[key][k] for k in there] == [row[k] for k in there] for key, row in part.items())
