import shutil
import sqlite3

from helpers_sweep import rows_of

import gtrace
from gtrace.sweep import ResultStore
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
        writer.execute("DELETE FROM rows")
        writer.executemany("INSERT INTO warnings VALUES (?)", [(f"{k} " + "x" * 500,) for k in range(2000)])
        shutil.copy(whole, torn)
        shutil.copy(f"{whole}-journal", f"{torn}-journal")
        writer.rollback()
    assert torn.read_bytes() != whole.read_bytes()
    loaded = ResultStore.load(torn)
    assert rows_of(loaded) == expected
    assert loaded.warnings == ()
    assert rows_of(gtrace.run_sweep(trace, ["qsgdinf:bits=3"], output=torn)) == expected
