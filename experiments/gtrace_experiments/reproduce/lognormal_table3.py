"""Near-lognormal gradients, Table 3: training with one exponent bit too many or too few."""

from __future__ import annotations

import numpy as np

from gtrace.codecs.fp import FloatFormat
from gtrace.fitting.magnitudes import fit_magnitudes
from gtrace_experiments.reproduce._lognormal import (
    LONGER,
    PAPER,
    RULE_NOTES,
    RULES,
    TO_THE_END,
    by_rule,
    neural_trace,
    train_neural,
)
from gtrace_experiments.reproduce._training import Runs, seeded_task
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table
from gtrace_experiments.reproduce.lognormal_table2 import chosen

BITS = (5, 6)
#: rules for the scale
COMPARED = tuple(RULES)
STEPS = (10, 130, 260, 390)
#: offsets from the best exponent width
OFFSETS = {"E*": 0, "E*+1": 1, "E*-1": -1, "E*-2": -2}
#: points of accuracy that seeds may be off, and that count as clearly worse
NOISE, CLEARLY = 1.5, 1.5
PUBLISHED = (
    ("CIFAR-100, ResNet-18", 64.9, "FP5", 64.0, None, 58.9, 26.6),
    ("CIFAR-100, ResNet-18", 64.9, "FP6", 64.9, 64.6, 59.7, 28.6),
    ("CIFAR-100, ResNet-101", 71.3, "FP5", 70.4, None, 66.5, 35.0),
    ("CIFAR-100, ResNet-101", 71.3, "FP6", 70.97, 70.82, 67.5, 42.7),
    ("ImageNet, ResNet-18", 70.4, "FP6", 70.0, None, 67.1, 30.8),
    ("ImageNet, ResNet-18", 70.4, "FP7", 70.4, 70.1, 66.7, 47.5),
    ("ImageNet, SqueezeNet", 58.19, "FP5", 55.2, None, 47.3, 33.2),
    ("ImageNet, SqueezeNet", 58.19, "FP6", 57.8, None, 56.1, 54.3),
)


def run(context: Context) -> Outcome:
    """sigma first, then a training for each format."""
    task, data = seeded_task(context, "CIFAR-100 and ImageNet")
    context.say("recording")
    trace = neural_trace(task, context.seed, (0, 2) if context.quick else STEPS, 16)
    fits = [
        fit_magnitudes(trace.read(info.name, int(step), kind="neural"))
        for info in trace.tensors
        for step in trace.steps(info.name, kind="neural")
    ]
    sigmas = [fit.sigma_log2 for fit in fits if fit.count and fit.sigma > 0]
    low, high = (float(value) for value in np.percentile(sigmas, (10, 90)))
    best = {bits: chosen(bits, low, high, 2 if context.quick else 41)[0] for bits in BITS}
    forms = {
        f"FP{bits} {label}": FloatFormat(form.exponent + offset, form.mantissa - offset)
        for bits, form in best.items()
        for label, offset in OFFSETS.items()
        if form.exponent + offset >= 1 and form.mantissa >= offset
    }
    runs = train_neural(
        context,
        task,
        {
            "float32": "none",
            **{
                f"{label}, {rule}": f"fp:{form.name},scale={rule}" for rule in COMPARED for label, form in forms.items()
            },
        },
        **LONGER,
    )
    accuracy = {label: found.accuracy.mean for label, found in runs.items()}
    checks, verdicts = by_rule({rule: judged(rule, accuracy, list(forms)) for rule in COMPARED})
    return Outcome(
        checks=checks,
        tables=(
            Table(
                "Training with gradients of layer outputs in small floats",
                ("", "format", "scale", "test accuracy, %", "training loss", "relative error"),
                tuple(
                    (
                        label.partition(",")[0],
                        str(forms.get(label.partition(",")[0], "-")),
                        label.partition(", ")[2] or "-",
                        found.accuracy.show(),
                        found.loss.show(3),
                        found.variance.mean,
                    )
                    for label, found in runs.items()
                ),
                "In brackets the range over seeds. Error: ||Q(g) - g||^2 / ||g||^2, all layers together.",
            ),
        ),
        charts=(
            Chart(
                tuple(
                    panel
                    for rule in COMPARED
                    for panel in _panels(
                        rule, {label: runs[f"{label}, {rule}"] for label in forms}, accuracy["float32"]
                    )
                ),
                "Test accuracy (mean and range over seeds), and the squared error of the format.",
            ),
        ),
        data=data,
        notes=(
            f"sigma of log2|g| is {low:.1f} to {high:.1f} here (10 % and 90 % of layers and steps); E* has the least "
            f"largest expected relative error over that range: {', '.join(map(str, best.values()))}.",
            "Each layer has a scale of its own.",
            *(RULE_NOTES[rule] for rule in COMPARED),
            *verdicts,
        ),
    )


