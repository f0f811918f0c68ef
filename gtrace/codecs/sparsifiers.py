"""Methods that send only some values: the largest, those above a threshold, or random ones."""

from __future__ import annotations

from typing import cast

from gtrace.codecs.engine import Composed, method
from gtrace.codecs.memory import UNITS, Residual
from gtrace.codecs.parts import Nearest, Parts
from gtrace.codecs.sparse import (
    ChosenValues,
    IndexValue,
    LargestOfChunks,
    NearPeaks,
    RandomChoice,
    SeedValue,
    SignedPositions,
    Threshold,
    Velocity,
    WarmingUp,
)

_POSITIONS = """The positions, as gaps in the shortest of several codes (coder=gaps) or in ceil(log2 n) bits each
(coder=fixed); then the values in float32, in the order of their positions."""
_TIES = "of equal magnitudes the first in the tensor are sent, so that their number is always the same"


@method
class TopK(Composed):
    """The k largest magnitudes exactly, the rest zero."""

    name = "topk"
    parts = Parts(grid=LargestOfChunks(), rounding=ChosenValues(), coder=IndexValue())
    summary = "the largest magnitudes exactly, the rest zero"
    formula = "Q(v_i) = v_i for the k largest |v_i|, else 0; k = max(1, round(ratio n))"
    paper = "Alistarh et al., The Convergence of Sparsified Gradient Methods, 2018"
    corrections = (_TIES,)
    about = """The largest magnitudes exactly. Without memory the rest never arrives, so it is mostly used as mem-sgd or
    ef:topk."""
    sends = _POSITIONS
    behavior = (
        "Of all choices of k values the least error. A value costs 32 bits and its position 5 to 10, so ratio 0.01 "
        "is about 0.4 bits per coordinate."
    )
    related = ("mem-sgd", "dgc", "randomk")


@method
class MemSgd(Composed):
    """Top-k with memory: what is not sent is added to the next gradient."""

    name = "mem-sgd"
    parts = Parts(memory=Residual(), grid=LargestOfChunks(), rounding=ChosenValues(), coder=IndexValue())
    summary = "the largest magnitudes exactly, the rest kept for the next step"
    formula = "p = v + e; Q(p_i) = p_i for the k largest |p_i|, else 0; e <- p - Q(p)"
    paper = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018"
    corrections = (_TIES, UNITS)
    about = """Top-k of gradient plus memory: what is not sent is added to the next gradient. The plain form of error
    feedback for sparse gradients; the same as ef:topk."""
    sends = _POSITIONS
    behavior = """Against one gradient its error is larger than topk's, because it sends old values too; over steps
    nothing is lost."""
    related = ("topk", "dgc", "ef")


@method
class Dropping(Composed):
    """A threshold on the magnitudes, from all of them or from a sample, with memory."""

    name = "dropping"
    parts = Parts(memory=Residual(), grid=Threshold(), rounding=ChosenValues(), coder=IndexValue())
    summary = "magnitudes from a threshold on exactly, the rest kept for the next step"
    formula = "p = v + e; Q(p_i) = p_i where |p_i| >= t, else 0; t = the ratio's quantile; e <- p - Q(p)"
    paper = "Aji and Heafield, Sparse Communication for Distributed Gradient Descent, 2017"
    corrections = (
        "values equal to the threshold are sent: otherwise a constant tensor would never be sent",
        "each tensor has a threshold of its own",
        "the threshold is exact by default; the paper's comes from a sample of 0.1% of the values (sample=0.001)",
        UNITS,
    )
    about = """A threshold on magnitudes with memory; with sample=0.001 the threshold comes from a sample, as the paper
    does to save the selection."""
    sends = _POSITIONS
    behavior = "With the exact threshold it sends the values of mem-sgd, and ties."
    related = ("mem-sgd", "topk")

    sample: float


