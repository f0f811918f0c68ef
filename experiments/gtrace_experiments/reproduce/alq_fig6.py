"""Adaptive levels, Figure 6: where the levels lie at the end of a training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gtrace
from gtrace.codecs import level_grid
from gtrace_experiments.reproduce._alq import ADAPTIVE, GRID_NOTE, METHODS, PAPER, paper_law, plain_path, spec
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FIXED = ("QSGDinf", "NUQSGD")


def fitted_levels(values: NDArray[np.float32], text: str) -> tuple[float, ...]:
    """Magnitudes that a level codec fits to a gradient, ascending, the last one 1."""
    codec = gtrace.codec(text)
    grid = level_grid(codec)
    assert grid is not None
    assert codec.needs is not None
    state = codec.fit(codec.init(values.size), gtrace.MomentSketch.from_spec(values, codec.needs), 0)
    return tuple(float(level) for level in grid.levels(state))


def run(context: Context) -> Outcome:
    """Levels on the last gradient."""
    context.say("training")
    path = plain_path(context)
    last = path.gradients(path.at[-1])[0]
    found = {
        "the gradients": {name: fitted_levels(last, spec(name)) for name in (*ADAPTIVE, *FIXED)},
        "truncated normals, as in the paper": {
            name: fitted_levels(last, spec(name, law=paper_law(name) if name in ADAPTIVE else ""))
            for name in (*ADAPTIVE, *FIXED)
        },
    }
    checks = []
    for law, levels in found.items():
        checks.append(
            Check(
                f"adaptive levels crowd towards zero (fitted to {law})",
                "the largest of each adaptive method's inner levels, and the least, lie below NUQSGD's and QSGDinf's",
                ", ".join(f"{name} {levels[name][0]:.2g} to {levels[name][-2]:.2g}" for name in levels),
                all(levels[name][k] < min(levels[fixed][k] for fixed in FIXED) for name in ADAPTIVE for k in (0, -2)),
            )
        )
    names = ("first", "second", "third")
    return Outcome(
        checks=tuple(checks),
        tables=(
            Table(
                "Magnitudes at the end of the training",
                ("method", "fitted to", *names, "last"),
                tuple(
                    (name, "-" if name in FIXED else law, *levels[name])
                    for law, levels in found.items()
                    for name in levels
                    if name not in FIXED or law == "the gradients"
                ),
                "In units of a bucket's l2 norm; QSGDinf's of its largest magnitude.",
            ),
        ),
        charts=(
            Chart(
                tuple(
                    Panel(
                        tuple(Curve(name, names, levels[name][:-1], method=METHODS[name]) for name in levels),
                        f"Fitted to {law}",
                        "level",
                        "magnitude",
                        log_y=True,
                        bars=True,
                    )
                    for law, levels in found.items()
                ),
                "Inner levels at the end of the training; the last one is 1 for all. Short bars are levels near zero.",
            ),
        ),
        data=path.data,
        notes=(GRID_NOTE,),
    )


EXPERIMENT = Experiment(
    name="alq-fig6",
    title="adaptive levels crowd towards zero",
    paper=PAPER,
    where="Figure 6",
    claim="At the end of training, levels of the adaptive methods are more concentrated near zero than fixed ones.",
    recipe=(
        "The training of alq-fig5; 3 bits, buckets of 8192 across layers. Levels are fitted to the gradient of the "
        "last step, and to the truncated normals that the paper takes in its place."
    ),
    run=run,
)
