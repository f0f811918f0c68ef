"""What is backpropagated between optimizer steps, and the numbers that torch computes on the way."""

from __future__ import annotations

import math
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch.amp.grad_scaler import GradScaler


class Losses:
    """Sums what is backpropagated between steps.

    The sum stays when a step has used it, for a second optimizer that steps on the same backward pass; the
    next backward pass starts anew.
    """

    def __init__(self) -> None:
        self._total: float | torch.Tensor = 0.0
        self._clip_norm: float | torch.Tensor = math.nan
        self._used = False
        self._unscaled: tuple[weakref.ref[torch.Tensor], torch.Tensor] | None = None
        #: The gradient scaler that scaled a loss since the step before.
        self.scaler: GradScaler | None = None
        self.micro_batches = 0

    @property
    def total(self) -> float:
        """Sum since the step before; NaN where nothing was backpropagated."""
        return float(self._total) if self.micro_batches else math.nan

    @property
    def clip_norm(self) -> float:
        """What ``clip_grad_norm_`` returned last; NaN where it was not called."""
        return float(self._clip_norm)

    def use(self) -> None:
        """A step has used the sum."""
        self._used = True

    def scaled(self, scaler: GradScaler, loss: object, result: object) -> None:
        """A gradient scaler made ``result`` of ``loss``."""
        self.scaler = scaler
        if isinstance(loss, torch.Tensor) and isinstance(result, torch.Tensor) and result is not loss:
            self._unscaled = weakref.ref(result), loss.detach()

    def backward(self, tensors: object, gradients: object) -> None:
        """A backward pass starts; only one without explicit gradients starts at a loss."""
        roots = tensors if isinstance(tensors, (tuple, list)) else (tensors,)
        given = gradients if isinstance(gradients, (tuple, list)) else (gradients,)
        if any(gradient is not None for gradient in given):
            return
        if not all(isinstance(root, torch.Tensor) and root.numel() == 1 for root in roots):
            return
        if self._used:
            self._total, self._clip_norm, self._used, self.micro_batches = 0.0, math.nan, False, 0
        for root in roots:
            self._total = self._total + self._value(root)
        self.micro_batches += 1

    def clipped(self, norm: torch.Tensor) -> None:
        """``clip_grad_norm_`` returned this norm."""
        self._clip_norm = norm.detach()

    def _value(self, root: torch.Tensor) -> float | torch.Tensor:
        if self._unscaled is not None and self._unscaled[0]() is root:
            root, self._unscaled = self._unscaled[1], None
        # Reading a value off another device would make training wait for it: that is left for a step that is
        # captured. The copy is needed because a loss may be changed in place after its backward pass.
        return root.item() if root.device.type == "cpu" else root.detach().to(torch.float32, copy=True).reshape(())
