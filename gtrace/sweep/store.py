"""The store of a sweep: one SQLite file with one writer, resumable, safe under kill -9, readable by any SQL tool."""

from __future__ import annotations

import fcntl
import json
import math
import os
import sqlite3
import time
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from gtrace.errors import OutputExistsError, TraceError, need_folder
from gtrace.sweep.reading import (
    check_ends,
    content_bytes,
    read_details,
    read_meta,
    read_rows,
    read_times,
    read_warnings,
    reading,
    restrict,
)
from gtrace.sweep.schema import (
    ALIASES,
    EXPECTATION,
    FORMAT,
    KEY,
    MEASURED,
    OF_CODEC,
    ROWS,
    TEXTS,
    VERSION,
    create,
    nonfinite_line,
)
from gtrace.trace.files import lock_file
from gtrace.types import Tabular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray


#: attempts to lock a file, and seconds between them
_TRIES, _PAUSE = 5, 0.02


@contextmanager
def own(path: Path) -> Iterator[bool]:
    """Make a file this process's own until the block ends or the process dies; creates the file if needed.

    The lock covers the whole file (flock) and is independent of those that SQLite takes on parts of it. This process
    must not close the file while SQLite has it open: that would drop SQLite's own locks.

    Yields:
        whether the file was created here.

    Raises:
        OutputExistsError: another process, or another thread of this one, owns the file.
        OSError: it cannot be opened for writing.
    """
    flags = os.O_RDWR | os.O_CLOEXEC
    try:
        descriptor, new = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666), True
    except FileExistsError:
        if not path.is_file():
            raise OutputExistsError(f"{path}: exists already and is not a file; choose another -o") from None
        descriptor, new = os.open(path, flags), False
    _owned.add(descriptor)
    try:
        if not _locked(descriptor) or not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise OutputExistsError(
                f"{path}: another sweep is writing this file; wait for its end, or choose another -o"
            )
        yield new
    finally:
        _owned.discard(descriptor)
        os.close(descriptor)


def _holds_nothing(path: Path) -> bool:
    """Whether it is a database without tables, or empty: its sweep was killed before it began."""
    with suppress(TraceError), reading(path, locked=True) as sql:
        return sql.execute("SELECT 1 FROM sqlite_master").fetchone() is None
    return False


def _locked(descriptor: int) -> bool:
    for _ in range(_TRIES):
        if lock_file(descriptor, fcntl.LOCK_EX):
            return True
        # Readers look whether a sweep owns the file, and let go at once.
        time.sleep(_PAUSE)
    return False


#: files that this process owns
_owned: set[int] = set()


def _disown() -> None:
    """In a forked process: a copy of the descriptor would keep the file owned after the owner's death."""
    while _owned:
        os.close(_owned.pop())


os.register_at_fork(after_in_child=_disown)


_MEASURED = frozenset(MEASURED)
#: a row by column name
Row: TypeAlias = dict[str, Any]
#: SQLite's error codes for the disk and its contents, without the detail in the upper bits
_DISK = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
)


@dataclass(frozen=True, slots=True, repr=False)
class SweepResult(Tabular):
    """Rows of a sweep as columns.

    Attributes:
        columns: column name -> array of length n_rows; text as object arrays, numbers as float64 or int64
            (a missing integer makes the column float64 with NaN).
        provenance: command, versions, seed, trace fingerprint and other facts about the run.
        warnings: one line for each thing that was skipped or cannot be trusted.
        times: columns of the table of times, kept apart so that rows are reproducible.
        details: (tensor, step, what) -> value, at each tensor's last step of a sweep with fitted levels:
            ``levels SPEC`` (levels, zero, law), ``density LAW`` (edges, share, energy, zeros, below) and
            ``convergence`` (codec, objective by start, best); see ``gtrace.sweep.rows``. At every step with known
            noise, ``noise`` (variance, signal, freedom): the fields of :class:`gtrace.noise.Noise`. For predictions
            of what noise costs ``samples`` and ``cost SPEC``, see :mod:`gtrace.sweep.noise_cost`.
        selection: what was asked for last: ``codecs``, ``steps`` and ``tensors``, each a list.
    """

    columns: dict[str, NDArray[Any]]
    provenance: dict[str, Any]
    warnings: tuple[str, ...] = ()
    times: dict[str, NDArray[Any]] | None = None
    details: dict[tuple[str, int, str], Any] = field(default_factory=dict)
    selection: dict[str, list[Any]] = field(default_factory=dict)

    @property
    def selected(self) -> SweepResult:
        """The rows that were asked for last; rows of earlier selections are left out."""
        if not self.selection:
            return self
        keep = np.ones(len(self), np.bool_)
        for column, name in (("codec", "codecs"), ("step", "steps"), ("tensor", "tensors")):
            wanted = set(self.selection[name])
            keep &= np.fromiter((value in wanted for value in self.columns[column].tolist()), np.bool_, len(self))
        if keep.all():
            return self
        columns = {name: column[keep] for name, column in self.columns.items()}
        others = [text for text in self.warnings if text not in _of_rows(self.columns)]
        return replace(self, columns=columns, warnings=(*_of_rows(columns), *others))

    def __len__(self) -> int:
        return len(self.columns["tensor"])

    def __getitem__(self, name: str) -> NDArray[Any]:
        """A column; ``vnmse``, as papers call it, is ``relative_variance``."""
        return self.columns[ALIASES.get(name, name)]

    def rows(self) -> Iterator[dict[str, Any]]:
        """Rows as dictionaries, in the order of the columns."""
        names = list(self.columns)
        for values in zip(*self.columns.values(), strict=True):
            yield dict(zip(names, values, strict=True))

    def __repr__(self) -> str:
        codecs, tensors, steps = (len(set(self[name].tolist())) for name in ("codec", "tensor", "step"))
        return f"<SweepResult: {len(self)} rows, {codecs} codecs on {tensors} tensors at {steps} steps>"

    def frame_columns(self) -> dict[str, NDArray[Any]]:
        """The rows, as in ``columns``."""
        return self.columns


