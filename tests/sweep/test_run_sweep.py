import contextlib
import math
import multiprocessing
import os
import signal
import sqlite3
import time

import naive
import numpy as np
import pytest
from helpers_sweep import pick, rows_of, write_trace
from helpers_trace import write_arrays

import gtrace
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.fitting.pooling import pooled
from gtrace.sweep import EXPECTATION, ResultStore, expand
from gtrace.sweep.replay import Replay
from gtrace.types import Key

CODECS = ["none", "qsgdinf:bits=3,bucket_size=512", "nuqsgd:bits=4", "terngrad", "natural"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return write_trace(tmp_path_factory.mktemp("trace") / "run.zarr")


@pytest.fixture(scope="module")
def result(trace):
    return gtrace.run_sweep(trace, CODECS, draws=2, jobs=1)


def test_one_row_per_tensor_step_codec_and_draw(result):
    assert len(result) == 3 * 4 * len(CODECS) * 3
    assert len({(r["tensor"], r["step"], r["codec"], r["draw"]) for r in result.rows()}) == len(result)
    # Uncompressed, nothing is lost.
    costs = ("squared_error", "relative_variance", "bits_total", "ratio_float32")
    assert {tuple(row[name] for name in costs) for row in result.rows() if row["codec"] == "none"} == {(0, 0, 32, 1)}


def test_a_draw_is_what_the_codec_does(trace, result):
    c = gtrace.codec("qsgdinf:bits=3,bucket_size=512")
    with gtrace.open_trace(trace) as opened:
        before = [gtrace.MomentSketch.from_spec(opened.read("conv.weight", step), c.needs) for step in (0, 1)]
        g = opened.read("conv.weight", 2)
    state = c.fit(c.init(g.size), pooled(before), 1)
    payload = c.encode(state, g, Key.derive(0, tensor="conv.weight", step=2, draw=1))
    q = c.decode(c.shared(state), payload, g.size).astype(np.float64)
    row = pick(result, tensor="conv.weight", step=2, codec=str(c), draw=1)
    g = g.astype(np.float64)
    assert math.isclose(row["squared_error"], np.sum((q - g) ** 2), rel_tol=1e-12)
    assert math.isclose(row["relative_variance"], np.sum((q - g) ** 2) / np.sum(g * g), rel_tol=1e-12)
    assert math.isclose(row["cosine"], q @ g / np.sqrt((q @ q) * (g @ g)), rel_tol=1e-12)
    assert math.isclose(row["w1"], np.mean(np.abs(np.sort(q) - np.sort(g))), rel_tol=1e-9)
    assert math.isclose(
        row["w1_mcgq"], np.mean(np.abs(np.sort(g / np.abs(g).sum()) - np.sort(q / np.abs(q).sum()))), rel_tol=1e-6
    )
    assert math.isclose(row["mean_abs_error"], np.mean(np.abs(q - g)), rel_tol=1e-12)
    assert row["w1"] <= row["mean_abs_error"] * (1 + 1e-12)
    assert row["sparsity"] == np.mean(q == 0)
    assert math.isclose(row["bits_payload"], 8 * (len(payload) - 24) / g.size, rel_tol=1e-12)
    assert row["bits_total"] == row["bits_payload"] + row["bits_shared"]
    assert math.isclose(row["ratio_float32"], 32 / row["bits_total"])
    assert row["fitted_on"] == "pooled 2 steps"


def test_an_expectation_is_the_closed_form(trace, result):
    with gtrace.open_trace(trace) as opened:
        g = opened.read("fc.weight", 3)
    row = pick(result, tensor="fc.weight", step=3, codec="nuqsgd:bits=4", draw=EXPECTATION)
    levels = np.concatenate([[0], 2.0 ** np.arange(-6, 1)])
    truth = naive.rounding_error(g, "l2", None, levels)
    assert math.isclose(row["squared_error"], truth, rel_tol=1e-11)
    assert math.isclose(row["relative_variance"], truth / np.sum(g.astype(np.float64) ** 2), rel_tol=1e-11)
    assert math.isnan(row["cosine"])
    assert row["bits_fixed"] == 4 + 32 / 700


def test_rows_do_not_depend_on_the_number_of_workers(trace, result):
    assert rows_of(gtrace.run_sweep(trace, CODECS, draws=2, jobs=3)) == rows_of(result)


def test_results_resume_and_extend(trace, tmp_path, result):
    path = tmp_path / "out.db"
    gtrace.run_sweep(trace, CODECS[:2], draws=1, jobs=1, output=path, steps=[1, 3])
    assert len(ResultStore.load(path)) == 3 * 2 * 2 * 2
    seen = []
    how = {"draws": 2, "jobs": 1, "output": path, "progress": lambda *told: seen.append(told)}
    assert rows_of(gtrace.run_sweep(trace, CODECS, **how)) == rows_of(result)
    assert seen[-1][0] == seen[-1][1]
    seen.clear()
    gtrace.run_sweep(trace, CODECS, **how)
    assert seen == [], "a finished row was computed again"


def test_a_sweep_continues_when_its_trace_has_grown(tmp_path):
    """Rows are those of one sweep of the whole trace, and what was measured is not measured again."""
    gradients = np.random.default_rng(0).standard_normal((9, 300)).astype(np.float32) + 0.1
    path, place = tmp_path / "out.db", tmp_path / "run.zarr"
    codecs, sizes = ["qsgdinf:bits=3", "alq:bits=2", "ef:topk:ratio=0.1"], []
    with gtrace.create_trace(place) as writer:
        for step, values in enumerate(gradients):
            writer.append(step, "w", values)
            writer.append(step, "b", values[:20] * 3)
            writer.commit(step, loss=1.0)
            if step in (4, 8):
                totals = [0]
                how = {"progress": lambda _, total, totals=totals: totals.append(total), "output": path}
                result = gtrace.run_sweep(place, codecs, jobs=1, noise=False, **how)
                sizes.append(totals[-1])
    assert result.provenance["learning"]["last"] == 8
    assert rows_of(result) == rows_of(gtrace.run_sweep(place, codecs, jobs=1, noise=False))
    assert sizes[1] < 1.5 * sizes[0]
    with pytest.raises(OutputExistsError, match="other data or settings"):
        gtrace.run_sweep(gtrace.Trace.from_arrays({"w": gradients[0]}), codecs[:2], output=path, jobs=1)


def test_rows_whose_noise_changed_as_the_trace_grew_are_measured_again_whatever_came_between(tmp_path):
    gradients = np.random.default_rng(0).standard_normal((12, 50)).astype(np.float32)
    path, place = tmp_path / "out.db", tmp_path / "run.zarr"
    how = {"jobs": 1, "noise": False}
    with gtrace.create_trace(place) as writer:
        for step, values in enumerate(gradients):
            if step == 10:
                gtrace.run_sweep(place, ["qsgd:bits=2"], output=path, **how)
            writer.append(step, "w", values)
            writer.commit(step)
    gtrace.run_sweep(place, ["qsgd:bits=3"], steps=[3], output=path, **how)
    result = gtrace.run_sweep(place, ["qsgd:bits=2"], output=path, **how)
    assert rows_of(result.selected) == rows_of(gtrace.run_sweep(place, ["qsgd:bits=2"], **how))


def test_another_sweep_is_not_overwritten(trace, tmp_path):
    path = tmp_path / "out.db"
    gtrace.run_sweep(trace, ["terngrad"], output=path, jobs=1)
    before = path.read_bytes()
    with pytest.raises(OutputExistsError, match="other data or settings"):
        gtrace.run_sweep(trace, ["terngrad"], output=path, seed=1, jobs=1)
    assert path.read_bytes() == before
    gtrace.run_sweep(trace, ["terngrad"], output=path, seed=1, jobs=1, force=True)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(OutputExistsError, match="is not a sweep"):
        gtrace.run_sweep(trace, ["terngrad"], output=tmp_path / "notes.txt", jobs=1)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def _swept(trace, path, told):
    """Sweep in a process of its own, slowly, and tell when something was done."""
    block = Replay._block

    def slow(self, *args):
        time.sleep(0.03)
        return block(self, *args)

    Replay._block = slow
    gtrace.run_sweep(trace, CODECS, draws=2, jobs=2, output=path, progress=lambda done, _: told.send(done))


@pytest.mark.parametrize(("blocks", "how"), [(1, signal.SIGKILL), (7, signal.SIGKILL), (1, signal.SIGINT)])
def test_kill_9_loses_nothing_that_was_finished(trace, result, tmp_path, blocks, how):
    """Nor does Ctrl-C."""
    path, forked = tmp_path / "out.db", multiprocessing.get_context("fork")
    here, there = forked.Pipe()
    child = forked.Process(target=_swept, args=(trace, path, there))
    child.start()
    while here.recv() < blocks:
        pass
    os.kill(child.pid, how)
    child.join(60)
    assert child.exitcode == (-signal.SIGKILL if how == signal.SIGKILL else 1)
    partial = ResultStore.load(path)
    assert len(partial) >= blocks * len(CODECS) * 3
    whole = {(r[0], r[1], r[2], r[3]): r for r in rows_of(result)}
    assert all(whole[r[:4]] == r for r in rows_of(partial))
    computed = []
    full = gtrace.run_sweep(trace, CODECS, draws=2, jobs=1, output=path, progress=lambda *told: computed.append(told))
    assert rows_of(full) == rows_of(result)
    left = 12 - len({(r[0], r[1]) for r in rows_of(partial)})
    assert computed[-1] == (left, left)


def test_what_a_code_was_fitted_on_is_said(trace):
    spec = "qsgdinf:bits=4"
    remembering = gtrace.run_sweep(trace, [f"ef:{spec}"], tensors=["conv.weight"], refit=[0, 2], jobs=1, draws=1)
    assert remembering["fitted_on"].tolist() == ["itself", "previous", "itself", "previous"]
    for refit, wanted in [
        ("pooled", ["itself", "pooled 1 step", "pooled 2 steps", "pooled 3 steps"]),
        ("previous", ["itself", "previous", "previous", "previous"]),
        ("each", ["itself"] * 4),
        ("once", ["itself", "previous", "step 0", "step 0"]),
        ([2], ["itself", "previous", "itself", "previous"]),
    ]:
        found = gtrace.run_sweep(trace, [spec], tensors=["conv.weight"], refit=refit, jobs=1, draws=0)
        assert found["fitted_on"].tolist() == wanted
        shared = found["bits_shared"]
        assert shared[0] > 0
        if refit == "once":
            assert (shared[1:] == 0).all()


def test_nonfinite_gradients_are_counted_and_not_quantized(tmp_path):
    values = np.ones((2, 100), np.float32)
    values[1, [3, 7]] = np.nan, np.inf
    path = write_arrays(tmp_path / "bad.zarr", {"w": dict(enumerate(values))})
    found = gtrace.run_sweep(path, ["qsgd:bits=3"], jobs=1)
    (said,) = found.warnings
    assert said == "NaN or infinity in the gradients of 1 of 1 tensor, at 1 of 2 steps, first at step 1: skipped"
    bad = found["step"] == 1
    assert np.isnan(found["squared_error"][bad]).all()
    assert all("2 non-finite" in note for note in found["note"][bad])
    assert np.isfinite(found["squared_error"][~bad]).all()
    zeroed = gtrace.run_sweep(path, ["qsgd:bits=3"], jobs=1, nonfinite="zero")
    assert np.isfinite(zeroed["squared_error"]).all()
    with pytest.raises(TraceError, match="w at step 1: 2 of 100"):
        gtrace.run_sweep(path, ["qsgd:bits=3"], jobs=1, nonfinite="error")


def test_selection(trace):
    found = gtrace.run_sweep(trace, ["terngrad"], tensors=["fc.*"], steps=[0, 3], jobs=1, draws=0)
    assert set(found["tensor"]) == {"fc.weight", "fc.bias"}
    assert set(found["step"]) == {0, 3}
    with pytest.raises(UsageError, match=r"no tensor matches 'fc.wieght'; did you mean fc.weight"):
        gtrace.run_sweep(trace, ["terngrad"], tensors=["fc.wieght"])
    with pytest.raises(UsageError, match="4 steps from 0 to 3"):
        gtrace.run_sweep(trace, ["terngrad"], steps=[17])


BOTH = {"bits": [3], "ratio": [0.1, 0.5]}


@pytest.mark.parametrize(
    ("names", "parameters", "prefix", "specs"),
    [
        ("qsgd:bits=5,nuqsgd,natural", {"bits": [2, 3]}, "", "qsgd:bits=5 nuqsgd:bits=2 nuqsgd:bits=3 natural"),
        ("topk,rotate:qsgdinf", BOTH, "ef:", "ef:topk:ratio=0.1 ef:topk:ratio=0.5 ef:rotate:qsgdinf:bits=3"),
        ("mcgq", {"bits": [2, 3]}, "", "mcgq:bits=2 mcgq:bits=3"),
        ("mcgq,qsgd", {"bits": [3], "amount": [0.1]}, "", "mcgq:amount=0.1 qsgd:bits=3"),
    ],
    ids=["bits", "bits and ratios of prefixed codecs", "bits of samples", "an amount"],
)
def test_names_and_parameters_become_specs(names, parameters, prefix, specs):
    assert [str(c) for c in expand(names, parameters, prefix=prefix)] == specs.split()


def test_whole_model_scope(trace):
    spec = "qsgdinf:bits=3,bucket_size=512,scope=model"
    found = gtrace.run_sweep(trace, [spec], jobs=1, draws=0)
    assert set(found["tensor"]) == {"*"}
    with gtrace.open_trace(trace) as opened:
        g = np.concatenate([opened.read(info.name, 2) for info in opened.tensors])
    truth = naive.rounding_error(g, "linf", 512, np.arange(4) / 3)
    assert math.isclose(pick(found, step=2)["squared_error"], truth, rel_tol=1e-6)


def test_fitted_levels_stand_beside_the_best_ones(trace):
    codecs = ["alq:bits=3", "zipml:bits=3", "qsgd:bits=3", "alq:bits=3,law=truncnorm,bucket_size=512"]
    found = gtrace.run_sweep(trace, codecs, jobs=1, draws=0, tensors=["conv.weight"], refit="each")
    for row in found.rows():
        assert row["optimal_variance"] > 0
        assert row["times_optimal"] >= 1 - 1e-6
        assert math.isclose(row["times_optimal"], row["relative_variance"] / row["optimal_variance"])
        if row["method"] in ("alq", "zipml") and "truncnorm" not in row["codec"]:
            assert row["times_optimal"] < 1.01
        assert math.isnan(row["model_variance"]) == ("truncnorm" not in row["codec"])
    what = {key[2] for key in found.details}
    assert {"convergence", "density l2:8192", "levels alq:bits=3", "levels qsgd:bits=3"} <= what
    curves = found.details["conv.weight", 3, "convergence"]["objective"]
    assert set(curves) == {"uniform", "exponential", "companding"}
    for curve in curves.values():
        assert (np.diff(curve) <= 1e-15).all()


def test_names_that_two_optimizers_share_are_all_swept(tmp_path):
    """A GAN whose halves have layers of the same names, as the trace has them."""
    with gtrace.create_trace(tmp_path / "gan.zarr") as writer:
        for optimizer, names in enumerate((("main.0.weight", "main.2.weight"), ("main.0.weight", "main.4.weight"))):
            for name in names:
                writer.append(0, name, np.full(8, optimizer + 1.0), optimizer=optimizer)
            writer.commit(0, optimizer=optimizer)
    swept = gtrace.run_sweep(tmp_path / "gan.zarr", ["terngrad"], jobs=1)
    energy = dict(zip(swept["tensor"], swept["energy"], strict=True))
    assert energy == {"main.0.weight": 8, "main.2.weight": 8, "opt1/main.0.weight": 32, "main.4.weight": 32}
    assert list(swept.warnings) == []
    alone = gtrace.run_sweep(tmp_path / "gan.zarr", ["terngrad"], tensors=["opt1/*"], jobs=1)
    assert set(alone["tensor"]) == {"opt1/main.0.weight"}


def test_the_whole_model_of_several_optimizers_is_told(tmp_path):
    with gtrace.create_trace(tmp_path / "gan.zarr") as writer:
        for step, optimizer in ((0, 0), (0, 1), (1, 0)):
            writer.append(step, "w", np.full(8, optimizer + 1.0), optimizer=optimizer)
            writer.commit(step, optimizer=optimizer)
    spec = "qsgd:bits=3,scope=model"
    swept = gtrace.run_sweep(tmp_path / "gan.zarr", [spec], jobs=1, draws=0)
    assert dict(zip(swept["step"], swept["energy"], strict=True)) == {0: 40, 1: 8}
    (said,) = swept.warnings
    assert "2 optimizers" in said
    alone = gtrace.run_sweep(tmp_path / "gan.zarr", [spec], tensors=["w"], jobs=1, draws=0)
    assert dict(zip(alone["step"], alone["energy"], strict=True)) == {0: 8, 1: 8}
    assert list(alone.warnings) == []


def test_draws_know_the_shape_that_the_trace_has(tmp_path):
    """A kernel is a matrix of its first dimension; a plan and a resumed sweep know that, too."""
    shapes = {"conv.weight": (16, 8, 3, 3), "fc.weight": (30, 40), "fc.bias": (30,)}
    rng = np.random.default_rng(5)
    made = {name: {step: rng.standard_t(4, shape).astype("f") for step in range(3)} for name, shape in shapes.items()}
    write_arrays(tmp_path / "s.zarr", made)
    c = gtrace.codec("powersgd")
    found = gtrace.run_sweep(tmp_path / "s.zarr", [c], jobs=1)
    gtrace.run_sweep(tmp_path / "s.zarr", [c], steps=[0, 1], jobs=1, output=tmp_path / "s.db")
    resumed = gtrace.run_sweep(tmp_path / "s.zarr", [c], jobs=1, output=tmp_path / "s.db")
    assert sorted(map(str, rows_of(found))) == sorted(map(str, rows_of(resumed)))
    with gtrace.open_trace(tmp_path / "s.zarr") as opened:
        for name, shape in shapes.items():
            state = c.init(math.prod(shape), shape)
            for step in range(3):
                g = opened.read(name, step)
                q = c.decode(c.shared(state), c.encode(state, g, (0, 0)), g.size)
                state = c.update(state, g, q)
                row = pick(found, tensor=name, step=step)
                assert math.isclose(row["squared_error"], np.sum((q - g.astype(np.float64)) ** 2), abs_tol=1e-6)
                columns = math.prod(shape[1:])
                bits = 32 * (2 * (shape[0] + columns) if len(shape) > 1 else shape[0])
                assert math.isclose(row["bits_payload"], bits / math.prod(shape))


def test_no_codec_writes_into_the_gradients_that_a_trace_keeps(tmp_path):
    rng = np.random.default_rng(0)
    given = {step: rng.standard_t(4, 3000).astype(np.float32) for step in range(3)}
    with gtrace.open_trace(write_arrays(tmp_path / "run.zarr", {"w": given})) as trace:
        kept = trace.read("w", 0, copy=False)
        assert np.shares_memory(trace.read("w", 0, copy=False), kept)
        gtrace.run_sweep(trace, ",".join(gtrace.codec_names()), draws=1, jobs=1)
        for step, values in given.items():
            np.testing.assert_array_equal(trace.read("w", step, copy=False), values)


def test_stateful_codecs_are_replayed_in_order(trace):
    spec = "ef:topk:ratio=0.01"
    found = gtrace.run_sweep(trace, [spec], tensors=["conv.weight"], jobs=1)
    c = gtrace.codec(spec)
    state = c.init(3000)
    with gtrace.open_trace(trace) as opened:
        for k in range(4):
            g = opened.read("conv.weight", k)
            payload = c.encode(state, g, Key.derive(0, tensor="conv.weight", step=k, draw=0))
            q = c.decode(c.shared(state), payload, g.size)
            state = c.update(state, g, q)
            row = pick(found, step=k)
            assert math.isclose(row["squared_error"], np.sum((q - g.astype(np.float64)) ** 2), rel_tol=1e-9)
            assert row["note"].startswith("open loop: the trace's gradients do not react to the codec")


def test_memory_starts_afresh_after_a_gap_and_survives_resuming(tmp_path):
    path = write_trace(tmp_path / "gap.zarr", steps=(0, 1, 2, 10, 11))
    spec = "mem-sgd:ratio=0.05"
    whole = gtrace.run_sweep(path, [spec], jobs=1, tensors=["fc.weight"])
    # Windows are made of the steps that are swept.
    kept = [k for k, name in enumerate(whole.columns) if not name.startswith("window")]
    for steps in ([2], [11], [1, 2]):
        part = gtrace.run_sweep(path, [spec], jobs=1, tensors=["fc.weight"], steps=steps)
        found, wanted = ([[r[k] for k in kept] for r in rows_of(result) if r[1] in steps] for result in (part, whole))
        assert found == wanted
    alone = gtrace.run_sweep(path, ["topk:ratio=0.05"], jobs=1, tensors=["fc.weight"])
    first = {r["step"]: r["squared_error"] for r in alone.rows()}
    errors = {r["step"]: r["squared_error"] for r in whole.rows()}
    assert errors[0] == first[0]
    assert errors[10] == first[10], "a gap must clear the memory"
    assert errors[11] != first[11]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"jobs": -2}, "jobs cannot be -2"),
        ({"refit": "nope"}, "refit 'nope' is unknown; choose pooled, previous, each, once"),
        ({"nonfinite": "Skip"}, "nonfinite 'Skip' is unknown; choose skip, zero, error"),
        ({"tensors": ["*"]}, r"calls the whole model '\*'; leave out the tensor of this name: '\[!\*\]\*'"),
    ],
)
def test_options_that_would_measure_nothing_or_something_else(options, says):
    trace = gtrace.trace.Trace.from_arrays({"*": np.ones(5), "w": np.ones(5)})
    with pytest.raises(UsageError, match=says):
        gtrace.run_sweep(trace, "terngrad", **{"tensors": ["[!*]*"]} | options)
    assert set(gtrace.run_sweep(trace, "terngrad", tensors=["[!*]*"])["tensor"]) == {"w"}


def test_a_result_file_that_lacks_a_column_is_kept(tmp_path):
    out = tmp_path / "out.db"
    trace = gtrace.trace.Trace.from_arrays({"w": np.ones(5)})
    gtrace.run_sweep(trace, "terngrad", output=out)
    with contextlib.closing(sqlite3.connect(out)) as sql:
        sql.executescript("DROP VIEW rows; ALTER TABLE cells DROP COLUMN note")
    before = out.read_bytes()
    with pytest.raises(OutputExistsError, match="is not a sweep that this gtrace can add to"):
        gtrace.run_sweep(trace, "terngrad", output=out)
    assert out.read_bytes() == before
