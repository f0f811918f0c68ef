"""Configurations, the families that they form, and their comparison where it is fair: at equal measured bits."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from scipy.interpolate import PchipInterpolator

from gtrace.report.section import Column

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gtrace.kernels import Flags, Floats
    from gtrace.report.statistics import Interval


#: A configuration stands for bits that it is this close to (relative) when nothing can be interpolated there.
TOLERANCE = 0.02
#: Measured bits between two neighbors at most, for an interpolation between them. One more nominal bit takes up to 1.3
#: measured ones: the symbols' entropy grows by about one, and so do levels and code lengths, which are sent apart.
WIDEST = 1.5
#: Bit rates of a comparison at most, and families that it needs.
MOST_TARGETS, OVERLAP = 4, 3
#: Errors that differ by less than this part are the same number.
_EQUAL = 1e-9
#: Bits that a reader asks about first, when several targets can be compared equally well.
PREFERRED_BITS = 3.0
#: Bit rates that are easy to read, the easiest first.
_ROUND = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, *map(float, range(1, 33)))
_HALVES = tuple(k / 2 for k in range(3, 17, 2))
_TENTHS = tuple(k / 10 for k in range(3, 80) if k % 5)
Outcome = Literal["interpolated", "exact", "near", "fewer", "wide", "all-above", "all-below", "lossless", "unmeasured"]

#: Why a cell of the table at equal bits is what it is.
OUTCOMES: dict[Outcome, str] = {
    "interpolated": "interpolated between the two configurations that bracket these bits",
    "exact": "a configuration has exactly these bits",
    "near": f"a configuration is within {TOLERANCE:.0%} of these bits",
    "fewer": "a configuration has fewer bits and less error than anything measured at these bits",
    "wide": "not measured near these bits: the neighbors are more than one nominal bit apart",
    "all-above": "every configuration of this method takes more bits",
    "all-below": "every configuration of this method takes fewer bits, and none has less error than the best here",
    "lossless": "a bracketing configuration has no error at all, so that no logarithm can be taken",
    "unmeasured": "no configuration of this method has both a measured error and bits",
}


#: bits of the configurations of a method, and their errors
Rates: TypeAlias = tuple[Sequence[float], Sequence[float]]
#: configurations and their parts
Mix: TypeAlias = list[tuple[int, float]]


def _sorted_points(bits: Sequence[float], variance: Sequence[float]) -> list[tuple[float, float, int]]:
    """(bits, variance, index) of the points with both numbers, by bits, then by variance."""
    return sorted(
        (b, v, i) for i, (b, v) in enumerate(zip(bits, variance, strict=True)) if math.isfinite(b) and math.isfinite(v)
    )


@dataclass(frozen=True, slots=True)
class AtBits:
    """Error of one method at a number of measured bits.

    Attributes:
        target: bits per coordinate asked for.
        variance: error there, over the energy of the gradient; NaN where the method cannot be compared.
        outcome: how it was found or why it is missing, a key of :data:`OUTCOMES`.
        lower: index of the configuration below (or the one that stands for the target), -1 for none.
        upper: index of the configuration above, equal to ``lower`` where one configuration stands alone.
        bits: measured bits that the error belongs to: ``target``, or those of the configuration that stands for it.
        bias: the part of ``variance`` that is bias, which more workers do not shrink; NaN if it was not asked for.
    """

    target: float
    variance: float
    outcome: Outcome
    lower: int = -1
    upper: int = -1
    bits: float = math.nan
    bias: float = math.nan

    @property
    def elsewhere(self) -> bool:
        """Whether the error belongs to other bits than those asked for, to three digits."""
        return abs(self.bits - self.target) > 1e-3 * self.target

    def among(self, members: Sequence[int]) -> AtBits:
        """The same with indices of all configurations, of which ``members`` are those of the method."""
        return self if self.lower < 0 else replace(self, lower=members[self.lower], upper=members[self.upper])

    def mix(self, bits: Floats) -> Mix:
        """Configurations that stand for the method, with their parts; ``bits`` (C,) of all configurations."""
        if self.lower < 0:
            return []
        if self.lower == self.upper:
            return [(self.lower, 1.0)]
        share = float((self.target - bits[self.lower]) / (bits[self.upper] - bits[self.lower]))
        return [(self.lower, 1 - share), (self.upper, share)]


def at_bits(bits: Sequence[float], variance: Sequence[float], target: float, widest: float = WIDEST) -> AtBits:
    """Error at ``target`` measured bits per coordinate, log-interpolated and never extrapolated.

    Only the order of the measured bits (NaN: unknown) counts, not that of the nominal ones: the two configurations that
    bracket are those with the largest bits below the target and the smallest above it; of several with the same bits
    the one with less error. Neighbours more than ``widest`` bits apart are refused. A configuration with fewer bits and
    less error than that stands for the method instead.
    """
    points = _sorted_points(bits, variance)
    if not points:
        return AtBits(target, math.nan, "unmeasured")
    found = _at(points, target, widest)
    fewer = _best_below(points, target)
    return fewer if fewer is not None and fewer.variance < (1 - _EQUAL) * found.variance else found


def _alone(target: float, point: tuple[float, float, int], outcome: Outcome) -> AtBits:
    return AtBits(target, point[1], outcome, point[2], point[2], point[0])


def _at(points: list[tuple[float, float, int]], target: float, widest: float) -> AtBits:
    here = [point for point in points if point[0] == target]
    if here:
        return _alone(target, here[0], "exact")
    under = [point for point in points if point[0] < target]
    over = [point for point in points if point[0] > target]
    if under and over:
        low = min((p for p in under if p[0] == under[-1][0]), key=lambda p: p[1])
        high = over[0]
        if high[0] - low[0] <= widest:
            if low[1] <= 0 or high[1] <= 0:
                return AtBits(target, math.nan, "lossless", low[2], high[2])
            share = (target - low[0]) / (high[0] - low[0])
            value = math.exp((1 - share) * math.log(low[1]) + share * math.log(high[1]))
            return AtBits(target, value, "interpolated", low[2], high[2], target)
    near = min(points, key=lambda p: (abs(p[0] - target), p[1]))
    if abs(near[0] - target) <= TOLERANCE * target:
        return _alone(target, near, "near")
    if under and over:
        return AtBits(target, math.nan, "wide", low[2], high[2])
    return AtBits(target, math.nan, "all-above" if over else "all-below")


def _best_below(points: list[tuple[float, float, int]], target: float) -> AtBits | None:
    best = min((p for p in points if p[0] < target), key=lambda p: (p[1], p[0]), default=None)
    return None if best is None else _alone(target, best, "fewer")


def all_at_bits(curves: Sequence[Rates], target: float) -> list[AtBits]:
    """:func:`at_bits` of several methods, each as (bits, error) of its configurations, held against each other.

    A method that was not measured at the target takes part all the same when it has, at fewer bits, less error than
    every method that was: more bits could only help it.
    """
    found = [at_bits(bits, variance, target) for bits, variance in curves]
    least = min((at.variance for at in found if math.isfinite(at.variance)), default=math.nan)
    for k, (bits, variance) in enumerate(curves):
        fewer = _best_below(_sorted_points(bits, variance), target)
        if math.isnan(found[k].variance) and fewer is not None and fewer.variance < least:
            found[k] = fewer
    return found


def choose_targets(curves: Sequence[Rates]) -> tuple[float, ...]:
    """Up to four bit rates at which the most methods can be compared, ascending; () where nothing was measured.

    Rates where three methods were measured come before those where two were, and round numbers before others. A rate
    where every method loses more than sending nothing, whose error is 1, is of no use to anybody. Each rate adds
    methods that the others do not have, or else has the most methods, or else is near three bits.
    """
    own = sorted({float(f"{b:.{digits}g}") for bits, _ in curves for b in bits if b > 0 for digits in (2, 3)})

    def there(rate: float) -> dict[int, float]:
        found = {k: at_bits(*curve, rate).variance for k, curve in enumerate(curves)}
        return {k: value for k, value in found.items() if value > 0}

    compared = {rate: there(rate) for rate in (*_ROUND, *_HALVES, *_TENTHS, *own)}
    overlap = range(min(OVERLAP, len(curves)), 1, -1)
    for useful, needed in [*((limit, n) for limit in (1.0, math.inf) for n in overlap), (1.0, 1), (math.inf, 1)]:
        fit: list[float] = []
        # Whole bits; halves beside a single one; anything else only when there is nothing yet.
        for pool, enough in ((_ROUND, 2), (_HALVES, 1), (_TENTHS, 1), (own if needed == 1 else (), 1)):
            fit += [t for t in pool if len(compared[t]) >= needed and min(compared[t].values()) <= useful]
            if len(fit) >= enough:
                return _spread({t: set(compared[t]) for t in fit})
    return ()


def _spread(compared: dict[float, set[int]]) -> tuple[float, ...]:
    """Of the rates of ``compared`` the few that show most methods, the most often compared first."""
    chosen: list[float] = []
    seen: set[int] = set()
    while len(chosen) < min(MOST_TARGETS, len(compared)):
        rate = max(
            (t for t in compared if t not in chosen),
            key=lambda t: (len(compared[t] - seen), len(compared[t]), -abs(t - PREFERRED_BITS)),
        )
        chosen.append(rate)
        seen |= compared[rate]
    return tuple(sorted(chosen))


def pareto_front(bits: Sequence[float], variance: Sequence[float]) -> Flags:
    """Which points no other point beats: fewer bits at no more error, or less error at no more bits.

    Points with a missing number are never on the front; equal points stand or fall together. What loses more than the
    gradient's own energy is beaten by sending nothing.

    >>> pareto_front([0.5, 1, 2, 3, 3], [1.5, 0.5, 0.6, 0.1, 0.2]).tolist()
    [False, True, False, True, False]
    """
    on_front = np.zeros(len(bits), dtype=np.bool_)
    best, best_bits = math.inf, math.nan
    for b, v, i in _sorted_points(bits, variance):
        if v <= 1 and (v < best or (v == best and b == best_bits)):
            on_front[i] = True
            best, best_bits = v, b
    return on_front


#: Error must fall by this part for more bits to be worth a point of the curve.
WORTH = 1e-3
#: A curve needs this many points to be one.
FEWEST_POINTS = 3


def envelope(bits: Sequence[float], variance: Sequence[float]) -> Floats:
    """(P, 2) log bits and log variance of the points of a curve that no other point of it beats, bits rising.

    What takes more bits for more or for the same error is never chosen, so it is not part of the curve. Points without
    error have no logarithm.
    """
    kept: list[tuple[float, float]] = []
    for b, v, _ in _sorted_points(bits, variance):
        if b > 0 and v > 0 and (not kept or (v < kept[-1][1] * (1 - WORTH) and b > kept[-1][0])):
            kept.append((b, v))
    return np.log(np.array(kept, dtype=np.float64).reshape(-1, 2))


def bd_rate(test: Floats, reference: Floats, names: tuple[str, str] = ("", "")) -> BDRate:
    """Mean of log rate of ``test`` less that of ``reference`` over the common errors, as a relative change of bits.

    Both curves are interpolated piecewise-cubic (PCHIP, which keeps them monotone) as log bits over log relative
    variance, and the difference is integrated exactly over the range that both reach (Bjontegaard, VCEG-M33, 2001,
    with the interpolation that later practice uses).

    Args:
        test: (P, 2) log bits and log variance, bits rising and variance falling strictly.
        reference: likewise.
        names: of the two families.
    """
    if min(len(test), len(reference)) < FEWEST_POINTS:
        return BDRate(*names, why=f"fewer than {FEWEST_POINTS} configurations that no other of its own beats")
    low, high = max(test[-1, 1], reference[-1, 1]), min(test[0, 1], reference[0, 1])
    if not high > low:
        return BDRate(*names, why="no error that both reach")
    rates = [PchipInterpolator(curve[::-1, 1], curve[::-1, 0]) for curve in (test, reference)]
    areas = [float(rate.integrate(low, high)) for rate in rates]
    change = math.expm1((areas[0] - areas[1]) / (high - low))
    ends = (math.exp(float(rates[1](high))), math.exp(float(rates[1](low))))
    return BDRate(*names, change, math.exp(low), math.exp(high), ends)


#: Parameters that trade bits for error, with their short form; every other one makes a new family.
RATE_PARAMETERS = {
    "bits": "b{}",
    "ratio": "ratio {}",
    "sparsity": "sparsity {}",
    "amount": "amount {}",
    "rank": "rank {}",
    "bin_size": "bin {}",
}

#: methods that need no codec, with their bits
PLAIN = {"none": 32.0, "bf16": 16.0, "fp16": 16.0}
#: Methods whose levels are fitted to data.
FITTED = ("alq", "alq-n", "alqg", "alqg-n", "amq", "amq-n", "zipml")


def label(
    specs: Sequence[str], methods: Sequence[str], parameters: Sequence[Mapping[str, Any] | None]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Group configurations into families: same method, equal in everything but the rate.

    One whose parameters are missing, None, is a family of its own.

    Returns:
        families: the method, followed by the parameters in which its families differ; and settings: the value of the
        rate parameter, ``b3`` or ``ratio 0.01``, empty for a codec that has none.
    """
    fixed = [
        None if p is None else {k: _plain(v) for k, v in p.items() if k not in RATE_PARAMETERS} for p in parameters
    ]
    differing: dict[str, list[str]] = {}
    for method in dict.fromkeys(methods):
        known = [f for f, m in zip(fixed, methods, strict=True) if m == method and f is not None]
        names = dict.fromkeys(name for f in known for name in f)
        differing[method] = [name for name in names if len({f.get(name, "-") for f in known}) > 1]
    families = []
    for spec, method, own in zip(specs, methods, fixed, strict=True):
        parts = [spec] if own is None else [method, *(f"{k}={own.get(k, '-')}" for k in differing[method])]
        families.append(" ".join(parts))
    return tuple(families), tuple("" if p is None else _setting(p) for p in parameters)


