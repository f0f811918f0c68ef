"""The kernels of level codecs for CUDA, in Triton: one pass for norms, one to round and pack, one to unpack and scale.

The functions are those of :mod:`gtrace.training.torch_kernels`, with the same results bit for bit. A compiler may not
change the float32 operations for that: fused multiply-add is switched off at every launch, and ``div_rn`` rounds
as IEEE requires, which Triton's own division does not.

Triton comes with torch for CUDA. ``TRITON_INTERPRET=1`` in the environment, before this module is imported, runs the
same kernels on tensors of the CPU.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from gtrace.coding import fixed_size
from gtrace.training.torch_kernels import WIDTH as SEGMENT
from gtrace.training.torch_kernels import first_level, origins, words

if TYPE_CHECKING:
    from collections.abc import Callable

    from gtrace.codecs.grids import Rule

#: options of every launch: a multiplication and an addition are rounded apart
IEEE = {"enable_fp_fusion": False}
#: values that one program rounds or decodes, a multiple of 8, and that one program takes norms of
_BLOCK, _TILE = 1024, 4096
#: up to this many magnitudes, all thresholds are counted; a search is faster among more
_FEW = 8
_LINF, _L1, _L2 = (tl.constexpr(k) for k in range(3))
_UNIFORM, _LEVELS, _POWERS = (tl.constexpr(k) for k in range(3))
_KINDS = {"uniform": _UNIFORM.value, "count": _LEVELS.value, "search": _LEVELS.value, "powers": _POWERS.value}


#: compiles a kernel; arguments in ``do_not_specialize`` are never compiled in, whatever their values
_kernel: Callable[..., Callable[[Any], Any]] = triton.jit


@_kernel()
def _norms(
    x: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    bucket: tl.tensor,
    rows: tl.tensor,
    parts: tl.tensor,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """The sum, or the bits of the largest magnitude, of every row: one of ``parts`` parts of a bucket."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    inside = (row % parts * COLUMNS)[:, None] + column[None, :]
    at = (row // parts * bucket)[:, None] + inside
    values = tl.load(x + at, mask=(row < rows)[:, None] & (inside < bucket) & (at < n), other=0.0)
    if NORM == _LINF:
        found = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)
    else:
        wide = values.to(tl.float64)
        found = tl.sum(wide * wide if NORM == _L2 else tl.abs(wide), axis=1)
    tl.store(out + row, found, mask=row < rows)


