"""Steps that no optimizer of torch takes: a program changes its weights itself, or hands its gradients over."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from gtrace.torch_hooks.gradients import LOCAL, OptimizerStep
from gtrace.torch_hooks.steps import Losses, OfTensors, Rounds, backward_in_progress, living, nodes_below

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence


#: steps, and bytes of gradients, that wait while an optimizer exists that may still step
_WAITING, _WAITING_BYTES = 20, 256 << 20
#: elements of a gradient among which the largest is looked for
_LOOKED_AT = 1024


class HandStream:
    """Parameters that a program changes together; it acts as their optimizer."""

    def __init__(self) -> None:
        #: parameter -> the name of its variable in the program, empty without one
        self.names: MutableMapping[torch.Tensor, str] = OfTensors()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group with the parameters that still exist."""
        found = list(self.names.items())
        return [{"params": [one for one, _ in found], "param_names": [name for _, name in found]}]


class HandedStream:
    """Gradients that a program hands over by name; it acts as the optimizer of parameters with these names."""

    def __init__(self) -> None:
        self._parameters: dict[str, torch.Tensor] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """One group; its parameters have shapes and no values."""
        return [{"params": [*self._parameters.values()], "param_names": [*self._parameters]}]

    def put(self, gradients: Mapping[str, Any]) -> dict[int, torch.Tensor]:
        """The gradients of the next step by the parameters' ids; given are name -> tensor or array."""
        found = {}
        for name, value in gradients.items():
            gradient = torch.as_tensor(value).detach()
            known = self._parameters.get(name)
            if known is None or known.shape != gradient.shape:
                known = self._parameters[name] = torch.empty(gradient.shape, device="meta")
            found[id(known)] = gradient
        return found


