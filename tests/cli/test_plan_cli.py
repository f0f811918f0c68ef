"""``gtrace plan``, its file in training, sweeps and reports, and what a newcomer gets wrong."""

import json
import re

import numpy as np
import pytest
from helpers_plan import LAYERS, trace_of_laws

import gtrace
from gtrace.planning import load_plan
from gtrace.report import figure_names, load_report
from gtrace.report.analysis.sweep import analyze
from gtrace.runlog import read_runlog
from gtrace.sweep import ResultStore
from gtrace.trace import OptimizerFacts

FAST = "--bucket-size 512 --methods qsgdinf --per-bit 2 --bits 2-6"


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return trace_of_laws(tmp_path_factory.mktemp("traces") / "laws.zarr", steps=3)


@pytest.fixture
def plan(succeed, trace):
    """Run ``gtrace plan`` with these words into a file of the folder, and read that."""

    def made(path, words, of=trace):
        succeed(f"plan -o {path} {FAST} {words}", of)
        return load_plan(path)

    return made


def test_what_a_plan_expects_is_what_a_sweep_of_it_measures(plan, trace, succeed, folder):
    found = plan("plan.toml", "--max-bits 3")
    succeed("sweep --plan plan.toml -o p.sweep.db", trace)
    rows = ResultStore.load(folder / "p.sweep.db")
    assert set(rows["codec"]) == {"plan:plan"}
    expected, drawn = rows["draw"] == -1, rows["draw"] == 0
    error = rows["squared_error"][expected].sum() / rows["energy"][expected].sum()
    bits = (rows["bits_total"] * rows["n"])[expected].sum() / (3 * sum(size for size, _ in LAYERS.values()))
    assert error == pytest.approx(found.totals.error, rel=1e-5)
    assert bits == pytest.approx(found.totals.bits, rel=1e-5)
    assert rows["squared_error"][drawn].sum() == pytest.approx(rows["squared_error"][expected].sum(), rel=0.1)


def test_a_sweep_gives_the_plan_that_its_trace_gives(plan, trace, succeed):
    direct = plan("a.toml", "--max-bits 3bits --per-bit 1")
    codecs = [f"qsgdinf:bits={bits},bucket_size=512" for bits in range(2, 7)]
    gtrace.run_sweep(trace, codecs, draws=0, output="s.sweep.db")
    succeed("plan s.sweep.db --max-bits 3bits -o b.toml")
    again = load_plan("b.toml")
    assert {row.tensor: row.codec for row in again.tensors} == {row.tensor: row.codec for row in direct.tensors}
    assert again.totals.error == pytest.approx(direct.totals.error)


def test_names_of_tensors_are_no_patterns(plan, tmp_path):
    layers = {f"layers[{k}].w*": layer for k, layer in enumerate(LAYERS.values())}
    found = plan("odd.toml", "--max-bits 2.2", of=trace_of_laws(tmp_path / "odd.zarr", steps=2, layers=layers))
    assert [row.tensor for row in found.tensors] == list(layers)
    assert any("steps=" in row.codec and "bucket_size=512" not in row.codec for row in found.tensors), "no finer grids"
    gtrace.run_sweep(tmp_path / "odd.zarr", ["qsgdinf:bits=3,bucket_size=512"], output="odd.results.db")
    words = "--force --max-bits 4 --weight layers[3].w*=7 --tensors layers[1].w*,layers[3]"
    for of in (tmp_path / "odd.zarr", "odd.results.db"):
        with pytest.raises(AssertionError, match=r"no tensor matches 'layers\[3\]'"):
            plan("named.toml", words, of=of)
        named = plan("named.toml", f"{words}.w*", of=of)
        assert [row.tensor for row in named.tensors] == ["layers[1].w*", "layers[3].w*"]


def test_a_codec_without_buckets_can_be_planned_alone(succeed, trace):
    succeed("plan -o natural.toml --max-bits 6 --methods natural", trace)
    assert load_plan("natural.toml").default == "natural"


def test_show_diff_json_and_report(plan, succeed, folder):
    plan("a.toml", "--max-bits 2.5bits")
    plan("b.json", "--ratio 7")
    shown, _ = succeed("plan show a.toml --full")
    for word in ("bits per value", "Exchange rate", "conv.weight", "Stability: ", "above the least error"):
        assert word in shown
    assert json.loads(succeed("plan show b.json --json")[0])["budget"] == "--ratio 7"
    said = json.loads(succeed("plan diff a.toml b.json --json")[0])
    assert said["same"] + len(said["changed"]) == len(LAYERS)
    assert "0 tensors differ, 4 are the same" in succeed("plan diff a.toml a.toml")[0]
    said, _ = succeed("report a.toml -o plan.html")
    assert said.startswith("Error drops ")
    assert said.count("\n") <= 25
    assert "Plans against single codecs" in (folder / "plan.html").read_text()
    assert figure_names(load_report([folder / "a.toml"])) == ["plan-frontier", "plan-bits", "plan-budgets"]
    assert json.loads(succeed("report a.toml --json")[0])["plans"][0]["name"] == "a"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    return sweep_under(OptimizerFacts(kind="SGD", momentum=0.5, planned_steps=300), tmp_path_factory.mktemp("costs"))


