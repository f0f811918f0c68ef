"""Reports in every form: on a terminal, as text and numbers of every kind, and as files."""

import csv
import importlib.util
import io
import itertools
import json
import math
import os
import re
import sys
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from helpers_capture import Command
from helpers_report import EVIL, fitted_rows, result_of, row, rows_of, write_runs, write_sweep
from helpers_trace import write_arrays
from rich.console import Console

from gtrace.cli.options import print_json
from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.report import default_page, figure_names, load_report, newest_results, write_report
from gtrace.report.files import all_records, output_kind, plain, to_csv, to_json, to_json_lines, to_parquet
from gtrace.report.inputs import Asked, kind_of, make_report
from gtrace.report.names import literal, number
from gtrace.report.section import flat
from gtrace.report.sections import sections
from gtrace.report.text import MOST_LINES, latex_text, markdown_text, print_report, to_latex, to_markdown
from gtrace.report.verdict import Candidate, lost, short_list


def printed(report, width=120, encoding="utf-8", *, full=True, **console):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file=file, width=width, highlight=False, emoji=False, markup=False, **console)
    print_report(report, console, full=full, after=("page.html",))
    file.flush()
    return raw.getvalue().decode(encoding)


def stateful():
    for step, draw, ratio in itertools.product(range(5), range(2), (0.01, 0.1)):
        about = {"codec": f"ef:topk:ratio={ratio}", "params": json.dumps({"ratio": ratio}), "bits": None}
        yield row("w", step, "ef:topk", draw=draw, squared_error=0.5, bits_total=40 * ratio) | about


