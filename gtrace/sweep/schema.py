"""The tables of a sweep's result file.

``texts`` holds texts that many rows repeat, ``codecs`` each codec with its spec, method, bits and parameters.
``cells`` holds the measurements and ``spent`` the times, with numbers instead of texts. The views ``rows`` and
``times`` join everything, one line for each row, for any SQL tool.
"""

# ruff: noqa: S608 - statements are built from the names of columns above, never from user input
from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from gtrace.metrics import Comparison
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

FORMAT = "gtrace-sweep"
VERSION = 1

#: the tables of a file
TABLES = ("meta", "warnings", "details", "texts", "codecs", "cells", "spent")

#: draw number of a row of expectations
EXPECTATION = -1

#: in the note of a row whose gradient holds NaN or infinity, between their number and what was done
NONFINITE = " non-finite, "

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
    **{measure.name: ("REAL", measure.metadata["meaning"]) for measure in fields(Comparison)},
    "relative_variance_bound": ("REAL", "how far the expected one can be off (bins of the sketch)"),
    "optimal_variance": ("REAL", "least relative variance of any levels of the same number on this tensor"),
    "times_optimal": ("REAL", "relative_variance / optimal_variance"),
    "model_variance": ("REAL", "what a parametric law promised for the levels that were fitted to it"),
    "relative_bias": ("REAL", "||E Q(g) - g|| / ||g||; NULL if one draw does not show it"),
    "window": ("INTEGER", "consecutive steps in the window that ends at this step, NULL in other rows"),
    "window_error": ("REAL", "||sum of Q(g) - g over the window||^2, expected or realized"),
    "window_energy": ("REAL", "||sum of g over the window||^2"),
    "noise_ratio": (
        "REAL",
        "squared error that averaging over workers shrinks / gradient noise: variance of Q(g) over tr Cov of one "
        "worker's gradient",
    ),
    "mean_abs": ("REAL", "mean |g|"),
    "w1_method": ("TEXT", "exact or sketch"),
    "bits_fixed": ("REAL", "bits per coordinate, fixed width, norms included"),
    "bits_entropy": ("REAL", "bits per coordinate at the entropy, norms included"),
    "bits_huffman": ("REAL", "bits per coordinate, Huffman, code lengths and norms included"),
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
    "saturated": ("REAL", "fraction clipped or saturated"),
    "flushed": ("REAL", "fraction of non-zeros that underflowed to zero"),
    "fitted_on": (
        "TEXT",
        "itself | pooled N steps | previous | step N | - : the data that levels and codes were fitted on",
    ),
    "note": ("TEXT", "why a value is missing, or open-loop"),
}
#: another name of a column -> its own
ALIASES = {"vnmse": "relative_variance"}
KEY = ("tensor", "step", "codec", "draw")
#: columns that depend on the codec alone
OF_CODEC = ("method", "bits", "params")
#: columns that are stored with each row, besides its key
MEASURED = tuple(name for name in COLUMNS if name not in (*KEY, *OF_CODEC))
#: those of them that hold the number of a text
TEXTS = tuple(name for name in MEASURED if COLUMNS[name][0] == "TEXT")

_NAMES = """
CREATE TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE TABLE codecs (id INTEGER PRIMARY KEY, codec TEXT NOT NULL UNIQUE, method TEXT, bits INTEGER, params TEXT);
"""
_CELLS = f"""
CREATE TABLE cells (tensor INTEGER NOT NULL, step INTEGER NOT NULL, codec INTEGER NOT NULL, draw INTEGER NOT NULL,
{", ".join(f"{name} {'INTEGER' if name in TEXTS else COLUMNS[name][0]}" for name in MEASURED)},
PRIMARY KEY (tensor, step, codec, draw)) WITHOUT ROWID;
CREATE TABLE spent (tensor INTEGER, step INTEGER, codec INTEGER, draw INTEGER, stage INTEGER, seconds REAL);
"""


def _spelled(columns: tuple[str, ...], texts: tuple[str, ...], codec: tuple[str, ...], table: str) -> str:
    """A query for a table that replaces numbers by texts."""
    shown = {name: f"{name}_text.text AS {name}" for name in texts} | {name: f"codecs.{name}" for name in codec}
    columns_of = ", ".join(shown.get(name, name) for name in columns)
    joins = " ".join(f"LEFT JOIN texts AS {name}_text ON {name}_text.id = {table}.{name}" for name in texts)
    return f"SELECT {columns_of} FROM {table} {joins} LEFT JOIN codecs ON codecs.id = {table}.codec"


#: A query for all rows, which asks only the tables.
ROWS = _spelled(tuple(COLUMNS), ("tensor", *TEXTS), ("codec", *OF_CODEC), "cells")
_SPENT = ("tensor", "step", "codec", "draw", "stage", "seconds")
_VIEWS = f"""
CREATE VIEW rows AS {ROWS};
CREATE VIEW times AS {_spelled(_SPENT, ("tensor", "stage"), ("codec",), "spent")};
"""
_REST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE warnings (text TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE details (tensor TEXT, step INTEGER, what TEXT, value TEXT, PRIMARY KEY (tensor, step, what)) WITHOUT ROWID;
"""


def create(sql: sqlite3.Connection) -> None:
    """Make the tables of an empty file, inside the transaction that is open."""
    # executescript would commit what is open.
    for statement in (_REST + _NAMES + _CELLS + _VIEWS).split(";"):
        if statement.strip():
            sql.execute(statement)


def nonfinite_line(noted: Iterable[tuple[str, int, object]]) -> tuple[str, ...]:
    """One warning that counts all gradients with NaN or infinity, of the (tensor, step, note) of rows; or none.

    >>> nonfinite_line([("w", 3, None), ("w", 4, "2 non-finite, skipped"), ("b", 4, None)])
    ('NaN or infinity in the gradients of 1 of 2 tensors, at 1 of 2 steps, first at step 4: skipped',)
    """
    tensors, steps = set(), set()
    bad: dict[tuple[str, int], str] = {}
    for tensor, step, note in noted:
        if tensor != WHOLE_MODEL:
            tensors.add(tensor)
            steps.add(step)
            if isinstance(note, str) and NONFINITE in note:
                bad[tensor, step] = note.partition(NONFINITE)[2].partition(";")[0]
    if not bad:
        return ()
    which = f"{len({tensor for tensor, _ in bad})} of {len(tensors)} tensor{'s' * (len(tensors) != 1)}"
    times = {step for _, step in bad}
    when = f"{len(times)} of {len(steps)} step{'s' * (len(steps) != 1)}, first at step {min(times)}"
    done = " or ".join(sorted(set(bad.values())))
    return (f"NaN or infinity in the gradients of {which}, at {when}: {done}",)
