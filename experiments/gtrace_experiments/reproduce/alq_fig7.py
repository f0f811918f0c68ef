"""Adaptive levels, Figure 7: what the size of buckets and the number of bits do to each method."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gtrace
from gtrace_experiments.reproduce._alq import ADAPTIVE, GRID_NOTE, LAW_NOTE, METHODS, PAPER, plain_path, spec
from gtrace_experiments.reproduce._training import FEW, small_task, train_each
from gtrace_experiments.reproduce.experiment import Chart, Check, Context, Curve, Experiment, Outcome, Panel, Table

if TYPE_CHECKING:
    from gtrace.sweep.jobs import Refit

BUCKETS = (32, 100, 512, 2048, 8192, 16384, 65536)
BITS = (2, 3, 4, 5, 6, 8)
#: of the sweep over bits, as in the paper
LARGE = 16384
TRAINED, TRAINED_AT = ("ALQ", "QSGDinf", "NUQSGD"), (100, LARGE)
FIXED = ("QSGDinf", "NUQSGD")
#: a row of the table: levels fitted to the very gradient that is quantized, which no training can afford
ITSELF = "ALQ, fitted to the same gradient"
#: every bucket is quantized here: at large sizes the short last one would hold much of the model
MORE = "scope=model"
#: "nearly as good": times ALQ's variance, and points of accuracy
NEARLY, POINTS = 2.0, 1.0


def variances(context: Context, methods: tuple[str, ...]) -> tuple[dict[tuple[str, int, int], float], str]:
    """Mean relative variance by method, bits and bucket size on an uncompressed training, and what that was."""
    path = plain_path(context)
    wanted = {(name, 3, size) for name in methods for size in BUCKETS}
    wanted |= {(name, bits, LARGE) for name in methods for bits in BITS}
    itself = {(ITSELF, bits, LARGE) for bits in BITS}
    # Each evaluated gradient has levels of the one kept before it, as far apart as everywhere on the path.
    steps = path.at[-3:] if context.quick else path.at[8::4]
    found = {}
    refits: tuple[tuple[set[tuple[str, int, int]], Refit], ...] = ((wanted, "previous"), (itself, "each"))
    for keys, refit in refits:
        # TRN has one grid, whatever the bits.
        codecs = {key: str(gtrace.codec(spec(key[0].split(",")[0], key[1], key[2], MORE))) for key in keys}
        result = gtrace.run_sweep(
            path.workers[0], list(codecs.values()), steps=steps, draws=0, refit=refit, optimal=False, jobs=1
        )
        for key, text in codecs.items():
            found[key] = float(result["relative_variance"][result["codec"] == text].mean())
    return found, path.data


def run(context: Context) -> Outcome:
    """Variances on one training's gradients, and some trainings of their own."""
    context.say("training without compression, and sweeping")
    methods = (*ADAPTIVE, "QSGDinf", "TRN", "NUQSGD")
    found, data = variances(context, methods)
    context.say("training with codecs")
    task, _ = small_task(context, "", FEW)
    trained = train_each(
        context,
        task,
        {
            "full precision": "none",
            **{f"{name}, {size}": spec(name, 3, size, MORE) for name in TRAINED for size in TRAINED_AT},
        },
        steps=4 if context.quick else 250,
        batch_size=8,
        refit="0,10,40,150",
    )
    near, far = (found["NUQSGD", 3, size] / found["ALQ", 3, size] for size in TRAINED_AT)
    gaps = [trained[f"ALQ, {size}"].accuracy.mean - trained[f"NUQSGD, {size}"].accuracy.mean for size in TRAINED_AT]
    cells = [(3, size) for size in BUCKETS] + [(bits, LARGE) for bits in BITS]
    best = sum(
        min(found[name, *cell] for name in ("ALQ", "ALQ-N")) <= min(found[name, *cell] for name in FIXED)
        for cell in cells
    )
    weak = [found["AMQ", 3, 65536] / found["ALQ", 3, 65536], found["AMQ", 2, LARGE] / found["ALQ", 2, LARGE]]
    weak += [found["AMQ", 3, 32] / found["ALQ", 3, 32]]
    usual = found["AMQ", 3, 2048] / found["ALQ", 3, 2048]

    def curves(at: tuple[int, ...], bits: bool) -> tuple[Curve, ...]:
        return tuple(
            Curve(
                name,
                at,
                tuple(found[(name, x, LARGE) if bits else (name, 3, x)] for x in at),
                method=METHODS[name],
            )
            for name in methods
            if not (bits and name == "TRN")
        )

    return Outcome(
        checks=(
            Check(
                "adaptive levels are best at every bucket size and number of bits",
                "the better of ALQ and ALQ-N has no more variance than the better of QSGDinf and NUQSGD, everywhere",
                f"at {best} of {len(cells)}",
                best == len(cells),
            ),
            Check(
                "NUQSGD is nearly as good at bucket size 100 and 3 bits, and falls behind with large buckets",
                f"its variance is at most {NEARLY:g} times ALQ's at 100, and more than that at {LARGE}",
                f"{near:.2f} times at 100, {far:.0f} times at {LARGE}",
                near <= NEARLY < far,
            ),
            Check(
                "the same in accuracy",
                f"NUQSGD's is at most {POINTS:g} point below ALQ's at 100, and more at {LARGE}",
                f"{gaps[0]:.1f} points below at 100, {gaps[1]:.1f} at {LARGE}",
                gaps[0] <= POINTS < gaps[1],
            ),
            Check(
                "multipliers fall behind levels at buckets above 10^4, below 100, and at 2 bits",
                "AMQ's variance over ALQ's is larger at 65536, at 32 and at 2 bits than at 2048 and 3 bits",
                f"{weak[0]:.2f} at 65536, {weak[2]:.2f} at 32, {weak[1]:.2f} at 2 bits; {usual:.2f} at 2048",
                min(weak) > usual,
            ),
        ),
        tables=(
            Table(
                "Relative variance by bucket size, 3 bits",
                ("method", *map(str, BUCKETS)),
                tuple((name, *(found[name, 3, size] for size in BUCKETS)) for name in methods),
            ),
            Table(
                f"Relative variance by bits, buckets of {LARGE}",
                ("method", *(f"{bits} bits" for bits in BITS)),
                tuple((name, *(found[name, bits, LARGE] for bits in BITS)) for name in (*methods, ITSELF)),
                "TRN has three levels whatever the bits.",
            ),
            Table(
                "Training with 3 bits, one seed",
                ("method and bucket size", "test accuracy, %", "training loss", "relative variance"),
                tuple(
                    (label, runs.accuracy.mean, runs.loss.mean, runs.variance.mean) for label, runs in trained.items()
                ),
            ),
        ),
        charts=(
            Chart(
                (
                    Panel(curves(BUCKETS, bits=False), "3 bits", "bucket size", "relative variance", True, True),
                    Panel(curves(BITS, bits=True), f"Buckets of {LARGE}", "bits", "relative variance", log_y=True),
                ),
                "Relative variance of each method on the gradients of one training, by bucket size and by bits.",
            ),
        ),
        data=data,
        notes=(
            GRID_NOTE,
            LAW_NOTE,
            "With many bits ALQ's 2^(bits - 1) free levels follow the gradient that they are fitted to so closely that "
            "the next one, 75,002 values in five buckets, falls between them: beside it stands what the same levels do "
            "to the gradient that they were fitted to. AMQ has one number to fit.",
            "The paper shows validation accuracy; here variance stands for it, and accuracy is measured at six points. "
            "Differences of a point are within the noise of one seed. The last bucket is quantized, too.",
        ),
    )


EXPERIMENT = Experiment(
    name="alq-fig7",
    title="bucket size and bits",
    paper=PAPER,
    where="Figure 7",
    claim=(
        "Adaptive levels are best at all bucket sizes and bits. NUQSGD is nearly as good at bucket size 100 and 3 bits "
        "but collapses with large buckets; AMQ falls behind above 10^4, below 100 and at 2 bits."
    ),
    recipe=(
        "Expected variances on the gradients of the training of alq-fig5, levels fitted to the step kept before. "
        "Three methods also train ResNet-8 on 4 workers with 8 images each, 250 steps. Other than in the paper, "
        "accuracy is not measured at each point."
    ),
    run=run,
)
