"""What figures of fitted levels need and rows do not hold: levels, the density of r, how a fit converged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.codecs import LevelCodec
from gtrace.codecs.grids import LeastVariance
from gtrace.fitting import alq_levels

if TYPE_CHECKING:
    from collections.abc import Iterable

    from gtrace.codecs import Codec
    from gtrace.sketch import MomentSketch
    from gtrace.types import State, SummarySpec

#: more levels than this cannot be told apart in a figure
MOST_LEVELS = 32
#: starts of the papers' coordinate descent that are compared
STARTS = ("uniform", "exponential", "companding")
SWEEPS = 60
_PER_OCTAVE = 4
_OCTAVES = 30


def spec_name(spec: SummarySpec) -> str:
    """A sketch's norm and bucket size as text, ``l2:8192``."""
    return f"{spec.norm}:{spec.bucket_size or 'none'}"


def levels_of(codec: Codec, state: State) -> dict[str, Any] | None:
    """The magnitudes that a level codec rounds to, where there are few enough to draw."""
    if not isinstance(codec, LevelCodec) or codec.needs.norm == "none":
        return None
    levels = codec.levels(state)
    if levels.size > MOST_LEVELS:
        return None
    return {"levels": levels.tolist(), "zero": codec.has_zero, "law": spec_name(codec.needs)}


def density(sketch: MomentSketch) -> dict[str, Any]:
    """How the values of a sketch lie on a logarithmic axis of r, four classes an octave, from 2^-30 to 1.

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

    For the ALQ codec with the fewest bits from 3 up among ``codecs``; None where there is none.
    """
    grids = {str(c): (c, c.parts.grid) for c in codecs if isinstance(c, LevelCodec)}
    chosen = [(g.bits, str(c), c, g) for c, g in grids.values() if isinstance(g, LeastVariance) and g.bits >= 3]
    if not chosen:
        return None
    _, _, codec, grid = min(chosen, key=lambda item: item[:2])
    sketch = sketches.get(codec.needs)
    if sketch is None or not sketch.sums.size:
        return None
    curves = {}
    for start in STARTS:
        _, history = alq_levels(sketch, grid.bits, grid.zero, grid.weighted, "cd", start, history=True, sweeps=SWEEPS)
        curves[start] = history.tolist()
    _, best = alq_levels(sketch, grid.bits, grid.zero, grid.weighted, history=True)
    return {"codec": str(codec), "objective": curves, "best": float(best[-1])}


def check_detail(what: str, value: Any) -> None:
    """Check that a stored detail of a known kind holds what figures need.

    Raises:
        ValueError: it does not.
    """
    kind = what.partition(" ")[0]
    if kind not in ("levels", "density", "convergence", "noise"):
        return
    fine = isinstance(value, dict)
    if fine and kind == "levels":
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
        raise ValueError(f"details '{kind}' of another form")


def _numbers(value: Any) -> int:
    """How many numbers a list holds; -1 where it is none, or holds something else."""
    fine = isinstance(value, list) and all(type(v) in (int, float) and abs(v) < 1e300 for v in value)
    return len(value) if fine else -1
