"""Optimizers that step inside the backward pass, each as soon as the gradients of its parameters are there."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim import Optimizer


def backward_in_progress() -> int:
    """Number of the backward pass in which this is called; -1 outside of one."""
    return torch._C._current_graph_task_id()


class Rounds:
    """Makes one step of all the steps that optimizers take during one backward pass.

    It stands for one optimizer: ``param_groups`` are those of all its members.

    Args:
        begin: called at the first step of a backward pass; says whether its gradients are to be kept.
        end: called when the backward pass is over.
    """

    def __init__(self, begin: Callable[[], bool], end: Callable[[], None]) -> None:
        # By weak reference: a program that drops its optimizers gets their memory back.
        self._members: weakref.WeakValueDictionary[int, Optimizer] = weakref.WeakValueDictionary()
        self._gradients: dict[int, torch.Tensor] = {}
        self._begin = begin
        self._end = end
        self._open: int | None = None
        self._wanted = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of all optimizers that stepped so far."""
        return [group for member in self._members.values() for group in member.param_groups]

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """The gradient with which the parameter was stepped in this round."""
        return self._gradients.get(id(parameter))

    def add(self, optimizer: Optimizer, gradient: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        """An optimizer steps inside a backward pass.

        Args:
            optimizer: the optimizer.
            gradient: what the gradient of one of its parameters is now.
        """
        task = backward_in_progress()
        if self._open != task:
            self.close()  # a pass that raised never came to its end
            self._open, self._wanted = task, self._begin()
            torch.autograd.Variable._execution_engine.queue_callback(self.close)
        self._members.setdefault(id(optimizer), optimizer)
        if self._wanted:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    value = gradient(parameter)
                    if value is not None:
                        self._gradients[id(parameter)] = value.detach().clone()

    def close(self) -> None:
        """The backward pass is over."""
        if self._open is None:
            return
        self._open = None
        self._end()
        self._gradients = {}
