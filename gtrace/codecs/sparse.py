"""Methods that send some values and no others: the largest, those above a threshold, or some at random."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, cast

import numpy as np

from gtrace.codecs.base import CodedBits, ExpectingCodec, checked_values, coder_parameter, parameter
from gtrace.codecs.engine import Composed, Machine, Parts, assembled, method
from gtrace.codecs.memory import UNITS, Residual, averaged, saturating
from gtrace.codecs.parts import FLOAT32_MAX, Coder, FixedGrid, Measured, Nearest
from gtrace.coding import CodedBlock, Floats, decode_floats, expected_floats, width_for
from gtrace.coding.positions import decode_positions, decode_sparse, encode_positions
from gtrace.coding.words import from_words, to_words, word_room
from gtrace.errors import PayloadError, UsageError
from gtrace.kernels import elementwise as _elementwise
from gtrace.kernels import elias as _elias
from gtrace.kernels.norms import power_sum
from gtrace.types import Expectation, State, SummarySpec

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from gtrace.sketch import MomentSketch

_MAGNITUDE = np.uint32(0x7FFFFFFF)
_LENGTH = struct.Struct("<I")
_SEED = struct.Struct("<I")
_SCALE = struct.Struct("<f")
#: flag of a payload whose values are coded
_CODED = 1
#: what dgc sends in the first stage of the warm-up, and by how much less in each of the following
_FIRST, _STAGES = 0.25, 4
_POSITIONS = (
    "The positions, as gaps in the shortest of several codes (coder=gaps) or in ceil(log2 n) bits each "
    "(coder=fixed); then the values in float32, in the order of their positions."
)
_TIES = "of equal magnitudes the first in the tensor are sent, so that their number is always the same"


class Kept(NamedTuple):
    """What a sparsifier sends.

    Attributes:
        positions: int64[k], ascending.
        values: float32[k].
        size: values of the tensor.
    """

    positions: NDArray[np.int64]
    values: NDArray[np.float32]
    size: int


@dataclass(frozen=True)
class Largest(FixedGrid):
    """Zero, and the k largest magnitudes as they are."""

    ratio: float = parameter(0.01, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)

    def nearest(self, x: NDArray[np.float32], scales: NDArray[np.float32], bucket: int, key: tuple[int, int]) -> Kept:
        """The largest; of equal ones those that come first."""
        del scales, bucket, key
        positions = largest(magnitudes(x), kept(self.ratio, x.size))
        return Kept(positions, x[positions], x.size)

    def values(self, symbols: Kept, scales: NDArray[np.float32], bucket: int, size: int) -> NDArray[np.float32]:
        """The kept values in their places."""
        del scales, bucket
        out = np.zeros(size, np.float32)
        out[symbols.positions] = symbols.values
        return out


@dataclass(frozen=True)
class Threshold(Largest):
    """Zero, and magnitudes from a quantile on as they are."""

    sample: float = parameter(1.0, "share of the values that set the threshold", minimum=0.0, maximum=1.0)

    @property
    def deterministic(self) -> bool:
        """Unless the threshold comes from a sample."""
        return self.sample >= 1

    def nearest(self, x: NDArray[np.float32], scales: NDArray[np.float32], bucket: int, key: tuple[int, int]) -> Kept:
        """What reaches the threshold; zeros are never sent."""
        del scales, bucket
        ranks = magnitudes(x)
        if not x.size:
            return Kept(np.empty(0, np.int64), x, 0)
        seen = ranks
        if self.sample < 1:
            words = np.empty(kept(self.sample, x.size), np.uint32)
            _elementwise.fill_words(np.uint64(key[0]), np.uint64(key[1]), words)
            seen = ranks[(words * np.float64(x.size / 2**32)).astype(np.int64)]
        count = kept(self.ratio, seen.size)
        threshold = max(1, int(np.partition(seen, seen.size - count)[-count]))
        positions = np.flatnonzero(ranks >= np.uint32(threshold))
        return Kept(positions, x[positions], x.size)


@dataclass(frozen=True)
class IndexValue(Coder):
    """Positions and values: gaps and exponents in the shortest of several codes, or both at fixed width."""

    coder: Literal["gaps", "fixed"] = parameter(
        "gaps",
        "positions by their gaps and values' exponents in a Huffman code, or ceil(log2 n) and 32 bits each",
        choices=("gaps", "fixed"),
    )

    def write(self, symbols: Kept, grid: FixedGrid) -> tuple[bytes, int]:
        """Positions, then values; flag 1: the exponents of the values are coded."""
        del grid
        positions, values, size = symbols
        if self.coder == "fixed":
            return _fixed(positions, size) + values.astype("<f4").tobytes(), 0
        found = Floats(values)
        places = encode_positions(positions, size)
        coded = _LENGTH.pack(len(places)) + places + found.encode()
        if found.coded and len(coded) < len(places) + 4 * positions.size:
            return coded, _CODED
        return places + found.values.astype("<f4").tobytes(), 0

    def read(self, data: memoryview, flags: int, size: int, grid: FixedGrid) -> Kept:
        """Undo :meth:`write`."""
        del grid
        if flags & ~(_CODED if self.coder == "gaps" else 0):
            raise PayloadError(f"payload has unknown flags {flags:#x}")
        if self.coder == "fixed":
            return Kept(*_unfixed(data, size), size)
        if not flags:
            return Kept(*decode_sparse(data, size), size)
        if len(data) < _LENGTH.size:
            raise PayloadError("payload ends before the length of its positions")
        end = _LENGTH.size + int(_LENGTH.unpack_from(data)[0])
        positions = decode_positions(data[_LENGTH.size : end], size)
        return Kept(positions, decode_floats(data[end:], positions.size, coded=True), size)

    def measure(self, symbols: Kept, grid: FixedGrid) -> Measured:
        """Positions are sent in one way whatever codes the values."""
        data, flags = self.write(symbols, grid)
        block, sent = Floats(symbols.values).block, 8 * len(data)
        head = sent - int(block.bits if flags else block.fixed)
        return Measured(sent, head + block.fixed, head + block.entropy, head + block.huffman)


@assembled
class SparseMethod(Machine):
    """A row of sparsifiers: some values exactly, the others zero."""

    parts: ClassVar[Parts] = Parts(grid=Largest(), rounding=Nearest(), coder=IndexValue())
    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True


@method
class TopK(SparseMethod):
    """The k largest magnitudes exactly, the rest zero."""

    name: ClassVar[str] = "topk"
    parts: ClassVar[Parts] = Parts(grid=Largest(), rounding=Nearest(), coder=IndexValue())
    summary: ClassVar[str] = "the largest magnitudes exactly, the rest zero"
    formula: ClassVar[str] = "Q(v_i) = v_i for the k largest |v_i|, else 0; k = max(1, round(ratio n))"
    paper: ClassVar[str] = "Alistarh et al., The Convergence of Sparsified Gradient Methods, 2018"
    corrections: ClassVar[tuple[str, ...]] = (_TIES,)
    about: ClassVar[str] = (
        "The largest magnitudes exactly. Without memory the rest never arrives, so it is mostly used as mem-sgd or "
        "ef:topk."
    )
    sends: ClassVar[str] = _POSITIONS
    behavior: ClassVar[str] = (
        "Of all choices of k values the least error. A value costs 32 bits and its position 5 to 10, so ratio 0.01 "
        "is about 0.4 bits per coordinate."
    )
    related: ClassVar[tuple[str, ...]] = ("mem-sgd", "dgc", "randomk")


@method
class MemSgd(SparseMethod):
    """Top-k with memory: what is not sent is added to the next gradient."""

    name: ClassVar[str] = "mem-sgd"
    parts: ClassVar[Parts] = Parts(memory=Residual(), grid=Largest(), rounding=Nearest(), coder=IndexValue())
    summary: ClassVar[str] = "the largest magnitudes exactly, the rest kept for the next step"
    formula: ClassVar[str] = "p = v + e; Q(p_i) = p_i for the k largest |p_i|, else 0; e <- p - Q(p)"
    paper: ClassVar[str] = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018"
    corrections: ClassVar[tuple[str, ...]] = (_TIES, UNITS)
    about: ClassVar[str] = (
        "Top-k of gradient and memory: what is not sent is added to the next gradient. The plain form of error "
        "feedback for sparse gradients; the same as ef:topk."
    )
    sends: ClassVar[str] = _POSITIONS
    behavior: ClassVar[str] = (
        "Against one gradient its error is larger than topk's, because it sends old values too; over steps nothing "
        "is lost."
    )
    related: ClassVar[tuple[str, ...]] = ("topk", "dgc", "ef")
    stateful: ClassVar[bool] = True


@method
class Dropping(SparseMethod):
    """A threshold on the magnitudes, from all of them or from a sample, with memory."""

    name: ClassVar[str] = "dropping"
    parts: ClassVar[Parts] = Parts(memory=Residual(), grid=Threshold(), rounding=Nearest(), coder=IndexValue())
    summary: ClassVar[str] = "magnitudes from a threshold on exactly, the rest kept for the next step"
    formula: ClassVar[str] = "p = v + e; Q(p_i) = p_i where |p_i| >= t, else 0; t = the ratio's quantile; e <- p - Q(p)"
    paper: ClassVar[str] = "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017"
    corrections: ClassVar[tuple[str, ...]] = (
        "values that equal the threshold are sent: dropping them would never send a constant tensor",
        "each tensor has a threshold of its own",
        "the threshold is exact by default; the paper's comes from a sample of 0.1% of the values (sample=0.001)",
        UNITS,
    )
    about: ClassVar[str] = (
        "A threshold on magnitudes with memory; with sample=0.001 the threshold comes from a sample, as in the "
        "paper, which saves the selection."
    )
    sends: ClassVar[str] = _POSITIONS
    behavior: ClassVar[str] = "With the exact threshold it sends what mem-sgd sends, and ties besides."
    related: ClassVar[tuple[str, ...]] = ("mem-sgd", "topk")
    stateful: ClassVar[bool] = True


class Seeded(NamedTuple):
    """What a random choice sends.

    Attributes:
        seed: of the positions.
        values: float32[k], as they were, in the order of their positions.
    """

    seed: int
    values: NDArray[np.float32]


@dataclass(frozen=True)
class RandomChoice(FixedGrid):
    """Zero, and k values drawn without replacement. Their positions follow from a seed of 32 bits."""

    ratio: float = parameter(0.01, "share of the values that is sent, at least one", minimum=0.0, maximum=1.0)
    scale: bool = parameter(True, "multiply by n/k, so that the mean is right")

    @property
    def unbiased(self) -> bool:
        """Only if what is lost is made up for."""
        return self.scale

    def chosen(self, seed: int, size: int) -> NDArray[np.int64]:
        """Ascending positions: those of the k largest of n random words."""
        digest = hashlib.blake2b(_SEED.pack(seed), digest_size=16, person=b"randomk").digest()
        words = np.empty(size, np.uint32)
        high, low = (np.uint64(int.from_bytes(half, "little")) for half in (digest[:8], digest[8:]))
        _elementwise.fill_words(high, low, words)
        return largest(words, kept(self.ratio, size))

    def nearest(self, x: NDArray[np.float32], scales: NDArray[np.float32], bucket: int, key: tuple[int, int]) -> Seeded:
        """The values at the positions of the key's seed."""
        del scales, bucket
        seed = key[1] & 0xFFFFFFFF
        return Seeded(seed, x[self.chosen(seed, x.size)])

    def values(self, symbols: Seeded, scales: NDArray[np.float32], bucket: int, size: int) -> NDArray[np.float32]:
        """The values, scaled, in their places."""
        del scales, bucket
        values = symbols.values
        if self.scale and values.size:
            with np.errstate(over="ignore"):
                values = np.clip(values * np.float32(size / values.size), -FLOAT32_MAX, FLOAT32_MAX)
        out = np.zeros(size, np.float32)
        out[self.chosen(symbols.seed, size)] = values
        return out


