"""A report as text: for a terminal, as Markdown for pull requests, and as LaTeX for papers."""

from __future__ import annotations

import dataclasses
import re
import textwrap
from typing import TYPE_CHECKING

from rich.box import SIMPLE
from rich.table import Table as RichTable
from rich.text import Text

from gtrace.report.names import MISSING, count, literal
from gtrace.report.section import ANSWER, FEW_ROWS, PARETO, Cell, Column, Section, Table, Verdict
from gtrace.report.sections import sections

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

    from gtrace.report.inputs import Report


_STYLES = {"": "", "best": "bold green", "quiet": "dim", "missing": "dim"}
#: The first column may fold down to the first width; columns are dropped until it has the second.
_NARROWEST, _READABLE = 14, 32
#: Sentences of an answer before its table, if there is no verdict.
_LEADING = 2
#: Lines of an answer at 80 columns.
MOST_LINES = 25
#: Lines of the table of layers; files have them all.
MOST_LAYERS = 24
#: Characters between two columns.
_GAP = 3
#: Stand-ins for what an encoding without Unicode lacks; everything else becomes an escape.
_ASCII = {MISSING: "-", PARETO: "*", "²": "^2", "∞": "inf", "×": "x", "…": "...", "−": "-", "○": "o", "±": "+-"}


def print_report(report: Report, console: Console, *, full: bool = True, after: Sequence[str] = ()) -> None:
    """Print the answer of a report, and below it the lines of ``after``.

    Names are shown literally: neither markup nor terminal escapes in them have any effect.

    Args:
        report: what to print.
        console: its width, colors and encoding are respected.
        full: print every section with its verdict, tables, notes and warnings; otherwise the answer alone, in at most
            :data:`MOST_LINES` lines of 80 characters.
        after: lines that follow, e.g. the path of the page.
    """
    found = list(sections(report, MOST_LAYERS))
    if not full:
        _print_answer(found, console, after)
        return
    first = next((k for k, section in enumerate(found) if section.verdict is not None), None)
    if first is not None:
        # The answer comes before any heading.
        _Page(console).answer(found[first].verdict)
        found[first] = dataclasses.replace(found[first], verdict=None)
    print_sections(found, console, several=report.sections > 1)
    _Page(console).plain(after, whole=True)


