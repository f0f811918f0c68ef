"""What an experiment is: a recipe, what a paper published, what was measured, and a verdict by stated criteria."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from dataclasses import dataclass, field
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args, get_origin, get_type_hints

from gtrace.report.section import Chart, Curve, Panel

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from gtrace_experiments.reproduce.full import Full

__all__ = ["Chart", "Check", "Context", "Curve", "Experiment", "Outcome", "Panel", "Result", "Table", "Verdict"]

Verdict: TypeAlias = Literal["reproduced", "partly", "not reproduced"]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text and numbers under headings; a None is a cell without a value.

    Attributes:
        title: above it.
        columns: headings.
        rows: as long as the headings each; floats are shown with four digits.
        note: one line below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table '{self.title}': a row has {len(row)} cells, {len(self.columns)} are needed")


@dataclass(frozen=True, slots=True)
class Check:
    """One claim, by when it would count as shown, and what was measured.

    Attributes:
        claim: the paper's, in a few words.
        criterion: stated before anything was measured; what must hold of the measured numbers.
        measured: the numbers.
        holds: whether it does.
    """

    claim: str
    criterion: str
    measured: str
    holds: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of an experiment found.

    Attributes:
        checks: claims with what was measured; at least one.
        tables: measured numbers.
        charts: figures as data.
        data: the measured data, e.g. ``Fashion-MNIST``, and the paper's data that it replaces.
        notes: what a reader has to know before believing it.
    """

    checks: tuple[Check, ...]
    tables: tuple[Table, ...]
    charts: tuple[Chart, ...]
    data: str
    notes: tuple[str, ...] = ()

    @property
    def verdict(self) -> Verdict:
        """``reproduced`` where all checks hold, ``not reproduced`` where none does, ``partly`` between."""
        held = sum(check.holds for check in self.checks)
        return "not reproduced" if not held else "reproduced" if held == len(self.checks) else "partly"


@dataclass(frozen=True, slots=True)
class Context:
    """What an experiment is run with.

    Attributes:
        seed: of everything random.
        quick: a smoke test, in seconds: the same code on less data or fewer steps; its verdict means nothing.
        say: shows a line of progress.
        full: the paper's size; None for the miniature.
        folder: where trainings of full size are kept, finished or not, so that an interrupted experiment goes on.
        costs: seconds that each training would take; a list instead of None measures them on a few steps, and trains
            no further.
    """

    seed: int = 0
    quick: bool = False
    say: Callable[[str], None] = field(default=lambda _line: None, compare=False)
    full: Full | None = field(default=None, hash=False)
    folder: Path | None = None
    costs: list[float] | None = field(default=None, compare=False)

    def kept(self, what: str, settings: Any) -> Path | None:
        """A path without its ending for a training with these settings; None where nothing is kept."""
        if self.folder is None:
            return None
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=6).hexdigest()
        return self.folder / f"{what}-{digest}"


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of a paper, in miniature.

    Attributes:
        name: as ``gtrace reproduce`` takes it: the paper's short name and the number of its figure or table.
        title: what it is about, in a few words.
        paper: authors or system, venue and year.
        where: figure or table in the paper.
        claim: what the paper says, in one or two sentences.
        recipe: what is done here, and how it differs from the paper.
        published: the paper's own numbers; empty if it shows only curves.
        run: measures.
    """

    name: str
    title: str
    paper: str
    where: str
    claim: str
    recipe: str
    run: Callable[[Context], Outcome]
    published: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """An outcome with what it takes to repeat it, as it is stored.

    Attributes:
        name: of the experiment.
        outcome: what was found.
        seed: of the context.
        quick: of the context.
        full: the paper's size instead of the miniature's.
        digest: digest of the experiment's own source, which shows whether a result is stale.
        versions: versions of gtrace, numpy, Python and, if installed, torch.
        cpu_seconds: CPU time of the run, children included.
    """

    name: str
    outcome: Outcome
    seed: int
    quick: bool
    digest: str
    versions: dict[str, str]
    cpu_seconds: float
    full: bool = False

    @property
    def stem(self) -> str:
        """Its name in files and on pages: that of the experiment, and ``-full`` at the paper's size."""
        return f"{self.name}-full" if self.full else self.name

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; NaN becomes None."""
        found: dict[str, Any] = _plain({"version": 1, **dataclasses.asdict(self)})
        found["verdict"] = self.outcome.verdict
        return found

    @classmethod
    def from_json(cls, saved: Any) -> Result:
        """Undo :meth:`to_json`.

        Raises:
            ValueError: something else, or of another version.
        """
        if not isinstance(saved, dict) or saved.get("version") != 1:
            raise ValueError("another version")
        result = _built(cls, {name: value for name, value in saved.items() if name not in ("version", "verdict")}, "")
        assert isinstance(result, cls)
        return result


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if hasattr(value, "item"):  # a numpy scalar
        value = value.item()
    return None if isinstance(value, float) and value != value else value


def _built(kind: Any, saved: Any, where: str) -> Any:
    """A value of an annotated type from its JSON value; ValueError if it has another type."""
    parts = get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(saved, dict):
        types = get_type_hints(kind)
        # A field that came later has a default.
        needed = {one.name for one in dataclasses.fields(kind) if one.default is dataclasses.MISSING}
        if not needed <= saved.keys() <= types.keys():
            raise ValueError(f"{where or 'the result'} has other fields")
        return kind(**{name: _built(types[name], value, f"{where}.{name}") for name, value in saved.items()})
    if get_origin(kind) is tuple and isinstance(saved, list):
        kinds = itertools.repeat(parts[0], len(saved)) if parts[-1] is Ellipsis else parts
        return tuple(_built(one, value, where) for one, value in zip(kinds, saved, strict=True))
    if get_origin(kind) is dict and isinstance(saved, dict):
        return {name: _built(parts[1], value, where) for name, value in saved.items()}
    if get_origin(kind) is Literal and saved in parts:
        return saved
    if get_origin(kind) is UnionType and (isinstance(saved, parts) or (type(saved) is int and float in parts)):
        return saved
    if kind is float and (saved is None or type(saved) in (int, float)):
        return math.nan if saved is None else float(saved)
    if type(saved) is kind:
        return saved
    raise ValueError(f"{where} is of another type")
