"""How the gradients of a step's micro-batches scatter: what gradient accumulation adds up, looked at one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from gtrace.host.sharded import is_sharded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer


class Replicas(NamedTuple):
    """Second moments of the gradients g_1, ..., g_n that were added up in one parameter.

    The inputs of unbiased estimates, if the g_i are drawn from one law: with S = sum ||g_i||^2 and T = ||sum g_i||^2,
    ||E g||^2 is (T - S) / (n (n - 1)), and the variance of one g_i, summed over elements, is (S - T / n) / (n - 1).

    Attributes:
        number: n, at least 2.
        norm2: S, a float64 sum.
        sum_norm2: T, a float64 sum.
    """

    number: int
    norm2: float
    sum_norm2: float


@dataclass(slots=True)
class _Sums:
    """Of one parameter, since its gradient was last zero. Tensors stay for the next step: fresh memory costs time.

    Attributes:
        count: micro-batches.
        norm2: sum of their squared norms, float64 on the gradient's device.
        total: their sum; of arbitrary content while ``count`` is 0.
        before: what ``grad`` was when the present micro-batch arrived, where it was something.
        met: it was something.
    """

    count: int = 0
    norm2: torch.Tensor | None = None
    total: torch.Tensor | None = None
    before: torch.Tensor | None = None
    met: bool = False


class MicroBatches:
    """Takes the gradient of each micro-batch as the difference that it makes, when it has been accumulated.

    That happens before ``DistributedDataParallel`` averages, so the micro-batches are those of this process, with
    and without ``no_sync``. A gradient that is set to zero or None starts anew. Sharded parameters are left out.
    Two copies of the gradients are held.

    Args:
        guarded: calls a function with arguments and catches its errors.
    """

    def __init__(self, guarded: Callable[..., None]) -> None:
        #: Whether the step that is being put together is to be recorded.
        self.wanted = True
        self._guarded = guarded
        self._sums: Any = WeakTensorKeyDictionary()
        self._handles: list[Any] = []

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch these parameters, too."""
        for parameter in parameters:
            if not parameter.requires_grad or not parameter.is_leaf or is_sharded(parameter):
                continue
            if self._sums.get(parameter) is None:
                sums = self._sums[parameter] = _Sums()
                self._add_hooks(parameter, sums)

    def replicas(self, parameter: torch.Tensor, scale: float) -> Replicas | None:
        """What this step's micro-batches were like, None where there were not two of them.

        Args:
            parameter: an optimizer's.
            scale: what a gradient scaler multiplied the loss with; taken out.
        """
        sums = self._sums.get(parameter)
        if sums is None or sums.count < 2 or sums.norm2 is None or sums.total is None:
            return None
        return Replicas(sums.count, float(sums.norm2) / scale**2, float(_norm2(sums.total)) / scale**2)

    def consume(self, optimizer: Optimizer) -> None:
        """The optimizer has used its gradients; the next backward pass starts a new step."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                sums = self._sums.get(parameter)
                if sums is not None:
                    sums.count = 0

    def remove(self) -> None:
        """Stop to watch."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _add_hooks(self, parameter: Any, sums: _Sums) -> None:
        def arrives(_gradient: torch.Tensor) -> None:
            if self.wanted:
                self._guarded(self._remember, owner(), sums)

        def accumulated(parameter: torch.Tensor) -> None:
            if self.wanted:
                self._guarded(self._add, parameter, sums)

        # A strong reference would keep the parameter alive through its own hook.
        owner = TensorWeakRef(parameter)
        self._handles.append(parameter.register_hook(arrives))
        self._handles.append(parameter.register_post_accumulate_grad_hook(accumulated))

    @torch.no_grad()
    def _remember(self, parameter: torch.Tensor | None, sums: _Sums) -> None:
        gradient = None if parameter is None else parameter.grad
        sums.met = gradient is not None
        if gradient is not None:
            sums.before = _copied(_real(gradient.detach()), sums.before)

    @torch.no_grad()
    def _add(self, parameter: torch.Tensor, sums: _Sums) -> None:
        met, sums.met = sums.met, False
        if parameter.grad is None:
            return
        added = _real(parameter.grad.detach())
        if not met or sums.before is None or not bool(sums.before.any()):
            sums.count = 0
        else:
            added = torch.sub(added, sums.before, out=sums.before)
        norm2 = _norm2(added)
        if sums.count == 0 or sums.total is None or sums.norm2 is None:
            sums.count, sums.norm2, sums.total = 1, norm2, _copied(added, sums.total)
            return
        sums.count += 1
        sums.norm2 = sums.norm2 + norm2
        sums.total.add_(added)


def _copied(values: torch.Tensor, room: torch.Tensor | None) -> torch.Tensor:
    """A copy, in ``room`` where that fits."""
    fits = room is not None and room.shape == values.shape and room.dtype == values.dtype
    return room.copy_(values) if room is not None and fits and room.device == values.device else values.clone()


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """Strided and real."""
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient


def _norm2(gradient: torch.Tensor) -> torch.Tensor:
    norm: torch.Tensor = torch.linalg.vector_norm(gradient, 2, dtype=torch.float64)
    return norm.square()
