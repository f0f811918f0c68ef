"""The plan: a codec for every tensor, its bits and error, and its stability; a file that people can read.

TOML, or JSON if the name ends in ``.json``. It is read as untrusted input: of bounded size, with plain values only,
and every field is checked.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.spec import codec as build_codec
from gtrace.errors import TraceError, UsageError, check_output, writing
from gtrace.planning import toml
from gtrace.trace.files import write_beside
from gtrace.types import Tabular

if TYPE_CHECKING:
    import os

FORMAT = "gtrace_plan"
VERSION = 1
MAX_TENSORS = 100_000
MAX_TEXT = 4096
_REMEDY = "make a plan with gtrace plan TRACE --max-bits 3 -o plan.toml"
#: relative gain over the best uniform choice below which a plan is not worth its effort
WORTH = 0.05


@dataclass(frozen=True, slots=True)
class PlanTotals:
    """Totals of the plan."""

    elements: int
    #: expected measured bits per coordinate: payload, norms and shared bytes
    bits: float
    #: float32 bits over these bits
    ratio: float
    #: expected relative error of the whole gradient, weighted by the objective
    error: float
    #: lower limit for every plan: of the error under a budget of bits, of the bits under one of the error
    bound: float
    #: relative distance of the plan above it
    gap: float
    #: no other choice is better
    optimal: bool


@dataclass(frozen=True, slots=True)
class UniformChoice:
    """One codec for all tensors: its spec, expected bits per coordinate and expected relative error."""

    codec: str
    bits: float
    error: float
    #: error of the best plan with no more bits than these; None if it was not computed
    planned: float | None = None

    @property
    def gain(self) -> float | None:
        """Fraction of the error that a plan saves at no more bits."""
        return None if self.planned is None else 1 - self.planned / self.error if self.error > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ExchangeRate:
    """The value of bits at this budget."""

    #: error of the plan with one more bit per coordinate, over this one's; None if this error is 0
    more: float | None
    #: the same with one bit less; None if nothing fits
    less: float | None
    #: error that a bit per coordinate saves at the margin
    price: float


@dataclass(frozen=True, slots=True)
class PlanForecast:
    """What a plan's noise is predicted to cost by the end of some ``steps``; see :mod:`gtrace.noise`."""

    steps: int
    #: samples of one gradient; 100 if the trace does not say
    batch: float
    #: samples that would be as noisy without compression, and the ends of their interval
    equivalent: float
    low: float
    high: float
    #: share by which its noise makes Adam's steps shorter, which that batch leaves out; 0 under other optimizers
    shorter: float = 0.0


@dataclass(frozen=True, slots=True)
class Firmness:
    """The plan over resampled steps, in blocks of ``block``; see :func:`gtrace.planning.make.bootstrap`."""

    resamples: int
    block: int
    #: 5th, 50th and 95th percentile of the plan's error over the least error of any plan with its bits on the resampled
    #: steps, minus 1
    regret: tuple[float, ...]
    #: the same percentiles of 1 - plan's error / error of the best uniform choice; None without one
    gain: tuple[float, ...] | None


