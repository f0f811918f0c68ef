"""Configurations, and the families that they form: which belong together as one curve, and who leads."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from gtrace.report.analysis.equal_bits import PREFERRED_BITS, AtBits, Outcome
from gtrace.report.statistics import UNKNOWN, Interval

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gtrace.report.analysis.cells import Source


#: Parameters that trade bits for error, with their short form; every other one makes a new family.
RATE_PARAMETERS = {
    "bits": "b{}",
    "ratio": "ratio {}",
    "sparsity": "sparsity {}",
    "amount": "amount {}",
    "rank": "rank {}",
    "bin_size": "bin {}",
}

#: Methods whose levels are fitted to data.
FITTED = ("alq", "alq-n", "alqg", "alqg-n", "amq", "amq-n", "zipml")


@dataclass(frozen=True, slots=True)
class Labels:
    """Names of configurations, in their order.

    Attributes:
        families: the method, followed by the parameters in which its families differ.
        settings: value of the rate parameter, ``b3`` or ``ratio 0.01``; empty for a codec that has none.
        unreadable: specs whose parameters are missing; each is a family of its own.
    """

    families: tuple[str, ...]
    settings: tuple[str, ...]
    unreadable: tuple[str, ...]


def label(specs: Sequence[str], methods: Sequence[str], parameters: Sequence[Mapping[str, Any] | None]) -> Labels:
    """Group configurations into families: same method, equal in everything but the rate.

    Args:
        specs: canonical specs, all different.
        methods: codec name of each.
        parameters: parameters of each; None where they are not known.
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
        if own is None:
            families.append(spec)
        else:
            families.append(" ".join([method, *(f"{k}={own.get(k, '-')}" for k in differing[method])]))
    settings = tuple("" if p is None else _setting(p) for p in parameters)
    unreadable = tuple(spec for spec, own in zip(specs, fixed, strict=True) if own is None)
    return Labels(tuple(families), settings, unreadable)


def short_spec(spec: str) -> str:
    """Method and rate of a spec, without the parameters that rarely matter to a reader.

    >>> [short_spec(s) for s in ("qsgdinf:bits=3,bucket_size=8192", "ef:topk:ratio=0.01", "terngrad")]
    ['qsgdinf b3', 'ef:topk ratio 0.01', 'terngrad']
    """
    items = (item.partition("=") for part in spec.split(":") if "=" in part for item in part.split(","))
    values = {key: value for key, _, value in items}
    return f"{method_of(spec)} {_setting(values)}".strip()


def method_of(spec: str) -> str:
    """The codec of a spec with everything around it, without parameters.

    >>> [method_of(s) for s in ("qsgdinf:bits=3", "ef:topk:ratio=0.01", "ef:rotate:block=64:qsgd:bits=3", "none")]
    ['qsgdinf', 'ef:topk', 'ef:rotate:qsgd', 'none']
    """
    return ":".join(part for part in spec.split(":") if "=" not in part)


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


@dataclass(frozen=True, slots=True)
class Configuration:
    """One codec with one set of parameters, summed over tensors and steps.

    Attributes:
        spec: canonical spec string.
        method: codec name.
        family: method, and the parameters that tell it from other families of the same method.
        setting: the parameter that trades bits for error, short (``b3``), empty where there is none.
        nominal_bits: NaN where the codec has none.
        cells: cells that were summed over.
        partial: measured on too few cells to be compared with the others; summed over its own.
        relative_variance: sum of squared errors / sum of energies, of single steps and one worker.
        error_source: ``expected`` (closed form) or ``measured`` (from draws), ``mixed``, ``none``.
        bits: bits per coordinate, payload and shared bytes, under the coder of the comparison.
        bits_source: ``measured`` (encoded bytes), ``expected`` (computed), ``mixed``, ``none``.
        bits_fixed: with fixed-width symbols, without shared bytes; bits_entropy: at their entropy, likewise.
        bits_huffman: with a Huffman code, likewise.
        ratio_float32: 32 / bits, the ratio of totals.
        step_ratio_float32: mean over steps of each step's own ratio, as papers also report it.
        cosine: of decoded and original, mean over cells weighted by elements.
        w1_normalized: Wasserstein-1 of the values over the mean absolute value.
        optimal_variance: relative variance of the best levels of the same number under the same scale, over the
            same cells; NaN where a cell lacks it.
        times_optimal: relative_variance / optimal_variance, NaN where there is nothing to divide by.
        model_variance: relative variance that a parametric law promised for the levels it gave, NaN without one.
        fitted_on: source of levels and codes: ``itself``, ``pooled N steps``, ``previous``, ``step N``, or nothing.
            pareto: no other configuration takes fewer bits at no more error, or makes less error at no more bits.
        mean_abs_error: mean |Q(g) - g| over mean |g|; never below ``w1_normalized``.
        layers_variance: geometric mean over layers of relative variances; NaN without layers.
        in_steps: log of ``relative_variance`` with its interval over steps.
        update_error: error of Adam's update over the update, mean weighted by elements; NaN without second moments.
        bits_measured: bits per coordinate of its own payloads with shared bytes, whatever the coder.
        error: what methods are ranked by; NaN where it was not measured.
        error_bias: the part of ``error`` that is bias, which more workers do not shrink.
        bias: part of ``relative_variance`` that is bias, all of it where the bias is not known.
        variance: part of ``relative_variance`` of one worker that is not.
        window_error: as ``relative_variance``, of what has arrived over windows of steps; NaN where not measured.
        window_variance: the part of it, of one worker, that more workers shrink.
        bias_known: whether ``bias`` is known; otherwise it is the most that it can be.
    """

    spec: str
    method: str
    family: str
    setting: str
    nominal_bits: float
    cells: int
    partial: bool
    relative_variance: float
    error_source: Source
    bits: float
    bits_source: Source
    bits_fixed: float
    bits_entropy: float
    bits_huffman: float
    ratio_float32: float
    step_ratio_float32: float
    cosine: float
    w1_normalized: float
    optimal_variance: float
    times_optimal: float
    model_variance: float
    fitted_on: str
    pareto: bool = False
    mean_abs_error: float = math.nan
    layers_variance: float = math.nan
    in_steps: Interval = UNKNOWN
    update_error: float = math.nan
    bits_measured: float = math.nan
    error: float = math.nan
    error_bias: float = math.nan
    bias: float = math.nan
    variance: float = math.nan
    window_error: float = math.nan
    window_variance: float = math.nan
    bias_known: bool = False


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