class RowTable(NamedTuple):
    """Rows of one step as columns.

    Attributes:
        identities: per row, the columns that identify its codec.
        columns: name -> one value for all rows, or an array with one per row; non-finite numbers are stored as NULL.
    """

    identities: Sequence[Mapping[str, Any]]
    columns: dict[str, Any]

    def chosen(self, places: Sequence[int] | NDArray[np.int64]) -> RowTable:
        """Some of the rows, in this order."""
        columns = {
            name: values[places] if isinstance(values, np.ndarray) else values for name, values in self.columns.items()
        }
        return RowTable([self.identities[place] for place in places], columns)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a pipe: the columns of float64 as one block, because pickle takes a microsecond or two for each array."""
        found = {
            name: values
            for name, values in self.columns.items()
            if isinstance(values, np.ndarray) and values.dtype == np.float64
        }
        rest = {name: None if name in found else values for name, values in self.columns.items()}
        block = np.concatenate([*found.values()]).tobytes() if found else b""
        return _table, (self.identities, list(found), rest, block)


def _table(identities: Sequence[Mapping[str, Any]], numbers: list[str], rest: dict[str, Any], block: bytes) -> RowTable:
    """Undo :meth:`RowTable.__reduce__`."""
    columns = np.frombuffer(block, np.float64).reshape(len(numbers), -1) if numbers else ()
    return RowTable(identities, {**rest, **dict(zip(numbers, columns, strict=True))})


def _of_rows(columns: Mapping[str, NDArray[Any]]) -> tuple[str, ...]:
    """The warnings that rows say by themselves."""
    return nonfinite_line(zip(*(columns[name].tolist() for name in ("tensor", "step", "note")), strict=True))


def _plain(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else None
    return _plain(value.item()) if isinstance(value, np.generic) else value


class ResultStore:
    """The SQLite file of one sweep.

    One writer owns the file until it is closed and commits rows in transactions; after kill -9 the file opens with
    every committed row.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path, owner: ExitStack) -> None:
        self._connection = connection
        self._owner = owner
        self.path = path
        self._statements: dict[tuple[str, ...], tuple[str, tuple[str, ...]]] = {}
        self._number_texts()

    @classmethod
    def create(
        cls,
        path: Path,
        provenance: Mapping[str, Any],
        fingerprint: str,
        *,
        force: bool,
        earlier: Callable[[Mapping[str, Any]], str] = lambda _: "",
    ) -> ResultStore:
        """Open ``path`` for writing: resume it when its fingerprint is the same; with ``force`` start over.

        Args:
            path: the file.
            provenance: of a new sweep, or of one whose trace has grown.
            fingerprint: the sweep's identity.
            force: replace what is there.
            earlier: provenance of the sweep that is there -> what its identity was if its trace has grown since.

        Raises:
            OutputExistsError: something else is at ``path`` and ``force`` is off, or another sweep is writing it.
            UsageError: its folder does not exist.
            TraceError: it cannot be written.
        """
        need_folder(path)
        with ExitStack() as owner, _writing(path):
            new = owner.enter_context(own(path))
            if not new:
                try:
                    found, before = cls._identity(path)
                except TraceError:
                    found, before = None, {}
                grown = found is not None and found != fingerprint and not force and found == earlier(before)
                if (found == fingerprint or grown) and not force:
                    store = cls(cls._connect(path), path, owner.pop_all())
                    if grown:
                        # Noise is estimated from a step and its neighbors: the last two of a tensor had not all.
                        with store._connection as sql:
                            sql.execute(
                                "DELETE FROM cells WHERE (tensor, step) IN (SELECT tensor, step FROM (SELECT tensor, "
                                "step, DENSE_RANK() OVER (PARTITION BY tensor ORDER BY step DESC) AS place FROM cells) "
                                "WHERE place <= 2)"
                            )
                        store.note(fingerprint=fingerprint, provenance=provenance)
                    return store
                if not force and not _holds_nothing(path):
                    why = (
                        "holds a sweep of other data or settings"
                        if found
                        else "is not a sweep that this gtrace can add to"
                    )
                    raise OutputExistsError(
                        f"{path} already exists and {why}. Use --force to replace it or -o to write elsewhere."
                    )
                for suffix in ("", "-wal", "-shm", "-journal"):
                    path.with_name(path.name + suffix).unlink(missing_ok=True)
                new = owner.enter_context(own(path))
            try:
                connection = cls._start(path, provenance, fingerprint)
            except BaseException:
                if new:
                    path.unlink(missing_ok=True)
                raise
            return cls(connection, path, owner.pop_all())

    @classmethod
    @contextmanager
    def reopen(cls, path: Path) -> Iterator[ResultStore]:
        """Open a sweep that is there, to add to it."""
        store = cls.create(path, {}, cls._identity(path)[0] or "", force=False)
        try:
            yield store
        finally:
            store.close()

    @classmethod
    def _start(cls, path: Path, provenance: Mapping[str, Any], fingerprint: str) -> sqlite3.Connection:
        connection = cls._connect(path)
        meta = {"format": FORMAT, "version": VERSION, "fingerprint": fingerprint, "provenance": provenance}
        with connection as sql:
            # Python itself opens no transaction for statements that define tables.
            sql.execute("BEGIN")
            create(sql)
            sql.executemany("INSERT INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in meta.items()])
        return connection

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=30)
        restrict(connection)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        return connection

    @staticmethod
    def _identity(path: Path) -> tuple[str | None, dict[str, Any]]:
        """Fingerprint and provenance of the sweep that is there."""
        with reading(path, locked=True) as sql:
            meta = read_meta(sql, path)
            check_ends(sql, content_bytes(path))
            # Fails if a table lacks a column.
            sql.execute(f"SELECT 1 FROM ({ROWS}) LIMIT 1")  # noqa: S608
        value = meta.get("fingerprint")
        return value if isinstance(value, str) else None, meta.get("provenance", {})

    def done(self) -> dict[tuple[str, int, str, int], int | None]:
        """Key (tensor, step, codec, draw) of each stored row -> steps in the window that ends with it.

        0 for a row without numbers: its gradient holds NaN or infinity.
        """
        with _writing(self.path):
            found = self._connection.execute(
                f"SELECT {', '.join(KEY)}, CASE WHEN energy IS NULL THEN 0 ELSE window END FROM ({ROWS})"  # noqa: S608
            )
            return {(tensor, step, codec, draw): window for tensor, step, codec, draw, window in found}

    def details(self) -> set[tuple[str, int, str]]:
        """(tensor, step, what) of the details that are there."""
        return set(self._connection.execute("SELECT tensor, step, what FROM details"))

    def note(self, **facts: Any) -> None:
        """Remember facts about the sweep: ``selection`` is what was asked for last, which reports show."""
        with _writing(self.path), self._connection as sql:
            sql.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in facts.items()])

    def check_plans(self, digests: Mapping[str, str]) -> None:
        """Refuse to add rows of a plan to those of another plan of the same name.

        Args:
            digests: name as in the rows -> digest of the plan.

        Raises:
            OutputExistsError: the file holds such rows.
        """
        for name, params in self._connection.execute("SELECT codec, params FROM codecs").fetchall():
            if name in digests and json.loads(params).get("digest") != digests[name]:
                raise OutputExistsError(
                    f"{self.path}: holds rows of another {name}; use --force, another -o, or another name for the plan"
                )

    def without_optimum(self) -> set[tuple[str, int, str, int]]:
        """Keys of expectations that lack an optimum, though the gradient is not zero."""
        return set(
            self._connection.execute(
                f"SELECT {', '.join(KEY)} FROM ({ROWS}) WHERE draw = ? AND optimal_variance IS NULL AND energy > 0",  # noqa: S608
                (EXPECTATION,),
            )
        )

    def add(
        self,
        rows: Iterable[Mapping[str, Any]],
        times: Iterable[tuple[str, int, str, int, str, float]] = (),
        warnings: Iterable[str] = (),
        details: Iterable[tuple[str, int, str, object]] = (),
        tables: Iterable[RowTable] = (),
    ) -> None:
        """Commit rows (dictionaries by column name, absent ones NULL), and rows in columns, in one transaction.

        Raises:
            TraceError: the disk is full or failed; earlier commits are kept.
        """
        try:
            with _writing(self.path), self._connection as sql:
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
            # Numbers assigned in the transaction that is now rolled back are free again.
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

    def _statement(self, given: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
        """The statement that inserts rows with these columns, and the measured ones among them."""
        found = self._statements.get(given)
        if found is None:
            names = tuple(name for name in given if name in _MEASURED)
            columns = ", ".join((*KEY, *names))
            marks = ", ".join("?" * (4 + len(names)))
            found = self._statements[given] = (f"INSERT OR REPLACE INTO cells ({columns}) VALUES ({marks})", names)  # noqa: S608
        return found

    def _add_rows(self, rows: Iterable[Mapping[str, Any]]) -> None:
        for row in rows:
            statement, names = self._statement(tuple(row))
            row = {**row, **{name: self._text(row[name]) for name in TEXTS if row.get(name) is not None}}
            key = (self._text(row["tensor"]), row["step"], self._codec(row), row["draw"])
            self._connection.execute(statement, (*key, *(_plain(row[name]) for name in names)))

    def _add_table(self, table: RowTable) -> None:
        columns = table.columns
        statement, names = self._statement(tuple(columns))
        cells: dict[str, Any] = {"codec": [self._codec(one) for one in table.identities]}
        numbers = [
            name for name in names if isinstance(columns[name], np.ndarray) and columns[name].dtype == np.float64
        ]
        if numbers:
            # SQLite takes NaN as NULL.
            block = np.array([columns[name] for name in numbers])
            block[np.isinf(block)] = np.nan
            cells.update(zip(numbers, block.tolist(), strict=True))
        for name in (*KEY, *names):
            if name not in cells:
                values = columns[name]
                texts = name in TEXTS or name == "tensor"
                listed = values.tolist() if isinstance(values, np.ndarray) else [values]
                if texts:
                    listed = [None if value is None else self._text(value) for value in listed]
                cells[name] = listed if isinstance(values, np.ndarray) else _plain(listed[0])
        ordered = [cells[name] for name in (*KEY, *names)]
        self._connection.executemany(
            statement, zip(*(cell if isinstance(cell, list) else repeat(cell) for cell in ordered), strict=False)
        )

    def close(self) -> None:
        """Close; folds the write-ahead log into the one file, which readers then leave unchanged.

        While another process reads, the file keeps a valid log beside it, which the next sweep folds in.
        """
        with self._owner, closing(self._connection) as sql:
            # All rows are committed: do not wait for a reader. What a full disk leaves in the
            # log stays valid there.
            sql.execute("PRAGMA busy_timeout = 0")
            try:
                sql.execute("PRAGMA journal_mode=DELETE")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY and error.sqlite_errorcode & 0xFF not in _DISK:
                    raise

    @classmethod
    def load(cls, path: Path, *, brief: bool = False) -> SweepResult:
        """Read a finished or unfinished sweep, rows ordered by (tensor, step, codec, draw).

        ``brief``: of the rows their keys and notes alone, and neither times nor details.

        Raises:
            TraceError: missing, not a sweep, damaged, or of another version.
        """
        with reading(path) as sql:
            meta = read_meta(sql, path)
            # One snapshot of the file, whatever another process adds meanwhile.
            sql.execute("BEGIN")
            limit = content_bytes(path)
            columns = read_rows(sql, limit, ("note",) if brief else MEASURED)
            lines = read_warnings(sql, limit)
            times = None if brief else read_times(sql, limit)
            details = {} if brief else read_details(sql, limit)
        lines = (*_of_rows(columns), *lines)
        return SweepResult(columns, meta.get("provenance", {}), lines, times, details, meta.get("selection", {}))


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Report a disk's refusal in one line."""
    try:
        yield
    except sqlite3.Error as error:
        if error.sqlite_errorcode & 0xFF not in _DISK:
            raise
        raise TraceError(f"{path}: cannot be written ({error}); what was finished before is kept") from error
    except OSError as error:
        raise TraceError(f"{path}: cannot be written ({error.strerror})") from error
