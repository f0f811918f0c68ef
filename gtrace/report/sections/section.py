"""What a part of a report is: words, tables, figures and numbers, once, for everything that shows or writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from gtrace.report.tables import Table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from matplotlib.figure import Figure

    from gtrace.report.plain import Record


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """One figure.

    Attributes:
        name: of its file, without suffix.
        title: heading.
        caption: how to read it, one or two sentences.
        draw: makes the figure; matplotlib is loaded by the first call.
        folded: a page shows it when it is asked for.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    folded: bool = False


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Many small tables on a page, each folded; text leaves them out.

    Attributes:
        title: above all of them.
        tables: each with the quieter end of its title.
        note: below them, empty for none.
    """

    title: str
    tables: tuple[tuple[Table, str], ...]
    note: str = ""


Block: TypeAlias = Table | FigureSpec | LayerTables


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a section says, for other programs.

    Attributes:
        json: entries by the list of :func:`gtrace.report.render.records.to_json` that each belongs to.
        records: lines of JSON, each with its kind as ``record``.
        rows: records by the CSV file that they belong to.
    """

    json: Mapping[str, Any]
    records: Iterable[Record] = ()
    rows: Mapping[str, list[Record]] = field(default_factory=dict)


def _no_numbers() -> Numbers:
    return Numbers({})


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report.

    Attributes:
        kind: what it is about, empty for a part of another section.
        name: of the input.
        sentences: the verdict, the answer first.
        blocks: tables and figures in the order in which they are shown.
        notes: what a reader must know.
        warnings: of the measurement itself.
        summary: the verdict on top of a page of several sections, where the section itself then has none.
        facts: one quiet line below the heading of a page.
        provenance: how the input was made, None if nobody can know.
        together: it is about several inputs, or a part, so it has a heading even if there is one input.
        parts: sections inside it.
        numbers: makes what other programs read.
    """

    kind: str
    name: str
    sentences: tuple[str, ...]
    blocks: tuple[Block, ...]
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    summary: tuple[str, ...] = ()
    facts: str = ""
    provenance: Mapping[str, Any] | None = None
    together: bool = False
    parts: tuple[Section, ...] = ()
    numbers: Callable[[], Numbers] = _no_numbers

    @property
    def heading(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}".lstrip()

    @property
    def with_parts(self) -> tuple[Section, ...]:
        """The section and its parts, one after the other."""
        return (self, *self.parts)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables among the blocks."""
        return tuple(block for block in self.blocks if isinstance(block, Table))

    @property
    def figures(self) -> tuple[FigureSpec, ...]:
        """The figures of the section and of its parts."""
        own = tuple(block for block in self.blocks if isinstance(block, FigureSpec))
        return own + tuple(figure for part in self.parts for figure in part.figures)