@dataclass(frozen=True)
class SeedValue(Coder):
    """A seed, then the values that it names, their exponents in a code of their own where that is shorter."""

    coder: str = coder_parameter()

    def write(self, symbols: Seeded, grid: FixedGrid) -> tuple[bytes, int]:
        """Flag 1: the exponents are coded."""
        del grid
        found = Floats(symbols.values, coder=self.coder)
        return _SEED.pack(symbols.seed) + found.encode(), _CODED if found.coded else 0

    def read(self, data: memoryview, flags: int, size: int, grid: FixedGrid) -> Seeded:
        """Undo :meth:`write`."""
        if flags & ~_CODED or len(data) < _SEED.size:
            raise PayloadError(f"payload body of {len(data)} bytes with flags {flags:#x} is no seed and values")
        count = kept(cast("RandomChoice", grid).ratio, size)
        return Seeded(_SEED.unpack_from(data)[0], decode_floats(data[_SEED.size :], count, coded=bool(flags)))

    def measure(self, symbols: Seeded, grid: FixedGrid) -> Measured:
        """The seed and the fractions are the same with every coder."""
        found = Floats(symbols.values, coder=self.coder)
        head, block = 8 * _SEED.size + found.raw, found.block
        sent = 8 * len(self.write(symbols, grid)[0])
        return Measured(sent, head + block.fixed, head + block.entropy, head + block.huffman)