def sweep_under(facts, folder):
    """Of a trace with two directions of gradient noise in each tensor, and what its optimizer does."""
    rng = np.random.default_rng(0)
    layers = {"steep.weight": (600, 3.0), "other.weight": (2000, 0.3)}
    noise = {name: rng.standard_normal((2, size)) for name, (size, _) in layers.items()}
    attrs = {"batch_size": 64, "optimizers": {"0": facts.describe()}}
    with gtrace.create_trace(folder / "t.zarr", attrs=attrs) as writer:
        for step in (*range(6), *range(100, 106)):
            along = rng.standard_normal(2)
            for name, (size, scale) in layers.items():
                own = 0.1 * rng.standard_normal(size) + along @ noise[name] * scale
                writer.append(step, name, (1 + own).astype(np.float32))
            writer.commit(step, lr=0.01)
    codecs = [f"qsgdinf:bits={bits},bucket_size=128" for bits in range(2, 6)]
    gtrace.run_sweep(folder / "t.zarr", [*codecs, "signsgd"], draws=0, output=folder / "t.sweep.db")
    return folder / "t.sweep.db"


def test_a_plan_from_a_sweep_minimizes_predicted_cost(sweep, succeed, refuse, monkeypatch):
    # What runs tests in parallel sets it to less, and sentences wrap.
    monkeypatch.setenv("COLUMNS", "200")
    out, err = succeed("plan --max-bits 2.2 -o cost.toml", sweep)
    assert (out + err).count("\n") <= 25
    found = load_plan("cost.toml")
    assert (found.objective, found.horizon.steps, found.horizon.batch) == ("cost", 300, 64)
    assert found.horizon.equivalent == pytest.approx(64 / (1 + found.totals.error), rel=1e-4)
    assert found.horizon.low <= found.horizon.equivalent <= found.horizon.high
    assert "signsgd, whose cost is not known (its error is a bias that takes " in err
    assert f"over 300 steps, {found.uniform.codec} for all costs as if the batch were" in out
    succeed("plan --max-bits 2.2 --horizon 5 -o short.toml", sweep)
    assert load_plan("short.toml").horizon.steps == 5
    succeed("plan --max-bits 2.2 --objective error -o error.toml", sweep)
    assert load_plan("error.toml").horizon is None
    assert "These numbers don't compare" in succeed("plan diff cost.toml error.toml")[0]
    said = refuse("plan --max-bits 20 --objective cost --methods signsgd", sweep)
    assert "not known: signsgd: its error is a bias that takes " in said


def test_a_plan_under_adam_says_what_its_batch_leaves_out(tmp_path, succeed, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    sweep = sweep_under(OptimizerFacts(kind="Adam", planned_steps=300), tmp_path)
    out, _ = succeed("plan --max-bits 1.9 -o few.toml", sweep)
    assert re.search(r"its noise costs as if the batch were .* and shortens Adam's steps by about ", out), out
    single = load_plan("few.toml").uniform.codec
    assert "shortens" not in succeed("plan --max-bits 4 -o many.toml", sweep)[0]
    succeed(f"plan --max-bits 1.9 --uniform --methods {single} -o one.toml", sweep)
    judged = analyze(ResultStore.load(sweep)).safety.judged[single]
    assert load_plan("one.toml").horizon.shorter == pytest.approx(judged.prediction.shorter, rel=1e-4)


def test_without_costs_error_is_minimized_and_said(plan, trace, succeed, refuse):
    _, err = succeed(f"plan {FAST} --max-bits 3 -o plan.toml", trace)
    assert "minimizes error, because predicted costs are not known: a sweep measures them" in err
    assert load_plan("plan.toml").objective == "error"
    assert "gtrace sweep" in refuse(f"plan {FAST} --max-bits 3 --objective cost -o other.toml", trace)


def test_a_step_takes_no_longer_than_it_may(plan):
    found = plan("a.toml", "--step-time 3ms --cluster 4x100Mbit/s")
    # Three others' payloads pass each rank's link.
    taken = 3 * found.totals.bits * found.totals.elements / 1e8
    assert taken == pytest.approx(found.provenance["step_seconds"], rel=5e-6)
    assert 0.9e-3 * 3 < taken <= 3e-3
    hidden = plan("b.toml", "--step-time 40ms --cluster 4x100Mbit/s,37ms")
    assert hidden.provenance["step_seconds"] <= 40e-3
    assert hidden.totals.bits >= found.totals.bits * 0.99


@pytest.mark.usefixtures("script")
def test_capture_plan_train_report_in_four_commands(succeed, folder):
    succeed("capture --steps 0-3 train.py")
    succeed(f"plan train.zarr --max-bits 4bits {FAST} -o plan.toml")
    succeed("train --plan plan.toml -o run.jsonl train.py")
    succeed("report plan.toml run.jsonl -o report.html")
    found, (study, *records) = load_plan("plan.toml"), read_runlog(folder / "run.jsonl")
    assert study["runs"] == ["plan:plan"]
    assert study["plans"][0]["tensors"] == {row.tensor: row.codec for row in found.tensors}
    steps = [record for record in records if record["type"] == "step"]
    assert len(steps) == 4
    sent = 32 * sum(step["bits"] for step in steps) / sum(step["bits_float32"] for step in steps)
    assert sent == pytest.approx(found.totals.bits, rel=0.15)
    page = (folder / "report.html").read_text()
    assert "plan:plan" in page
    assert "Codec of every tensor" in page
