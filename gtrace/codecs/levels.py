"""Methods of levels: buckets over their norm, rounded at random to the magnitudes of a grid, coded."""

from __future__ import annotations

from typing import ClassVar

from gtrace.codecs import grids
from gtrace.codecs.coders import SharedCode
from gtrace.codecs.engine import Composed, method
from gtrace.codecs.parts import Grid, Parts, Scale
from gtrace.codecs.scales import BucketNorm, NoNorm

_SENT = """A float32 norm for each bucket; with tail=exact the short last bucket in float32; then the symbols, sign and
level in one, by the coder. What a receiver must hold already, counted when it changes: the"""
_HUFFMAN = f"{_SENT} Huffman code's lengths."
_FITTED = f"{_SENT} fitted levels (float32) and the Huffman code's lengths."
_ALQ = "Faghri et al., Adaptive Gradient Quantization for Data-Parallel SGD, 2020"
_ALQ_FORMULA = """Q(v) = ||v_b||_2 sign(v) l, rounded stochastically; l minimizes E[(l+ - r)(r - l)] over r = |v| /
||v_b||"""
_ALQ_CORRECTIONS = (
    "the law of |r| is p(r) + p(-r); the paper's formulas hold for even densities only",
    "the objective is not convex: uniform, exponential and companding starts are tried and the best is kept",
    (
        "coordinate descent takes 65 sweeps at 4 bits and 240 at 5 from a uniform start, not fewer than 10; "
        "method=newton finishes with Newton steps, method=cd is the paper's"
    ),
    "the law is the data's own by default; law=truncnorm is the paper's mixture of truncated normals",
    "no constant is added to a norm: the reference's 1e-7 biases small gradients",
)


def levels(grid: Grid, scale: Scale | None = None) -> Parts:
    """The parts of a method of levels: buckets over their l2 norm, unless another scale is given."""
    return Parts(scale=scale or BucketNorm(), grid=grid, rounding=grids.Stochastic(), coder=SharedCode())


@method
class Qsgd(Composed):
    """QSGD with the l2 norm."""

    name = "qsgd"
    parts = levels(grids.EqualSteps())
    summary = "uniform levels, buckets scaled by their l2 norm"
    formula = "Q(v) = ||v_b||_2 sign(v) l, l in {0, 1/s, ..., 1}, s = 2^(bits-1) - 1, rounded stochastically"
    paper = "Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization and Encoding, 2017"
    about = "The reference of unbiased quantizers: uniform levels times the l2 norm of a bucket, rounded at random."
    sends = _HUFFMAN
    behavior = """Relative variance up to sqrt(bucket_size) / s, s = 2^(bits-1) - 1: take small buckets, or qsgdinf.
    Most symbols are zero, so its bits are few."""
    related = ("qsgdinf", "nuqsgd", "alq")


@method
class QsgdInf(Composed):
    """QSGD with the max norm."""

    name = "qsgdinf"
    parts = levels(grids.EqualSteps(), BucketNorm("linf"))
    summary = "uniform levels, buckets scaled by their largest magnitude"
    formula = "Q(v) = max|v_b| sign(v) l, l in {0, 1/s, ..., 1}, s = 2^(bits-1) - 1, rounded stochastically"
    paper = "Alistarh et al., QSGD, 2017 (max-norm variant, see Faghri et al., 2020)"
    about = """qsgd divided by the largest magnitude instead: the grid covers what is there. The baseline that new
    codecs should beat at equal measured bits."""
    sends = _HUFFMAN
    behavior = """Error falls to about a quarter with each bit. Entropy coding makes use of the many zeros, so measured
    bits are below the nominal ones."""
    related = ("qsgd", "zipml", "terngrad")


@method
class TernGrad(Composed):
    """Levels {0, 1} times the largest magnitude, whatever the bits."""

    name = "terngrad"
    parts = levels(grids.Ternary(), BucketNorm("linf"))
    summary = "levels 0 and 1, buckets scaled by their largest magnitude"
    formula = "Q(v) = max|v_b| sign(v) b, b = 1 with probability |v| / max|v_b|"
    paper = "Wen et al., TernGrad: Ternary Gradients to Reduce Communication, 2017"
    corrections = ("clipping comes before the norm and is off by default; clip=2.5 is the paper's setting",)
    about = "Three values, -1, 0 and 1 times the largest magnitude, rounded at random; clip=2.5 is the paper's setting."
    sends = _HUFFMAN
    behavior = "Like qsgdinf at 2 bits: one outlier makes nearly all values zero, and the variance large."
    related = ("qsgdinf", "natural")