@_kernel()
def _scale_of(
    scales: tl.tensor, base: tl.tensor, at: tl.tensor, n: tl.tensor, bucket: tl.tensor, ONE: tl.constexpr
) -> tl.tensor:
    """The scale of each value of a block, or the one of all of them."""
    if ONE:
        found = tl.load(scales + base // bucket)
    else:
        found = tl.load(scales + (base + at) // bucket, mask=base + at < n, other=1.0)
    return found


@_kernel()
def _uniforms(counter: tl.tensor, add: tl.tensor, flip: tl.tensor, last: tl.tensor) -> tl.tensor:
    """The numbers of :mod:`gtrace.kernels.counter`, of uint32 counters and words of the key."""
    x = counter + add
    x = (x ^ (x >> 17)) * 0xED5AD4BB
    x = x ^ flip
    x = (x ^ (x >> 11)) * 0xAC4C1B51
    x = x + last
    x = (x ^ (x >> 15)) * 0x31848BAB
    x = x ^ (x >> 14)
    return (x >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@_kernel()
def _cell(
    a: tl.tensor, u: tl.tensor, levels: tl.tensor, cells: tl.tensor, STEPS: tl.constexpr, COUNTED: tl.constexpr
) -> tl.tensor:
    """Index of the magnitude that each |x| / scale is rounded to.

    ``levels`` holds the lower end of every cell, infinities up to 2^STEPS, and then the width of every cell. A rule
    that counts thresholds is searched too: a value is above those of all cells before its own, except perhaps the last
    of them, which may be rounded up to the value itself.
    """
    widths = levels + (1 << STEPS)
    code = tl.zeros_like(a).to(tl.int32)
    if STEPS == 0:
        widths = levels + cells
        for k in range(cells):
            code += (a > tl.load(levels + k) + u * tl.load(widths + k)).to(tl.int32)
    else:
        for s in tl.static_range(STEPS):
            probe = code + (1 << (STEPS - 1 - s))
            code = tl.where(tl.load(levels + probe) <= a, probe, code)
        passed = (a > tl.load(levels + code) + u * tl.load(widths + code)).to(tl.int32)
        if COUNTED:
            before = tl.maximum(code - 1, 0)
            own = tl.where(code > 0, passed, 0)
            code = before + (a > tl.load(levels + before) + u * tl.load(widths + before)).to(tl.int32) + own
        else:
            code += passed
    return code


@_kernel(do_not_specialize=["add", "flip", "last", "lower", "upper", "cells"])
def _quantize(
    x: tl.tensor,
    scales: tl.tensor,
    levels: tl.tensor,
    out: tl.tensor,
    n: tl.tensor,
    bucket: tl.tensor,
    size: tl.tensor,
    add: tl.tensor,
    flip: tl.tensor,
    last: tl.tensor,
    factor: tl.tensor,
    half: tl.tensor,
    first: tl.tensor,
    lower: tl.tensor,
    upper: tl.tensor,
    cells: tl.tensor,
    KIND: tl.constexpr,
    RANDOM_SIGN: tl.constexpr,
    STEPS: tl.constexpr,
    COUNTED: tl.constexpr,
    WIDTH: tl.constexpr,
    BYTES: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Round a block of values in groups of eight, and store its symbols, ``WIDTH`` bits each (0: as they are)."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    group, lane = tl.arange(0, BLOCK // 8), tl.arange(0, 8)
    at = group[:, None] * 8 + lane[None, :]
    inside = at < tl.minimum(n - base, BLOCK).to(tl.int32)
    values = tl.load(x + base + at, mask=inside, other=0.0)
    counter = base.to(tl.uint32) + at.to(tl.uint32)
    # Words arrive as signed numbers: one type, whatever their values.
    u = _uniforms(
        counter, add.to(tl.uint32, bitcast=True), flip.to(tl.uint32, bitcast=True), last.to(tl.uint32, bitcast=True)
    )
    if KIND == _POWERS:
        bits = values.to(tl.int32, bitcast=True)
        mantissa = (bits & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07
        code = ((bits & 0x7FFFFFFF) >> 23) + (u < mantissa).to(tl.int32)
        positive = bits >= 0
    else:
        scale = _scale_of(scales, base, at, n, bucket, ONE)
        r = tl.math.div_rn(values, tl.where(scale > 0, scale, 1.0) + tl.zeros_like(values))
        a = tl.abs(r)
        if KIND == _UNIFORM:
            t = tl.maximum(a * factor - half, 0.0)
            code = t.to(tl.int32)
            code = tl.minimum(code + (u < t - code.to(tl.float32)).to(tl.int32), cells)
        else:
            code = _cell(a, u, levels, cells, STEPS, COUNTED)
        positive = r > first * (2.0 * u - 1.0) if RANDOM_SIGN else r > 0.0
    symbol = tl.where(inside, tl.where(positive, upper + code, lower - code), 0)
    if WIDTH == 0:
        tl.store(out + base + at, symbol.to(out.dtype.element_ty), mask=inside)
    else:
        place = tl.arange(0, BYTES)
        found = _packed(symbol, 8 * place[None, :], lane[None, :], WIDTH)
        to = base // 8 * WIDTH + (group[:, None] * WIDTH + place[None, :])
        tl.store(out + to, found.to(tl.uint8), mask=(place < WIDTH)[None, :] & (to < size))


@_kernel()
def _packed(symbol: tl.tensor, shift: tl.tensor, lane: tl.tensor, WIDTH: tl.constexpr) -> tl.tensor:
    """The bytes that begin at bit ``shift`` of the bits of eight symbols each, and other bits above them."""
    if WIDTH <= 4:
        word = tl.sum(symbol.to(tl.uint32) << (lane * WIDTH).to(tl.uint32), axis=1)
        found = word[:, None] >> shift.to(tl.uint32)
    elif WIDTH <= 8:
        word = tl.sum(symbol.to(tl.uint64) << (lane * WIDTH).to(tl.uint64), axis=1)
        found = word[:, None] >> shift.to(tl.uint64)
    else:
        # Two words of four symbols; a shift by 64 bits or more means nothing, so those are left out.
        moved = symbol.to(tl.uint64) << (lane % 4 * WIDTH).to(tl.uint64)
        low = tl.sum(tl.where(lane < 4, moved, 0), axis=1)[:, None]
        high = tl.sum(tl.where(lane < 4, 0, moved), axis=1)[:, None]
        above, below = tl.maximum(shift - 4 * WIDTH, 0), tl.maximum(4 * WIDTH - shift, 0)
        low = tl.where(shift < 64, low >> tl.minimum(shift, 63).to(tl.uint64), 0)
        high = tl.where(below < 64, (high >> above.to(tl.uint64)) << tl.minimum(below, 63).to(tl.uint64), 0)
        found = low | high
    return found


@_kernel(do_not_specialize=["top"])
def _restore(
    coded: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    largest: tl.tensor,
    n: tl.tensor,
    bucket: tl.tensor,
    size: tl.tensor,
    top: tl.tensor,
    WIDTH: tl.constexpr,
    CHECKED: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Unpack a block of symbols (``WIDTH`` 0: they are not packed), look them up, and multiply by their scale."""
    base = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    inside = at < tl.minimum(n - base, BLOCK).to(tl.int32)
    if WIDTH == 0:
        symbol = tl.load(coded + base + at, mask=inside, other=0).to(tl.int32)
    else:
        bit = at % 8 * WIDTH
        byte = base // 8 * WIDTH + (at // 8 * WIDTH + bit // 8)
        symbol = tl.load(coded + byte, mask=inside, other=0).to(tl.int32)
        # Symbols of 1, 2, 4 and 8 bits never cross a byte, those of up to 9 bits lie in two.
        if WIDTH > 8 or 8 % WIDTH != 0:
            symbol |= tl.load(coded + byte + 1, mask=inside & (byte + 1 < size), other=0).to(tl.int32) << 8
        if WIDTH > 9:
            symbol |= tl.load(coded + byte + 2, mask=inside & (byte + 2 < size), other=0).to(tl.int32) << 16
        symbol = (symbol >> (bit % 8)) & ((1 << WIDTH) - 1)
    if CHECKED:
        tl.atomic_max(largest, tl.max(tl.where(inside, symbol, 0), axis=0))
        symbol = tl.minimum(symbol, top)
    scale = _scale_of(scales, base, at, n, bucket, ONE)
    tl.store(out + base + at, tl.load(values + symbol) * scale, mask=inside)


def largest(x: torch.Tensor, bucket: int) -> torch.Tensor:
    """float32[buckets]: the largest magnitude of each bucket of float32[n]; not finite if a value is not."""
    return _by_row(x, bucket, _LINF.value, torch.int32).amax(-1).view(torch.float32)


def sums(x: torch.Tensor, bucket: int, *, square: bool) -> torch.Tensor:
    """float64[buckets]: sums of squares, which are exact in float64, or of magnitudes; not finite if a value is not."""
    return _by_row(x, bucket, (_L2 if square else _L1).value, torch.float64).sum(-1)


def _by_row(x: torch.Tensor, bucket: int, norm: int, kind: torch.dtype) -> torch.Tensor:
    """What :func:`_norms` finds, [buckets, parts]."""
    n = x.numel()
    columns = min(triton.next_power_of_2(min(bucket, max(1, n))), SEGMENT)
    parts = -(-min(bucket, max(1, n)) // columns)
    out = torch.empty(-(-n // bucket), parts, dtype=kind, device=x.device)
    rows = _TILE // columns
    if n:
        with torch.cuda.device(x.get_device()):
            grid = (triton.cdiv(out.numel(), rows),)
            _norms[grid](x, out, n, bucket, out.numel(), parts, norm, rows, columns, **IEEE)
    return out


def quantize(
    rule: Rule, x: torch.Tensor, bucket: int, scales: torch.Tensor, key: tuple[int, int], width: int
) -> torch.Tensor:
    """The result of :func:`gtrace.training.torch_kernels.quantize`, in one pass."""
    n, (lower, upper) = x.numel(), origins(rule)
    size = fixed_size(n, width)
    out = torch.empty(
        size if width else n, dtype=torch.uint8 if width or lower + upper < 256 else torch.int16, device=x.device
    )
    steps, cells, table = _table(rule)
    factor, half = (rule.steps * 0.5, 0.5) if rule.mirrored else (float(rule.steps), 0.0)
    first = first_level(rule)
    tensors = x, scales, torch.from_numpy(table).to(x.device), out
    hashed = (word - (word >> 31 << 32) for word in words(*key))
    rounding = factor, half, first, lower, upper, cells, _KINDS[rule.kind], first > 0, steps, rule.kind == "count"
    packing = width, triton.next_power_of_2(width), bucket % _BLOCK == 0 or bucket >= n, _BLOCK
    if n:
        with torch.cuda.device(x.get_device()):
            grid = (triton.cdiv(n, _BLOCK),)
            _quantize[grid](*tensors, n, bucket, size, *hashed, *rounding, *packing, **IEEE)
    return out


def restore(
    coded: torch.Tensor, width: int, values: torch.Tensor, bucket: int, scales: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """The result of :func:`gtrace.training.torch_kernels.restore`, in one pass; 0 if no symbol can be too large."""
    n, m = out.numel(), values.numel()
    top = torch.zeros(1, dtype=torch.int32, device=out.device)
    checked = m < 1 << (width or 8 * coded.element_size())
    sizes = n, bucket, coded.numel(), m - 1
    if n:
        with torch.cuda.device(out.get_device()):
            grid, one = (triton.cdiv(n, _BLOCK),), bucket % _BLOCK == 0 or bucket >= n
            _restore[grid](coded, values, scales, out, top, *sizes, width, checked, one, _BLOCK, **IEEE)
    return top


def _table(rule: Rule) -> tuple[int, int, Any]:
    """Steps of a search among the rule's cells, the last magnitude, and the table of :func:`_cell`."""
    if rule.kind in ("uniform", "powers"):
        return 0, origins(rule)[0], np.zeros(1, np.float32)
    cells = rule.levels.size - 1
    steps = 0 if rule.levels.size <= _FEW else (cells - 1).bit_length()
    ends = np.full((1 << steps) if steps else cells, np.inf, np.float32)
    ends[:cells] = rule.levels[:-1]
    return steps, cells, np.concatenate([ends, np.diff(rule.levels), np.zeros(1, np.float32)])
