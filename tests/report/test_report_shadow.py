import json
import math

import numpy as np
import pytest
from helpers_report import write_runs

from gtrace.errors import TraceError
from gtrace.report.analysis.run_logs import analyze_runs
from gtrace.report.html import to_html
from gtrace.report.inputs import make_report
from gtrace.report.sections.charts import weight_gradient_cosines
from gtrace.report.sections.training import run_figures, run_table, runs_verdict, shadow_table
from gtrace.report.text import to_markdown
from gtrace.runlog import read_runlog

RUN = "qsgdinf:bits=3"
COSINES = {"a.weight": (0.9, 0.7), "a.bias": (None, None), "b<i>.weight": (0.99, 0.97)}


def shadow_records(cosines=COSINES, run=RUN, seed=0):
    return [
        {"type": "shadow", "run": run, "seed": seed, "step": 10 * k, "tensor": tensor}
        | {"cosine_alone": None if tensor == "a.bias" else 0.995, "error_alone": 0.1}
        | {"cosine": values[k], "error": 0.5 + k}
        for k in range(2)
        for tensor, values in cosines.items()
    ]


@pytest.fixture
def records(tmp_path):
    log = read_runlog(write_runs(tmp_path / "a.jsonl", runs=("none", RUN), steps=20, workers=1))
    log[0] |= {"kind": "neural", "shadow": 10}
    return [*log, *shadow_records()]


def test_curves_are_those_of_the_records(records):
    none, coded = analyze_runs(records).runs
    assert none.shadow == ()
    assert [curve.tensor for curve in coded.shadow] == list(COSINES)
    first, second, _ = coded.shadow
    assert first.steps.tolist() == [0, 10]
    assert first.cosine.tolist() == [0.9, 0.7]
    assert first.error.tolist() == [0.5, 1.5]
    assert first.error_alone.tolist() == [0.1, 0.1]
    assert np.isnan(second.cosine).all()
    assert np.isnan(second.cosine_alone).all()


def test_the_table_holds_means_and_the_lowest(records):
    table = shadow_table(analyze_runs(records))
    assert [column.heading for column in table.columns][:4] == ["weight gradient", "cosine", "lowest", "error"]
    rows = [[cell.text for cell in row] for row in table.rows]
    assert rows == [
        ["a.weight", "0.8000", "0.7000", "1.00", "0.9950", "0.100"],
        ["a.bias", "–", "–", "1.00", "–", "0.100"],
        ["b<i>.weight", "0.9800", "0.9700", "1.00", "0.9950", "0.100"],
    ]
    assert table.notes[0].startswith("Means over 2 shadow passes")
    two = shadow_table(analyze_runs([*records, *shadow_records(seed=1)]))
    assert [cell.text for cell in two.rows[3]][:3] == [RUN, "1", "a.weight"]


def test_words_of_neural_gradients(records):
    analysis = analyze_runs(records)
    assert analysis.neural
    sentences = runs_verdict(analysis)
    assert "times fewer bits for the neural gradients than with float32" in sentences[0]
    assert sentences[1] == (
        "Its weight gradients have a mean cosine of 0.8900 to the exact ones; the worst is a.weight with 0.8000."
    )
    assert [column.heading for column in run_table(analysis).columns][-2:] == [
        "encoded per worker",
        "float32 / encoded",
    ]
    plain = analyze_runs([{**records[0], "kind": "weight"}, *records[1:]])
    assert "sent up" in runs_verdict(plain)[0]


def test_figures(records):
    analysis = analyze_runs(records)
    plates = {plate.name: plate for plate in run_figures(analysis)}
    shown = "training-over-steps training-over-bits training-bits neural-gradients weight-gradients"
    assert list(plates) == shown.split()
    alone, every = plates["weight-gradients"].draw().axes
    assert {line.get_label() for line in alone.get_lines()} == {"a.weight", "b<i>.weight"}
    (line,) = [line for line in every.get_lines() if line.get_label() == "a.weight"]
    assert (line.get_xdata().tolist(), line.get_ydata().tolist()) == ([0, 10], [0.9, 0.7])
    assert "with" in plates["weight-gradients"].title
    assert "lowest mean" not in plates["weight-gradients"].caption


def test_many_weight_gradients_are_cut_to_the_worst():
    many = {f"layer{k}.weight": (0.5 + 0.02 * k, 0.5 + 0.02 * k) for k in range(20)}
    study = {"type": "study", "version": 1, "task": "t", "workers": 1, "kind": "neural"}
    analysis = analyze_runs([study, *shadow_records(many)])
    (run,) = analysis.runs
    drawn = {curve.label for curve in weight_gradient_cosines(run).panels[1].curves}
    assert drawn == {f"layer{k}.weight" for k in range(8)}
    (figure,) = [figure for figure in run_figures(analysis) if figure.name == "weight-gradients"]
    assert figure.caption.endswith(" The 8 with the lowest mean of 20.")


def test_pages_and_markdown_hold_the_table(records):
    report = make_report(runs=[records])
    page, text = to_html(report), to_markdown(report)
    assert "Weight gradients under compressed neural gradients" in page
    assert "b&lt;i&gt;.weight" in page
    assert "b<i>" not in page
    assert "### Weight gradients under compressed neural gradients" in text
    assert "| a.weight | 0.8000 | 0.7000 |" in text


def test_no_shadow_no_table(records):
    plain = [record for record in records if record["type"] != "shadow"]
    assert "Weight gradients under" not in to_markdown(make_report(runs=[plain]))
    assert len(runs_verdict(analyze_runs(plain))) == 1


def test_a_damaged_record_is_named(records):
    with pytest.raises(TraceError, match="'cosine' of a shadow record is not a number"):
        analyze_runs([*records, {**records[-1], "cosine": "high"}])


def test_nothing_but_undefined_angles():
    nothing = {"a.bias": (None, None)}
    study = {"type": "study", "version": 1, "task": "t", "workers": 1, "kind": "neural"}
    analysis = analyze_runs([study, *shadow_records(nothing)])
    assert math.isnan(analysis.runs[0].shadow[0].cosine[0])
    assert len(runs_verdict(analysis)) == 1
    for plate in run_figures(analysis):
        plate.draw()
    json.dumps([[cell.text for cell in row] for row in shadow_table(analysis).rows])
