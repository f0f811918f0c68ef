"""What a report is made of: tables, charts and figures as plain data, and the sections that hold them.

A section has its words, tables, figures and numbers once, for everything that shows or writes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from gtrace.report.names import MISSING, number
from gtrace.report.statistics import Interval
from gtrace.types import Tabular

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Mark = Literal["", "best", "quiet", "missing"]
#: Where something is shown: on the first screen, or under the heading of that name.
Place: TypeAlias = Literal["first", "choose", "layers", "training", "network", "safety", "details"]
#: the places in their order
PLACES: tuple[Place, ...] = get_args(Place)
#: The mark of Pareto-optimal configurations.
PARETO = "★"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell.

    Attributes:
        detail: a smaller second line.
        mark: ``best`` of its column, ``quiet`` beside the others, or ``missing``.
        hint: the reason for what is here, for a tooltip.
    """

    text: str
    detail: str = ""
    mark: Mark = ""
    hint: str = ""


#: what a cell without a value shows
NOTHING = Cell(MISSING, mark="missing")


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
        empty: what is said if there are no rows.
        folded: a page shows it when it is asked for.
        headline: a page sets it off from the others.
        place: where it is shown; None for the section's.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    empty: str = "Nothing to show."
    folded: bool = False
    headline: bool = False
    place: Place | None = None

    @classmethod
    def of(cls, title: str, items: Iterable[T], columns: Sequence[Shows[T]], **rest: Any) -> Table:
        """One line for each item; a column shows a cell of it, a text, or a number, whose NaN becomes a dash."""
        rows = tuple(tuple(_cell(show(item)) for _, show in columns) for item in items)
        return cls(title, tuple(column for column, _ in columns), rows, **rest)


Shown: TypeAlias = Cell | str | float
#: a column, and what it shows of an item
Shows: TypeAlias = tuple[Column, Callable[[T], Shown]]


def column(heading: str, show: Callable[[T], Shown], meaning: str = "", rank: int = 0) -> Shows[T]:
    """A column of numbers, with what it shows of an item."""
    return Column(heading, meaning, rank=rank), show


def words(heading: str, show: Callable[[T], Shown], meaning: str = "", rank: int = 0, **how: bool) -> Shows[T]:
    """A column of words, likewise."""
    return Column(heading, meaning, numeric=False, rank=rank, **how), show


def _cell(shown: Shown) -> Cell:
    return shown if isinstance(shown, Cell) else Cell(shown) if isinstance(shown, str) else value_cell(shown)


def value_cell(value: float, form: str = "", hint: str = "") -> Cell:
    """A number, in a format of its own if there is one, or a dash."""
    if math.isnan(value):
        return dataclasses.replace(NOTHING, hint=hint)
    return Cell(format(value, form) if form else number(value), hint=hint)


#: how a curve is drawn: a line with markers at its points, points alone (also instead of bars), a line alone, or
#: steps
Form: TypeAlias = Literal["line", "points", "plain", "steps"]


