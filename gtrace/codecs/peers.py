"""Other packages' methods as codecs, for a file that ``--plugin`` names: ``bit3 = Numcodecs(BitRound(3), Zstd())``.

Each variable becomes a codec of its name. None of these packages is imported here; the objects bring them.

Encoding depends on the gradient and the key alone: torch's generator is seeded from the key, and what a method keeps
from one call to the next is left out. For memory between steps, put ``ef:`` before the name.
"""

from __future__ import annotations

import copy
import sys
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np

from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from numpy.typing import NDArray


def _array(tensor: Any) -> NDArray[np.float32]:
    return tensor.detach().cpu().float().numpy()


@contextmanager
def _alone(rng: np.random.Generator | None = None) -> Iterator[Any]:
    """torch, for the block with one thread, which survives the fork of a sweep's workers, and a seed of ``rng``."""
    if "torch" not in sys.modules:
        raise UsageError("this peer works on torch tensors; import torch in the plugin")
    torch: Any = sys.modules["torch"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            if rng is not None:
                torch.manual_seed(int(rng.integers(2**63)))
            yield torch
    finally:
        torch.set_num_threads(threads)


class _OneRank:
    """A process group of one: what is sent comes back, and is written down.

    Attributes:
        sent: copies of the tensors that this rank sent.
    """

    def __init__(self, torch: Any) -> None:
        self._torch, self.sent = torch, list[Any]()

    def size(self, *_: Any) -> int:
        return 1

    def rank(self, *_: Any) -> int:
        return 0

    get_world_size, get_rank = size, rank

    def all_reduce(self, tensor: Any, *_: Any, **__: Any) -> Any:
        self.sent.append(tensor.clone())
        return _done(self._torch, tensor)

    broadcast = all_reduce

    def all_gather(self, outputs: Any, tensor: Any, *_: Any, **__: Any) -> Any:
        self.sent.append(tensor.clone())
        outputs[0].copy_(tensor)
        return _done(self._torch, outputs)

    def all_gather_into_tensor(self, output: Any, tensor: Any, *_: Any, **__: Any) -> Any:
        self.sent.append(tensor.clone())
        output.copy_(tensor.reshape(output.shape))
        return _done(self._torch, output)

    def active(self) -> AbstractContextManager[Any]:
        """torch.distributed's functions are those of this group for the block."""
        names = ("all_reduce", "broadcast", "all_gather", "all_gather_into_tensor", "get_rank", "get_world_size")
        return mock.patch.multiple(self._torch.distributed, **{name: getattr(self, name) for name in names})


def _done(torch: Any, result: Any) -> Any:
    """A collective that is done."""
    future = torch.futures.Future()
    future.set_result([result])
    return SimpleNamespace(get_future=lambda: future, wait=lambda: True)


class _Bucket:
    """What a hook sees of :class:`torch.distributed.GradBucket`: one parameter."""

    def __init__(self, tensor: Any) -> None:
        self._buffer = tensor.flatten()
        self.gradients = self.parameters = lambda: [self._buffer.view(tensor.shape)]
        self.index, self.is_last = lambda: 0, lambda: True

    def buffer(self) -> Any:
        return self._buffer

    def set_buffer(self, tensor: Any) -> None:
        self._buffer = tensor


class Grace:
    """A compressor of GRACE, ``grace_dl.dist.Compressor``.

    Bits are those of the tensors that it returns and of those that it gives to ``torch.distributed`` itself.

    Args:
        compressor: it gets float32 tensors of the parameter's shape, if that is known.
    """

    shaped = True

    def __init__(self, compressor: Any) -> None:
        self._compressor = compressor

    def compress(self, tensor: Any, name: str, rng: np.random.Generator) -> tuple[list[Any], Any]:
        """What is sent, and what only this process keeps."""
        with _alone(rng) as torch:
            group = _OneRank(torch)
            with group.active():
                tensors, context = copy.deepcopy(self._compressor).compress(torch.as_tensor(tensor), name)
        return [tensors, group.sent], (tensors, context)

    def decompress(self, tensors: Any, ctx: Any) -> NDArray[np.float32]:
        with _alone():
            return _array(self._compressor.decompress(*ctx))


class DdpHook:
    """A communication hook of torch's DistributedDataParallel, with one rank.

    Bits are those of all tensors that it gives to ``torch.distributed``.

    Args:
        hook: ``hook(state, bucket)``, which returns a future, e.g. ``fp16_compress_hook``.
        state: makes the hook's state, new for each call, so that warm starts and error feedback inside it have no
            effect; None for hooks whose state is a process group.
    """

    shaped = True

    def __init__(self, hook: Callable[[Any, Any], Any], state: Callable[[], Any] | None = None) -> None:
        self._hook, self._state = hook, state

    def compress(self, tensor: Any, name: str, rng: np.random.Generator) -> tuple[list[Any], Any]:
        """What is sent, and the result, which only this process keeps."""
        with _alone(rng) as torch:
            group = _OneRank(torch)
            state: Any = group if self._state is None else self._state()
            if getattr(state, "process_group", group) is None:
                state.process_group = group
            with group.active():
                result = self._hook(state, _Bucket(torch.as_tensor(tensor))).wait()
        return group.sent, result

    def decompress(self, tensors: Any, ctx: Any) -> NDArray[np.float32]:
        return _array(ctx)


class Torchao:
    """A quantized tensor of torchao, or any tensor subclass with ``__tensor_flatten__`` and ``dequantize``.

    Bits are those of the tensors inside it.

    Args:
        make: float32[m, block] -> the quantized tensor.
        block: values in a row; the last row is filled up with zeros, which count.
    """

    def __init__(self, make: Callable[[Any], Any], block: int = 32) -> None:
        self._make, self._block = make, block

    def compress(self, tensor: Any, name: str, rng: np.random.Generator) -> tuple[list[Any], Any]:
        """The tensors inside, and how they become one again."""
        with _alone(rng) as torch:
            given = torch.as_tensor(tensor).flatten()
            size = given.numel()
            rows = torch.nn.functional.pad(given, (0, -size % self._block)).view(-1, self._block)
            made = self._make(rows)
        names, about = made.__tensor_flatten__()
        return [getattr(made, name) for name in names], (made, names, about, size)

    def decompress(self, tensors: Any, ctx: Any) -> NDArray[np.float32]:
        made, names, about, size = ctx
        inner = dict(zip(names, tensors, strict=True))
        with _alone():
            again = type(made).__tensor_unflatten__(inner, about, made.shape, made.stride())
            return _array(again.dequantize()).reshape(-1)[:size]


class Hivemind:
    """A compression of hivemind (``hivemind.compression.CompressionBase``); bits are those of its protobuf message.

    Args:
        compression: e.g. ``Uniform8BitQuantization()``.
    """

    def __init__(self, compression: Any) -> None:
        self._compression = compression

    def _of_hivemind(self, name: str) -> Any:
        """A name in the module of the compression's class, or of a class that it extends."""
        modules = (sys.modules.get(cls.__module__) for cls in type(self._compression).__mro__)
        return next(getattr(module, name) for module in modules if hasattr(module, name))

    def compress(self, values: NDArray[np.float32]) -> bytes:
        """The message as it is sent."""
        with _alone() as torch:
            tensor = torch.from_numpy(values)
            about = self._of_hivemind("CompressionInfo").from_tensor(tensor)
            message: bytes = self._compression.compress(tensor, about).SerializeToString()
        return message

    def decompress(self, data: bytes, size: int) -> NDArray[np.float32]:
        with _alone():
            return _array(self._compression.extract(self._of_hivemind("runtime_pb2").Tensor.FromString(data)))


class Numcodecs:
    """Filters and a compressor of numcodecs, as Zarr chains them; bits are those of the last one's bytes.

    Args:
        codecs: applied from left to right, e.g. ``BitRound(3), Zstd()``.
    """

    def __init__(self, *codecs: Any) -> None:
        self._codecs = codecs

    def compress(self, values: NDArray[np.float32]) -> bytes:
        """The bytes of the last codec."""
        data: Any = values
        for codec in self._codecs:
            data = codec.encode(data)
        return memoryview(data).tobytes()

    def decompress(self, data: bytes, size: int) -> NDArray[np.float32]:
        for codec in reversed(self._codecs):
            data = codec.decode(data)
        return np.frombuffer(memoryview(data).tobytes(), np.float32)
