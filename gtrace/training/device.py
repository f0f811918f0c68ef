"""Level codecs on the gradient's own device: packed symbols leave it instead of float32 values.

The kernels are Triton's (:mod:`gtrace.training.triton_kernels`) on CUDA if Triton is installed, and torch operations
(:mod:`gtrace.training.torch_kernels`) otherwise. Both give the bytes and values of the host's kernels.
"""

from __future__ import annotations

import importlib
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch

from gtrace.buckets import as_values
from gtrace.buckets import bucket_scales as host_scales
from gtrace.codecs import Codec, Composed, level_grid
from gtrace.codecs.base import checked_values
from gtrace.coding import check_symbol, checked_fixed, width_for
from gtrace.kernels.norms import BLOCK, FLOAT32_MAX, LANES
from gtrace.training import torch_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.codecs.coders import SharedCode
    from gtrace.codecs.grids import LevelGrid
    from gtrace.codecs.scales import BucketNorm
    from gtrace.types import State

#: Devices on which tensors are encoded; norms need float64. Gradients on other devices are copied to the host.
DEVICES = frozenset({"cuda"})

#: methods that a codec must not override
_ENGINE = ("encode", "decode", "write", "read", "update", "aggregate")

#: safety factor on the rounding errors of both sums and of the bound itself
_SLACK = 4.0


@cache
def kernels_for(kind: str) -> Any:
    """The module with the kernels for a type of device."""
    fast = kind == "cuda" and find_spec("triton") is not None
    return importlib.import_module("gtrace.training.triton_kernels") if fast else torch_kernels


def supports(codec: Codec) -> TypeGuard[Composed]:
    """Whether a codec encodes and decodes here as on the host: every level codec that does not clip.

    Not supported: your own codec that overrides a step of the engine, and wrappers, which keep memory
    on the host.
    """
    kind = type(codec)
    return (
        level_grid(codec) is not None
        and codec.needs is not None
        and codec.needs.clip is None
        and not codec.stateful
        and all(getattr(kind, name) is getattr(Composed, name) for name in _ENGINE)
    )


def flat(tensor: torch.Tensor, codec: Codec) -> torch.Tensor | NDArray[np.float32]:
    """float32[n]: on the tensor's own device if the codec works there, else on the host."""
    if tensor.device.type in DEVICES and supports(codec):
        return tensor.detach().float().contiguous().reshape(-1)
    return as_values(tensor.detach().cpu().float().numpy())


def encode(codec: Composed, state: State, values: torch.Tensor, key: tuple[int, int]) -> bytes:
    """The payload of ``codec.encode``, bit for bit; only symbols, norms and an exact tail are copied to the host.

    Symbols at fixed width are packed on the device; for another code they travel in one byte each, or two, and the
    host codes them. The values are float32[size] on any device.

    Raises:
        UsageError: wrong size or non-finite values.
    """
    x = values.contiguous().reshape(-1)
    scale, grid, coder = _parts(codec)
    split = scale.quantized(x.numel())
    bucket = scale.over(split)
    norms, tail = bucket_scales(x[:split], scale.norm, bucket), x[split:].cpu().numpy()
    if x.numel() != state.size or not (np.isfinite(norms).all() and np.isfinite(tail).all()):
        checked_values(state, x.cpu().numpy())
    width = width_for(grid.alphabet(state))
    packed = width > 0 and coder.fixed_here(state)
    found = kernels_for(x.device.type).quantize(
        grid.rule(state), x[:split], bucket, torch.from_numpy(norms).to(x.device), key, width if packed else 0
    )
    symbols = found.cpu().numpy()
    if packed:
        return codec.seal(state, norms, tail, symbols.tobytes(), coder.fixed_flag)
    return codec.seal(state, norms, tail, *coder.write(symbols.astype(np.uint16), grid, state))


def receive(codec: Composed, shared: bytes, payload: bytes, size: int, device: torch.device) -> torch.Tensor:
    """The result of ``codec.decode`` as float32[size] on a device.

    Symbols at fixed width are unpacked there; others are decoded on the host.

    Raises:
        PayloadError: the bytes are not a valid payload of this codec and size.
    """
    _, grid, coder = _parts(codec)
    found, flags = codec.unseal(shared, payload, size)
    values = grid.signed_values(found.state)
    width = width_for(values.size) if coder.is_fixed(flags) else 0
    if width:
        coded = checked_fixed(found.coded, found.size, width).copy()
    else:
        symbols = coder.read(found.coded, flags, found.size, grid, found.state)
        coded = symbols.astype(np.uint8 if values.size <= 256 else np.int16)
    out = torch.empty(size, dtype=torch.float32, device=device)
    on_device = [torch.from_numpy(one).to(device) for one in (coded, values, found.scales)]
    top = kernels_for(device.type).restore(
        on_device[0], width, on_device[1], found.bucket, on_device[2], out[: found.size]
    )
    out[found.size :] = torch.from_numpy(found.tail).to(device)
    if width and values.size < 1 << width:
        check_symbol(int(top), values.size)
    return out


def bucket_scales(x: torch.Tensor, norm: str, bucket: int) -> NDArray[np.float32]:
    """Norms of the buckets of float32[n], on the host and equal to the host kernel's; not finite if a value is not.

    A largest magnitude is exact. A float64 sum depends on the order of its terms, by less than a known share. Only
    if that could change the rounding to float32 (one bucket of 8192 in tens of thousands), the bucket is
    copied to the host, where its norm is computed.
    """
    n, kernels = x.numel(), kernels_for(x.device.type)
    if n == 0:
        return np.ones(0, np.float32)
    if norm in ("linf", "none"):
        top: NDArray[np.float32] = kernels.largest(x, bucket).cpu().numpy()
        return top if norm == "linf" else np.where(np.isfinite(top), np.float32(1), top)
    sums = kernels.sums(x, bucket, square=norm == "l2").cpu().numpy()
    slack = _SLACK * 2.0**-53 * sum_depth(min(bucket, n))
    ends = sums * np.array([[1 - slack], [1 + slack]])
    low, high = np.minimum(np.sqrt(ends) if norm == "l2" else ends, FLOAT32_MAX).astype(np.float32)
    for b in np.flatnonzero((low != high) & np.isfinite(sums)):
        low[b] = host_scales(x[b * bucket : (b + 1) * bucket].cpu().numpy(), norm, None)[0]
    return np.where(np.isfinite(sums), low, np.float32(np.nan))


def sum_depth(size: int) -> int:
    """Upper bound on the additions of one term, in the host kernel's sum of ``size`` terms and in ours together.

    A sum of terms that are not negative is off by less than that many roundings of 2^-53 each.
    """
    host = -(-min(size, BLOCK) // LANES) + LANES + -(-size // BLOCK)
    return host + min(size, torch_kernels.WIDTH) + 3 * -(-size // torch_kernels.WIDTH)


def _parts(codec: Composed) -> tuple[BucketNorm, LevelGrid, SharedCode]:
    parts = codec.parts
    return cast("BucketNorm", parts.scale), cast("LevelGrid", parts.grid), cast("SharedCode", parts.coder)
