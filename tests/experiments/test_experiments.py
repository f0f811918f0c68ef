"""Experiments of papers: the framework with a made-up one, and every real one as a smoke test."""

import json

import pytest

from gtrace.cli import main
from gtrace.errors import UsageError
from gtrace.report.section import Chart, Curve, Panel
from gtrace_experiments import reproduce
from gtrace_experiments.reproduce.experiment import Check, Context, Experiment, Outcome, Result, Table
from gtrace_experiments.reproduce.page import write_page
from gtrace_experiments.reproduce.runner import kept_result, read_result, run_experiment, source_digest, write_result

CALLS = []
CURVES = (Curve("a <b>", (1.0, 2.0), (3.0, float("nan")), (2.0, 2.0), (4.0, 4.0), method="alq"),)
BARS = (Curve("a <b>", ("x", "y"), (1.0, 2.0), method="alq"), Curve("c", ("y",), (2.0,), (1.5,), (2.5,)))
CHART = Chart((Panel(CURVES, "lines", log_y=True, lines=(("float", 2.5),)), Panel(BARS, bars=True)), "See here.")
CHECKS = (
    Check("one is less than two", "1 < 2", "1 and 2", holds=True),
    Check("two is less than one", "2 < 1 | never", "2 and 1", holds=False),
)
TABLE = Table("numbers", ("name", "value", "missing"), (("<i>", 1.23456, None), ("b", 7, float("nan"))))


def measure(context):
    CALLS.append(context)
    return Outcome(checks=CHECKS, tables=(TABLE,), charts=(CHART,), data="none")


MADE_UP = Experiment("zipml-fig8", "a test", "Nobody", "Table 0", "None.", "Nothing is done.", measure)


@pytest.mark.parametrize(
    ("checks", "verdict"), [(CHECKS[:1], "reproduced"), (CHECKS, "partly"), (CHECKS[1:], "not reproduced")]
)
def test_a_verdict_needs_every_criterion_for_reproduced_and_one_for_partly(checks, verdict):
    assert Outcome(checks, tables=(), charts=(), data="").verdict == verdict


def test_a_result_survives_its_file(tmp_path):
    result = run_experiment(MADE_UP, Context(seed=3))
    write_result(tmp_path / "zipml-fig8.json", result)
    found = read_result(tmp_path / "zipml-fig8.json")
    assert found.to_json() == result.to_json()
    assert found.outcome.charts[0].panels[0].curves[0].y[1] != 3.0  # NaN came back as a number
    assert found.outcome.verdict == "partly"
    assert [path.name for path in tmp_path.iterdir()] == ["zipml-fig8.json"]


@pytest.mark.parametrize("change", [{"seed": 1}, {"quick": True}, {}])
def test_only_a_result_of_the_same_recipe_seed_and_length_is_kept(tmp_path, change, monkeypatch):
    write_result(tmp_path / "r.json", run_experiment(MADE_UP, Context()))
    assert kept_result(tmp_path / "r.json", MADE_UP, Context()) is not None
    assert kept_result(tmp_path / "missing.json", MADE_UP, Context()) is None
    if not change:
        monkeypatch.setattr("gtrace_experiments.reproduce.runner.source_digest", lambda _: "another")
    assert kept_result(tmp_path / "r.json", MADE_UP, Context(**change)) is None


def test_a_page_in_html_escapes_what_it_shows(tmp_path):
    shown = (MADE_UP, run_experiment(MADE_UP, Context()))
    for name, count in (("one.html", 1), ("two.html", 2)):
        write_page(tmp_path / name, [shown] * count, tmp_path)
        text = (tmp_path / name).read_text()
        assert "&lt;i&gt;" in text
        assert "<i>" not in text
        assert "a &lt;b&gt;" in text  # in the figure's legend
        assert ("that a laptop finishes" in text) == (count == 2)


def test_names_patterns_and_all(monkeypatch):
    monkeypatch.setattr(reproduce, "_NAMES", ("b-1", "a-1", "b-2"))
    assert reproduce.choose_experiments(["b-2", "b-1"]) == ["b-1", "b-2"]
    assert reproduce.choose_experiments(["a-*", "all"]) == ["b-1", "a-1", "b-2"]
    with pytest.raises(UsageError, match="no experiment 'b-3'; did you mean b-"):
        reproduce.choose_experiments(["b-3"])


@pytest.fixture
def made_up(monkeypatch, tmp_path):
    monkeypatch.setattr(reproduce, "_NAMES", ("zipml-fig8",))
    monkeypatch.setattr(reproduce, "load_experiment", lambda _: MADE_UP)
    monkeypatch.chdir(tmp_path)
    CALLS.clear()
    return tmp_path


@pytest.fixture
def run(capsys):
    """Run ``gtrace reproduce`` with a line of words: exit code, and what it prints."""

    def ended(line=""):
        with pytest.raises(SystemExit) as end:
            main(["reproduce", *line.split()])
        return end.value.code, "".join(capsys.readouterr())

    return ended


def test_the_command_keeps_what_is_finished(made_up, run):
    line = "zipml-fig8 -o out --quick --seed 5"
    code, said = run(line)
    assert code == 0
    assert f"zipml-fig8: partly (1 of 2 criteria)\npage: {made_up}/out/zipml-fig8.html\n" in said
    assert [(call.seed, call.quick) for call in CALLS] == [(5, True)]
    before = (made_up / "out" / "zipml-fig8.html").read_bytes()
    assert run(line)[0] == 0
    assert len(CALLS) == 1
    assert (made_up / "out" / "zipml-fig8.html").read_bytes() == before
    assert run(f"{line} --force")[0] == 0
    assert len(CALLS) == 2
    found = json.loads(run("all -o out --json")[1])
    assert [result["verdict"] for result in found["results"]] == ["partly"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("nothing", 2, "no experiment 'nothing'"),
        ("all --page x.pdf", 2, "ends in neither .html nor .md"),
        ("all -o file", 4, "file: is a file and was left untouched"),
        ("all --page folder.md", 4, "folder.md: is a folder and was left untouched"),
    ],
)
def test_refusals_come_before_any_work(made_up, run, line, code, said):
    (made_up / "file").write_text("mine")
    (made_up / "folder.md").mkdir()
    ended, printed = run(line)
    assert ended == code
    assert said in printed
    assert not CALLS
    assert sorted(path.name for path in made_up.iterdir()) == ["file", "folder.md"]


@pytest.mark.parametrize("name", reproduce.experiment_names())
def test_every_experiment_runs_quickly_and_can_be_stored_and_drawn(name, tmp_path):
    experiment = reproduce.load_experiment(name)
    assert experiment.name == name
    result = run_experiment(experiment, Context(quick=True))
    assert result.outcome.checks
    assert result.outcome.charts
    assert Result.from_json(json.loads(json.dumps(result.to_json()))).to_json() == result.to_json()
    write_page(tmp_path / "page.html", [(experiment, result)], tmp_path)
    assert (tmp_path / "page.html").stat().st_size > 5000
    assert len(source_digest(experiment)) == 16
