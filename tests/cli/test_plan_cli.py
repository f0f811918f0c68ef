"""``gtrace plan``, its file in training, sweeps and reports, and what a newcomer gets wrong."""

import json

import numpy as np
import pytest
from click.testing import CliRunner
from helpers_capture import write_script
from helpers_plan import LAYERS, trace_of_laws

import gtrace
from gtrace.cli import gtrace as command_line
from gtrace.errors import GtraceError
from gtrace.planning import load_plan
from gtrace.report import figure_names, load_report
from gtrace.sweep import ResultStore
from gtrace.trace import OptimizerFacts

FAST = ("--bucket-size", "512", "--methods", "qsgdinf", "--per-bit", "2", "--bits", "2-6")
SCRIPT = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    x = torch.randn(16, 20)
    loss = torch.nn.functional.cross_entropy(model(x), torch.randint(4, (16,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    return trace_of_laws(tmp_path_factory.mktemp("traces") / "laws.zarr", steps=3)


def run(*words):
    result = CliRunner().invoke(command_line, list(map(str, words)))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def plan(trace, path, *words):
    run("plan", trace, *FAST, "-o", path, *words)
    return load_plan(path)


@pytest.mark.parametrize("methods", ["eden", "qsgdinf,eden"])
def test_a_rotation_is_an_option_of_which_nothing_is_encoded(trace, tmp_path, methods):
    path = tmp_path / "plan.toml"
    found = plan(trace, path, "--methods", methods, "--max-bits", "3")
    rotated = [row for row in found.tensors if row.codec.startswith("eden")]
    assert rotated
    assert found.totals.bits <= 3
    assert found.totals.error <= next(one.error for one in found.uniforms if one.codec == "eden:bits=2")
    result = gtrace.run_sweep(trace, [rotated[0].codec], tensors=[rotated[0].tensor], draws=2)
    assert np.mean(result["bits_total"]) == pytest.approx(rotated[0].bits, rel=0.02)
    assert f"A rotation pays on {len(rotated)} of {len(found.tensors)} tensors, with " in run(
        "plan", "show", path, "--full"
    )


def test_layers_of_very_different_scale_come_within_a_percent_of_the_bound(tmp_path):
    layers = {f"layer{k}": (512 + 400 * k, 10.0 ** (k % 5 - 2)) for k in range(12)}
    trace = trace_of_laws(tmp_path / "many.zarr", steps=1, layers=layers)
    for bits in (2.5, 4):
        options = ("--bits", "2-8", "--methods", "qsgdinf", "--max-bits", f"{bits}bits")
        run("plan", trace, *options, "-o", tmp_path / f"{bits}.toml")
        found = load_plan(tmp_path / f"{bits}.toml")
        assert found.totals.gap < 0.01
        assert found.totals.bits <= bits
        assert all(found.totals.error <= one.error for one in found.uniforms if one.bits <= bits)


def test_what_a_plan_expects_is_what_a_sweep_of_it_measures(trace, tmp_path):
    found = plan(trace, tmp_path / "plan.toml", "--max-bits", "3")
    run("sweep", trace, "--plan", tmp_path / "plan.toml", "-o", tmp_path / "p.sweep.db")
    rows = ResultStore.load(tmp_path / "p.sweep.db")
    assert set(rows["codec"]) == {"plan:plan"}
    expected, drawn = rows["draw"] == -1, rows["draw"] == 0
    elements = sum(size for size, _ in LAYERS.values())
    error = rows["squared_error"][expected].sum() / rows["energy"][expected].sum()
    bits = (rows["bits_total"] * rows["n"])[expected].sum() / (3 * elements)
    assert error == pytest.approx(found.totals.error, rel=1e-5)
    assert bits == pytest.approx(found.totals.bits, rel=1e-5)
    assert rows["squared_error"][drawn].sum() == pytest.approx(rows["squared_error"][expected].sum(), rel=0.1)


def test_a_sweep_gives_the_plan_that_its_trace_gives(trace, tmp_path):
    direct = plan(trace, tmp_path / "a.toml", "--max-bits", "3bits", "--per-bit", "1")
    codecs = [f"qsgdinf:bits={bits},bucket_size=512" for bits in range(2, 7)]
    gtrace.run_sweep(trace, codecs, draws=0, output=tmp_path / "s.sweep.db")
    run("plan", tmp_path / "s.sweep.db", "--max-bits", "3bits", "-o", tmp_path / "b.toml")
    again = load_plan(tmp_path / "b.toml")
    assert {row.tensor: row.codec for row in again.tensors} == {row.tensor: row.codec for row in direct.tensors}
    assert again.totals.error == pytest.approx(direct.totals.error)


def test_float_formats_and_sparsities_are_chosen_tensor_by_tensor(trace, tmp_path):
    formats = ("--methods", "fp:e2m1", "--formats", "e3m2,e2m3,e4m3", "--max-bits", "7bits")
    run("plan", trace, *formats, "-o", tmp_path / "fp.toml")
    assert {row.codec.partition(":")[0] for row in load_plan(tmp_path / "fp.toml").tensors} <= {"fp", "none"}
    sparse = ("--methods", "prune", "--sparsity", "0.5-0.9:0.1", "--max-bits", "8bits")
    run("plan", trace, *sparse, "-o", tmp_path / "prune.toml")
    assert any(row.codec.startswith("prune") for row in load_plan(tmp_path / "prune.toml").tensors)


def test_show_diff_and_json(trace, tmp_path):
    plan(trace, tmp_path / "a.toml", "--max-bits", "2.5bits")
    plan(trace, tmp_path / "b.json", "--ratio", "7")
    shown = run("plan", "show", tmp_path / "a.toml", "--full")
    for word in ("bits per value", "Exchange rate", "conv.weight", "Stability: ", "above the least error"):
        assert word in shown
    assert json.loads(run("plan", "show", tmp_path / "b.json", "--json"))["budget"] == "--ratio 7"
    assert "tensors differ" in run("plan", "diff", tmp_path / "a.toml", tmp_path / "b.json")
    told = json.loads(run("plan", "diff", tmp_path / "a.toml", tmp_path / "b.json", "--json"))
    assert told["same"] + len(told["changed"]) == len(LAYERS)
    assert "0 tensors differ, 4 are the same" in run("plan", "diff", tmp_path / "a.toml", tmp_path / "a.toml")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Of a trace with two directions of gradient noise in each tensor, and what its optimizer does."""
    folder = tmp_path_factory.mktemp("costs")
    rng = np.random.default_rng(0)
    facts = OptimizerFacts(kind="SGD", momentum=0.5, planned_steps=300)
    layers = {"steep.weight": 600, "other.weight": 2000}
    noise = {name: rng.standard_normal((2, size)) for name, size in layers.items()}
    attrs = {"batch_size": 64, "optimizers": {"0": facts.describe()}}
    with gtrace.create_trace(folder / "t.zarr", attrs=attrs) as writer:
        for step in (*range(6), *range(100, 106)):
            along = rng.standard_normal(2)
            for name, size in layers.items():
                own = 0.1 * rng.standard_normal(size) + along @ noise[name] * (3.0 if name[0] == "s" else 0.3)
                writer.append(step, name, (1 + own).astype(np.float32))
            writer.commit(step, lr=0.01)
    codecs = [f"qsgdinf:bits={bits},bucket_size=128" for bits in range(2, 6)]
    gtrace.run_sweep(folder / "t.zarr", [*codecs, "signsgd"], draws=0, output=folder / "t.sweep.db")
    return folder / "t.sweep.db"


def test_a_plan_from_a_sweep_minimizes_predicted_cost(sweep, tmp_path, monkeypatch):
    # What runs tests in parallel sets it to less, and sentences wrap.
    monkeypatch.setenv("COLUMNS", "200")
    said = run("plan", sweep, "--max-bits", "2.2", "-o", tmp_path / "cost.toml")
    assert said.count("\n") <= 25
    found = load_plan(tmp_path / "cost.toml")
    assert (found.objective, found.horizon.steps, found.horizon.batch) == ("cost", 300, 64)
    assert found.horizon.equivalent == pytest.approx(64 / (1 + found.totals.error), rel=1e-4)
    assert found.horizon.low <= found.horizon.equivalent <= found.horizon.high
    assert "signsgd, whose cost is not known (it is biased)" in said
    assert f"over 300 steps, {found.uniform.codec} for all costs as if the batch were" in said
    shown = run("plan", "show", tmp_path / "cost.toml")
    assert f"as if the batch were {found.horizon.equivalent:.0f} of 64" in shown
    run("plan", sweep, "--max-bits", "2.2", "--horizon", "5", "-o", tmp_path / "short.toml")
    assert load_plan(tmp_path / "short.toml").horizon.steps == 5
    error = run("plan", sweep, "--max-bits", "2.2", "--objective", "error", "-o", tmp_path / "error.toml")
    assert "of gradient energy" in error
    assert load_plan(tmp_path / "error.toml").horizon is None
    apart = run("plan", "diff", tmp_path / "cost.toml", tmp_path / "error.toml")
    assert "minimizes cost over 300 steps" in apart
    assert "These numbers don't compare" in apart
    told = json.loads(run("plan", "diff", tmp_path / "cost.toml", tmp_path / "short.toml", "--json"))
    assert [told[side]["objective"] for side in "ab"] == ["cost over 300 steps", "cost over 5 steps"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-bits", "3", "--objective", "cost", "--weight", "steep*=2"), "--objective cost: is for predicted cost"),
        (("--max-error", "0.1", "--horizon", "9"), "--horizon: is for predicted cost, and --max-error is for error"),
        (("--max-bits", "20", "--objective", "cost", "--methods", "signsgd"), "not known: signsgd: it is biased"),
    ],
)
def test_what_is_about_error_has_no_predicted_cost(sweep, tmp_path, words, message):
    with pytest.raises(GtraceError, match=message) as caught:
        run("plan", sweep, *words, "-o", tmp_path / "plan.toml")
    assert "\n" not in str(caught.value)


def test_without_costs_error_is_minimized_and_said(trace, tmp_path):
    said = run("plan", trace, *FAST, "--max-bits", "3", "-o", tmp_path / "plan.toml")
    assert "minimizes error, because predicted costs are not known: a sweep measures them" in said
    assert load_plan(tmp_path / "plan.toml").objective == "error"
    with pytest.raises(GtraceError, match="gtrace sweep"):
        run("plan", trace, *FAST, "--max-bits", "3", "--objective", "cost", "-o", tmp_path / "other.toml")


def test_weights_groups_and_a_bound_on_the_error(trace, tmp_path):
    plain = plan(trace, tmp_path / "a.toml", "--max-bits", "3bits")
    (tmp_path / "weights.toml").write_text("fc.weight = 1.0e+12\n")
    heavy = plan(trace, tmp_path / "b.toml", "--max-bits", "3bits", "--weight", tmp_path / "weights.toml")
    bits = [{row.tensor: row.bits for row in one.tensors}["fc.weight"] for one in (plain, heavy)]
    assert bits[1] > bits[0]
    grouped = plan(trace, tmp_path / "c.toml", "--max-bits", "3bits", "--group", "g=*.weight")
    assert len({row.codec for row in grouped.tensors if row.group == "g"}) == 1
    assert plan(trace, tmp_path / "d.toml", "--max-error", "0.05").totals.error <= 0.05


def test_a_step_takes_no_longer_than_it_may(trace, tmp_path):
    links = "4x100Mbit/s"
    found = plan(trace, tmp_path / "a.toml", "--step-time", "3ms", "--cluster", links)
    # Three others' payloads pass each rank's link.
    taken = 3 * found.totals.bits * found.totals.elements / 1e8
    assert taken == pytest.approx(found.provenance["step_seconds"], rel=5e-6)
    assert 0.9e-3 * 3 < taken <= 3e-3
    hidden = plan(trace, tmp_path / "b.toml", "--step-time", "40ms", "--cluster", f"{links},37ms")
    assert hidden.provenance["step_seconds"] <= 40e-3
    assert hidden.totals.bits >= found.totals.bits * 0.99


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-bits", "3%"), "--max-bits: '3%' has an unknown unit; write e.g. 3bits."),
        (("--max-bits", "0"), "--max-bits: '0' must be more than 0."),
        (("--ratio", "-2"), "more than 0"),
        (("--step-time", "5ms"), "needs the machines, e.g. --cluster 8x25Gbit/s,2.5ms."),
        (("--step-time", "1us", "--cluster", "4x1Gbit/s,latency=1ms"), "without any bits"),
        (("--step-time", "1ms", "--cluster", "4x1Gbit/s,2ms"), "computing alone takes 0.002 s"),
        (("--max-bits", "3bits", "--cluster", "4x1Gbit/s"), "is for --step-time"),
        (("--max-bits", "0.1bits"), "take at least"),
        (("--max-bits", "3bits", "--methods", "mcgq"), "no closed form"),
        (("--max-bits", "3bits", "--weight", "nothing*=2"), "no tensor matches"),
        (("--max-bits", "3bits", "--weight", "fc*=-2"), "positive number"),
        (("--max-bits", "3bits", "--weight", "missing.toml"), "GLOB=NUMBER"),
        (("--max-bits", "3bits", "--group", "g=nothing*"), "no tensor matches"),
        (("--max-bits", "3bits", "--tensors", "nothing*"), "no tensor matches"),
        (("--max-bits", "3bits", "--steps", "99"), "none of these steps"),
        (("--max-bits", "3bits", "-o", "plan.txt"), ".toml or .json"),
    ],
)
def test_mistakes_are_told_in_one_line(trace, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GtraceError, match=message) as caught:
        run("plan", trace, *words)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_report_has_a_section_on_a_plan(trace, tmp_path):
    plan(trace, tmp_path / "plan.toml", "--max-bits", "3bits")
    said = run("report", tmp_path / "plan.toml", "-o", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    for title in ("Codec of every tensor", "Plans against single codecs", "What changes between budgets"):
        assert title in page
    assert said.startswith("Error drops ")
    assert said.count("\n") <= 25
    assert figure_names(load_report([tmp_path / "plan.toml"])) == ["plan-frontier", "plan-bits", "plan-budgets"]
    assert json.loads(run("report", tmp_path / "plan.toml", "--json"))["plans"][0]["name"] == "plan"


def test_capture_plan_train_report_in_four_commands(call, tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    for words in (
        ("capture", "--steps", "0-3", "train.py"),
        ("plan", "train.zarr", "--max-bits", "4bits", *FAST, "-o", "plan.toml"),
        ("train", "--plan", "plan.toml", "-o", "run.jsonl", "train.py"),
        ("report", "plan.toml", "run.jsonl", "-o", "report.html"),
    ):
        done = call(*words)
        assert done.returncode == 0, done.stderr
    found = load_plan(tmp_path / "plan.toml")
    records = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert records[0]["runs"] == ["plan:plan"]
    assert records[0]["plans"][0]["tensors"] == {row.tensor: row.codec for row in found.tensors}
    steps = [record for record in records if record["type"] == "step"]
    assert len(steps) == 4
    sent = 32 * sum(step["bits"] for step in steps) / sum(step["bits_float32"] for step in steps)
    assert sent == pytest.approx(found.totals.bits, rel=0.15)
    page = (tmp_path / "report.html").read_text()
    assert "plan:plan" in page
    assert "Codec of every tensor" in page
