"""State dicts of gradients from ``torch.save``, read as files of arrays."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import torch

from gtrace.errors import TraceError, printable
from gtrace.trace.foreign import TensorFile, join_name
from gtrace.trace.guard import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

_DEEPEST = 32


class StateDictFile(TensorFile):
    """The tensors of a ``.pt`` file: of a state dict, of nested dictionaries and lists, or a single tensor.

    Loaded with ``weights_only=True``, so nothing in it is executed, and memory-mapped.

    Raises:
        TraceError: it holds other objects, or refers to its lists more often than it has bytes.
    """

    def __init__(self, path: Path) -> None:
        self._where = printable(str(path))
        if not zipfile.is_zipfile(path):
            raise TraceError(
                f"{self._where}: not a file of torch.save since torch 1.6; damaged, or load it and save it again"
            )
        # Indices beyond the shape of a sparse tensor would be written beside its values.
        torch.sparse.check_sparse_tensor_invariants.enable()  # type: ignore[no-untyped-call]
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            if "Weights only load failed" not in str(error):
                raise
            raise TraceError(
                f"{self._where}: holds other objects than tensors, which are never loaded; save a dictionary of tensors"
            ) from error
        self._left = path.stat().st_size
        self._tensors = dict(self._found("", loaded, 0))
        self.entries = [
            Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        ]

    def _found(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        self._left -= 1
        if self._left < 0:
            raise TraceError(f"{self._where}: has more references than bytes; damaged or foreign")
        if isinstance(value, torch.Tensor):
            if value.is_quantized or value.device.type == "meta":
                raise TraceError(f"{self._where}: tensor '{printable(name)}' has no plain values; save float32")
            yield name, value.detach()
        elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from self._found(join_name(name, str(key)), item, depth + 1)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[np.generic]:
        """See :class:`gtrace.trace.foreign.TensorFile`."""
        tensor = self._tensors[entry.name].to_dense()
        tensor = tensor if row is None else tensor[row]
        # numpy has no bfloat16 and no 8-bit floats.
        if tensor.dtype not in (torch.float16, torch.float32, torch.float64) and not tensor.is_complex():
            tensor = tensor.float() if tensor.is_floating_point() else tensor
        return tensor.resolve_conj().resolve_neg().numpy()
