"""Reports on a terminal and as files."""

import io
import math
import os
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from helpers_report import result_of, rows_of, write_runs, write_sweep
from helpers_trace import write_arrays
from rich.console import Console

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.report import default_page, figure_names, load_report, newest_results, write_report
from gtrace.report.files import output_kind
from gtrace.report.inputs import Asked, kind_of, make_report
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
    text, verdict = printed(reports[0], width, full=False), next(sections(reports[0])).verdict
    assert "1 warning; --full shows it" in text
    # The recommended configuration is in the table with the same digits.
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
    assert names == ["alq 2.5", "qsgdinf 3", "bf16 16", "bad0 2.0", "bad1 2.1", "bad2 2.2", "bad3 2.3", "bad4 2.4"]


def test_verdict_first_then_the_headline_then_the_rest(sweep_report):
    text, place = printed(sweep_report), 0
    for words in (
        *("At 2 bits per value, qsgdinf loses least", "Error at equal bits: 1 worker, with Huffman codes"),
        *("Below each number", "Relative variance per tensor", "Error over training at 2 measured bits"),
        *("Error of the leader over that of the others at 2 bits", "Configurations", "warning: fc1: 2 NaN"),
    ):
        place = text.index(words, place)
    # Each number stands over its bracket.
    lines = text.splitlines()
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
    # Narrow terminals say what they hide.
    hidden = "No room for: of it bias, by layers, bits measured, bits fixed, bits entropy, bits Huffman,"
    assert width != 80 or hidden in " ".join(text.split())
    assert "No room" not in printed(sweep_report, 160)


def test_a_terminal_without_unicode_gets_ascii_and_colour_only_where_it_is_wanted(sweep_report, monkeypatch):
    text = printed(make_report([result_of(rows_of(methods=("qsgdinf",), layers=("ä", "中文")))]), encoding="ascii")
    assert "b3-b4" in text
    assert "||g||^2" in text
    assert "\\u" not in text.replace("\\u4e2d\\u6587", "")
    assert "\x1b[" in printed(sweep_report, force_terminal=True, color_system="standard", no_color=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[3" not in printed(sweep_report, force_terminal=True, color_system="standard")
    assert "\x1b[" not in printed(sweep_report)


def test_runs_and_sweeps_have_headings_together_and_empty_inputs_have_words(tmp_path):
    log = write_runs(tmp_path / "b.jsonl")
    text = printed(make_report([result_of(rows_of(bits=[2, 3]))], [log]))
    assert text.index("Sweep sweep") < text.index("Training b.jsonl")
    assert "Trained with qsgdinf:bits=3" in text
    assert "Training b.jsonl" not in printed(make_report(runs=[log]))
    assert "the sweep has no rows" in printed(make_report([result_of([])]))
    nothing = write_runs(tmp_path / "c.jsonl", steps=0, end=False)
    assert "No training step was logged" in printed(make_report(runs=[nothing]))


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2, 3, 4)])
def test_tables_of_training_fit_and_keep_the_accuracy(tmp_path, seeds):
    report = make_report(runs=[write_runs(tmp_path / "a.jsonl", steps=40, seeds=seeds)])
    for width in (40, 60, 80):
        text = printed(report, width)
        assert max(len(line) for line in text.splitlines()) <= width
        assert "accuracy" in text
        assert "float32 /" in text
        assert ("5 seeds" in " ".join(text.split())) == (len(seeds) == 5)


@pytest.fixture(scope="module")
def small():
    """One method at one step: three figures."""
    return make_report([result_of(rows_of(("qsgd",), bits=[2, 3], layers=("w", "v"), steps=(0,), draws=0))])


