"""How a linear model is trained at low precision: what is quantized, and how samples are drawn."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from scipy import special

from gtrace.codecs import codec as build_codec
from gtrace.codecs import codec_names, wrapper_names
from gtrace.errors import UsageError, suggest
from gtrace_experiments.linear import kernels
from gtrace_experiments.linear.levels import LevelRule, bits_per_value
from gtrace_experiments.linear.problems import MAX_DEGREE, Problem, Prox

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gtrace.codecs.base import Codec

SAMPLINGS = {
    "full": "samples stay exact",
    "naive": "one quantization of a sample in both places of the gradient: biased",
    "nearest": "naive, rounded to the nearest level",
    "double": "an independent quantization in each place: unbiased for least squares",
    "symmetrized": "the mean of both orders of the two",
}
PARTS = ("samples", "model", "gradients")
REFETCHES = {"none": kernels.NO_REFETCH, "l1": kernels.BOUNDS, "jl": kernels.SKETCHES}
MAX_BITS = 12
FLOAT_BITS = 32


def _known(what: str, word: str, words: Sequence[str] | dict[str, Any]) -> None:
    if word not in words:
        raise UsageError(f"{what}: '{word}' is unknown; {suggest(word, words)}")


def _within(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{what}: {value} is out of range; choose {low} to {high}")


def _written(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)


@dataclass(frozen=True, slots=True)
class Precision:
    """One configuration. Its text is a spec such as ``double:bits=5,quantize=samples+model+gradients``.

    Attributes:
        sampling: one of SAMPLINGS.
        bits: of one quantization: 2^(bits - 1) - 1 levels on either side of zero.
        quantize: some of PARTS; samples by column, model and gradients by row.
        levels: of the samples' columns.
        chebyshev: degree of the polynomial that replaces the derivative of ``logistic`` and ``svm``; 0 for none.
        radius: half width of the margins on which the polynomial holds.
        gap: half width around the step of the hinge loss that its polynomial need not follow.
        refetch: for ``svm``, when an exact sample is fetched after all: ``l1`` when the bounds of its margin lie on
            both sides of 1, ``jl`` when random projections cannot determine the side.
        failure: for ``jl``, largest probability of the wrong side.
        rows: for ``jl``, random projections of each sample.
        codec: codec of the gradient instead of row scaling; None for row scaling.

    Raises:
        UsageError: a value out of range, or parts that do not fit together.
    """

    sampling: str = "double"
    bits: int = 5
    quantize: tuple[str, ...] = ("samples",)
    levels: LevelRule = "uniform"
    chebyshev: int = 0
    radius: float = 16.0
    gap: float = 0.25
    refetch: str = "none"
    failure: float = 0.01
    rows: int = 64
    codec: Codec | None = None

    def __post_init__(self) -> None:
        _known("sampling", self.sampling, SAMPLINGS)
        _known("levels", self.levels, get_args(LevelRule))
        _known("refetch", self.refetch, REFETCHES)
        for part in self.quantize:
            _known("quantize", part, PARTS)
        quantize = {*self.quantize} | ({"gradients"} if self.codec is not None else set())
        object.__setattr__(self, "quantize", tuple(part for part in PARTS if part in quantize))
        if ("samples" in self.quantize) != (self.sampling != "full"):
            raise UsageError(f"quantize: sampling {self.sampling} does not go with {'+'.join(self.quantize) or 'none'}")
        _within("bits", self.bits, 2, MAX_BITS)
        _within("chebyshev", self.chebyshev, 0, MAX_DEGREE)
        _within("rows", self.rows, 1, 1 << 20)
        for name in ("radius", "gap", "failure"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise UsageError(f"{name}: must be a positive number, not {value:g}")
        if self.failure >= 0.5:
            raise UsageError(f"failure: must be a probability below 0.5, not {self.failure:g}")
        if self.gap >= self.radius:
            raise UsageError(f"gap: {self.gap:g} leaves nothing of the radius {self.radius:g}")
        if self.chebyshev and (self.sampling != "double" or self.refetch != "none"):
            raise UsageError("chebyshev: takes independent quantizations; choose sampling double, and no refetching")
        if self.refetch != "none" and self.sampling not in ("naive", "nearest", "double"):
            raise UsageError("refetch: decides by one quantization; choose sampling naive, nearest or double")

    @classmethod
    def parse(cls, text: str, **usual: Any) -> Precision:
        """Read a spec: a sampling with parameters, a codec for the gradient alone, or ``none``.

        Args:
            text: the spec.
            usual: parameters of a sampling that the spec does not name.

        >>> str(Precision.parse("double:bits=5,quantize=samples+model"))
        'double:bits=5,quantize=samples+model'
        >>> Precision.parse("mcgq:amount=0.1").quantize
        ('gradients',)

        Raises:
            UsageError: neither, or a parameter that is unknown or out of range.
        """
        text, _, codec = text.partition(",codec=")
        name, _, rest = text.partition(":")
        if name == "none" and not rest:
            return FULL
        if name not in SAMPLINGS:
            known = [*codec_names(), *wrapper_names()]
            if name not in known:
                raise UsageError(f"no precision or codec '{name}'; {suggest(name, [*SAMPLINGS, *known])}")
            return cls("full", quantize=(), codec=build_codec(text))
        given = ({"quantize": ()} if name == "full" else {}) | usual
        for item in filter(None, rest.split(",")):
            key, _, value = item.partition("=")
            _known(f"{name}: parameter", key, _PARAMETERS)
            try:
                given[key] = _PARAMETERS[key](value)
            except ValueError:
                raise UsageError(f"{name}: {key}={value} is not a number") from None
        if codec:
            given["codec"] = build_codec(codec)
        return cls(name, **given)

    def __str__(self) -> str:
        if self == FULL:
            return "none"
        if self.codec is not None and self.quantize == ("gradients",):
            return str(self.codec)
        usual = Precision(self.sampling, quantize=() if self.sampling == "full" else ("samples",))
        shown = [f"bits={self.bits}"]
        parts = tuple(part for part in self.quantize if part != "gradients" or self.codec is None)
        for item in _PARAMETERS:
            value = parts if item == "quantize" else getattr(self, item)
            if item != "bits" and value != getattr(usual, item):
                shown.append(f"{item}={'+'.join(value) if item == 'quantize' else _written(value)}")
        codec = "" if self.codec is None else f",codec={self.codec}"
        return f"{self.sampling}:{','.join(shown)}{codec}"

    @property
    def draws(self) -> int:
        """Quantizations of each sample; 0 if it stays exact."""
        if self.chebyshev:
            return self.chebyshev + 1
        return {"full": 0, "naive": 1, "nearest": 1}.get(self.sampling, 2)

    @property
    def sample_bits(self) -> int:
        """Bits of one value of a sample, all its quantizations together."""
        return bits_per_value(self.bits, self.draws) if self.draws else FLOAT_BITS

    def check(self, problem: Problem) -> None:
        """Whether a task has a use for all of this.

        Raises:
            UsageError: it has not.
        """
        if self.chebyshev and problem.squares:
            raise UsageError(f"chebyshev: the derivative of {problem.name} is a line already; leave it out")
        if self.refetch != "none" and not problem.hinge:
            raise UsageError(f"refetch: {problem.name} has no hinge to be on the wrong side of; choose task svm")

    def rule(self, problem: Problem, prox: Prox) -> kernels.Rule:
        """What kernels do in a step."""
        steps = 2 ** (self.bits - 1) - 1
        sampling = {
            "full": kernels.FULL,
            "double": kernels.POLYNOMIAL if self.chebyshev else kernels.DOUBLE,
            "symmetrized": kernels.SYMMETRIZED,
        }.get(self.sampling, kernels.NAIVE)
        return kernels.Rule(
            loss=problem.loss,
            sampling=sampling,
            draws=max(self.draws, 1),
            model_steps=steps if "model" in self.quantize else 0,
            gradient_steps=steps if "gradients" in self.quantize and self.codec is None else 0,
            refetch=REFETCHES[self.refetch],
            rows=self.rows,
            quantile=float(-special.ndtri(self.failure)),
            center=problem.center,
            radius=self.radius,
            coefficients=problem.polynomial(self.chebyshev, self.radius, self.gap),
            prox=prox.code,
            strength=prox.strength,
        )


_PARAMETERS: dict[str, Callable[[str], Any]] = {
    "bits": int,
    "quantize": lambda text: tuple(text.split("+")),
    "levels": str,
    "chebyshev": int,
    "radius": float,
    "gap": float,
    "refetch": str,
    "failure": float,
    "rows": int,
}
#: nothing is quantized: the run beside all others
FULL = Precision("full", quantize=())


def precisions(items: Sequence[str | Precision]) -> list[Precision]:
    """Configurations of specs, the full precision first.

    Raises:
        UsageError: a spec that cannot be read, or the same one twice.
    """
    found = [Precision.parse(item) if isinstance(item, str) else item for item in items]
    found = [FULL, *(item for item in found if item != FULL)]
    names = [str(item) for item in found]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"compare: '{name}' is named twice")
    return found
