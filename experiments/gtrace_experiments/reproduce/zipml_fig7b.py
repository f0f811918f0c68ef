"""ZipML, Figure 7(b): a network with weights on five optimal levels against XNOR-Net's five uniform ones."""

from __future__ import annotations

from gtrace_experiments.reproduce._training import first_task, smoothed, spread, trained
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

STEPS, BATCH, SEEDS, LR = 240, 32, 3, 0.02
OPTIMAL, XNOR, UNIFORM = "weights=optimal5", "weights=xnor5", "weights=uniform5"
LABELS = {
    "none": "full precision",
    OPTIMAL: "Optimal5",
    XNOR: "XNOR5 (uniform, with XNOR-Net's factor)",
    UNIFORM: "uniform, without the factor",
}
LAST = 40


def run(context: Context) -> Outcome:
    """The same network with exact weights and with three sets of five levels."""
    task, data = first_task(context, "fashion-cnn", "digits-cnn")
    found = trained(
        context,
        task,
        [],
        weights=("optimal5", "xnor5", "uniform5"),
        steps=STEPS,
        batch_size=BATCH,
        seeds=SEEDS,
        optimizer="momentum",
        lr=LR,
    )
    accuracy = {name: found.accuracy(name) for name in LABELS}
    ends = {name: found.losses[name][:, -LAST:].mean(axis=1) for name in LABELS}
    gains = {name: accuracy[OPTIMAL] - accuracy[name] for name in (XNOR, UNIFORM)}
    return Outcome(
        checks=(
            Check(
                "Optimal5 converges to a significantly lower training loss than XNOR5",
                f"training loss over the last {LAST} steps is lower in every seed",
                f"{spread(ends[OPTIMAL], '.3f')} against {spread(ends[XNOR], '.3f')}",
                bool((ends[OPTIMAL] < ends[XNOR]).all()),
            ),
            Check(
                "Optimal5 is more than 5 points more accurate than XNOR5",
                "mean difference of the test accuracy, paired by seed, above 5 points",
                f"{spread(gains[XNOR], '+.2f')} points",
                bool(gains[XNOR].mean() > 5),
            ),
            Check(
                "optimal levels are better than uniform ones at all",
                "test accuracy is above XNOR5's and above plain uniform levels' in every seed",
                f"{spread(gains[XNOR], '+.2f')} and {spread(gains[UNIFORM], '+.2f')} points",
                all(bool((gain > 0).all()) for gain in gains.values()),
            ),
        ),
        tables=(
            Table(
                "Weights on five levels",
                ("weights", "test accuracy, %", f"training loss, last {LAST} steps", "squared error of the weights"),
                tuple(
                    (
                        label,
                        spread(accuracy[name]),
                        spread(ends[name], ".3f"),
                        None if name == "none" else found.weight_error(name),
                    )
                    for name, label in LABELS.items()
                ),
                note=f"mean and standard deviation of {SEEDS} seeds; the error is relative, after the last step",
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(
                        tuple(Curve(label, *smoothed(found.losses[name])) for name, label in LABELS.items()),
                        "training",
                        "step",
                        "training loss",
                    ),
                    Panel(
                        tuple(
                            Curve(label, (label.split(" (")[0].split(",")[0],), (float(accuracy[name].mean()),))
                            for name, label in LABELS.items()
                        ),
                        "after training",
                        "",
                        "test accuracy, %",
                        bars=True,
                    ),
                ),
                "Training loss and test accuracy with weights on five levels, mean of three seeds. The first and the "
                "last layer stay in full precision.",
            ),
        ),
        data=data,
        notes=(
            "The paper does not say what its XNOR5 does at the ends of the range or with the first and last layer. "
            "Here uniform levels span the largest magnitude of a tensor, XNOR5 multiplies them by the factor of least "
            "squared error, and XNOR-Net's rule keeps the first and the last layer exact.",
            f"{STEPS} steps of {BATCH} samples are a small part of the paper's training.",
        ),
    )


EXPERIMENT = Experiment(
    name="zipml-fig7b",
    title="networks with five-level weights",
    paper="Zhang et al., The ZipML framework, ICML 2017",
    where="Figure 7(b)",
    claim="Five optimal levels train to a significantly lower loss than XNOR-Net's five uniform levels, and to a test "
    "accuracy more than 5 points higher.",
    recipe=f"MQGrad's five-layer network with smaller linear layers on Fashion-MNIST in the place of Caffe's tutorial "
    f"network on CIFAR-10; SGD with momentum 0.9 and rate {LR}, {STEPS} steps of {BATCH}, {SEEDS} seeds; weights "
    "rounded to the nearest level, straight-through gradients, levels refitted on gtrace's default schedule.",
    published=(
        Table(
            "five levels against full precision",
            ("comparison", "test accuracy"),
            (("Optimal5 against XNOR5", "more than 5 points higher"),),
            note="the rest is a curve",
        ),
    ),
    run=run,
)
