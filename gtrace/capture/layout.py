"""The content of a row of one optimizer: a place for each gradient, and Adam's second moments."""

from __future__ import annotations

import math
import operator
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from gtrace.capture.buffers import BufferPool, staging_for
from gtrace.torch_hooks.gradients import OptimizerStep, as_real_dense, main_gradient, numbers_of, own_gradient
from gtrace.torch_hooks.naming import TreeName, local_part, sharding
from gtrace.torch_hooks.optimizers import differing_groups
from gtrace.torch_hooks.processes import started_again
from gtrace.torch_hooks.steps import Rounds, hides_from_swaps, parameters_of
from gtrace.trace.facts import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch.optim import Optimizer

    #: what a row is to hold of a parameter: it, this process's part of a tensor, and its stage
    Found: TypeAlias = tuple[torch.Tensor, torch.Tensor, str]
    #: Adam's running mean of squared gradients of one parameter, and what turns it into the step's divisor
    MomentsOf: TypeAlias = tuple[torch.Tensor, float, float, float]

_GRADIENT, _KIND = operator.attrgetter("grad"), operator.attrgetter("dtype", "layout", "is_cpu", "shape")
_CONTIGUOUS, _NEGATIVE = operator.methodcaller("is_contiguous"), operator.methodcaller("is_neg")
_ADDRESS = operator.methodcaller("data_ptr")
#: the kind of a gradient whose memory is what a row holds
_AS_IT_IS = torch.float32, torch.strided, True


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a row: its place among the buffer's targets, and its description in the trace.

    ``attrs`` are its attributes, stored once; ``numbers`` are about this row (arguments of ``TraceWriter.append``).
    """

    index: int
    name: str
    shape: tuple[int, ...]
    dtype: str
    aliases: tuple[str, ...] = ()
    module_type: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    numbers: Mapping[str, int] = field(default_factory=dict)


def shape_and_type(tensor: torch.Tensor) -> tuple[tuple[int, ...], str]:
    """The shape and the type of a tensor in a trace; a complex one has a last axis of 2."""
    shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
    return shape, str(tensor.dtype).removeprefix("torch.")


class RowLayout:
    """The recorded tensors of one optimizer, in the order in which they first had a gradient.

    ``queue_bytes`` is the limit on the bytes of all its rows that wait to be written.
    """

    def __init__(
        self,
        names: Callable[[Optimizer | Rounds], Mapping[int, TreeName]],
        keeps: Callable[[TreeName], bool],
        queue_bytes: int,
    ) -> None:
        self.slots: list[Slot] = []
        #: Replaced when the layout grows; pending rows still return to the old one.
        self.pool: BufferPool | None = None
        self._names = names
        self._keeps = keeps
        self._queue_bytes = queue_bytes
        #: the slots of the last row: the same list as long as rows have the same tensors
        self._usual: list[Slot] = []
        #: number of slots, and their bytes
        self._counted = (0, 0)
        #: id of a parameter -> it, the shape of what was placed, and its slot, None if it is left out
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], torch.Size, Slot | None]] = {}
        #: of the last step if all its gradients were recorded as they are: ids of parameters, types and kinds of the
        #: gradients, and whether each row can be copied from the gradients' memory, where these are contiguous
        self._plain: tuple[list[int], list[type], list[tuple[Any, ...]], bool] | None = None
        hides_from_swaps(self)

    def release(self) -> None:
        """Free the memory for rows of an optimizer that is gone; its tensors stay known."""
        self.pool = self._plain = None
        self._known = {}

    def forget(self, parameter: torch.Tensor) -> None:
        """Keep no reference to a parameter; if it comes again, it has its name again."""
        self._plain = None
        self._known.pop(id(parameter), None)

    @property
    def tensors(self) -> int:
        """Number of distinct tensors so far."""
        return len({slot.name for slot in self.slots})

    def row_bytes(self, cost: Callable[[int], int]) -> int:
        """Bytes of a row with every tensor; ``cost`` maps a number of elements to bytes."""
        if self._counted[0] != len(self.slots):
            self._counted = len(self.slots), sum(cost(math.prod(slot.shape)) for slot in self.slots)
        return self._counted[1]

    def bytes_of(self, tensors: Sequence[torch.Tensor], cost: Callable[[int], int]) -> int:
        """Bytes of a row with these tensors."""
        whole = len(tensors) == len(self.slots)
        return self.row_bytes(cost) if whole else sum(cost(tensor.numel()) for tensor in tensors)

    def same(self, optimizer: Optimizer | Rounds) -> tuple[list[Slot], list[torch.Tensor], list[torch.Tensor]] | None:
        """What :meth:`gradients` returns if the own gradients of all parameters are as they were at the last step."""
        plain, groups = self._plain, optimizer.param_groups
        if plain is None:
            return None
        several = groups[0]["params"] if len(groups) == 1 else parameters_of(groups)
        given = list(map(_GRADIENT, several))
        ids, types, kinds, _ = plain
        if ids == list(map(id, several)) and types == list(map(type, given)) and kinds == list(map(_KIND, given)):
            return self._usual, given, several
        return None

    def addresses(self, given: Sequence[torch.Tensor]) -> list[int] | None:
        """Where the gradients of :meth:`same` lie, if a buffer can copy them from there."""
        if self._plain is None or not self._plain[-1] or not all(map(_CONTIGUOUS, given)):
            return None
        return None if any(map(_NEGATIVE, given)) else list(map(_ADDRESS, given))

    def gradients(self, step: OptimizerStep) -> tuple[list[Slot], list[torch.Tensor], list[torch.Tensor]]:
        """The slots of a step's gradients, the gradients as real strided tensors, and the parameters."""
        own_ones = step.gradient is own_gradient
        if own_ones and (same := self.same(step.optimizer)) is not None:
            return same
        several = parameters_of(step.optimizer.param_groups)
        given = list(map(_GRADIENT, several)) if own_ones else []
        found = []
        for parameter in several:
            gradient, stage = step.gradient(parameter)
            if gradient is None:
                gradient, stage = main_gradient(parameter)
            if gradient is not None:
                own = gradient if type(gradient) is torch.Tensor else local_part(gradient)
                found.append((parameter, own, stage))
        slots, tensors, parameters = self.place(step.optimizer, found)
        self._plain = None
        if tensors and len(tensors) == len(given) and all(map(operator.is_, tensors, given)):
            kinds = list(map(_KIND, given))
            as_it_is = [kind[:3] for kind in kinds] == [_AS_IT_IS] * len(self.slots)
            small = self.pool is not None and self.pool.small and as_it_is
            small = small and all(slot is own for slot, own in zip(slots, self.slots, strict=True))
            self._plain = list(map(id, several)), list(map(type, given)), kinds, small
        return slots, tensors, parameters

    def place(
        self, optimizer: Optimizer | Rounds, found: Sequence[Found]
    ) -> tuple[list[Slot], list[torch.Tensor], list[torch.Tensor]]:
        """The slots of tensors, these as real strided ones, and their parameters, without those left out."""
        if not all(self._knows(parameter, tensor) for parameter, tensor, _ in found):
            self._extend(optimizer, found)
        slots, tensors, parameters = [], [], []
        for parameter, tensor, _ in found:
            slot = self._known[id(parameter)][-1]
            if slot is not None:
                slots.append(slot)
                tensors.append(as_real_dense(tensor))
                parameters.append(parameter)
        if slots != self._usual:
            self._usual = slots
        return self._usual, tensors, parameters

    def _knows(self, parameter: torch.Tensor, tensor: torch.Tensor) -> bool:
        # The id of a deleted parameter may now be another's, and a program may give a parameter another shape.
        entry = self._known.get(id(parameter))
        return entry is not None and entry[0]() is parameter and entry[1] == tensor.shape

    def _extend(self, optimizer: Optimizer | Rounds, found: Sequence[Found]) -> None:
        """Name the parameters with a first gradient, and give each its place."""
        names = self._names(optimizer)
        groups = differing_groups(optimizer)
        for parameter, gradient, stage in found:
            if not self._knows(parameter, gradient):
                entry = names[id(parameter)]
                attrs = {"stage": stage, **sharding(parameter), **entry.part, **started_again()}
                if id(parameter) in groups:
                    attrs[GROUP] = groups[id(parameter)]
                slot = None
                if gradient.numel() and self._keeps(entry):
                    shape, dtype = shape_and_type(gradient)
                    name = self._free_name(entry.name, shape)
                    slot = Slot(len(self.slots), name, shape, dtype, entry.aliases, entry.module_type, attrs)
                    self.slots.append(slot)
                # If it goes, its id may be another's soon.
                reference = weakref.ref(parameter, lambda _: setattr(self, "_plain", None))
                self._known[id(parameter)] = (reference, gradient.shape, slot)
        shapes = [slot.shape for slot in self.slots]
        staging = staging_for((gradient.device for _, gradient, _ in found), shapes)
        self.pool = BufferPool(shapes, self._queue_bytes, staging)

    def _free_name(self, name: str, shape: tuple[int, ...]) -> str:
        """The name itself, unless a living parameter, or one of another shape, already has it."""
        living = {slot.name for reference, _, slot in self._known.values() if slot and reference() is not None}
        shapes = {slot.name: slot.shape for slot in self.slots}
        number, free = 2, name
        while free in living or shapes.get(free, shape) != shape:
            free, number = f"{name}~{number}", number + 1
        return free


