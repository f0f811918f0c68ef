"""Adaptive levels, Figure 14: clipped gradients, buckets inside layers, several bucket sizes."""

from __future__ import annotations

from gtrace_experiments.reproduce._alq import GRID_NOTE, LAW_NOTE, METHODS, PAPER, spec
from gtrace_experiments.reproduce._training import FEW, small_task, train_each
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

BUCKETS = (256, 16384)
SHOWN = ("ALQ", "ALQ-N", "QSGDinf", "TRN", "NUQSGD")
OTHERS = SHOWN[2:]
CLIP = 2.5
#: points of accuracy that one seed may be off
NOISE = 1.0


def run(context: Context) -> Outcome:
    """One training for each method and bucket size."""
    task, data = small_task(context, "CIFAR-10", FEW)
    sizes = (256,) if context.quick and not context.full else BUCKETS
    codecs = {
        f"{name}, {size}": spec(name, 3, size, f"scope=tensor,tail=exact,clip={CLIP}")
        for size in sizes
        for name in SHOWN
    }
    trained = train_each(
        context,
        task,
        {"full precision": "none", **codecs},
        steps=4 if context.quick else 150,
        batch_size=8,
        refit="0,10,40,150",
    )
    accuracy = {label: runs.accuracy.mean for label, runs in trained.items()}
    behind = [
        max(accuracy[f"{other}, {size}"] for other in OTHERS)
        - min(accuracy[f"{name}, {size}"] for name in ("ALQ", "ALQ-N"))
        for size in sizes
    ]
    errors = [
        max(trained[f"{name}, {size}"].variance.mean for name in ("ALQ", "ALQ-N"))
        / min(trained[f"{other}, {size}"].variance.mean for other in OTHERS)
        for size in sizes
    ]
    return Outcome(
        checks=(
            Check(
                "ALQ and ALQ-N always have better or equal accuracy",
                f"neither is more than {NOISE:g} point below the best other method at any bucket size",
                ", ".join(f"{gap:+.1f} points at {size}" for gap, size in zip(behind, sizes, strict=True))
                + " (best other less the worse of the two)",
                max(behind) <= NOISE,
            ),
            Check(
                "and the least error",
                "the larger of their relative errors, clipping included, is at most that of the best other method, at "
                "every bucket size",
                ", ".join(f"{ratio:.2f} times at {size}" for ratio, size in zip(errors, sizes, strict=True)),
                max(errors) <= 1,
            ),
        ),
        tables=(
            Table(
                f"Training with 3 bits, clipped at {CLIP} standard deviations, one seed",
                ("method and bucket size", "test accuracy, %", "training loss", "relative error"),
                tuple(
                    (label, runs.accuracy.mean, runs.loss.mean, runs.variance.mean) for label, runs in trained.items()
                ),
                "Error: ||Q(g) - g||^2 / ||g||^2 of one worker, mean over the steps, what clipping cuts off included.",
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(
                        tuple(
                            Curve(name, sizes, tuple(accuracy[f"{name}, {s}"] for s in sizes), method=METHODS[name])
                            for name in SHOWN
                        ),
                        "Accuracy",
                        "bucket size",
                        "test accuracy, %",
                        log_x=True,
                        lines=(("full precision", accuracy["full precision"]),),
                    ),
                    Panel(
                        tuple(
                            Curve(
                                name,
                                sizes,
                                tuple(trained[f"{name}, {s}"].variance.mean for s in sizes),
                                method=METHODS[name],
                            )
                            for name in SHOWN
                        ),
                        "Error",
                        "bucket size",
                        "relative error",
                        log_x=True,
                        log_y=True,
                    ),
                ),
                f"Training with gradients clipped at {CLIP} standard deviations of their layer, buckets inside layers.",
            ),
        ),
        data=data,
        notes=(
            GRID_NOTE,
            LAW_NOTE,
            "With buckets inside layers most layers of this network are smaller than a large bucket and go in full "
            "precision, as the paper's rule for short buckets has it: the larger the buckets, the less is quantized.",
        ),
    )


EXPERIMENT = Experiment(
    name="alq-fig14",
    title="with clipped gradients, layer by layer",
    paper=PAPER,
    where="Figure 14 (App. K.2)",
    claim=(
        "With gradients clipped at 2.5 standard deviations and quantized layer by layer, ALQ and ALQ-N have better or "
        "equal accuracy at every bucket size."
    ),
    recipe=(
        "ResNet-8, 4 workers with 8 images each, 150 steps, 3 bits, buckets of 256 and 16384 inside each layer. "
        "The paper trains ResNet-8 on CIFAR-10 to the end."
    ),
    run=run,
)
