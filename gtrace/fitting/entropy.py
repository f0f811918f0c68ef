"""Unbiased levels under a limit on their entropy, and the least error that any unbiased code could have at it."""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from gtrace.fitting.sparsity import lowest, root
from gtrace.kernels.symbols import spaced_entropy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from gtrace.sketch import MomentSketch

#: magnitudes at most
MOST = 128
#: the least first step, in units of the largest magnitude; levels with it have less than a thousandth of a bit
_SMALLEST, _LARGEST = 1.0 / (MOST - 1), 1.0 - 1e-6
#: exponents of the spacing: below 1 steps grow narrower towards the largest magnitude, above 1 wider
_EXPONENTS = (0.5, 2.5)
#: bits to which the limit is met
_CLOSE = 1e-3


def spaced_levels(step: float, exponent: float) -> NDArray[np.float64]:
    """Magnitudes (k step)^exponent below 1, and 1: float64, ascending from 0; at most ``MOST``.

    >>> spaced_levels(0.25, 2.0).tolist()
    [0.0, 0.0625, 0.25, 0.5625, 1.0]
    """
    inner = np.arange(min(MOST - 1, math.ceil(1 / step - 1e-9))) * step
    return np.append(inner[inner < 1 - step / 4] ** exponent, 1.0)


def entropy_levels(sketch: MomentSketch, bits: float) -> tuple[float, float]:
    """The spacing of least expected error whose symbols have at most this entropy.

    Among levels (k step)^exponent: for each exponent the step follows from the limit, and the error is searched over
    exponents. With exponent 1 these are the equal steps of QSGD, of any width.

    Args:
        sketch: of r = |v| / scale, with a norm.
        bits: limit on the entropy, bits a value.

    Returns:
        step and exponent for :func:`spaced_levels`; the finest step if even that has a smaller entropy.
    """

    bins = sketch.bins()

    @cache
    def step_of(exponent: float) -> float:
        def above(step: float) -> float:
            return spaced_entropy(bins, step, exponent, MOST) - bits

        if above(_SMALLEST) <= 0:
            return _SMALLEST
        if above(_LARGEST) >= 0:
            return _LARGEST
        found = root(above, _SMALLEST, _LARGEST, 1e-5)
        # Levels come and go as the step changes, so the entropy jumps a little.
        while above(found) > _CLOSE and found < _LARGEST:
            found = min(_LARGEST, found * (1 + 1e-3))
        return found

    @cache
    def error(exponent: float) -> float:
        return sketch.expected_error(spaced_levels(step_of(exponent), exponent))

    exponent = min((1.0, lowest(error, *_EXPONENTS, 0.02)[0]), key=error)
    return step_of(exponent), exponent


def least_error(sketch: MomentSketch, bits: float) -> float:
    """A lower bound on the expected squared error of any unbiased code of the values at this many bits each.

    With E[Y | X] = X the best linear estimate of X from Y has the error s^2 D / (s^2 + D), s^2 the mean square of X and
    D the mean squared error of Y, so Shannon's lower bound on rate and distortion holds for that error: bits >=
    h(X) - log2(2 pi e s^2 D / (s^2 + D)) / 2. h is the differential entropy of v / scale with a density that is even
    within each bin of the sketch; exact zeros have no density, and are taken to cost no bits. The bound holds for
    scalar and for vector codes of values that are drawn independently; it is 0 if it says nothing.

    Args:
        sketch: with a norm; buckets count by the error that they make, so they should have nearly one scale.
        bits: bits a value.

    Returns:
        the bound, in squared units of the gradient.
    """
    mass, width = sketch.sums[:, 0], sketch.upper - sketch.lower
    count, energy = float(mass.sum()), sketch.energy
    if not count or not energy or (width <= 0).any():
        return 0.0
    share = mass[mass > 0] / count
    # A receiver that learns for free which values are exact zeros has all bits for the others: those of all values.
    bits *= (count + sketch.zeros) / count
    # A sign is one more bit of entropy.
    entropy = 1 - float(share @ np.log2(share / width[mass > 0]))
    square = float(mass @ ((sketch.lower + sketch.upper) / 2) ** 2) / count
    shannon = 2.0 ** (2 * (entropy - bits)) / (2 * math.pi * math.e)
    if shannon >= square:
        return 0.0
    return energy * (shannon / (1 - shannon / square)) / square
