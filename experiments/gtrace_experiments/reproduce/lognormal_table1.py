"""Near-lognormal gradients, Table 1: which law the gradients of layer outputs follow."""

from __future__ import annotations

import numpy as np

from gtrace.fitting.magnitudes import LAWS
from gtrace.sweep.laws import LayerLaws, follow_laws, judge
from gtrace_experiments.reproduce._lognormal import PAPER, neural_trace
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

STEPS = (0, 10, 40, 80, 120)
#: "after the first steps"
EARLY = 40
#: the largest published distance to the lognormal law
CLOSE = 0.07
NETWORKS = {
    "fashion-resnet8": "ResNet-8",
    "fashion-cnn": "large CNN",
    "digits-cnn": "small CNN",
    "char-lstm": "LSTM",
}
PUBLISHED = (
    ("normal", 0.46, 0.39, 0.38, 0.22, 0.35, 0.33),
    ("lognormal", 0.05, 0.04, 0.02, 0.07, 0.06, 0.05),
)


def networks(context: Context) -> dict[str, str]:
    """Names of tasks whose data are there, and what they are."""
    from gtrace.errors import TraceError
    from gtrace.training.tasks.images import fashion_folder

    if context.quick:
        return {"digits-cnn": NETWORKS["digits-cnn"]}
    try:
        fashion_folder()
    except TraceError:
        return {name: words for name, words in NETWORKS.items() if not name.startswith("fashion")}
    return NETWORKS


def distances(layers: list[LayerLaws], steps: list[int]) -> tuple[dict[str, float], dict[str, float]]:
    """Law -> mean and standard deviation of the distance, over layers and these steps."""
    chosen = frozenset(steps)
    cells = np.concatenate(
        [layer.distances[layer.judged & np.array([int(step) in chosen for step in layer.steps])] for layer in layers]
    )
    return (
        dict(zip(LAWS, cells.mean(axis=0).tolist(), strict=True)),
        dict(zip(LAWS, cells.std(axis=0).tolist(), strict=True)),
    )


def run(context: Context) -> Outcome:
    """All networks whose data are there."""
    from gtrace.training import load_task

    at = (0, 2, 5) if context.quick else STEPS
    late = [step for step in at if step >= (5 if context.quick else EARLY)]
    names = networks(context)
    rows, sigmas, lognormal, normal, curves = [], [], [], [], []
    for name, words in names.items():
        context.say(words)
        trace = neural_trace(load_task(name), context.seed, at)
        layers = follow_laws(trace, trace.tensors, frozenset(at))
        means, spreads = distances(layers, late)
        first = judge([LayerLaws(one.info, one.steps[:1], one.fits[:1]) for one in layers]).distances
        nearest = min(means, key=means.__getitem__)
        rows.append(
            (
                words,
                f"{means['normal']:.2f} ± {spreads['normal']:.2f}",
                f"{means['lognormal']:.2f} ± {spreads['lognormal']:.2f}",
                nearest,
                first["normal"],
                first["lognormal"],
            )
        )
        lognormal.append(means["lognormal"])
        normal.append(means["normal"])
        spread = [float(s) for one in layers for s, step in zip(one.sigma_log2, one.steps, strict=True) if step in late]
        sigmas.append((words, min(spread), float(np.median(spread)), max(spread)))
        by_step = [distances(layers, [step])[0] for step in at]
        curves.append(Curve(words, at, tuple(found["lognormal"] for found in by_step)))
    categories = tuple(names.values())
    return Outcome(
        checks=(
            Check(
                "gradients of layer outputs are nearer to a lognormal than to a normal law",
                f"in every network the mean distance over layers and steps from {EARLY} on is less to the lognormal",
                "; ".join(f"{a:.2f} against {b:.2f}" for a, b in zip(lognormal, normal, strict=True)),
                all(a < b for a, b in zip(lognormal, normal, strict=True)),
            ),
            Check(
                "much nearer",
                "less than half as far in every network, as in the paper's six",
                ", ".join(f"{a / b:.2f}" for a, b in zip(lognormal, normal, strict=True)),
                all(a < b / 2 for a, b in zip(lognormal, normal, strict=True)),
            ),
            Check(
                "and near",
                f"at most {CLOSE} in every network, the largest published distance",
                ", ".join(f"{a:.3f}" for a in lognormal),
                max(lognormal) <= CLOSE,
            ),
        ),
        tables=(
            Table(
                f"Kolmogorov-Smirnov distance of |g|, zeros left out, steps {', '.join(map(str, late))}",
                ("network", "normal", "lognormal", "nearest law", "normal, step 0", "lognormal, step 0"),
                tuple(rows),
                f"Mean and standard deviation over layers and steps; nearest of {', '.join(LAWS)}.",
            ),
            Table(
                "sigma of log2|g| at these steps",
                ("network", "least", "median", "largest"),
                tuple(sigmas),
                "The paper states 2.5 to 4.5 (CIFAR-100) and 3 to 5.5 (ImageNet).",
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(
                        (
                            Curve("to a normal law", categories, tuple(normal)),
                            Curve("to a lognormal law", categories, tuple(lognormal)),
                        ),
                        "After the first steps",
                        "",
                        "mean distance",
                        bars=True,
                        lines=(("largest published, lognormal", CLOSE),),
                    ),
                    Panel(tuple(curves), "To the lognormal law, over training", "step", "mean distance"),
                ),
                "Distance between the gradients' distribution function and a fitted law's: 0 is perfect, 1 the worst.",
            ),
        ),
        data=f"{', '.join(categories)}, in place of BERT on CoLa and MRPC and four ImageNet networks: ResNet-8 and the "
        "large CNN on Fashion-MNIST (left out where it is not installed), the small CNN on handwritten digits, the "
        "LSTM on Shakespeare's sonnets",
        notes=(
            "Gradients with respect to the outputs of layers with weight matrices, the last layer left out: its "
            "gradient comes from the loss itself.",
            "At step 0 nothing has been learned, and gradients need not be lognormal; the paper averages over all of "
            "its long training. No p-values: parameters are fitted to the data that are tested.",
        ),
    )


EXPERIMENT = Experiment(
    name="lognormal-table1",
    title="which law gradients follow",
    paper=PAPER,
    where="Table 1",
    claim="Gradients of layer outputs are close to a lognormal law and far from a normal one, in all networks.",
    recipe=(
        "Four small networks trained for 121 steps with their own recipes; gradients of layer outputs recorded at five "
        "steps, both laws fitted to the magnitudes of each layer, distances averaged."
    ),
    published=(
        Table(
            "Kolmogorov-Smirnov distance, mean over layers and time",
            ("law", "BERT CoLa", "BERT MRPC", "ResNet-18", "MobileNetV2", "VGG16", "DenseNet121"),
            PUBLISHED,
            "The last four on ImageNet.",
        ),
    ),
    run=run,
)
