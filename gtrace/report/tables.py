"""Tables as plain data, the same for a terminal, a page, Markdown and LaTeX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gtrace.report.names import MISSING, number

if TYPE_CHECKING:
    from gtrace.report.analysis.families import Configuration


Mark = Literal["", "best", "quiet", "missing"]
#: Stands in the column of Pareto-optimal configurations.
PARETO = "★"
#: Bits at which per-layer and per-step views pick one configuration of each method.
VIEW_BITS = 3.0


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        text: what it says.
        detail: a smaller second line.
        mark: ``best`` of its column, ``quiet`` beside the others, or ``missing``.
        hint: the reason for what stands here, for a tooltip.
    """

    text: str
    detail: str = ""
    mark: Mark = ""
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, what it means, and how early a narrow terminal drops it (0: never).

    ``prose`` says that a first column holds sentences and no names, which a page sets in another type.
    """

    heading: str
    meaning: str = ""
    numeric: bool = True
    rank: int = 0
    prose: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table of cells.

    Attributes:
        title: above it.
        columns: from left to right.
        rows: a cell for each column.
        notes: lines below it.
        empty: what is said if there are no rows.
        folded: a page shows it when it is asked for.
        headline: a page sets it off from the others.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    empty: str = "Nothing to show."
    folded: bool = False
    headline: bool = False


def configuration_name(configuration: Configuration) -> str:
    """Family and setting, short enough for a heading: ``qsgdinf b3``."""
    return f"{configuration.family} {configuration.setting}".strip()


def value_cell(value: float, hint: str = "") -> Cell:
    """A number, or a dash."""
    return Cell(number(value), mark="missing" if math.isnan(value) else "", hint=hint)


def percent_cell(share: float) -> Cell:
    """A share in percent, or a dash."""
    return Cell(MISSING, mark="missing") if math.isnan(share) else Cell(f"{share:.1%}")


def cosine_cell(value: float) -> Cell:
    """A cosine with its four digits: those near 1 differ in the last ones."""
    return Cell(MISSING, mark="missing") if math.isnan(value) else Cell(f"{value:.4f}")
