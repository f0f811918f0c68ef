"""Tables of a report for LaTeX, with booktabs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from gtrace.report.names import literal
from gtrace.report.sections import sections

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gtrace.report.inputs import Report
    from gtrace.report.section import Cell, Table


#: What LaTeX would act on, and symbols of tables that its fonts lack.
_TEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    "[": "{[}",
    "]": "{]}",
    "-": "{-}",
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

_SPECIAL = re.compile("|".join(map(re.escape, _TEX)))
#: Columns of small blocks, which no font of LaTeX has.
_NOT_IN_PRINT = ("over steps",)
#: A float holds no more lines; longer tables break over pages.
_FLOAT_ROWS = 40


def latex_text(value: object) -> str:
    r"""``value`` so that LaTeX prints it as it is; characters beyond Latin-1 that it may lack are escaped.

    >>> print(latex_text("fc_1 $x^2$ 50%"))
    fc\_1 \$x\textasciicircum{}2\$ 50\%
    """
    text = literal(value)
    parts = []
    last = 0
    for match in _SPECIAL.finditer(text):
        parts += [_latin(text[last : match.start()]), _TEX[match[0]]]
        last = match.end()
    return "".join([*parts, _latin(text[last:])])


def _latin(text: str) -> str:
    return literal(text, "latin-1").replace("\\", _TEX["\\"])


def to_latex(report: Report) -> str:
    """Every table of the report; verdicts and notes as comments and small print."""
    lines = [latex_preamble(), latex_comment(report.title)]
    for section in (one for whole in sections(report) for one in whole.with_parts):
        lines += ["", f"% {literal(section.heading)}", *(f"% {literal(sentence)}" for sentence in section.sentences)]
        lines += [f"% note: {literal(note)}" for note in (*section.notes, *section.warnings)]
        for table in section.tables:
            lines += ["", *latex_table(table, section.heading)]
    return "\n".join(lines) + "\n"


def latex_preamble() -> str:
    """What a document must load for these tables, as a comment."""
    return r"% needs \usepackage[T1]{fontenc} and \usepackage{textcomp,booktabs,longtable}"


def latex_comment(text: str) -> str:
    """A line that LaTeX leaves out."""
    return f"% {literal(text)}"


def latex_table(table: Table, where: str = "") -> list[str]:
    """The lines of a table with its notes; ``where`` follows its title in brackets."""
    kept = [k for k, column in enumerate(table.columns) if column.heading not in _NOT_IN_PRINT]
    spec = "".join("r" if table.columns[k].numeric else "l" for k in kept)
    heading = _row(latex_text(table.columns[k].heading) for k in kept)
    rows = [_row(_cell(row[k]) for k in kept) for row in table.rows]
    caption = rf"\caption{{{latex_text(table.title)}{f' ({latex_text(where)})' if where else ''}}}"
    notes = [rf"\par\footnotesize {latex_text(note)}" for note in table.notes]
    if not rows:
        return [f"% {literal(table.title)}: {literal(table.empty)}"]
    if len(rows) > _FLOAT_ROWS:
        return [
            rf"\begin{{longtable}}{{{spec}}}",
            caption + r" \\",
            r"\toprule",
            heading,
            r"\midrule",
            r"\endhead",
            r"\bottomrule",
            r"\endfoot",
            *rows,
            r"\end{longtable}",
            *notes,
        ]
    return [
        r"\begin{table}[htbp]",
        r"\centering\small",
        caption,
        rf"\begin{{tabular}}{{{spec}}}",
        r"\toprule",
        heading,
        r"\midrule",
        *rows,
        r"\bottomrule",
        r"\end{tabular}",
        *notes,
        r"\end{table}",
    ]


def _row(cells: Iterable[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: Cell) -> str:
    text = latex_text(cell.text)
    if cell.mark == "best" and text:
        text = rf"\textbf{{{text}}}"
    return f"{text} ({latex_text(cell.detail)})" if cell.detail else text
