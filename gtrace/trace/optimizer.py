"""What a trace says about its optimizers: how they update weights, for how long, and with how many samples."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: attribute of the root: number of an optimizer, as text -> its facts
OPTIMIZERS = "optimizers"
#: attribute of a tensor: facts of its parameter group that differ from those of the optimizer's first group
GROUP = "group"
#: attribute of the root: the program was ended before its time
CUT = "cut"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerFacts:
    """How one optimizer updates weights. What is not known is None.

    Learning rates are scalars of each step: ``trace.scalars(optimizer=...)["lr"]``, of the first parameter group.

    Attributes:
        kind: class of torch.optim whose rule it follows (``SGD``, ``Adam``, ``AdamW``, ...); ``AMSGrad`` for the
            variant of Adam's; of an optimizer from elsewhere the name of its class, with the module if torch.optim
            has one of that name, too.
        momentum: SGD's; 0 without.
        dampening: SGD's.
        nesterov: SGD's.
        weight_decay: L2 weight decay; 0 without.
        decoupled: whether weight decay shrinks weights (AdamW) instead of entering the gradient (Adam, SGD).
        betas: Adam's beta1 and beta2.
        eps: Adam's.
        planned_steps: number of steps that the learning-rate scheduler plans, counted from the trace's step 0.
        steps_seen: number of steps that the program took while it was captured.
        length: number of steps of the whole training: ``planned_steps``; else ``steps_seen`` if the program ended by
            itself.
        batch_size: samples behind one gradient of one process, all micro-batches together; sequences, if samples are
            sequences. The median if ``varies`` has ``batch_size``.
        tokens: of one sample, if samples are sequences; its loss is then the mean over its tokens.
        varies: names of the facts above that changed between recorded steps; their values here are medians.
        lr_ratio: learning rate of the parameter group over that of the first group.
    """

    kind: str | None = None
    momentum: float | None = None
    dampening: float | None = None
    nesterov: bool | None = None
    weight_decay: float | None = None
    decoupled: bool | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    planned_steps: int | None = None
    steps_seen: int | None = None
    length: int | None = None
    batch_size: float | None = None
    tokens: int | None = None
    varies: tuple[str, ...] = ()
    lr_ratio: float = 1.0

    @classmethod
    def of(cls, attrs: Mapping[str, Any], optimizer: int = 0) -> OptimizerFacts:
        """The facts about an optimizer in the attributes of a trace; values of a wrong type count as unknown.

        Args:
            attrs: attributes of a trace, or a copy of them, such as ``trace_attrs`` in a sweep's provenance.
            optimizer: its number.
        """
        every = attrs.get(OPTIMIZERS)
        found = every.get(str(optimizer)) if isinstance(every, dict) else None
        facts = _read(found if isinstance(found, dict) else {})
        facts = _read({"batch_size": attrs.get("batch_size")}) | facts
        ended = attrs.get("status") == "complete" and not attrs.get(CUT)
        length = facts.get("planned_steps") or (facts.get("steps_seen") if ended else None)
        return cls(**facts, length=length)

    def of_tensor(self, attrs: Mapping[str, Any]) -> OptimizerFacts:
        """The facts about a tensor of this optimizer: its parameter group may have a weight decay of its own.

        Args:
            attrs: the tensor's, ``TensorInfo.attrs``.
        """
        group = attrs.get(GROUP)
        return dataclasses.replace(self, **_read(group)) if isinstance(group, dict) else self

    def describe(self) -> dict[str, Any]:
        """The known facts as JSON values, for the trace's attribute ``optimizers``: ``{"0": facts.describe()}``."""
        found = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name != "length":
                found[field.name] = list(value) if isinstance(value, tuple) else value
        return found


def _read(found: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of an attribute; a trace may come from anywhere."""
    valid = {name: found[name] for name, check in _VALID.items() if name in found and check(found[name])}
    return {name: tuple(value) if isinstance(value, list) else value for name, value in valid.items()}


def _is_number(value: object, below: float = math.inf) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < below


#: fact -> whether a JSON value can be one
_VALID: Mapping[str, Callable[[Any], bool]] = {
    "kind": lambda value: isinstance(value, str) and value != "",
    "momentum": lambda value: _is_number(value, 1),
    "dampening": _is_number,
    "nesterov": lambda value: isinstance(value, bool),
    "weight_decay": _is_number,
    "decoupled": lambda value: isinstance(value, bool),
    "betas": lambda value: isinstance(value, list) and len(value) == 2 and all(_is_number(beta, 1) for beta in value),
    "eps": _is_number,
    "planned_steps": lambda value: type(value) is int and value > 0,
    "steps_seen": lambda value: type(value) is int and value > 0,
    "batch_size": lambda value: _is_number(value) and value > 0,
    "tokens": lambda value: type(value) is int and value > 0,
    "varies": lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    "lr_ratio": lambda value: _is_number(value) and value > 0,
}
