"""What a sweep says beside its errors: levels and how they were fitted, whether to rotate, and exchanges.

Of each tensor that a sweep kept them for: levels, the law of the data and the way to them. Rotations: on each tensor
the best codec that rotates is compared with the best one that does not, at equal bits. A rotation makes values nearly
normal, whatever they were. That helps if they are worse than normal for a codec, and hurts where a codec takes
advantage of what they are. EDEN's error hardly depends on the values, so its closed form is compared if no codec of a
sweep rotates. Only codecs without bias and memory take part, since theirs average out.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace.codecs import codec, expected_on_any
from gtrace.metrics import ratio
from gtrace.report.analysis.families import LEVEL, PREFERRED_BITS, Configuration, Family, Rates, all_at_bits, curves_of
from gtrace.report.names import natural_order
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from gtrace.kernels import Floats
    from gtrace.report.analysis.cells import Coder
    from gtrace.report.analysis.evidence import StepTable
    from gtrace.sweep import SweepResult


#: Numbers of levels at which a figure tells methods apart best: 3 and 4 bits, and which of them is preferred.
FEWEST, MOST = 4, 8
#: Tensors that a figure names one by one; more are named in groups, or every few.
MOST_NAMED = 60
#: Panels of a figure of several tensors.
MOST_TENSORS = 4


@dataclass(frozen=True, slots=True)
class Density:
    """How the values r of a tensor lie on a logarithmic axis.

    Attributes:
        law: norm and bucket size that r is relative to, ``l2:8192``.
        edges: (K + 1,) ascending, the last is 1.
        share: (K,) part of all values in each class.
        energy: (K,) part of the squared norm in each class.
        zeros: part of the values that is exactly 0.
        below: part of the values that is not 0 and below the first edge.
    """

    law: str
    edges: Floats
    share: Floats
    energy: Floats
    zeros: float
    below: float

    def quantile(self, part: float) -> float:
        """The upper edge of the class that holds this part of the values above the first edge."""
        total = np.cumsum(self.share)
        if not len(total) or total[-1] <= 0:
            return 1.0
        return float(self.edges[1 + min(int(np.searchsorted(total, part * total[-1])), len(total) - 1)])


@dataclass(frozen=True, slots=True)
class LevelSet:
    """The magnitudes that a configuration rounds to: (L,) ascending, the last is 1."""

    spec: str
    law: str
    levels: Floats


@dataclass(frozen=True, slots=True)
class Convergence:
    """The objective of coordinate descent: start -> (sweeps + 1,) values, the first before any sweep."""

    spec: str
    objective: dict[str, Floats]
    best: float


@dataclass(frozen=True, slots=True)
class TensorFit:
    """What is known of one tensor at the last step of a sweep."""

    tensor: str
    step: int
    densities: tuple[Density, ...]
    levels: tuple[LevelSet, ...]
    convergence: Convergence | None

    @property
    def label(self) -> str:
        """The tensor in words."""
        return "whole model" if self.tensor == WHOLE_MODEL else self.tensor


def read_fits(result: SweepResult) -> tuple[TensorFit, ...]:
    """The details of a sweep, largest tensor first, a whole model's own last."""
    last: dict[str, int] = {}
    for tensor, step, _ in result.details:
        last[tensor] = max(step, last.get(tensor, step))
    size = dict.fromkeys(last, 0.0)
    for name, n in zip(result["tensor"], result["n"], strict=True):
        if name in size:
            size[name] = max(size[name], float(n))
    order = sorted(natural_order(last), key=lambda name: (name == WHOLE_MODEL, -size[name]))
    return tuple(_fit(name, last[name], result.details) for name in order)


