"""MQGrad, Tables 1 to 3: accuracy after some hours, and what quantization itself costs."""

from __future__ import annotations

import numpy as np

from gtrace_experiments.reproduce import _mqgrad as mqgrad
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

#: the paper's hours, as parts of the longest run
_HOURS = (5, 15, 30, 40)
_POLICIES = ("fixed 2 bits", "fixed 4 bits", "fixed 8 bits", "adaptive", "MQGrad")
_PUBLISHED = {
    "12 workers": ((50.8, 55.9), (41.9, 57.5, 66.7), (35.7, 55.6, 60.8, 68.1), (49.4, 60.1, 65.3), (54.7, 65.6, 67.7)),
    "18 workers": ((51.5, 58.5), (45.4, 57.9, 68.4), (42.1, 58.2, 65.9, 68.2), (43.6, 57.3, 63.4), (51.5, 62.0, 68.2)),
}
_SHARES = {"12 workers": (13.3, 8.0, 4.44, 8.13, 7.41), "18 workers": (11.4, 7.27, 4.21, 5.84, 4.11)}


def run(context: Context) -> Outcome:
    """Accuracy at the paper's parts of the longest run, and the time of coding at each width."""
    found = mqgrad.measure(context)
    longest = float(np.mean([one.sim_seconds[-1] for one in found.runs["fixed 8 bits"]]))
    until = [longest * hours / _HOURS[-1] for hours in _HOURS]
    accuracy = {name: [_accuracy(found, name, seconds) for seconds in until] for name in found.runs}
    final = {name: 100 * float(np.mean([one.final_accuracy for one in runs])) for name, runs in found.runs.items()}
    share = {name: 100 * found.codec_share[name] for name in found.runs}
    spent = {name: 1000 * found.codec_seconds[name] for name in found.runs}
    first = {name: values[0] for name, values in accuracy.items() if values[0] is not None and name in _POLICIES}
    fixed = ("fixed 2 bits", "fixed 4 bits", "fixed 8 bits")
    return Outcome(
        checks=(
            Check(
                "after an eighth of the time MQGrad has the highest accuracy (12 workers)",
                "the highest of the paper's five, means of seeds",
                ", ".join(f"{name} {value:.1f} %" for name, value in first.items()),
                bool(first) and max(first, key=lambda name: first[name]) == "MQGrad",
            ),
            Check(
                "2 bits end worst, MQGrad ends near 8 bits",
                "of the five, 2 bits have the lowest final accuracy, and MQGrad's is at most 2 points below 8 bits'",
                ", ".join(f"{name} {final[name]:.1f} %" for name in _POLICIES),
                min(_POLICIES, key=lambda name: final[name]) == "fixed 2 bits"
                and final["MQGrad"] >= final["fixed 8 bits"] - 2,
            ),
            Check(
                "quantization takes a small part of the time, and less of it the more bits there are",
                "the share over 10 MB/s falls from 2 to 4 to 8 bits and is below 15 % at each",
                ", ".join(f"{name} {share[name]:.1f} %" for name in fixed),
                15 > share[fixed[0]] > share[fixed[1]] > share[fixed[2]],
            ),
        ),
        tables=(
            Table(
                "Test accuracy (%) after parts of the time of fixed 8 bits",
                ("policy", *(f"{hours / _HOURS[-1]:.1%}" for hours in _HOURS), "at the end"),
                tuple((name, *values, final[name]) for name, values in accuracy.items()),
                "At the last test up to then, means of seeds. Without a value: the run was over, or not tested yet.",
            ),
            Table(
                "Coding",
                ("policy", "ms a step", "share of a step over 10 MB/s (%)"),
                tuple((name, spent[name], share[name]) for name in found.runs),
                "CPU time of one worker's encoding, the server's decoding of all and encoding of the average; a step "
                "has the measured computing of one worker beside it, and the bytes of all over one link of 10 MB/s.",
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(
                        tuple(
                            Curve(
                                name,
                                tuple(f"{hours / _HOURS[-1]:.1%}" for hours in _HOURS),
                                tuple(float("nan") if value is None else value for value in accuracy[name]),
                            )
                            for name in found.runs
                        ),
                        "Test accuracy",
                        "part of the time of fixed 8 bits",
                        "accuracy (%)",
                        bars=True,
                    ),
                ),
                "Accuracy at the times of Tables 1 and 2. A missing bar: the run was over before.",
            ),
            Chart(
                (
                    Panel(
                        (
                            Curve("measured", _POLICIES, tuple(share[name] for name in _POLICIES)),
                            *(Curve(f"paper, {name}", _POLICIES, values) for name, values in _SHARES.items()),
                        ),
                        "Share of the time for quantization",
                        "",
                        "percent",
                        bars=True,
                    ),
                ),
                "The share of Table 3 beside the paper's: coding costs nearly the same at every width, so its share "
                "falls where more bits take more time to travel.",
            ),
        ),
        data=found.data,
        notes=(
            "Shares depend on the processor, the network and the size of the model more than on the bits; only their "
            "order is compared.",
            "The runs are those of mqgrad-fig4; where both are run together, their CPU time is counted there.",
            "In the paper N/A means converged; here all runs have the same number of steps, so cheaper ones are over "
            "sooner.",
        ),
    )


def _accuracy(found: mqgrad.Measured, name: str, seconds: float) -> float | None:
    """Percent at the last test up to then, mean over seeds.

    None where a run has no test yet, or was over before; one that diverged stays where it was.
    """
    values = []
    for one in found.runs[name]:
        tested = np.flatnonzero(one.eval_sim_seconds <= seconds * (1 + 1e-9))
        over = one.sim_seconds[-1] < 0.9 * seconds and not one.diverged
        if not tested.size or over:
            return None
        values.append(100 * float(one.accuracy[tested[-1]]))
    return float(np.mean(values))


def _published(rows: tuple[tuple[float, ...], ...]) -> tuple[tuple[str | float | None, ...], ...]:
    return tuple((name, *row, *[None] * (len(_HOURS) - len(row))) for name, row in zip(_POLICIES, rows, strict=True))


EXPERIMENT = Experiment(
    name="mqgrad-tables1-3",
    title="accuracy after some time, and what quantization costs",
    paper=mqgrad.PAPER,
    where="Tables 1 to 3",
    claim="At equal time MQGrad is more accurate than fixed and adaptive bits, and ends near 8 bits; quantizing "
    "takes 4 to 13 percent of the time, less with more bits.",
    recipe=mqgrad.RECIPE,
    published=(
        *(
            Table(f"test accuracy (%), {name}", ("policy", *(f"{hours} h" for hours in _HOURS)), _published(rows))
            for name, rows in _PUBLISHED.items()
        ),
        Table(
            "share of the time for quantization (%)",
            ("cluster", *_POLICIES),
            tuple((name, *values) for name, values in _SHARES.items()),
        ),
    ),
    run=run,
)
