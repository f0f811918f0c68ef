"""Adaptive levels, Table 1: accuracy of each method at 3 bits on four workers."""

from __future__ import annotations

from gtrace.report.statistics import Interval, t_interval
from gtrace_experiments.reproduce._alq import GRID_NOTE, LAW_NOTE, METHODS, PAPER, spec
from gtrace_experiments.reproduce._training import Runs, seeded_task, train_each
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

SEEDS, STEPS = 5, 600
#: the label of fixed levels whose payloads are no larger than those of ALQ at 3 bits
RIVAL = "QSGDinf, 4 bits"
#: points of accuracy below full precision from which on a method is not drawn
FAR = 10
COMPARED = ("ALQ", "AMQ", "QSGDinf", "TRN", "NUQSGD")
LOSSES = ("full precision", "ALQ", "TRN", "NUQSGD")
PUBLISHED = (
    ("SuperSGD (full precision)", 93.86, 92.26, 68.93),
    ("ALQ", 93.24, 91.30, 67.72),
    ("ALQ-N", 93.14, 91.96, 65.64),
    ("AMQ", 92.82, 91.10, 64.82),
    ("AMQ-N", 92.88, 91.03, 66.75),
    ("QSGDinf", 91.52, 89.95, 66.35),
    ("TRN", 90.72, 89.65, 62.76),
    ("NUQSGD", 84.60, 83.73, 33.36),
)


def rises(runs: dict[str, Runs], order: tuple[str, ...]) -> bool:
    """Whether the training loss rises along an order for every seed."""
    each = zip(*(runs[name].loss.each for name in order), strict=True)
    return all(list(losses) == sorted(losses) for losses in each)


def gain(ours: Runs, theirs: Runs) -> Interval:
    """Points of accuracy between two methods, paired by seed, with their 95 % interval."""
    return t_interval([a - b for a, b in zip(ours.accuracy.each, theirs.accuracy.each, strict=True)])


def in_points(found: Interval) -> str:
    """An interval of accuracies as text."""
    return f"{found.estimate:+.2f} points ({found.low:+.2f} to {found.high:+.2f})"


def results_table(runs: dict[str, Runs], title: str, note: str = "") -> Table:
    """Accuracy, loss, variance and bits of trainings."""
    return Table(
        title,
        ("method", "test accuracy, %", "training loss", "relative variance, one worker", "bits per value"),
        tuple(
            (
                label,
                found.accuracy.show(),
                found.loss.show(3),
                found.variance.mean,
                found.of(lambda result: result.tally.bits_per_element).mean,
            )
            for label, found in runs.items()
        ),
        note,
    )


def results_chart(runs: dict[str, Runs], caption: str) -> Chart:
    """Variance as bars, accuracy as points, by method; an accuracy that would flatten all others is said instead."""
    methods = {label: METHODS[label.partition(",")[0]] for label in runs if label != "full precision"}
    full = runs["full precision"].accuracy
    near = [name for name in methods if full.mean - runs[name].accuracy.mean <= FAR]
    left_out = ", ".join(f"{name} at {runs[name].accuracy.mean:.1f} %" for name in methods if name not in near)
    return Chart(
        (
            Panel(
                tuple(Curve(name, (name,), (runs[name].variance.mean,), method=methods[name]) for name in methods),
                "Variance of one worker's gradient",
                "",
                "relative variance",
                log_y=True,
                bars=True,
            ),
            Panel(
                tuple(
                    Curve(
                        name,
                        (name,),
                        (runs[name].accuracy.mean,),
                        (runs[name].accuracy.low,),
                        (runs[name].accuracy.high,),
                        method=methods[name],
                        form="points",
                    )
                    for name in near
                ),
                "Accuracy",
                "",
                "test accuracy, %",
                bars=True,
                lines=(("full precision", full.mean),),
            ),
        ),
        caption + (f" Not drawn: {left_out}." if left_out else ""),
    )


