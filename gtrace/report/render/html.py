"""One HTML page that needs nothing else: no network, its figures and its one script inside.

The policy in its head lets no address be opened and no script run but the page's own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shlex
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import gtrace
from gtrace.report.figures.gallery import law_specs, plan_specs, run_specs, savings_specs, sweep_specs
from gtrace.report.figures.style import DARK
from gtrace.report.figures.svg import variable
from gtrace.report.names import count
from gtrace.report.render.markup import anchor, caution, details, figure, heading, table, text, verdict
from gtrace.report.sections.groups import group_table, groups_in_words
from gtrace.report.sections.plans import budget_table, plan_table, plan_verdict
from gtrace.report.sections.safety import noise_table, safety_sentences, safety_table
from gtrace.report.sections.savings import savings_table, savings_verdict
from gtrace.report.sections.side_by_side import side_by_side_table, side_by_side_verdict
from gtrace.report.sections.sweep_tables import (
    comparison_table,
    configuration_table,
    equal_bits_table,
    layer_sections,
    layer_table,
    pairs_table,
    phase_table,
)
from gtrace.report.sections.sweep_words import compared_in_words, sweep_verdict
from gtrace.report.sections.traces import law_tables, trace_table
from gtrace.report.sections.training import rank_table, run_table, runs_verdict, seed_table, seeds_verdict, shadow_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gtrace.planning import Plan
    from gtrace.report.analysis.evidence import Comparison
    from gtrace.report.analysis.groups import TensorGroup
    from gtrace.report.analysis.results import SweepAnalysis
    from gtrace.report.analysis.run_logs import RunLogAnalysis
    from gtrace.report.analysis.savings import Savings
    from gtrace.report.analysis.traces import TraceSummary
    from gtrace.report.figures.gallery import FigureSpec
    from gtrace.report.inputs import Report
    from gtrace.report.tables import Table


_PAIRS = "Error of the first configuration over that of the second, paired over steps"

_FOOTER = (
    f"How to read this page: docs/reading-a-report.md in the gtrace repository. Made by gtrace {gtrace.__version__}."
)


def to_html(report: Report) -> str:
    """The page as text.

    Every name that comes from outside is escaped, and characters that would act (control characters,
    direction marks) are shown as escapes.
    """
    alone = report.sections == 1
    sections: list[_Section] = []
    for k, sweep in enumerate(report.sweeps):
        sections.append(
            _sweep(
                sweep,
                f"s{k}",
                report.pairs[k] if report.pairs else (),
                alone=alone,
                groups=report.groups[k] if report.groups else (),
                savings=report.savings_of(sweep),
            )
        )
    for k, pair in enumerate(report.side_by_side):
        sections.append(
            _words_and_table(
                f"b{k}",
                "Sweep",
                f"{pair.second} against {pair.first}",
                side_by_side_verdict(pair),
                side_by_side_table(pair),
            )
        )
    for k, run in enumerate(report.runs):
        sections.append(_run(run, f"r{k}", alone=alone))
    for k, pool in enumerate(report.pools):
        said = seeds_verdict(pool.groups, pool.averaged, neural=pool.neural) or ["No run was finished."]
        found = seed_table(pool.groups, pool.averaged, neural=pool.neural, notes=pool.notes)
        sections.append(_words_and_table(f"p{k}", "Training", f"put together: {', '.join(pool.logs)}", said, found))
    for k, savings in enumerate(report.savings):
        section = _words_and_table(f"w{k}", savings.title, savings.name, [], savings_table(savings))
        for plate in savings_specs(savings):
            section.plate(plate)
        sections.append(section)
    for k, trace in enumerate(report.traces):
        sections.append(_trace(trace, f"t{k}", alone=alone))
    for k, plan in enumerate(report.plans):
        sections.append(_plan(plan, f"n{k}", alone=alone))
    header = [f"<h1>{text(report.title)}</h1>", *_summary(report, alone=alone), *_contents(sections)]
    main = [line for section in sections for line in ["<section>", *section.lines, "</section>"]]
    return document(report.title, header, main)


def document(title: str, header: Sequence[str], main: Sequence[str], footer: str = _FOOTER) -> str:
    """A whole page around the lines of its header and its main part, which must be escaped already."""
    script = _asset("page.js")
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta name="generator" content="gtrace {gtrace.__version__}">',
            f"<title>{text(title)}</title>",
            f"<style>\n{_css()}</style>",
            "</head>",
            "<body>",
            "<header>",
            *header,
            "</header>",
            "<main>",
            *main,
            "</main>",
            f"<footer>{text(footer)}</footer>",
            f"<script>{script}</script>",
            "</body>",
            "</html>",
            "",
        ]
    )


class _Section:
    """Lines of one input's part of the page, and what a reader may want to jump to."""

    def __init__(self, prefix: str, name: str, level: int) -> None:
        self.prefix = prefix
        self.name = name
        self.level = level
        self.lines: list[str] = []
        self.places: list[tuple[str, str]] = []

    def heading(self, title: str, level: int = 0, kind: str = "") -> None:
        """A heading that the contents point at; ``kind`` keeps equal ones apart."""
        identifier = anchor(f"{self.prefix}-{kind}" if kind else self.prefix, title)
        self.places.append((identifier, title))
        self.lines.append(heading(title, level or self.level, identifier))

    def table(self, content: Table, css: str = "", level: int = 0, kind: str = "") -> None:
        """A table under its own title."""
        self.heading(content.title, level, kind)
        self.lines += table(content, css)

    def folded(self, title: str, inside: list[str]) -> None:
        """A part that is closed at first."""
        identifier = anchor(self.prefix, title)
        self.places.append((identifier, title))
        self.lines += details(title, inside, identifier=identifier)

    def plate(self, plate: FigureSpec, kind: str = "", level: int = 0) -> None:
        """A figure; ``kind`` keeps the figures of several kinds of gradients apart."""
        prefix = f"{self.prefix}-{kind}" if kind else self.prefix
        self.places.append((f"{prefix}-{plate.name}-title", plate.title))
        self.lines += figure(plate, prefix, level or self.level)