def judged(rule: str, accuracy: dict[str, float], labels: list[str]) -> tuple[Check, ...]:
    """The paper's claims under one rule for the scale.

    Args:
        rule: one of ``COMPARED``.
        accuracy: of ``float32``, and of each label and rule.
        labels: as ``FP6 E*-1``.
    """
    own = {label: accuracy[f"{label}, {rule}"] for label in labels}

    def gap(bits: int, other: str) -> float | None:
        """How many points a format is below E*; None if there is no such format."""
        label = f"FP{bits} {other}"
        return own[f"FP{bits} E*"] - own[label] if label in own else None

    more, less, least = ({bits: gap(bits, other) for bits in BITS} for other in ("E*+1", "E*-1", "E*-2"))
    worst = {bits: min((own[label], label) for label in own if label.startswith(f"FP{bits}"))[1] for bits in BITS}

    def shown(gaps: dict[int, float | None]) -> str:
        return ", ".join(f"FP{bits}: {value:+.2f} points" for bits, value in gaps.items() if value is not None)

    return (
        Check(
            "the format that Eq. (4) chooses trains like float32",
            f"with FP6 at E* accuracy is at most {NOISE} points below float32",
            f"{accuracy['float32'] - own['FP6 E*']:.2f} points below",
            accuracy["float32"] - own["FP6 E*"] <= NOISE,
        ),
        Check(
            "one exponent bit more costs next to nothing",
            f"E*+1 is at most {NOISE} points below E*, if there is such a format",
            shown(more) or "no such format",
            all(value is None or value <= NOISE for value in more.values()),
        ),
        Check(
            "one less costs accuracy",
            f"E*-1 is more than {CLEARLY} points below E*, for every number of bits",
            shown(less),
            all(value is not None and value > CLEARLY for value in less.values()),
        ),
        Check(
            "two less is clearly worst",
            f"E*-2 is the worst of its bits and more than {CLEARLY} points below E*",
            shown(least) + "; worst: " + ", ".join(worst.values()),
            all(value is not None and value > CLEARLY for value in least.values())
            and all(label.endswith("E*-2") for label in worst.values()),
        ),
    )


def _panels(rule: str, runs: dict[str, Runs], float32: float) -> tuple[Panel, Panel]:
    categories = tuple(runs)
    accuracy = tuple(found.accuracy for found in runs.values())
    return (
        Panel(
            (
                Curve(
                    "accuracy",
                    categories,
                    tuple(found.mean for found in accuracy),
                    tuple(found.low for found in accuracy),
                    tuple(found.high for found in accuracy),
                    form="points",
                ),
            ),
            f"Accuracy, scale={rule}",
            "",
            "test accuracy, %",
            bars=True,
            lines=(("float32", float32),),
        ),
        Panel(
            (Curve("error", categories, tuple(found.variance.mean for found in runs.values())),),
            f"Error of the gradients, scale={rule}",
            "",
            "relative squared error",
            log_y=True,
            bars=True,
        ),
    )


EXPERIMENT = Experiment(
    name="lognormal-table3",
    title="training with too few exponent bits",
    paper=PAPER,
    where="Table 3",
    claim=(
        "The split of bits that minimizes the expected relative error gives the best accuracy: one exponent bit more "
        "costs little, one less some points, two less most of the accuracy."
    ),
    recipe=(
        f"{TO_THE_END}; gradients of all inner layers' outputs in FP5 and FP6 under three rules for the scale. E* is "
        "worked out as in lognormal-table2, for the sigma of an uncompressed training. (150 steps of a ResNet-8, two "
        "seeds and two rules came first; the criteria are the same.)"
    ),
    published=(
        Table(
            "validation accuracy, %",
            ("data and network", "baseline", "format", "E*", "E*+1", "E*-1", "E*-2"),
            PUBLISHED,
        ),
    ),
    run=run,
)