def _print_answer(found: Sequence[Section], console: Console, after: Sequence[str]) -> None:
    page = _Page(console)
    main = next((section for section in found if section.verdict is not None), found[0])
    others = [section for section in found if section is not main]
    last = [*after, *([f"next: {main.following}"] if main.following else [])]
    warnings = sum(len(section.warnings) for whole in found for section in whole.with_parts)

    several, brief = sum(section.verdict is not None for section in found) > 1, main.brief
    if several and brief is not None:
        # Beside the answers of other sweeps there is room for the best.
        brief = dataclasses.replace(brief, rows=brief.rows[: FEW_ROWS // 2])

    def head() -> None:
        page.answer(main.verdict)
        if main.verdict is None:
            page.verdict(main.sentences[:_LEADING], gap=False)
        if brief is not None:
            page.table(brief, brief=True)

    if several:
        console.print(Text(page.safe(f"{main.heading}:"), style="bold"))
    head()
    room = MOST_LINES - several - page.lines_of(head) - len(last) - bool(warnings) - 2
    said = list(main.sentences[_LEADING:]) if main.verdict is None else []
    for section in others:
        answer = () if section.verdict is None else section.verdict.lines[:-1]
        text = f"{'; '.join(line for _, line in answer)}." if answer else "".join(section.sentences[:1])
        said += [f"{section.heading}: {text}"] if text else []
    while said and page.lines_of(lambda: page.plain(said)) > room + 1:
        said.pop()
    page.plain(said)
    if warnings:
        last.insert(0, f"{count(warnings, 'warning')}; --full shows {'it' if warnings == 1 else 'them'}")
    page.plain(last, whole=True)


def print_sections(found: Iterable[Section], console: Console, *, several: bool = False) -> None:
    """Print some sections, as :func:`print_report` does; of ``several`` inputs each has its name above."""
    page = _Page(console)
    for section in (one for whole in found for one in whole.with_parts):
        if several or section.together:
            page.heading(section.heading)
        page.answer(section.verdict)
        page.verdict(section.sentences)
        for table in section.tables:
            page.table(table)
        page.lines(section.notes, "note")
        page.lines(section.warnings, "warning")


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the four lines of a verdict."""
    _Page(console).answer(verdict)


def print_tables(
    tables: Iterable[Table],
    console: Console,
    *,
    sentences: Iterable[str] | None = None,
    notes: Iterable[str] | None = None,
) -> None:
    """Print tables as a section of a report has them, sentences above and notes below them."""
    page = _Page(console)
    if sentences is not None:
        page.verdict(sentences)
    for table in tables:
        page.table(table)
    if notes is not None:
        console.print()
        page.lines(notes, "note")


class _Page:
    """Writes to a console what it can show."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._encoding = console.encoding or "utf-8"

    def safe(self, text: str) -> str:
        if not self._encoding.lower().startswith("utf"):
            for symbol, plain in _ASCII.items():
                if literal(symbol, self._encoding) != symbol:
                    text = text.replace(symbol, plain)
        return literal(text, self._encoding)

    def lines_of(self, draw: Callable[[], None]) -> int:
        """How many lines something takes."""
        with self._console.capture() as captured:
            draw()
        return captured.get().count("\n")

    def plain(self, lines: Sequence[str], *, whole: bool = False) -> None:
        """Lines below a blank one; paths and commands stay whole."""
        if lines:
            self._console.print()
        for line in lines:
            self._console.print(Text(self.safe(line)), soft_wrap=whole)

    def heading(self, text: str) -> None:
        self._console.print()
        self._console.print(Text(self.safe(text), style="bold underline"))

    def answer(self, verdict: Verdict | None) -> None:
        if verdict is None:
            return
        for place, (name, text) in enumerate(verdict.lines):
            width = max(ANSWER, self._console.width - ANSWER)
            lines = textwrap.wrap(self.safe(text), width, break_on_hyphens=False)
            for k, line in enumerate(lines):
                head = Text("" if k else name, style="dim")
                head.pad_right(ANSWER - head.cell_len)
                self._console.print(head.append(line, style="bold" if place == 0 else "not dim"), soft_wrap=True)

    def verdict(self, sentences: Iterable[str], *, gap: bool = True) -> None:
        if gap:
            self._console.print()
        for place, sentence in enumerate(sentences):
            self._console.print(Text(self.safe(sentence), style="bold" if place == 0 else ""))

    def lines(self, lines: Iterable[str], kind: str) -> None:
        for line in lines:
            head = Text(f"{kind}: ", style="yellow" if kind == "warning" else "dim")
            self._console.print(head.append_text(Text(self.safe(line), style="")))

    def table(self, table: Table, *, brief: bool = False) -> None:
        self._console.print()
        if not brief:
            self._console.print(Text(table.title, style="bold"))
        if not table.rows:
            self._console.print(Text(self.safe(table.empty)))
            return
        kept, dropped, needed = _fit(table, self._console.width)
        box = None if brief else SIMPLE
        grid = RichTable(box=box, show_edge=False, pad_edge=False, padding=(0, 1), header_style="dim")
        names = _width(table.columns[0], [row[0] for row in table.rows])
        for k in kept:
            column = table.columns[k]
            heading = Text("\n".join(self.safe(column.heading).rsplit(" ", 1)))
            if k == 0:
                grid.add_column(heading, overflow="fold", min_width=min(_NARROWEST, names))
            else:
                grid.add_column(heading, justify="right" if column.numeric else "left", no_wrap=True)
        for row in table.rows:
            grid.add_row(*(self._cell(row[k]) for k in kept))
        if needed > self._console.width:
            # Rich would cut numbers where even the kept columns do not fit; a terminal that wraps loses none.
            grid.width = needed
        self._console.print(grid, crop=False)
        notes = list(table.notes)
        if dropped:
            hidden = ", ".join(table.columns[k].heading for k in dropped)
            notes.append(f"No room for: {hidden}.")
        for note in notes:
            self._console.print(Text(self.safe(note), style="dim"))

    def _cell(self, cell: Cell) -> Text:
        text = Text(self.safe(cell.text), style=_STYLES[cell.mark])
        if cell.detail:
            text.append(f"\n{self.safe(cell.detail)}", style="not bold dim")
        return text


def _fit(table: Table, width: int) -> tuple[list[int], list[int], int]:
    """Columns to show, columns to drop, and the width below which numbers would be cut.

    The first column may fold, so it counts with less than its width.
    """
    needs = [_width(column, [row[k] for row in table.rows]) + _GAP for k, column in enumerate(table.columns)]
    needs[0] = min(needs[0], _READABLE + _GAP)
    kept = list(range(len(needs)))
    for k in sorted(kept, key=lambda k: -table.columns[k].rank):
        if sum(needs[j] for j in kept) <= width or table.columns[k].rank == 0:
            break
        kept.remove(k)
    least = sum(needs[k] for k in kept[1:]) + min(needs[0], _NARROWEST + _GAP)
    return kept, [k for k in range(len(needs)) if k not in kept], least


def _width(column: Column, cells: list[Cell]) -> int:
    lines = [*column.heading.rsplit(" ", 1), *(cell.text for cell in cells), *(cell.detail for cell in cells)]
    return max(len(line) for line in lines)


_MARKDOWN = re.compile(r"([\\`*_\[\]<>#!|~$&])")


def to_markdown(report: Report) -> str:
    """Verdicts and tables for a pull request."""
    lines = [f"# {markdown_text(report.title)}", ""]
    for section in (one for whole in sections(report) for one in whole.with_parts):
        first, *rest = [markdown_text(sentence) for sentence in section.sentences]
        lines += [f"## {markdown_text(section.heading)}", "", " ".join([f"**{first}**", *rest]), ""]
        if section.verdict is not None:
            lines += [f"- **{name}**: {markdown_text(text)}" for name, text in section.verdict.lines]
            lines.append("")
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


def _marked(cell: Cell, escaped: Callable[[object], str], best: str) -> str:
    """A cell with its second line in brackets; ``best`` is the form of what is best of its column."""
    text = escaped(cell.text)
    text = best.format(text) if cell.mark == "best" and text else text
    return f"{text} ({escaped(cell.detail)})" if cell.detail else text


def markdown_table(table: Table) -> list[str]:
    """The lines of a table, its heading and its notes."""
    rows = [[markdown_text(column.heading) for column in table.columns]]
    rows.append(["---:" if column.numeric else "---" for column in table.columns])
    rows += [[_marked(cell, markdown_text, "**{}**") for cell in row] for row in table.rows]
    lines = [f"| {' | '.join(row)} |" for row in rows] if table.rows else [markdown_text(table.empty)]
    return [f"### {markdown_text(table.title)}", "", *lines, "", *_notes(table.notes)]


def _notes(notes: Iterable[str]) -> list[str]:
    lines = [f"- {markdown_text(note)}" for note in notes]
    return [*lines, ""] if lines else []


#: What LaTeX would act on, and symbols of tables that its fonts lack.
_TEX = {
    **{char: f"\\{char}" for char in "{}$&#%_"},
    **{char: f"{{{char}}}" for char in "[]-"},
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    "–": "--",
    "−": "$-$",
    "★": r"$\star$",
    "×": r"$\times$",
    "±": r"$\pm$",
    "∞": r"$\infty$",
    "²": r"\textsuperscript{2}",
    "…": r"\dots{}",
    "○": r"$\circ$",
}

_SPECIAL = re.compile(f"({'|'.join(map(re.escape, _TEX))})")
#: What a document must load for these tables, as a comment.
LATEX_PREAMBLE = r"% needs \usepackage[T1]{fontenc} and \usepackage{textcomp,booktabs,longtable}"
#: A float holds no more lines; longer tables break over pages.
_FLOAT_ROWS = 40


def latex_text(value: object) -> str:
    r"""``value`` so that LaTeX prints it as it is; characters beyond Latin-1 that it may lack are escaped.

    >>> print(latex_text("fc_1 $x^2$ 50%"))
    fc\_1 \$x\textasciicircum{}2\$ 50\%
    """
    # Every other part is what LaTeX would act on.
    parts = _SPECIAL.split(literal(value))
    for k, part in enumerate(parts):
        parts[k] = _TEX[part] if k % 2 else literal(part, "latin-1").replace("\\", _TEX["\\"])
    return "".join(parts)


def to_latex(report: Report) -> str:
    """Every table of the report; verdicts and notes as comments and small print."""
    lines = [LATEX_PREAMBLE, f"% {literal(report.title)}"]
    for section in (one for whole in sections(report) for one in whole.with_parts):
        lines += ["", f"% {literal(section.heading)}", *(f"% {literal(sentence)}" for sentence in section.sentences)]
        lines += [f"% note: {literal(note)}" for note in (*section.notes, *section.warnings)]
        for table in section.tables:
            lines += ["", *latex_table(table, section.heading)]
    return "\n".join(lines) + "\n"


def latex_table(table: Table, where: str = "") -> list[str]:
    """The lines of a table with its notes; ``where`` follows its title in brackets."""
    spec = "".join("r" if column.numeric else "l" for column in table.columns)
    heading = _row(latex_text(column.heading) for column in table.columns)
    rows = [_row(_marked(cell, latex_text, r"\textbf{{{}}}") for cell in row) for row in table.rows]
    caption = rf"\caption{{{latex_text(table.title)}{f' ({latex_text(where)})' if where else ''}}}"
    notes = [rf"\par\footnotesize {latex_text(note)}" for note in table.notes]
    if not rows:
        return [f"% {literal(table.title)}: {literal(table.empty)}"]
    head = [r"\toprule", heading, r"\midrule"]
    if len(rows) > _FLOAT_ROWS:
        # The caption is on its first page alone, and the notes' size ends with them.
        first = [rf"\begin{{longtable}}{{{spec}}}", caption + r" \\", *head, r"\endfirsthead", *head, r"\endhead"]
        return [*first, r"\bottomrule", r"\endfoot", *rows, r"\end{longtable}", "{", *notes, r"\par}"]
    first = [r"\begin{table}[htbp]", r"\centering\small", caption, rf"\begin{{tabular}}{{{spec}}}", *head]
    return [*first, *rows, r"\bottomrule", r"\end{tabular}", *notes, r"\end{table}"]


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"
