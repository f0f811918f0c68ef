"""Results of experiments as one page: HTML with its figures inside, or Markdown with its figures beside it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from markupsafe import Markup

import gtrace
from gtrace.report.figures.charts import draw_chart
from gtrace.report.figures.style import inline_svg, render
from gtrace.report.files import put
from gtrace.report.html import document, pieces
from gtrace.report.names import literal
from gtrace.report.section import Cell, Column
from gtrace.report.section import Table as Cells
from gtrace_experiments.reproduce.reasons import REASONS
from gtrace_experiments.reproduce.runner import source_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from gtrace.report.section import Mark
    from gtrace_experiments.reproduce.experiment import Experiment, Result, Table

_TITLE = "The papers, repeated"
_INTRODUCTION = (
    "Each experiment repeats a figure or table at a size that a laptop finishes in minutes, and by criteria stated "
    "beforehand. Reproduced: every criterion holds. Partly: some do. What that says about the paper is the last "
    "column: shown, too small to tell, or not as the paper says."
)
_MARKED = (
    "A criterion of alq-fig1, alq-fig5, alq-fig8, alq-table1, mcgq-ptb, mqgrad-fig4, zipml-fig6 and zipml-fig9 was "
    "changed or added after a first look, and so were rates, lengths or networks of alq-table1, lognormal-table3, "
    "lognormal-table4, mcgq-fig3, mcgq-tables1-2, mcgq-ptb, zipml-fig4-full and the experiments on MQGrad. The CPU "
    "time of experiments that share a training is counted where it was run. [Before and after](reproduction/"
    "before-and-after.md) has what earlier runs said.\n\n"
    "gtrace reproduce NAME --full repeats an experiment with the paper's own model, data and length, and says what it "
    "will take. ZipML's were run: a name that ends in -full. Not run, in hours of one core, by the time of one step "
    "without coding: ALQ's Figure 5 14, its Table 1 390; near-lognormal Tables 3 and 4 1,470 and 870; MCGQ's Figure 3 "
    "350. Nor were MCGQ's two layers of 1,500 units on the Penn Treebank and MQGrad's networks; mcgq-ptb trains one "
    "layer of 100 units, with a third of the text, until the rate is 0."
)
#: first part of an experiment's name -> file of its paper's page, and the paper
PAPERS = {
    "alq": ("alq-amq", "ALQ and AMQ"),
    "lognormal": ("near-lognormal", "Near-lognormal gradients"),
    "mcgq": ("mcgq", "MCGQ"),
    "mqgrad": ("mqgrad", "MQGrad"),
    "zipml": ("zipml", "ZipML"),
}
_MARKS: dict[bool, str] = {True: "holds", False: "does not hold"}


def write_page(path: Path, shown: Sequence[tuple[Experiment, Result]], figures: Path) -> None:
    """Write ``path`` (.html or .md); for Markdown a page for each paper and an SVG per figure, into ``figures``."""
    if path.suffix != ".md":
        put(path, _html(shown).encode())
        return
    pages = {key: [one for one in shown if one[0].name.partition("-")[0] == key] for key in PAPERS}
    lines = [f"# {_TITLE}", "", _INTRODUCTION]
    for key, (file, paper) in PAPERS.items():
        if not pages[key]:
            continue
        place = figures / f"{file}.md"
        put(place, _markdown(f"{paper}, repeated", pages[key], figures).encode())
        link = os.path.relpath(place, path.parent)
        lines += ["", f"## {paper}", ""]
        lines += _pipes(_OVERVIEW, [(f"[{name}]({link}#{name})", *rest) for name, *rest in overview(pages[key])])
    put(path, "\n".join([*lines, "", _MARKED, ""]).encode())


_OVERVIEW = ("experiment", "what", "verdict, criteria", "what it says", "CPU, minutes")


def overview(shown: Sequence[tuple[Experiment, Result]]) -> list[tuple[str, str, str, str, str]]:
    """Name, title, verdict with how many criteria hold, what that means, and the time it took, of each."""
    return [
        (
            result.stem,
            experiment.title,
            f"{result.outcome.verdict}{' (quick)' if result.quick else ''}, {held(result)}",
            _reason(result),
            f"{result.cpu_seconds / 60:.1f}",
        )
        for experiment, result in shown
    ]


def held(result: Result) -> str:
    """How many criteria hold, as ``3 of 5``."""
    return f"{sum(c.holds for c in result.outcome.checks)} of {len(result.outcome.checks)}"


def _parts(experiment: Experiment, result: Result) -> Iterator[tuple[str, str]]:
    """Headed paragraphs in front of the tables."""
    yield "The paper", f"{experiment.paper}, {experiment.where}. {experiment.claim}"
    yield "Here", experiment.recipe
    yield "Data", result.outcome.data
    for note in result.outcome.notes:
        yield "Note", note


def _provenance(experiment: Experiment, result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    length = "; a quick run, whose verdict means nothing" if result.quick else "; of full size" if result.full else ""
    older = "" if result.digest == source_digest(experiment) else " Measured before the last change of its source."
    return f"Seed {result.seed}, {result.cpu_seconds:.0f} s of CPU time{length}; {versions}.{older}"


def show(value: str | float | None) -> str:
    """A cell's text: four digits of a float, a dash for nothing."""
    if value is None or value != value:
        return "-"
    if isinstance(value, float):
        return f"{value:.0f}" if 1e4 <= abs(value) < 1e7 else f"{value:.4g}"
    return str(value)


