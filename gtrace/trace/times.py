"""What a trace says about the time of its training's steps."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
        exposed: the part of it after the backward pass's own work, for which training waits.
        ranks: processes that trained together.
    """

    step: float | None = None
    backward: float | None = None
    after_backward: float | None = None
    steps: int = 0
    recorded: bool = False
    communication: float | None = None
    exposed: float | None = None
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
        if self.communication is not None and self.exposed is not None:
            parts.append(f"all-reduce {_text(self.communication)}, {_text(self.exposed)} of it after the backward pass")
        elif self.ranks > 1:
            parts.append(f"with the exchange between {self.ranks} ranks")
        return ", ".join(parts)

    def applied(self, cluster: Cluster) -> tuple[Cluster, str]:
        """A cluster with these times if it has no compute time of its own, and a line that says so, else empty."""
        if cluster.step_time is not None or self.computing is None:
            return cluster, ""
        backward = None if self.backward is None else min(max(0.0, self.backward - (self.exposed or 0)), self.computing)
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
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    return number and (default is None or isinstance(value, int))
