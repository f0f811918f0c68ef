"""State dicts of gradients from ``torch.save``, read as files of arrays."""

from __future__ import annotations

import zipfile
from typing import TYPE_CHECKING, Any

import torch

from gtrace.errors import TraceError, printable
from gtrace.trace.io.foreign import Entry, TensorFile, join_name, reading

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

_DEEPEST = 32
#: A tensor with repeated values (``expand``) may have this many bytes, or as many as the file.
_SMALL = 64 * 1024 * 1024


class StateDictFile(TensorFile):
    """The tensors of a ``.pt`` file: of a state dict, of nested dictionaries and lists, or a single tensor.

    Loaded with ``weights_only=True``, so nothing in it is executed, and memory-mapped.

    Raises:
        TraceError: it holds other objects, is damaged, or declares larger tensors than it has.
    """

    def __init__(self, path: Path) -> None:
        self._where = printable(str(path))
        with reading(path):
            zipped = zipfile.is_zipfile(path)
        if not zipped:
            raise TraceError(
                f"{self._where}: not a file of torch.save since torch 1.6; damaged, or load it and save it again"
            )
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:
            # A damaged pickle can raise any error.
            foreign = "Weights only load failed" in str(error)
            first = printable(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)[:200]
            why = "holds other objects than tensors, which are never loaded" if foreign else f"damaged ({first})"
            raise TraceError(f"{self._where}: {why}; save a dictionary of tensors") from error
        largest = max(path.stat().st_size, _SMALL)
        self._tensors = dict(self._found("", loaded, 0))
        for name, tensor in self._tensors.items():
            if tensor.numel() * tensor.element_size() > largest:
                raise TraceError(f"{self._where}: tensor '{printable(name)}': {tuple(tensor.shape)} cannot be in it")
        self.entries = tuple(
            Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors.items()
        )

    def _found(self, name: str, value: Any, depth: int) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            if value.is_quantized or value.device.type == "meta":
                raise TraceError(f"{self._where}: tensor '{printable(name)}' has no plain values; save float32")
            yield name, value.detach()
        elif depth < _DEEPEST and isinstance(value, (dict, list, tuple)):
            items = value.items() if isinstance(value, dict) else enumerate(value)
            for key, item in items:
                yield from self._found(join_name(name, str(key)), item, depth + 1)

    def read(self, entry: Entry, row: int | None = None) -> NDArray[np.generic]:
        """See :class:`gtrace.trace.io.foreign.TensorFile`."""
        tensor = self._tensors[entry.name]
        try:
            if tensor.layout is not torch.strided:
                tensor = tensor.to_dense()
            tensor = tensor if row is None else tensor[row]
            # numpy has no bfloat16 and no 8-bit floats.
            if tensor.dtype not in (torch.float16, torch.float32, torch.float64) and not tensor.is_complex():
                tensor = tensor.float() if tensor.is_floating_point() else tensor
            values: NDArray[np.generic] = tensor.resolve_conj().resolve_neg().numpy().copy()
        except (RuntimeError, TypeError) as error:
            first = printable(str(error).splitlines()[0])[:200]
            raise TraceError(f"{self._where}: tensor '{printable(entry.name)}' cannot be read ({first})") from error
        return values

    def close(self) -> None:
        """Unmap the file."""
        self._tensors.clear()


#: suffix -> class that opens such a file
OPENERS = {".pt": StateDictFile, ".pth": StateDictFile}