INPUTS = {
    "one step": lambda: rows_of(steps=(7,)),
    "one codec": lambda: rows_of(methods=("qsgd",)),
    "one configuration": lambda: rows_of(methods=("qsgd",), bits=[3]),
    "no rows": list,
    "nothing but NaN": lambda: (
        r | dict.fromkeys(("squared_error", "energy", "relative_variance")) for r in rows_of(bits=[2, 3], layers=("w",))
    ),
    "one tensor": lambda: rows_of(layers=("w",)),
    "expectations alone": lambda: rows_of(draws=0),
    "draws alone": lambda: (r for r in rows_of() if r["draw"] >= 0),
    "no error at all": lambda: [row("w", s, squared_error=0.0, bits_total=2.0) for s in range(20)],
    "gradients of zero": lambda: [row("w", s, squared_error=0.0) | {"energy": 0.0} for s in (0, 1)],
    "codecs with memory alone": stateful,
    "fitted codecs": fitted_rows,
    "whole model alone": lambda: [row("*", s, squared_error=0.5, bits_total=2.0) for s in range(15)],
    "one tensor has holes": lambda: (r for r in rows_of() if r["tensor"] != "fc1.bias" or r["step"] > 20),
    "names that act": lambda: (
        row(*which, squared_error=1 / which[-1], bits_total=which[-1])
        for which in itertools.product(EVIL, (0, 1), ("qsgd", "alq"), (2, 4))
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_every_sweep_can_be_shown_in_every_form(name):
    report = make_report([result_of(INPUTS[name]())])
    text, tex, (sweep,) = printed(report), to_latex(report), report.sweeps
    assert len(text.split("\n\n")[0].split()) > 4
    assert not re.findall(r"\bnan\b", text)
    assert to_markdown(report).count("\n## Sweep") == 1
    for line in to_json_lines(report).splitlines():
        assert json.loads(line, parse_constant=pytest.fail)["record"]
    json.dumps(plain(to_json(report)), allow_nan=False)
    assert tex.count(r"\begin{") == tex.count(r"\end{")
    assert len(to_csv(report).splitlines()) == (len(sweep.configurations) + 1 if sweep.rows else 0)
    for table in (table for section in sections(report) for table in section.tables):
        assert {len(line) for line in table.rows} <= {len(table.columns)}


@pytest.mark.parametrize("steps", [0, 1, 30])
def test_every_run_log_can_be_shown_in_every_form(tmp_path, steps):
    report = make_report(runs=[write_runs(tmp_path / "a.jsonl", steps=steps, seeds=(0, 1), end=steps > 1)])
    assert printed(report).strip()
    assert to_markdown(report).startswith("# gtrace report")
    assert to_latex(report).count(r"\begin{") == to_latex(report).count(r"\end{")
    json.dumps(plain(to_json(report)), allow_nan=False)
    kinds = {json.loads(line)["record"] for line in to_json_lines(report).splitlines()}
    assert kinds == {0: {"verdict"}, 1: {"verdict", "run"}, 30: {"verdict", "run", "seeds"}}[steps]


def test_names_given_by_an_enemy_have_no_effect_anywhere():
    codecs = [row("w", codec=name, method=name, squared_error=0.5, bits_total=2.0, params="x") for name in EVIL]
    tensors = result_of(INPUTS["names that act"]())
    report = make_report([tensors, result_of(codecs, warnings=EVIL)], title=" ".join(EVIL))
    markdown, layers = to_markdown(report), {r["tensor"] for r in all_records(report) if r["record"] == "layer"}
    assert "<script" not in markdown.replace("\\<", "")
    assert set(EVIL) <= layers
    forms = (printed(report, 400), literal), (markdown, markdown_text), (to_latex(report), latex_text)
    for shown, escape in forms:
        assert not set(shown) & {"\x1b", "\u202e"}
        # As a tensor, as a codec and in a warning.
        assert all(shown.count(escape(name)) >= 3 for name in EVIL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a_b&c%#", r"a\_b\&c\%\#"),
        (r"\input{x}", r"\textbackslash{}input\{x\}"),
        ("$x^2$ ~", r"\$x\textasciicircum{}2\$ \textasciitilde{}"),
        ("a--b \"c\" 'd'", r"a{-}{-}b \textquotedbl{}c\textquotedbl{} \textquotesingle{}d\textquotesingle{}"),
        ("\x1b[31m", r"\textbackslash{}x1b{[}31m"),
        ("é 中", r"é \textbackslash{}u4e2d"),
        ("– ² ×", r"-- \textsuperscript{2} $\times$"),
    ],
)
def test_latex_prints_what_stands_there(text, expected):
    assert latex_text(text) == expected


def test_a_long_table_breaks_over_pages():
    rows = [row(method="qsgd", bits=b, squared_error=1 / b, bits_total=b / 4, tensor="w") for b in range(2, 60)]
    text = to_latex(make_report([result_of(rows)]))
    assert text.count(r"\begin{longtable}") == text.count(r"\end{longtable}") == 1


def test_parquet_holds_what_csv_holds(sweep_report):
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(io.BytesIO(to_parquet(sweep_report)))
    configurations = sweep_report.sweeps[0].configurations
    assert table.column("spec").to_pylist() == [c.spec for c in configurations]
    assert table.column("relative_variance").to_pylist() == [c.relative_variance for c in configurations]
    assert table.num_columns == len(to_csv(sweep_report).splitlines()[0].split(","))


def test_without_pyarrow_and_pandas_one_line_says_so(monkeypatch, sweep_report):
    for name in ("pyarrow", "pyarrow.parquet", "pandas"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UsageError, match="needs pyarrow") as error:
        to_parquet(sweep_report)
    assert "\n" not in str(error.value)


@pytest.mark.skipif(not importlib.util.find_spec("pandas"), reason="pandas is not installed")
def test_pandas_stands_in_for_pyarrow(monkeypatch, sweep_report):
    class Frame:
        def __init__(self, columns):
            self.columns = columns

        def to_parquet(self, buffer):
            buffer.write(b"PAR1" + b"relative_variance" * ("relative_variance" in self.columns))

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("pandas.DataFrame", Frame)
    assert to_parquet(sweep_report) == b"PAR1relative_variance"


def test_records_hold_ratios_and_no_logarithms():
    report = make_report([result_of(rows_of(steps=range(0, 300, 10)))])
    records, (sweep,) = list(all_records(report)), report.sweeps
    found = [r for r in records if r["record"] == "comparison"]
    assert len(found) == len(sweep.comparisons) > 0
    for record, compared in zip(found, sweep.comparisons, strict=True):
        assert record["by_elements"] == pytest.approx(compared.ratio)
        assert record["by_elements_low"] <= record["by_elements"] <= record["by_elements_high"]
        assert record["workers"] == 1
    kinds = {r["record"] for r in records}
    assert kinds >= {"verdict", "configuration", "equal_bits", "bd_rate", "phase", "layer"}
    first = sweep.configurations[0]
    assert flat(first)["in_steps"] == pytest.approx(math.exp(first.in_steps.estimate))


@pytest.mark.parametrize("arguments", [["codecs"], ["--help"]])
def test_a_closed_pipe_is_a_normal_end(arguments, tmp_path):
    with Command(*arguments, cwd=tmp_path) as process:
        process.stdout.close()
        done = process.end()
    assert (done.returncode, done.stderr) == (0, "")


# The numbers and the text of files


def test_csv_holds_every_configuration_or_run_at_full_precision_and_does_not_mix(sweep_report, run_report):
    found, runs = (list(csv.DictReader(io.StringIO(to_csv(report)))) for report in (sweep_report, run_report))
    configurations = sweep_report.sweeps[0].configurations
    assert [r["spec"] for r in found] == [c.spec for c in configurations]
    assert [float(r["relative_variance"]) for r in found] == [c.relative_variance for c in configurations]
    assert found[0]["results"] == "sweep"
    assert next(r for r in found if r["method"] == "terngrad")["nominal_bits"] == ""
    assert [r["run"] for r in runs] == ["none", "qsgdinf:bits=3,bucket_size=8192"]
    assert float(runs[1]["bits_per_worker"]) == 120 * 3 * 38_000
    with pytest.raises(UsageError, match="one kind of table"):
        to_csv(make_report([result_of([])], [[{"type": "study"}]]))
    assert to_csv(make_report([result_of([])])) == ""


def test_json_is_json_and_holds_the_brackets(sweep_report, run_report, capsys):
    for report in (sweep_report, run_report):
        print_json(to_json(report))
    text = capsys.readouterr().out
    assert "NaN" not in text.replace("fc1: 2 NaN", "")
    first, second = (json.loads(part) for part in re.split(r"(?<=\n})\n(?={)", text))
    (found,) = first["sweeps"]
    cell = next(e for e in found["equal_bits"] if e["method"] == "qsgdinf" and e["bits"] == 2)
    between = [f"qsgdinf:bits={bits},bucket_size=8192" for bits in (3, 4)]
    assert [cell["outcome"], cell["lower"], cell["upper"]] == ["interpolated", *between]
    missing = next(e for e in found["equal_bits"] if e["method"] == "terngrad")
    assert missing["error"] is None
    assert missing["why"].startswith("every configuration of this method takes fewer bits")
    assert (found["workers"], found["coder"], found["window"]) == (1, "huffman", None)
    assert found["warnings"] == ["fc1: 2 NaN"]
    assert len(found["per_tensor"]["natural:bucket_size=8192"]) == 8
    assert len(second["runs"][0]["runs"][0]["loss"]) == 120


def test_markdown_tables_have_one_width_each(sweep_report, run_report):
    for text in (to_markdown(run_report), to_markdown(sweep_report)):
        blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert blocks
        for block in blocks:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    assert text.startswith("# gtrace report: sweep\n\n## Sweep sweep\n\n**At 2 bits per value")
    assert re.search(r"^\| qsgdinf \| \*\*\S+\*\* \(b2–b3\) ", text, re.MULTILINE)
    assert "- Warning: fc1: 2 NaN" in text


#: What LaTeX prints or acts on as meant: letters, the commands of the tables, escaped characters, mathematics of one
#: symbol, braces around what would be an argument or a ligature, and the ends of cells and rows.
LATEX_TEXT = (
    r"(?:[A-Za-z0-9\xa0-\xff .,;:!?()/*+=@]|\\[_#%&${}]|\\text[a-z]+\{[2]?\}|\\dots\{\}|\{[-\[\]]\}|--|\$-\$"
    r"|\$\\[a-z]+\$)"
)
LATEX_CELL = rf"(?:{LATEX_TEXT}|\\textbf\{{{LATEX_TEXT}+\}})*"
LATEX = re.compile(
    r"%.*|\\(begin|end)\{(table|tabular|longtable)\}(\[htbp\]|\{[lr]+\})?|\\centering\\small|\\(top|mid|bottom)rule"
    rf"|\\end(head|foot)||\\caption\{{{LATEX_TEXT}+\}}( \\\\)?|\\par\\footnotesize {LATEX_TEXT}+"
    rf"|{LATEX_CELL}( & {LATEX_CELL})* \\\\"
)


def test_every_line_of_latex_is_one_that_latex_takes(tmp_path):
    names = [*EVIL, "a^b~c#d%e&f$g{h}", "back\\slash", "--verbose", "[t]", "tab\there"]
    rows = rows_of(bits=range(2, 6), layers=("w", *names), steps=range(0, 140, 10))
    log = write_runs(tmp_path / "a.jsonl", steps=40, seeds=(0, 1))
    report = make_report([result_of(rows, ["50% & more_"])], [log], asked=Asked(groups=["tensor"]))
    lines = to_latex(report).splitlines()
    assert [line for line in lines if not LATEX.fullmatch(line)] == []
    assert not any("▁" in line for line in lines)
    # The check is one that fails: each of these is a table that does not compile, or prints something else.
    for bad in (r"a_b & c \\", r"50% \\", r"\evil & c \\", r"a & {b \\", r"a^2 & b \\", "a & b"):
        assert not LATEX.fullmatch(bad), bad
    columns = 0
    for line in lines:
        opened = re.match(r"\\begin\{(?:tabular|longtable)\}\{([lr]+)\}", line)
        columns = len(opened[1]) if opened else columns
        if line.endswith(r" \\") and not line.startswith(r"\caption"):
            assert line.count(" & ") == columns - 1, line


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
