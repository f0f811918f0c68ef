"""Level codecs on the gradient's own device, in torch operations: codes leave the device instead of float32 values.

Every float32 operation of the kernels of :mod:`gtrace.kernels.rounding` is done here in the same order, one at a time
and each rounded as IEEE requires, so codes and decoded values equal the kernels' bit for bit. Two habits of torch
would break that on CUDA and are avoided: division by a host number multiplies by its reciprocal, so divisors
are tensors of the device; and fused multiply-add rounds only once, so there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch

from gtrace.buckets import as_values
from gtrace.buckets import bucket_scales as host_scales
from gtrace.codecs import Codec, Composed, level_grid
from gtrace.codecs.base import checked_values

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from gtrace.codecs.grids import LevelGrid, Rule
    from gtrace.codecs.scales import BucketNorm
    from gtrace.types import State

#: Devices on which tensors are encoded; norms need float64. Gradients on other devices are copied to the host.
DEVICES = frozenset({"cuda"})

#: methods that a codec must not override
_ENGINE = ("encode", "decode", "write", "read", "update", "aggregate")

#: elements that are hashed and rounded at a time: temporaries of 32 MiB
_CHUNK = 1 << 22
#: a sum runs over rows of this many values first, so that no term takes part in many additions
_WIDTH = 1 << 11
#: lanes and blocks of the host kernel's sums, for the bound on how far its rounding can be from ours
_LANES, _BLOCK = 64, 1 << 20
#: safety factor on the rounding errors of both sums and of the bound itself
_SLACK = 4.0
_MASK = 0xFFFFFFFF
_FLOAT32_MAX = float(np.finfo(np.float32).max)


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


def encode(codec: Codec, state: State, values: torch.Tensor, key: tuple[int, int]) -> bytes:
    """The payload of ``codec.encode``, bit for bit; only codes, norms and an exact tail are copied to the host.

    Args:
        codec: a codec that :func:`supports` refuses gets a copy of the values on the host.
        state: the tensor's state.
        values: float32[size] on any device.
        key: two 64-bit words.

    Raises:
        UsageError: wrong size or non-finite values.
    """
    if not supports(codec):
        return codec.encode(state, values.cpu().numpy(), key)
    x = values.reshape(-1)
    if x.numel() != state.size or not bool(torch.isfinite(x).all()):
        checked_values(state, x.cpu().numpy())
    scale, grid = cast("BucketNorm", codec.parts.scale), cast("LevelGrid", codec.parts.grid)
    split = scale.quantized(state.size)
    bucket = scale.over(split)
    scales, norms = bucket_scales(x[:split], scale.norm, bucket)
    codes = quantize(grid.rule(state), x[:split], bucket, scales, key).cpu().numpy()
    return codec.seal(state, norms, x[split:].cpu().numpy(), codes.astype(np.uint16))


def decode(codec: Codec, shared: bytes, payload: bytes, size: int, device: torch.device) -> torch.Tensor:
    """The result of ``codec.decode`` as float32[size] on a device; codes are unpacked on the host and looked up there.

    Raises:
        PayloadError: the bytes are not a valid payload of this codec and size.
    """
    if not supports(codec):
        return torch.from_numpy(codec.decode(shared, payload, size)).to(device)
    opened = codec.unseal(shared, payload, size)
    split = opened.symbols.size
    codes = opened.symbols.astype(_code_type(opened.values.size - 1))
    out = torch.empty(size, dtype=torch.float32, device=device)
    found = torch.from_numpy(opened.values).to(device).index_select(0, torch.from_numpy(codes).to(device).int())
    scales = torch.from_numpy(opened.scales).to(device)
    _by_bucket(torch.mul, found, codec.parts.scale.over(split), scales, out[:split])
    out[split:] = torch.from_numpy(opened.tail).to(device)
    return out


def mean(decoded: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of ``Codec.aggregate``, float32[n] on the same device."""
    total = torch.zeros_like(decoded[0], dtype=torch.float64)
    for values in decoded:
        total += values
    return total.div_(total.new_full((), len(decoded))).float()


