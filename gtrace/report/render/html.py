"""One HTML page that needs nothing else: no network, its figures and its one script inside.

The policy in its head lets no address be opened and no script run but the page's own. Every name that comes from
outside is escaped, and characters that would act (control characters, direction marks) are shown as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

import gtrace
from gtrace.report import figures
from gtrace.report.names import literal
from gtrace.report.section import FigureSpec, LayerTables, Section, Table
from gtrace.report.sections import sections

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gtrace.report.inputs import Report

_FOOTER = (
    f"How to read this page: docs/reading-a-report.md in the gtrace repository. Made by gtrace {gtrace.__version__}."
)


def _shown(value: object) -> object:
    """What a template shows of a value: its characters, none of which acts."""
    return value if isinstance(value, Markup) else literal(value)


_TEMPLATES = Environment(
    loader=PackageLoader("gtrace.report.render"),
    autoescape=True,
    finalize=_shown,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
#: The macros of ``pieces.html``: table, heading, verdict, figure, section and others. Each returns escaped HTML.
pieces: Any = _TEMPLATES.get_template("pieces.html").module


def to_html(report: Report) -> str:
    """The page as text."""
    alone = report.sections == 1
    found = [
        _shown_section(section, f"s{k}", alone=alone and not section.together)
        for k, section in enumerate(sections(report))
    ]
    summary = [sentence for one in found for sentence in one.summary]
    answers = [pieces.answer(one.section.verdict) for one in found if one.section.verdict is not None]
    header = [pieces.heading(report.title, 1), *answers, pieces.verdict(summary), pieces.contents(found)]
    return document(report.title, header, [pieces.section(one) for one in found])


def document(title: str, header: Iterable[Markup], main: Iterable[Markup], footer: str = _FOOTER) -> str:
    """A whole page around its header and its main part."""
    script = _source("page.js")
    # What is not escaped is the page's own: its policy, its script and its colours.
    return _TEMPLATES.get_template("page.html").render(
        title=title,
        header=Markup("\n").join(header),
        main=Markup("\n").join(main),
        footer=footer,
        version=gtrace.__version__,
        policy=Markup(_policy(script)),  # noqa: S704
        script=Markup(script),  # noqa: S704
        css=Markup(_css()),  # noqa: S704
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """What has a title in a section."""

    id: str
    title: str
    level: int
    html: Markup
    folded: bool = False


@dataclass(frozen=True, slots=True)
class _Shown:
    """A section as a page shows it."""

    section: Section
    named: bool
    sentences: Sequence[str]
    summary: Sequence[str]
    items: Sequence[_Item]
    made_by: Mapping[str, Any] | None


def _shown_section(section: Section, prefix: str, *, alone: bool) -> _Shown:
    on_top = bool(section.summary) and not alone
    items = [*_items(section, prefix, 2 if alone else 3)]
    for k, part in enumerate(section.parts):
        said = pieces.verdict(part.sentences)
        items.append(_Item(_anchor(prefix, part.heading), part.heading, 2, said))
        items += _items(part, f"{prefix}-{k}", 3)
    return _Shown(
        section=section,
        named=not alone,
        sentences=() if on_top else section.sentences,
        summary=section.summary if on_top else (),
        items=items,
        made_by=_made_by(section.provenance or {}),
    )


def _items(section: Section, prefix: str, level: int) -> Iterator[_Item]:
    for block in section.blocks:
        if isinstance(block, Table):
            yield _Item(_anchor(prefix, block.title), block.title, level, pieces.table(block), block.folded)
        elif isinstance(block, FigureSpec):
            identifier = f"{prefix}-{block.name}"
            yield _Item(f"{identifier}-title", block.title, level, _figure(block, identifier), block.folded)
        elif isinstance(block, LayerTables):
            yield _Item(_anchor(prefix, block.title), block.title, level, pieces.layers(block))
    if section.warnings:
        yield _Item(f"{prefix}-warnings", "Warnings", level, pieces.caution(section.warnings))
    if section.provenance is not None:
        lines = flatten(section.provenance)
        yield _Item(f"{prefix}-provenance", "Provenance", level, pieces.facts(lines), folded=True)


def _figure(figure: FigureSpec, identifier: str) -> Markup:
    drawing = figures.svg.inline_svg(figure.draw(), identifier, f"{figure.title}. {figure.caption}")
    # The drawing is an element of its own, made of escaped text.
    html: Markup = pieces.figure(figure.title, figure.caption, Markup(drawing))  # noqa: S704
    return html


def _anchor(prefix: str, title: str) -> str:
    """An identifier for a heading, from words of the program (never from names of a trace)."""
    return f"{prefix}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"


def _made_by(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The command, the version and the seed of an input; None if none of them is known."""
    command, versions, seed = facts.get("command"), facts.get("versions"), facts.get("seed")
    if isinstance(command, list) and command:
        # The first word is where the program is on that machine.
        command = shlex.join(["gtrace", *map(str, command[1:])])
    version = versions.get("gtrace") if isinstance(versions, dict) else None
    if not command and version is None and seed is None:
        return None
    return {"command": command, "version": version, "seed": seed}


def flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as lines, ``versions.numpy`` for what was nested."""
    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += flatten(value, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)))
    return lines


def _source(name: str) -> str:
    assert _TEMPLATES.loader is not None
    return _TEMPLATES.loader.get_source(_TEMPLATES, name)[0]


def _policy(script: str) -> str:
    """Content security policy: nothing from anywhere, and of scripts this one alone."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _css() -> str:
    light, dark = figures.svg.variables()
    # Paper is white whatever the screen is.
    return f"{_source('page.css')}:root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
