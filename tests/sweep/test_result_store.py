import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
from helpers_sweep import rows_of

import gtrace
from gtrace.errors import TraceError
from gtrace.sweep import COLUMNS, ResultStore
from gtrace.sweep.store import RowTable
from gtrace.trace import Trace


def test_a_store_whose_writer_died_inside_a_transaction_is_read_and_resumed(tmp_path):
    trace = Trace.from_arrays({"w": [1.0, -2.0, 0.5]})
    whole, torn = tmp_path / "whole.db", tmp_path / "torn.db"
    expected = rows_of(gtrace.run_sweep(trace, ["qsgdinf:bits=3"], output=whole))
    with sqlite3.connect(whole) as writer:
        writer.execute("PRAGMA journal_mode=DELETE")
        # A cache of nothing spills to the file at once: what lies there is half a transaction and its journal.
        writer.execute("PRAGMA cache_size=0")
        writer.execute("PRAGMA cache_spill=1")
        writer.execute("DELETE FROM cells")
        writer.executemany("INSERT INTO warnings VALUES (?)", [(f"{k} " + "x" * 500,) for k in range(2000)])
        shutil.copy(whole, torn)
        shutil.copy(f"{whole}-journal", f"{torn}-journal")
        writer.rollback()
    assert torn.read_bytes() != whole.read_bytes()
    loaded = ResultStore.load(torn)
    assert rows_of(loaded) == expected
    assert loaded.warnings == ()
    assert rows_of(gtrace.run_sweep(trace, ["qsgdinf:bits=3"], output=torn)) == expected


SPECS = ["qsgdinf:bits=3", "alq:bits=2", "ef:topk"]


def test_any_sql_tool_sees_one_line_for_each_row(tmp_path):
    trace = Trace.from_arrays({"w": {0: [0.5, 2.0], 1: [1.0, float("inf")]}})
    found = gtrace.run_sweep(trace, SPECS, output=tmp_path / "out.db")
    with closing(sqlite3.connect(tmp_path / "out.db")) as sql:
        cursor = sql.execute("SELECT * FROM rows ORDER BY tensor, step, codec, draw")
        assert [name for name, *_ in cursor.description] == list(COLUMNS)
        assert cursor.fetchall() == rows_of(found)
        assert sql.execute("SELECT DISTINCT tensor FROM times").fetchall() == [("w",)]


def test_columns_have_the_types_of_what_they_hold(tmp_path):
    store = ResultStore.create(tmp_path / "a.db", {}, "f", force=False)
    codecs = [{"codec": name, "method": name, "bits": bits, "params": "{}"} for name, bits in (("b", 3), ("a", None))]
    notes = np.array(["x", None])
    columns = {"tensor": "w", "step": 2**40, "draw": -1, "n": 7, "snr_db": np.array([1.0, np.inf]), "note": notes}
    store.add([], tables=[RowTable(codecs, columns)])
    store.add([{"tensor": "w", "step": 3, "draw": 0, **codecs[0], "n": 8, "cosine": np.float32(0.5), "w1": np.nan}])
    store.close()
    found = ResultStore.load(tmp_path / "a.db")
    assert found["step"].tolist() == [3, 2**40, 2**40]
    assert found["codec"].tolist() == ["b", "a", "b"]
    assert found["n"].dtype == np.int64
    assert found["n"].tolist() == [8, 7, 7]
    assert found["bits"].dtype == np.float64
    np.testing.assert_array_equal(found["bits"], [3, np.nan, 3])
    np.testing.assert_array_equal(found["snr_db"], [np.nan, np.nan, 1])
    np.testing.assert_array_equal(found["cosine"], [0.5, np.nan, np.nan])
    assert found["note"].tolist() == [None, None, "x"]
    assert np.isnan(found["w1"]).all()
    brief = ResultStore.load(tmp_path / "a.db", brief=True)
    assert brief.columns.keys() == {"tensor", "step", "codec", "draw", "method", "bits", "params", "note"}
    for name, column in brief.columns.items():
        np.testing.assert_array_equal(column, found[name])
    assert (brief.warnings, brief.times, brief.details) == (found.warnings, None, {})


def test_numbers_given_in_a_transaction_that_failed_are_given_again(tmp_path):
    store = ResultStore.create(tmp_path / "a.db", {}, "f", force=False)
    row = {"tensor": "lost", "step": 0, "codec": "c", "draw": 0, "note": "never kept"}
    with pytest.raises(sqlite3.Error):
        store.add([row, {**row, "step": None}])
    store.add([{**row, "tensor": "kept", "note": "here"}])
    store.close()
    found = ResultStore.load(tmp_path / "a.db")
    assert found["tensor"].tolist() == ["kept"]
    assert found["note"].tolist() == ["here"]
    with closing(sqlite3.connect(tmp_path / "a.db")) as sql, sql:
        sql.execute("DELETE FROM texts")
    with pytest.raises(TraceError, match="or a damaged one"):
        ResultStore.load(tmp_path / "a.db")


def test_a_sweep_ends_while_another_process_reads_its_results(tmp_path):
    path = tmp_path / "out.db"
    store = ResultStore.create(path, {}, "same", force=False)
    with closing(sqlite3.connect(path)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rows").fetchone()
        store.add([{"tensor": "a", "step": 0, "codec": "qsgd", "draw": 0, "energy": 1.0}])
        store.close()
        assert ResultStore.load(path)["energy"].tolist() == [1.0]
    again = ResultStore.create(path, {}, "same", force=False)
    again.add([{"tensor": "a", "step": 1, "codec": "qsgd", "draw": 0, "energy": 2.0}])
    again.close()
    assert ResultStore.load(path)["energy"].tolist() == [1.0, 2.0]
    assert [file.name for file in tmp_path.iterdir()] == ["out.db"]
