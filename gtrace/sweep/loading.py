"""From the tables of a result file to columns, without an object for each cell of them."""

from __future__ import annotations

from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.sweep.checks import bounded, load_json
from gtrace.sweep.details import check_detail
from gtrace.sweep.schema import COLUMNS, KEY, MEASURED, OF_CODEC, TEXTS

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from numpy.typing import NDArray

#: Rows that are Python objects at a time: as many as fit into a cache beside their values.
_ROWS = 256
_LARGEST = 2.0**53


def read_rows(sql: sqlite3.Connection, limit: int) -> dict[str, NDArray[Any]]:
    """All rows, ordered by (tensor, step, codec, draw), as the columns of ``COLUMNS``.

    Args:
        sql: a connection to a file whose tables were checked.
        limit: bytes of the file, see :func:`gtrace.sweep.checks.bounded`.

    Returns:
        column name -> array of length n_rows: text as objects, each text once; integers as int64, or as float64 with
        NaN where one is missing; real numbers as float64. A column in which nothing was measured is read-only.

    Raises:
        ValueError: cells that are no numbers, or that name texts or codecs which are not there.
    """
    counts = ", ".join(f"count({name})" for name in MEASURED)
    count, *filled = sql.execute(f"SELECT count(*), {counts} FROM (SELECT * FROM cells LIMIT ?)", (limit,)).fetchone()  # noqa: S608
    there = (name for name, filled_cells in zip(MEASURED, filled, strict=True) if filled_cells)
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
    return {name: _typed(name, whole.get(name), count) for name in COLUMNS}


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
            raise ValueError("a detail that belongs to no tensor and step")  # noqa: TRY004 - damage
        told = details[tensor, step, what] = load_json(value)
        check_detail(what, told)
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
    """Texts, among them None, and where in them each of the numbers is; NaN is the number of None."""
    texts, place = _named(sql, "texts", ("text",), numbers, limit)
    return texts["text"], place


def _named(
    sql: sqlite3.Connection, table: str, names: Sequence[str], numbers: NDArray[np.float64], limit: int
) -> tuple[dict[str, NDArray[np.object_]], NDArray[np.intp]]:
    """The columns of a table of names, a None after the last, and where in them each of the numbers is."""
    query = f"SELECT id, {', '.join(names)} FROM {table} ORDER BY id"  # noqa: S608
    found = list(bounded(sql.execute(query), limit))
    for k, name in enumerate(names, 1):
        wanted = (int if name == "bits" else str, NoneType)
        if not all(isinstance(row[k], wanted) for row in found):
            raise ValueError(f"{table} holds a {name} of another type")
    columns = [np.array([*(row[k] for row in found), None], dtype=object) for k in range(1, 1 + len(names))]
    known = np.array([*(row[0] for row in found), np.nan], dtype=np.float64)
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
        if name in KEY and None in values:
            raise ValueError(f"rows without a {name}")
        return values
    if name in KEY:
        return _integers(name, values)
    values = values.astype(np.float64, copy=False)
    return values if kind == "REAL" or np.isnan(values).any() else _integers(name, values)


def _integers(name: str, values: NDArray[Any]) -> NDArray[np.int64]:
    """Numbers as integers; ValueError for what is none that float64 holds exactly."""
    numbers = values.astype(np.float64)
    # NaN, too, is not below.
    if not (np.abs(numbers) <= _LARGEST).all() or (numbers % 1).any():
        raise ValueError(f"a {name} that is no integer")
    return numbers.astype(np.int64)