@method
class RandomK(Machine, ExpectingCodec):
    """k values drawn without replacement. Their positions follow from a seed of 32 bits in the payload."""

    name: ClassVar[str] = "randomk"
    parts: ClassVar[Parts] = Parts(grid=RandomChoice(), rounding=Nearest(), coder=SeedValue())
    summary: ClassVar[str] = "values chosen at random, scaled up, the rest zero"
    formula: ClassVar[str] = "Q(v_i) = (n/k) v_i for k random i, else 0; k = max(1, round(ratio n))"
    paper: ClassVar[str] = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018 (rand_k)"
    corrections: ClassVar[tuple[str, ...]] = (
        "the paper's rand_k is not scaled and needs memory: that is ef:randomk:scale=false",
        "positions are not sent: 32 bits of seed name them",
    )
    about: ClassVar[str] = (
        "The plainest sparsifier: values chosen at random, scaled up. Positions are free, as both sides draw them "
        "from a seed."
    )
    sends: ClassVar[str] = "A seed (u32), then the chosen values in float32, in the order of their positions."
    behavior: ClassVar[str] = "Relative variance n/k - 1, whatever the data: a floor that others must beat."
    related: ClassVar[tuple[str, ...]] = ("topk", "mcgq", "ef")

    @property
    def _choice(self) -> RandomChoice:
        return cast("RandomChoice", self.parts.grid)

    @property
    def needs(self) -> SummarySpec:
        """Energy and zeros, which every sketch has."""
        return SummarySpec("none", None)

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """(n/k - 1) ||v||_2^2; unscaled (1 - k/n) ||v||_2^2 and as much less in the mean."""
        if sketch.spec[:3] != self.needs[:3]:
            raise UsageError(f"{self}: wants a sketch of {self.needs}, not of {sketch.spec}")
        n = max(1, round(sketch.size))
        count = kept(self._choice.ratio, round(sketch.size))
        share = max(1, count) / n
        block = CodedBlock.signed(expected_floats(sketch.lower, sketch.sums[:, 0], sketch.zeros) * (count / n))
        bits = CodedBits.of(block, 8 * _SEED.size + 23 * count, n)
        return Expectation(
            squared_error=self.weighted_error(state, sketch, sketch),
            bias=0.0 if self._choice.scale else (1 - share) * math.sqrt(sketch.energy),
            sparsity=1 - share * (1 - sketch.zeros / n),
            bits_fixed=bits.fixed,
            bits_entropy=bits.entropy,
            bits_huffman=bits.huffman,
            bits_payload=bits.fixed if self.parameters["coder"] == "fixed" else bits.huffman,
            bits_norms=0.0,
        )

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        """A value is lost, or scaled, as likely as any other."""
        del state, sketch
        share = max(1, kept(self._choice.ratio, round(weighted.size))) / max(1, weighted.size)
        return ((1 / share - 1) if self._choice.scale else (1 - share)) * weighted.energy