def run(context: Context) -> Outcome:
    """All methods, and fixed levels at the bits that ALQ really takes."""
    task, data = seeded_task(context, "CIFAR-10 and ImageNet")
    codecs = {
        "full precision": "none",
        **{name: spec(name) for name in COMPARED},
        RIVAL: spec("QSGDinf", bits=4, zero=True),
    }
    runs = train_each(
        context,
        task,
        codecs,
        seeds=1 if context.quick else SEEDS,
        steps=4 if context.quick else STEPS,
        batch_size=8,
        refit="0,10,50,+50",
    )
    variance = {name: runs[name].variance.mean for name in COMPARED}
    bits = {name: runs[name].of(lambda result: result.tally.bits_per_element).mean for name in ("ALQ", RIVAL)}
    nominal, measured = (gain(runs["ALQ"], runs[name]) for name in ("QSGDinf", RIVAL))
    return Outcome(
        checks=(
            Check(
                "adaptive levels have the lowest variance",
                f"relative variance rises in the order {', '.join(COMPARED)}",
                ", ".join(f"{name} {value:.3g}" for name, value in variance.items()),
                list(variance.values()) == sorted(variance.values()),
            ),
            Check(
                "so they train better: " + ", ".join(LOSSES),
                f"training loss over the last tenth of the steps rises in that order, for every seed; {len(COMPARED)} "
                "methods in a row would be within the noise of seeds",
                "; ".join(f"{name} {runs[name].loss.show(3)}" for name in LOSSES),
                rises(runs, LOSSES),
            ),
            Check(
                "NUQSGD loses much accuracy at this bucket size",
                "in every run its test accuracy is at least 3 points below full precision; the paper's is 8.5 to 36 "
                "points below",
                ", ".join(
                    f"{b - a:.1f} points"
                    for a, b in zip(runs["NUQSGD"].accuracy.each, runs["full precision"].accuracy.each, strict=True)
                ),
                all(
                    b - a >= 3
                    for a, b in zip(runs["NUQSGD"].accuracy.each, runs["full precision"].accuracy.each, strict=True)
                ),
            ),
            Check(
                "adaptive levels buy accuracy at equal nominal bits",
                "the 95 % interval of ALQ's accuracy less QSGDinf's, both at 3 bits, paired by seed, is above 0 "
                "(published: 1.35 to 1.72 points)",
                in_points(nominal),
                nominal.low > 0,
            ),
            Check(
                "and at equal measured bits (not tested in the paper)",
                f"the same interval of ALQ's at 3 bits less that of {RIVAL} is above 0, and the latter's payloads are "
                "no larger",
                f"{in_points(measured)}; {bits['ALQ']:.2f} against {bits[RIVAL]:.2f} bits per value",
                measured.low > 0 and bits[RIVAL] <= bits["ALQ"],
            ),
        ),
        tables=(results_table(runs, "4 workers, 3 bits unless said", "In brackets the range over seeds."),),
        charts=(
            results_chart(
                runs,
                "Left: variance of a worker's quantized gradient. Right: test accuracy, its mean and range over seeds. "
                "Methods that lie within each other's ranges cannot be told apart.",
            ),
        ),
        data=data,
        notes=(
            GRID_NOTE,
            LAW_NOTE,
            f"{RIVAL}: with a level at 0, which makes its payloads small.",
            "ALQ-N and AMQ-N are left out: their levels differ from those of ALQ and AMQ by a few percent in "
            "variance (alq-fig5), and the paper's own columns disagree on their order.",
            "The last two criteria were added, and the size of the experiment changed, after a look at 150 steps of "
            "one seed, which showed the measured bits and variances of QSGDinf with 3 to 5 bits, and before any "
            "accuracy at the end was known.",
        ),
    )


EXPERIMENT = Experiment(
    name="alq-table1",
    title="accuracy at 3 bits",
    paper=PAPER,
    where="Tables 1 and 4, Figure 3",
    claim=(
        "With 3 bits and buckets of 8192 or more, adaptive levels nearly reach full precision, QSGDinf and TRN stay "
        "behind, and NUQSGD falls far behind."
    ),
    recipe=(
        f"A small convolutional network, 4 simulated workers with 8 images each, {STEPS} steps (three passes over the "
        f"data), learning rate 0.05 falling to 0 by a cosine, buckets of 8192 across layers, {SEEDS} seeds. The paper "
        "trains ResNet-32 and ResNet-110 for 80,000 steps. (400 steps of a ResNet-8 and two seeds came first.)"
    ),
    published=(
        Table(
            "validation accuracy, %",
            ("method", "ResNet-110, CIFAR-10", "ResNet-32, CIFAR-10", "ResNet-18, ImageNet (short)"),
            PUBLISHED,
        ),
        Table(
            "validation accuracy of the full ImageNet run, %",
            ("method", "ResNet-18"),
            (
                ("SuperSGD (full precision)", 69.85),
                ("ALQ", 68.65),
                ("ALQ-N", 68.50),
                ("AMQ-N", 67.96),
                ("AMQ", 67.76),
                ("QSGDinf", 67.48),
                ("TRN", 63.97),
                ("NUQSGD", 35.43),
            ),
        ),
    ),
    run=run,
)
