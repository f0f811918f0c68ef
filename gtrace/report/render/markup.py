"""Pieces of the page as HTML: escaped text, tables, figures, folded parts. Each function returns lines."""

from __future__ import annotations

import re
from html import escape
from typing import TYPE_CHECKING

from gtrace.report.figures.svg import inline_svg
from gtrace.report.names import literal

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gtrace.report.figures.gallery import FigureSpec
    from gtrace.report.tables import Cell, Column, Table


#: Shown at the head of a column that has no name of its own; what it means is told to who cannot see it.
_UNNAMED = "★"


def text(value: object) -> str:
    """``value`` as HTML text or attribute; characters that would act instead of being seen become escapes."""
    return escape(literal(value), quote=True)


def anchor(prefix: str, title: str) -> str:
    """An identifier for a heading, from words of the program (never from names of a trace)."""
    return f"{prefix}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"


def heading(title: str, level: int, identifier: str = "") -> str:
    """A heading; with an identifier it can be linked to."""
    own = f' id="{identifier}"' if identifier else ""
    return f"<h{level}{own}>{text(title)}</h{level}>"


def verdict(sentences: Iterable[str]) -> list[str]:
    """The answer, set off from the rest; nothing for no sentences."""
    lines = [f"<p>{text(s)}</p>" for s in sentences]
    return ['<div class="verdict">', *lines, "</div>"] if lines else []


def caution(lines: Iterable[str]) -> list[str]:
    """What a reader must know before believing a number; nothing where there is nothing to say."""
    items = "".join(f"<li>{text(line)}</li>" for line in lines)
    return [f'<div class="caution"><ul>{items}</ul></div>'] if items else []


def details(title: str, inside: Iterable[str], *, beside: str = "", identifier: str = "") -> list[str]:
    """A part that opens when it is asked for; ``beside`` is a quieter end of its title."""
    own = f' id="{identifier}"' if identifier else ""
    quiet = f' <span class="quiet">{text(beside)}</span>' if beside else ""
    return [f"<details{own}>", f"<summary>{text(title)}{quiet}</summary>", *inside, "</details>"]


def figure(plate: FigureSpec, prefix: str, level: int) -> list[str]:
    """A figure with its heading and caption, folded if it says so."""
    identifier = f"{prefix}-{plate.name}"
    drawing = inline_svg(plate.draw(), identifier, f"{plate.title}. {plate.caption}")
    inside = [
        "<figure>",
        f'<div class="figure" tabindex="0" role="group" aria-label="{text(plate.title)}">{drawing}</div>',
        f"<figcaption>{text(plate.caption)}</figcaption>",
        "</figure>",
    ]
    if plate.folded:
        return details(plate.title, inside, identifier=f"{identifier}-title")
    return [heading(plate.title, level, f"{identifier}-title"), *inside]


def table(content: Table, css: str = "", *, notes: bool = True) -> list[str]:
    """A table that can be sorted and filtered, with its notes below. Its title is told, and shown by a heading."""
    classes = " ".join(filter(None, ["sortable" if content.rows else "", css]))
    name = f'aria-label="{text(content.title)}"'
    parts = [f'<div class="scroll" tabindex="0" role="group" {name}>', f'<table class="{classes}" {name}>']
    parts.append(f"<thead><tr>{''.join(_head(column) for column in content.columns)}</tr></thead>")
    parts.append("<tbody>")
    for row in content.rows:
        cells = [
            _cell(cell, column, first=k == 0) for k, (cell, column) in enumerate(zip(row, content.columns, strict=True))
        ]
        parts.append(f"<tr>{''.join(cells)}</tr>")
    if not content.rows:
        parts.append(f'<tr><td class="word" colspan="{len(content.columns)}">{text(content.empty)}</td></tr>')
    parts.append("</tbody></table></div>")
    if content.notes and notes:
        parts.append(f'<ul class="notes">{"".join(f"<li>{text(note)}</li>" for note in content.notes)}</ul>')
    return parts


def _head(column: Column) -> str:
    css = "" if column.numeric else ' class="word"'
    hint = f' title="{text(column.meaning)}"' if column.meaning else ""
    name = text(column.heading)
    if not name:
        name = f'<span aria-hidden="true">{_UNNAMED}</span><span class="unseen">{text(column.meaning)}</span>'
    return f'<th scope="col"{css}{hint}>{name}</th>'


def _cell(cell: Cell, column: Column, *, first: bool) -> str:
    css = " ".join(filter(None, ["" if column.numeric else "word", cell.mark]))
    attributes = f' class="{css}"' if css else ""
    if cell.hint:
        attributes += f' title="{text(cell.hint)}"'
    inside = f"<code>{text(cell.text)}</code>" if first and not column.prose else text(cell.text)
    if cell.detail:
        inside += f"<small>{text(cell.detail)}</small>"
    return f'<th scope="row"{attributes}>{inside}</th>' if first else f"<td{attributes}>{inside}</td>"
