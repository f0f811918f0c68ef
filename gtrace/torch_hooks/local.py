"""Gradients of this process alone, before those of several processes are averaged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gtrace.torch_hooks.sharded import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

#: What is known of where a gradient comes from: before or after those of several processes were averaged.
LOCAL, REDUCED = "local", "reduced"


@dataclass(slots=True)
class _Copy:
    """What is known of one parameter.

    Attributes:
        strict: a wrapper averages its gradient during the backward pass, so ``grad`` never is the local one.
        value: its local gradient after the last backward pass that was wanted.
        fresh: ``value`` belongs to the step that is being put together.
        before: ``grad`` at the start of a backward pass that is not the first of its step.
    """

    strict: bool = False
    value: torch.Tensor | None = None
    fresh: bool = False
    before: torch.Tensor | None = None


class LocalGradients:
    """Copies gradients at the moment when they have been accumulated.

    ``DistributedDataParallel`` learns of a gradient from the node that accumulates it, after the parameter's own
    post-accumulate hooks have run: in those, ``grad`` still is this process's. So it is where a program averages
    gradients itself after its backward pass. ``gradient_as_bucket_view``, ``no_sync`` and unused parameters
    change nothing about that. Micro-batches without ``no_sync`` do: all but the first are added to an
    average. Of those, only what they add is taken, exact but for rounding.

    A gradient that does not pass through such a hook, or not in the parameter's shape, has no local form; nor has
    that of a sharded parameter (``fully_shard`` puts sums over all processes into ``grad``).

    Args:
        guarded: calls a function with arguments and catches its errors.
    """

    def __init__(self, guarded: Callable[..., None]) -> None:
        #: Whether the step that is being put together is to be recorded.
        self.wanted = True
        self._guarded = guarded
        self._copies: Any = WeakTensorKeyDictionary()
        self._handles: list[Any] = []

    def watch(self, parameters: Iterable[torch.Tensor], *, strict: bool = False) -> None:
        """Watch these parameters, too.

        Args:
            parameters: those that need no gradient, and sharded ones, are left out.
            strict: a wrapper averages their gradients during the backward pass.
        """
        for parameter in parameters:
            # What runs the hooks of a sharded parameter has summed up its gradient before.
            if not parameter.requires_grad or not parameter.is_leaf or is_sharded(parameter):
                continue
            copy = self._copies.get(parameter)
            if copy is None:
                copy = self._copies[parameter] = _Copy()
                self._add_hooks(parameter, copy)
            copy.strict = copy.strict or strict

    def gradient(self, parameter: torch.Tensor, scale: float) -> tuple[torch.Tensor | None, str]:
        """The gradient of this step, and ``local`` or, where there is no such gradient, ``reduced``.

        Args:
            parameter: an optimizer's.
            scale: what a gradient scaler multiplied the loss with; taken out of a local gradient.
        """
        copy = self._copies.get(parameter)
        if copy is not None and copy.fresh and copy.value is not None and copy.value.shape == parameter.shape:
            return (copy.value if scale == 1.0 else copy.value / scale), LOCAL
        if copy is not None and (copy.strict or (copy.value is not None and copy.value.shape == parameter.shape)):
            return None, LOCAL
        return parameter.grad, REDUCED

    def consume(self, optimizer: Optimizer) -> None:
        """The optimizer has used its gradients; the next backward pass starts a new step."""
        if not len(self._copies):
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                copy = self._copies.get(parameter)
                if copy is not None:
                    copy.fresh = False

    def remove(self) -> None:
        """Stop to watch."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add_hooks(self, parameter: Any, copy: _Copy) -> None:
        def arrives(_gradient: torch.Tensor) -> None:
            if copy.fresh and self.wanted:
                self._guarded(self._remember, owner(), copy)

        def accumulated(parameter: torch.Tensor) -> None:
            if self.wanted:
                self._guarded(self._copy, parameter, copy)

        # A strong reference would keep the parameter alive through its own hook.
        owner = torch.utils.weak.TensorWeakRef(parameter)
        self._handles.append(parameter.register_hook(arrives))
        self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    @torch.no_grad()
    def _remember(self, parameter: torch.Tensor | None, copy: _Copy) -> None:
        """Another micro-batch: what is in ``grad`` now is not its own."""
        gradient = None if parameter is None else parameter.grad
        copy.before = None if gradient is None else gradient.detach().clone()

    @torch.no_grad()
    def _copy(self, parameter: torch.Tensor, copy: _Copy) -> None:
        gradient, before, value = parameter.grad, copy.before, copy.value
        copy.before = None
        if gradient is None:
            return
        if before is not None and value is not None and _averaged(before, value):
            copy.value = value + (gradient - before)
        elif value is not None and _alike(value, gradient):
            value.copy_(gradient)
        else:
            copy.value = gradient.detach().clone()
        copy.fresh = True


def _averaged(before: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether ``grad`` was neither left as it was after the micro-batch before, nor set to zero."""
    return before.shape == value.shape and not torch.equal(before, value) and bool(before.any())


def _alike(value: torch.Tensor, gradient: torch.Tensor) -> bool:
    strided = value.layout == gradient.layout == torch.strided
    return (
        strided and value.shape == gradient.shape and value.dtype == gradient.dtype and value.device == gradient.device
    )
