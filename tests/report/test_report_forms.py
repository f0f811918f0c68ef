"""Reports in every form: on a terminal, as text and numbers of every kind, and as files."""

import csv
import io
import json
import os
import re
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from helpers_capture import Command
from helpers_report import EVIL, ODD_SWEEPS, result_of, row, rows_of, write_runs, write_sweep
from rich.console import Console

from gtrace.cli.options import print_json
from gtrace.errors import OutputExistsError, UsageError
from gtrace.report import figure_names, newest_results, write_report
from gtrace.report.files import all_records, plain, to_csv, to_json, to_json_lines, to_parquet
from gtrace.report.html import to_html
from gtrace.report.inputs import Asked, make_report
from gtrace.report.names import energy_share, literal, number
from gtrace.report.section import Cell, Column, Table
from gtrace.report.sections import sections
from gtrace.report.text import (
    MOST_LINES,
    latex_table,
    latex_text,
    markdown_table,
    markdown_text,
    print_report,
    to_latex,
    to_markdown,
)


def printed(report, width=120, encoding="utf-8", *, full=True, **console):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    console = Console(file=file, width=width, highlight=False, emoji=False, markup=False, **console)
    print_report(report, console, full=full, after=("page.html",))
    file.flush()
    return raw.getvalue().decode(encoding)


@pytest.mark.parametrize("name", ODD_SWEEPS)
def test_every_sweep_can_be_shown_in_every_form(name):
    report = make_report([result_of(ODD_SWEEPS[name]())])
    text, tex, (sweep,) = printed(report), to_latex(report), report.sweeps
    assert len(text.split("\n\n")[0].split()) > 4
    assert not re.findall(r"\bnan\b", text)
    assert to_markdown(report).count("\n## Sweep") == 1
    assert to_html(report).endswith("</html>\n")
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
    tensors = [row(name, squared_error=0.5, bits_total=2.0) for name in EVIL]
    report = make_report([result_of(tensors), result_of(codecs, warnings=EVIL)], title=" ".join(EVIL))
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


def test_records_hold_ratios_and_no_logarithms():
    report = make_report([result_of(rows_of(steps=range(0, 300, 10)))])
    records, (sweep,) = list(all_records(report)), report.sweeps
    found = [r for r in records if r["record"] == "comparison"]
    for record, compared in zip(found, sweep.comparisons, strict=True):
        assert record["by_elements"] == pytest.approx(compared.ratio)
        assert record["by_elements_low"] <= record["by_elements"] <= record["by_elements_high"]
    kinds = {r["record"] for r in records}
    assert kinds >= {"verdict", "configuration", "comparison", "equal_bits", "bd_rate", "phase", "layer"}


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
    parquet = pytest.importorskip("pyarrow.parquet").read_table(io.BytesIO(to_parquet(sweep_report)))
    assert parquet.column("spec").to_pylist() == [c.spec for c in configurations]
    assert parquet.column("relative_variance").to_pylist() == [c.relative_variance for c in configurations]
    assert parquet.column_names == list(found[0])
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
    assert next(e for e in found["equal_bits"] if e["method"] == "terngrad")["error"] is None
    assert found["warnings"] == ["fc1: 2 NaN"]
    assert len(second["runs"][0]["runs"][0]["loss"]) == 120


def test_every_row_of_latex_has_as_many_cells_as_its_table_has_columns(tmp_path):
    names = [*EVIL, "a^b~c#d%e&f$g{h}", "back\\slash", "--verbose", "[t]", "tab\there"]
    rows = rows_of(bits=range(2, 6), layers=("w", *names), steps=range(0, 140, 10))
    log = write_runs(tmp_path / "a.jsonl", steps=40, seeds=(0, 1))
    report = make_report([result_of(rows, ["50% & more_"])], [log], asked=Asked(groups=["tensor"]))
    columns = 0
    for line in to_latex(report).splitlines():
        opened = re.match(r"\\begin\{(?:tabular|longtable)\}\{([lr]+)\}", line)
        columns = len(opened[1]) if opened else columns
        # Nothing is left that would be a command, a comment or mathematics of its own.
        assert line.startswith("%") or not re.search(r"(?<!\\)(%|#|&(?! )|_)", line), line
        if line.endswith(r" \\") and not line.startswith(r"\caption"):
            assert line.count(" & ") == columns - 1, line


def test_a_table_over_pages_has_one_caption_and_changes_no_size_after_it():
    columns = (Column("a"), Column("b"))
    table = Table("T", columns, ((Cell("1"), Cell("2")),) * 50, ("A note.",))
    lines = latex_table(table)
    head = lines.index(r"\endfirsthead")
    assert lines[head + 1 : head + 4] == [r"\toprule", r"a & b \\", r"\midrule"]
    assert sum(r"\caption" in line for line in lines[:head]) == sum(r"\caption" in line for line in lines) == 1
    assert lines[lines.index(r"\end{longtable}") + 1 :] == ["{", r"\par\footnotesize A note.", r"\par}"]
    # A table without rows says so in Markdown, too.
    assert markdown_table(Table("T", columns, (), empty="No row.")) == ["### T", "", "No row.", ""]


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
    if width >= 80:
        # Of two sweeps both have their answers, with their names.
        two = " ".join(printed(make_report([whole, whole]), width, full=False).split())
        assert two.startswith("Sweep sweep 1: Recommendation ")
        assert f"Sweep sweep 2: {verdict.recommendation}; {verdict.saves}" in two
    assert "1 warning; --full shows it" in text
    # The recommended configuration is in the table with the same digits.
    (row,) = (line for line in text.splitlines() if line.startswith(f"{verdict.recommendation}  "))
    assert energy_share(verdict.error, 3) in row.split()
    assert f"loses {energy_share(verdict.error, 3)} of gradient energy" in text
    assert "Pareto" not in text


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_no_number_is_cut_and_no_line_is_wider_than_the_terminal(sweep_report, width):
    text = printed(sweep_report, width)
    assert "…" not in text
    for c in sweep_report.sweeps[0].configurations:
        assert number(c.relative_variance) in text
        assert number(c.bits) in text
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
    with pytest.raises(UsageError, match="/proc/none: cannot be written"):
        write_report(small, Path("/proc/none"))
    assert [p.name for p in folder.iterdir()] == ["layers.svg"]


def test_the_newest_sweep_and_the_newest_run_log_are_taken(tmp_path):
    paths = [write_sweep(tmp_path / f"{name}.sweep.db", []) for name in ("old", "new")]
    paths += [write_runs(tmp_path / f"{name}.jsonl", steps=1) for name in ("old", "new")]
    (tmp_path / "foreign.jsonl").write_text('{"a": 1}\n')
    for age, path in enumerate(reversed(paths)):
        for part in tmp_path.glob(f"{path.name}*"):
            os.utime(part, (1e9 - age, 1e9 - age))
    assert [p.name for p in newest_results(tmp_path)] == ["new.jsonl", "new.sweep.db"]
