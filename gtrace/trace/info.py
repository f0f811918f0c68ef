"""What a trace tells about its tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gtrace.trace.format import SKETCH
from gtrace.trace.sketched import SketchPlan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gtrace.trace.format import StreamKey, TensorSpec
    from gtrace.types import SummarySpec

_OWN_ATTRIBUTES = ("index", "name", "shape", "dtype", "aliases", "module_type", "stage", "sample", SKETCH)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a trace says about one tensor.

    Attributes:
        name: the parameter's name.
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
    def of(cls, key: StreamKey, spec: TensorSpec) -> TensorInfo:
        """The public view of a stored tensor."""
        attrs = dict(spec.attrs)
        plan = SketchPlan.read(attrs[SKETCH]) if spec.sketched else None
        return cls(
            name=spec.name,
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
