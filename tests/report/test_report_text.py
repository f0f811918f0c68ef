import io

import pytest
from helpers_report import result_of, rows_of, write_runs
from rich.console import Console

from gtrace.report.inputs import make_report
from gtrace.report.names import number
from gtrace.report.render.text import print_report


def printed(report, width=120, encoding="utf-8", **console):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    print_report(report, Console(file=file, width=width, highlight=False, emoji=False, markup=False, **console))
    file.flush()
    return raw.getvalue().decode(encoding)


def test_verdict_first_then_the_headline_then_the_rest(sweep_report):
    text = printed(sweep_report)
    order = [
        "At 2 bits per value, qsgdinf loses least",
        "Error at equal bits: 1 worker, with Huffman codes",
        "Below each number",
        "Error of the leader over that of the others at 2 bits",
        "Error over training at 2 measured bits",
        "Configurations",
        "Relative variance per tensor",
        "warning: fc1: 2 NaN",
    ]
    places = [text.index(words) for words in order]
    assert places == sorted(places)


def test_each_number_stands_over_its_bracket(sweep_report):
    lines = printed(sweep_report).splitlines()
    k = next(k for k, line in enumerate(lines) if line.startswith("qsgdinf   "))
    assert len(lines[k].split()) == 4
    assert lines[k + 1].split() == ["b2–b3", "b3–b4"]
    assert next(line for line in lines if line.startswith("terngrad ")).split()[1:] == ["–"] * 3


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_no_number_is_cut_and_no_line_is_wider_than_the_terminal(sweep_report, width):
    text = printed(sweep_report, width)
    assert "…" not in text
    for c in sweep_report.sweeps[0].configurations:
        assert number(c.relative_variance) in text
        assert number(c.bits) in text
    assert text.count("28%") >= 2
    if width >= 40:
        assert max(len(line) for line in text.splitlines()) <= width


def test_narrow_terminals_say_what_they_hide(sweep_report):
    assert "this narrow: of it bias, by layers, bits measured, bits fixed, bits entropy, bits Huffman," in " ".join(
        printed(sweep_report, 80).split()
    )
    assert "Hidden" not in printed(sweep_report, 160)


def test_a_terminal_without_unicode_gets_ascii():
    report = make_report([result_of(rows_of(methods=("qsgdinf",), layers=("ä", "中文")))])
    text = printed(report, encoding="ascii")
    assert "b3-b4" in text
    assert "||g||^2" in text
    assert "\\u" not in text.replace("\\u4e2d\\u6587", "")


def test_colour_only_where_it_is_wanted(sweep_report, monkeypatch):
    assert "\x1b[" in printed(sweep_report, force_terminal=True, color_system="standard", no_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    coloured = printed(sweep_report, force_terminal=True, color_system="standard")
    assert "\x1b[3" not in coloured
    assert "\x1b[" not in printed(sweep_report)


def test_runs_and_sweeps_side_by_side(tmp_path, sweep_report):
    report = make_report([result_of(rows_of(bits=[2, 3]))], [write_runs(tmp_path / "b.jsonl")])
    text = printed(report)
    assert text.index("Sweep sweep") < text.index("Training b.jsonl")
    assert "Trained with qsgdinf:bits=3" in text
    assert "Training b.jsonl" not in printed(make_report(runs=[tmp_path / "b.jsonl"]))


def test_empty_inputs_have_words(tmp_path):
    assert "the sweep has no rows" in printed(make_report([result_of([])]))
    assert "No training step was logged" in printed(
        make_report(runs=[write_runs(tmp_path / "c.jsonl", steps=0, end=False)])
    )


@pytest.mark.parametrize("width", [40, 60, 80])
@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2, 3, 4)])
def test_tables_of_training_fit_and_keep_the_accuracy(tmp_path, width, seeds):
    text = printed(make_report(runs=[write_runs(tmp_path / "a.jsonl", steps=40, seeds=seeds)]), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "accuracy" in text
    assert "float32 /" in text
    assert ("5 seeds" in " ".join(text.split())) == (len(seeds) == 5)
