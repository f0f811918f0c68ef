"""FP-n: small floating-point formats 1-E-M under a power-of-two scale, per tensor, per model or per block."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast, get_args

import numpy as np

from gtrace.codecs import block_scales as _blocks
from gtrace.codecs.base import (
    CodedBits,
    EncodedPart,
    check_summary,
    checked_values,
    coder_parameter,
    parameter,
    parameter_fields,
    sized_values,
)
from gtrace.codecs.engine import Composed
from gtrace.codecs.spec import register
from gtrace.coding.fixed import fixed_size, packed_room, sign_first, sign_last
from gtrace.coding.huffman import CodedBlock, decode_block, tally
from gtrace.errors import PayloadError, UsageError
from gtrace.fitting.floats import (
    LARGEST_SCALE,
    LEAST_SCALE,
    RULES,
    FloatFormat,
    LawName,
    ScaleRule,
    best_placement,
    candidates,
    expected_rounding,
    format_thresholds,
    kappa,
    optimal_format,
    placed_error,
    scale_exponent,
)
from gtrace.types import Expectation, Scope, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.block_scales import BlockScale
    from gtrace.codecs.parts import Values
    from gtrace.sketch import MomentSketch

__all__ = ["FloatFormat", "Fp", "format_thresholds", "kappa", "optimal_format", "placed_error", "scale_exponent"]

#: the rule for the scale with the least expected squared error of the values themselves, without a law
BEST = "best"
_SCALE = struct.Struct("<f")
#: flag of a payload whose codes are Huffman coded
_CODED = 1
#: exponent bits before a fit: they suit a deviation of log2|x| of 3.5, typical of networks
_TYPICAL_EXPONENT = 4

#: elements that are read together
_SLAB = 1 << 20


class _Preset(NamedTuple):
    """A published block format: elements, block length, scales."""

    form: FloatFormat
    block: int
    scale: BlockScale


PRESETS: dict[str, _Preset] = {
    "mxfp4": _Preset(FloatFormat(2, 1), 32, "floor"),
    "mxfp6": _Preset(FloatFormat(3, 2), 32, "floor"),
    "mxfp6e2m3": _Preset(FloatFormat(2, 3), 32, "floor"),
    "mxfp8": _Preset(FloatFormat(4, 3, reserved=1), 32, "floor"),
    "mxfp8e5m2": _Preset(FloatFormat(5, 2, reserved=4), 32, "floor"),
    "nvfp4": _Preset(FloatFormat(2, 1), 16, "e4m3"),
}


@register
@dataclass(frozen=True)
class Fp(Composed):
    """Values times a power of two, rounded to a float format.

    The state holds ``exponent`` (int64, k: values are multiplied by 2^k) and ``width`` (int64, E of the format). Before
    a fit k is 0 and the format suits a typical gradient. A tensor of zeros changes neither.
    """

    name = "fp"
    summary = "small floats 1-E-M, the format chosen for the data, scaled by a power of two"
    formula = """Q(v) = 2^-k R(2^k v), R to the nearest number 1-E-M, ties to the even code, at most (2 - 2^-M)
    2^(2^(E-1))"""
    paper = "Chmiel et al., Neural Gradients Are Near-Lognormal, 2021"
    corrections = (
        "Eq. (4) divides by 2^M - 1: infinite at M = 0, up to twofold too high at M = 1; here it is an exact sum",
        "the paper's scale uses the largest value of a fitted lognormal law (scale=max), which weight gradients do "
        "not follow; the default has the least expected squared error of all powers of two, for the values themselves",
        "a format is chosen where its own scale rule puts the values",
    )
    about = """Any small float format, as 8-bit training uses: 1-E-M bits with a power of two as scale. The scale is the
    one with the least squared error for each tensor; scale=max is the paper's rule. Without format= the split into
    exponent and mantissa is chosen for the data, too."""
    sends = """The scale 2^-k in float32, or with block= a byte for each block; then codes of N bits. What a receiver
    must hold already: the exponent's width, if it was chosen."""
    behavior = """Relative error is even over the range of the format, so it suits lognormal data; nearest rounding is
    biased. At 2 and 3 bits most values become zero."""
    related = ("int8", "bf16", "natural")
    unbiased = False
    word = "format"

    bits: int | None = parameter(
        None, "1 + E + M; 8 if the format does not set it", minimum=2, maximum=16, optional=True
    )
    format: str = parameter("auto", "auto, eXmY, or a published block format: mxfp4, mxfp6, mxfp8, nvfp4, ...")
    law: LawName = parameter(
        "lognormal", "the law of magnitudes for the scale rules and for blocks", choices=get_args(LawName)
    )
    scale: str | None = parameter(
        None,
        "best: least squared error of the values; absmax: their largest below the format's; by a fitted law: max (the "
        "paper's rule), the largest that it expects, mean (the authors' code), error, least mean relative error; "
        "of blocks: floor (OCP), ceil, even or rceil (NVIDIA) a power of two, e4m3 a float8",
        choices=(BEST, *RULES, *_blocks.BLOCK_SCALES),
        optional=True,
    )
    rounding: str = parameter("nearest", "nearest even, or at random without bias", choices=("nearest", "stochastic"))
    block: int | None = parameter(None, "consecutive values that share a scale of a byte", minimum=1, optional=True)
    exponent: int | None = parameter(
        None, "a fixed k: values times 2^k, a static scale", minimum=LEAST_SCALE, maximum=LARGEST_SCALE, optional=True
    )
    scope: Scope = parameter("tensor", "one scale for a tensor or for the whole model", choices=("tensor", "model"))
    coder: str = coder_parameter()

    def __post_init__(self) -> None:
        """Fill in what other parameters imply: bits of a named format, block and scale of each other.

        Raises:
            UsageError: parameters that contradict each other.
        """
        super().__post_init__()
        object.__setattr__(self, "deterministic", self.rounding == "nearest")
        preset = PRESETS.get(self.format)
        if preset is not None:
            self._settle("block", preset.block)
            self._settle("scale", preset.scale, only_missing=preset.scale != "e4m3" and self.scale in _blocks.POWERS)
        if self.block is None and self.scale in _blocks.BLOCK_SCALES:
            self._settle("block", _blocks.BLOCKS[self.scale])
        self._settle("scale", BEST if self.block is None else "floor", only_missing=True)
        if self.block is not None and self.scale not in _blocks.BLOCK_SCALES:
            wanted = ", ".join(_blocks.BLOCK_SCALES)
            raise UsageError(
                f"codec fp: scale={self.scale} is for whole tensors; with block={self.block} choose {wanted}"
            )
        if self.scale == BEST and self.law != "lognormal":
            raise UsageError(f"codec fp: scale={BEST} follows no law; with law={self.law} choose max, mean or error")
        if self.block is not None and self.exponent is not None:
            raise UsageError("codec fp: exponent= is one scale for all, block= one for each block; give one of them")
        if self.format == "auto":
            self._settle("bits", 8, only_missing=True)
            candidates(cast("int", self.bits))
        else:
            form = preset.form if preset else FloatFormat.parse(self.format)
            self._settle("bits", form.bits)
            if preset is None:
                object.__setattr__(self, "format", form.name)

    def _settle(self, name: str, value: int | str, *, only_missing: bool = False) -> None:
        given = getattr(self, name)
        if given is None:
            object.__setattr__(self, name, value)
        elif given != value and not only_missing:
            raise UsageError(f"codec fp: {name}={given} contradicts {self.format}, which has {name}={value}")

    def __str__(self) -> str:
        """The spec: a format by its word, ``bits`` of an automatic one, and what differs from what those imply."""
        preset = PRESETS.get(self.format)
        implied = {
            "scale": BEST if self.block is None else "floor",
            "block": None,
            **({"scale": preset.scale, "block": preset.block} if preset else {}),
        }
        first = f"bits={self.bits}" if self.format == "auto" else self.format
        rest = [
            f"{name}={value}"
            for name, value in self.parameters.items()
            if name not in ("bits", "format") and value != implied.get(name, _DEFAULTS.get(name))
        ]
        return f"fp:{','.join([first, *rest])}"

    @classmethod
    def words(cls, bits: tuple[int, ...]) -> tuple[str, ...]:
        """Every format 1-E-M of these bits, with at least two bits of exponent if possible."""
        return tuple(form.name for n in bits or (8,) for form in candidates(n))

    @property
    def stochastic(self) -> bool:
        """Whether rounding is random."""
        return self.rounding == "stochastic"

    @property
    def whole_tensor(self) -> bool:
        """True, unless the scale is fixed or each block has its own."""
        return self.block is None and self.exponent is None

    @property
    def fits_itself(self) -> bool:
        """A scale from the values belongs to the tensor; rules by a law follow the schedule, as in the paper."""
        return self.whole_tensor and self.scale in (BEST, "absmax") and self.scope == "tensor"

    @property
    def needs(self) -> SummarySpec:
        return SummarySpec("none", None, scope=self.scope)

    @property
    def expects(self) -> bool:
        """A sketch does not say which values share a block."""
        return self.block is None

    def init(self, size: int, shape: tuple[int, ...] | None = None) -> State:
        """No shift (or the fixed one), and a format for a typical gradient."""
        form = min(self._forms, key=lambda form: abs(form.exponent - _TYPICAL_EXPONENT))
        return State(int(size), _arrays(form, self.exponent or 0), shape)

    def fit(self, state: State, summary: MomentSketch, step: int) -> State:
        """Choose the format and the scale, from the values or from the mean and deviation of log2|x|."""
        if not summary.rows.size or (self._named and (self.block or self.exponent is not None)):
            return state
        if self.scale == BEST:
            found = {
                form: best_placement(form, summary, stochastic=self.stochastic, exponent=self.exponent)
                for form in self._forms
            }
            # Of equal errors, the narrowest exponent.
            form = min(found, key=lambda form: found[form].squared_error)
            return state.with_arrays(**_arrays(form, found[form].exponent))
        count, mu, sigma = summary.log2_moments()
        largest = math.log2(summary.largest)
        form, k = self._named or self.choose(mu, sigma, count, largest), self.exponent or 0
        if self.block is None and self.exponent is None:
            rule = cast("ScaleRule", self.scale)
            k = scale_exponent(form, rule, mu, sigma, count, largest, stochastic=self.stochastic)
        return state.with_arrays(**_arrays(form, k))

    def choose(self, mu: float, sigma: float, count: int, largest: float | None = None) -> FloatFormat:
        """The format of ``bits`` with the least expected relative error under this codec's law, scale and rounding.

        Args:
            mu: mean of log2|x|.
            sigma: its standard deviation.
            count: number of values.
            largest: log2 of the largest |x|, if it is known.
        """
        bits = cast("int", self.bits)
        if self.block is not None:
            # A block's scale follows its own largest value, like the rule max for that many values.
            return optimal_format(bits, sigma, "max", self.law, self.block, stochastic=self.stochastic)
        if self.exponent is not None:
            return min(
                candidates(bits),
                key=lambda form: form.expected_relative_error(
                    mu + float(self.exponent or 0), sigma, stochastic=self.stochastic, law=self.law
                ),
            )
        rule = cast("ScaleRule", self.scale)
        return optimal_format(bits, sigma, rule, self.law, count, mu=mu, largest=largest, stochastic=self.stochastic)

    def format_of(self, state: State) -> FloatFormat:
        width = int(state.arrays["width"])
        return self._named or FloatFormat(width, cast("int", self.bits) - 1 - width)

    def scale_of(self, state: State) -> int:
        """k: values are multiplied by 2^k before rounding; unused with blocks."""
        return int(state.arrays["exponent"])

    def shared(self, state: State) -> bytes:
        """E of a format that was chosen; nothing for a named one."""
        return b"" if self._named else bytes([self.format_of(state).exponent])

    def write(self, state: State, x: Values, key: tuple[int, int]) -> tuple[bytes | memoryview, int]:
        """The scale (2^-k as float32; or a byte a block), then a block of codes; flag 1 says that a code is sent."""
        if self.coder == "fixed" and not self.stochastic:
            form = self.format_of(state)
            if self.block is None:
                head, block, scales = self._scales(state, form, x)
                factors = 1.0 / scales
            else:
                head, block = _blocks.measure(self._block_scale, form, x, self.block), self.block
                factors = _blocks.factors_in(self._block_scale, head)
            room = packed_room(8 * len(head) + x.size * form.bits, 1)
            room[: len(head)] = np.frombuffer(head, np.uint8)
            form.pack_blocks(x, block, factors, room[len(head) :])
            return room[: len(head) + fixed_size(x.size, form.bits)].data, 0
        head, _, _, codes = self._rounded(state, x, key, 0)
        bits = self.format_of(state).bits
        found = CodedBlock.signed(_signed_tally(codes, bits), coder=self.coder)
        if found.lengths is None:
            return head + found.encode(codes), 0
        # In a Huffman code signs come after magnitudes.
        return head + found.encode(sign_last(codes, bits)), _CODED

    @property
    def part_multiple(self) -> int | None:
        """A block, if blocks have scales of their own; otherwise 1.

        None for float8 scales, which need a scale of the whole tensor.
        """
        return None if self.scale == "e4m3" else self.block or 1

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """Round the part as :meth:`encode` does; one scale for all counts with the first part."""
        head, block, scales, codes = self._rounded(state, values, key, start)
        form = self.format_of(state)
        bits = 0 if start and self.block is None else 8 * len(head)
        decoded = form.decode_blocks(codes, block, scales)
        return EncodedPart(decoded, bits, tallies=_signed_tally(codes, form.bits))

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        assert whole.tallies is not None
        block = CodedBlock.signed(whole.tallies, coder=self.coder)
        return whole.head // 8 + block.size, CodedBits.of(block, whole.head, size)

    def _values(self, state: State, values: ArrayLike) -> Values:
        """The input of ``encode``, checked; without a look at the values if the scales of blocks check them."""
        return checked_values(state, values) if self.block is None else sized_values(state, values)

    def _rounded(
        self, state: State, values: ArrayLike, key: tuple[int, int], start: int
    ) -> tuple[bytes, int, NDArray[np.float64], NDArray[np.uint16]]:
        """The scales as sent, the number of values per scale, the scales, and codes of values from ``start`` on."""
        x = self._values(state, values)
        form = self.format_of(state)
        head, block, scales = self._scales(state, form, x)
        factors = _blocks.factors(self._block_scale, scales)
        codes = form.encode_blocks(x, block, factors, key if self.stochastic else None, start)
        return head, block, scales, codes

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        form = self._shared_format(shared)
        cut = _SCALE.size if self.block is None else _blocks.header_bytes(self._block_scale, size, self.block)
        if flags & ~_CODED or len(body) < cut:
            raise PayloadError(f"payload body of {len(body)} bytes with flags {flags:#x} is not scales and codes")
        codes = decode_block(body[cut:], size, 1 << form.bits, coded=bool(flags))
        if flags:
            codes = sign_first(codes, form.bits)
        if size and int((codes & np.uint16((1 << (form.bits - 1)) - 1)).max()) > form.top:
            raise PayloadError(f"payload holds a code that has no value in {form}")
        if self.block is None:
            (scale,) = _SCALE.unpack_from(body)
            if not (math.isfinite(scale) and scale > 0 and math.frexp(scale)[0] == 0.5):
                raise PayloadError("payload holds a scale that is not a power of two")
            return form.decode_blocks(codes, max(1, size), np.array([scale])[:size])
        return form.decode_blocks(codes, self.block, _blocks.read(self._block_scale, body[:cut]))

    def expect(self, state: State, sketch: MomentSketch) -> Expectation:
        """Closed forms from the sketch, exact; rounding to nearest is all bias.

        Raises:
            UsageError: a sketch of other values; or blocks, which have no closed form.
        """
        check_summary(self, sketch)
        if not self.expects:
            raise UsageError(f"{self}: a sketch does not say which values share a block; encode values instead")
        form = self.format_of(state)
        found = expected_rounding(form, 2.0 ** -self.scale_of(state), sketch, stochastic=self.stochastic)
        size = max(1, sketch.size)
        nonzero = float(found.counts.sum())
        magnitudes = found.counts.copy()
        magnitudes[0] += sketch.zeros
        half = magnitudes[1:] / 2
        probabilities = np.concatenate([half[::-1], magnitudes[:1], half]) / size
        norms = 32.0 / size
        tallies = np.zeros(1 << form.bits)
        tallies[: 2 * magnitudes.size] = np.repeat(magnitudes / 2, 2)
        tallies[:2] = magnitudes[0], 0
        block = CodedBlock.signed(tallies, coder=self.coder)
        coded = CodedBits.of(block, 8 * _SCALE.size, int(sketch.size))
        return Expectation(
            squared_error=found.squared_error,
            bias=math.sqrt(max(found.squared_bias, 0.0)),
            sparsity=magnitudes[0] / size,
            bits_fixed=coded.fixed,
            bits_entropy=coded.entropy,
            bits_huffman=coded.huffman,
            bits_payload=norms + block.bits / size,
            bits_norms=norms,
            probabilities=probabilities,
            saturated=found.saturated / nonzero if nonzero else 0.0,
            flushed=float(found.counts[0]) / nonzero if nonzero else 0.0,
        )

    def weighted_error(self, state: State, sketch: MomentSketch, weighted: MomentSketch) -> float:
        form, scale = self.format_of(state), 2.0 ** -self.scale_of(state)
        return expected_rounding(form, scale, weighted, stochastic=self.stochastic).squared_error

    def clipping(self, state: State, values: ArrayLike, decoded: Values) -> tuple[float, float]:
        """Shares of the non-zero values beyond the largest number of the (scaled) format, and decoded as zero."""
        x = checked_values(state, values)
        form = self.format_of(state)
        _, block, scales = self._scales(state, form, x)
        present = np.count_nonzero(x)
        if not present:
            return 0.0, 0.0
        limits = form.max * scales
        saturated, flushed = 0, 0
        # Whole blocks at a time, so that temporary arrays stay small.
        slab = _SLAB if limits.size == 1 else block * max(1, _SLAB // block)
        for start in range(0, x.size, slab):
            part = x[start : start + slab]
            first = start // block
            largest = (
                limits if limits.size == 1 else np.repeat(limits[first : first + slab // block], block)[: part.size]
            )
            # A block whose scale came out as 0 is lost, not clipped.
            saturated += int(np.count_nonzero((np.abs(part) > largest) & (largest > 0)))
            flushed += int(np.count_nonzero((part != 0) & (decoded[start : start + slab] == 0)))
        return saturated / present, flushed / present

    @property
    def _named(self) -> FloatFormat | None:
        if self.format == "auto":
            return None
        preset = PRESETS.get(self.format)
        return preset.form if preset else FloatFormat.parse(self.format)

    @property
    def _forms(self) -> Sequence[FloatFormat]:
        return (self._named,) if self._named else candidates(cast("int", self.bits))

    @property
    def _block_scale(self) -> BlockScale:
        return cast("BlockScale", self.scale)

    def _scales(self, state: State, form: FloatFormat, x: Values) -> tuple[bytes, int, NDArray[np.float64]]:
        """The scales as sent, the number of values per scale, and the factors for numbers of the format."""
        if self.block is not None:
            head = _blocks.measure(self._block_scale, form, x, self.block)
            return head, self.block, _blocks.read(self._block_scale, head)
        scale = 2.0 ** -self.scale_of(state)
        return _SCALE.pack(scale), max(1, x.size), np.array([scale])[: x.size]

    def _shared_format(self, shared: bytes) -> FloatFormat:
        """The format in the shared bytes; PayloadError if they are not this codec's."""
        found = {self.shared(State(0, _arrays(form, 0))): form for form in self._forms}
        if shared not in found:
            if self._named:
                raise PayloadError("shared bytes are not empty, though the format is named")
            raise PayloadError("shared bytes name an invalid format for these bits")
        return found[shared]


_DEFAULTS = {item.name: item.default for item in parameter_fields(Fp)}


def _signed_tally(codes: NDArray[np.uint16], bits: int) -> NDArray[np.int64]:
    """How often each code occurs, in the order of :func:`sign_last`: int64[2^bits]."""
    tallies: NDArray[np.int64] = tally(codes, 1 << bits).reshape(2, -1).T.reshape(-1)
    tallies[:2] = tallies[0] + tallies[1], 0
    return tallies


def _arrays(form: FloatFormat, k: int) -> dict[str, NDArray[np.int64]]:
    return {"width": np.asarray(form.exponent, np.int64), "exponent": np.asarray(k, np.int64)}
