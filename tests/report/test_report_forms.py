import csv
import importlib.util
import io
import itertools
import json
import math
import re
import sys

import pytest
from helpers_capture import Command
from helpers_report import EVIL, fitted_rows, result_of, row, rows_of, write_runs
from rich.console import Console

from gtrace.cli.options import print_json
from gtrace.errors import UsageError
from gtrace.report.files import all_records, plain, to_csv, to_json, to_json_lines, to_parquet
from gtrace.report.inputs import Asked, make_report
from gtrace.report.names import literal
from gtrace.report.section import flat
from gtrace.report.sections import sections
from gtrace.report.text import latex_text, markdown_text, print_report, to_latex, to_markdown


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


def printed(report, width=80):
    file = io.StringIO()
    print_report(report, Console(file=file, width=width, highlight=False, emoji=False, markup=False))
    return file.getvalue()


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