def _contents(sections: list[_Section]) -> list[str]:
    """Links to everything that has a title, folded; nothing for a page that fits on a screen."""
    if sum(len(section.places) for section in sections) < 3:
        return []
    inside: list[str] = []
    for section in sections:
        if len(sections) > 1:
            inside.append(f"<p><code>{text(section.name)}</code></p>")
        items = "".join(f'<li><a href="#{place}">{text(title)}</a></li>' for place, title in section.places)
        inside.append(f"<ul>{items}</ul>")
    return ['<nav aria-label="Contents">', *details("Contents", inside), "</nav>"]


def _asset(name: str) -> str:
    return files("gtrace.report.render").joinpath(f"assets/{name}").read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Content security policy: nothing from anywhere, and of scripts this one alone."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _css() -> str:
    light = "".join(f"{variable(colour)}:{colour};" for colour in DARK)
    dark = "".join(f"{variable(colour)}:{other};" for colour, other in DARK.items())
    # Paper is white whatever the screen is.
    return f"{_asset('page.css')}:root{{{light}}}\n@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"


def _summary(report: Report, *, alone: bool) -> list[str]:
    """The verdicts of all sections, so that the answer is on the first screen; of one ``alone``, what it saves."""
    several = len(report.sweeps) > 1
    sentences = []
    for sweep in () if alone else report.sweeps:
        first, *others = sweep_verdict(sweep)
        sentences.append((f"{sweep.name}: " if several else "") + first)
        others += safety_sentences(sweep)
        sentences += [" ".join(others)] if others else []
    sentences += [sentence for run in (() if alone else report.runs) for sentence in runs_verdict(run)]
    sentences += [sentence for savings in report.savings for sentence in savings_verdict(savings)]
    return verdict(sentences)


def _words_and_table(prefix: str, kind: str, name: str, sentences: Sequence[str], content: Table) -> _Section:
    """A section on several inputs together."""
    section = _Section(prefix, name, 3)
    section.lines += [*_title(kind, name, alone=False), *verdict(sentences)]
    section.table(content)
    return section


def _sweep(
    analysis: SweepAnalysis,
    prefix: str,
    pairs: Sequence[Comparison],
    *,
    alone: bool,
    groups: Sequence[TensorGroup] = (),
    savings: Savings | None = None,
) -> _Section:
    section = _Section(prefix, analysis.name, 2 if alone else 3)
    section.lines += [*_title("Sweep", analysis.name, alone=alone), f'<p class="facts">{text(_facts(analysis))}</p>']
    if alone:
        named = [f"{pair.first} has {compared_in_words(pair)}." for pair in pairs]
        first, *others = sweep_verdict(analysis)
        section.lines += verdict([*named, first, *groups_in_words(groups), *others, *safety_sentences(analysis)])
    section.lines += [*_made_by(analysis.provenance), *caution(analysis.notes)]
    if pairs:
        note = f"Each at its own bits. p is Holm's, corrected for the {count(len(pairs), 'pair')} named."
        section.table(pairs_table(_PAIRS, pairs, (note,)))
    if analysis.measured:
        section.table(equal_bits_table(analysis), "headline")
    if analysis.safety.known:
        section.table(safety_table(analysis, savings))
    if groups:
        section.table(group_table(groups))
    if analysis.comparisons:
        section.table(comparison_table(analysis))
        if analysis.phases:
            section.table(phase_table(analysis))
    if analysis.configurations:
        plates = sweep_specs(analysis)
        for plate in plates:
            if plate.name == "rate-distortion":
                section.plate(plate)
        section.table(configuration_table(analysis))
        for plate in plates:
            if plate.name != "rate-distortion":
                section.plate(plate)
        if analysis.safety.known:
            section.folded("Equivalent batch size per tensor", table(noise_table(analysis)))
        layers = layer_sections(analysis)
        if layers:
            section.heading("Layer by layer")
            section.lines += layers
        section.folded("Relative variance per tensor", table(layer_table(analysis)))
    _warnings(section, analysis.warnings)
    made = {key: value for key, value in analysis.provenance.items() if key != "tensors"}
    _provenance(section, {"results": analysis.name, "rows": analysis.rows, **made})
    return section