def _fit(tensor: str, step: int, details: Mapping[tuple[str, int, str], Any]) -> TensorFit:
    densities, levels, convergence = [], [], None
    for (name, at, what), value in details.items():
        if (name, at) != (tensor, step):
            continue
        kind, _, rest = what.partition(" ")
        if kind == "density":
            edges, share, energy = (np.array(value[key], dtype=np.float64) for key in ("edges", "share", "energy"))
            densities.append(Density(rest, edges, share, energy, float(value["zeros"]), float(value["below"])))
        elif kind == "levels":
            levels.append(LevelSet(rest, str(value["law"]), np.array(value["levels"], dtype=np.float64)))
        elif kind == "convergence" and value["best"] > 0:
            curves = {str(k): np.array(v, dtype=np.float64) for k, v in value["objective"].items()}
            convergence = Convergence(str(value["codec"]), curves, float(value["best"]))
    return TensorFit(tensor, step, tuple(densities), tuple(levels), convergence)


def common_count(fits: Sequence[TensorFit]) -> int:
    """The number of levels at which most configurations can be set side by side; 0 if there are none.

    Of :data:`FEWEST` to :data:`MOST` levels, as long as there are any: two levels are the same for every method,
    and many cannot be told apart.
    """
    counts = Counter(len(own.levels) for fit in fits for own in fit.levels)
    candidates = [n for n in counts if FEWEST <= n <= MOST] or list(counts)
    return max(candidates, key=lambda n: (counts[n], -abs(n - MOST)), default=0)


def levels_on(fit: TensorFit, specs: Collection[str], n: int) -> list[tuple[Density, list[LevelSet]]]:
    """Each density that holds anything, with the ``n`` levels on it of these configurations, in their order."""
    sets = {own.spec: own for own in fit.levels if len(own.levels) == n}
    found = []
    for density in fit.densities:
        here = [sets[spec] for spec in specs if spec in sets and sets[spec].law == density.law]
        if here and density.share.sum() > 0:
            found.append((density, here))
    return found


RotationVerdict = Literal["rotate", "leave", "same"]
#: the codec that is compared if none of a sweep rotates
_KNOWN = "eden"
#: its bits, in steps of a half
_BITS = tuple(k / 2 for k in range(2, 17))


@dataclass(frozen=True, slots=True)
class LayerRotation:
    """A tensor with and without a rotation, each with the best codec at equal bits of this tensor.

    Attributes:
        energy: share of the gradient's energy.
        rotated: label of the codec that rotates; empty if none has these bits.
        rotated_error: its share of the tensor's energy lost, NaN likewise.
        plain: label of the codec that does not.
        plain_error: its error.
    """

    tensor: str
    elements: int
    energy: float
    rotated: str
    rotated_error: float
    plain: str
    plain_error: float

    @property
    def known(self) -> bool:
        """Whether both were found at these bits."""
        return bool(self.rotated and self.plain)

    @property
    def ratio(self) -> float:
        """Error with a rotation over the error without one; NaN if one of them is not known."""
        return self.rotated_error / self.plain_error if self.known else math.nan

    @property
    def verdict(self) -> RotationVerdict:
        """Whether to rotate; errors that differ by less than 2% are the same."""
        if self.ratio * (1 + LEVEL) < 1:
            return "rotate"
        return "leave" if self.ratio > 1 + LEVEL else "same"


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotate or not, tensor by tensor; EDEN's closed form is compared unless codecs that rotate were measured."""

    bits: float
    measured: bool
    layers: tuple[LayerRotation, ...]

    @property
    def known(self) -> tuple[LayerRotation, ...]:
        """The tensors on which both were found."""
        return tuple(layer for layer in self.layers if layer.known)


def rotates(method: str) -> bool:
    """Whether a codec, with everything around it, rotates values before it rounds them."""
    return not {"rotate", "thc", _KNOWN}.isdisjoint(method.split(":"))


