"""Experiments of papers: the framework with a made-up one, and every real one as a smoke test."""

import json
import xml.etree.ElementTree as ET

import pytest

from gtrace.cli import main
from gtrace.errors import UsageError
from gtrace.report.figures.charts import draw_chart
from gtrace.report.section import Chart, Curve, Panel
from gtrace_experiments import reproduce
from gtrace_experiments.reproduce.experiment import Check, Context, Experiment, Outcome, Result, Table
from gtrace_experiments.reproduce.page import show, write_page
from gtrace_experiments.reproduce.runner import kept_result, read_result, run_experiment, source_digest, write_result

CALLS = []


def measure(context):
    CALLS.append(context)
    curves = (Curve("a <b>", (1.0, 2.0), (3.0, float("nan")), (2.0, 2.0), (4.0, 4.0), method="alq"),)
    bars = (Curve("a <b>", ("x", "y"), (1.0, 2.0), method="alq"), Curve("c", ("y",), (2.0,), (1.5,), (2.5,)))
    return Outcome(
        checks=(
            Check("one is less than two", "1 < 2", "1 and 2", holds=True),
            Check("two is less than one", "2 < 1 | never", "2 and 1", holds=False),
        ),
        tables=(Table("numbers", ("name", "value", "missing"), (("<i>", 1.23456, None), ("b", 7, float("nan")))),),
        charts=(
            Chart((Panel(curves, "lines", log_y=True, lines=(("float", 2.5),)), Panel(bars, bars=True)), "See here."),
        ),
        data="none",
    )


MADE_UP = Experiment("zipml-fig8", "a test", "Nobody", "Table 0", "None.", "Nothing is done.", measure)


def test_a_verdict_needs_every_criterion_for_reproduced_and_one_for_partly():
    check = measure(Context()).checks
    parts = {"tables": (), "charts": (), "data": ""}
    assert Outcome(check[:1], **parts).verdict == "reproduced"
    assert Outcome(check, **parts).verdict == "partly"
    assert Outcome(check[1:], **parts).verdict == "not reproduced"


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


def test_a_page_in_markdown_has_its_figures_beside_it(tmp_path):
    shown = [(MADE_UP, run_experiment(MADE_UP, Context()))]
    write_page(tmp_path / "page.md", shown, tmp_path)
    assert "| [zipml-fig8](zipml.md#zipml-fig8) | a test | partly, 1 of 2 |" in (tmp_path / "page.md").read_text()
    text = (tmp_path / "zipml.md").read_text()
    assert "![a test](zipml-fig8.svg)" in text
    assert "| <i> | 1.235 | - |" in text
    assert "2 < 1 &#124; never" in text  # a bar would end the cell
    assert "does not hold" in text
    assert ET.fromstring((tmp_path / "zipml-fig8.svg").read_bytes()).tag.endswith("svg")


def test_a_page_in_html_escapes_what_it_shows(tmp_path):
    result = run_experiment(MADE_UP, Context())
    write_page(tmp_path / "one.html", [(MADE_UP, result)], tmp_path)
    write_page(tmp_path / "two.html", [(MADE_UP, result)] * 2, tmp_path)
    one, two = ((tmp_path / name).read_text() for name in ("one.html", "two.html"))
    assert "&lt;i&gt;" in one
    assert "<i>" not in one
    assert "a &lt;b&gt;" in one  # in the figure's legend
    assert "that a laptop finishes" not in one
    assert "that a laptop finishes" in two


def test_equal_names_look_equal_in_all_panels_and_methods_keep_their_looks():
    figure = draw_chart(measure(Context()).charts[0])
    line = figure.axes[0].lines[0]
    assert line.get_color() == "#56b4e9"  # alq's in every report
    assert figure.axes[1].patches[0].get_facecolor() == pytest.approx((0x56 / 255, 0xB4 / 255, 0xE9 / 255, 1.0))
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a <b>", "c"]
    assert figure.axes[0].get_yscale() == "log"


def test_cells_show_four_digits():
    assert [show(value) for value in (1.23456, 12345.6, 1e-9, None, float("nan"), 12, "x")] == [
        "1.235", "12346", "1e-09", "-", "-", "12", "x",
    ]  # fmt: skip


def test_a_table_with_a_row_of_another_length_is_a_bug():
    with pytest.raises(ValueError, match="a row has 1 cells, 2 are needed"):
        Table("t", ("a", "b"), (("only",),))


def test_names_patterns_and_all(monkeypatch):
    monkeypatch.setattr(reproduce, "_NAMES", ("b-1", "a-1", "b-2"))
    assert reproduce.choose_experiments(["b-2", "b-1"]) == ["b-1", "b-2"]
    assert reproduce.choose_experiments(["a-*", "all"]) == ["b-1", "a-1", "b-2"]
    with pytest.raises(UsageError, match="no experiment 'b-3'; did you mean b-"):
        reproduce.choose_experiments(["b-3"])


@pytest.fixture
def made_up(monkeypatch):
    monkeypatch.setattr(reproduce, "_NAMES", ("zipml-fig8",))
    monkeypatch.setattr(reproduce, "load_experiment", lambda _: MADE_UP)
    CALLS.clear()


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", *map(str, arguments)])
    return ended.value.code


def test_the_command_keeps_what_is_finished(made_up, tmp_path, capsys):
    out = tmp_path / "out"
    assert run("zipml-fig8", "-o", out, "--quick", "--seed", 5) == 0
    assert f"zipml-fig8: partly (1 of 2 criteria)\npage: {out / 'zipml-fig8.html'}\n" in capsys.readouterr().out
    assert [(call.seed, call.quick) for call in CALLS] == [(5, True)]
    before = (out / "zipml-fig8.html").read_bytes()
    assert run("zipml-fig8", "-o", out, "--quick", "--seed", 5) == 0
    assert len(CALLS) == 1
    assert (out / "zipml-fig8.html").read_bytes() == before
    assert run("zipml-fig8", "-o", out, "--quick", "--seed", 5, "--force") == 0
    assert len(CALLS) == 2
    capsys.readouterr()
    assert run("all", "-o", out, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [result["verdict"] for result in found["results"]] == ["partly"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["nothing"], 2, "no experiment 'nothing'"),
        (["all", "--page", "x.pdf"], 2, "ends in neither .html nor .md"),
        (["all", "-o", "file"], 4, "file: is a file and was left untouched"),
        (["all", "--page", "folder.md"], 4, "folder.md: is a folder and was left untouched"),
    ],
)
def test_refusals_come_before_any_work(made_up, tmp_path, capsys, monkeypatch, arguments, code, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder.md").mkdir()
    assert run(*arguments) == code
    assert said in capsys.readouterr().err
    assert not CALLS
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.md"]


def test_the_list_names_every_experiment(capsys):
    assert run("list", "--json") == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(reproduce.experiment_names())
    assert run() == 0
    assert "FPGA timing and tomography" in capsys.readouterr().out


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
