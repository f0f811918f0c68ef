"""What a result file has to be before it is read or resumed: it may come from anyone.

SQLite runs what a file defines (views, triggers, generated columns), believes the journals that lie beside it, and
follows the pages of a damaged tree however often they repeat. So: only plain tables are read, no content beyond the
file's own size is taken, and a journal that would have SQLite delete another file is refused.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from gtrace.errors import TraceError, printable
from gtrace.sweep.schema import FORMAT, TABLES, VERSION

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

#: the longest text that is taken from a file
MAX_TEXT = 1 << 26
# How a journal ends that names a super-journal, which SQLite deletes after the rollback; one database needs none.
_SUPER_JOURNAL = bytes.fromhex("d9d505f920a163d7")


@contextmanager
def reading(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection for reading a result file, whose errors are one line; the file's folder stays as it was.

    Raises:
        TraceError: the file, or what lies beside it, is not a result file, is damaged, or was made to do harm.
    """
    if not path.is_file():
        raise TraceError(f"{path}: no such file; `gtrace sweep TRACE` makes one")
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{_mode(path)}", uri=True)) as sql:
            restrict(sql)
            yield sql
    except (OSError, sqlite3.Error, ValueError, RecursionError) as error:
        told = "nested too deep" if isinstance(error, RecursionError) else printable(str(error))
        raise TraceError(
            f"{path}: not a gtrace sweep, or a damaged sweep ({told}); run the sweep again with --force"
        ) from None


def restrict(sql: sqlite3.Connection) -> None:
    """Let a connection trust nothing that the file itself defines."""
    sql.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_TEXT)
    sql.execute("PRAGMA trusted_schema=OFF")
    sql.execute("PRAGMA cell_size_check=ON")


def check_journal(path: Path) -> bool:
    """Whether a rollback journal lies beside a result file.

    Raises:
        ValueError: it is one that gtrace did not write.
    """
    journal = path.with_name(path.name + "-journal")
    if journal.is_symlink() or (journal.exists() and not journal.is_file()):
        raise ValueError(f"{journal.name} is no regular file")
    if not journal.exists():
        return False
    with journal.open("rb") as file:
        file.seek(max(0, journal.stat().st_size - len(_SUPER_JOURNAL)))
        if file.read() == _SUPER_JOURNAL:
            raise ValueError(f"{journal.name} names another file that would be deleted")
    return True


def _mode(path: Path) -> str:
    if check_journal(path):
        # What a writer that was killed while it closed has left can be rolled back by a connection that may write only.
        return "mode=rw"
    with path.open("rb") as file:
        versions = file.read(20)[18:]
    # A file in write-ahead mode without its log has no writer, and would be given a log that stays.
    without_log = versions == b"\2\2" and not path.with_name(path.name + "-wal").exists()
    return "mode=ro&immutable=1" if without_log else "mode=ro"


def content_bytes(path: Path) -> int:
    """Bytes of a result file and of the log beside it: more rows or text than that it does not hold."""
    files = (path, path.with_name(path.name + "-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def bounded(rows: Iterator[tuple[Any, ...]], limit: int) -> Iterator[tuple[Any, ...]]:
    """The rows of a query, as long as their number and their texts fit into a file of ``limit`` bytes.

    Raises:
        ValueError: they do not: its pages repeat.
    """
    for row in rows:
        limit -= 1 + sum(len(value) for value in row if isinstance(value, (str, bytes)))
        if limit < 0:
            raise ValueError("more content than the file has bytes")
        yield row


def check_ends(sql: sqlite3.Connection, limit: int) -> None:
    """Check that every table has an end within ``limit`` rows.

    Raises:
        ValueError: one has not.
    """
    for table in TABLES:
        # The rows themselves are counted: an index may have an end where they have none.
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
        raise ValueError("its provenance is no object")  # noqa: TRY004 - damage
    _check_plain(sql, TABLES)
    return meta


def load_json(text: object) -> Any:
    """A JSON value of a cell.

    Raises:
        ValueError, RecursionError: there is none.
    """
    if not isinstance(text, str):
        raise ValueError("a cell that is no text where JSON belongs")  # noqa: TRY004 - damage
    return json.loads(text)


def _check_plain(sql: sqlite3.Connection, tables: tuple[str, ...]) -> None:
    """Raise ValueError unless these are stored tables, without anything that is worked out when they are used."""
    if sql.execute("SELECT 1 FROM sqlite_master WHERE type = 'trigger'").fetchone():
        raise ValueError("it holds triggers")
    query = "SELECT 1 FROM sqlite_master WHERE name = ? AND type = 'table' AND rootpage > 0"
    for name in tables:
        if sql.execute(query, (name,)).fetchone() is None:
            raise ValueError(f"{name} is not a table")
        # Not the function of that name: a table of the file could stand in for it.
        if any(hidden for *_, hidden in sql.execute(f"PRAGMA table_xinfo({name})")):
            raise ValueError(f"{name} has columns that are worked out")