@method
class RandomK(Composed):
    """k values drawn without replacement. Their positions follow from a seed of 32 bits in the payload."""

    name = "randomk"
    parts = Parts(grid=RandomChoice(), rounding=Nearest(), coder=SeedValue())
    summary = "values chosen at random, scaled up, the rest zero"
    formula = "Q(v_i) = (n/k) v_i for k random i, else 0; k = max(1, round(ratio n))"
    paper = "Stich, Cordonnier and Jaggi, Sparsified SGD with Memory, 2018 (rand_k)"
    corrections = (
        "the paper's rand_k is not scaled and needs memory: that is ef:randomk:scale=false",
        "positions are not sent: 32 bits of seed name them",
    )
    about = """The plainest sparsifier: values chosen at random, scaled up. Positions are free, as both sides draw them
    from a seed."""
    sends = "A seed (u32), then the chosen values in float32, in the order of their positions."
    behavior = "Relative variance n/k - 1, whatever the data: a floor that others must beat."
    related = ("topk", "mcgq", "ef")


@method
class AdaComp(Composed):
    """Signs of the values that would reach their bin's largest if the gradient came once more, with memory."""

    name = "adacomp"
    parts = Parts(memory=Residual(), grid=NearPeaks(), rounding=Nearest(), coder=SignedPositions())
    summary = "signs of what nears its bin's largest magnitude, one scale, the rest kept"
    formula = """p = v + e; Q(p_i) = s sign(p_i) where |p_i + v_i| >= the bin's largest |p|, else 0; s = mean of the
    bins' largest |p|; e <- p - Q(p)"""
    paper = "Chen et al., AdaComp: Adaptive Residual Gradient Compression for Data-Parallel Distributed Training, 2018"
    corrections = ("values that are zero are never sent, or a bin of zeros would be sent whole", UNITS)
    about = """A sparsifier that finds its own ratio: in each bin it sends what is near the bin's largest magnitude once
    the present gradient is added again. One scale a tensor makes values cheap; memory keeps the rest."""
    sends = "The scale in float32, then the positions, each with its sign, as gaps in the shortest of several codes."
    behavior = """The ratio follows the data: few values if gradients are heavy-tailed, many if they are flat. Smaller
    bins send more."""
    related = ("dropping", "mem-sgd", "ef")


@method
class Dgc(Composed):
    """Momentum correction, factor masking, gradient clipping and warm-up around the largest magnitudes.

    The optimizer behind it must have no momentum, because what arrives already includes it. The state holds
    ``velocity`` and ``residual`` (float32[n]: momentum, and its sum that was not sent) and ``step`` (int64[]).
    """

    name = "dgc"
    parts = Parts(memory=Velocity(), grid=WarmingUp(0.001), rounding=ChosenValues(), coder=IndexValue())
    summary = "the largest sums of momentum exactly, the rest kept; warm-up, clipping, factor masking"
    formula = "u <- beta u + clip(v); e <- e + u; send e_i for the k largest |e_i|, and set their e_i and u_i to 0"
    paper = "Lin et al., Deep Gradient Compression: Reducing the Communication Bandwidth for Distributed Training, 2018"
    corrections = (
        "the threshold is exact, not estimated from a sample",
        "clip limits one tensor's norm on one worker; the paper's limit is the model's, over the root of the workers",
    )
    about = """Top-k with everything that its paper adds for deep networks: momentum in the memory, clearing the
    momentum of what was sent, clipping, a ratio that falls over the first steps."""
    sends = _POSITIONS
    behavior = """Its error against one gradient may exceed 1, because what it sends is a sum of momentum over many
    steps; compare it by training."""
    related = ("mem-sgd", "topk", "momentum")

    warmup: int

    def ratio_at(self, step: int) -> float:
        """The share that is sent at a step.

        >>> [Dgc(warmup=8).ratio_at(step) for step in (0, 1, 2, 4, 6, 8)]
        [0.25, 0.25, 0.0625, 0.015625, 0.00390625, 0.001]
        """
        return cast("WarmingUp", self.parts.grid).ratio_at(step)
