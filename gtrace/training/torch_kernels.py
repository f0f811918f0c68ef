"""The kernels of level codecs in torch operations, one at a time, for any device.

Every float32 operation of :mod:`gtrace.kernels.rounding` is done here in the same order and rounded as IEEE requires,
so codes and decoded values are equal bit for bit. Two habits of torch would break that on CUDA and are avoided:
division by a host number multiplies by its reciprocal, so divisors are tensors of the device; and fused multiply-add
rounds only once, so there is none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gtrace.coding import fixed_size

if TYPE_CHECKING:
    from gtrace.codecs.grids import Rule

#: a float64 sum runs over rows of this many values first, so that no term takes part in many additions
WIDTH = 1 << 11
#: elements that are worked on at a time, a multiple of 8: temporaries of 32 MiB
_CHUNK = 1 << 22
_MASK = 0xFFFFFFFF


def largest(x: torch.Tensor, bucket: int) -> torch.Tensor:
    """float32[buckets]: the largest magnitude of each bucket of float32[n]; not finite if a value is not."""
    return torch.cat([part.abs().amax(-1).reshape(-1) for part in _parts(x, bucket)])


def sums(x: torch.Tensor, bucket: int, *, square: bool) -> torch.Tensor:
    """float64[buckets]: sums of squares, which are exact in float64, or of magnitudes; not finite if a value is not."""
    found = []
    for part in _parts(x, bucket):
        total: Any = 0.0
        for piece in torch.split(part, _CHUNK, -1):
            wide = piece.double()
            wide = wide.square_() if square else wide.abs_()
            whole = wide.shape[-1] // WIDTH
            rows = wide[..., : whole * WIDTH].view(*wide.shape[:-1], whole, WIDTH)
            total = total + rows.sum(-1).sum(-1) + wide[..., whole * WIDTH :].sum(-1)
        found.append(total.reshape(-1))
    return torch.cat(found)


def quantize(
    rule: Rule, x: torch.Tensor, bucket: int, scales: torch.Tensor, key: tuple[int, int], width: int
) -> torch.Tensor:
    """Symbols of finite float32[n] in buckets of ``bucket`` values, equal to those of the rule's kernel.

    Args:
        x: float32[n], contiguous.
        bucket: values that share a scale.
        scales: float32[buckets], on the same device.
        key: two 64-bit words.
        width: bits of each packed symbol, 1 to 16; 0: symbols are not packed.

    Returns:
        the packed bytes, uint8[ceil(n width / 8)]; or the symbols, uint8[n] if that is enough and int16[n] otherwise.
    """
    lower, upper = origins(rule)
    r = x if rule.kind == "powers" else torch.empty_like(x)
    if rule.kind != "powers":
        _by_bucket(torch.div, x, bucket, torch.where(scales > 0, scales, torch.ones_like(scales)), r)
    hashed = words(*key)
    parts = [x.new_empty(0, dtype=torch.uint8 if width or lower + upper < 256 else torch.int16)]
    for start in range(0, x.numel(), _CHUNK):
        part = r[start : start + _CHUNK]
        u = uniforms(hashed, start, part.numel(), part.device)
        magnitude, positive = _powers(part, u) if rule.kind == "powers" else _cells(rule, part, u)
        codes = torch.where(positive, upper + magnitude, lower - magnitude)
        parts.append(_packed(codes, width) if width else codes.to(parts[0].dtype))
    return torch.cat(parts)


def restore(
    coded: torch.Tensor, width: int, values: torch.Tensor, bucket: int, scales: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Look symbols up and multiply by the scale of their bucket.

    Args:
        coded: bytes of packed symbols, or symbols (``width`` 0), as :func:`quantize` returns them.
        width: bits of each.
        values: float32[m], the value of each symbol.
        bucket: values that share a scale.
        scales: float32[buckets].
        out: float32[n], for the result.

    Returns:
        int32[1], the largest symbol; if it is not below m, the result means nothing.
    """
    top = torch.zeros(1, dtype=torch.int32, device=out.device)
    for start in range(0, out.numel(), _CHUNK):
        part = out[start : start + _CHUNK]
        codes = _unpacked(coded[start * width // 8 :], width, part.numel()) if width else coded[start : start + _CHUNK]
        codes = codes.int()
        top = torch.maximum(top, codes.amax())
        torch.index_select(values, 0, codes.clamp(max=values.numel() - 1), out=part)
    _by_bucket(torch.mul, out, bucket, scales, out)
    return top


def uniforms(hashed: tuple[int, int, int], start: int, count: int, device: torch.device) -> torch.Tensor:
    """float32[count]: the numbers of :func:`gtrace.kernels.counter.uniform` of the elements from ``start`` on."""
    counters = torch.arange(start, start + count, dtype=torch.int64, device=device)
    numbers: torch.Tensor = _mix(counters, *hashed) >> 8
    return numbers.float().mul_(2.0**-24)


def words(high: int, low: int) -> tuple[int, int, int]:
    """The three words of a key for elements below 2^32, as :func:`gtrace.kernels.counter.words` makes them."""
    high, low = int(high), int(low)
    a, b, c, d = high & _MASK, high >> 32, low & _MASK, low >> 32
    return _mix(0, a, d, c), _mix(0, b, c, d), _mix(0, (a + d) & _MASK, b, (c + b) & _MASK)


def origins(rule: Rule) -> tuple[int, int]:
    """The symbols of the smallest negative and of the smallest positive magnitude; the top symbol is their sum."""
    if rule.kind == "powers":
        return 255, 255
    if rule.kind == "uniform":
        top = (rule.steps - 1) // 2 if rule.mirrored else rule.steps
    else:
        top = rule.levels.size - 1
    return top, top + rule.mirrored


def first_level(rule: Rule) -> float:
    """The magnitude nearest to zero: not 0 if the rule is mirrored, and then signs are random below it."""
    if rule.kind == "uniform":
        return float(np.float32(1) / np.float32(rule.steps)) if rule.mirrored else 0.0
    return float(rule.levels[0]) if rule.levels.size else 0.0


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


def _cells(rule: Rule, r: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index of the magnitude that each value is rounded to, and whether it is the positive one."""
    a = r.abs()
    if rule.kind == "uniform":
        half = rule.mirrored
        t = a.mul_(rule.steps * 0.5 if half else rule.steps).sub_(0.5 if half else 0.0).clamp_(min=0.0)
        code = t.int()
        code = (code + (u < t - code)).clamp_(max=(rule.steps - 1) // 2 if half else rule.steps)
    elif rule.kind == "count":
        code = torch.zeros_like(r, dtype=torch.int32)
        for level, width in zip(rule.levels.tolist(), np.diff(rule.levels).tolist(), strict=False):
            code += a > u.mul(width).add_(level)
    else:
        levels = torch.from_numpy(rule.levels.copy()).to(r.device)
        code = torch.bucketize(a, levels, out_int32=True, right=True).sub_(1).clamp_(0, levels.numel() - 2)
        threshold = levels.diff().index_select(0, code).mul_(u).add_(levels.index_select(0, code))
        code += a > threshold
    first = first_level(rule)
    if first == 0:
        return code, r > 0
    return code, r > u.mul(2.0).sub_(1.0).mul_(first)


def _powers(x: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The exponent that each value is rounded to, and whether it is positive, from its bits."""
    bits = x.view(torch.int32)
    mantissa = (bits & 0x7FFFFF).float().mul_(2.0**-23)
    return ((bits & 0x7FFFFFFF) >> 23) + (u < mantissa), bits >= 0


def _packed(codes: torch.Tensor, width: int) -> torch.Tensor:
    """The bits of symbols, the lowest first, as bytes; unused bits of the last one are zero."""
    places = torch.arange(max(8, width), dtype=torch.uint8, device=codes.device)
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % 8))
    bits = (padded[:, None] >> places[:width]).to(torch.uint8).bitwise_and_(1)
    packed = bits.view(-1, 8).bitwise_left_shift_(places[:8]).sum(-1, dtype=torch.uint8)
    return packed[: fixed_size(codes.numel(), width)]


def _unpacked(data: torch.Tensor, width: int, count: int) -> torch.Tensor:
    """int32[count]: undo :func:`_packed` of as many symbols."""
    places = torch.arange(max(8, width), dtype=torch.uint8, device=data.device)
    bits = (data[: fixed_size(count, width), None] >> places[:8]).bitwise_and_(1)
    return bits.view(-1)[: count * width].view(count, width).int().bitwise_left_shift_(places[:width]).sum(-1).int()


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
