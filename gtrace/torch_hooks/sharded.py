"""Tensors that are spread over several processes: ``fully_shard``, tensor parallelism, ``FullyShardedDataParallel``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


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


def flat_parts(model: nn.Module) -> dict[int, dict[str, Any]]:
    """Which parts of its parameters this process holds where ``FullyShardedDataParallel`` wraps (a part of) a model.

    Returns:
        ``id(parameter)`` -> attributes as of :func:`sharding`, with the placement ``FlatShard`` and ``elements``, the
        first element of the whole (flat, in C order) that is held and the one after the last. That is after a forward
        pass; before, there are no such parts.
    """
    out = {}
    for module in model.modules():
        # By name: importing the class would cost every other program time.
        handle = getattr(module, "_handle", None) if type(module).__name__ == "FullyShardedDataParallel" else None
        if handle is None or not handle.uses_sharded_strategy:
            continue
        about = {"placements": ["FlatShard"], "mesh": [handle.world_size], "place": [handle.rank]}
        flat = handle.flat_param
        start = handle.rank * flat.numel()
        out[id(flat)] = about | {
            "whole_shape": list(flat._unpadded_unsharded_size),
            "elements": [start, start + flat.numel()],
        }
        infos = flat._shard_param_infos if flat._params is not None else ()
        for parameter, shape, info in zip(flat._params or (), flat._shapes, infos, strict=False):
            if info.in_shard:
                elements = [info.intra_param_start_idx, info.intra_param_end_idx + 1]
                out[id(parameter)] = about | {"whole_shape": list(shape), "elements": elements}
    return out
