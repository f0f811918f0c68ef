"""Codec states as tensors and back, and checkpoint files that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from gtrace.errors import TraceError
from gtrace.trace.files import write_beside

if TYPE_CHECKING:
    from pathlib import Path


def as_tensors(tree: Any) -> Any:
    """The same dictionaries and lists, with tensors instead of arrays."""
    return tree_map_only(np.ndarray, lambda array: torch.from_numpy(array.copy()), tree)


def as_arrays(tree: Any) -> Any:
    """Undo :func:`as_tensors`."""
    return tree_map_only(torch.Tensor, torch.Tensor.numpy, tree)


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside its place and move it in."""
    data = io.BytesIO()
    torch.save(content, data)
    try:
        write_beside(str(path), data.getbuffer())
    except OSError as error:
        raise TraceError(f"{path}: the checkpoint cannot be written ({error.strerror})") from None


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed."""
    try:
        content = torch.load(path, weights_only=True)
    except Exception as error:  # noqa: BLE001 - damaged bytes make torch raise anything
        raise TraceError(f"{path}: not a checkpoint, or a damaged one ({type(error).__name__}); remove it") from None
    if not isinstance(content, dict):
        raise TraceError(f"{path}: not a checkpoint of a training; remove it")
    return content


def path_of(log: Path) -> Path:
    """The path of the checkpoint of a study with this log."""
    return log.with_name(log.name + ".checkpoint")
