"""One HTML page that needs nothing else: no script, no network, its figures inside."""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import gtrace
from gtrace.report.gallery import Plate, law_plates, run_plates, sweep_plates
from gtrace.report.law_tables import law_tables
from gtrace.report.names import count, literal
from gtrace.report.style import DARK
from gtrace.report.svg import inline_svg, variable
from gtrace.report.tables import (
    Cell,
    Column,
    Table,
    configuration_table,
    equal_bits_table,
    layer_table,
    run_table,
    shadow_table,
    trace_table,
)
from gtrace.report.verdict import runs_verdict, sweep_verdict

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gtrace.report.analysis import SweepAnalysis
    from gtrace.report.inputs import Report
    from gtrace.report.runs import RunLogAnalysis
    from gtrace.report.traces import TraceSummary


_FOOTER = (
    f"How to read this page: docs/reading-a-report.md in the gtrace repository. Made by gtrace {gtrace.__version__}."
)


def to_html(report: Report) -> str:
    """The page as text.

    Every name that comes from outside is escaped, and characters that would act (control characters,
    direction marks) are shown as escapes.
    """
    alone = report.sections == 1
    parts: list[str] = []
    for k, sweep in enumerate(report.sweeps):
        parts += _sweep(sweep, f"s{k}", alone=alone)
    for k, run in enumerate(report.runs):
        parts += _run(run, f"r{k}", alone=alone)
    for k, trace in enumerate(report.traces):
        parts += _trace(trace, f"t{k}", alone=alone)
    summary = [] if alone else _summary(report)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="gtrace {gtrace.__version__}">',
            f"<title>{text(report.title)}</title>",
            f"<style>\n{_css()}</style>",
            "</head>",
            "<body>",
            f"<header>\n<h1>{text(report.title)}</h1>",
            *summary,
            "</header>",
            "<main>",
            *parts,
            "</main>",
            f"<footer>{text(_FOOTER)}</footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def text(value: object) -> str:
    """``value`` as HTML text or attribute."""
    return escape(literal(value), quote=True)


def _css() -> str:
    sheet = files("gtrace.report").joinpath("assets/page.css").read_text(encoding="utf-8")
    light = "".join(f"{variable(colour)}:{colour};" for colour in DARK)
    dark = "".join(f"{variable(colour)}:{other};" for colour, other in DARK.items())
    return f"{sheet}:root{{{light}}}\n@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _summary(report: Report) -> list[str]:
    """The verdicts of all sections, so that the answer is on the first screen."""
    several = len(report.sweeps) > 1
    sentences = [(f"{sweep.name}: " if several else "") + " ".join(sweep_verdict(sweep)) for sweep in report.sweeps]
    return _verdict([*sentences, *(sentence for run in report.runs for sentence in runs_verdict(run))])


def _verdict(sentences: Iterable[str]) -> list[str]:
    return ['<div class="verdict">', *(f"<p>{text(s)}</p>" for s in sentences), "</div>"]


def _heading(kind: str, name: str, *, alone: bool) -> list[str]:
    return [] if alone else [f'<h2 class="section">{kind} <code>{text(name)}</code></h2>']


def _sweep(analysis: SweepAnalysis, prefix: str, *, alone: bool) -> list[str]:
    plates = {plate.name: plate for plate in sweep_plates(analysis)}
    level = 2 if alone else 3
    parts = [
        "<section>",
        *_heading("Sweep", analysis.name, alone=alone),
        f'<p class="facts">{text(_facts(analysis))}</p>',
    ]
    if alone:
        parts += _verdict(sweep_verdict(analysis))
    parts += _caution(analysis.notes)
    if analysis.measured:
        parts += _table(equal_bits_table(analysis), css="headline")
    if analysis.configurations:
        parts += [
            part for name, plate in plates.items() if name == "rate-distortion" for part in _plate(plate, prefix, level)
        ]
        parts += _table(configuration_table(analysis))
        parts += [
            part for name, plate in plates.items() if name != "rate-distortion" for part in _plate(plate, prefix, level)
        ]
        parts += _details("Relative variance per tensor", _table(layer_table(analysis), caption=False))
    parts += _warnings(analysis.warnings, level)
    parts += _details(
        "Provenance", _provenance({"results": analysis.name, "rows": analysis.rows, **analysis.provenance})
    )
    return [*parts, "</section>"]