def short_spec(spec: str) -> str:
    """Method and rate of a spec, without the parameters that rarely matter to a reader.

    >>> [short_spec(s) for s in ("qsgdinf:bits=3,bucket_size=8192", "ef:topk:ratio=0.01", "bf16 every=16")]
    ['qsgdinf b3', 'ef:topk ratio 0.01', 'bf16 every=16']
    """
    codec, _, more = spec.partition(" ")
    items = (item.partition("=") for part in codec.split(":") if "=" in part for item in part.split(","))
    values = {key: value for key, _, value in items}
    return " ".join(filter(None, (method_of(codec), _setting(values), more))) or spec


def method_of(spec: str) -> str:
    """The codec of a spec with everything around it, without parameters, and without what a run's name adds.

    >>> [method_of(s) for s in ("qsgdinf:bits=3", "ef:rotate:block=64:qsgd:bits=3", "bf16 every=16")]
    ['qsgdinf', 'ef:rotate:qsgd', 'bf16']
    """
    return ":".join(part for part in spec.partition(" ")[0].split(":") if "=" not in part)


def _setting(parameters: Mapping[str, Any]) -> str:
    given = {name: parameters[name] for name in RATE_PARAMETERS if parameters.get(name) is not None}
    if "bits" in given:
        # A budget of bits takes the place of an amount, whose default is among the parameters all the same.
        given.pop("amount", None)
    return ", ".join(RATE_PARAMETERS[name].format(_plain(value)) for name, value in given.items())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