@dataclass(frozen=True, slots=True)
class Curve:
    """One curve.

    Attributes:
        x: positions; numbers, or names of categories, for bars.
        y: values, as many; NaN without one.
        low: lower ends of intervals around them; empty for none.
        high: upper ends.
        method: codec whose look it has; empty for the next of the palette.
        form: how it is drawn.
        names: what each point is, which a page shows beside it; empty for the label alone.
    """

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    method: str = ""
    form: Form = "line"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes.

    Attributes:
        bars: x are names of categories, and every curve has a bar at each, from 0 on, or a point if logarithmic.
        lines: horizontal lines, name to value, such as what full precision reaches.
        marks: vertical lines, name to position, such as where the learning rate falls.
        percent: values are parts of a whole.
        most: values above are folded away until a reader asks for them.
        rows: names of y = 0, 1, ... from above, for points in rows; empty for numbers.
    """

    curves: tuple[Curve, ...]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False
    bars: bool = False
    lines: tuple[tuple[str, float], ...] = ()
    marks: tuple[tuple[str, float], ...] = ()
    percent: bool = False
    most: float = math.inf
    rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A figure of panels in rows of some length; the caption says in one or two sentences what to see."""

    panels: tuple[Panel, ...]
    caption: str = ""
    columns: int = 2


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Numbers of a grid, row by row from above, NaN without one."""

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """One figure.

    Attributes:
        name: of its file, without suffix.
        caption: how to read it, one or two sentences.
        draw: makes the figure; matplotlib is loaded by the first call.
        chart: what a page draws itself; None shows what ``draw`` makes.
        folded: a page shows it when it is asked for.
        place: where it is shown; None for the section's.
    """

    name: str
    title: str
    caption: str
    draw: Callable[[], Figure]
    chart: Chart | HeatMap | None = None
    folded: bool = False
    place: Place | None = None


@dataclass(frozen=True, slots=True)
class LayerTables:
    """Many small tables on a page, each folded; text leaves them out.

    Attributes:
        tables: each with the quieter end of its title.
        note: below them, empty for none.
        place: where they are shown; None for the section's.
    """

    title: str
    tables: tuple[tuple[Table, str], ...]
    note: str = ""
    place: Place | None = "layers"


#: Rows of the one table that a terminal shows with an answer.
FEW_ROWS = 8

Block: TypeAlias = Table | FigureSpec | LayerTables


Record: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Numbers:
    """What a section says, for other programs.

    Attributes:
        json: entries by the list of :func:`gtrace.report.files.to_json` that each belongs to.
        records: lines of JSON, each with its kind as ``record``.
        rows: records by the CSV file that they belong to.
    """

    json: Mapping[str, Any]
    records: Iterable[Record] = ()
    rows: Mapping[str, list[Record]] = field(default_factory=dict)


#: Where the words of a verdict begin.
ANSWER = 17
#: What a verdict may say.
Answer: TypeAlias = Literal["compress", "do not compress", "not measured", "nothing is safe"]


@dataclass(frozen=True, slots=True)
class Verdict(Tabular):
    """The answer in four lines, and as numbers.

    Attributes:
        answer: what kind of an answer it is.
        recommendation: what to do.
        saves: bytes, and time if the network is known.
        costs: batch and progress of steps if they can be predicted, and error.
        confidence: what it rests on, and which command would make it surer.
        codec: spec of the recommended codec; None for none.
        bits: its measured bits per value; None for none.
        error: its error as the report's tables have it; None for none.
        prediction: what its noise costs: ``horizon`` in steps, ``workers``, ``batch`` and ``equivalent_batch`` in
            samples over all workers with a 95% interval (``_low``, ``_high``), ``lost_progress``, the part of each
            step that its bias takes, and ``shorter_steps``, by which its noise makes Adam's steps shorter; None if that
            is not known.
    """

    answer: Answer
    recommendation: str
    saves: str
    costs: str
    confidence: str
    codec: str | None = None
    bits: float | None = None
    error: float | None = None
    prediction: dict[str, float | None] | None = None

    @property
    def lines(self) -> tuple[tuple[str, str], ...]:
        """The four lines with their names."""
        names = ("recommendation", "saves", "costs", "confidence")
        return tuple((name.capitalize(), getattr(self, name)) for name in names)

    def __str__(self) -> str:
        return "\n".join(f"{name:<{ANSWER}}{text}" for name, text in self.lines)

    def frame_columns(self) -> dict[str, list[Any]]:
        """One row: the fields, and those of the prediction."""
        row = {own.name: getattr(self, own.name) for own in dataclasses.fields(self) if own.name != "prediction"}
        return {name: [value] for name, value in (row | (self.prediction or {})).items()}


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a report.

    Attributes:
        kind: what it is about, empty for a part of another section.
        sentences: the verdict, the answer first.
        blocks: tables and figures in the order in which they are shown.
        place: where it is shown, with the blocks that name no other place.
        notes: what a reader must know.
        warnings: of the measurement itself.
        facts: one quiet line below the heading of a page.
        provenance: how the input was made, None if nobody can know.
        together: it is about several inputs, or a part, so it has a heading even if there is one input.
        parts: sections inside it.
        numbers: makes what other programs read.
        verdict: what to do; None if it does not say.
        brief: the one table that a terminal shows with the answer; None for none.
        following: the command that makes the answer better, in minutes; empty for none.
    """

    kind: str
    name: str
    sentences: tuple[str, ...]
    blocks: tuple[Block, ...]
    place: Place
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    facts: str = ""
    provenance: Mapping[str, Any] | None = None
    together: bool = False
    parts: tuple[Section, ...] = ()
    numbers: Callable[[], Numbers] = lambda: Numbers({})
    verdict: Verdict | None = None
    brief: Table | None = None
    following: str = ""

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
        """The tables among the blocks, in the order of their places."""
        found = [block for block in self.blocks if isinstance(block, Table)]
        return tuple(sorted(found, key=lambda table: PLACES.index(table.place or self.place)))

    @property
    def figures(self) -> tuple[FigureSpec, ...]:
        """The figures of the section and of its parts."""
        own = tuple(block for block in self.blocks if isinstance(block, FigureSpec))
        return own + tuple(figure for part in self.parts for figure in part.figures)


def flat(value: Any) -> Record:
    """A dataclass as a dictionary in which each :class:`Interval` is five fields."""
    record: Record = {}
    for own in dataclasses.fields(value):
        item = getattr(value, own.name)
        if isinstance(item, Interval):
            record[own.name] = item.estimate
            record |= {f"{own.name}_{end}": getattr(item, end) for end in ("low", "high", "p", "why")}
        else:
            record[own.name] = item
    return record