def _run(analysis: RunLogAnalysis, prefix: str, *, alone: bool) -> list[str]:
    level = 2 if alone else 3
    facts = [analysis.task, count(analysis.workers, "worker")]
    if isinstance(analysis.study.get("parameters"), int):
        facts.append(count(analysis.study["parameters"], "parameter"))
    parts = ["<section>", *_heading("Training", analysis.name, alone=alone)]
    parts.append(f'<p class="facts">{text(", ".join(filter(None, facts)))}</p>')
    if alone:
        parts += _verdict(runs_verdict(analysis))
    parts += _caution(analysis.notes)
    if analysis.runs:
        parts += _table(run_table(analysis))
    if analysis.has_shadow:
        parts += _table(shadow_table(analysis))
    parts += [part for plate in run_plates(analysis) for part in _plate(plate, prefix, level)]
    parts += _warnings(analysis.warnings, level)
    study = {key: value for key, value in analysis.study.items() if key not in ("type", "tensors")}
    parts += _details("Provenance", _provenance({"results": analysis.name, **study}))
    return [*parts, "</section>"]


def _trace(summary: TraceSummary, prefix: str, *, alone: bool) -> list[str]:
    parts = ["<section>", *_heading("Trace", summary.name, alone=alone), *_verdict([summary.sentence])]
    parts += _details("Recorded tensors", _table(trace_table(summary), caption=False))
    for laws in summary.laws:
        parts += [f"<h2>{text(laws.title)}</h2>", *_verdict(laws.sentences)]
        # A table stands before the figures that show the same: laws, formats, pruning.
        plates = law_plates(laws)
        for table in law_tables(laws):
            parts += _table(table)
            for plate in plates:
                if plate.beside == table.title:
                    parts += _plate(plate, f"{prefix}-{laws.kind}", 3)
    return [*parts, "</section>"]


def _facts(analysis: SweepAnalysis) -> str:
    methods = count(len({c.method for c in analysis.configurations}), "method")
    return (
        f"{methods} in {count(len(analysis.configurations), 'configuration')}, "
        f"{count(len(analysis.tensors), 'tensor')} with {count(int(analysis.elements.sum()), 'element')}, "
        f"{count(len(analysis.steps), 'step')}; {count(analysis.cells, 'tensor-step')} compared"
    )


def _plate(plate: Plate, prefix: str, level: int) -> list[str]:
    drawing = inline_svg(plate.draw(), f"{prefix}-{plate.name}", f"{plate.title}. {plate.caption}")
    figure = [
        "<figure>",
        f'<div class="figure" tabindex="0">{drawing}</div>',
        f"<figcaption>{text(plate.caption)}</figcaption>",
        "</figure>",
    ]
    return _details(plate.title, figure) if plate.folded else [f"<h{level}>{text(plate.title)}</h{level}>", *figure]


def _table(table: Table, css: str = "", *, caption: bool = True) -> list[str]:
    parts = ['<div class="scroll" tabindex="0">', f'<table class="{css}">' if css else "<table>"]
    if caption:
        parts.append(f"<caption>{text(table.title)}</caption>")
    parts.append(f"<thead><tr>{''.join(_head(column) for column in table.columns)}</tr></thead>")
    parts.append("<tbody>")
    for row in table.rows:
        cells = [
            _cell(cell, column, first=k == 0) for k, (cell, column) in enumerate(zip(row, table.columns, strict=True))
        ]
        parts.append(f"<tr>{''.join(cells)}</tr>")
    if not table.rows:
        parts.append(f'<tr><td class="word" colspan="{len(table.columns)}">{text(table.empty)}</td></tr>')
    parts.append("</tbody></table></div>")
    if table.notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{text(note)}</li>" for note in table.notes)}</ul>')
    return parts


def _head(column: Column) -> str:
    css = "" if column.numeric else ' class="word"'
    hint = f' title="{text(column.meaning)}"' if column.meaning else ""
    return f'<th scope="col"{css}{hint}>{text(column.heading)}</th>'


def _cell(cell: Cell, column: Column, *, first: bool) -> str:
    css = " ".join(filter(None, ["" if column.numeric else "word", cell.mark]))
    attributes = f' class="{css}"' if css else ""
    if cell.hint:
        attributes += f' title="{text(cell.hint)}"'
    inside = f"<code>{text(cell.text)}</code>" if first else text(cell.text)
    if cell.detail:
        inside += f"<small>{text(cell.detail)}</small>"
    return f'<th scope="row"{attributes}>{inside}</th>' if first else f"<td{attributes}>{inside}</td>"


def _caution(lines: Iterable[str]) -> list[str]:
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return [f'<div class="caution"><ul>{items}</ul></div>'] if items else []


def _warnings(lines: tuple[str, ...], level: int) -> list[str]:
    return [f"<h{level}>Warnings</h{level}>", *_caution(lines)] if lines else []


def _details(title: str, inside: list[str]) -> list[str]:
    return ["<details>", f"<summary>{text(title)}</summary>", *inside, "</details>"]


def _provenance(facts: Mapping[str, Any]) -> list[str]:
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th><td><code>{text(value)}</code></td></tr>'
        for name, value in flatten(facts)
    )
    return [f'<div class="scroll"><table class="facts-table"><tbody>{rows}</tbody></table></div>']


def flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as lines, ``versions.numpy`` for what was nested."""
    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += flatten(value, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)))
    return lines
