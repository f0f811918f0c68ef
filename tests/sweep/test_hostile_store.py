"""Result files that somebody damaged or forged end in one line, at once, and leave everything as it was."""

import multiprocessing
import os
import shutil
import sqlite3
import struct
from contextlib import closing

import helpers_trace
import pytest

import gtrace
from gtrace.errors import OutputExistsError, TraceError
from gtrace.sweep import ResultStore
from gtrace.sweep.reading import MAX_NAME, MAX_WARNINGS
from gtrace.trace import Trace

SPECS = ["qsgdinf:bits=3", "alq:bits=2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "whole.sweep.db"
    trace = Trace.from_arrays({"w": {0: [1.0, -2.0, 0.5], 1: [0.25, 3.0, -1.0]}})
    gtrace.run_sweep(trace, SPECS, output=path)
    return path


@pytest.fixture
def path(whole, tmp_path):
    return shutil.copy(whole, tmp_path / "got.sweep.db")


def contents(folder):
    return {p.name: p.read_bytes() if p.is_file() else None for p in sorted(folder.iterdir())}


def refused(path, *words):
    """Loading ends in a TraceError of one line, and the folder stays as it was."""
    before = contents(path.parent)
    helpers_trace.refused(path, *words, read=ResultStore.load)
    assert contents(path.parent) == before


def change(path, *statements, values=()):
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("PRAGMA writable_schema=ON")
        for statement in statements:
            sql.execute(statement, values)


def test_a_database_of_something_else(tmp_path):
    path = tmp_path / "other.db"
    change(path, "CREATE TABLE users (id INTEGER PRIMARY KEY, name TEXT)")
    refused(path, "not a gtrace sweep")
    with pytest.raises(TraceError, match="no such file"):
        ResultStore.load(tmp_path / "missing.db")
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 4096)
    refused(path, "not a gtrace sweep")
    path.write_bytes(b"")
    refused(path, "not a gtrace sweep")


@pytest.mark.parametrize("table", ["meta", "warnings", "details", "texts", "codecs", "cells", "spent"])
def test_a_view_in_the_place_of_a_table_is_not_run(table, path):
    """Such a view would go on for ever."""
    with closing(sqlite3.connect(path)) as sql:
        names = [row[1] for row in sql.execute(f"PRAGMA table_info({table})")]
    columns = ", ".join(f"x AS {name}" for name in names)
    endless = f"WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT {columns} FROM c"
    change(path, "DROP VIEW IF EXISTS rows", "DROP VIEW IF EXISTS times", f"DROP TABLE {table}")
    change(path, f"CREATE VIEW {table} AS {endless}")
    refused(path, f"{table} is not a table")


def test_what_a_file_would_have_sqlite_do_is_refused(path):
    change(path, "CREATE TRIGGER t AFTER INSERT ON cells BEGIN DELETE FROM cells; END")
    refused(path, "it holds triggers")
    change(path, "DROP TRIGGER t", "ALTER TABLE texts ADD COLUMN more AS (zeroblob(1000000000))")
    refused(path, "texts has computed columns")