def _markdown(title: str, shown: Sequence[tuple[Experiment, Result]], figures: Path) -> str:
    lines = [f"# {title}"]
    for experiment, result in shown:
        lines += ["", f"## {result.stem}", "", f"**{_sentence(experiment, result)}**", ""]
        for head, words in _parts(experiment, result):
            # A word like <unk> is text, not an element.
            lines += [f"*{head}.* {words.replace('<', '&lt;')}", ""]
        lines += _pipes(
            ("claim", "criterion", "measured", ""),
            [(c.claim, c.criterion, c.measured, _MARKS[c.holds]) for c in result.outcome.checks],
        )
        for k, chart in enumerate(result.outcome.charts):
            drawn = figures / f"{result.stem}{f'-{k + 1}' if k else ''}.svg"
            put(drawn, render(draw_chart(chart), "svg"))
            lines += ["", f"![{experiment.title}]({drawn.name})", "", chart.caption]
        for table in (*result.outcome.tables, *experiment.published):
            lines += ["", f"{_titled(table, experiment)}", ""]
            lines += _pipes(table.columns, [[show(cell) for cell in row] for row in table.rows])
            lines += ["", table.note] if table.note else []
        lines += ["", _provenance(experiment, result)]
    return "\n".join(lines) + "\n"


def _sentence(experiment: Experiment, result: Result) -> str:
    """Title, verdict, and why."""
    said = f"{experiment.title[0].upper()}{experiment.title[1:]}: {result.outcome.verdict}, {held(result)}."
    return " ".join([said, _reason(result)]).strip()


def _reason(result: Result) -> str:
    """What the verdict means for the paper's claim; empty if none was written for this size."""
    if result.quick or result.stem not in REASONS:
        return ""
    kind, why = REASONS[result.stem]
    return f"{kind[0].upper()}{kind[1:]}. {why[0].upper()}{why[1:]}."


def _titled(table: Table, experiment: Experiment) -> str:
    return f"{'Published: ' if table in experiment.published else ''}{table.title}"


def _pipes(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', '&#124;').replace('*', chr(92) + '*') for cell in cells)} |"

    return [line(columns), f"|{'---|' * len(columns)}", *(line(row) for row in rows)]


def _html(shown: Sequence[tuple[Experiment, Result]]) -> str:
    title = _TITLE if len(shown) > 1 else f"{shown[0][0].name}: {shown[0][0].title}"
    main: list[Markup] = []
    if len(shown) > 1:
        main.append(_paragraph("", _INTRODUCTION))
        main.append(pieces.table(_cells("Experiments", _OVERVIEW, overview(shown), words=True)))
    for experiment, result in shown:
        main.append(Markup("<section>"))
        if len(shown) > 1:
            main.append(pieces.heading(f"{result.stem}: {experiment.title}", 2, result.stem))
        main.append(pieces.verdict([_sentence(experiment, result)]))
        main += [_paragraph(head, words) for head, words in _parts(experiment, result)]
        checks = [(c.claim, c.criterion, c.measured, _MARKS[c.holds]) for c in result.outcome.checks]
        marks: dict[int, Mark] = {k: "best" for k, c in enumerate(result.outcome.checks) if c.holds}
        main.append(
            pieces.table(
                _cells("Criteria", ("claim", "criterion", "measured", "verdict"), checks, words=True, marks=marks)
            )
        )
        for k, chart in enumerate(result.outcome.charts):
            drawing = inline_svg(draw_chart(chart), f"{result.stem}-{k}", f"{experiment.title}. {chart.caption}")
            # The drawing is an element of its own, made of escaped text.
            main.append(pieces.figure(experiment.title, chart.caption, Markup(drawing)))  # noqa: S704
        for table in (*result.outcome.tables, *experiment.published):
            main.append(pieces.heading(_titled(table, experiment), 3))
            rows = [[show(cell) for cell in row] for row in table.rows]
            main.append(pieces.table(_cells(_titled(table, experiment), table.columns, rows, notes=(table.note,))))
        main += [_paragraph("", _provenance(experiment, result)), Markup("</section>")]
    footer = f"Made by gtrace {gtrace.__version__} with gtrace reproduce."
    return document(title, [pieces.heading(title, 1)], main, footer)


def _paragraph(head: str, words: str) -> Markup:
    strong = Markup("<strong>{}.</strong> ").format(head) if head else Markup("")
    return Markup("<p>{}{}</p>").format(strong, literal(words))


def _cells(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    words: bool = False,
    marks: dict[int, Mark] | None = None,
    notes: tuple[str, ...] = (),
) -> Cells:
    found = marks or {}
    last = len(columns) - 1
    return Cells(
        title,
        tuple(
            Column(name, numeric=not words and k > 0, prose=words and " " in rows[0][0])
            for k, name in enumerate(columns)
        ),
        tuple(
            tuple(Cell(cell, mark=found.get(i, "") if k == last else "") for k, cell in enumerate(row))
            for i, row in enumerate(rows)
        ),
        tuple(note for note in notes if note),
    )