@dataclass(frozen=True, slots=True)
class Point:
    """A plan for another budget: bits per coordinate and error."""

    bits: float
    error: float


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """One tensor: its name, its codec's spec, and expected bits per coordinate."""

    tensor: str
    codec: str
    elements: int
    bits: float
    #: its part of the relative error of the whole gradient
    error: float
    #: fraction of the resampled steps on which its codec stays the same; None without any
    stable: float | None = None
    #: 5th and 95th percentile of the bits that it gets there
    bits_low: float | None = None
    bits_high: float | None = None
    #: name of its group with a common codec; empty without one
    group: str = ""
    #: its bits at each point of the frontier
    at_frontier: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan(Tabular):
    """A codec for every tensor, and why.

    Attributes:
        name: its name in run logs and sweeps.
        objective: what it minimizes: ``error``, relative squared error, or ``cost``, the noise ratio predicted at the
            horizon; every ``error`` in a plan by cost is this ratio.
        budget: the budget as given.
        default: codec of tensors that the plan does not name.
        totals: totals of the plan.
        uniform: the best single codec within the budget; None if none fits.
        exchange: value of one bit more or less.
        confidence: stability over resampled steps; None for a single step.
        frontier: plans for other budgets.
        uniforms: every single codec.
        tensors: the tensors, in the trace's order.
        provenance: command, version, trace and settings.
        horizon: what it is predicted to cost; None if it minimizes error.
    """

    name: str
    objective: str
    budget: str
    default: str
    totals: PlanTotals
    uniform: UniformChoice | None
    exchange: ExchangeRate
    confidence: Firmness | None
    frontier: tuple[Point, ...]
    uniforms: tuple[UniformChoice, ...]
    tensors: tuple[TensorPlan, ...]
    provenance: dict[str, Any] = field(default_factory=dict)
    horizon: PlanForecast | None = None

    @property
    def table(self) -> CodecTable:
        """The table for training, hooks and sweeps, which accept it instead of a codec."""
        named, source = {row.tensor: build_codec(row.codec) for row in self.tensors}, self.provenance.get("file", "")
        return CodecTable(build_codec(self.default), tensors=named, name=self.name, source=str(source))

    def frame_columns(self) -> dict[str, list[Any]]:
        """A row for each tensor, with the fields of :class:`TensorPlan` but for its bits at other budgets."""
        names = [own.name for own in fields(TensorPlan) if own.name != "at_frontier"]
        return {name: [getattr(row, name) for row in self.tensors] for name in names}

    @property
    def worth(self) -> bool | None:
        """Whether it is better than the best uniform choice by more than a few percent; None without such a choice."""
        return None if self.gain is None else self.gain > WORTH

    @property
    def gain(self) -> float | None:
        """What it gains over the best uniform choice at equal bits: share of the error saved, or of the batch won."""
        best = self.uniform
        if best is None or best.planned is None:
            return None
        return best.gain if self.horizon is None else (1 + best.error) / (1 + best.planned) - 1


def to_plain(plan: Plan) -> dict[str, Any]:
    """The plan as it is written, with numbers rounded to meaningful digits."""
    plain = _plain(asdict(plan))
    tensors = {row.pop("tensor"): _without_defaults(row) for row in plain.pop("tensors")}
    uniforms = [_without_defaults(row) for row in plain.pop("uniforms")]
    provenance = {key: value for key, value in plain.pop("provenance").items() if key != "file"}
    if plan.horizon is None:
        del plain["horizon"]
    head = {FORMAT: VERSION, "name": plain.pop("name"), "provenance": provenance}
    return {**head, **plain, "uniforms": uniforms, "tensors": tensors}


