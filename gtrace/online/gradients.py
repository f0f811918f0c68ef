"""Gradients of parameters as codecs take them: float32 on the CPU, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from gtrace.host.sharded import local_part

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def is_dense(parameter: torch.Tensor) -> bool:
    """Whether the parameter has a gradient that a codec can take."""
    gradient = parameter.grad
    return gradient is not None and gradient.layout == torch.strided


def read_gradient(parameter: torch.Tensor, scale: float = 1.0) -> NDArray[np.float32]:
    """The gradient, divided by ``scale``: float32, of the parameter's shape; of a sharded one this process's part,
    of a complex one real and imaginary parts along a last axis. It may share the gradient's memory.

    Raises:
        ValueError: there is no dense gradient.
    """
    if not is_dense(parameter):
        raise ValueError("the parameter has no dense gradient")
    values = _real(parameter).to("cpu", torch.float32)
    array: NDArray[np.float32] = (values if scale == 1.0 else values / scale).numpy()
    return array


def write_gradient(parameter: torch.Tensor, array: NDArray[np.float32], scale: float = 1.0) -> None:
    """Undo :func:`read_gradient`, in place: whoever holds the gradient sees the new values."""
    values = torch.from_numpy(array)
    _real(parameter).copy_(values if scale == 1.0 else values * scale)


def _real(parameter: torch.Tensor) -> Any:
    gradient = parameter.grad
    assert gradient is not None
    part = local_part(gradient.detach())
    return torch.view_as_real(part) if part.is_complex() else part
