"""What is measured, on what: every number that a result of ``gtrace bench`` depends on stands here."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gtrace.codecs import codec, codec_class, codec_names, parameter_fields, parse_spec
from gtrace.errors import UsageError
from gtrace.sweep import expand

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from gtrace.codecs import Codec


@dataclass(frozen=True, slots=True)
class Model:
    """A network that is trained for its gradients.

    Attributes:
        name: in tables.
        task: the built-in task.
        batch_size: samples a step.
    """

    name: str
    task: str
    batch_size: int


@dataclass(frozen=True)
class Protocol:
    """How codecs are compared. Whoever changes a number gives it another name.

    Attributes:
        name: of this protocol, for papers.
        models: that are trained.
        phases: early and late -> the consecutive steps whose gradients are encoded. Levels are fitted on the step
            before, and codecs with memory are replayed over them.
        seed: of weights, batches and encodings.
        draws: encodings of each tensor at each step.
        ranges: parameter -> values that a codec is run with where its spec does not fix them.
        slow: codec -> its own ranges: those that fit by gradient descent, to the levels of the others.
        at: measured bits per coordinate of the first table.
    """

    name: str
    models: tuple[Model, ...]
    phases: Mapping[str, Sequence[int]]
    seed: int = 0
    draws: int = 1
    ranges: Mapping[str, tuple[Any, ...]] = field(
        default_factory=lambda: {
            "bits": (2, 3, 4, 5, 6, 8),
            "ratio": (0.01, 0.03, 0.1, 0.3),
            "sparsity": (0.5, 0.8, 0.9, 0.95),
            "rank": (1, 2, 4, 8),
            "bin_size": (50, 500),
        }
    )
    slow: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(
        default_factory=lambda: {"alqg": {"bits": (2, 3, 4)}, "alqg-n": {"bits": (2, 3, 4)}}
    )
    at: float = 3.0

    def built_in(self) -> list[Codec]:
        """Every configuration of every built-in codec; float32 itself is none to compare with."""
        names = [n for n in codec_names() if codec_class(n).__module__.startswith("gtrace.") and n != "none"]
        return [item for name in names for item in self.configurations(name)]

    def configurations(self, spec: str) -> list[Codec]:
        """What is run of a spec: each value of the ranges that it leaves open and that the codec takes.

        Raises:
            UsageError: an unknown codec or parameter, or a value that it refuses.
        """
        parsed = parse_spec(spec)
        ranges = self.slow.get(parsed.name, self.ranges)
        known = {item.name for item in parameter_fields(codec_class(parsed.name))} - set(parsed.given)
        taken: dict[str, list[Any]] = {}
        for name in known & set(ranges):
            for value in ranges[name]:
                with contextlib.suppress(UsageError):  # beyond what this codec takes; the others are left
                    codec(spec, **{name: value})
                    taken.setdefault(name, []).append(value)
        return expand([spec], taken)


_CNN = Model("CNN", "digits-cnn", 16)
_LSTM = Model("LSTM", "char-lstm", 8)
_TRANSFORMER = Model("transformer", "char-transformer", 8)

FULL = Protocol("gtrace-bench-1", (_CNN, _LSTM, _TRANSFORMER), {"early": range(4, 8), "late": range(296, 300)})
#: a smoke test in seconds, whose numbers belong in no paper
QUICK = replace(
    FULL,
    name="gtrace-bench-1-quick",
    models=(_CNN,),
    phases={"early": range(4, 6), "late": range(48, 50)},
    ranges={"bits": (2, 3, 4, 6), "ratio": (0.01, 0.1, 0.3), "sparsity": (0.8, 0.95), "rank": (2, 8)},
)
