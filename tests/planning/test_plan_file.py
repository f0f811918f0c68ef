"""The file of a plan: it comes back as it was, and nothing else is taken for one."""

import copy
import dataclasses
import json

import pytest
import yaml
from helpers_plan import curves_of_laws

from gtrace.codecs import codec
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.planning import Budget, load_plan, make_plan, save_plan
from gtrace.planning.plan import MAX_BYTES, PlanForecast, to_plain


@pytest.fixture(scope="module")
def plan():
    return make_plan(
        curves_of_laws(steps=4), Budget("bits", 3.0, "--budget 3bits"), name="small", provenance={"trace": "t.zarr"}
    )


@pytest.mark.parametrize("suffix", ["yaml", "json"])
def test_a_plan_comes_back(tmp_path, plan, suffix):
    path = tmp_path / f"small.{suffix}"
    save_plan(plan, path)
    again = load_plan(path)
    assert to_plain(again) == to_plain(plan)
    assert again.table == plan.table
    assert again.table.source == str(path)
    assert str(again.table) == "plan:small"
    first = plan.tensors[0]
    assert again.table.choose(first.tensor, first.elements) == codec(first.codec)
    assert again.table.choose("new.weight", 10) == codec(plan.default)


def test_plans_of_before_predicted_costs_are_read(tmp_path, plan):
    path = tmp_path / "old.yaml"
    plain = {**to_plain(plan), "objective": "squared"}
    assert "horizon" not in plain
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    assert to_plain(load_plan(path)) == to_plain(plan)


def test_a_plan_by_cost_comes_back_and_is_worth_what_it_wins_of_the_batch(tmp_path, plan):
    best = dataclasses.replace(plan.uniform, error=0.5, planned=0.2)
    priced = dataclasses.replace(
        plan, objective="cost", horizon=PlanForecast(400, 64.0, 60.0, 40.0, 62.0), uniform=best
    )
    save_plan(priced, tmp_path / "cost.yaml")
    assert load_plan(tmp_path / "cost.yaml").horizon == priced.horizon
    assert priced.gain == pytest.approx(1.5 / 1.2 - 1)
    # 90% less of a cost that is nothing is not worth a plan.
    assert not dataclasses.replace(priced, uniform=dataclasses.replace(best, error=0.01, planned=0.001)).worth


def test_a_plan_is_not_overwritten_unasked(tmp_path, plan):
    path = tmp_path / "plan.yaml"
    path.write_text("mine")
    with pytest.raises(OutputExistsError, match="already exists"):
        save_plan(plan, path)
    assert path.read_text() == "mine"
    save_plan(plan, path, force=True)
    assert load_plan(path).name == "small"
    with pytest.raises(UsageError, match="does not exist"):
        save_plan(plan, tmp_path / "nowhere" / "plan.yaml")


def broken(change):
    def make(plain):
        change(plain)
        return plain

    return make


def tensor(plain):
    return next(iter(plain["tensors"].values()))


DAMAGE = {
    "not a plan": lambda plain: plain.pop("gtrace_plan"),
    "has version 9": lambda plain: plain.update(gtrace_plan=9),
    "there is no 'extra'": lambda plain: plain.update(extra=1),
    "totals.bits: is missing": lambda plain: plain["totals"].pop("bits"),
    "totals.bits: 'many'": lambda plain: plain["totals"].update(bits="many"),
    "totals.bits: '-1'": lambda plain: plain["totals"].update(bits=-1),
    "totals.elements: '1.5'": lambda plain: plain["totals"].update(elements=1.5),
    "totals.optimal: 'yes'": lambda plain: plain["totals"].update(optimal="yes"),
    "totals: '3'": lambda plain: plain.update(totals=3),
    "name: '7'": lambda plain: plain.update(name=7),
    "provenance: 'x'": lambda plain: plain.update(provenance="x"),
    "frontier: 'x'": lambda plain: plain.update(frontier="x"),
    "tensors: expected": lambda plain: plain.update(tensors={}),
    "expected codec, elements": lambda plain: plain.update(tensors={"fc": "qsgd"}),
    "no codec 'qsgdnf'; did you mean": lambda plain: tensor(plain).update(codec="qsgdnf:bits=3"),
    "default: no codec": lambda plain: plain.update(default="nothing"),
    "runs over the whole model": lambda plain: plain.update(default="qsgdinf:bits=3,scope=model"),
    "error: 'nan'": lambda plain: tensor(plain).update(error=float("nan")),
    "at_frontier has not one number": lambda plain: tensor(plain).update(at_frontier=[1.0]),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_plan_is_refused_in_one_line(tmp_path, plan, message):
    plain = copy.deepcopy(to_plain(plan))
    DAMAGE[message](plain)
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(plain, sort_keys=False))
    with pytest.raises(TraceError, match=message) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "not a text file"),
        (b"gtrace_plan: [1", "not valid YAML"),
        (b"gtrace_plan: !!python/object/apply:os.system [true]", "not valid YAML"),
        (b"- 1\n- 2", "not a plan"),
        (b"[" * 3000 + b"]" * 3000, "not valid YAML|not a plan"),
        (b"", "not a plan"),
    ],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "plan.yaml"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=message):
        load_plan(path)


def test_what_is_too_large_is_not_read(tmp_path):
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(TraceError, match="more than 8 MB"):
        load_plan(path)
    with pytest.raises(TraceError, match="no such plan"):
        load_plan(tmp_path / "missing.yaml")
    (tmp_path / "bad.json").write_text(json.dumps({"gtrace_plan": 1})[:-1])
    with pytest.raises(TraceError, match="not valid JSON"):
        load_plan(tmp_path / "bad.json")


@pytest.mark.parametrize("field", ["name", "totals", "provenance", "gtrace_plan"])
def test_a_few_bytes_that_stand_for_billions_are_refused_at_once(tmp_path, plan, field):
    layers = ", ".join(f"&x{k} [{', '.join([f'*x{k - 1}'] * 9)}]" for k in range(1, 14))
    plain = to_plain(plan)
    del plain[field]
    path = tmp_path / "plan.yaml"
    path.write_text(f"{field}: {{a: [&x0 [1, 1], {layers}]}}\n{yaml.safe_dump(plain, sort_keys=False)}")
    with pytest.raises(TraceError, match=r"has version|belongs|no 'a'|more than 100000 values"):
        load_plan(path)