def second_moments(optimizer: Optimizer | Rounds, parameters: Sequence[torch.Tensor]) -> list[float]:
    """Sum over the elements of Adam's running mean of squared gradients, ``exp_avg_sq``, in float64.

    Divided by the number of elements it is the square of the typical amount by which Adam divides; it is not
    corrected for its start at zero. It is NaN if there is none (yet).
    """
    means = _means(optimizer, parameters)
    return _as_numbers([None if mean is None else mean.sum(dtype=torch.float64) for mean in means])


def moments_of(optimizer: Optimizer | Rounds, parameters: Sequence[torch.Tensor]) -> list[MomentsOf | None]:
    """For each parameter ``exp_avg_sq`` as it is, real and strided; None if there is none (yet) of its own shape.

    With it come the steps that the optimizer has done with the parameter, NaN if it does not say; the decay of the
    mean; and eps, which is added to its root.
    """
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    state = getattr(optimizer, "state", {})
    found: list[MomentsOf | None] = []
    means = _means(optimizer, parameters)
    steps = _as_numbers(
        [None if mean is None else state[p].get("step") for mean, p in zip(means, parameters, strict=True)]
    )
    for parameter, mean, done in zip(parameters, means, steps, strict=True):
        if mean is None or mean.shape != local_part(parameter).shape:
            found.append(None)
            continue
        group = groups[id(parameter)]
        betas = group.get("betas", (0.0, 1.0))
        found.append((as_real_dense(mean), done, float(betas[1]), float(group.get("eps", 0.0))))
    return found


def _means(optimizer: Optimizer | Rounds, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    state = getattr(optimizer, "state", {})
    found = [state[parameter].get("exp_avg_sq") if parameter in state else None for parameter in parameters]
    return [local_part(mean) if isinstance(mean, torch.Tensor) else None for mean in found]


def _as_numbers(values: Sequence[torch.Tensor | float | None]) -> list[float]:
    """Values as floats, NaN for None."""
    numbers = iter(numbers_of([value for value in values if isinstance(value, torch.Tensor)]))
    return [
        next(numbers) if isinstance(value, torch.Tensor) else math.nan if value is None else float(value)
        for value in values
    ]
