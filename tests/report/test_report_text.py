import io
import math

import pytest
from helpers_report import result_of, rows_of, write_runs
from rich.console import Console

from gtrace.report.inputs import make_report
from gtrace.report.names import number
from gtrace.report.sections import sections
from gtrace.report.text import MOST_LINES, print_report
from gtrace.report.verdict import Candidate, lost, short_list


def printed(report, width=120, encoding="utf-8", *, full=True, **console):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file=file, width=width, highlight=False, emoji=False, markup=False, **console)
    print_report(report, console, full=full, after=("page.html",))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("width", [80, 120, 160])
def test_an_answer_is_a_verdict_a_table_and_a_path_in_25_lines(tmp_path, whole, width):
    log = write_runs(tmp_path / "b.jsonl", seeds=(0, 1, 2, 3, 4, 5, 6, 7, 8))
    reports = [make_report([whole]), make_report([whole, whole], [log]), make_report(runs=[log])]
    for report in reports:
        lines = printed(report, width, full=False).splitlines()
        assert len(lines) <= MOST_LINES
        assert max(map(len, lines)) <= width
        assert lines[-1] == "page.html"
    assert "1 warning; --full shows it" in printed(reports[0], width, full=False)


def test_the_recommended_configuration_is_in_the_table_with_the_same_digits(sweep_report):
    text = printed(sweep_report, 80, full=False)
    verdict = next(sections(sweep_report)).verdict
    (row,) = (line for line in text.splitlines() if line.startswith(f"{verdict.recommendation}  "))
    assert lost(verdict.error) in row.split()
    assert f"loses {lost(verdict.error)} of gradient energy" in text
    assert "Pareto" not in text


def test_the_short_list_has_the_best_of_each_method_and_the_baseline():
    def one(name, bits, error, within):
        return Candidate(f"{name} {bits}", f"{name}:{bits}", name, bits, error, within, math.nan, (2, 2))

    found = [one("qsgdinf", 3, 0.01, True), one("qsgdinf", 2, 0.2, False), one("alq", 2.5, 0.04, True)]
    found += [one(f"bad{k}", 2 + k / 10, 0.5 + k, False) for k in range(9)]
    found += [one("bf16", 16, math.nan, True), one("none", 32, math.nan, True)]
    names = [one.name for one in short_list(found, network=False, most=8)]
    assert names[:3] == ["alq 2.5", "qsgdinf 3", "bf16 16"]
    assert names[3:] == ["bad0 2.0", "bad1 2.1", "bad2 2.2", "bad3 2.3", "bad4 2.4"]


def test_verdict_first_then_the_headline_then_the_rest(sweep_report):
    text = printed(sweep_report)
    order = [
        "At 2 bits per value, qsgdinf loses least",
        "Error at equal bits: 1 worker, with Huffman codes",
        "Below each number",
        "Relative variance per tensor",
        "Error over training at 2 measured bits",
        "Error of the leader over that of the others at 2 bits",
        "Configurations",
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
    assert "No room for: of it bias, by layers, bits measured, bits fixed, bits entropy, bits Huffman," in " ".join(
        printed(sweep_report, 80).split()
    )
    assert "No room" not in printed(sweep_report, 160)


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
