"""One HTML page that needs nothing else: no network, its numbers and its one script inside.

The answer is on the first screen; sections follow by what a reader wants to know. Figures are drawn by the page's
script from numbers beside it. The policy in its head lets no address be opened and no script run but the page's own.
Every name that comes from outside is escaped, and characters that would act (control characters, direction marks) are
shown as escapes.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shlex
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

import gtrace
from gtrace.planning import Plan
from gtrace.report import figures
from gtrace.report.analysis.history import RunHistory, TensorHistory, energy_shares, run_lines
from gtrace.report.analysis.safety import captured
from gtrace.report.analysis.savings import ASSUMED, Savings, network_model
from gtrace.report.analysis.tensors import layer_insight
from gtrace.report.inputs import Report, make_report
from gtrace.report.names import count, duration, literal, sparkline
from gtrace.report.section import FEW_ROWS, PLACES, FigureSpec, HeatMap, LayerTables, Table, Verdict, column, words
from gtrace.report.sections import sections
from gtrace.report.sections.sweep_tables import choice_table
from gtrace.report.verdict import ERROR_LIMIT
from gtrace.trace import Trace
from gtrace.units import rate_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gtrace.costs import Cluster
    from gtrace.report.analysis.sweep import SweepAnalysis
    from gtrace.report.section import Block, Place, Section, Shows
    from gtrace.sweep import SweepResult


_FOOTER = (
    f"How to read this page: docs/reading-a-report.md in the gtrace repository. Made by gtrace {gtrace.__version__}."
)
#: What the sections of a page are called.
_PLACES: dict[Place, str] = {place: place.capitalize() for place in PLACES} | {"first": "Answer"}
#: Codecs that the figure of the network shows beside float32 and bf16.
_MOST_DRAWN = 3
#: Digits of a number that a page draws.
_DIGITS = 5


TEMPLATES = Environment(
    loader=PackageLoader("gtrace.report"),
    autoescape=True,
    # A template shows the characters of a value, none of which acts.
    finalize=lambda value: value if isinstance(value, Markup) else literal(value),
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
#: The macros of ``pieces.html``: table, heading, verdict, figure and others. Each returns escaped HTML.
pieces: Any = TEMPLATES.get_template("pieces.html").module


def to_html(report: Report) -> str:
    """The page as text."""
    found = list(sections(report))
    alone = report.sections == 1
    page: dict[Place, list[Markup]] = {place: [] for place in _PLACES}
    # The sections of sweeps come first.
    for k, (section, analysis) in enumerate(zip_longest(found, report.sweeps)):
        named = not alone or section.together
        savings = None if analysis is None else report.savings_of(analysis)
        shown: dict[Place, list[Markup]] = {}
        for place, piece in _pieces(section, f"s{k}", section.place if named else "first", analysis, savings):
            if piece.strip():
                shown.setdefault(place, [pieces.name(section)] * named).append(piece)
        for place, items in shown.items():
            page[place] += items
    header = [pieces.heading(report.title, 1), *[pieces.facts_line(line) for line in report_facts(report)]]
    parts = [(place, _PLACES[place], items) for place, items in page.items() if items]
    drawn = [spec for section in found for part in section.with_parts for spec in part.figures]
    own = all(spec.chart is not None for spec in drawn)
    return document(report.title, [*header], [pieces.part(*part) for part in parts], index=parts, own_figures=own)


def report_facts(report: Report) -> Iterator[str]:
    """What the first screen says about how the numbers of one input were made, a line each."""
    if report.sections != 1:
        return
    for sweep in report.sweeps:
        seen = captured(sweep.provenance).get("steps_seen")
        steps = f"{len(sweep.steps):,} of {seen:,} steps" if isinstance(seen, int) else count(len(sweep.steps), "step")
        facts = [steps, f"{count(len(sweep.configurations), 'configuration')} measured"]
        savings = report.savings_of(sweep)
        if savings is not None:
            facts.append(_cluster(savings.cluster))
        yield " · ".join(facts)


def _cluster(cluster: Cluster) -> str:
    return f"{cluster.ranks} ranks at {rate_text(cluster.network.bandwidth)}, {duration(cluster.computing)} a step"


def document(
    title: str,
    header: Iterable[Markup],
    main: Iterable[Markup],
    footer: str = _FOOTER,
    index: Sequence[tuple[str, str, Sequence[Markup]]] = (),
    *,
    own_figures: bool = False,
) -> str:
    """A whole page around its header, the index and its main part.

    ``index`` has identifiers and names of its sections, each with what it holds. With ``own_figures`` no figure comes
    from matplotlib, whose drawings need styles of their own.
    """
    script, css = source("page.js"), source("page.css")
    if not own_figures:
        # The colours of matplotlib's drawings follow the page's. Paper is white whatever the screen is.
        light, dark = figures.style.variables()
        css += f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    # Nothing from anywhere, of scripts this one alone, and of styles too unless a drawing has its own.
    known = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (script, css)]
    styles = f"'sha256-{known[1]}'" if own_figures else "'unsafe-inline'"
    policy = f"default-src 'none'; script-src 'sha256-{known[0]}'; style-src {styles}; base-uri 'none'; "
    policy += "form-action 'none'"
    # What is not escaped is the page's own: its policy, its script and its colours.
    return TEMPLATES.get_template("page.html").render(
        title=title,
        header=Markup("\n").join(header),
        index=index if len(index) > 1 else (),
        main=Markup("\n").join(main),
        footer=footer,
        version=gtrace.__version__,
        policy=Markup(policy),  # noqa: S704
        script=Markup(script),  # noqa: S704
        css=Markup(css),  # noqa: S704
    )


def _pieces(
    section: Section, prefix: str, place: Place, analysis: SweepAnalysis | None, savings: Savings | None
) -> Iterator[tuple[Place, Markup]]:
    """What a page shows of a section, each piece with its place; ``place`` is that of the sentences alone."""
    if analysis is None or section.verdict is None:
        yield place, pieces.verdict(section.sentences)
    else:
        yield from _of_sweep(section, section.verdict, prefix, analysis, savings)
    for block in section.blocks:
        if (block.place or section.place) != "first":
            yield block.place or section.place, _block(block, prefix)
    for k, part in enumerate(section.parts):
        own = f"{prefix}-{k}"
        yield section.place, pieces.item(part.heading, _anchor(own, part.heading), pieces.verdict(part.sentences))
        for block in part.blocks:
            yield section.place, _block(block, own)
    if section.facts:
        yield "details", pieces.facts_line(section.facts)
    yield "details", pieces.made_by(_made_by(section.provenance or {}))
    yield "details", pieces.caution(section.notes)
    if section.warnings:
        yield "details", pieces.item("Warnings", f"{prefix}-warnings", pieces.caution(section.warnings))
    if section.provenance is not None:
        lines = pieces.facts(flatten(section.provenance))
        yield "details", pieces.item("Provenance", f"{prefix}-provenance", lines, folded=True)


def _of_sweep(
    section: Section, verdict: Verdict, prefix: str, analysis: SweepAnalysis, savings: Savings | None
) -> Iterator[tuple[Place, Markup]]:
    """The answer, and what follows the sliders of the network: the time of a step with every configuration."""
    yield "first", pieces.cards(_cards(verdict), len(section.warnings))
    drawn = [_block(block, prefix) for block in section.blocks if block.place == "first"]
    yield "first", pieces.first(drawn, layer_insight(analysis, verdict.codec))
    yield "choose", pieces.verdict(section.sentences)
    cluster = ASSUMED if savings is None else savings.cluster
    model = network_model(analysis, cluster, _drawn(analysis, verdict))
    table = choice_table(analysis, savings, every=True)
    if table is not None and model is not None:
        shown = pieces.table(table, network=prefix, cluster=_cluster(cluster))
        yield "choose", pieces.item(table.title, _anchor(prefix, table.title), shown)
    if model is not None and model["codecs"]:
        said = f"No cluster was given: the sliders start at an assumed {_cluster(cluster)}." if savings is None else ""
        yield "network", pieces.network(prefix, _json(model), said)


def _block(block: Block, prefix: str) -> Any:
    folded = isinstance(block, LayerTables) or block.folded or block.place in ("details", "network")
    if isinstance(block, FigureSpec):
        name = f"{prefix}-{block.name}"
        anchor, shown = f"{name}-title", figure(block, name)
    else:
        anchor = _anchor(prefix, block.title)
        shown = pieces.layers(block) if isinstance(block, LayerTables) else pieces.table(block)
    return pieces.item(block.title, anchor, shown, folded)


def figure(spec: FigureSpec, identifier: str) -> Any:
    """Markup of a figure that the page draws; what it cannot draw is a drawing by matplotlib."""
    if spec.chart is None:
        drawing = figures.style.inline_svg(spec.draw(), identifier, f"{spec.title}. {spec.caption}")
        # The drawing is an element of its own, made of escaped text.
        return pieces.figure(spec.title, spec.caption, Markup(drawing))  # noqa: S704
    kind, caption = ("heat", "") if isinstance(spec.chart, HeatMap) else ("chart", spec.chart.caption)
    return pieces.drawn(spec.title, caption or spec.caption, kind, _json(asdict(spec.chart)))


def _json(data: Any) -> Markup:
    """Numbers for the page's script: no character of it can end the element that it is in."""
    text = json.dumps(_rounded(data), separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c"))  # noqa: S704


def _rounded(value: Any) -> Any:
    """Plain data with short numbers and shown names; infinities are the largest number, NaN is null."""
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return None
        return 1e300 if value == math.inf else float(f"{value:.{_DIGITS}g}")
    if isinstance(value, dict):
        return {literal(key): _rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return literal(value) if isinstance(value, str) else value


def _cards(verdict: Verdict) -> list[tuple[str, str, str]]:
    """Name, headline and the rest of each line of a verdict: what is before its first comma, colon or parenthesis."""
    cards = []
    for name, text in verdict.lines:
        # A parenthesis and "of gradient energy" stay with the rest.
        found = re.search(r": |; | (?=\()|, | (?=of gradient energy)", text)
        head, rest = (text[: found.start()], text[found.end() :]) if found else (text, "")
        # The name of a codec stays as it is typed.
        head = head if verdict.answer == "compress" and name == "Recommendation" else head[:1].upper() + head[1:]
        cards.append((name, head, rest))
    return cards


def _drawn(analysis: SweepAnalysis, verdict: Verdict) -> list[str]:
    """The recommended codec, and the Pareto-optimal ones with the fewest bits within falling limits of the error."""
    chosen = [verdict.codec] if verdict.codec else []
    front = sorted((c for c in analysis.configurations if c.pareto), key=lambda c: c.bits)
    for limit in (ERROR_LIMIT, ERROR_LIMIT / 5, ERROR_LIMIT / 25):
        chosen += [c.spec for c in front if c.error <= limit][:1]
    return list(dict.fromkeys(chosen))[:_MOST_DRAWN]


def _anchor(prefix: str, title: str) -> str:
    """An identifier for a heading, from words of the program (never from names of a trace)."""
    return f"{prefix}-{re.sub(r'[^a-z0-9]+', '-', title.lower()).strip('-')}"


def _made_by(facts: Mapping[str, Any]) -> dict[str, Any] | None:
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


def source(name: str) -> str:
    """A template, style sheet or script as text."""
    assert TEMPLATES.loader is not None
    return TEMPLATES.loader.get_source(TEMPLATES, name)[0]


#: Sentences of a plan.
_LEADING = 2


def to_notebook(value: Trace | SweepResult | Plan | Verdict) -> str:
    """HTML for the last line of a cell: the answer, a table of at most eight rows, and what to do next."""
    if isinstance(value, Verdict):
        shown: dict[str, Any] = {"lines": value.lines}
    elif isinstance(value, Trace):
        shown = _trace(value)
    else:
        report = make_report(plans=[value]) if isinstance(value, Plan) else make_report([value.selected])
        main = next(sections(report))
        shown = {
            "title": report.title if report.sweeps else main.heading,
            "facts": list(report_facts(report)),
            "lines": () if main.verdict is None else main.verdict.lines,
            "sentences": main.sentences[:_LEADING] if main.verdict is None else (),
            "table": main.brief,
            "last": [f"{count(len(main.warnings), 'warning')}: see .warnings"] if main.warnings else [],
        }
    # The one thing that is not escaped: the program's own styles.
    css = Markup(source("notebook.css"))  # noqa: S704
    return TEMPLATES.get_template("notebook.html").render(css=css, **shown)


def _trace(trace: Trace) -> dict[str, Any]:
    run = RunHistory(trace, trace.tensors)
    first, *rest = run_lines(trace, run)
    shares = energy_shares(run.tensors)
    ordered = sorted(zip(run.tensors, shares, strict=True), key=lambda row: -row[1])
    columns: list[Shows[tuple[TensorHistory, float]]] = [
        words("tensor", lambda row: row[0].info.name),
        words("shape", lambda row: row[0].shape),
        column("steps", lambda row: f"{row[0].steps.size:,}"),
        column("energy", lambda row: f"{row[1]:.1%}", "share of the squared norms of all gradients"),
        column("norm first", lambda row: row[0].norm_text(0)),
        column("norm last", lambda row: row[0].norm_text(-1)),
        words("norm over steps", lambda row: sparkline(row[0].shown_norms)),
    ]
    left = ordered[FEW_ROWS:]
    last = [f"{count(len(left), 'more tensor')}, {sum(share for _, share in left):.1%} of the energy"] if left else []
    command = "" if trace.location is None else f", or gtrace sweep {shlex.quote(trace.path)}"
    last.append(f"next: gtrace.sweep(trace){command}")
    table = Table.of("Tensors with the most energy", ordered[:FEW_ROWS], columns)
    return {"title": first[1], "lines": rest, "quiet": True, "table": table, "last": last}