def _run(analysis: RunLogAnalysis, prefix: str, *, alone: bool) -> _Section:
    section = _Section(prefix, analysis.name, 2 if alone else 3)
    facts = [analysis.task, analysis.averaged]
    if isinstance(analysis.study.get("parameters"), int):
        facts.append(count(analysis.study["parameters"], "parameter"))
    section.lines += [
        *_title("Training", analysis.name, alone=alone),
        f'<p class="facts">{text(", ".join(filter(None, facts)))}</p>',
    ]
    if alone:
        section.lines += verdict(runs_verdict(analysis))
    section.lines += [*_made_by(analysis.study), *caution(analysis.notes)]
    if analysis.runs:
        section.table(run_table(analysis))
    if analysis.several_seeds:
        section.table(seed_table(analysis.groups, analysis.averaged, neural=analysis.neural))
    if analysis.has_ranks:
        section.table(rank_table(analysis))
    if analysis.has_shadow:
        section.table(shadow_table(analysis))
    for plate in run_specs(analysis):
        section.plate(plate)
    _warnings(section, analysis.warnings)
    study = {key: value for key, value in analysis.study.items() if key not in ("type", "tensors")}
    _provenance(section, {"results": analysis.name, **study})
    return section


def _trace(summary: TraceSummary, prefix: str, *, alone: bool) -> _Section:
    section = _Section(prefix, summary.name, 2 if alone else 3)
    section.lines += [*_title("Trace", summary.name, alone=alone), *verdict([summary.sentence])]
    section.folded("Recorded tensors", table(trace_table(summary)))
    for laws in summary.laws:
        section.heading(laws.title, 2)
        section.lines += verdict(laws.sentences)
        # A table stands before the figures that show the same: laws, formats, pruning.
        plates = law_specs(laws)
        for content in law_tables(laws):
            section.table(content, level=3, kind=laws.kind)
            for plate in plates:
                if plate.beside == content.title:
                    section.plate(plate, laws.kind, 3)
    return section


def _plan(plan: Plan, prefix: str, *, alone: bool) -> _Section:
    section = _Section(prefix, plan.name, 2 if alone else 3)
    section.lines += [*_title("Plan", plan.name, alone=alone), *verdict(plan_verdict(plan)), *_made_by(plan.provenance)]
    section.table(plan_table(plan))
    for plate in plan_specs(plan):
        section.plate(plate)
    changing = budget_table(plan)
    if changing is not None:
        section.folded(changing.title, table(changing))
    _provenance(section, plan.provenance)
    return section


def _title(kind: str, name: str, *, alone: bool) -> list[str]:
    return [] if alone else [f'<h2 class="section">{kind} <code>{text(name)}</code></h2>']


def _facts(analysis: SweepAnalysis) -> str:
    methods = count(len({c.method for c in analysis.configurations}), "method")
    return (
        f"{methods} in {count(len(analysis.configurations), 'configuration')}, "
        f"{count(len(analysis.tensors), 'tensor')} with {count(int(analysis.elements.sum()), 'element')}, "
        f"{count(len(analysis.steps), 'step')}; {count(analysis.cells, 'tensor-step')} compared"
    )


def _made_by(facts: Mapping[str, Any]) -> list[str]:
    """The command and the seed, in one line; what else is known stands at the end of the section."""
    command = facts.get("command")
    if isinstance(command, list) and command:
        # The first word is where the program lies on that machine.
        command = shlex.join(["gtrace", *map(str, command[1:])])
    said = [f"Made by <code>{text(command)}</code>"] if command else []
    versions = facts.get("versions")
    if isinstance(versions, dict) and "gtrace" in versions:
        said.append(f"with gtrace {text(versions['gtrace'])}")
    if facts.get("seed") is not None:
        said.append(f"seed {text(facts['seed'])}")
    return [f'<p class="facts">{", ".join(said)}</p>'] if said else []


def _warnings(section: _Section, lines: tuple[str, ...]) -> None:
    if lines:
        section.heading("Warnings")
        section.lines += caution(lines)


def _provenance(section: _Section, facts: Mapping[str, Any]) -> None:
    rows = "".join(
        f'<tr><th scope="row">{text(name)}</th><td><code>{text(value)}</code></td></tr>'
        for name, value in flatten(facts)
    )
    section.folded(
        "Provenance",
        [
            '<div class="scroll" tabindex="0" role="group" aria-label="Provenance">',
            f'<table class="facts-table"><tbody>{rows}</tbody></table></div>',
        ],
    )


def flatten(facts: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested facts as lines, ``versions.numpy`` for what was nested."""
    lines: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, dict):
            lines += flatten(value, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", value if isinstance(value, str) else json.dumps(value, default=str)))
    return lines