@dataclass(slots=True)
class _Leaf:
    """A parameter after a backward pass: what shows later whether the program has changed it.

    Attributes:
        gradient: a copy, None if the step is not recorded.
        place: the address of the parameter's memory.
        largest: place of the element with the largest gradient among some, None if all of these are zero.
        value: that element.
        name: of the program's variable, while it held the parameter; empty without one, and for weights of modules.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor | None
    version: int
    place: int
    largest: torch.Tensor
    value: torch.Tensor
    name: str = ""

    def changed(self) -> bool:
        now = self.parameter.detach()
        if self.parameter._version != self.version or now.data_ptr() != self.place:
            return True
        # The counter does not count what is done to ``.data``.
        return not torch.equal(now.reshape(-1)[self.largest], self.value)


def step_by_hand(
    stream: HandStream | HandedStream,
    gradients: Mapping[int, torch.Tensor],
    loss: float,
    lr: float = math.nan,
    micro_batches: int = 0,
    clip_norm: float = math.nan,
) -> OptimizerStep:
    """A step without an optimizer and, so far, without a number.

    Its gradients, by the parameters' ids, are this process's own unless a wrapper averages them.
    """
    return OptimizerStep(
        optimizer=cast("Rounds", stream),  # it has parameter groups, and nothing else is asked of it
        stream=-1,
        step=-1,
        loss=loss,
        micro_batches=micro_batches,
        lr=lr,
        grad_scale=1.0,
        clip_norm=clip_norm,
        gradient=lambda parameter: (gradients.get(id(parameter)), LOCAL),
    )


class Unstepped:
    """Finds the steps of a program that changes its weights itself.

    A step is over when the next backward pass, or the end, finds other weights; its gradients are those after the last
    backward pass (and ``clip_grad_norm_``) before that. While the weights stay, further backward passes are
    micro-batches of the step if the gradients stay too, and a new beginning if these were cleared. Parameters that did
    not change do not belong to a step, so several models have steps of their own.

    If an optimizer exists, it may be about to step: an attack on the input, or the inner steps of a meta-learner, may
    come before. The first steps then wait in memory, and are thrown away when an optimizer steps.

    Args:
        wanted: whether the next step may be recorded, given the number of those that wait.
        gradient: a parameter's gradient right after the backward pass.
        take: called with each step.
        owners: the modules that may own parameters; kept until then, so that there are names for what waits.
    """

    def __init__(
        self,
        wanted: Callable[[int], bool],
        gradient: Callable[[torch.Tensor], torch.Tensor | None],
        take: Callable[[OptimizerStep], None],
        owners: Callable[[], Sequence[object]],
    ) -> None:
        self._wanted = wanted
        self._gradient = gradient
        #: of these steps: those of optimizers have their own, as before
        self.losses = Losses()
        self._take = take
        #: called once, when it is certain that no optimizer steps
        self.chosen: Callable[[], None] = lambda: None
        self._owners = owners
        self._kept: Sequence[object] = ()
        self._sure = False
        self._streams: list[HandStream] = []
        #: with the bytes of their gradients, and the parameters, which are kept meanwhile
        self._waiting: list[tuple[OptimizerStep, int, Sequence[torch.Tensor]]] = []
        #: the parameters that the present backward pass reaches
        self._reached: dict[int, torch.Tensor] = {}
        #: of the step so far
        self._leaves: dict[int, _Leaf] = {}
        #: the program makes new parameters at each step, in the order of the old ones
        self._replaces = False
        #: no module has parameters, once it is known: a search through all objects takes some hundredths of a second
        self._bare: bool | None = None

    @torch.no_grad()
    def begin(self, roots: object, factors: object = None, inputs: object = None) -> None:
        """A backward pass begins."""
        reached = {id(leaf): leaf for leaf in leaves_below(roots if inputs is None else inputs)}
        if backward_in_progress() >= 0:
            self._reached |= reached  # of a checkpoint inside another pass
            return
        if self._leaves:
            self._judge(reached)
        self._reached = reached
        self.losses.backward(roots, factors)

    @torch.no_grad()
    def end(self) -> None:
        """A backward pass is over."""
        if backward_in_progress() >= 0:
            return
        reached, self._reached = self._reached, {}
        if not self._sure and not self._kept:
            self._kept = self._owners()
        gradients = {key: self._gradient(parameter) for key, parameter in reached.items()}
        copies = self._wanted(len(self._waiting)) and (self._sure or _bytes(gradients.values()) <= _WAITING_BYTES)
        for key, gradient in gradients.items():
            if gradient is not None:
                self._leaves[key] = _look_at(reached[key], gradient, copies)
        self._name()

    def _name(self) -> None:
        """Later the variables may hold other tensors."""
        bare = [leaf for leaf in self._leaves.values() if not leaf.name and not _is_weight(leaf)]
        if bare:
            variables = {id(value): name for name, value in list(vars(sys.modules["__main__"]).items())}
            for leaf in bare:
                leaf.name = variables.get(id(leaf.parameter), "")

    @torch.no_grad()
    def zeroed(self, parameters: Sequence[torch.Tensor]) -> None:
        """The gradients of these parameters were set to zero or None: usual before, after and between steps."""
        if any(leaf.changed() for leaf in self._leaves.values()):
            self._judge({})
        self.losses.zeroed(parameters)

    @torch.no_grad()
    def clipped(self, parameters: Sequence[torch.Tensor], norm: torch.Tensor) -> None:
        """``clip_grad_norm_`` has changed the gradients of these parameters."""
        self.losses.clipped(parameters, norm)
        for parameter in parameters:
            leaf = self._leaves.get(id(parameter))
            gradient = self._gradient(parameter)
            if leaf is not None and leaf.gradient is not None and gradient is not None:
                leaf.gradient = gradient.clone()

    @torch.no_grad()
    def finish(self) -> None:
        """The program is over."""
        if self._leaves:
            self._judge({}, ends=True)
        if self._waiting:
            self._choose()

    def _judge(self, reached: Mapping[int, torch.Tensor], *, ends: bool = False) -> None:
        """Whether the step is over, now that a pass begins that reaches these parameters, or the program ends."""
        leaves = list(self._leaves.values())
        changed = [leaf for leaf in leaves if leaf.changed()]
        kept = {id(leaf) for leaf in leaves} - {id(leaf) for leaf in changed}
        if any(id(leaf) in kept and _is_weight(leaf) for leaf in leaves) and not any(map(_is_weight, changed)):
            changed = []  # an input that an attack changes
        if not changed and (self._replaces if ends else self._are_replaced(leaves, reached)):
            changed = leaves
        if changed:
            # A gradient of zeros changes nothing, and is a gradient.
            still = [one for one in leaves if id(one) in kept and (g := one.gradient) is not None and not g.any()]
            self._complete([*changed, *still])
        elif not any(leaf.parameter.grad is not None and bool(leaf.parameter.grad.any()) for leaf in leaves):
            self._leaves = {}

    def _are_replaced(self, leaves: Sequence[_Leaf], reached: Mapping[int, torch.Tensor]) -> bool:
        """Whether the pass has new parameters instead of all the old ones, none of which a module owns."""
        if any(_is_weight(leaf) or id(leaf.parameter) in reached for leaf in leaves):
            return False
        shapes = [leaf.parameter.shape for leaf in leaves]
        if shapes != [parameter.shape for parameter in reached.values()]:
            return False
        if self._bare is None:
            self._bare = not any(True for _ in living(torch.nn.Parameter))
        self._replaces = self._bare
        return self._replaces

    def _complete(self, changed: Sequence[_Leaf]) -> None:
        stream = next((one for one in self._streams if any(leaf.parameter in one.names for leaf in changed)), None)
        if stream is None and self._replaces and self._streams:
            stream = self._streams[-1]
        if stream is None:
            stream = HandStream()
            self._streams.append(stream)
        for leaf in changed:
            stream.names.setdefault(leaf.parameter, leaf.name)
        gradients = {id(leaf.parameter): leaf.gradient for leaf in changed if leaf.gradient is not None}
        groups = stream.param_groups
        self.losses.use()
        loss, count = self.losses.of(groups)
        norm = self.losses.clip_norm(groups)
        step = step_by_hand(stream, gradients, loss, micro_batches=count, clip_norm=norm)
        self._leaves = {}
        if self._sure:
            self._take(step)
            return
        self._waiting.append((step, _bytes(gradients.values()), [leaf.parameter for leaf in changed]))
        full = len(self._waiting) >= _WAITING or sum(size for _, size, _ in self._waiting) >= _WAITING_BYTES
        if full or not any(True for _ in living(torch.optim.Optimizer)):
            self._choose()

    def _choose(self) -> None:
        if not self._sure:
            self._sure = True
            self.chosen()
        waiting, self._waiting = self._waiting, []
        for step, *_ in waiting:
            self._take(step)
        self._kept = ()


def _look_at(parameter: torch.Tensor, gradient: torch.Tensor, copies: bool) -> _Leaf:
    own = parameter.detach().reshape(-1)
    some = gradient.detach().to_dense().reshape(-1)
    stride = max(1, some.numel() // _LOOKED_AT)
    if own.numel() == 0:
        largest = torch.zeros(0, dtype=torch.int64, device=own.device)
    else:
        largest = some[::stride].abs().argmax().reshape(1) * stride
        if stride > 1 and own.device.type == "cpu" and not some[largest]:
            largest = some.abs().argmax().reshape(1)  # most rows of an embedding are zero
    copy = gradient.detach().clone() if copies else None
    return _Leaf(parameter, copy, parameter._version, parameter.data_ptr(), largest, own[largest])


def leaves_below(roots: object) -> list[torch.Tensor]:
    """The parameters that get a gradient if a backward pass starts at these tensors."""
    given = roots if isinstance(roots, (tuple, list)) else (roots,)
    tensors = [one for one in given if isinstance(one, torch.Tensor)]
    found = {id(one): one for one in tensors if one.grad_fn is None and one.requires_grad}
    for node in nodes_below(tensors):
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            found[id(variable)] = variable
    return list(found.values())


def _is_weight(leaf: _Leaf) -> bool:
    return isinstance(leaf.parameter, torch.nn.Parameter)


def _bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    return sum(one.numel() * one.element_size() for one in tensors if one is not None)
