"""FP-n: small floating-point formats 1-E-M under a power-of-two scale, per tensor, per model or per block.

Scales of blocks follow the OCP Microscaling Formats (MX) Specification v1.0, 2023, and NVIDIA, Pretraining Large
Language Models with NVFP4, 2025.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np

from gtrace.buckets import TensorSums
from gtrace.codecs.base import (
    CodedBits,
    EncodedPart,
    check_finite,
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
from gtrace.kernels import norms as _norms
from gtrace.types import Expectation, Scope, State, SummarySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike, NDArray

    from gtrace.codecs.base import Pieces
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

#: powers of two in a byte, by the rule that chooses them, or a float8
BlockScale: TypeAlias = Literal["floor", "ceil", "even", "rceil", "e4m3"]
_POWERS: tuple[BlockScale, ...] = ("floor", "ceil", "even", "rceil")
BLOCK_SCALES: tuple[BlockScale, ...] = (*_POWERS, "e4m3")
_E4M3 = FloatFormat(4, 3, reserved=1)
_BIAS, _MANTISSA = 127, 23
_LARGEST = np.finfo(np.float32).max
_POWER_OF_BYTE = np.ldexp(1.0, np.arange(2 * _BIAS + 1) - _BIAS)


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
    sends = """The scale 2^-k in float32, or with block= a byte for each block; then the codes, by the coder. What a
    receiver must hold already: the exponent's width, if it was chosen."""
    behavior = """Relative error is even over the range of the format, so it suits lognormal data; nearest rounding is
    biased. At 2 and 3 bits most values become zero."""
    related = ("int8", "bf16", "natural")
    unbiased = False
    #: rounding is random
    stochastic: ClassVar[bool] = False
    #: the format, unless it is chosen
    _named: ClassVar[FloatFormat | None] = None
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
        choices=(BEST, *RULES, *BLOCK_SCALES),
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
        object.__setattr__(self, "stochastic", not self.deterministic)
        preset = PRESETS.get(self.format)
        if preset is not None:
            self._settle("block", preset.block)
            self._settle("scale", preset.scale, only_missing=preset.scale != "e4m3" and self.scale in _POWERS)
        if self.block is None and self.scale in BLOCK_SCALES:
            self._settle("block", 16 if self.scale == "e4m3" else 32)
        self._settle("scale", BEST if self.block is None else "floor", only_missing=True)
        if self.block is not None and self.scale not in BLOCK_SCALES:
            wanted = ", ".join(BLOCK_SCALES)
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
            return
        named = preset.form if preset else FloatFormat.parse(self.format)
        self._settle("bits", named.bits)
        object.__setattr__(self, "_named", named)
        if preset is None:
            object.__setattr__(self, "format", named.name)

    def _settle(self, name: str, value: int | str, *, only_missing: bool = False) -> None:
        given = getattr(self, name)
        if given is None:
            object.__setattr__(self, name, value)
        elif given != value and not only_missing:
            raise UsageError(f"codec fp: {name}={given} contradicts {self.format}, which has {name}={value}")

    def __str__(self) -> str:
        """The spec: a format by its word, ``bits`` of an automatic one, and what differs from what those imply."""
        preset = PRESETS.get(self.format)
        implied = {item.name: item.default for item in parameter_fields(self)}
        implied["scale"] = preset.scale if preset else BEST if self.block is None else "floor"
        implied["block"] = preset.block if preset else None
        first = f"bits={self.bits}" if self.format == "auto" else self.format
        rest = [
            f"{name}={value}"
            for name, value in self.parameters.items()
            if name not in ("bits", "format") and value != implied[name]
        ]
        return f"fp:{','.join([first, *rest])}"

    @classmethod
    def words(cls, bits: tuple[int, ...]) -> tuple[str, ...]:
        """Every format 1-E-M of these bits, with at least two bits of exponent if possible."""
        return tuple(form.name for n in bits or (8,) for form in candidates(n))

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
        form, k = self._named or self._chosen(mu, sigma, count, largest), self.exponent or 0
        if self.block is None and self.exponent is None:
            rule = cast("ScaleRule", self.scale)
            k = scale_exponent(form, rule, mu, sigma, count, largest, stochastic=self.stochastic)
        return state.with_arrays(**_arrays(form, k))

    def _chosen(self, mu: float, sigma: float, count: int, largest: float) -> FloatFormat:
        """The format of least expected relative error for ``count`` values, from mean and deviation of log2|x|."""
        bits = cast("int", self.bits)
        if self.block is not None:
            # A block's scale follows its own largest value, like the rule max for that many values.
            return optimal_format(bits, sigma, "max", self.law, self.block, stochastic=self.stochastic)
        if self.exponent is not None:
            at, random, law = mu + float(self.exponent), self.stochastic, self.law
            return min(candidates(bits), key=lambda f: f.expected_relative_error(at, sigma, stochastic=random, law=law))
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
            head, block = self._head(state, form, x)
            room = packed_room(8 * len(head) + x.size * form.bits, 1)
            room[: len(head)] = np.frombuffer(head, np.uint8)
            form.pack_blocks(x, block, self._factors(head), room[len(head) :])
            return room[: len(head) + fixed_size(x.size, form.bits)].data, 0
        head, _, codes = self._rounded(state, x, key, 0)
        bits = self.format_of(state).bits
        found = CodedBlock.signed(_signed_tally(codes, bits), coder=self.coder)
        if found.lengths is None:
            return head + found.encode(codes), 0
        # In a Huffman code signs come after magnitudes.
        return head + found.encode(sign_last(codes, bits)), _CODED

    @property
    def part_multiple(self) -> int | None:
        return self.block or 1

    def prepare(self, state: State, pieces: Pieces, key: tuple[int, int], sums: TensorSums | None = None) -> State:
        """Store the tensor's ``largest`` magnitude, if the scales of its blocks are in units of it."""
        if self.scale != "e4m3":
            return state
        found = TensorSums.of(x for _, x in pieces()) if sums is None else sums
        return state.with_arrays(largest=found.norm("linf"))

    def encode_part(self, state: State, values: ArrayLike, key: tuple[int, int], start: int) -> EncodedPart:
        """Round the part as :meth:`encode` does; a scale of the whole tensor counts with the first part."""
        head, block, codes = self._rounded(state, self._values(state, values), key, start)
        form = self.format_of(state)
        again = start and (self.block is None or self.scale == "e4m3")
        bits = 8 * (len(head) - (_SCALE.size if again else 0))
        decoded = form.decode_blocks(codes, block, self._scales(head))
        return EncodedPart(decoded, bits, tallies=_signed_tally(codes, form.bits))

    def measured(self, whole: EncodedPart, size: int) -> tuple[int, CodedBits]:
        block = CodedBlock.signed(whole.tallies, coder=self.coder)
        return whole.head // 8 + block.size, CodedBits.of(block, whole.head, size)

    def _values(self, state: State, values: ArrayLike) -> Values:
        """The input of ``encode``, checked; without a look at the values if the scales of blocks check them."""
        return checked_values(state, values) if self.block is None else sized_values(state, values)

    def _rounded(
        self, state: State, x: Values, key: tuple[int, int], start: int
    ) -> tuple[bytes, int, NDArray[np.uint16]]:
        """The scales as sent, the number of values per scale, and codes of values from ``start`` on."""
        form = self.format_of(state)
        head, block = self._head(state, form, x)
        return head, block, form.encode_blocks(x, block, self._factors(head), key if self.stochastic else None, start)

    def read(self, shared: bytes, body: memoryview, flags: int, size: int) -> Values:
        form = self._shared_format(shared)
        cut = 0 if self.block is None else -(-size // self.block)
        if self.block is None or self.scale == "e4m3":
            cut += _SCALE.size
        if flags & ~_CODED or len(body) < cut:
            raise PayloadError(f"payload body of {len(body)} bytes with flags {flags:#x} is not scales and codes")
        codes = decode_block(body[cut:], size, 1 << form.bits, coded=bool(flags))
        if flags:
            codes = sign_first(codes, form.bits)
        if size and int((codes & np.uint16((1 << (form.bits - 1)) - 1)).max()) > form.top:
            raise PayloadError(f"payload holds a code that has no value in {form}")
        scales = self._scales(body[:cut])
        if self.block is None and not (np.isfinite(scales[0]) and scales[0] > 0 and np.frexp(scales[0])[0] == 0.5):
            raise PayloadError("payload holds a scale that is not a power of two")
        return form.decode_blocks(codes, self.block or max(1, size), scales)

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
            **coded.columns,
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
        head, block = self._head(state, form, x)
        present = np.count_nonzero(x)
        if not present:
            return 0.0, 0.0
        limits = form.max * self._scales(head)
        largest = limits if limits.size == 1 else np.repeat(limits, block)[: x.size]
        # A block whose scale came out as 0 is lost, not clipped.
        saturated = int(np.count_nonzero((np.abs(x) > largest) & (largest > 0)))
        flushed = int(np.count_nonzero((x != 0) & (decoded == 0)))
        return saturated / present, flushed / present

    @property
    def _forms(self) -> Sequence[FloatFormat]:
        return (self._named,) if self._named else candidates(cast("int", self.bits))

    def _head(self, state: State, form: FloatFormat, x: Values) -> tuple[bytes, int]:
        """The scales as sent, and the number of values per scale."""
        if self.block is not None:
            kind = cast("BlockScale", self.scale)
            return measure_scales(kind, form, x, self.block, state.arrays.get("largest")), self.block
        return _SCALE.pack(2.0 ** -self.scale_of(state)), max(1, x.size)

    def _scales(self, head: bytes | memoryview) -> NDArray[np.float64]:
        """The scales of :meth:`_head`, by which numbers of the format are multiplied; exact.

        Raises:
            PayloadError: a code without a scale, or a tensor's scale that is negative or not finite.
        """
        if self.block is None:
            return np.array(_SCALE.unpack(head))
        if self.scale == "e4m3":
            (tensor,) = _SCALE.unpack_from(head)
            codes = np.frombuffer(head, np.uint8, offset=_SCALE.size)
            if not (np.isfinite(tensor) and tensor >= 0) or codes.max(initial=0) > _E4M3.top:
                raise PayloadError("payload holds a scale that is negative or not finite")
            return _E4M3.exact_levels[codes] * tensor
        codes = np.frombuffer(head, np.uint8)
        if codes.max(initial=0) > 2 * _BIAS:
            raise PayloadError("payload holds a scale that is not a number")
        return _POWER_OF_BYTE[codes]

    def _factors(self, head: bytes) -> NDArray[np.float64]:
        """What values are multiplied by before they are rounded; with ``e4m3`` float32, at most the largest."""
        scales = self._scales(head)
        if self.scale != "e4m3":
            return 1.0 / scales
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.float32(1.0) / scales.astype(np.float32)
        return np.minimum(inverse, _LARGEST).astype(np.float64)

    def _shared_format(self, shared: bytes) -> FloatFormat:
        """The format in the shared bytes; PayloadError if they are not this codec's."""
        found = {self.shared(State(0, _arrays(form, 0))): form for form in self._forms}
        if shared not in found:
            if self._named:
                raise PayloadError("shared bytes are not empty, though the format is named")
            raise PayloadError("shared bytes name an invalid format for these bits")
        return found[shared]


def _signed_tally(codes: NDArray[np.uint16], bits: int) -> NDArray[np.int64]:
    """How often each code occurs, in the order of :func:`sign_last`: int64[2^bits]."""
    tallies: NDArray[np.int64] = tally(codes, 1 << bits).reshape(2, -1).T.reshape(-1)
    tallies[:2] = tallies[0] + tallies[1], 0
    return tallies


def measure_scales(
    kind: BlockScale, form: FloatFormat, x: Values, block: int, whole: NDArray[np.float32] | None = None
) -> bytes:
    """The scales of float32[n] as bytes; ``whole`` is the largest magnitude of the tensor that it is a part of.

    ``floor``: 2^(floor(log2 amax) - emax), as in OCP's standard; the largest values may saturate. ``ceil``: the same
    with log2 rounded up. ``even``: amax first rounded to the elements' mantissa. ``rceil``: the power of two from
    amax / max on, NVIDIA's rule, which saturates none. ``e4m3``: a float32 for the tensor, 1 / (448 max / amax), and
    for each block a float8 e4m3 in units of it, amax / max; divisions and float32 roundings are those of NVIDIA's
    recipe, in its order.

    Raises:
        UsageError: values that are not finite.
    """
    largest = np.empty(-(-x.size // block), np.float32)
    if not _norms.bucket_scales(x, block, _norms.LINF, largest):
        check_finite(x)
    if kind == "e4m3":
        amax = largest.max(initial=np.float32(0.0)) if whole is None else whole[0]
        with np.errstate(over="ignore"):
            encode = min(np.float32(_E4M3.max * form.max) / amax, _LARGEST) if amax else np.float32(1.0)
            ratios = largest / np.float32(form.max) * encode
        return _SCALE.pack(np.float32(1.0) / encode) + _E4M3.encode(ratios).astype(np.uint8).tobytes()
    if kind == "rceil":
        # The reciprocal in float32, as in the published code.
        fraction, exponent = np.frexp(largest * np.float32(1 / form.max))
        # frexp gives a fraction in [1/2, 1): one more than the floor of the logarithm.
        exponent -= fraction == 0.5
    else:
        bits = largest.view(np.int32)
        if kind == "even":
            # Half of the elements' last place; a carry goes to the exponent.
            bits = bits + (1 << _MANTISSA - form.mantissa - 1)
        exponent = (bits >> _MANTISSA) - _BIAS - (np.frexp(form.max)[1] - 1)
        if kind == "ceil":
            exponent += bits & ((1 << _MANTISSA) - 1) > 0
    exponent = np.where(largest > 0, np.clip(exponent, -_BIAS, _BIAS), -_BIAS)
    return (exponent + _BIAS).astype(np.uint8).tobytes()


def _arrays(form: FloatFormat, k: int) -> dict[str, NDArray[np.int64]]:
    return {"width": np.asarray(form.exponent, np.int64), "exponent": np.asarray(k, np.int64)}