#: Methods whose errors differ by less than this are too close to call.
LEVEL = 0.02
#: Without an interval, a method must be better in this part of training to be called better.
MOSTLY = 0.9


def decisive(families: Sequence[Family], targets: Sequence[float]) -> int:
    """Index of the target where most families can be compared, the nearest to three bits of those; or -1."""
    known = [sum(math.isfinite(f.at[k].variance) for f in families) for k in range(len(targets))]
    if not any(known):
        return -1
    return max(range(len(known)), key=lambda k: (known[k], -abs(targets[k] - PREFERRED_BITS)))


def ranked(families: Sequence[Family], target: int) -> list[Family]:
    """The families that can be compared at a target (an index), least variance first."""
    found = [f for f in families if math.isfinite(f.at[target].variance)]
    return sorted(found, key=lambda f: f.at[target].variance)


Source = Literal["measured", "expected", "mixed", "none"]


@dataclass(frozen=True, slots=True)
class Measure:
    """A number of a configuration: how rows of a sweep are summed up to it, and its column in a table.

    A new metric is a field of :class:`Configuration`, declared with :func:`shown` and named as its column of a sweep.

    Attributes:
        column: of the table of configurations.
        of: what a mean over cells is weighted by: elements ``n``, ``magnitude`` (their number times mean |g|), or
            ``energy``: then of expectations alone, 0 for a gradient that is zero, and unknown if any cell lacks it;
            empty for what is not a mean of a column.
        expected: a closed form is preferred to the mean over draws.
        absolute: in gradient units, and over mean |g| in a configuration.
        form: of its cells.
        optional: the table has it if any configuration does.
        note: below the table.
    """

    column: Column
    of: Literal["n", "magnitude", "energy", ""] = ""
    expected: bool = False
    absolute: bool = False
    form: str = ""
    optional: bool = False
    note: str = ""


