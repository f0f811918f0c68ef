"""The file of a plan: it comes back as it was, and nothing else is taken for one."""

import copy
import dataclasses
import time

import pytest
from helpers_plan import curves_of_laws

from gtrace.codecs import codec
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.planning import Budget, load_plan, make_plan, save_plan
from gtrace.planning.plan import PlanForecast, to_plain
from gtrace.planning.toml import MAX_BYTES, dump, load


@pytest.fixture(scope="module")
def plan():
    budget = Budget("bits", 3.0, "--budget 3bits")
    return make_plan(curves_of_laws(steps=4), budget, name="small", provenance={"trace": "t.zarr"})


@pytest.mark.parametrize("suffix", ["toml", "json"])
def test_a_plan_comes_back_and_is_not_overwritten_unasked(tmp_path, plan, suffix):
    path = tmp_path / f"small.{suffix}"
    save_plan(plan, path)
    again = load_plan(path)
    assert to_plain(again) == to_plain(plan)
    assert again.table == plan.table
    assert (str(again.table), again.table.source) == ("plan:small", str(path))
    first = plan.tensors[0]
    assert again.table.choose(first.tensor, first.elements) == codec(first.codec)
    assert again.table.choose("new.weight", 10) == codec(plan.default)
    path.write_text("mine")
    with pytest.raises(OutputExistsError, match="already exists"):
        save_plan(plan, path)
    assert path.read_text() == "mine"
    save_plan(plan, path, force=True)
    assert load_plan(path).name == "small"
    with pytest.raises(UsageError, match="does not exist"):
        save_plan(plan, tmp_path / "nowhere" / path.name)


def test_a_plan_by_cost_comes_back_and_is_worth_what_it_wins_of_the_batch(tmp_path, plan):
    best = dataclasses.replace(plan.uniform, error=0.5, planned=0.2)
    forecast = PlanForecast(400, 64.0, 60.0, 40.0, 62.0)
    priced = dataclasses.replace(plan, objective="cost", horizon=forecast, uniform=best)
    save_plan(priced, tmp_path / "cost.toml")
    assert load_plan(tmp_path / "cost.toml").horizon == priced.horizon
    assert priced.gain == pytest.approx(1.5 / 1.2 - 1)
    # 90% less of a cost that is nothing is not worth a plan.
    assert not dataclasses.replace(priced, uniform=dataclasses.replace(best, error=0.01, planned=0.001)).worth


def tensor(plain):
    return next(iter(plain["tensors"].values()))


DAMAGE = {
    "not a plan": lambda plain: plain.pop("gtrace_plan"),
    "has version 9": lambda plain: plain.update(gtrace_plan=9),
    "there is no 'extra'": lambda plain: plain.update(extra=1),
    "totals.bits: is missing": lambda plain: plain["totals"].pop("bits"),
    "totals.bits: 'many'": lambda plain: plain["totals"].update(bits="many"),
    "totals.optimal: 'yes'": lambda plain: plain["totals"].update(optimal="yes"),
    "expected codec, elements": lambda plain: plain.update(tensors={"fc": "qsgd"}),
    "no codec 'qsgdnf'; did you mean": lambda plain: tensor(plain).update(codec="qsgdnf:bits=3"),
    "runs over the whole model": lambda plain: plain.update(default="qsgdinf:bits=3,scope=model"),
    "error: 'nan'": lambda plain: tensor(plain).update(error=float("nan")),
    "at_frontier has not one number": lambda plain: tensor(plain).update(at_frontier=[1.0]),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_a_damaged_plan_is_refused_in_one_line(tmp_path, plan, message):
    plain = copy.deepcopy(to_plain(plan))
    DAMAGE[message](plain)
    path = tmp_path / "plan.toml"
    path.write_text(dump(plain))
    with pytest.raises(TraceError, match=message) as caught:
        load_plan(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("toml", b"\xff\xfe\x00", "not a text file"),
        ("toml", b"gtrace_plan = [1", "not valid TOML"),
        ("toml", b"[" * 3000 + b"]" * 3000, "not valid TOML"),
        ("toml", b"", "not a plan"),
        ("toml", None, "no such file"),
        ("json", b'{"gtrace_plan": 1', "not valid JSON"),
        ("json", b"\0" * (MAX_BYTES + 1), "more than 8 MB"),
        # What would take for ever, or cannot be shown.
        ("toml", b"a." * 4_000_000 + b"a = 1", "more than 32 parts"),
        ("toml", b"a = " + b"[" * 100_000, "nested too deep"),
        ("json", b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deep"),
        ("toml", b"a = 0x1" + b"0" * 1_000_000, "more than 64 bits"),
        ("json", b'{"a": 1' + b"0" * 30 + b"}", "more than 64 bits"),
        ("toml", b"a = 1" + b"0" * 1_000_000, "Exceeds the limit"),
        ("json", b'{"a": "\\ud800"}', "surrogates not allowed"),
        ("toml", b'a = {b = """\n""", c = ""}', "over several lines"),
    ],
)
def test_other_files_are_refused_at_once(tmp_path, suffix, content, message):
    path = tmp_path / f"plan.{suffix}"
    if content is not None:
        path.write_bytes(content)
    began = time.process_time()
    with pytest.raises(TraceError, match=message) as caught:
        load_plan(path)
    assert time.process_time() - began < 2
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "value",
    [
        {},
        {"a": [], "b": {}, "c": [[1, 2], [0.1, -3e300]], "d": True, "e": ""},
        {"t": {"x.y": {"a": 1}, "'\"\\\n\x7f\x85\u202e\U0001f600": {"b": [1]}}, "f": 1.0, "n": 1e-7},
        {"rows": [{"a": 1, "in": {"6": {"b": {"c": 1}}, "8": {"b": {}}}}, {"a": 2}], "list": [{"a": 1}, {"b": "x"}]},
    ],
)
def test_what_is_written_is_read(tmp_path, value):
    path = tmp_path / "a.toml"
    path.write_text(dump(value))
    assert load(path, "it", "write it") == value
    assert all(line.isprintable() for line in dump(value).splitlines())
