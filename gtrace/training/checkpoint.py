"""Codec states as tensors and back, and checkpoint files that ``torch.load(weights_only=True)`` reads."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gtrace.errors import TraceError

if TYPE_CHECKING:
    from pathlib import Path


def as_tensors(tree: Any) -> Any:
    """The same dictionaries and lists, with tensors instead of arrays."""
    if isinstance(tree, dict):
        return {name: as_tensors(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_tensors(value) for value in tree]
    return torch.from_numpy(np.array(tree)) if isinstance(tree, np.ndarray) else tree


def as_arrays(tree: Any) -> Any:
    """Undo :func:`as_tensors`."""
    if isinstance(tree, dict):
        return {name: as_arrays(value) for name, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [as_arrays(value) for value in tree]
    return tree.numpy() if torch.is_tensor(tree) else tree


def save(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint beside its place and move it in.

    Raises:
        TraceError: it cannot be written; the previous one is kept.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        # A new file: in a folder that others may write to, a link of this name could lead anywhere.
        beside.unlink(missing_ok=True)
        with beside.open("xb") as file:
            torch.save(content, file)
        os.replace(beside, path)
    except OSError as error:
        raise TraceError(f"{path}: the checkpoint cannot be written ({error.strerror})") from None
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint; nothing in it is executed.

    Raises:
        TraceError: it cannot be read, or is not a checkpoint.
    """
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
