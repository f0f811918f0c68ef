"""What a trace tells about its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from gtrace.trace.format import SKETCH
from gtrace.trace.sketched import SketchPlan

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gtrace.trace.format import StreamKey, TensorSpec
    from gtrace.types import SummarySpec

#: A stream of a trace, and a name in it.
_Place: TypeAlias = "tuple[StreamKey, str]"

_OWN_ATTRIBUTES = ("index", "name", "shape", "dtype", "aliases", "module_type", "stage", "sample", SKETCH)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a trace says about one tensor.

    Attributes:
        name: the parameter's name. Where an earlier optimizer has a tensor of this name, too, the optimizer's number
            is in front: ``opt1/fc.weight``.
        shape: shape of the gradient in training.
        dtype: its type in training, such as ``bfloat16``; a trace holds float32.
        size: elements stored per step, fewer than the shape has where it was sampled; of a neural gradient the
            most that a step can have, while its shape is that of its first step.
        kind: ``weight`` or ``neural``.
        optimizer: number of the optimizer that steps it.
        rank: number of the process that it was recorded in.
        aliases: other names of the same parameter (tied weights).
        module_type: type of the module that owns it, None where unknown.
        stage: ``local`` or ``reduced``: before or after gradients of several ranks were averaged.
        sketches: norm and bucket size of the moment sketches that are stored instead of values, none for values;
            ``size`` is then that of the gradient at one step.
        mantissa: of the stored sketches, bits that tell two bins of one octave apart; 0 for values.
        merged: consecutive recorded steps that the sketches of one step sum; fewer at the end of a run.
        sample: which elements were kept, None for all of them. Of weights: ``kind`` "blocks", ``offsets`` of the
            blocks of ``block`` elements, and ``total`` elements. Of a neural gradient how those of a long one are
            chosen, while ``n_total`` of a step says whether it was long.
        attrs: everything else that was recorded about it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int
    kind: str = "weight"
    optimizer: int = 0
    rank: int = 0
    aliases: tuple[str, ...] = ()
    module_type: str | None = None
    stage: str = "local"
    sample: Mapping[str, Any] | None = None
    attrs: Mapping[str, Any] = field(default_factory=dict)
    sketches: tuple[SummarySpec, ...] = ()
    merged: int = 1
    mantissa: int = 0

    @classmethod
    def of(cls, key: StreamKey, spec: TensorSpec, name: str) -> TensorInfo:
        """The public view of a stored tensor, under a name that no other optimizer's has."""
        attrs = dict(spec.attrs)
        plan = SketchPlan.read(attrs[SKETCH]) if spec.sketched else None
        return cls(
            name=name,
            shape=tuple(attrs["shape"]),
            dtype=attrs.get("dtype", "float32"),
            size=spec.size if plan is None else math.prod(attrs["shape"]),
            kind=key.kind,
            optimizer=key.optimizer,
            rank=key.rank,
            aliases=tuple(attrs.get("aliases", ())),
            module_type=attrs.get("module_type"),
            stage=attrs.get("stage", "local"),
            sample=attrs.get("sample"),
            attrs={key: value for key, value in attrs.items() if key not in _OWN_ATTRIBUTES},
            sketches=() if plan is None else plan.specs,
            merged=1 if plan is None else plan.merged,
            mantissa=0 if plan is None else plan.mantissa,
        )


def shown_names(stored: Iterable[_Place]) -> dict[_Place, str]:
    """What tensors are called so that no two optimizers have one of the same kind and name.

    The first optimizer that has a name, in any process, keeps it as it is stored. Others get their number in front.

    >>> from gtrace.trace.format import StreamKey
    >>> shown_names([(StreamKey(0, "weight", number), "fc.weight") for number in range(3)]).values()
    dict_values(['fc.weight', 'opt1/fc.weight', 'opt2/fc.weight'])
    """
    places = list(stored)
    taken = {(key.kind, name) for key, name in places}
    first: set[tuple[str, str]] = set()
    names: dict[tuple[str, int, str], str] = {}
    for kind, optimizer, name in sorted({(key.kind, key.optimizer, name) for key, name in places}):
        shown = name
        if (kind, name) in first:
            while (kind, shown) in taken:
                shown = f"opt{optimizer}/{shown}"
            taken.add((kind, shown))
        first.add((kind, name))
        names[kind, optimizer, name] = shown
    return {(key, name): names[key.kind, key.optimizer, name] for key, name in places}
