"""The store of a sweep: one SQLite file, resumable, safe under kill -9, readable by any SQL tool."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import OutputExistsError, TraceError, UsageError
from gtrace.sweep.loading import read_rows, read_times
from gtrace.sweep.schema import (
    COLUMNS,
    EXPECTATION,
    FORMAT,
    KEY,
    MEASURED,
    OF_CODEC,
    TEXTS,
    VERSION,
    create,
    present,
    upgrade,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = ["COLUMNS", "EXPECTATION", "ResultStore", "SweepResult", "Table"]

_MEASURED = frozenset(MEASURED)


@dataclass(frozen=True, slots=True)
class SweepResult:
    """Rows of a sweep as columns.

    Attributes:
        columns: column name -> array of length n_rows; text as object arrays, numbers as float64 or int64
            (a missing integer makes the column float64 with NaN).
        provenance: command, versions, seed, trace fingerprint and what else the run said about itself.
        warnings: one line for each thing that was skipped or cannot be trusted.
        times: columns of the table of times, apart so that the rows are reproducible.
        details: (tensor, step, what) -> value, at each tensor's last step of a sweep with fitted levels:
            ``levels SPEC`` (levels, zero, law), ``density LAW`` (edges, share, energy, zeros, below) and
            ``convergence`` (codec, objective by start, best); see ``gtrace.sweep.details``.
    """

    columns: dict[str, NDArray[Any]]
    provenance: dict[str, Any]
    warnings: tuple[str, ...] = ()
    times: dict[str, NDArray[Any]] | None = None
    details: dict[tuple[str, int, str], Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.columns[name]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows as dictionaries, in the order of the columns."""
        names = list(self.columns)
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(names, values, strict=True))

    def to_pandas(self) -> Any:
        """A pandas DataFrame; pandas is not a dependency and has to be installed.

        Raises:
            ImportError: pandas is not there.
        """
        import pandas as pd

        return pd.DataFrame(self.columns)


class Table(NamedTuple):
    """Rows of one tensor at one step as columns.

    Attributes:
        tensor: its name.
        step: the step.
        draw: of all rows.
        identities: of each row, the columns that say which codec it is of.
        same: columns with one value for all rows.
        numbers: columns, float64 each; what is not finite is stored as NULL.
        texts: columns of text.
    """

    tensor: str
    step: int
    draw: int
    identities: Sequence[Mapping[str, Any]]
    same: Mapping[str, Any]
    numbers: Mapping[str, NDArray[np.float64]]
    texts: Mapping[str, Sequence[str | None]]


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _open_to_read(path: Path) -> sqlite3.Connection:
    # What a writer that was killed while it closed has left can be rolled back by a connection that may write only.
    mode = "rw" if path.with_name(path.name + "-journal").exists() else "ro"
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode={mode}", uri=True)


