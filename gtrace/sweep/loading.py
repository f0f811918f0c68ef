"""From the tables of a result file to columns, without an object for each cell of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.sweep.schema import COLUMNS, KEY, MEASURED, OF_CODEC, TEXTS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Rows that are Python objects at a time: as many as fit into a cache beside their values.
_ROWS = 256


def read_rows(sql: sqlite3.Connection) -> dict[str, NDArray[Any]]:
    """All rows, ordered by (tensor, step, codec, draw), as the columns of ``COLUMNS``.

    Returns:
        column name -> array of length n_rows: text as objects, each text once; integers as int64, or as float64 with
        NaN where one is missing; real numbers as float64. A column in which nothing was measured is read-only.

    Raises:
        ValueError: cells that are no numbers, or that name texts or codecs which are not there.
    """
    counts = ", ".join(f"count({name})" for name in MEASURED)
    count, *filled = sql.execute(f"SELECT count(*), {counts} FROM cells").fetchone()  # noqa: S608
    found = _read(sql, "cells", (*KEY, *(name for name, there in zip(MEASURED, filled, strict=True) if there)), count)
    codecs, codec = _named(sql, "codecs", ("codec", *OF_CODEC), found.pop("codec"))
    tensors, tensor = _texts(sql, found.pop("tensor"))
    order = np.lexsort((found["draw"], _ranks(codecs["codec"])[codec], found["step"], _ranks(tensors)[tensor]))
    whole: dict[str, NDArray[Any]] = {"tensor": tensors[tensor[order]]}
    codec = codec[order]
    whole |= {name: values[codec] for name, values in codecs.items()}
    for name in list(found):
        values = found.pop(name)[order]
        if name in TEXTS:
            texts, place = _texts(sql, values)
            whole[name] = texts[place]
        else:
            whole[name] = values
    return {name: _typed(name, whole.get(name), count) for name in COLUMNS}


def read_times(sql: sqlite3.Connection) -> dict[str, NDArray[Any]]:
    """The table of times as columns tensor, step, codec, draw, stage and seconds."""
    (count,) = sql.execute("SELECT count(*) FROM spent").fetchone()
    found = _read(sql, "spent", ("tensor", "step", "codec", "draw", "stage", "seconds"), count)
    tensors, tensor = _texts(sql, found["tensor"])
    stages, stage = _texts(sql, found["stage"])
    codecs, codec = _named(sql, "codecs", ("codec",), found["codec"])
    return {
        "tensor": tensors[tensor],
        "step": found["step"].astype(np.int64),
        "codec": codecs["codec"][codec],
        "draw": found["draw"].astype(np.int64),
        "stage": stages[stage],
        "seconds": found["seconds"],
    }


def _read(sql: sqlite3.Connection, table: str, names: Sequence[str], count: int) -> dict[str, NDArray[np.float64]]:
    """Columns of a table; NULL becomes NaN."""
    out = {name: np.empty(count) for name in names}
    cursor = sql.execute(f"SELECT {', '.join(names)} FROM {table}")  # noqa: S608
    for start in range(0, count, _ROWS):
        piece = np.array(cursor.fetchmany(_ROWS), dtype=np.float64)
        for k, column in enumerate(out.values()):
            column[start : start + _ROWS] = piece[:, k]
    return out


def _texts(sql: sqlite3.Connection, numbers: NDArray[np.float64]) -> tuple[NDArray[np.object_], NDArray[np.intp]]:
    """Texts, among them None, and where in them each of the numbers is; NaN is the number of None."""
    texts, place = _named(sql, "texts", ("text",), numbers)
    return texts["text"], place


def _named(
    sql: sqlite3.Connection, table: str, names: Sequence[str], numbers: NDArray[np.float64]
) -> tuple[dict[str, NDArray[np.object_]], NDArray[np.intp]]:
    """The columns of a table of names, a None after the last, and where in them each of the numbers is."""
    found = sql.execute(f"SELECT id, {', '.join(names)} FROM {table} ORDER BY id").fetchall()  # noqa: S608
    columns = [np.array([*(row[k] for row in found), None], dtype=object) for k in range(1, 1 + len(names))]
    known = np.array([*(row[0] for row in found), np.nan])
    # NaN is sorted behind every number.
    place = np.searchsorted(known, numbers)
    there = known[np.minimum(place, known.size - 1)]
    if not ((there == numbers) | np.isnan(numbers)).all():
        raise ValueError(f"numbers of {table} that are not there")
    return dict(zip(names, columns, strict=True)), place


def _ranks(texts: NDArray[np.object_]) -> NDArray[np.intp]:
    """Where each text would be after sorting; None comes last."""
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
        return values
    values = values.astype(np.float64, copy=False)
    return values if kind == "REAL" or np.isnan(values).any() else values.astype(np.int64)