def save_plan(plan: Plan, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write the plan beside its place and move it in.

    Raises:
        OutputExistsError: the path exists and ``force`` is off, or is a folder.
        UsageError: its name ends neither in .toml nor in .json, its folder does not exist, or it cannot be written.
    """
    place = Path(path)
    toml.check_suffix(place)
    check_output(place, force=force)
    plain = to_plain(plan)
    text = toml.dump(plain) if place.suffix == ".toml" else json.dumps(plain, indent=1, ensure_ascii=False) + "\n"
    with writing(place):
        write_beside(str(place), text.encode())


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """Read a plan; plugin files of its codecs must be loaded first.

    Raises:
        TraceError: missing, not a plan, damaged, or from a newer version.
    """
    place = Path(path)
    plain = toml.load(place, "a plan", _REMEDY)
    if FORMAT not in plain:
        raise TraceError(f"{place}: not a plan; {_REMEDY}")
    version = plain.pop(FORMAT)
    if version != VERSION:
        raise TraceError(f"{place}: has version {_short(version)}, but this gtrace reads {VERSION}; plan again")
    tensors = plain.get("tensors")
    if not isinstance(tensors, dict) or not 0 < len(tensors) <= MAX_TENSORS:
        raise TraceError(f"{place}: tensors: expected 1 to {MAX_TENSORS} names with a codec each; plan again")
    rows = []
    for name, row in tensors.items():
        if not isinstance(row, dict):
            raise TraceError(f"{place}: tensors.{_short(name)}: expected codec, elements, bits and error; plan again")
        rows.append({"tensor": name, **row})
    plan: Plan = _read(Plan, {**plain, "tensors": rows}, str(place))
    for where, spec in [("default", plan.default), *((f"tensors.{row.tensor}", row.codec) for row in plan.tensors)]:
        try:
            made = build_codec(spec)
        except UsageError as error:
            raise TraceError(f"{place}: {where}: {error}") from None
        if made.needs is not None and made.needs.scope == "model":
            raise TraceError(f"{place}: {where}: {spec} runs over the whole model; take one of single tensors")
    if any(len(row.at_frontier) not in (0, len(plan.frontier)) for row in plan.tensors):
        raise TraceError(f"{place}: tensors: at_frontier has not one number for each point of the frontier; plan again")
    plan.provenance["file"] = str(place)
    return plan


def is_plan(start: bytes) -> bool:
    """Whether a file with these first bytes is a plan."""
    return start.lstrip(b"{ \n\r\t\"'").startswith(FORMAT.encode())


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value checked against its type: that of a field of a plan."""
    known, origin = get_args(kind), get_origin(kind)
    if type(None) in known:
        return None if value is None else _read(known[0], value, where)
    if origin is tuple:
        if not isinstance(value, (list, tuple)) or len(value) > MAX_TENSORS:
            raise _wrong(where, value, "a list")
        return tuple(_read(known[0], item, f"{where}[{k}]") for k, item in enumerate(value))
    if origin is None and not is_dataclass(kind):
        return _read_scalar(kind, value, where)
    if not isinstance(value, dict):
        raise _wrong(where, value, "names with values")
    return dict(value) if origin is dict else _record(kind, value, where)


def _read_scalar(kind: Any, value: Any, where: str) -> Any:
    if kind in (str, bool):
        if not isinstance(value, kind) or (kind is str and len(value) > MAX_TEXT):
            raise _wrong(where, value, "text" if kind is str else "true or false")
        return value
    # The gain of a plan may be negative on some steps, and its regret too, by rounding.
    signed = ".gain[" in where or ".regret[" in where
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _wrong(where, value, "a number such as 1.0e-3")
    if (value < 0 and not signed) or (kind is int and value != int(value)):
        raise _wrong(where, value, "a whole number from 0 on" if kind is int else "a number from 0 on")
    return kind(value)


def _record(kind: Any, value: dict[str, Any], where: str) -> Any:
    types = get_type_hints(kind)
    foreign = [name for name in value if name not in types]
    if foreign:
        raise TraceError(f"{where}: there is no '{_short(foreign[0])}' in a plan; remove it, or plan again")
    found = {}
    for item in fields(kind):
        inside = f"{where}: {item.name}" if kind is Plan else f"{where}.{item.name}"
        if item.name in value:
            found[item.name] = _read(types[item.name], value[item.name], inside)
        elif type(None) in get_args(types[item.name]):
            # TOML has no word for None.
            found[item.name] = None
        elif item.default is item.default_factory:
            raise TraceError(f"{inside}: is missing; plan again")
    return kind(**found)


def _wrong(where: str, value: Any, wanted: str) -> TraceError:
    return TraceError(f"{where}: '{_short(value)}' where {wanted} belongs; correct it, or plan again")


def _short(value: Any) -> str:
    return value[:80] if isinstance(value, str) else reprlib.repr(value)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _without_defaults(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if value is not None and value not in ("", [])}