def shown(heading: str, meaning: str, rank: int = 0, **how: Any) -> Any:
    """A field of :class:`Configuration` that is a column of its table; ``how`` as in :class:`Measure`."""
    return field(metadata={"measure": Measure(Column(heading, meaning, rank=rank), **how)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """One codec with one set of parameters, summed over tensors and steps; fields that are shown are in their order.

    A field that is a column of the table says there what it is; NaN if it is not known.

    Attributes:
        family: method, and the parameters that tell it from other families of the same method.
        setting: the parameter that trades bits for error, short (``b3``), empty without one.
        nominal_bits: NaN where the codec has none.
        partial: measured on too few cells to be compared with the others; summed over its own.
        error_source: ``expected`` (closed form) or ``measured`` (from draws), ``mixed``, ``none``.
        bits_source: ``measured`` (encoded bytes), ``expected`` (computed), ``mixed``, ``none``.
        step_ratio_float32: mean over steps of each step's own ratio, as papers also report it.
        fitted_on: source of levels and codes: ``itself``, ``pooled N steps``, ``previous``, ``step N``, or nothing.
        pareto: no other configuration takes fewer bits at no more error, or makes less error at no more bits.
        in_steps: ``relative_variance`` with its interval over steps.
        error: what methods are ranked by; NaN if it was not measured.
        error_bias: the part of ``error`` that is bias, which more workers do not shrink.
        variance: part of ``relative_variance`` of one worker that is not bias.
        window_error: as ``relative_variance``, of what has arrived over windows of steps; NaN where not measured.
        window_variance: the part of it, of one worker, that more workers shrink.
        bias_known: whether ``bias`` is known; otherwise it is the most that it can be, all of the error.
    """

    spec: str
    method: str
    family: str
    setting: str
    nominal_bits: float
    cells: int
    partial: bool
    relative_variance: float = shown(
        "vNMSE",
        "relative variance, as EDEN, QUIVER and DynamiQ report it: ||Q(g) - g||² / ||g||² of one worker, summed over "
        "tensors and steps",
    )
    bias: float = shown("of it bias", "the part of vNMSE that more workers do not shrink", 3)
    optimal_variance: float = shown(
        "optimal",
        "relative variance of the best levels of the same number under the same scale",
        2,
        of="energy",
        optional=True,
        note="optimal: relative variance of the best levels of the same number, fitted to each gradient itself, with "
        "the same scale.",
    )
    times_optimal: float = shown("times optimal", "relative variance over the optimal one", 1, optional=True)
    model_variance: float = shown(
        "model says",
        "relative variance that the model of the data promised",
        1,
        of="energy",
        optional=True,
        note="model says: relative variance that the fitted model of the data promised; relative variance is what the "
        "data gave.",
    )
    layers_variance: float = shown(
        "by layers", "geometric mean of the layers' relative variances, layers equally weighted", 4
    )
    error_source: Source
    bits: float = shown("bits", "per value, {coded}, with norms and shared bytes")
    bits_source: Source
    bits_measured: float = shown("bits measured", "per value, of its own payloads, with norms and shared bytes", 3)
    bits_fixed: float = shown("bits fixed", "per value, with symbols of fixed width", 5, of="n")
    bits_entropy: float = shown("bits entropy", "per value, at the entropy of the symbols", 4, of="n")
    bits_huffman: float = shown("bits Huffman", "per value, with a Huffman code", 5, of="n")
    ratio_float32: float = shown("32 / bits", "compression: float32 bits over bits", 1)
    step_ratio_float32: float
    cosine: float = shown(
        "cosine", "of decoded and original gradient, mean weighted by elements", 3, of="n", form=".4f"
    )
    mean_abs_error: float = shown(
        "|error| / |g|",
        "mean |Q(g) - g| over mean |g|, which W1 / |g| never exceeds",
        6,
        of="magnitude",
        absolute=True,
    )
    w1_normalized: float = shown(
        "W1 / |g|",
        "Wasserstein-1 distance of the values over mean |g|; blind to permutations",
        7,
        of="magnitude",
    )
    update_error: float = shown(
        "update error", "of Adam's update, with v of the exact gradient", 8, of="n", expected=True, optional=True
    )
    fitted_on: str
    pareto: bool
    in_steps: Interval
    error: float
    error_bias: float
    variance: float
    window_error: float
    window_variance: float
    bias_known: bool

    @property
    def name(self) -> str:
        """Family and setting, short enough for a heading: ``qsgdinf b3``."""
        return f"{self.family} {self.setting}".strip()

    @property
    def averages_out(self) -> bool:
        """Whether its error has no bias, so that more workers or steps shrink it, and is known."""
        return self.bias_known and self.bias == 0 and 0 < self.relative_variance < math.inf


#: field of a configuration -> how it is made and shown
MEASURES: dict[str, Measure] = {f.name: f.metadata["measure"] for f in fields(Configuration) if f.metadata}
#: columns of a sweep that are summed up as their measures say
SUMMED = {name: measure for name, measure in MEASURES.items() if measure.of}


class Standing(NamedTuple):
    """A method at a number of bits.

    Attributes:
        family: label.
        error: over the energy of the gradient, for the workers and the coder of the analysis.
        bias: the part of ``error`` that is bias.
        bits: measured bits that it has this error at: those asked for, or fewer.
        how: a key of :data:`gtrace.report.analysis.families.OUTCOMES`.
        configurations: specs that it is interpolated between, or the one that it is.
    """

    family: str
    error: float
    bias: float
    bits: float
    how: Outcome
    configurations: tuple[str, ...]


class Leader(NamedTuple):
    """Which family has the least error at a number of bits, and how many were compared there."""

    label: str
    target: float
    error: float
    among: int


@dataclass(frozen=True, slots=True)
class Family:
    """The configurations of a method that differ in their rate alone; what is compared at equal bits.

    Attributes:
        members: indices into :attr:`SweepAnalysis.configurations`, by measured bits; partial ones left out.
        at: one entry per target; ``lower`` and ``upper`` index the configurations of the analysis.
    """

    label: str
    method: str
    members: tuple[int, ...]
    at: tuple[AtBits, ...]


def curves_of(families: Sequence[Family], bits: Floats, errors: Floats) -> list[Rates]:
    """Bits and errors of the members of each family, from those (configurations,) of all."""
    return [(bits[[*f.members]].tolist(), errors[[*f.members]].tolist()) for f in families]


def errors_at(families: Sequence[Family], bits: Floats, errors: Floats, targets: Sequence[float]) -> Floats:
    """(families, targets) errors at equal bits, NaN where a family cannot be compared."""
    curves = curves_of(families, bits, errors)
    found = [[at.variance for at in all_at_bits(curves, target)] for target in targets]
    return np.array(found, dtype=np.float64).reshape(len(targets), len(families)).T


#: Method that the others are compared with.
REFERENCE = "qsgdinf"


@dataclass(frozen=True, slots=True)
class BDRate:
    """Mean difference of rates of a family against a reference at equal error, over the errors that both reach.

    Attributes:
        reference: label of the family that it is compared with.
        change: relative change of bits per coordinate, -0.2 for a fifth fewer than the reference; NaN for none.
        low: least error of the common range, NaN where the ranges do not overlap.
        high: largest relative variance of it.
        bits: (2,) measured bits of the reference at ``high`` and ``low``.
        why: why there is no number, empty if there is one.
    """

    family: str
    reference: str
    change: float = math.nan
    low: float = math.nan
    high: float = math.nan
    bits: tuple[float, float] = (math.nan, math.nan)
    why: str = ""


def bd_rates(families: Sequence[Family], configurations: Sequence[Configuration]) -> tuple[BDRate, ...]:
    """BD-rate of every other family against the :data:`REFERENCE` family with most configurations; () without it."""
    references = [f for f in families if f.method == REFERENCE]
    if not references:
        return ()
    reference = max(references, key=lambda f: len(f.members))

    def curve(family: Family) -> Floats:
        points = [configurations[i] for i in family.members]
        return envelope([c.bits for c in points], [c.error for c in points])

    base = curve(reference)
    others = [family for family in families if family is not reference]
    return tuple(bd_rate(curve(family), base, (family.label, reference.label)) for family in others)
