"""Configurations, and the families that they form: which belong together as one curve, and who leads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from gtrace.report.analysis.equal_bits import PREFERRED_BITS, AtBits, Outcome, Rates, all_at_bits, bd_rate, envelope
from gtrace.report.section import Column

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.report.statistics import Interval


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
        spec: canonical spec string.
        method: codec name.
        family: method, and the parameters that tell it from other families of the same method.
        setting: the parameter that trades bits for error, short (``b3``), empty without one.
        nominal_bits: NaN where the codec has none.
        cells: cells that were summed over.
        partial: measured on too few cells to be compared with the others; summed over its own.
        error_source: ``expected`` (closed form) or ``measured`` (from draws), ``mixed``, ``none``.
        bits_source: ``measured`` (encoded bytes), ``expected`` (computed), ``mixed``, ``none``.
        step_ratio_float32: mean over steps of each step's own ratio, as papers also report it.
        fitted_on: source of levels and codes: ``itself``, ``pooled N steps``, ``previous``, ``step N``, or nothing.
        pareto: no other configuration takes fewer bits at no more error, or makes less error at no more bits.
        in_steps: log of ``relative_variance`` with its interval over steps.
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
        how: a key of :data:`gtrace.report.analysis.equal_bits.OUTCOMES`.
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
        label: name of the family.
        method: codec name.
        members: indices into :attr:`SweepAnalysis.configurations`, by measured bits; partial ones left out.
        at: one entry per target; ``lower`` and ``upper`` index the configurations of the analysis.
    """

    label: str
    method: str
    members: tuple[int, ...]
    at: tuple[AtBits, ...]


def curves_of(families: Sequence[Family], bits: NDArray[np.float64], errors: NDArray[np.float64]) -> list[Rates]:
    """Bits and errors of the members of each family, from those (configurations,) of all."""
    return [(bits[[*f.members]].tolist(), errors[[*f.members]].tolist()) for f in families]


def errors_at(
    families: Sequence[Family], bits: NDArray[np.float64], errors: NDArray[np.float64], targets: Sequence[float]
) -> NDArray[np.float64]:
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
        family: label.
        reference: label of the family that it is compared with.
        change: relative change of bits per coordinate, -0.2 for a fifth fewer than the reference; NaN for none.
        low: least error of the common range, NaN where the ranges do not overlap.
        high: largest relative variance of it.
        bits: (2,) measured bits of the reference at ``high`` and ``low``.
        why: why there is no number, empty if there is one.
    """

    family: str
    reference: str
    change: float
    low: float
    high: float
    bits: tuple[float, float]
    why: str = ""


def bd_rates(families: Sequence[Family], configurations: Sequence[Configuration]) -> tuple[BDRate, ...]:
    """BD-rate of every other family against the :data:`REFERENCE` family with most configurations; () without it."""
    references = [f for f in families if f.method == REFERENCE]
    if not references:
        return ()
    reference = max(references, key=lambda f: len(f.members))

    def curve(family: Family) -> NDArray[np.float64]:
        points = [configurations[i] for i in family.members]
        return envelope([c.bits for c in points], [c.error for c in points])

    base = curve(reference)
    others = [family for family in families if family is not reference]
    return tuple(BDRate(family.label, reference.label, *bd_rate(curve(family), base)) for family in others)