@method
class Nuqsgd(Composed):
    """Exponential levels 1, p, p^2, ... (and 0)."""

    name = "nuqsgd"
    parts = levels(grids.Powers())
    summary = "levels at powers of 1/2, buckets scaled by their l2 norm"
    formula = "Q(v) = ||v_b||_2 sign(v) l, l in {0, p^(m-2), ..., p, 1}, m = 2^(bits-1), rounded stochastically"
    paper = "Ramezani-Kebrya et al., NUQSGD: Provably Communication-Efficient Data-Parallel SGD, 2021"
    about = """Fixed exponential levels: fine near 0, where normalized coordinates are, with a bound on the variance.
    Nothing is fitted."""
    sends = _HUFFMAN
    behavior = """Better than qsgd at equal levels in large buckets; more bits add levels near 0 only, so error stops
    falling."""
    related = ("natural", "amq", "alq")


@method
class Luq(Composed):
    """Powers of 1/2 below a tensor's largest magnitude: FP4 with three bits of exponent at four bits."""

    name = "luq"
    parts = levels(grids.PowersOfHalf(), BucketNorm("linf", None))
    summary = "powers of 1/2 below the largest magnitude, rounded at random"
    formula = """Q(v) = M sign(v) l, l in {0, 2^-(m-2), ..., 1/2, 1}, m = 2^(bits-1), M = max|v|, rounded
    stochastically, below the least level too"""
    paper = "Chmiel et al., Accurate Neural Training with 4-bit Matrix Multiplications at Standard Formats, 2023"
    corrections = ("the largest magnitude is the tensor's own; the paper foretells it from the steps before",)
    about = "How 4-bit training rounds neural gradients: a float with no mantissa, unbiased at both ends of its range."
    sends = _HUFFMAN
    behavior = """Relative variance at most 1/8 in its range of 2^(m-2), whatever the law; below it values are zero or
    the least level. More bits widen the range and refine nothing."""
    related = ("nuqsgd", "natural", "fp")


@method
class Natural(Composed):
    """Stochastic rounding to powers of two; no scale is sent."""

    name = "natural"
    parts = levels(grids.Exponents(), NoNorm())
    summary = "values rounded to powers of two, no scale"
    formula = "Q(v) = sign(v) 2^e or sign(v) 2^(e+1), 2^e <= |v| < 2^(e+1), rounded stochastically"
    paper = "Horvath et al., Natural Compression for Distributed Deep Learning, 2022"
    corrections = (
        "values above 2^127 are rounded between 2^127 and the largest float32, so nothing overflows",
        "values below 2^-126 are rounded between 0 and 2^-126",
    )
    about = "Keeps sign and exponent and rounds the mantissa away at random: no scale, no parameter that needs tuning."
    sends = "The exponents' symbols by the coder, after an exact tail where asked for; nothing else."
    behavior = "Relative variance at most 1/8, whatever the data; bits depend on how far exponents spread."
    related = ("nuqsgd", "fp")


@method
class Alq(Composed):
    """ALQ: coordinate descent on the variance, buckets weighted by their squared norm."""

    name = "alq"
    parts = levels(grids.LeastVariance())
    summary = "levels of least variance by coordinate descent, buckets weighted by squared norm"
    formula = _ALQ_FORMULA
    paper = f"{_ALQ}, Eq. 5"
    corrections = _ALQ_CORRECTIONS
    about = """Adaptive levels: they are fitted to the law of the normalized coordinates, so that stochastic rounding
    has the least variance. The choice if a gradient's shape is not known beforehand."""
    sends = _FITTED
    behavior = """Error falls to about a quarter with each bit, up to some 5 bits. Levels are fitted ahead: in sweeps
    to a mean of the steps before, in training at some steps (--refit). After a sudden change they are old."""
    related: ClassVar[tuple[str, ...]] = ("alq-n", "amq", "zipml", "nuqsgd")


@method
class AlqN(Alq):
    """ALQ-N: the same on the normalized variance."""

    name = "alq-n"
    parts = levels(grids.LeastVariance(weighted=False))
    summary = "like alq, with equal weight for every bucket"
    paper = f"{_ALQ}, Eq. 5 with equal weights"
    about = """alq with equal weights, as if all buckets had the same norm. If norms differ much, alq's weights follow
    the error that matters."""
    sends = _FITTED
    behavior = Alq.behavior
    related = ("alq", "alqg-n")


