"""ZipML, Figure 8: naive and double sampling, uniform and optimal levels, from 3 to 6 bits."""

from __future__ import annotations

import math
from statistics import fmean

from gtrace_experiments.reproduce._zipml import CLOSE, PAPER, Runs, curve, loss, losses_table, percent, trained
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Experiment, Outcome, Panel, Table

DATA = {
    "synthetic-10": "synthetic 10",
    "synthetic-100": "synthetic 100",
    "heavy-8": "long tails, 8 (cadata's shape)",
    "heavy-12x6000": "long tails, 12 (cpusmall's shape)",
}
BITS = (3, 4, 5, 6)
KINDS = {
    "naive, uniform": "naive:bits={}",
    "double, uniform": "double:bits={}",
    "double, optimal": "double:bits={},levels=optimal",
}


def run(context: Context) -> Outcome:
    """All data sets, bits and kinds."""
    epochs, seeds = (2, 1) if context.quick else (20, 3)
    found: dict[str, Runs] = {}
    specs = [form.format(bits) for bits in BITS for form in KINDS.values()]
    for name, what in DATA.items():
        context.say(what)
        data = f"{name.partition('x')[0]}x500" if context.quick else name
        found[name] = trained("linear", specs, data=data, batch_size=16, epochs=epochs, seed=context.seed, seeds=seeds)

    def losses(name: str, bits: int) -> list[float]:
        return [loss(found[name][form.format(bits)]) for form in KINDS.values()]

    optimum = {name: fmean(one.optimum for one in runs["none"]) for name, runs in found.items()}
    ordered = {
        name: [(naive, uniform, best) for naive, uniform, best in (losses(name, b) for b in (3, 4))] for name in DATA
    }
    main = "synthetic-100"
    above = {name: loss(runs["double:bits=6,levels=optimal"]) / optimum[name] - 1 for name, runs in found.items()}
    variance = {
        (name, bits, kind): fmean(one.variance for one in runs[KINDS[kind].format(bits)])
        for name, runs in found.items()
        for bits in BITS
        for kind in ("double, uniform", "double, optimal")
    }
    best = all(
        variance[name, bits, "double, optimal"] <= variance[name, bits, "double, uniform"]
        for name in DATA
        for bits in BITS
    )
    return Outcome(
        checks=(
            Check(
                "at equal bits double sampling beats naive rounding, and optimal levels uniform ones",
                "final losses on synthetic 100 at 3 and 4 bits: naive > double with uniform levels >= with optimal "
                "ones",
                "; ".join(
                    f"{bits} bits: " + ", ".join(f"{value:.4g}" for value in row)
                    for bits, row in zip((3, 4), ordered[main], strict=True)
                ),
                all(naive > uniform >= optimal for naive, uniform, optimal in ordered[main]),
            ),
            Check(
                "the same on long-tailed features",
                "final losses at 3 and 4 bits in the same order on both sets",
                "; ".join(
                    f"{DATA[name]}, {bits} bits: " + ", ".join(f"{value:.4g}" for value in row)
                    for name in DATA
                    if name.startswith("heavy")
                    for bits, row in zip((3, 4), ordered[name], strict=True)
                ),
                all(
                    naive > uniform >= optimal
                    for name in DATA
                    if name.startswith("heavy")
                    for naive, uniform, optimal in ordered[name]
                ),
            ),
            Check(
                "6 bits reach the solution of the full precision",
                f"double sampling with optimal levels of 6 bits ends within {100 * CLOSE:g} % of the optimum, "
                "everywhere",
                "; ".join(f"{DATA[name]}: {percent(part)}" for name, part in above.items()),
                all(math.isfinite(part) and part <= CLOSE for part in above.values()),
            ),
            Check(
                "optimal levels have the least variance",
                "the variance with optimal levels is at most that with uniform ones, on every set and at all bits",
                f"{sum(1 for _ in DATA) * len(BITS)} comparisons; at 3 bits on long tails, 8: "
                f"{variance['heavy-8', 3, 'double, optimal']:.3g} against "
                f"{variance['heavy-8', 3, 'double, uniform']:.3g}",
                best,
            ),
        ),
        tables=(
            losses_table("Final losses", {what: found[name] for name, what in DATA.items()}, BITS, KINDS),
            Table(
                "Variance of one quantization of a value, in variances of its feature: uniform / optimal",
                ("data", *(f"{bits} bits" for bits in BITS)),
                tuple(
                    (
                        what,
                        *(
                            f"{variance[name, bits, 'double, uniform']:.3g} / "
                            f"{variance[name, bits, 'double, optimal']:.3g}"
                            for bits in BITS
                        ),
                    )
                    for name, what in DATA.items()
                ),
            ),
        ),
        charts=(
            Chart(
                tuple(
                    Panel(
                        (
                            curve(found[name]["none"], "full precision"),
                            *(curve(found[name][form.format(3)], f"3 bits, {kind}") for kind, form in KINDS.items()),
                        ),
                        what,
                        "epoch",
                        "training loss",
                        log_y=True,
                    )
                    for name, what in DATA.items()
                ),
                "Samples of 3 bits. Naive rounding ends at another model; optimal levels are less noisy than uniform "
                "ones.",
            ),
        ),
        data="made: standard normal features, and standardised lognormal ones in the place of cadata and cpusmall",
        notes=(
            "Losses above 1,000 are not drawn: with 3 bits, naive rounding and uniform levels blow up on the first "
            "set of long tails until the step has fallen, and come back.",
            "cadata and cpusmall are in no package at hand. With their long tails naive rounding and uniform levels "
            "are worse than on normal features; the made long-tailed sets have that in common with them and nothing "
            "else.",
        ),
    )


EXPERIMENT = Experiment(
    name="zipml-fig8",
    title="uniform and optimal levels at equal bits",
    paper=PAPER,
    where="Figure 8",
    claim="With the same number of bits optimal levels always converge faster than uniform ones; more features need "
    "more bits.",
    recipe="Linear regression, samples alone quantized per feature, batches of 16, 20 epochs, 3 seeds.",
    run=run,
)
