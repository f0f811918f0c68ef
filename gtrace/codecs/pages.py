"""What the page of a codec says beside what its class says: when to use it, its payload, what to expect, relatives."""

from __future__ import annotations

from typing import NamedTuple


class Page(NamedTuple):
    """Words about a codec.

    Attributes:
        about: what it is and when it is used.
        payload: its body, in the order of its bytes; the same envelope of 24 bytes comes before it.
        expect: how error and bits behave.
        see: related codecs and prefixes.
    """

    about: str
    payload: str
    expect: str
    see: tuple[str, ...]


_LEVELS = (
    "A float32 norm for each bucket; with tail=exact the short last bucket in float32; then the symbols, sign and "
    "level in one, by the coder. What a receiver must hold already, counted when it changes: {shared}."
)
_HUFFMAN = _LEVELS.format(shared="the Huffman code's lengths")
_FITTED = _LEVELS.format(shared="the fitted levels (float32) and the Huffman code's lengths")
_POSITIONS = (
    "The positions, as gaps in the shortest of several codes (coder=gaps) or in ceil(log2 n) bits each "
    "(coder=fixed); then the values in float32, in the order of their positions."
)
_SIGNS = "The scale in float32 (none with scale=none), then a bit a value, 1 for negative. Zeros only: an empty body."
_FALLS = (
    "Error falls to about a quarter with each bit, up to some 5 bits. Levels are fitted on another step, in "
    "training and sweeps the one before: on a sudden change of the gradient they are one step old."
)