@method
class AlqG(Composed):
    """ALQG: gradient descent instead of coordinate descent."""

    name = "alqg"
    parts = levels(grids.LeastVarianceByGradient())
    summary = "like alq, by gradient descent"
    formula = _ALQ_FORMULA
    paper = f"{_ALQ}, Eq. 7"
    corrections = _ALQ_CORRECTIONS[:1] + _ALQ_CORRECTIONS[3:]
    about = """alq's objective minimized by gradient descent, as in the paper's comparison. It is slower than alq and
    finds the same levels or worse ones; it is here to repeat experiments."""
    sends = _FITTED
    behavior = "At 2 to 4 bits like alq; beyond that descent may stop early and leave error."
    related = ("alq", "alqg-n")


@method
class AlqGN(AlqG):
    """ALQG-N: gradient descent on the normalized variance."""

    name = "alqg-n"
    parts = levels(grids.LeastVarianceByGradient(weighted=False))
    summary = "like alq-n, by gradient descent"
    paper = f"{_ALQ}, Eq. 7 with equal weights"
    about = "alqg with equal weight for every bucket."
    sends = _FITTED
    behavior = "Like alqg: the levels of alq-n at 2 to 4 bits, or worse ones."
    related = ("alqg", "alq-n")


@method
class Amq(Composed):
    """AMQ: buckets weighted by their squared norm."""

    name = "amq"
    parts = levels(grids.FittedPowers())
    summary = "levels at powers of a fitted multiplier, buckets weighted by squared norm"
    formula = "Q(v) = ||v_b||_2 sign(v) l, l in {0, p^(m-2), ..., p, 1}; p minimizes E[(l+ - r)(r - l)]"
    paper = f"{_ALQ}, Eq. 8"
    corrections = (
        (
            "the objective has several minima: a grid of starts and a bracketed search find the least, the paper's "
            "gradient steps (method=gd) can end at 2.6 times it"
        ),
        "the law of |r| is p(r) + p(-r); the paper's formula holds for even densities only",
        "the paper's grid has no 0: that is zero=false here",
    )
    about = """Exponential levels whose base is fitted: one number instead of a set of levels, so fits are fast and hard
    to mislead."""
    sends = _FITTED
    behavior = "Near alq at equal measured bits; the data decides which of the two is better."
    related: ClassVar[tuple[str, ...]] = ("amq-n", "alq", "nuqsgd")


@method
class AmqN(Amq):
    """AMQ-N: equal weight for every bucket."""

    name = "amq-n"
    parts = levels(grids.FittedPowers(weighted=False))
    summary = "like amq, with equal weight for every bucket"
    paper = f"{_ALQ}, Eq. 8 with equal weights"
    about = "amq with equal weight for every bucket."
    sends = _FITTED
    behavior = "Near amq and alq-n at equal measured bits."
    related = ("amq", "alq-n")


@method
class Ecq(Composed):
    """Levels of least error at a given entropy: what scalar quantizers without bias can do at measured bits."""

    name = "ecq"
    parts = levels(grids.EntropySpaced(), BucketNorm("linf"))
    summary = "levels of least error at a given entropy, buckets scaled by their largest magnitude"
    formula = """Q(v) = max|v_b| sign(v) l, l in {0, (k d)^g, 1}, rounded stochastically; d and g minimize the error at
    an entropy of bits"""
    paper = "gtrace; entropy-constrained quantization: Chou, Lookabaugh and Gray, 1989, here without bias"
    about = """Other fitted levels minimize error at a number of levels; this one at bits as they are sent. Two numbers
    describe its levels, so that they cost nothing."""
    sends = _FITTED
    behavior = """A little less error than equal steps at equal bits, more so for heavy tails, and never more on the
    data that it was fitted to. bits=2.5 is as good as any."""
    related = ("qsgdinf", "zipml", "eden")


@method
class ZipMl(Composed):
    """Optimal levels by dynamic programming on the moment sketch."""

    name = "zipml"
    parts = levels(grids.Optimal(), BucketNorm("linf"))
    summary = "optimal levels for the data, buckets scaled by their largest magnitude"
    formula = "Q(v) = max|v_b| sign(v) l, rounded stochastically; l minimizes sum max|v_b|^2 (l+ - r)(r - l) exactly"
    paper = "Zhang et al., The ZipML Framework for Training Models with End-to-End Low Precision, 2017"
    corrections = (
        "the dynamic program runs over the bins of a one-pass sketch, which makes it fit for every training step",
        "without 0 as a level, and under a parametric law, the best of several local searches is used instead",
    )
    about = """Levels that are optimal for the data, not only locally: a dynamic program over the moment sketch takes
    milliseconds for any size. The reference for alq and amq."""
    sends = _FITTED
    behavior = """The least variance of any levels of this number under the largest magnitude as scale. Other scales
    (norm=l2) can be better still at equal bits."""
    related = ("alq", "amq", "qsgdinf")