def quantize(rule: Rule, x: torch.Tensor, bucket: int, scales: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Symbols of finite float32[n] in buckets of ``bucket`` values, equal to those of the rule's kernel.

    Args:
        rule: the codec's rule.
        x: float32[n], contiguous.
        bucket: values that share a scale.
        scales: float32[buckets], on the same device.
        key: two 64-bit words.

    Returns:
        uint8[n] if that is enough, int16[n] otherwise.
    """
    lower, upper = _origins(rule)
    out = torch.empty(x.numel(), dtype=torch.from_numpy(np.empty(0, _code_type(lower + upper))).dtype, device=x.device)
    if rule.kind == "powers":
        r = x
    else:
        r = torch.empty_like(x)
        _by_bucket(torch.div, x, bucket, torch.where(scales > 0, scales, torch.ones_like(scales)), r)
    hashed = _words(*key)
    for start in range(0, x.numel(), _CHUNK):
        part = r[start : start + _CHUNK]
        u = uniforms(hashed, start, part.numel(), part.device)
        magnitude, positive = _powers(part, u) if rule.kind == "powers" else _cells(rule, part, u)
        out[start : start + _CHUNK] = torch.where(positive, upper + magnitude, lower - magnitude)
    return out


def bucket_scales(x: torch.Tensor, norm: str, bucket: int) -> tuple[torch.Tensor, NDArray[np.float32]]:
    """Norms of the buckets of a finite float32[n], on its device and on the host: equal to the host kernel's.

    A largest magnitude is exact. A float64 sum depends on the order of its terms, by less than a known share. Only
    if that could change the rounding to float32 (one bucket of 8192 in tens of thousands), the bucket is
    copied to the host, where its norm is computed.
    """
    n = x.numel()
    buckets = -(-n // bucket)
    if norm == "none" or n == 0:
        return torch.ones(buckets, device=x.device), np.ones(buckets, np.float32)
    if norm == "linf":
        top = torch.cat([part.abs().amax(-1).reshape(-1) for part in _parts(x, bucket)])
        return top, top.cpu().numpy()
    sums = bucket_sums(x, bucket, square=norm == "l2")
    slack = _SLACK * 2.0**-53 * sum_depth(min(bucket, n))
    ends = torch.stack([sums * (1 - slack), sums * (1 + slack)])
    ends = (ends.sqrt_() if norm == "l2" else ends).clamp_(max=_FLOAT32_MAX).float()
    low, high = ends.cpu().numpy()
    unsure = np.flatnonzero(low != high)
    if unsure.size == 0:
        return ends[0], low
    for b in unsure:
        low[b] = host_scales(x[b * bucket : (b + 1) * bucket].cpu().numpy(), norm, None)[0]
    return torch.from_numpy(low).to(x.device), low


def bucket_sums(x: torch.Tensor, bucket: int, *, square: bool) -> torch.Tensor:
    """float64[buckets]: sums of squares, which are exact in float64, or of magnitudes."""
    sums = []
    for part in _parts(x, bucket):
        total: Any = 0.0
        for piece in torch.split(part, _CHUNK, -1):
            wide = piece.double()
            wide = wide.square_() if square else wide.abs_()
            whole = wide.shape[-1] // _WIDTH
            rows = wide[..., : whole * _WIDTH].view(*wide.shape[:-1], whole, _WIDTH)
            total = total + rows.sum(-1).sum(-1) + wide[..., whole * _WIDTH :].sum(-1)
        sums.append(total.reshape(-1))
    return torch.cat(sums)


def sum_depth(size: int) -> int:
    """Upper bound on the additions of one term, in the kernel's sum of ``size`` terms and in ours together.

    A sum of terms that are not negative is off by less than that many roundings of 2^-53 each.
    """
    kernel = -(-min(size, _BLOCK) // _LANES) + _LANES + -(-size // _BLOCK)
    ours = min(size, _WIDTH) + -(-min(size, _CHUNK) // _WIDTH) + 2 * -(-size // _CHUNK)
    return kernel + ours


def uniforms(hashed: tuple[int, int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """float32[count]: the numbers of :func:`gtrace.kernels.counter.uniform` of the elements from ``start`` on."""
    counters = torch.arange(start, start + count, dtype=torch.int64, device=device)
    numbers: torch.Tensor = _mix(counters, *hashed) >> 8
    return numbers.float().mul_(2.0**-24)


def _mix(x: Any, add: int, flip: int, last: int) -> Any:
    """The hash of :mod:`gtrace.kernels.counter` of a number, or of int64[n] in place.

    Multipliers above 2^31 are reduced by 2^32, which changes no bit under the mask: no product reaches 2^63.
    """
    x += add
    x &= _MASK
    x ^= x >> 17
    x *= 0xED5AD4BB - (1 << 32)
    x &= _MASK
    x ^= flip
    x ^= x >> 11
    x *= 0xAC4C1B51 - (1 << 32)
    x &= _MASK
    x += last
    x &= _MASK
    x ^= x >> 15
    x *= 0x31848BAB
    x &= _MASK
    x ^= x >> 14
    return x


def _words(high: int, low: int) -> tuple[int, int, int]:
    """The three words of a key for elements below 2^32, as :func:`gtrace.kernels.counter.words` makes them."""
    high, low = int(high), int(low)
    a, b, c, d = high & _MASK, high >> 32, low & _MASK, low >> 32
    return _mix(0, a, d, c), _mix(0, b, c, d), _mix(0, (a + d) & _MASK, b, (c + b) & _MASK)


def _origins(rule: Rule) -> tuple[int, int]:
    """The symbols of the smallest negative and of the smallest positive magnitude; the top symbol is their sum."""
    if rule.kind == "powers":
        return 255, 255
    if rule.kind == "uniform":
        top = (rule.steps - 1) // 2 if rule.mirrored else rule.steps
    else:
        top = rule.levels.size - 1
    return top, top + rule.mirrored


def _code_type(top: int) -> type[np.uint8 | np.int16]:
    return np.uint8 if top < 256 else np.int16


def _cells(rule: Rule, r: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the magnitude that each value is rounded to, and whether it is the positive one."""
    a = r.abs()
    if rule.kind == "uniform":
        half = rule.mirrored
        first = np.float32(1) / np.float32(rule.steps) if half else np.float32(0)
        t = a.mul_(rule.steps * 0.5 if half else rule.steps).sub_(0.5 if half else 0.0).clamp_(min=0.0)
        code = t.int()
        code = (code + (u < t - code)).clamp_(max=(rule.steps - 1) // 2 if half else rule.steps)
    elif rule.kind == "count":
        first = rule.levels[0]
        code = torch.zeros_like(r, dtype=torch.int32)
        for level, width in zip(rule.levels.tolist(), np.diff(rule.levels).tolist(), strict=False):
            code += a > u.mul(width).add_(level)
    else:
        first = rule.levels[0]
        levels = torch.from_numpy(rule.levels.copy()).to(r.device)
        code = torch.bucketize(a, levels, out_int32=True, right=True).sub_(1).clamp_(0, levels.numel() - 2)
        threshold = levels.diff().index_select(0, code).mul_(u).add_(levels.index_select(0, code))
        code += a > threshold
    if first == 0:
        return code, r > 0
    return code, r > u.mul(2.0).sub_(1.0).mul_(float(first))


def _powers(x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent that each value is rounded to, and whether it is positive, from its bits."""
    bits = x.view(torch.int32)
    mantissa = (bits & 0x7FFFFF).float().mul_(2.0**-23)
    return ((bits & 0x7FFFFFFF) >> 23) + (u < mantissa), bits >= 0


def _parts(x: torch.Tensor, bucket: int) -> list[torch.Tensor]:
    """Blocks of whole buckets, a row each, and a short last bucket as a row of its own."""
    rows, rest = divmod(x.numel(), bucket)
    step = max(1, _CHUNK // bucket) * bucket
    blocks = [part.view(-1, bucket) for part in torch.split(x[: rows * bucket], step)] if rows else []
    return [*blocks, x[rows * bucket :].view(1, -1)] if rest else blocks


def _by_bucket(operation: Any, x: torch.Tensor, bucket: int, scales: torch.Tensor, out: torch.Tensor) -> None:
    """``operation`` of every value and its bucket's scale."""
    rows = x.numel() // bucket
    whole = rows * bucket
    operation(x[:whole].view(rows, bucket), scales[:rows, None], out=out[:whole].view(rows, bucket))
    if whole < x.numel():
        operation(x[whole:], scales[rows:], out=out[whole:])
