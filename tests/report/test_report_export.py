import csv
import io
import json
import re

import pytest
from helpers_report import EVIL, result_of, rows_of, write_runs

from gtrace.cli.options import print_json
from gtrace.errors import UsageError
from gtrace.report.inputs import Asked, make_report
from gtrace.report.render.latex import to_latex
from gtrace.report.render.markdown import to_markdown
from gtrace.report.render.records import to_csv, to_json


def test_csv_holds_every_configuration_at_full_precision(sweep_report):
    found = list(csv.DictReader(io.StringIO(to_csv(sweep_report))))
    configurations = sweep_report.sweeps[0].configurations
    assert [r["spec"] for r in found] == [c.spec for c in configurations]
    assert [float(r["relative_variance"]) for r in found] == [c.relative_variance for c in configurations]
    assert found[0]["results"] == "sweep"
    assert next(r for r in found if r["method"] == "terngrad")["nominal_bits"] == ""


def test_csv_of_runs(run_report):
    found = list(csv.DictReader(io.StringIO(to_csv(run_report))))
    assert [r["run"] for r in found] == ["none", "qsgdinf:bits=3,bucket_size=8192"]
    assert float(found[1]["bits_per_worker"]) == 120 * 3 * 38_000


def test_csv_does_not_mix():
    mixed = make_report([result_of([])], [[{"type": "study"}]])
    with pytest.raises(UsageError, match="one kind of table"):
        to_csv(mixed)
    assert to_csv(make_report([result_of([])])) == ""


def test_json_is_json_and_holds_the_brackets(sweep_report, run_report, capsys):
    for report in (sweep_report, run_report):
        print_json(to_json(report))
    text = capsys.readouterr().out
    assert "NaN" not in text.replace("fc1: 2 NaN", "")
    first, second = (json.loads(part) for part in re.split(r"(?<=\n})\n(?={)", text))
    (found,) = first["sweeps"]
    cell = next(e for e in found["equal_bits"] if e["method"] == "qsgdinf" and e["bits"] == 2)
    assert (cell["outcome"], cell["lower"], cell["upper"]) == (
        "interpolated",
        "qsgdinf:bits=3,bucket_size=8192",
        "qsgdinf:bits=4,bucket_size=8192",
    )
    missing = next(e for e in found["equal_bits"] if e["method"] == "terngrad")
    assert missing["error"] is None
    assert missing["why"].startswith("every configuration of this method takes fewer bits")
    assert (found["workers"], found["coder"], found["window"]) == (1, "huffman", None)
    assert found["warnings"] == ["fc1: 2 NaN"]
    assert len(found["per_tensor"]["natural:bucket_size=8192"]) == 8
    assert len(second["runs"][0]["runs"][0]["loss"]) == 120


def test_markdown_tables_have_one_width_each(sweep_report, run_report):
    for report in (sweep_report, run_report):
        text = to_markdown(report)
        blocks = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
        assert blocks
        for block in blocks:
            assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1
    text = to_markdown(sweep_report)
    assert text.startswith("# gtrace report: sweep\n\n## Sweep sweep\n\n**At 2 bits per value")
    assert re.search(r"^\| qsgdinf \| \*\*\S+\*\* \(b2–b3\) ", text, re.MULTILINE)
    assert "- Warning: fc1: 2 NaN" in text


#: What LaTeX prints or acts on as meant: letters, the commands of the tables, escaped characters, mathematics of one
#: symbol, braces around what would be an argument or a ligature, and the ends of cells and rows.
LATEX_TEXT = (
    r"[A-Za-z0-9\xa0-\xff .,;:!?()/*+=@]|\\[_#%&${}]|\\text[a-z]+\{[2]?\}|\\dots\{\}|\{[-\[\]]\}|--|\$-\$"
    r"|\$\\[a-z]+\$"
)
LATEX_FRAME = (
    r"%.*|\\(begin|end)\{(table|tabular|longtable)\}(\[htbp\]|\{[lr]+\})?|\\centering\\small"
    r"|\\(top|mid|bottom)rule|\\end(head|foot)|"
)


def test_every_line_of_latex_is_one_that_latex_takes(tmp_path):
    names = [*EVIL, "a^b~c#d%e&f$g{h}", "back\\slash", "--verbose", "[t]", "tab\there"]
    rows = rows_of(bits=range(2, 6), layers=("w", *names), steps=range(0, 140, 10))
    log = write_runs(tmp_path / "a.jsonl", steps=40, seeds=(0, 1))
    report = make_report([result_of(rows, ["50% & more_"])], [log], asked=Asked(groups=["tensor"]))
    text = rf"(?:{LATEX_TEXT})"
    cell = rf"(?:{text}|\\textbf\{{{text}+\}})*"
    allowed = re.compile(
        rf"{LATEX_FRAME}|\\caption\{{{text}+\}}( \\\\)?|\\par\\footnotesize {text}+|{cell}( & {cell})* \\\\"
    )
    lines = to_latex(report).splitlines()
    assert [line for line in lines if not allowed.fullmatch(line)] == []
    # The check is one that fails: each of these is a table that does not compile, or prints something else.
    for bad in (r"a_b & c \\", r"50% \\", r"\evil & c \\", r"a & {b \\", r"a^2 & b \\", "a & b"):
        assert not allowed.fullmatch(bad), bad
    columns = 0
    for line in lines:
        opened = re.match(r"\\begin\{(?:tabular|longtable)\}\{([lr]+)\}", line)
        columns = len(opened[1]) if opened else columns
        if line.endswith(r" \\") and not line.startswith(r"\caption"):
            assert line.count(" & ") == columns - 1, line