def compare_rotation(
    table: StepTable,
    families: Sequence[Family],
    configurations: Sequence[Configuration],
    layers: Sequence[tuple[str, int, float]],
    targets: Sequence[float],
    coder: Coder,
) -> Rotation | None:
    """The codecs with and without a rotation on each tensor; None if no tensor has both at any of the targets.

    At the target, in bits of ``coder``, at which most codecs can be compared, the nearest to three bits of those.
    ``table`` holds the errors of single steps and one worker, ``layers`` the name, elements and share of energy of each
    tensor.
    """
    fit = [f for f in families if f.members and all(configurations[i].averages_out for i in f.members)]
    plain = [f for f in fit if not rotates(f.method)]
    rotated = [f for f in fit if rotates(f.method)]

    def of(place: int, target: float) -> LayerRotation:
        bits, errors = table.layer_bits[:, place], table.layer_variance[:, place]
        name, elements, energy = layers[place]
        curves = curves_of(rotated, bits, errors) or [_closed(elements, coder)]
        with_it = _best([f.label for f in rotated] or [_KNOWN], curves, target)
        without = _best([f.label for f in plain], curves_of(plain, bits, errors), target)
        return LayerRotation(name, elements, energy, *with_it, *without)

    kinds = (rotated, plain) if rotated else (plain,)

    def order(k: int) -> tuple[bool, int, float]:
        known = [sum(math.isfinite(f.at[k].variance) for f in kind) for kind in kinds]
        return not all(known), -sum(known), abs(targets[k] - PREFERRED_BITS)

    for k in sorted(range(len(targets)), key=order):
        found = Rotation(targets[k], bool(rotated), tuple(of(place, targets[k]) for place in range(len(layers))))
        if found.known:
            return found
    return None


def _best(labels: Sequence[str], curves: Sequence[Rates], target: float) -> tuple[str, float]:
    """The label with the least error at these bits; an empty one with NaN if none has them."""
    found = zip(all_at_bits(curves, target), labels, strict=True)
    known = [(at.variance, label) for at, label in found if at.variance > 0]
    error, label = min(known, default=(math.nan, ""))
    return label, error


@lru_cache(maxsize=1 << 12)
def _closed(size: int, coder: Coder) -> Rates:
    """Bits and errors of EDEN on any tensor of this size."""
    known = [expected_on_any(codec(_KNOWN, bits=bits), size) for bits in _BITS]
    return [getattr(one, f"bits_{coder}") for one in known if one], [one.squared_error for one in known if one]


#: the first word of the details
_KIND = "exchange"


@dataclass(frozen=True, slots=True)
class ExchangeError:
    """One codec in one exchange, summed over tensors and steps.

    Attributes:
        exchange: the way, e.g. ``ring``.
        error: of the average that every rank ends with, relative to the exact average's energy.
        sent: bytes that a rank sends for each value.
        across: the part of them that leaves its node.
        source: where the ranks' gradients come from.
    """

    codec: str
    exchange: str
    ranks: int
    error: float
    sent: float
    across: float
    source: str
    tensors: int


def exchanges_of(result: SweepResult) -> tuple[ExchangeError, ...]:
    """The exchanges of a sweep, in the order of ranks and codecs."""
    grouped: dict[tuple[int, str, str], list[tuple[str, Mapping[str, Any]]]] = {}
    for (tensor, _, what), value in result.details.items():
        if what.partition(" ")[0] == _KIND:
            key = int(value["ranks"]), str(value["codec"]), str(value["exchange"])
            grouped.setdefault(key, []).append((tensor, value))
    found = []
    for (ranks, spec, exchange), rows in sorted(grouped.items()):
        numbers = ("error", "energy", "size", "sent", "across")
        error, energy, size, sent, across = (sum(float(value[name]) for _, value in rows) for name in numbers)
        each = max(1.0, size)
        source = ", ".join(sorted({str(value["source"]) for _, value in rows}))
        tensors = len({tensor for tensor, _ in rows})
        relative = float(ratio(error, energy))
        found.append(ExchangeError(spec, exchange, ranks, relative, sent / each, across / each, source, tensors))
    return tuple(found)
