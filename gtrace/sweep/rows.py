"""Rows of the result store, made from measurements, and the data for figures of levels."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.codecs import Codec, level_grid
from gtrace.codecs.grids import LeastVariance
from gtrace.coding import ENVELOPE_BYTES
from gtrace.fitting import alq_levels, expected_variance
from gtrace.metrics import COMPARED, Comparison, ratio, relative, snr_db
from gtrace.noise import Noise, noise_ratio
from gtrace.sweep.schema import EXPECTATION
from gtrace.trace.sketches import sketch_name
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from numpy.typing import NDArray

    from gtrace.codecs.base import CodedBits
    from gtrace.codecs.grids import Expectations
    from gtrace.codecs.level_sets import LevelSets
    from gtrace.sketch import MomentSketch
    from gtrace.sweep.level_draws import DrawnSets
    from gtrace.sweep.store import Row


#: relative uncertainty of a Wasserstein distance above which the row says so
_DOUBTFUL = 1e-3


@lru_cache(maxsize=1024)
def identity(codec: Codec) -> Row:
    """The columns that identify the codec of a row; equal codecs share one object, so do not change it."""
    parameters = codec.parameters
    return {
        "codec": str(codec),
        "method": codec.name,
        "bits": parameters.get("bits"),
        "params": json.dumps(parameters, sort_keys=True),
        "sparsity_asked": parameters.get("sparsity"),
    }


def expected_columns(
    common: Row, expected: Expectation | Expectations, optimum: float | NDArray[np.float64] | None = None
) -> Row:
    """The columns of closed forms: one row's, or, with arrays in them, those of many codecs.

    Args:
        common: the columns that do not depend on the measurement, with ``energy``.
        expected: the expectation of the codec, or of each of the codecs.
        optimum: the least error of any levels of the same number, if it was computed.
    """
    energy = common["energy"]
    variance = relative(expected.squared_error, energy)
    best = None if optimum is None else relative(optimum, energy)
    found = {
        **common,
        "draw": EXPECTATION,
        "squared_error": expected.squared_error,
        "relative_variance": variance,
        "relative_variance_bound": relative(expected.error_bound, energy),
        "optimal_variance": best,
        "times_optimal": None if best is None else ratio(variance, best),
        "relative_bias": relative(expected.bias, np.sqrt(energy)),
        "snr_db": snr_db(energy, expected.squared_error),
        "bits_fixed": expected.bits_fixed,
        "bits_entropy": expected.bits_entropy,
        "bits_huffman": expected.bits_huffman,
        "bits_norms": expected.bits_norms,
        "sparsity": expected.sparsity,
        "bits_payload": expected.bits_payload,
    }
    if isinstance(expected, Expectation):
        found["model_variance"] = relative(expected.model_error, energy)
        found["saturated"], found["flushed"] = expected.saturated, expected.flushed
    return found


class Drawn(NamedTuple):
    """The result of one encoding.

    Attributes:
        found: the decoded tensor compared with the exact one.
        body: bytes of the payload without its envelope.
        coded: bits per coordinate of the payload under each coder, if they were measured.
        clipping: shares saturated and flushed, if the codec has a limited range.
        spent: stage -> seconds.
        w1_doubt: the largest possible error of the Wasserstein distance, None if all values were sorted.
        window_error: ||sum of errors||^2 over the window that ends here, None if none does.
    """

    found: Comparison
    body: int
    coded: CodedBits | None
    clipping: tuple[float, float] | None
    spent: dict[str, float]
    w1_doubt: float | None = None
    window_error: float | None = None


def draw_row(common: Row, codec: Codec, drawn: Drawn, expected: Expectation | None) -> Row:
    """A row of one encoding.

    Args:
        common: as in :func:`expected_columns`, with ``draw`` and ``n``.
        codec: the codec.
        drawn: the result of the encoding.
        expected: the codec's expectation at this step, if it has one.
    """
    found, energy = drawn.found, common["energy"]
    saturated, flushed = drawn.clipping or (None, None)
    bias = None if expected is None else expected.bias
    if codec.unbiased:
        bias = 0.0
    elif codec.deterministic:
        # Only the coins for exact zeros are random.
        chance = 0.0 if expected is None else max(0.0, expected.squared_error - expected.bias**2)
        bias = math.sqrt(max(0.0, found.squared_error - chance))
    row = {
        **common,
        **{name: getattr(found, name) for name in COMPARED},
        "relative_variance": relative(found.squared_error, energy),
        "relative_bias": None if bias is None else relative(bias, math.sqrt(energy)),
        "w1_method": "exact" if drawn.w1_doubt is None else "sketch",
        "saturated": saturated,
        "flushed": flushed,
        **(drawn.coded.columns if drawn.coded else {}),
        "bits_norms": None if expected is None else expected.bits_norms,
        "bits_payload": 8.0 * drawn.body / max(1, common["n"]),
    }
    if drawn.w1_doubt is not None and drawn.w1_doubt > _DOUBTFUL * found.w1:
        said = f"w1 within {relative(drawn.w1_doubt, found.w1):.1%}"
        if drawn.w1_doubt > found.w1:
            said = "w1 is less than a histogram tells"
            row.update(dict.fromkeys(("w1", "w1_normalized", "w1_mcgq", "w1_method")))
        row["note"] = "; ".join(filter(None, (row["note"], said)))
    return row


def drawn_columns(common: Row, sets: LevelSets, found: DrawnSets, expected: Expectations) -> Row:
    """The columns of one encoding by each of many codecs, as :func:`draw_row` has them for one."""
    energy = common["energy"]
    return {
        **common,
        **{name: getattr(found.compared, name) for name in COMPARED},
        "relative_variance": relative(found.compared.squared_error, energy),
        "relative_bias": relative(0.0 if sets.codecs[0].unbiased else expected.bias, np.sqrt(energy)),
        "w1_method": "exact",
        "bits_fixed": found.fixed,
        "bits_entropy": found.entropy,
        "bits_huffman": found.huffman,
        "bits_norms": expected.bits_norms,
        "bits_payload": 8.0 * found.body / np.maximum(1, common["n"]),
    }


def complete(rows: Iterable[Row], stateful: Container[str], dtype_bits: int, noise: Noise | None) -> None:
    """Add to a step's rows, or to columns of many, what follows from the other columns: rates and the noise ratio.

    The ratio needs bias and variance apart. They are known for expectations, and for draws of codecs that are unbiased
    or deterministic. For other draws nobody can split the error, and what a stateful codec remembers is sent later.

    Args:
        rows: the rows; those of skipped steps are not among them.
        stateful: the codecs among theirs that keep memory.
        dtype_bits: bits per element of the run's own dtype.
        noise: of the gradient at this step, if it is known.
    """
    for columns in rows:
        total = columns["bits_payload"] + columns["bits_shared"]
        columns["bits_total"] = total
        columns["bits_envelope"] = 8.0 * ENVELOPE_BYTES / np.maximum(1, columns["n"])
        columns["ratio_float32"], columns["ratio_dtype"] = ratio(32.0, total), ratio(float(dtype_bits), total)
        if noise is None:
            continue
        remembers = columns.get("codec") in stateful
        if remembers or columns["relative_bias"] is None:
            why = "it remembers its error" if remembers else "a draw does not tell its bias"
            columns["note"] = "; ".join(filter(None, (columns.get("note"), f"no noise ratio: {why}")))
        else:
            bias = columns["relative_bias"] * np.sqrt(columns["energy"])
            columns["noise_ratio"] = noise_ratio(columns["squared_error"], bias, noise)


#: more levels than this cannot be distinguished in a figure
MOST_LEVELS = 32
#: starts of the papers' coordinate descent that are compared
STARTS = ("uniform", "exponential", "companding")
SWEEPS = 60
_PER_OCTAVE = 4
_OCTAVES = 30


def levels_of(codec: Codec, state: State) -> dict[str, Any] | None:
    """The magnitudes that a level codec rounds to, if they are few enough to draw."""
    grid = level_grid(codec)
    if grid is None or codec.needs is None or codec.needs.norm == "none":
        return None
    levels = grid.levels(state)
    if levels.size > MOST_LEVELS:
        return None
    return {"levels": levels.tolist(), "zero": grid.zero, "law": sketch_name(codec.needs)}


def density(sketch: MomentSketch) -> dict[str, Any]:
    """A histogram of a sketch's values on a logarithmic axis of r, four classes an octave, from 2^-30 to 1.

    Returns:
        ``edges``, ``share`` of all values in each class, ``energy`` (each class's share of the squared norm),
        ``zeros`` and ``below`` (shares of exact zeros and of values below the first edge).
    """
    edges = 2.0 ** (np.arange(-_OCTAVES * _PER_OCTAVE, 1) / _PER_OCTAVE)
    middle = (sketch.lower + sketch.upper) / 2
    where = np.searchsorted(edges, middle, side="right")
    count = np.bincount(where, sketch.sums[:, 0], edges.size + 1)
    w, w1, w2 = sketch.sums[:, 3], sketch.sums[:, 4], sketch.sums[:, 5]
    energy = np.bincount(where, w * sketch.lower**2 + 2 * sketch.lower * w1 + w2, edges.size + 1)
    # r = 1 has a bin of its own above the last edge
    for table in (count, energy):
        table[-2] += table[-1]
    whole = max(1, sketch.quantized)
    return {
        "edges": edges.tolist(),
        "share": (count[1:-1] / whole).tolist(),
        "energy": (energy[1:-1] / max(energy.sum(), 1e-300)).tolist(),
        "zeros": sketch.zeros / whole,
        "below": float(count[0]) / whole,
    }


def convergence(codecs: Iterable[Codec], sketches: dict[SummarySpec, MomentSketch]) -> dict[str, Any] | None:
    """The objective after each sweep of the papers' coordinate descent, from three starts.

    For the ALQ codec with the least number of bits from 3 up among ``codecs``; None without one.
    """
    grids = {str(c): (c, level_grid(c)) for c in codecs}
    chosen = [(g.bits, str(c), c, g) for c, g in grids.values() if isinstance(g, LeastVariance) and g.bits >= 3]
    if not chosen:
        return None
    _, _, codec, grid = min(chosen, key=lambda item: item[:2])
    sketch = None if codec.needs is None else sketches.get(codec.needs)
    if sketch is None or not sketch.sums.size:
        return None
    curves = {}
    for start in STARTS:
        _, history = alq_levels(sketch, grid.bits, grid.zero, grid.weighted, "cd", start, history=True, sweeps=SWEEPS)
        curves[start] = history.tolist()
    levels = alq_levels(sketch, grid.bits, grid.zero, grid.weighted)
    best = expected_variance(sketch, levels, grid.zero, grid.weighted)
    return {"codec": str(codec), "objective": curves, "best": best}