def test_a_virtual_table(path):
    change(path, "DROP VIEW times", "DROP TABLE spent")
    try:
        change(path, "CREATE VIRTUAL TABLE spent USING fts5(tensor, step, codec, draw, stage, seconds)")
    except sqlite3.OperationalError:
        pytest.skip("this SQLite has no full-text search")
    refused(path, "spent is not a table")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("3", "written by another gtrace (format 3, this one reads 1); run the sweep again with --force"),
        ('"\\u001b[2J"', r"(format \x1b[2J,"),
        ("true", "format True"),
        ("0", "format 0"),
    ],
)
def test_other_versions(version, words, path):
    change(path, "UPDATE meta SET value = ? WHERE key = 'version'", values=(version,))
    refused(path, words)


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        ("UPDATE meta SET value = '[1]' WHERE key = 'provenance'", "provenance is not an object"),
        ("UPDATE meta SET value = x'00' WHERE key = 'provenance'", "a cell needs a text with JSON"),
        (f"UPDATE meta SET value = '{'[' * 100_000}' WHERE key = 'provenance'", "nested too deep"),
        ("UPDATE meta SET value = 'NULL' WHERE key = 'format'", "not a gtrace sweep"),
        ("UPDATE texts SET text = x'ff00' WHERE id = 1", "texts holds a text of another type"),
        ("UPDATE texts SET text = CAST(x'ff' AS TEXT) WHERE id = 1", "Could not decode"),
        ("UPDATE codecs SET bits = 'three'", "codecs holds a bits of another type"),
        ("UPDATE cells SET step = 'first' WHERE step = 0", "could not convert"),
        ("UPDATE cells SET step = 0.5 WHERE step = 0", "a step that is not an integer"),
        ("UPDATE cells SET energy = 9e999", "infinite"),
        ("UPDATE cells SET tensor = 77", "texts lacks some of the numbers"),
        ("UPDATE cells SET n = 0.5", "a n that is not an integer"),
        ("UPDATE spent SET seconds = x'00ff'", ""),
        ("UPDATE details SET value = 'x'", "Expecting value"),
        ("UPDATE details SET step = 'x'", "a detail without a tensor"),
        ("DELETE FROM meta", "not a gtrace sweep"),
        ("DROP TABLE spent", "spent is not a table"),
        ("ALTER TABLE cells RENAME COLUMN w1 TO w2", "no such column"),
    ],
)
def test_wrong_contents(statement, words, path):
    change(path, "DROP VIEW rows", "DROP VIEW times")
    change(path, statement)
    refused(path, words)


def test_a_text_that_is_longer_than_any(path):
    """64 MB of zeros take a few bytes of a sparse file's disk and would be doubled and doubled in memory."""
    change(path, "INSERT INTO warnings VALUES (zeroblob(67108865))")
    refused(path, "too big")


def _interior(children, page_size):
    """A page of a table's tree that has these children."""
    cells, pointers, end = b"", b"", page_size
    for key, child in enumerate(children[:-1], 1):
        cell = struct.pack(">IB", child, min(key, 127))
        end -= len(cell)
        cells = cell + cells
        pointers += struct.pack(">H", end)
    head = struct.pack(">BHHHBI", 5, 0, len(children) - 1, end, 0, children[-1])
    return head + pointers + b"\0" * (end - len(head) - len(pointers)) + cells


@pytest.mark.parametrize("table", ["spent", "texts", "codecs"])
def test_a_tree_whose_pages_repeat(table, path):
    """Eighteen levels of a hundred references each to the same page would be read for longer than the sun lasts."""
    with closing(sqlite3.connect(path)) as sql:
        ((root,),) = sql.execute("SELECT rootpage FROM sqlite_master WHERE name = ?", (table,))
        ((size,),) = sql.execute("PRAGMA page_size")
        ((count,),) = sql.execute("PRAGMA page_count")
    data = bytearray(path.read_bytes())
    leaf = bytes(data[(root - 1) * size : root * size])
    levels = 18
    first = count + 1
    data[(root - 1) * size : root * size] = _interior([first] * 100, size)
    for level in range(1, levels):
        data += _interior([first + level] * 100, size)
    data += leaf
    struct.pack_into(">I", data, 28, count + levels)
    path.write_bytes(data)
    refused(path, "more")
    with pytest.raises(OutputExistsError, match="is not a sweep"):
        ResultStore.create(path, {}, "f", force=False)
    assert path.read_bytes() == data


