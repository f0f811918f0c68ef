"""Tensors that are spread over several processes (``DTensor``: ``fully_shard``, tensor parallelism)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this process holds it as a part of something larger."""
    # Not imported for this: a program that has made one has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this process holds of a tensor; the tensor itself where that is all of it."""
    part: torch.Tensor = tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]
    return part


def sharding(parameter: Any) -> dict[str, Any]:
    """Attributes that say which part of a parameter this process holds; none where it holds all of it.

    Returns:
        ``placements``, one per dimension of the mesh (such as ``Shard(dim=0)``), ``mesh`` (its shape), ``place``
        (this process's coordinates in it) and ``whole_shape``.
    """
    if not is_sharded(parameter):
        return {}
    place = parameter.device_mesh.get_coordinate()
    return {
        "placements": [repr(placement) for placement in parameter.placements],
        "mesh": list(parameter.device_mesh.shape),
        "place": None if place is None else list(place),
        "whole_shape": list(parameter.shape),
    }
