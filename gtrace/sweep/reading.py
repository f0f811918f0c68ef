"""Read a result file into columns. The file may come from anyone, so it is checked first."""

from __future__ import annotations

import errno
import fcntl
import json
import shutil
import sqlite3
import tempfile
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError, printable
from gtrace.sweep.schema import COLUMNS, FORMAT, KEY, MEASURED, OF_CODEC, TABLES, TEXTS, VERSION
from gtrace.trace.files import check_room, lock_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray


#: length of the longest text that is read from a file
MAX_TEXT = 1 << 26
#: characters of a name or a warning, and warnings, that are read
MAX_NAME, MAX_WARNINGS = 4096, 10_000
# How a journal ends that names a super-journal, which SQLite deletes after the rollback; one database needs none.
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")


@contextmanager
def reading(path: Path, *, locked: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection that reads a result file and turns its errors into one line; the folder stays as it was.

    A file that no sweep is writing is read without locks, logs or rollbacks. What a killed writer left beside it is
    applied to a copy.

    Args:
        path: the file.
        locked: the caller holds its lock, so no other sweep is writing it.

    Raises:
        TraceError: the file, or one beside it, is not a result file, is damaged, or could do harm; or the disk has no
            room for the copy.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no such file; `gtrace sweep TRACE` makes one")
    try:
        with ExitStack() as stack:
            place, mode = path.resolve(), "mode=ro&immutable=1"
            left = _left_beside(place)
            if not locked and is_owned(place):
                mode = "mode=ro"
            elif left:
                place = _copied(place, left, stack.enter_context(tempfile.TemporaryDirectory(prefix="gtrace-")))
                mode = "mode=rw"
            sql = stack.enter_context(closing(sqlite3.connect(f"{place.as_uri()}?{mode}", uri=True)))
            restrict(sql)
            yield sql
    except (OSError, sqlite3.Error, ValueError, RecursionError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise TraceError(
                f"{path}: a killed sweep left a log beside it, and {tempfile.gettempdir()} has no room for a copy; "
                "resume the sweep, or set TMPDIR"
            ) from None
        reason = "nested too deep" if isinstance(error, RecursionError) else printable(str(error))
        raise TraceError(
            f"{path}: not a gtrace sweep, or a damaged one ({reason}); run the sweep again with --force"
        ) from None


def is_owned(path: Path) -> bool:
    """Whether a sweep is writing the file, see :func:`gtrace.sweep.store.own`."""
    with path.open("rb") as file:
        return not lock_file(file.fileno(), fcntl.LOCK_SH)


def restrict(sql: sqlite3.Connection) -> None:
    """Make a connection distrust everything that the file itself defines."""
    sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT)
    sql.execute("PRAGMA trusted_schema=OFF")
    sql.execute("PRAGMA cell_size_check=ON")


def _left_beside(path: Path) -> list[Path]:
    """The log and the journal that a killed writer left, if they hold anything.

    Raises:
        ValueError: gtrace did not write them.
    """
    left = []
    for file in (path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-journal")):
        if file.is_symlink() or (file.exists() and not file.is_file()):
            raise ValueError(f"{file.name} is not a regular file")
        if not file.exists() or not file.stat().st_size:
            continue
        with file.open("rb") as opened:
            opened.seek(max(0, file.stat().st_size - len(_SUPER_JOURNAL)))
            if opened.read() == _SUPER_JOURNAL and file.name.endswith("-journal"):
                raise ValueError(f"{file.name} names another file that would be deleted")
        left.append(file)
    return left


def _copied(path: Path, left: list[Path], folder: str) -> Path:
    check_room(folder, sum(file.stat().st_size for file in (path, *left)))
    for file in (path, *left):
        shutil.copyfile(file, Path(folder, file.name))
    return Path(folder, path.name)


def content_bytes(path: Path) -> int:
    """Bytes of a result file, its log and its journal: an upper bound on its rows and texts."""
    place = path.resolve()
    files = [place.with_name(place.name + end) for end in ("", "-wal", "-journal")]
    return sum(file.stat().st_size for file in files if file.exists())


def bounded(rows: Iterator[tuple[Any, ...]], limit: int) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, as long as their number and their texts fit into a file of ``limit`` bytes.

    Raises:
        ValueError: they do not fit: pages repeat.
    """
    for row in rows:
        limit -= 1 + sum(len(value) for value in row if isinstance(value, (str, bytes)))
        if limit < 0:
            raise ValueError("more content than the file has bytes")
        yield row


def check_ends(sql: sqlite3.Connection, limit: int) -> None:
    """Check that every table ends within ``limit`` rows.

    Raises:
        ValueError: a table does not.
    """
    for table in TABLES:
        # Count the rows themselves: a damaged index may end although its table does not.
        query = f"SELECT count(*) FROM (SELECT 1 FROM {table} NOT INDEXED LIMIT ?)"  # noqa: S608
        if sql.execute(query, (limit,)).fetchone()[0] >= limit:
            raise ValueError(f"more rows in {table} than the file has bytes")


def read_meta(sql: sqlite3.Connection, path: Path) -> dict[str, Any]:
    """What a result file says about itself, after its tables were checked.

    Raises:
        TraceError: not a gtrace sweep, or of another version.
        ValueError, sqlite3.Error: damaged.
    """
    _check_plain(sql, ("meta",))
    meta = {k: load_json(v) for k, v in bounded(sql.execute("SELECT key, value FROM meta"), content_bytes(path))}
    if meta.get("format") != FORMAT:
        raise TraceError(f"{path}: not a gtrace sweep; pass the .sweep.db that `gtrace sweep` wrote")
    version = meta.get("version")
    if type(version) is not int or version != VERSION:
        shown = printable(str(version)[:40])
        raise TraceError(
            f"{path}: written by another gtrace (format {shown}, this one reads {VERSION}); "
            "run the sweep again with --force"
        )
    if not isinstance(meta.get("provenance", {}), dict):
        raise ValueError("its provenance is not an object")  # noqa: TRY004 - damage
    selection = meta.get("selection")
    if selection is not None and not (
        isinstance(selection, dict)
        and set(selection) == _SELECTED
        and all(isinstance(v, list) and all(isinstance(one, (str, int)) for one in v) for v in selection.values())
    ):
        raise ValueError("its selection is not three lists")
    _check_plain(sql, TABLES)
    return meta


#: what a selection names
_SELECTED = {"codecs", "steps", "tensors"}


def load_json(text: object) -> Any:
    """The JSON value in a cell.

    Raises:
        ValueError, RecursionError: it holds none.
    """
    if not isinstance(text, str):
        raise ValueError("a cell needs a text with JSON")  # noqa: TRY004 - damage
    return json.loads(text)


def _check_plain(sql: sqlite3.Connection, tables: tuple[str, ...]) -> None:
    """Raise ValueError unless these are stored tables, without computed columns or triggers."""
    if sql.execute("SELECT 1 FROM sqlite_master WHERE type = 'trigger'").fetchone():
        raise ValueError("it holds triggers")
    query = "SELECT 1 FROM sqlite_master WHERE name = ? AND type = 'table' AND rootpage > 0"
    for name in tables:
        if sql.execute(query, (name,)).fetchone() is None:
            raise ValueError(f"{name} is not a table")
        # The pragma, not the function of that name: a table of the file could shadow the function.
        if any(hidden for *_, hidden in sql.execute(f"PRAGMA table_xinfo({name})")):
            raise ValueError(f"{name} has computed columns")


def check_detail(what: str, value: Any) -> None:
    """Check that a stored detail of a known kind holds what the figures need.

    Raises:
        ValueError: it does not.
    """
    kind = what.partition(" ")[0]
    if kind not in ("levels", "density", "convergence", "noise", "samples", "cost", "exchange"):
        return
    fine = isinstance(value, dict)
    if fine and kind in ("samples", "cost"):
        own = ("signal",) if kind == "samples" else ("variance", "lost", *(("growth",) if "growth" in value else ()))
        fine = _numbers(value.get("gram")) > 0 and _numbers([value.get(name) for name in own]) == len(own)
        fine = fine and isinstance(value.get("from" if kind == "samples" else "unbiased"), (str, bool))
    elif fine and kind == "exchange":
        fine = all(isinstance(value.get(name), str) for name in ("codec", "exchange", "source"))
        names = ("ranks", "error", "energy", "size", "sent", "across")
        fine = fine and _numbers([value.get(name) for name in names]) == len(names)
    elif fine and kind == "levels":
        fine = isinstance(value.get("law"), str) and _numbers(value.get("levels")) > 0
    elif fine and kind == "density":
        classes = _numbers(value.get("share"))
        fine = classes > 0 and (_numbers(value.get("energy")), _numbers(value.get("edges"))) == (classes, classes + 1)
        fine = fine and _numbers([value.get("zeros"), value.get("below")]) == 2
    elif fine and kind == "noise":
        fine = _numbers([value.get(name) for name in ("variance", "signal", "freedom")]) == 3 and value["variance"] >= 0
    elif fine:
        curves = value.get("objective")
        fine = isinstance(curves, dict) and all(_numbers(curve) > 0 for curve in curves.values())
        fine = fine and isinstance(value.get("codec"), str) and _numbers([value.get("best")]) == 1
    if not fine:
        raise ValueError(f"details '{kind}' have another form")


def _numbers(value: Any) -> int:
    """Length of a list of numbers; -1 if it is not one."""
    fine = isinstance(value, list) and all(type(v) in (int, float) and abs(v) < 1e300 for v in value)
    return len(value) if fine else -1


#: Rows held as Python objects at a time: as many as fit into a cache beside their values.
_ROWS = 256
_LARGEST = 2.0**53


def read_rows(sql: sqlite3.Connection, limit: int, measured: Sequence[str] = MEASURED) -> dict[str, NDArray[Any]]:
    """All rows, ordered by (tensor, step, codec, draw), as the columns of ``COLUMNS``, of those measured only some.

    Args:
        sql: a connection to a file whose tables were checked.
        limit: bytes of the file, see :func:`gtrace.sweep.reading.bounded`.

    Returns:
        column name -> array of length n_rows: text as objects, each text once; integers as int64, or as float64 with
        NaN if one is missing; real numbers as float64. A column without any measurement is read-only.

    Raises:
        ValueError: cells that are not numbers, or that refer to texts or codecs that do not exist.
    """
    counts = ", ".join(f"count({name})" for name in measured)
    count, *filled = sql.execute(f"SELECT count(*), {counts} FROM (SELECT * FROM cells LIMIT ?)", (limit,)).fetchone()  # noqa: S608
    there = (name for name, filled_cells in zip(measured, filled, strict=True) if filled_cells)
    found = _read(sql, "cells", (*KEY, *there), count, limit)
    codecs, codec = _named(sql, "codecs", ("codec", *OF_CODEC), found.pop("codec"), limit)
    tensors, tensor = _texts(sql, found.pop("tensor"), limit)
    order = np.lexsort((found["draw"], _ranks(codecs["codec"])[codec], found["step"], _ranks(tensors)[tensor]))
    whole: dict[str, NDArray[Any]] = {"tensor": tensors[tensor[order]]}
    codec = codec[order]
    whole |= {name: values[codec] for name, values in codecs.items()}
    for name in list(found):
        values = found.pop(name)[order]
        if name in TEXTS:
            texts, place = _texts(sql, values, limit)
            whole[name] = texts[place]
        else:
            whole[name] = values
    left_out = set(MEASURED).difference(measured)
    return {name: _typed(name, whole.get(name), count) for name in COLUMNS if name not in left_out}


def read_warnings(sql: sqlite3.Connection, limit: int) -> tuple[str, ...]:
    """The warnings in order, and how many more there are; ``limit`` as for the rows."""
    query = "SELECT CAST(substr(text, 1, ?) AS TEXT) FROM warnings WHERE text NOT NULL ORDER BY text LIMIT ?"
    lines = [text for (text,) in bounded(sql.execute(query, (MAX_NAME, MAX_WARNINGS)), limit)]
    (count,) = sql.execute("SELECT count(*) FROM (SELECT 1 FROM warnings LIMIT ?)", (limit,)).fetchone()
    if count > len(lines) >= MAX_WARNINGS:
        lines.append(f"{count - len(lines):,} more warnings are left out; the table warnings of the file has them all")
    return tuple(lines)


def read_times(sql: sqlite3.Connection, limit: int) -> dict[str, NDArray[Any]]:
    """The table of times as columns tensor, step, codec, draw, stage and seconds; ``limit`` as for the rows."""
    (count,) = sql.execute("SELECT count(*) FROM (SELECT 1 FROM spent LIMIT ?)", (limit,)).fetchone()
    found = _read(sql, "spent", ("tensor", "step", "codec", "draw", "stage", "seconds"), count, limit)
    tensors, tensor = _texts(sql, found["tensor"], limit)
    stages, stage = _texts(sql, found["stage"], limit)
    codecs, codec = _named(sql, "codecs", ("codec",), found["codec"], limit)
    return {
        "tensor": tensors[tensor],
        "step": _integers("step", found["step"]),
        "codec": codecs["codec"][codec],
        "draw": _integers("draw", found["draw"]),
        "stage": stages[stage],
        "seconds": found["seconds"],
    }


def read_details(sql: sqlite3.Connection, limit: int) -> dict[tuple[str, int, str], Any]:
    """(tensor, step, what) -> value of the table of details; ``limit`` as for the rows."""
    details = {}
    query = "SELECT tensor, step, what, value FROM details ORDER BY tensor, step, what"
    for tensor, step, what, value in bounded(sql.execute(query), limit):
        if not isinstance(tensor, str) or not isinstance(step, int) or not isinstance(what, str):
            raise ValueError("a detail without a tensor and step")  # noqa: TRY004 - damage
        found = details[tensor, step, what] = load_json(value)
        check_detail(what, found)
    return details


def _read(
    sql: sqlite3.Connection, table: str, names: Sequence[str], count: int, limit: int
) -> dict[str, NDArray[np.float64]]:
    """Columns of a table; NULL becomes NaN."""
    if count >= limit:
        raise ValueError("more rows than the file has bytes")
    out = {name: np.empty(count) for name in names}
    cursor = sql.execute(f"SELECT {', '.join(names)} FROM {table}")  # noqa: S608
    for start in range(0, count, _ROWS):
        piece = np.array(cursor.fetchmany(_ROWS), dtype=np.float64)
        for k, column in enumerate(out.values()):
            column[start : start + _ROWS] = piece[:, k]
    if any(np.isinf(column).any() for column in out.values()):
        raise ValueError(f"{table} holds infinite numbers")
    return out


def _texts(
    sql: sqlite3.Connection, numbers: NDArray[np.float64], limit: int
) -> tuple[NDArray[np.object_], NDArray[np.intp]]:
    """Texts (None among them), and for each number the index of its text; NaN is the number of None."""
    texts, place = _named(sql, "texts", ("text",), numbers, limit)
    return texts["text"], place


def _named(
    sql: sqlite3.Connection, table: str, names: Sequence[str], numbers: NDArray[np.float64], limit: int
) -> tuple[dict[str, NDArray[np.object_]], NDArray[np.intp]]:
    """The columns of a table of names, with None as the last entry, and for each number its index there."""
    query = f"SELECT id, {', '.join(names)} FROM {table} ORDER BY id"  # noqa: S608
    found = list(bounded(sql.execute(query), limit))
    for k, name in enumerate(names, 1):
        wanted = (int | float if name == "bits" else str, NoneType)
        if not all(isinstance(row[k], wanted) for row in found):
            raise ValueError(f"{table} holds a {name} of another type")
        if name in ("text", "codec", "method") and any(row[k] and len(row[k]) > MAX_NAME for row in found):
            raise ValueError(f"{table} holds a {name} of more than {MAX_NAME} characters")
    columns = [np.array([*(row[k] for row in found), None], dtype=object) for k in range(1, 1 + len(names))]
    known = np.array([*(row[0] for row in found), np.nan], dtype=np.float64)
    # NaN is sorted behind every number.
    place = np.searchsorted(known, numbers)
    there = known[np.minimum(place, known.size - 1)]
    if not ((there == numbers) | np.isnan(numbers)).all():
        raise ValueError(f"{table} lacks some of the numbers that rows refer to")
    return dict(zip(names, columns, strict=True)), place


def _ranks(texts: NDArray[np.object_]) -> NDArray[np.intp]:
    """The position of each text after sorting; None comes last."""
    ranks = np.empty(texts.size, np.intp)
    ranks[sorted(range(texts.size), key=lambda k: (texts[k] is None, texts[k] or ""))] = np.arange(texts.size)
    return ranks


def _typed(name: str, values: NDArray[Any] | None, count: int) -> NDArray[Any]:
    kind = COLUMNS[name][0]
    if values is None:
        if kind == "TEXT":
            return np.full(count, None, dtype=object)
        return np.broadcast_to(np.float64("nan"), count) if count or kind == "REAL" else np.empty(0, np.int64)
    if kind == "TEXT":
        if name in KEY and None in values:
            raise ValueError(f"rows without a {name}")
        return values
    if name in KEY:
        return _integers(name, values)
    values = values.astype(np.float64, copy=False)
    # Nominal bits are mostly integers; some codecs take others.
    kept = kind == "REAL" or np.isnan(values).any() or (name == "bits" and (values % 1).any())
    return values if kept else _integers(name, values)


def _integers(name: str, values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers as integers; ValueError for one that float64 cannot hold exactly."""
    numbers = values.astype(np.float64)
    # NaN fails this comparison too.
    if not (np.abs(numbers) <= _LARGEST).all() or (numbers % 1).any():
        raise ValueError(f"a {name} that is not an integer")
    return numbers.astype(np.int64)
