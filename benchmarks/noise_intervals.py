"""How often the interval of a noise ratio holds the true ratio, on series whose neighboring steps are correlated.

Run with ``python benchmarks/noise_intervals.py [SERIES]``, 2000 series of each kind unless given (2 minutes);
docs/noise.md holds its output. What a codec adds and the gradient noise are exponentials of autoregressions of order
one with a standard deviation of ``spread``: either of them varies, both, or also their ratio with the noise. Each line
has the worst of these kinds and spreads.
"""

import itertools
import sys

import numpy as np

from gtrace.report.statistics import ratio_of_sums

STEPS, CORRELATIONS, SPREADS = (20, 30, 50), (0.0, 0.3, 0.45, 0.6), (0.3, 0.8)
KINDS = {
    "both vary": lambda added, noise: (added, noise),
    "the noise varies": lambda added, noise: (np.ones_like(added), noise),
    "the codec's variance varies": lambda added, noise: (added, np.ones_like(noise)),
    "the ratio varies with the noise": lambda added, noise: (added * noise, noise),
}


def autoregressive(random, series, steps, correlation):
    """float64[series, steps] of variance 1."""
    shocks = random.standard_normal((series, steps))
    out = shocks.copy()
    for k in range(1, steps):
        out[:, k] = correlation * out[:, k - 1] + np.sqrt(1 - correlation**2) * shocks[:, k]
    return out


def measured(kind, steps, correlation, spread, series):
    """Parts of the series: with an interval, of these with the truth inside it and above it; and the median upper end.

    The true ratio is 1.
    """
    random = np.random.default_rng([steps, int(100 * correlation), int(100 * spread)])
    pair = [autoregressive(random, series, steps, correlation) for _ in range(2)]
    added, noise = KINDS[kind](*(np.exp(spread * x - spread**2 / 2) for x in pair))
    found = [ratio_of_sums(*rows) for rows in zip(added, noise, strict=True)]
    low, high = np.array([(one.low, one.high) for one in found if one.known]).T
    return len(low) / series, np.mean((low <= 1) & (high >= 1)), np.mean(high < 1), np.median(high)


def main():
    series = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    print("| steps | neighbor correlation | has an interval | truth inside | truth above | upper end over truth |")
    print("|---|---|---|---|---|---|")
    for steps, correlation in itertools.product(STEPS, CORRELATIONS):
        lines = [measured(k, steps, correlation, spread, series) for k, spread in itertools.product(KINDS, SPREADS)]
        known, inside, above, high = np.transpose(lines)
        print(
            f"| {steps} | {correlation} | {known.min():.3f} | {inside.min():.3f} | {above.max():.3f} "
            f"| {high.min():.2f} to {high.max():.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
