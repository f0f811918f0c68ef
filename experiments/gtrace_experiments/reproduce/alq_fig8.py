"""Adaptive levels, Figure 8: how fast the updates of levels converge, and to what."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import gtrace
from gtrace.fitting import alq_levels, amq_levels, amq_multiplier, expected_variance, moment_mixture
from gtrace_experiments.reproduce._alq import GRID_NOTE, PAPER, plain_path, spec
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    from gtrace.distributions import TruncatedNormalMixture
    from gtrace.fitting.levels import Method

SWEEPS, LONG = 25, 1000
STARTS = ("exponential", "uniform")
MULTIPLIERS = (0.5, 0.2)
#: settled: within this part of where a long descent ends
NEAR = 0.01


def histories(law: TruncatedNormalMixture, bits: int, sweeps: int) -> dict[str, list[float]]:
    """The objective after 0, 1, ... sweeps or steps of each method and start."""
    found = {}
    methods: tuple[tuple[Method, str], ...] = (("cd", "ALQ"), ("gd", "ALQG"))
    for method, name in methods:
        for start in STARTS:
            objectives = alq_levels(law, bits, False, method=method, start=start, history=True, sweeps=sweeps)[1]
            found[f"{name}, {start} start"] = [float(value) for value in objectives]
    for p in MULTIPLIERS:
        # Its steps come without a history; in the long run only where they end counts.
        steps = range(sweeps + 1) if sweeps <= SWEEPS else (0, sweeps)
        grids = [
            amq_levels(amq_multiplier(law, bits, False, method="gd", start=p, steps=k), bits, False) for k in steps
        ]
        found[f"AMQ, start {p}"] = [expected_variance(law, grid, False) for grid in grids]
    return found


def settled(objectives: list[float], end: float) -> int | None:
    """After how many sweeps the objective is, and stays, within 1 % of ``end``; None for never."""
    far = [k for k, value in enumerate(objectives) if value > end * (1 + NEAR)]
    first = far[-1] + 1 if far else 0
    return first if first < len(objectives) else None


def run(context: Context) -> Outcome:
    """Both objectives at 3 bits, and sweeps at more."""
    context.say("training")
    path = plain_path(context)
    last = path.gradients(path.at[-1])[0]
    needs = gtrace.codec(spec("ALQ", law="truncnorm")).needs
    assert needs is not None
    moments = gtrace.MomentSketch.from_spec(last, needs).bucket_moments
    assert moments is not None
    long = 60 if context.quick else LONG
    laws = {"variance": moment_mixture(moments), "normalized variance": moment_mixture(moments, mean_only=True)}
    panels, rows, falls = [], [], True
    ends: dict[str, list[list[float]]] = {"ALQ": [], "AMQ": []}
    sweeps_at: dict[int, list[int | None]] = {}
    for title, law in laws.items():
        context.say(title)
        short, far = histories(law, 3, SWEEPS), histories(law, 3, long)
        best = expected_variance(law, alq_levels(law, 3, False), False)
        for label, objectives in short.items():
            end = far[label][-1]
            after = settled(far[label], end) if len(far[label]) > 2 else None
            rows.append((title, label, objectives[0] / best, objectives[-1] / best, end / best, after))
        descents = [short[f"ALQ, {start} start"] for start in STARTS]
        # Rounding may move an objective that has settled in its last digits.
        falls &= all(b <= a * (1 + 1e-9) for values in descents for a, b in pairwise(values))
        for name, found in ends.items():
            found.append([values[-1] / best for label, values in short.items() if label.startswith(f"{name},")])
        curves = tuple(
            Curve(label, tuple(range(len(values))), tuple(values), form="plain") for label, values in short.items()
        )
        panels.append(Panel(curves, f"Expected {title}", "sweeps or steps", "objective", log_y=True))
        for bits in (3,) if context.quick else (3, 4, 5):
            for start in STARTS:
                objectives = alq_levels(law, bits, False, method="cd", start=start, history=True, sweeps=long)[
                    1
                ].tolist()
                sweeps_at.setdefault(bits, []).append(settled(objectives, objectives[-1]))
    counts = {bits: [long if k is None else k for k in found] for bits, found in sweeps_at.items()}
    others = [k for bits, found in counts.items() if bits > 3 for k in found]
    return Outcome(
        checks=(
            Check(
                "coordinate descent lowers the objective at every sweep",
                f"no sweep of the first {SWEEPS} raises it, under both objectives and from both starts",
                "none" if falls else "some do",
                falls,
            ),
            Check(
                "it converges in fewer than 10 sweeps, at 3 bits",
                f"after fewer than 10 it stays within {NEAR:.0%} of where {long} sweeps end",
                ", ".join(str(k) for k in counts[3]) + " sweeps",
                max(counts[3]) < 10,
            ),
            Check(
                "the same at 4 and 5 bits",
                f"after fewer than 10 it stays within {NEAR:.0%} of where {long} sweeps end",
                "; ".join(
                    f"{bits} bits: {', '.join(map(str, found))} sweeps" for bits, found in counts.items() if bits > 3
                )
                or "not run",
                bool(others) and max(others) < 10,
            ),
            *(
                Check(
                    f"the start decides how good {name}'s levels are",
                    f"after {SWEEPS} sweeps or steps its two starts are over {NEAR:.0%} apart, under both objectives",
                    "; ".join(f"{a:.3f} and {b:.3f} times the optimum" for a, b in found),
                    all(abs(a - b) > NEAR * min(a, b) for a, b in found),
                )
                for name, found in ends.items()
            ),
        ),
        tables=(
            Table(
                "Objective over that of the best levels, 3 bits",
                ("objective", "method", "at the start", f"after {SWEEPS}", f"after {long}", f"within {NEAR:.0%} after"),
                tuple(rows),
                f"Within {NEAR:.0%} of where {long} sweeps or steps end.",
            ),
        ),
        charts=(
            Chart(
                tuple(panels),
                "The objective over coordinate descent's sweeps (ALQ), gradient steps (ALQG) and gradient steps of the "
                "multiplier (AMQ), at 3 bits. The lower a curve ends, the better its levels.",
            ),
        ),
        data=path.data,
        notes=(
            GRID_NOTE,
            "The law is the paper's: truncated normals with the means and deviations of the last gradient's buckets, "
            "one for all (normalized) or up to 20 weighted by the buckets' squared norms.",
            "ALQG has a rate for each level that adapts, AMQ the rate 0.1: the paper leaves rates open. At this rate "
            "25 steps do not bring AMQ's multiplier to a minimum.",
        ),
    )


EXPERIMENT = Experiment(
    name="alq-fig8",
    title="how fast levels converge",
    paper=PAPER,
    where="Figure 8",
    claim=(
        "Coordinate descent converges in fewer than 10 iterations. The objective is not convex: different starts lead "
        "to different levels, some of them not the best."
    ),
    recipe=(
        "The last gradient of the training of alq-fig5. The objective after each sweep, for the paper's methods and "
        "starts at 3 bits; at 4 and 5 bits, how many sweeps coordinate descent takes."
    ),
    run=run,
)