def test_a_journal_that_names_another_file_deletes_nothing(path):
    """SQLite deletes the super-journal that a journal names, whatever file that is."""
    torn = path.with_name("torn.sweep.db")
    with closing(sqlite3.connect(path)) as writer:
        writer.execute("PRAGMA journal_mode=DELETE")
        writer.execute("PRAGMA cache_size=0")
        writer.execute("DELETE FROM cells")
        writer.executemany("INSERT INTO warnings VALUES (?)", [(f"{k} " + "x" * 500,) for k in range(500)])
        shutil.copy(path, torn)
        data = path.with_name(path.name + "-journal").read_bytes()
        writer.rollback()
    victim = path.with_name("thesis.txt")
    victim.write_text("years of work")
    name = os.fsencode(victim)
    with closing(sqlite3.connect(path)) as sql:
        ((size,),) = sql.execute("PRAGMA page_size")
    tail = struct.pack(">I", 2**30 // size + 1) + name + struct.pack(">II", len(name), sum(name))
    journal = torn.with_name(torn.name + "-journal")
    journal.write_bytes(data + tail + bytes.fromhex("d9d505f920a163d7"))
    refused(torn, "names another file that would be deleted")
    with pytest.raises(OutputExistsError):
        ResultStore.create(torn, {}, "f", force=False)
    assert victim.read_text() == "years of work"
    # Without the name it is an ordinary journal of a writer that was killed, which a copy is rolled back by.
    journal.write_bytes(data)
    before = contents(path.parent)
    assert len(ResultStore.load(torn)) == 8
    with pytest.raises(OutputExistsError, match="other data or settings"):
        ResultStore.create(torn, {}, "f", force=False)
    assert contents(path.parent) == before


@pytest.mark.parametrize("make", [os.mkfifo, lambda p: os.symlink("/dev/zero", p), os.mkdir])
def test_what_lies_in_the_place_of_a_journal(make, path):
    make(path.with_name(path.name + "-journal"))
    with pytest.raises(TraceError, match="not a regular file"):
        ResultStore.load(path)


def test_a_log_that_a_killed_writer_left_is_read_and_stays(path, tmp_path):
    folder = tmp_path / "killed"
    folder.mkdir()
    with closing(sqlite3.connect(path)) as sql, sql:
        sql.execute("PRAGMA journal_mode=WAL")
        sql.execute("INSERT INTO warnings VALUES ('in the log')")
        sql.commit()
        for end in ("", "-wal", "-shm"):
            shutil.copy(f"{path}{end}", folder)
    (tmp_path / "link.sweep.db").symlink_to(folder / path.name)
    before = contents(folder)
    for place in (folder / path.name, tmp_path / "link.sweep.db"):
        assert "in the log" in ResultStore.load(place).warnings
    assert contents(folder) == before


def test_warnings_and_names_without_end_are_cut(path):
    with closing(sqlite3.connect(path)) as sql, sql:
        lines = [("a" * 100_000,), *((f"warning {k}",) for k in range(MAX_WARNINGS + 7))]
        sql.executemany("INSERT INTO warnings VALUES (?)", lines)
    found = ResultStore.load(path).warnings
    assert len(found) == MAX_WARNINGS + 1
    assert max(map(len, found)) == MAX_NAME
    assert found[-1].startswith("8 more warnings are left out")
    change(path, f"UPDATE texts SET text = text || '{'x' * MAX_NAME}' WHERE id = 1")
    refused(path, "texts holds a text of more than 4096 characters")


def _hold(path, ready, done):
    store = ResultStore.create(path, {}, "f", force=False)
    ready.set()
    done.wait(30)
    store.add([{"tensor": "a", "step": 0, "codec": "qsgd", "draw": 0, "energy": 1.0}])
    store.close()


def test_two_sweeps_do_not_write_one_file(tmp_path):
    path = tmp_path / "out.db"
    forked = multiprocessing.get_context("fork")
    ready, done = forked.Event(), forked.Event()
    other = forked.Process(target=_hold, args=(path, ready, done))
    other.start()
    assert ready.wait(30)
    before = path.read_bytes()
    for force in (False, True):
        with pytest.raises(OutputExistsError, match="another sweep is writing this file"):
            ResultStore.create(path, {}, "f", force=force)
    assert path.read_bytes() == before
    done.set()
    other.join()
    assert other.exitcode == 0
    assert ResultStore.load(path)["energy"].tolist() == [1.0]
    ResultStore.create(path, {}, "f", force=False).close()
    assert os.listdir(tmp_path) == ["out.db"]