PAGES: dict[str, Page] = {
    "adacomp": Page(
        "A sparsifier that finds its own ratio: in each bin it sends what is near the bin's largest magnitude "
        "once the present gradient is added again. One scale a tensor makes values cheap; memory keeps the rest.",
        "The scale in float32, then the positions, each with its sign, as gaps in the shortest of several codes.",
        "The ratio follows the data: few values where gradients are heavy-tailed, many where they are flat. "
        "Smaller bins send more.",
        (
            "dropping",
            "mem-sgd",
            "ef",
        ),
    ),
    "alq": Page(
        "Adaptive levels: where the levels lie is fitted to the law of the normalized coordinates, so that the "
        "variance of stochastic rounding is least. The choice where a gradient's shape is not known beforehand.",
        _FITTED,
        _FALLS,
        (
            "alq-n",
            "amq",
            "zipml",
            "nuqsgd",
        ),
    ),
    "alq-n": Page(
        "alq with every bucket counted alike, as if all had the same norm. Where norms differ much, alq's weights "
        "follow the error that matters.",
        _FITTED,
        _FALLS,
        (
            "alq",
            "alqg-n",
        ),
    ),
    "alqg": Page(
        "alq's objective minimized by gradient descent, as in the paper's comparison. It is slower than alq and "
        "ends at the same levels or at worse ones; it is here to repeat experiments.",
        _FITTED,
        "At 2 to 4 bits as alq; beyond that descent may stop early and leave error.",
        (
            "alq",
            "alqg-n",
        ),
    ),
    "alqg-n": Page(
        "alqg with every bucket counted alike.",
        _FITTED,
        "As alqg: the levels of alq-n at 2 to 4 bits, or worse ones.",
        (
            "alqg",
            "alq-n",
        ),
    ),
    "amq": Page(
        "Exponential levels whose base is fitted: one number instead of a set of levels, so fits are fast and "
        "hard to mislead.",
        _FITTED,
        "Near alq at equal measured bits, ahead of it or behind it by the data.",
        (
            "amq-n",
            "alq",
            "nuqsgd",
        ),
    ),
    "amq-n": Page(
        "amq with every bucket counted alike.",
        _FITTED,
        "Near amq and alq-n at equal measured bits.",
        (
            "amq",
            "alq-n",
        ),
    ),
    "fp16": Page(
        "What mixed-precision training sends: half the bits of float32.",
        "Two bytes a value, little-endian.",
        "Relative error up to 2^-11 a value; values below 3e-8 become zero, which loss scaling is meant to prevent.",
        (
            "bf16",
            "fp",
            "int8",
        ),
    ),
    "bf16": Page(
        "Half the bits of float32 at its whole range: nothing becomes zero, with three bits less of mantissa than "
        "float16.",
        "Two bytes a value, little-endian.",
        "Relative error up to 2^-8 a value, whatever the gradient's scale.",
        (
            "fp16",
            "fp",
        ),
    ),
    "dgc": Page(
        "Top-k with everything that its paper adds for deep networks: momentum in the memory, clearing the "
        "momentum of what was sent, clipping, a ratio that falls over the first steps.",
        _POSITIONS,
        "Its error against one gradient may exceed 1, because what it sends is a sum of momentum over many steps; "
        "compare it by training.",
        (
            "mem-sgd",
            "topk",
            "momentum",
        ),
    ),
    "dropping": Page(
        "A threshold on magnitudes with memory; with sample=0.001 the threshold comes from a sample, as in the "
        "paper, which saves the selection.",
        _POSITIONS,
        "With the exact threshold it sends what mem-sgd sends, and ties besides.",
        (
            "mem-sgd",
            "topk",
        ),
    ),
    "fp": Page(
        "Any small float format, as 8-bit training uses: 1-E-M bits with a power of two as scale. The scale is the one "
        "with the least squared error for each tensor; scale=max is the paper's rule. Without format= the split into "
        "exponent and mantissa is chosen for the data, too.",
        "The scale 2^-k in float32, or with block= a byte for each block; then codes of N bits. What a receiver "
        "must hold already: the exponent's width, where it was chosen.",
        "Relative error is even over the range of the format, so it suits lognormal data; nearest rounding is "
        "biased. At 2 and 3 bits most values become zero.",
        (
            "int8",
            "bf16",
            "natural",
        ),
    ),
    "none": Page(
        "The reference of every comparison: what a training without compression sends.",
        "Four bytes a value, little-endian.",
        "No error, 32 bits.",
        (
            "bf16",
            "fp16",
        ),
    ),
    "int8": Page(
        "What fast all-reduces do: eight bits, a scale for each block, rounding to nearest. No entropy code, no "
        "randomness.",
        "A float32 scale for each block, then a byte a value, two's complement.",
        "Error at most 1/254 of the block's largest magnitude. One outlier spoils its block and no other.",
        (
            "minmax",
            "fp",
            "qsgdinf",
        ),
    ),
    "mcgq": Page(
        "Samples coordinates in proportion to their magnitude and sends how often each was hit. The amount of "
        "samples sets the error; zeros come in runs and are counted.",
        "B_g and B_RLE (u32), with with_norm the norm (float32), then counts of B_g bits in two's complement, a 0 "
        "followed by the length of its run in B_RLE bits; most significant bit first. With another coder: the "
        "norm, then codes.",
        "Variance (||v||_1/N)^2 f (1 - f) a coordinate, f the fraction of its expected count. A heavy tail costs "
        "little, an even gradient many samples.",
        (
            "randomk",
            "prune",
            "accumulate",
        ),
    ),
    "minmax": Page(
        "Affine codes between the least and the greatest value, as TensorFlow's quantizer and MQGrad have them.",
        "The least and the greatest value in float32, then codes of `bits` bits; the envelope's flags name the bits.",
        "Error at most half a step anywhere. Few values far out make the step coarse, and zero is a level only by "
        "chance.",
        (
            "int8",
            "qsgdinf",
        ),
    ),
    "natural": Page(
        "Keeps sign and exponent and rounds the mantissa away at random: no scale, no parameter that needs tuning.",
        "The exponents' symbols by the coder, after an exact tail where asked for; nothing else.",
        "Relative variance at most 1/8, whatever the data; bits depend on how far exponents spread.",
        (
            "nuqsgd",
            "fp",
        ),
    ),
    "nuqsgd": Page(
        "Fixed exponential levels: fine near 0, where normalized coordinates are, with a bound on the variance. "
        "Nothing is fitted.",
        _HUFFMAN,
        "Better than qsgd at equal levels in large buckets; more bits add levels near 0 only, so error stops falling.",
        (
            "natural",
            "amq",
            "alq",
        ),
    ),
    "onebit": Page(
        "The first gradient quantizer in speech recognition: a bit a value, two means a bucket, and error "
        "feedback without which it does not converge.",
        "Two float32 a bucket, the upper mean and the lower, then a bit a value, 1 for the lower.",
        "A little more than one bit; a constant bucket arrives exactly.",
        (
            "ef-signsgd",
            "signsgd",
        ),
    ),
    "powersgd": Page(
        "The gradient as a matrix of low rank: two thin factors by one step of power iteration, begun where the "
        "last step ended, with error feedback. Linear layers suit it.",
        "The factors P and Q in float32, each averaged over the workers; vectors, and tensors that factors would not "
        "shorten, are sent as they are.",
        "Rows are the parameter's first dimension. Bits 32 rank (rows + columns) / n: they fall with size. Error is "
        "small where singular values fall fast; the first steps are worse, until the iteration has found its "
        "directions.",
        (
            "ef",
            "topk",
        ),
    ),
    "prune": Page(
        "For neural gradients: small values become a threshold or zero at random, so the tensor is sparse and the "
        "mean is right. The threshold is solved for the sparsity that is asked for, on each tensor itself.",
        "The threshold alpha in float32, then the prefix code: 0 for zero, 10 and a sign for alpha, 11 and a "
        "float32 for what is larger.",
        "Unbiased at any sparsity; variance rises steeply beyond 0.9. Large values cost 34 bits each.",
        (
            "topk-prune",
            "randomk",
        ),
    ),
    "topk-prune": Page(
        "The deterministic counterpart of prune: everything below a threshold is dropped.",
        "The threshold alpha in float32, then the prefix code of prune: 0 for zero, 11 and a float32 for a value.",
        "Less error than prune at the same sparsity, all of it bias, which averaging over workers does not shrink.",
        (
            "prune",
            "topk",
        ),
    ),
    "qsgd": Page(
        "The reference of unbiased quantizers: uniform levels times the l2 norm of a bucket, rounded at random.",
        _HUFFMAN,
        "Relative variance up to sqrt(bucket_size) / s, s = 2^(bits-1) - 1: take small buckets, or qsgdinf. Most "
        "symbols are zero, so its bits are few.",
        (
            "qsgdinf",
            "nuqsgd",
            "alq",
        ),
    ),
    "qsgdinf": Page(
        "qsgd divided by the largest magnitude instead: the grid covers what is there. The baseline that new "
        "codecs should beat at equal measured bits.",
        _HUFFMAN,
        "Error falls to about a quarter with each bit. Entropy coding makes use of the many zeros, so measured "
        "bits are below the nominal ones.",
        (
            "qsgd",
            "zipml",
            "terngrad",
        ),
    ),
    "randomk": Page(
        "The plainest sparsifier: values chosen at random, scaled up. Positions are free, as both sides draw them "
        "from a seed.",
        "A seed (u32), then the chosen values in float32, in the order of their positions.",
        "Relative variance n/k - 1, whatever the data: a floor that others must beat.",
        (
            "topk",
            "mcgq",
            "ef",
        ),
    ),
    "signsgd": Page(
        "One bit a value. Workers vote, so the server sends one bit back as well.",
        _SIGNS,
        "Relative error 1 - ||v||_1^2 / (n ||v||^2): 0.36 for a normal law, near 1 for a heavy tail. Biased, so "
        "many workers do not help as they do unbiased codecs.",
        (
            "signum",
            "ef-signsgd",
            "rotate",
        ),
    ),
    "signum": Page(
        "signsgd on the momentum, which smooths the signs over steps. The optimizer behind it must have no momentum.",
        _SIGNS,
        "It encodes the momentum: against one gradient its error says little; compare it by training.",
        (
            "signsgd",
            "momentum",
        ),
    ),
    "ef-signsgd": Page(
        "signsgd with the memory that makes it converge.",
        _SIGNS,
        "The error of one step is signsgd's or worse; over steps what was lost is sent.",
        (
            "signsgd",
            "ef",
            "onebit",
        ),
    ),
    "terngrad": Page(
        "Three values, -1, 0 and 1 times the largest magnitude, rounded at random; clip=2.5 is the paper's setting.",
        _HUFFMAN,
        "As qsgdinf at 2 bits: one outlier makes nearly all values zero, and the variance large.",
        (
            "qsgdinf",
            "natural",
        ),
    ),
    "topk": Page(
        "The largest magnitudes exactly. Without memory the rest never arrives, so it is mostly used as mem-sgd "
        "or ef:topk.",
        _POSITIONS,
        "Of all choices of k values the least error. A value costs 32 bits and its position 5 to 10, so ratio "
        "0.01 is about 0.4 bits per coordinate.",
        (
            "mem-sgd",
            "dgc",
            "randomk",
        ),
    ),
    "mem-sgd": Page(
        "Top-k of gradient and memory: what is not sent is added to the next gradient. The plain form of error "
        "feedback for sparse gradients; the same as ef:topk.",
        _POSITIONS,
        "Against one gradient its error is larger than topk's, because it sends old values too; over steps "
        "nothing is lost.",
        (
            "topk",
            "dgc",
            "ef",
        ),
    ),
    "zipml": Page(
        "Levels that are optimal for the data, not only locally: a dynamic program over the moment sketch takes "
        "milliseconds for any size. What alq and amq are measured against.",
        _FITTED,
        "The least variance of any levels of this number under the largest magnitude as scale. Other scales "
        "(norm=l2) can be better still at equal bits.",
        (
            "alq",
            "amq",
            "qsgdinf",
        ),
    ),
    "accumulate": Page(
        "A memory that is cleared where something was sent, instead of keeping the difference.",
        "The payload of the codec inside.",
        "Not unbiased over time: what a coarse value got wrong is forgotten.",
        (
            "ef",
            "mcgq",
        ),
    ),
    "ef": Page(
        "The memory that makes biased codecs converge: what this step lost is added to the next gradient.",
        "The payload of the codec inside.",
        "The error of one step is that of gradient and memory together, larger than without; what counts is that "
        "it does not add up.",
        (
            "mem-sgd",
            "accumulate",
            "momentum",
        ),
    ),
    "momentum": Page(
        "Momentum where the gradient is made, as Signum and DGC have it.",
        "The payload of the codec inside.",
        "It encodes the momentum: against one gradient its error says little; compare it by training.",
        (
            "signum",
            "dgc",
        ),
    ),
    "rotate": Page(
        "Spreads outliers over a block, after which values are nearly normal and coarse grids and signs fit.",
        "The rotation's seed (u32) where one is needed, then the body of the payload of the codec inside.",
        "Helps codecs whose scale an outlier spoils; hurts sparsifiers, as nothing is sparse afterwards.",
        (
            "signsgd",
            "qsgdinf",
            "minmax",
        ),
    ),
}
