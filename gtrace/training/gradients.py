"""Gradients of parameters as exchanges take them: float32 where they lie, or on the host, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gtrace.torch_hooks.sharded import local_part
from gtrace.training import device

if TYPE_CHECKING:
    from gtrace.training.vectors import Vector


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a gradient that a codec can take."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout == torch.strided


def read_gradient(parameter: torch.Tensor, scale: float = 1.0) -> Vector:
    """The gradient, divided by ``scale``: float32, of the parameter's shape; of a sharded one this process's part,
    of a complex one real and imaginary parts along a last axis. It may share the gradient's memory.

    It is a tensor where codecs work on its device, and an array of the host everywhere else.

    Raises:
        ValueError: there is no dense gradient.
    """
    if not is_dense(parameter):
        raise ValueError("the parameter has no dense gradient")
    values: torch.Tensor = _real(parameter).to(torch.float32)
    stays = values.device.type in device.DEVICES
    values = values if stays else values.cpu()
    if scale != 1.0:
        # On CUDA, division by a number of the host would multiply by its reciprocal.
        values = values / values.new_full((), scale)
    return values if stays else values.numpy()


def write_gradient(parameter: torch.Tensor, found: Vector, scale: float = 1.0) -> None:
    """Undo :func:`read_gradient`, in place: whoever holds the gradient sees the new values."""
    values = torch.as_tensor(found)
    _real(parameter).copy_(values if scale == 1.0 else values * scale)


def _real(parameter: torch.Tensor) -> Any:
    gradient = parameter.grad
    assert gradient is not None
    part = local_part(gradient.detach())
    return torch.view_as_real(part) if part.is_complex() else part
