"""The tables of a sweep's result file, and how files of older versions become like new ones.

Texts that many rows repeat stand once, in ``texts``, and a codec's spec, method, bits and parameters in ``codecs``.
What was measured is in ``cells``, the times in ``spent``, with numbers in place of texts. The views ``rows`` and
``times`` put everything together, one line each, for any SQL tool.
"""

# ruff: noqa: S608 - statements are put together from the names of columns above, from nothing that anyone gives
from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import sqlite3

FORMAT = "gtrace-sweep"
VERSION = 3

#: version -> the tables that its files have
TABLES = {
    1: ("meta", "warnings", "details", "rows", "times"),
    2: ("meta", "warnings", "details", "texts", "codecs", "cells", "spent"),
    3: ("meta", "warnings", "details", "texts", "codecs", "cells", "spent"),
}

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
    "noise_ratio": (
        "REAL",
        "squared error that averaging over workers shrinks / gradient noise: variance of Q(g) over tr Cov of one "
        "worker's gradient",
    ),
    "update_error": ("REAL", "||(Q(g) - g) / sqrt(v)||^2 / ||g / sqrt(v)||^2 with Adam's second moments v"),
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
    "sparsity": ("REAL", "fraction of zeros after decoding"),
    "saturated": ("REAL", "fraction clipped or saturated"),
    "flushed": ("REAL", "fraction of non-zeros that underflowed to zero"),
    "fitted_on": ("TEXT", "itself | previous | step N | - : the data that levels and codes were fitted on"),
    "note": ("TEXT", "why a value is missing, or open-loop"),
}
#: columns that no file before version 3 has
_SINCE_3 = ("noise_ratio", "update_error")
KEY = ("tensor", "step", "codec", "draw")
#: columns that hang on the codec alone
OF_CODEC = ("method", "bits", "params")
#: columns that are stored with each row, besides its key
MEASURED = tuple(name for name in COLUMNS if name not in (*KEY, *OF_CODEC))
#: those of them that hold the number of a text
TEXTS = tuple(name for name in MEASURED if COLUMNS[name][0] == "TEXT")

_NAMES = """
CREATE {temp} TABLE texts (id INTEGER PRIMARY KEY, text TEXT NOT NULL UNIQUE);
CREATE {temp} TABLE codecs (id INTEGER PRIMARY KEY, codec TEXT NOT NULL UNIQUE, method TEXT, bits INTEGER, params TEXT);
"""
_CELLS = f"""
CREATE TABLE cells (tensor INTEGER NOT NULL, step INTEGER NOT NULL, codec INTEGER NOT NULL, draw INTEGER NOT NULL,
{", ".join(f"{name} {'INTEGER' if name in TEXTS else COLUMNS[name][0]}" for name in MEASURED)},
PRIMARY KEY (tensor, step, codec, draw)) WITHOUT ROWID;
CREATE TABLE spent (tensor INTEGER, step INTEGER, codec INTEGER, draw INTEGER, stage INTEGER, seconds REAL);
"""


def _spelled(columns: tuple[str, ...], texts: tuple[str, ...], codec: tuple[str, ...], table: str) -> str:
    """A query for a table with texts in place of numbers."""
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
_FROM_1 = f"""
INSERT INTO texts (text) SELECT tensor FROM {{rows}}
UNION SELECT tensor FROM {{times}} UNION SELECT stage FROM {{times}}
{" ".join(f"UNION SELECT {name} FROM {{rows}} WHERE {name} NOT NULL" for name in TEXTS)};
INSERT INTO codecs (codec, method, bits, params) SELECT codec, method, bits, params FROM {{rows}} GROUP BY codec;
INSERT OR IGNORE INTO codecs (codec) SELECT codec FROM {{times}};
"""


def _numbered(columns: tuple[str, ...], texts: tuple[str, ...], table: str) -> str:
    """A query for a table of version 1 with numbers in place of texts."""
    shown = {name: f"{name}_text.id AS {name}" for name in texts} | {"codec": "codecs.id AS codec"}
    shown |= {name: f"NULL AS {name}" for name in _SINCE_3}
    columns_of = ", ".join(shown.get(name, f"old.{name}") for name in columns)
    joins = " ".join(f"LEFT JOIN texts AS {name}_text ON {name}_text.text = old.{name}" for name in texts)
    return f"SELECT {columns_of} FROM {{{table}}} AS old {joins} LEFT JOIN codecs ON codecs.codec = old.codec"


_CELLS_OF_1 = _numbered((*KEY, *MEASURED), ("tensor", *TEXTS), "rows")
_SPENT_OF_1 = _numbered(_SPENT, ("tensor", "stage"), "times")
_REST = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE warnings (text TEXT PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE details (tensor TEXT, step INTEGER, what TEXT, value TEXT, PRIMARY KEY (tensor, step, what)) WITHOUT ROWID;
"""


def create(sql: sqlite3.Connection) -> None:
    """Make the tables of an empty file, inside the transaction that is open."""
    _run(sql, _REST + _NAMES.format(temp="") + _CELLS + _VIEWS)


def upgrade(sql: sqlite3.Connection, version: int) -> None:
    """Turn a file of an older version into one of this version, inside the transaction that is open."""
    old = {"rows": "old_rows", "times": "old_times"}
    steps = {
        1: "ALTER TABLE rows RENAME TO old_rows; ALTER TABLE times RENAME TO old_times;"
        + _NAMES.format(temp="")
        + _FROM_1.format(**old)
        + _CELLS
        + f"INSERT INTO cells {_CELLS_OF_1.format(**old)}; INSERT INTO spent {_SPENT_OF_1.format(**old)};"
        + "DROP TABLE old_rows; DROP TABLE old_times;"
        + _VIEWS,
        2: "DROP VIEW rows; DROP VIEW times;"
        + "".join(f"ALTER TABLE cells ADD COLUMN {name} REAL;" for name in _SINCE_3)
        + _VIEWS,
    }
    _run(sql, steps[version] + f"UPDATE meta SET value = '{VERSION}' WHERE key = 'version';")


def present(sql: sqlite3.Connection, version: int) -> None:
    """Let a file of an older version look like one of this version to this connection, which may only read it."""
    old = {"rows": "main.rows", "times": "main.times"}
    steps = {
        1: "PRAGMA temp_store = MEMORY;"
        + _NAMES.format(temp="TEMP")
        + _FROM_1.format(**old)
        + f"CREATE TEMP VIEW cells AS {_CELLS_OF_1.format(**old)};"
        + f"CREATE TEMP VIEW spent AS {_SPENT_OF_1.format(**old)};",
        2: f"CREATE TEMP VIEW cells AS SELECT *, {', '.join(f'NULL AS {name}' for name in _SINCE_3)} FROM main.cells;",
    }
    _run(sql, steps[version])


def _run(sql: sqlite3.Connection, script: str) -> None:
    # executescript would commit what is open.
    for statement in script.split(";"):
        if statement.strip():
            sql.execute(statement)
