"""What a trace says about its training: how long steps take, and how its optimizers update weights.

Of an optimizer it also knows for how long it ran, and with how many samples.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gtrace.costs import Cluster


#: attribute of the root: the fields of a :class:`StepTimes`
TIMES = "times"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long steps of the first optimizer take, in seconds: medians over steps. What is not known is None.

    Times are without what capture itself took. On a GPU they are those of the device.

    Attributes:
        step: from one step to the next, with the exchange of gradients, if there is one.
        backward: in backward passes; with the exchange that ``DistributedDataParallel`` or ``fully_shard`` does there.
        after_backward: from the end of the last backward pass to the step: clipping, and an exchange by hand.
        steps: number of steps that were timed.
        recorded: the steps that were timed are recorded ones, because all are; the writing beside them slows them.
        communication: from the first to the last all-reduce of ``DistributedDataParallel``, by its own clock; a mean.
            Else in all all-gathers, reduce-scatters and all-reduces of ``fully_shard`` or ``FullyShardedDataParallel``.
        exposed: the part of it for which training waits: after the backward pass's own work, or all of it if models are
            sharded on the CPU.
        outside_backward: the part of it outside of backward passes, if models are sharded.
        ranks: processes that trained together.
    """

    step: float | None = None
    backward: float | None = None
    after_backward: float | None = None
    steps: int = 0
    recorded: bool = False
    communication: float | None = None
    exposed: float | None = None
    outside_backward: float | None = None
    ranks: int = 1

    @classmethod
    def of(cls, attrs: Mapping[str, Any]) -> StepTimes:
        """The times in the attributes of a trace; a trace may come from anywhere, so wrong values count as unknown."""
        found = attrs.get(TIMES)
        found = found if isinstance(found, dict) else {}
        usual = {field.name: field.default for field in dataclasses.fields(cls)}
        valid = {name: found[name] for name, default in usual.items() if _is_valid(found.get(name), default)}
        world = attrs.get("world_size")
        return cls(**{"ranks": world if isinstance(world, int) and world > 0 else 1, **valid})

    @property
    def computing(self) -> float | None:
        """A step without the exchange for which it waits, as far as that is known."""
        return None if self.step is None else max(0.0, self.step - (self.exposed or 0.0)) or None

    def __str__(self) -> str:
        """The times in words, empty if the time of a step is not known."""
        if self.step is None:
            return ""
        parts = [f"{_text(self.step)} a step"]
        if self.backward is not None:
            parts.append(f"backward {_text(self.backward)}")
        if self.communication is not None and self.outside_backward is not None:
            waits = "" if self.exposed is None else ", for which training waits"
            parts.append(f"all-gather and reduce-scatter {_text(self.communication)}{waits}")
        elif self.communication is not None and self.exposed is not None:
            parts.append(f"all-reduce {_text(self.communication)}, {_text(self.exposed)} of it after the backward pass")
        elif self.ranks > 1:
            parts.append(f"with the exchange between {self.ranks} ranks")
        return ", ".join(parts)

    def applied(self, cluster: Cluster) -> tuple[Cluster, str]:
        """A cluster with these times if it has no compute time of its own, and a line that says so, else empty."""
        if cluster.step_time is not None or self.computing is None:
            return cluster, ""
        exposed = max(0.0, (self.exposed or 0.0) - (self.outside_backward or 0.0))
        backward = None if self.backward is None else min(max(0.0, self.backward - exposed), self.computing)
        said = f"compute time measured during capture: {self}; {cluster},180ms would say another"
        return dataclasses.replace(cluster, step_time=self.computing, backward_time=backward), said

    def describe(self) -> dict[str, Any]:
        """The known fields, as JSON values."""
        found = dataclasses.asdict(self)
        return {name: value for name, value in found.items() if value is not None}


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


def _is_valid(value: object, default: object) -> bool:
    if isinstance(default, bool):
        return isinstance(value, bool)
    return _is_number(value) and (default is None or isinstance(value, int))


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