@method
class AdaComp(Composed):
    """Signs of the values that would reach their bin's largest if the gradient came once more, with memory."""

    name: ClassVar[str] = "adacomp"
    parts: ClassVar[Parts] = Parts(memory=Residual())
    summary: ClassVar[str] = "signs of what nears its bin's largest magnitude, one scale, the rest kept"
    formula: ClassVar[str] = (
        "p = v + e; Q(p_i) = s sign(p_i) where |p_i + v_i| >= the bin's largest |p|, else 0; s = mean of the bins' "
        "largest |p|; e <- p - Q(p)"
    )
    paper: ClassVar[str] = (
        "Chen et al., AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training, 2018"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "values that are zero are never sent, or a bin of zeros would be sent whole",
        UNITS,
    )
    about: ClassVar[str] = (
        "A sparsifier that finds its own ratio: in each bin it sends what is near the bin's largest magnitude once "
        "the present gradient is added again. One scale a tensor makes values cheap; memory keeps the rest."
    )
    sends: ClassVar[str] = (
        "The scale in float32, then the positions, each with its sign, as gaps in the shortest of several codes."
    )
    behavior: ClassVar[str] = (
        "The ratio follows the data: few values where gradients are heavy-tailed, many where they are flat. Smaller"
        " bins send more."
    )
    related: ClassVar[tuple[str, ...]] = ("dropping", "mem-sgd", "ef")
    stateful: ClassVar[bool] = True
    unbiased: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True

    bin_size: int = parameter(500, "values per bin; the paper takes 50 for convolutions, 500 elsewhere", minimum=1)

    def write(self, state: State, x: NDArray[np.float32], key: tuple[int, int]) -> tuple[bytes, int]:
        """The scale (float32), then the numbers 2 i + (1 where negative), coded as positions are."""
        del key
        # The gradient once more is what it was without the residual: p + v = 2 p - e.
        again = saturating(x, state.arrays["residual"], 2.0, -1.0)
        chosen = np.empty(x.size, np.bool_)
        total = _elementwise.above_local_peak(x, again, self.bin_size, chosen)
        scale = total / max(1, -(-x.size // self.bin_size))
        positions = np.flatnonzero(chosen)
        numbers = 2 * positions + np.signbit(x[positions])
        return _SCALE.pack(scale) + encode_positions(numbers, 2 * x.size), 0

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> NDArray[np.float32]:
        """The scale with the signs, in their places."""
        if flags or len(body) < _SCALE.size:
            raise PayloadError(f"payload body of {len(body)} bytes is no scale and signs")
        (scale,) = _SCALE.unpack_from(body)
        if not (math.isfinite(scale) and scale >= 0):
            raise PayloadError(f"payload holds the scale {scale}")
        numbers = decode_positions(body[_SCALE.size :], 2 * size)
        positions = numbers >> 1
        if (positions[1:] == positions[:-1]).any():
            raise PayloadError("payload holds both signs of a value")
        out = np.zeros(size, np.float32)
        out[positions] = np.where(numbers & 1, -np.float32(scale), np.float32(scale))
        return out


@method
class Dgc(SparseMethod):
    """Momentum correction, factor masking, gradient clipping and warm-up around the largest magnitudes.

    The optimizer behind it must have no momentum: it is in what arrives. The state holds ``velocity`` and
    ``residual`` (float32[n]: momentum, and what of its sum was not sent) and ``step`` (int64[]).
    """

    name: ClassVar[str] = "dgc"
    parts: ClassVar[Parts] = Parts(grid=Largest(0.001), rounding=Nearest(), coder=IndexValue())
    summary: ClassVar[str] = "the largest sums of momentum exactly, the rest kept; warm-up, clipping, factor masking"
    formula: ClassVar[str] = (
        "u <- beta u + clip(v); e <- e + u; send e_i for the k largest |e_i|, and set their e_i and u_i to 0"
    )
    paper: ClassVar[str] = (
        "Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training, 2018"
    )
    corrections: ClassVar[tuple[str, ...]] = (
        "the threshold is exact, not estimated from a sample",
        "clip limits one tensor's norm on one worker; the paper's limit is the model's, over the root of the workers",
    )
    about: ClassVar[str] = (
        "Top-k with everything that its paper adds for deep networks: momentum in the memory, clearing the momentum"
        " of what was sent, clipping, a ratio that falls over the first steps."
    )
    sends: ClassVar[str] = _POSITIONS
    behavior: ClassVar[str] = (
        "Its error against one gradient may exceed 1, because what it sends is a sum of momentum over many steps; "
        "compare it by training."
    )
    related: ClassVar[tuple[str, ...]] = ("mem-sgd", "topk", "momentum")
    stateful: ClassVar[bool] = True

    momentum: float = parameter(0.9, "share of the momentum that stays", minimum=0.0, maximum=1.0)
    masking: bool = parameter(True, "momentum stops where a value was sent")
    clip: float | None = parameter(None, "largest l2 norm of a gradient; none for no clipping", minimum=0.0)
    warmup: int = parameter(0, "steps over which the ratio falls, from 1/4 in four stages, each a quarter", minimum=0)

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """Nothing accumulated yet."""
        zeros = np.zeros(size, np.float32)
        return State(int(size), {"velocity": zeros, "residual": zeros, "step": np.zeros((), np.int64)}, shape)

    def ratio_at(self, step: int) -> float:
        """The share that is sent at a step.

        >>> [Dgc(warmup=8).ratio_at(step) for step in (0, 1, 2, 4, 6, 8)]
        [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001]
        """
        ratio = cast("Largest", self.parts.grid).ratio
        if step >= self.warmup:
            return ratio
        return max(ratio, _FIRST ** (1 + _STAGES * step // self.warmup))

    def given(self, state: State, values: ArrayLike) -> NDArray[np.float32]:
        """The sum of momentum that was not sent yet."""
        return self._moved(state, values)[1]

    def rounded(
        self, state: State, x: NDArray[np.float32], key: tuple[int, int], start: int
    ) -> tuple[NDArray[np.float32], Kept]:
        """The largest sums, at the ratio of the step."""
        del start
        grid, none = Largest(self.ratio_at(int(state.arrays["step"]))), np.empty(0, np.float32)
        return none, grid.nearest(x, none, x.size, key)

    def update(self, state: State, values: ArrayLike, decoded: NDArray[np.float32]) -> State:
        """Clear what was sent, and the momentum there."""
        velocity, total = self._moved(state, values)
        waits = decoded == 0
        return state.with_arrays(
            velocity=velocity * waits if self.masking else velocity,
            residual=total * waits,
            step=np.asarray(state.arrays["step"] + 1, np.int64),
        )

    def _moved(self, state: State, values: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Momentum and its sum with the new gradient in them."""
        x = checked_values(state, values)
        if self.clip is not None:
            norm = float(power_sum(x, 2)) ** 0.5
            if norm > self.clip:
                x = x * np.float32(self.clip / norm)
        velocity = averaged(state.arrays["velocity"], x, self.momentum, 0.0)
        return velocity, saturating(state.arrays["residual"], velocity)


def kept(ratio: float, size: int) -> int:
    """How many of ``size`` values a sparsifier keeps.

    >>> [kept(0.01, n) for n in (0, 1, 149, 151, 1000)]
    [0, 1, 1, 2, 10]
    """
    return min(size, max(1, round(ratio * size)))


def magnitudes(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """|x| as integers in the same order, uint32[n]: they are compared and selected faster than floats."""
    return x.view(np.uint32) & _MAGNITUDE


def largest(ranks: NDArray[np.uint32], count: int) -> NDArray[np.int64]:
    """Positions, ascending, of the ``count`` largest of uint32[n]; of equal ones those that come first.

    >>> largest(np.array([3, 7, 7, 1, 7], np.uint32), 2).tolist()
    [1, 2]
    """
    if count >= ranks.size:
        return np.arange(ranks.size)
    if count == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(ranks, ranks.size - count)[-count]
    found = np.flatnonzero(ranks >= threshold)
    if found.size > count:
        surplus = np.flatnonzero(ranks[found] == threshold)[count - found.size :]
        found = np.delete(found, surplus)
    return found


def _fixed(positions: NDArray[np.int64], size: int) -> bytes:
    """Positions in ``width_for(size)`` bits each, and nothing else: the body's length tells their number."""
    width = width_for(size)
    words = word_room(positions.size * width)
    if width:
        _elias.write_wide(positions, width, words)
    return from_words(words, positions.size * width)


def _unfixed(body: memoryview, size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Positions and values of a body of :func:`_fixed` and float32 values.

    Raises:
        PayloadError: it is none.
    """
    width = width_for(size)
    count = 8 * len(body) // (32 + width)
    split = -(-count * width // 8)
    if count > size or len(body) != split + 4 * count:
        raise PayloadError(f"payload body of {len(body)} bytes is no positions and values of a tensor of {size}")
    spare = 8 * split - count * width
    if spare and body[split - 1] >> (8 - spare):
        raise PayloadError("padding after the last position is not zero")
    positions = np.zeros(count, np.int64)
    if width and not _elias.read_wide(to_words(body[:split]), width, size, positions):
        raise PayloadError("payload holds positions that are not ascending or lie beyond the tensor")
    values = np.frombuffer(body[split:], "<f4").astype(np.float32)
    if not np.isfinite(values).all():
        raise PayloadError("payload holds a value that is not finite")
    return positions, values
