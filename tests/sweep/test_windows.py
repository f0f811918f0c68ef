"""What codecs lose over windows of consecutive steps, against sums in numpy."""

import math
from itertools import pairwise

import numpy as np
import pytest
from helpers_sweep import rows_of, stop_sweep, write_trace

import gtrace
from gtrace.sweep import draws, fits, gradients
from gtrace.sweep.jobs import start_of, windows_of
from gtrace.trace import Trace
from gtrace.types import Key

STEPS = (*range(13), 20, 21, 22, 40)
#: of every kind: closed forms in a table and alone, biased and not, with memory of its own or around another codec
SPECS = [
    *("none", "qsgdinf:bits=3", "alq:bits=3,bucket_size=64", "randomk:ratio=0.2", "terngrad:clip=1.5"),
    *("signsgd", "topk:ratio=0.05", "minmax:bits=2", "fp:e3m0", "fp:e3m0,rounding=stochastic"),
    *("ef:topk:ratio=0.05", "mem-sgd:ratio=0.05", "ef:signsgd", "signum", "dgc:ratio=0.1", "ef:qsgdinf:bits=3"),
    *("momentum:topk:ratio=0.1", "powersgd", "onebit", "mcgq:delta_k=100"),
]
#: one of each kind of sum: in a table, alone, drawn only, with memory, fitted to what memory makes of a gradient
KINDS = [
    *("qsgdinf:bits=3", "alq:bits=3,bucket_size=64", "topk:ratio=0.05", "fp:e3m0,rounding=stochastic"),
    *("ef:topk:ratio=0.05", "signum", "ef:qsgdinf:bits=3"),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("windows")
    return write_trace(folder / "run.zarr", steps=STEPS, tensors=(("a", 300), ("b", 40)))


@pytest.fixture(scope="module")
def result(path):
    return gtrace.run_sweep(path, SPECS, draws=2, jobs=1)


@pytest.fixture(scope="module")
def on_the_step_before(path):
    return list(gtrace.run_sweep(path, SPECS, draws=2, refit="previous", jobs=1).rows())


def trace_shape(trace, name):
    return next(tensor.shape for tensor in trace.tensors if tensor.name == name)


def replayed(trace, name, spec, draw, steps):
    """What a codec decodes at each step, fitted on the step before, with memory from the start of the burst."""
    codec, captured, state, arrived = gtrace.codec(spec), trace.steps(name).tolist(), None, {}
    for index, step in enumerate(captured):
        values = trace.read(name, step)
        if state is None or not codec.stateful or start_of(captured, index) == index:
            state = codec.init(values.size, trace_shape(trace, name))
        if codec.needs is not None:
            source = values if codec.fits_itself else trace.read(name, captured[max(0, index - 1)])
            state = codec.fit(state, gtrace.sketch.MomentSketch.from_spec(codec.view(state, source), codec.needs), step)
        key = Key.derive(0, tensor=name, step=step, draw=draw)
        arrived[step] = codec.decode(codec.shared(state), codec.encode(state, values, key), values.size)
        state = codec.update(state, values, arrived[step])
    return [arrived[step] for step in steps]


def test_windows_are_cut_at_bursts_at_ten_steps_and_at_gaps_in_what_is_wanted():
    assert windows_of(STEPS, STEPS) == ((0, 9), (10, 12), (13, 15))
    assert windows_of(range(25), range(25)) == ((0, 9), (10, 19), (20, 24))
    assert windows_of(range(11), range(11)) == ((0, 9),)
    assert windows_of(range(100, 130), range(105, 115)) == ((5, 9), (10, 14))
    assert windows_of(range(10), (0, 1, 2, 4, 6, 7)) == ((0, 2), (6, 7))
    assert windows_of((), ()) == ()
    found = windows_of(range(1000), [step for step in range(1000) if step % 7])
    assert all(first <= last for (_, first), (last, _) in pairwise(found))


def test_only_the_last_step_of_a_window_has_it(result):
    drawn = result["draw"] >= 0
    assert dict(zip(result["step"][drawn], result["window"][drawn], strict=True)).keys() == set(STEPS)
    ends = {9: 10.0, 12: 3.0, 22: 3.0}
    for row in result.rows():
        if row["draw"] >= 0:
            assert ends.get(row["step"]) == (None if math.isnan(row["window"]) else row["window"])
        for name in ("window_error", "window_energy"):
            assert math.isnan(row[name]) == math.isnan(row["window"])


@pytest.mark.parametrize("spec", SPECS)
def test_draws_are_sums_of_vectors(path, on_the_step_before, spec):
    with gtrace.open_trace(path) as trace:
        found = [
            r
            for r in on_the_step_before
            if r["codec"] == str(gtrace.codec(spec)) and r["draw"] >= 0 and r["window"] > 0
        ]
        assert len(found) == 2 * 3 * 2
        for row in found:
            steps = range(row["step"] + 1 - int(row["window"]), row["step"] + 1)
            exact = [trace.read(row["tensor"], step).astype(np.float64) for step in steps]
            arrived = replayed(trace, row["tensor"], spec, row["draw"], steps)
            error = sum(q - g for q, g in zip(arrived, exact, strict=True))
            assert row["window_energy"] == pytest.approx(float(np.sum(np.square(sum(exact)))), rel=1e-12)
            assert row["window_error"] == pytest.approx(float(np.sum(np.square(error))), rel=1e-12)


def test_expected_errors_of_unbiased_codecs_without_memory_add_up(result):
    rows = {(r["tensor"], r["step"], r["codec"]): r for r in result.rows() if r["draw"] == -1}
    for (tensor, step, codec), row in rows.items():
        unbiased = gtrace.codec(codec).unbiased
        assert math.isnan(row["window"]) == (not unbiased or step not in (9, 12, 22)), codec
        if not math.isnan(row["window"]):
            steps = range(step + 1 - int(row["window"]), step + 1)
            wanted = sum(rows[tensor, s, codec]["squared_error"] for s in steps)
            assert row["window_error"] == pytest.approx(wanted, rel=1e-12)


def rows_about(specs, result):
    names = {str(gtrace.codec(spec)) for spec in specs}
    return [row for row in rows_of(result) if row[2] in names]


@pytest.mark.parametrize("held", [0, 500])
def test_rows_depend_neither_on_memory_nor_on_jobs_nor_on_where_a_sweep_resumes(
    path, result, tmp_path, monkeypatch, held
):
    monkeypatch.setattr(fits, "_HELD", held)
    # Of tensors beyond this, all steps of a window are read together.
    monkeypatch.setattr(gradients, "LARGEST_KEPT", held)
    whole = rows_about(KINDS, result)
    assert (result["noise_ratio"] > 0).any()
    assert rows_of(gtrace.run_sweep(path, KINDS, draws=2, jobs=2)) == whole

    for count in (4, 24):
        out = tmp_path / f"{count}.db"
        stop_sweep(count, path, KINDS, draws=2, jobs=1, output=out)
        assert rows_of(gtrace.run_sweep(path, KINDS, draws=2, jobs=1, output=out)) == whole


@pytest.mark.parametrize("first", [range(5, 13), [4], [0, 2, 4, 6, 8, 10, 12]])
def test_a_sweep_that_more_steps_were_added_to_has_the_windows_of_one_sweep(path, result, tmp_path, first):
    out = tmp_path / "out.db"
    specs = [spec for spec in KINDS if first != [4] or not gtrace.codec(spec).stateful]
    gtrace.run_sweep(path, specs, draws=2, jobs=1, output=out, steps=list(first))
    rest = [step for step in STEPS if step not in first]
    found = gtrace.run_sweep(path, specs, draws=2, jobs=1, output=out, steps=rest)
    assert rows_of(found) == rows_about(specs, result)


@pytest.mark.parametrize("first", [range(5, 13), [9]])
def test_windows_move_also_after_a_stop_and_after_a_sweep_of_other_codecs(path, result, tmp_path, first):
    out = tmp_path / "out.db"
    specs = [spec for spec in KINDS if first != [9] or not gtrace.codec(spec).stateful]
    for count in (4, 12):
        gtrace.run_sweep(path, specs, draws=2, jobs=1, output=out, steps=list(first), force=True)
        stop_sweep(count, path, specs, draws=2, jobs=1, output=out)
        assert rows_of(gtrace.run_sweep(path, specs, draws=2, jobs=1, output=out)) == rows_about(specs, result)
    gtrace.run_sweep(path, specs, draws=2, jobs=1, output=out, steps=list(first), force=True)
    gtrace.run_sweep(path, ["alq:bits=3"], draws=2, jobs=1, output=out)
    found = gtrace.run_sweep(path, specs, draws=2, jobs=1, output=out)
    assert rows_about(specs, found) == rows_about(specs, result)


def test_a_finished_sweep_measures_nothing_again(tmp_path):
    values = np.random.default_rng(0).normal(size=(6, 50)).astype(np.float32)
    values[1, 3] = np.nan
    trace = Trace.from_arrays({"w": dict(enumerate(values)), "late": dict(enumerate(values[:4], 2))})
    specs, again = [*KINDS, "signsgd", "qsgdinf:bits=3,scope=model"], []
    for work in (None, lambda *done: again.append(done)):
        gtrace.run_sweep(trace, specs, output=tmp_path / "out.db", work=work)
    assert again == []


@pytest.mark.parametrize("kept", [0, 1 << 20])
@pytest.mark.parametrize(("nonfinite", "there"), [("skip", False), ("zero", True)])
def test_a_window_with_values_that_are_not_finite(nonfinite, there, kept, monkeypatch):
    monkeypatch.setattr(gradients, "LARGEST_KEPT", kept)
    values = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32)
    values[1, 3] = np.nan
    trace = Trace.from_arrays({"w": dict(enumerate(values))})
    found = gtrace.run_sweep(trace, ["qsgdinf:bits=3", "topk:ratio=0.1", "ef:topk:ratio=0.1"], nonfinite=nonfinite)
    assert (found["window"] > 0).any() == there
    if there:
        energy = float(np.sum(np.square(np.nan_to_num(values).sum(axis=0, dtype=np.float64))))
        np.testing.assert_allclose(found["window_energy"][found["window"] > 0], energy, rtol=1e-12)