class ResultStore:
    """The SQLite file of one sweep.

    Rows are written in transactions by one writer; after kill -9 the file opens with every committed row.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self.path = path
        self._statements: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {}
        self._number_texts()

    @classmethod
    def create(cls, path: Path, provenance: Mapping[str, Any], fingerprint: str, *, force: bool) -> ResultStore:
        """Open ``path`` for writing: resume it when its fingerprint is the same, start it otherwise.

        Raises:
            OutputExistsError: something else is there and ``force`` is off.
            UsageError: its folder does not exist.
        """
        if not path.parent.is_dir():
            raise UsageError(f"{path}: the folder {path.parent} does not exist; create it or choose another -o")
        if path.exists():
            try:
                found = cls._fingerprint(path)
            except TraceError:
                found = None
            if found == fingerprint:
                return cls(cls._connect(path, cls._meta(path)["version"]), path)
            if not force:
                why = "holds a sweep of other data or settings" if found else "is not a sweep"
                raise OutputExistsError(
                    f"{path}: exists already and {why}; it was left untouched: pass --force or another -o"
                )
            for suffix in ("", "-wal", "-shm", "-journal"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        connection = cls._connect(path)
        meta = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint, "provenance": provenance}
        with connection as sql:
            # Python opens no transaction of its own for statements that define tables.
            sql.execute("BEGIN")
            create(sql)
            sql.executemany("INSERT INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in meta.items()])
        return cls(connection, path)

    @staticmethod
    def _connect(path: Path, version: int = VERSION) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=30)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        if version < VERSION:
            with connection as sql:
                sql.execute("BEGIN IMMEDIATE")
                upgrade(sql)
        return connection

    @staticmethod
    def _meta(path: Path) -> dict[str, Any]:
        try:
            with closing(_open_to_read(path)) as sql:
                meta = {k: json.loads(v) for k, v in sql.execute("SELECT key, value FROM meta")}
        except (sqlite3.Error, ValueError) as error:
            raise TraceError(f"{path}: not a gtrace sweep ({error})") from None
        if meta.get("format") != FORMAT:
            raise TraceError(f"{path}: not a gtrace sweep; pass the .sweep.db that `gtrace sweep` wrote")
        if not isinstance(meta.get("version"), int) or meta["version"] > VERSION:
            raise TraceError(
                f"{path}: written by a newer gtrace (format {meta.get('version')}, this one reads {VERSION}); upgrade"
            )
        return meta

    @classmethod
    def _fingerprint(cls, path: Path) -> str | None:
        value = cls._meta(path).get("fingerprint")
        return value if isinstance(value, str) else None

    def done(self) -> set[tuple[str, int, str, int]]:
        """Keys (tensor, step, codec, draw) of the rows that are there."""
        return set(self._connection.execute(f"SELECT {', '.join(KEY)} FROM rows"))  # noqa: S608

    def without_optimum(self) -> set[tuple[str, int, str, int]]:
        """Keys of expectations beside which no optimum was worked out, though the gradient is not zero."""
        return set(
            self._connection.execute(
                f"SELECT {', '.join(KEY)} FROM rows WHERE draw = ? AND optimal_variance IS NULL AND energy > 0",  # noqa: S608
                (EXPECTATION,),
            )
        )

    def add(
        self,
        rows: Iterable[Mapping[str, Any]],
        times: Iterable[tuple[str, int, str, int, str, float]] = (),
        warnings: Iterable[str] = (),
        details: Iterable[tuple[str, int, str, object]] = (),
        tables: Iterable[Table] = (),
    ) -> None:
        """Commit rows (dictionaries by column name, absent ones NULL), and rows in columns, in one transaction."""
        try:
            with self._connection as sql:
                sql.execute("BEGIN")
                self._add_rows(rows)
                for table in tables:
                    self._add_table(table)
                sql.executemany(
                    "INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?)",
                    [
                        (self._text(tensor), step, self._codec({"codec": codec}), draw, self._text(stage), seconds)
                        for tensor, step, codec, draw, stage, seconds in times
                    ],
                )
                sql.executemany("INSERT OR IGNORE INTO warnings VALUES (?)", [(text,) for text in warnings])
                sql.executemany(
                    "INSERT OR REPLACE INTO details VALUES (?, ?, ?, ?)",
                    [(tensor, step, what, json.dumps(value)) for tensor, step, what, value in details],
                )
        except BaseException:
            # Numbers that were given in what is now rolled back are free again.
            self._number_texts()
            raise

    def _number_texts(self) -> None:
        self._texts = {text: number for number, text in self._connection.execute("SELECT id, text FROM texts")}
        self._codecs = {text: number for number, text in self._connection.execute("SELECT id, codec FROM codecs")}

    def _text(self, name: str) -> int:
        number = self._texts.get(name)
        if number is None:
            number = self._connection.execute("INSERT INTO texts (text) VALUES (?)", (name,)).lastrowid
            assert number is not None
            self._texts[name] = number
        return number

    def _codec(self, identity: Mapping[str, Any]) -> int:
        spec = identity["codec"]
        number = self._codecs.get(spec)
        if number is None:
            about = (spec, *(_plain(identity.get(name)) for name in OF_CODEC))
            number = self._connection.execute(
                "INSERT INTO codecs (codec, method, bits, params) VALUES (?, ?, ?, ?)", about
            ).lastrowid
            assert number is not None
            self._codecs[spec] = number
        return number

    def _cell(self, name: str, value: Any) -> Any:
        if name in TEXTS:
            return None if value is None else self._text(value)
        return _plain(value)

    def _statement(self, given: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """The statement that inserts rows with these columns, and those of them that are measured."""
        found = self._statements.get(given)
        if found is None:
            names = tuple(name for name in given if name in _MEASURED)
            columns = ", ".join((*KEY, *names))
            marks = ", ".join("?" * (4 + len(names)))
            found = self._statements[given] = (f"INSERT OR REPLACE INTO cells ({columns}) VALUES ({marks})", names)  # noqa: S608
        return found

    def _add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        groups: dict[tuple[str, ...], list[tuple[Any, ...]]] = {}
        for row in rows:
            given = tuple(row)
            key = (self._text(row["tensor"]), row["step"], self._codec(row), row["draw"])
            groups.setdefault(given, []).append(
                key + tuple(self._cell(name, row[name]) for name in self._statement(given)[1])
            )
        for given, cells in groups.items():
            self._connection.executemany(self._statement(given)[0], cells)

    def _add_table(self, table: Table) -> None:
        # SQLite takes NaN as NULL.
        numbers = [np.where(np.isfinite(column), column, np.nan).tolist() for column in table.numbers.values()]
        codecs = [self._codec(identity) for identity in table.identities]
        statement, _ = self._statement((*table.same, *table.texts, *table.numbers))
        self._connection.executemany(
            statement,
            zip(
                repeat(self._text(table.tensor)),
                repeat(table.step),
                codecs,
                repeat(table.draw),
                *(repeat(self._cell(name, value)) for name, value in table.same.items()),
                *([self._cell(name, value) for value in values] for name, values in table.texts.items()),
                *numbers,
            ),
        )

    def close(self) -> None:
        """Close; the write-ahead log is folded into the one file, which readers then leave alone.

        While another process reads, the file stays one with a log beside it, as valid, which the next sweep folds in.
        """
        with closing(self._connection) as sql:
            # All rows are committed: a reader is not worth the wait of a writer.
            sql.execute("PRAGMA busy_timeout = 0")
            try:
                sql.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                    raise

    @classmethod
    def load(cls, path: Path) -> SweepResult:
        """Read a finished or unfinished sweep, rows ordered by (tensor, step, codec, draw).

        Raises:
            TraceError: missing, not a sweep, damaged, or from a newer version.
        """
        if not path.is_file():
            raise TraceError(f"{path}: no such file; `gtrace sweep TRACE` makes one")
        meta = cls._meta(path)
        try:
            with closing(_open_to_read(path)) as sql:
                # One moment of the file, whatever another process adds to it meanwhile.
                sql.execute("BEGIN")
                if meta["version"] < VERSION:
                    present(sql)
                columns = read_rows(sql)
                warnings = tuple(text for (text,) in sql.execute("SELECT text FROM warnings ORDER BY text"))
                times = read_times(sql)
                details = {
                    (tensor, step, what): json.loads(value)
                    for tensor, step, what, value in sql.execute("SELECT * FROM details ORDER BY tensor, step, what")
                }
        except (sqlite3.Error, ValueError) as error:
            raise TraceError(f"{path}: damaged sweep ({error}); run the sweep again with --force") from None
        return SweepResult(columns, dict(meta.get("provenance") or {}), warnings, times, details)
