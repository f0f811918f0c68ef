"""A report as Markdown, for pull requests."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gtrace.report.names import literal
from gtrace.report.sections import sections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from gtrace.report.inputs import Report
    from gtrace.report.section import Table


_MARKDOWN = re.compile(r"([\\`*_\[\]<>#!|~$&])")


def to_markdown(report: Report) -> str:
    """Verdicts and tables for a pull request."""
    lines = [f"# {markdown_text(report.title)}", ""]
    for section in (one for whole in sections(report) for one in whole.with_parts):
        lines += _section(section.heading, section.sentences)
        for table in section.tables:
            lines += markdown_table(table)
        lines += _notes([*section.notes, *(f"Warning: {w}" for w in section.warnings)])
    return "\n".join(lines).rstrip("\n") + "\n"


def markdown_text(value: object) -> str:
    r"""``value`` so that Markdown shows it as it is.

    >>> print(markdown_text("a|b<i>_c_"))
    a\|b\<i\>\_c\_
    """
    return _MARKDOWN.sub(r"\\\1", literal(value))


def _section(heading: str, verdict: Iterable[str]) -> list[str]:
    first, *rest = [markdown_text(sentence) for sentence in verdict]
    return [f"## {markdown_text(heading)}", "", " ".join([f"**{first}**", *rest]), ""]


def markdown_table(table: Table) -> list[str]:
    """The lines of a table, its heading and its notes."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    def rows() -> Iterator[str]:
        for row in table.rows:
            cells = []
            for cell in row:
                shown = markdown_text(cell.text)
                shown = f"**{shown}**" if cell.mark == "best" and shown else shown
                cells.append(f"{shown} ({markdown_text(cell.detail)})" if cell.detail else shown)
            yield line(cells)

    return [
        f"### {markdown_text(table.title)}",
        "",
        line(markdown_text(column.heading) for column in table.columns),
        line("---:" if column.numeric else "---" for column in table.columns),
        *rows(),
        "",
        *_notes(table.notes),
    ]


def _notes(notes: Iterable[str]) -> list[str]:
    lines = [f"- {markdown_text(note)}" for note in notes]
    return [*lines, ""] if lines else []