def test_a_failed_write_leaves_no_half_file(tmp_path, small, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("mine")

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(UsageError, match="No space left"):
        write_report(small, path, force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["page.html"]
    assert path.read_text() == "mine"


def test_a_folder_has_one_csv_for_each_kind_of_row(tmp_path, monkeypatch):
    monkeypatch.setattr("gtrace.report.files.figure_specs", lambda report: {})
    log = write_runs(tmp_path / "a.jsonl", steps=20)
    report = make_report([result_of(rows_of(bits=(2, 3), steps=(0,)))], [log], asked=Asked(groups=["layer"]))
    written = write_report(report, tmp_path / "out")
    assert {path.name for path in written if path.suffix == ".csv"} == {"configurations.csv", "groups.csv", "runs.csv"}
    assert (tmp_path / "out" / "runs.csv").read_text().splitlines()[1].startswith("a.jsonl,none,0,20,")


def test_a_folder_gets_the_page_and_every_figure_or_nothing(tmp_path, small):
    folder, names = tmp_path / "out", figure_names(small)
    written = write_report(small, folder)
    assert names == ["rate-distortion", "variance-over-steps", "layers"]
    assert written[0] == folder / "report.html"
    expected = {"report.html", "report.md", "report.tex", "report.jsonl", "configurations.csv"}
    assert {p.name for p in written} == expected | {f"{n}.{kind}" for n in names for kind in ("png", "svg", "pdf")}
    assert sorted(written) == sorted(folder.iterdir())
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.pdf").read_bytes().startswith(b"%PDF")
        assert ET.parse(folder / f"{name}.svg").getroot().tag.endswith("svg")
    # One file in the way stops the whole folder.
    for path in written:
        if path.name != "layers.svg":
            path.unlink()
    with pytest.raises(OutputExistsError, match=r"layers\.svg"):
        write_report(small, folder)
    assert [p.name for p in folder.iterdir()] == ["layers.svg"]


def test_inputs_of_one_name_are_told_apart_by_their_path(tmp_path):
    rows = list(rows_of(bits=[3], layers=("w",), steps=(0,), methods=("qsgd",)))
    paths = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        paths.append(write_sweep(tmp_path / name / "x.sweep.db", rows))
    assert [s.name for s in load_report(paths).sweeps] == [str(p) for p in paths]
    assert load_report(paths[:1]).sweeps[0].name == "x.sweep.db"


def test_the_suffix_says_what_is_written_and_others_are_refused(tmp_path, small):
    for name, kind in (("x.html", ".html"), ("x.MD", ".md"), ("x.csv", ".csv"), ("x", "")):
        assert output_kind(tmp_path / name) == kind
    with pytest.raises(UsageError, match=r"\.html, \.md, \.csv"):
        output_kind(tmp_path / "x.docx")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="folder"):
        output_kind(tmp_path / "file")
    for name in ("x.html", "x"):
        with pytest.raises(UsageError, match="does not exist"):
            write_report(small, tmp_path / "nowhere" / name)
    (tmp_path / "folder.csv").mkdir()
    assert output_kind(tmp_path / "folder.csv") == ""


def test_the_page_is_named_after_the_first_results(tmp_path):
    for results, page in (("/x/digits.sweep.db", "digits"), ("run.jsonl", "run"), ("t.zarr", "t"), ("t.h5", "t")):
        assert str(default_page(tmp_path / results)) == f"{page}.report.html"
    assert str(default_page(tmp_path / "odd")) == "odd.report.html"


def test_what_a_path_holds_is_known_from_its_content(tmp_path):
    sweep = write_sweep(tmp_path / "a.sweep.db", rows_of(bits=[2, 3], layers=("w", "v")))
    assert kind_of(sweep.rename(tmp_path / "x.dat")) == "sweep"
    assert kind_of(write_runs(tmp_path / "r.jsonl", steps=2).rename(tmp_path / "y.txt")) == "run"
    (tmp_path / "z").write_bytes(b"\x89HDF\r\n\x1a\n")
    assert kind_of(tmp_path / "z") == kind_of(tmp_path) == "trace"
    with pytest.raises(TraceError, match="no such file"):
        kind_of(tmp_path / "missing")


def test_the_newest_sweep_and_the_newest_run_log_are_taken(tmp_path):
    with pytest.raises(TraceError, match="gtrace sweep"):
        newest_results(tmp_path)
    paths = [write_sweep(tmp_path / f"{name}.sweep.db", []) for name in ("old", "new")]
    paths += [write_runs(tmp_path / f"{name}.jsonl", steps=1) for name in ("old", "new")]
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    for age, path in enumerate(reversed(paths)):
        for part in tmp_path.glob(f"{path.name}*"):
            os.utime(part, (1e9 - age, 1e9 - age))
    assert [p.name for p in newest_results(tmp_path)] == ["new.jsonl", "new.sweep.db"]
    for path in paths[2:]:
        path.unlink()
    assert [p.name for p in newest_results(tmp_path)] == ["new.sweep.db"]


def test_a_trace_is_listed(tmp_path):
    report = load_report([write_arrays(tmp_path / "t.zarr", {"fc.weight": dict.fromkeys((0, 1), np.ones((3, 4)))})])
    (summary,) = report.traces
    assert [(t.name, t.shape, t.elements, t.steps) for t in summary.tensors] == [("fc.weight", (3, 4), 12, 2)]
    assert summary.sentence.startswith("1 tensor, 12 elements, up to 2 steps each.")
    page = write_report(report, tmp_path / "t.html")[0].read_text(encoding="utf-8")
    assert "3 × 4" in page
