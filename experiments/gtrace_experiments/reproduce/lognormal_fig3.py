"""Near-lognormal gradients, Figure 3a: the expected relative error in closed form against a simulation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from gtrace.codecs.fp import FloatFormat
from gtrace_experiments.reproduce._lognormal import PAPER
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    from numpy.typing import NDArray

BITS = 8
WIDTHS = (2, 3, 4, 5, 6)
SIGMAS = (1.0, 3.0, 5.0)
DRAWS = 10_000
#: "good agreement": within this part; and how many standard errors of the simulation chance may make
AGREES, CHANCE = 0.1, 4.0


def printed(mantissa: int, exponent: int, sigma: float) -> float:
    """The paper's Eq. (4) as printed; infinite without mantissa bits."""
    from scipy.special import erf, log_ndtr, ndtr

    if mantissa == 0:
        return math.inf
    largest = 2.0 ** (exponent - 1)
    ln2 = math.log(2.0)
    inside = (2 * ndtr(largest / sigma) - 1) / (8 * ln2 * (2**mantissa - 1))
    # 2^(Emax - 1) exp(...) (erf(...) - 1), the two factors being out of range on their own.
    beyond = log_ndtr(-sigma * ln2 - largest / sigma) + largest * ln2 + (sigma * ln2) ** 2 / 2
    rest = 1.5 - 0.5 * erf(largest / (math.sqrt(2) * sigma)) - ndtr(largest / sigma)
    return float(inside - math.exp(beyond) + rest)


def rounded_as_printed(x: NDArray[np.float64], mantissa: int, exponent: int) -> NDArray[np.float64]:
    """The paper's quantizer, Eq. (2): mantissas in steps of 2^-mantissa, 2^Emax above the range, 0 below it."""
    largest = 2.0 ** (exponent - 1)
    octave = np.floor(np.log2(x))
    step = 2.0 ** (octave - mantissa)
    inside = np.round(x / step) * step
    out: NDArray[np.float64] = np.where(octave >= largest, 2.0**largest, np.where(octave < -largest, 0.0, inside))
    return out


def run(context: Context) -> Outcome:
    """Both quantizers, both closed forms, one simulation."""
    random = np.random.default_rng(context.seed)
    rows, panels = [], []
    off, misses = [], []
    for sigma in SIGMAS:
        x = np.exp2(random.normal(0.0, sigma, DRAWS))
        found: dict[str, list[float]] = {
            "Eq. (4) as printed": [],
            "simulated, the paper's quantizer": [],
            "exact sum (gtrace's)": [],
            "simulated, formats 1-E-M": [],
        }
        for width in WIDTHS:
            form = FloatFormat(width, BITS - 1 - width)
            theirs = np.abs(rounded_as_printed(x, form.mantissa, width) - x) / x
            own = np.abs(form.round(x.astype(np.float32)).astype(np.float64) - x) / x
            closed, exact = printed(form.mantissa, width, sigma), form.expected_relative_error(0.0, sigma)
            error = float(own.std() / math.sqrt(DRAWS))
            misses.append(abs(own.mean() - exact) / error)
            off.append((closed / theirs.mean() - 1, str(form), sigma))
            for values, value in zip(
                found.values(), (closed, float(theirs.mean()), exact, float(own.mean())), strict=True
            ):
                values.append(value)
            rows.append((sigma, str(form), closed, float(theirs.mean()), exact, float(own.mean()), error))
        panels.append(
            Panel(
                tuple(
                    Curve(label, WIDTHS, tuple(values), form="line" if k % 2 == 0 else "points")
                    for k, (label, values) in enumerate(found.items())
                ),
                f"sigma {sigma:g}",
                "exponent bits",
                "mean relative error",
                log_y=True,
            )
        )
    largest = max(off, key=lambda item: abs(item[0]))
    agree = sum(bool(abs(value) <= AGREES) for value, _, _ in off)
    return Outcome(
        checks=(
            Check(
                "Eq. (4) agrees with a simulation of its quantizer",
                f"within {AGREES:.0%} for every exponent width from {WIDTHS[0]} to {WIDTHS[-1]} and every sigma",
                f"{agree} of {len(off)}; furthest off {largest[0]:+.0%} ({largest[1]}, sigma {largest[2]:g})",
                agree == len(off),
            ),
            Check(
                "the exact sum agrees with a simulation of the formats 1-E-M",
                f"within {CHANCE:g} standard errors of {DRAWS:,} draws, everywhere",
                f"at most {max(misses):.1f} standard errors off",
                bool(max(misses) <= CHANCE),
            ),
        ),
        tables=(
            Table(
                f"Mean relative error of {BITS}-bit formats, {DRAWS:,} draws",
                (
                    "sigma of log2",
                    "format",
                    "Eq. (4) as printed",
                    "simulated, its quantizer",
                    "exact sum",
                    "simulated, 1-E-M",
                    "standard error",
                ),
                tuple(rows),
            ),
        ),
        charts=(
            Chart(
                tuple(panels),
                "Mean relative error of 8-bit formats by exponent width. Lines are formulas, points simulations of the "
                "quantizer that each formula is for.",
                columns=3,
            ),
        ),
        data="10,000 draws of a lognormal law for each sigma",
        notes=(
            "Eq. (4) replaces the mean of 1 / x over a cell by a quotient with 2^M - 1: infinite for M = 0, and too "
            "high for few mantissa bits. The exact sum over rounding cells is what gtrace chooses formats by.",
            "The two quantizers differ: formats 1-E-M have subnormals and end at (2 - 2^-M) 2^Emax, the paper's has "
            "neither.",
        ),
    )


EXPERIMENT = Experiment(
    name="lognormal-fig3",
    title="expected error of a float format",
    paper=PAPER,
    where="Figure 3a",
    claim="The closed form of the expected relative error, Eq. (4), is in good agreement with simulations.",
    recipe="As in the paper: 10,000 lognormal values for sigma 1, 3 and 5, rounded to all 8-bit formats.",
    run=run,
)