def test_a_model_of_other_tensors_at_some_steps_has_no_window():
    rng = np.random.default_rng(0)
    steps = {"a": range(6), "b": (0, 1, 3, 4, 5)}
    trace = Trace.from_arrays(
        {n: {s: rng.normal(size=50).astype(np.float32) for s in there} for n, there in steps.items()}
    )
    specs = ["qsgdinf:bits=3,scope=model", "ef:qsgdinf:bits=3,scope=model", "topk"]
    found = gtrace.run_sweep(trace, specs)
    model = found["tensor"] == "*"
    assert np.isnan(found["window"][model]).all()
    assert set(found["step"][found["window"] > 0]) == {1, 5}
    found = gtrace.run_sweep(trace, specs[:2], steps=[3, 4, 5])
    assert set(found["step"][found["window"] > 0]) == {5}


@pytest.mark.parametrize(("kept", "histograms"), [(1 << 20, 16), (0, 24)])
def test_chunks_give_the_windows_of_the_whole(path, tmp_path, kept, histograms, monkeypatch):
    monkeypatch.setattr(gradients, "LARGEST_KEPT", kept)
    # With so many, all steps of a window are drawn together: one codec at a time, or all.
    monkeypatch.setattr(draws, "_HISTOGRAMS", histograms)
    monkeypatch.setattr(gradients, "_TABLES", 2 * histograms)
    specs = ["qsgdinf:bits=3,bucket_size=64", "alq:bits=3,bucket_size=64", "signsgd", "topk:ratio=0.1"]

    def swept(chunk, **more):
        found = gtrace.run_sweep(path, specs, tensors=["a"], jobs=1, chunk=chunk, draws=2, **more)
        shown = ("step", "codec", "draw", "window_error", "window_energy", "squared_error", "bits_payload")
        return [tuple(row[name] for name in shown) for row in found.rows()]

    whole, parts = swept(1 << 20), swept(128)
    assert len(whole) == len(STEPS) * (3 + 2 * 4)
    np.testing.assert_array_equal([row[3:] for row in parts], [row[3:] for row in whole])
    swept(128, output=tmp_path / "out.db", steps=list(range(6)))
    np.testing.assert_array_equal([r[3:] for r in swept(128, output=tmp_path / "out.db")], [r[3:] for r in whole])


def test_the_bias_of_draws(result):
    for row in result.rows():
        if row["draw"] < 0:
            continue
        codec = gtrace.codec(row["codec"])
        if codec.unbiased:
            assert row["relative_bias"] == 0
        elif codec.deterministic:
            assert row["relative_bias"] == pytest.approx(math.sqrt(row["squared_error"] / row["energy"]))
        elif codec.expects:
            assert 0 <= row["relative_bias"] < math.sqrt(row["squared_error"] / row["energy"])
        else:
            assert math.isnan(row["relative_bias"]), codec
