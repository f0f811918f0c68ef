"""The store of a sweep: one SQLite file, resumable, safe under kill -9, readable by any SQL tool."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import OutputExistsError, TraceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

FORMAT = "gtrace-sweep"
VERSION = 1

#: draw number of a row of expectations
EXPECTATION = -1

#: Columns of a row: name -> (SQL type, unit or meaning). REAL columns hold NULL for "not measured".
COLUMNS: dict[str, tuple[str, str]] = {
    "tensor": ("TEXT", "parameter name; * for the whole model"),
    "step": ("INTEGER", "training step"),
    "codec": ("TEXT", "canonical spec string"),
    "draw": ("INTEGER", "-1: expectation; 0, 1, ...: one keyed encoding each"),
    "method": ("TEXT", "codec name, with its prefixes: ef:topk"),
    "bits": ("INTEGER", "nominal bits, NULL where the codec has none"),
    "params": ("TEXT", "JSON object of all parameters"),
    "n": ("INTEGER", "elements"),
    "energy": ("REAL", "||g||^2"),
    "squared_error": ("REAL", "||Q(g) - g||^2, expected or realized"),
    "relative_variance": ("REAL", "squared_error / energy"),
    "relative_variance_bound": ("REAL", "how far the expected one can be off (bins of the sketch)"),
    "optimal_variance": ("REAL", "least relative variance of any levels of the same number on this tensor"),
    "times_optimal": ("REAL", "relative_variance / optimal_variance"),
    "model_variance": ("REAL", "what a parametric law promised for the levels that were fitted to it"),
    "relative_bias": ("REAL", "||E Q(g) - g|| / ||g||"),
    "mean_relative_error": ("REAL", "mean |Q(g) - g| / |g| over non-zero g"),
    "mean_abs_error": ("REAL", "mean |Q(g) - g|"),
    "mean_abs": ("REAL", "mean |g|"),
    "cosine": ("REAL", "cosine of Q(g) and g"),
    "snr_db": ("REAL", "10 log10(energy / squared_error)"),
    "w1": ("REAL", "Wasserstein-1 of the value distributions"),
    "w1_normalized": ("REAL", "w1 / mean |g|"),
    "w1_mcgq": ("REAL", "W1 of g/||g||_1 and Q/||Q||_1, MCGQ's d_t"),
    "w1_method": ("TEXT", "exact or sketch"),
    "bits_fixed": ("REAL", "bits per coordinate, fixed width, norms included"),
    "bits_entropy": ("REAL", "bits per coordinate at the entropy, norms included"),
    "bits_huffman": ("REAL", "bits per coordinate, Huffman, norms included"),
    "bits_payload": (
        "REAL",
        "bits per coordinate of the payload body: measured in a draw, expected otherwise",
    ),
    "bits_norms": ("REAL", "part of bits_payload that norms take"),
    "bits_shared": ("REAL", "bits per coordinate of shared bytes sent at this step (0 when unchanged)"),
    "bits_envelope": ("REAL", "bits per coordinate of the envelope, not in bits_payload"),
    "max_bits": ("INTEGER", "widest symbol of the payload"),
    "bits_total": ("REAL", "bits_payload + bits_shared: what is compared"),
    "ratio_float32": ("REAL", "32 / bits_total"),
    "ratio_dtype": ("REAL", "bits of the run's own dtype / bits_total"),
    "sparsity_asked": (
        "REAL",
        "fraction of zeros asked of this tensor; one draw scatters by up to sqrt(s (1 - s) / n)",
    ),
    "sparsity": ("REAL", "fraction of zeros after decoding"),
    "saturated": ("REAL", "fraction clipped or saturated"),
    "flushed": ("REAL", "fraction of non-zeros that underflowed to zero"),
    "fitted_on": ("TEXT", "itself | previous | step N | - : the data that levels and codes were fitted on"),
    "note": ("TEXT", "why a value is missing, or open-loop"),
}
_POSITIONS = {name: position for position, name in enumerate(COLUMNS)}
KEY = ("tensor", "step", "codec", "draw")
#: Columns of the table of times.
_TIMES = tuple(
    zip(
        ("tensor", "step", "codec", "draw", "stage", "seconds"),
        ("TEXT", "INTEGER", "TEXT", "INTEGER", "TEXT", "REAL"),
        strict=True,
    )
)
#: Rows that are read at a time.
_CHUNK = 20_000


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


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _cells(row: Mapping[str, Any]) -> list[Any]:
    cells = [None] * len(COLUMNS)
    for name, value in row.items():
        position = _POSITIONS.get(name)
        if position is not None:
            cells[position] = value if type(value) in (str, int) else _plain(value)
    return cells


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
                return cls(cls._connect(path), path)
            if not force:
                why = "holds a sweep of other data or settings" if found else "is not a sweep"
                raise OutputExistsError(
                    f"{path}: exists already and {why}; it was left untouched: pass --force or another -o"
                )
            for suffix in ("", "-wal", "-shm", "-journal"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        store = cls(cls._connect(path), path)
        columns = ", ".join(f"{name} {kind}" for name, (kind, _) in COLUMNS.items())
        with store._connection as sql:
            sql.execute("CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID")
            sql.execute(f"CREATE TABLE rows ({columns}, PRIMARY KEY ({', '.join(KEY)})) WITHOUT ROWID")
            sql.execute(
                "CREATE TABLE times (tensor TEXT, step INTEGER, codec TEXT, draw INTEGER, stage TEXT, seconds REAL)"
            )
            sql.execute("CREATE TABLE warnings (text TEXT PRIMARY KEY) WITHOUT ROWID")
            sql.execute(
                "CREATE TABLE details (tensor TEXT, step INTEGER, what TEXT, value TEXT,"
                " PRIMARY KEY (tensor, step, what)) WITHOUT ROWID"
            )
            meta = {
                "format": FORMAT,
                "version": VERSION,
                "fingerprint": fingerprint,
                "provenance": provenance,
            }
            sql.executemany("INSERT INTO meta VALUES (?, ?)", [(k, json.dumps(v)) for k, v in meta.items()])
        return store

    @staticmethod
    def _connect(path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=30)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
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
        rows: Sequence[Mapping[str, Any]],
        times: Iterable[tuple[str, int, str, int, str, float]] = (),
        warnings: Iterable[str] = (),
        details: Iterable[tuple[str, int, str, object]] = (),
    ) -> None:
        """Commit rows (dictionaries by column name, absent ones NULL) in one transaction."""
        marks = ", ".join("?" * len(COLUMNS))
        with self._connection as sql:
            sql.executemany(
                f"INSERT OR REPLACE INTO rows VALUES ({marks})",  # noqa: S608
                map(_cells, rows),
            )
            sql.executemany("INSERT INTO times VALUES (?, ?, ?, ?, ?, ?)", times)
            sql.executemany("INSERT OR IGNORE INTO warnings VALUES (?)", [(text,) for text in warnings])
            sql.executemany(
                "INSERT OR REPLACE INTO details VALUES (?, ?, ?, ?)",
                [(tensor, step, what, json.dumps(value)) for tensor, step, what, value in details],
            )

    def close(self) -> None:
        """Close; the write-ahead log is folded into the one file, which readers then leave alone."""
        self._connection.execute("PRAGMA journal_mode=DELETE")
        self._connection.close()

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
                names = list(COLUMNS)
                columns = _columns(
                    sql.execute(f"SELECT {', '.join(names)} FROM rows ORDER BY {', '.join(KEY)}"),  # noqa: S608
                    [(name, kind) for name, (kind, _) in COLUMNS.items()],
                )
                warnings = tuple(text for (text,) in sql.execute("SELECT text FROM warnings ORDER BY text"))
                times = _columns(
                    sql.execute(f"SELECT {', '.join(name for name, _ in _TIMES)} FROM times"),  # noqa: S608
                    _TIMES,
                )
                details = {
                    (tensor, step, what): json.loads(value)
                    for tensor, step, what, value in sql.execute("SELECT * FROM details ORDER BY tensor, step, what")
                }
        except (sqlite3.Error, ValueError) as error:
            raise TraceError(f"{path}: damaged sweep ({error}); run the sweep again with --force") from None
        return SweepResult(columns, dict(meta.get("provenance") or {}), warnings, times, details)


def _columns(cursor: sqlite3.Cursor, kinds: Sequence[tuple[str, str]]) -> dict[str, NDArray[Any]]:
    """What a query found, as columns. Rows become arrays by the chunk: as objects they take five times the memory."""
    parts: list[list[NDArray[Any]]] = [[] for _ in kinds]
    texts: dict[str, str] = {}
    while rows := cursor.fetchmany(_CHUNK):
        for (_, kind), part, values in zip(kinds, parts, zip(*rows, strict=True), strict=True):
            part.append(_array(values, kind, texts))
    empty = [_array((), kind, texts) for _, kind in kinds]
    return {name: np.concatenate(part or [none]) for (name, _), part, none in zip(kinds, parts, empty, strict=True)}


def _array(values: Sequence[Any], kind: str, texts: dict[str, str]) -> NDArray[Any]:
    if kind == "TEXT":
        # The same few names stand in every row: one object for each.
        return np.array([texts.setdefault(value, value) for value in values], dtype=object)
    if kind == "INTEGER" and None not in values:
        return np.array(values, dtype=np.int64)
    # None becomes NaN.
    return np.array(values, dtype=np.float64)
