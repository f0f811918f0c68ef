"""ZipML, Figure 6: larger batches are no more sensitive to quantized samples."""

from __future__ import annotations

import math
from statistics import fmean

from gtrace.online.linear import load
from gtrace.workflows.reproduce._zipml import PAPER, Runs, curve, loss, runs_table, trained, tuned
from gtrace.workflows.reproduce.experiment import Chart, Check, Context, Experiment, Outcome, Panel, Table

BATCHES = (1, 16, 256)
SPEC = "double:bits=5"


def epochs_to(runs: Runs, spec: str, target: float) -> float:
    """Epochs until the loss of the model first falls to a target, mean over seeds; NaN where it never does."""
    found = [
        next((float(e) for e, value in enumerate(one.losses, 1) if value <= target), math.nan) for one in runs[spec]
    ]
    return fmean(found)


def run(context: Context) -> Outcome:
    """Each batch with the step that suits its full precision."""
    rows, epochs, seeds = (2000, 3, 1) if context.quick else (10_000, 30, 3)
    name = f"synthetic-100x{rows}"
    found: dict[int, Runs] = {}
    rates = {}
    for batch in BATCHES:
        context.say(f"batches of {batch}")
        rates[batch] = tuned("linear", load(name, labels=False, seed=context.seed), batch, seed=context.seed)
        found[batch] = trained(
            "linear",
            [SPEC],
            data=name,
            batch_size=batch,
            rate=rates[batch],
            epochs=epochs,
            seed=context.seed,
            seeds=seeds,
        )
    gaps = {batch: fmean(result.gap for result in runs[SPEC]) for batch, runs in found.items()}
    # Both precisions must come down to this: a hundredth of what the untrained model leaves unexplained.
    start = fmean(result.losses[0] for result in found[16]["none"]) if context.quick else 1.0
    reached = {(batch, spec): epochs_to(runs, spec, start) for batch, runs in found.items() for spec in ("none", SPEC)}
    return Outcome(
        checks=(
            Check(
                "quantization does not hurt larger batches",
                "the gap to the optimum with quantized samples is not larger at batches of 256 than at 16",
                "; ".join(f"{batch}: {gap:.2g}" for batch, gap in gaps.items()),
                gaps[256] <= gaps[16],
            ),
            Check(
                "full precision needs more epochs with larger batches",
                "epochs until the loss is below 1 (1 % of the untrained model's): more at 256 than at 16",
                ", ".join(f"{batch}: {reached[batch, 'none']:.3g}" for batch in (16, 256)),
                reached[256, "none"] > reached[16, "none"],
            ),
            Check(
                "with quantized samples the larger batch converges faster",
                "the loss after the last epoch is lower at 256 than at 16",
                ", ".join(f"{batch}: {fmean(one.losses[-1] for one in found[batch][SPEC]):.3g}" for batch in (16, 256)),
                fmean(one.losses[-1] for one in found[256][SPEC]) < fmean(one.losses[-1] for one in found[16][SPEC]),
            ),
        ),
        tables=(
            runs_table("Final losses", {f"batches of {batch}": runs for batch, runs in found.items()}),
            Table(
                "Steps and speed",
                (
                    "batch",
                    "first step",
                    "epochs to loss 1, full precision",
                    "epochs to loss 1, 5 bits",
                    "last loss, 5 bits",
                ),
                tuple(
                    (
                        batch,
                        rates[batch],
                        reached[batch, "none"],
                        reached[batch, SPEC],
                        fmean(one.losses[-1] for one in found[batch][SPEC]),
                    )
                    for batch in BATCHES
                ),
            ),
        ),
        charts=(
            Chart(
                tuple(
                    Panel(
                        tuple(curve(found[batch][spec], f"batches of {batch}") for batch in BATCHES),
                        title,
                        "epoch",
                        "training loss",
                        log_y=True,
                        lines=(("optimum", loss(found[16]["none"])),) if spec == "none" else (),
                    )
                    for spec, title in (("none", "full precision"), (SPEC, "5-bit samples, double sampling"))
                ),
                "Left: full precision. Right: samples of 5 bits. The mean of a larger batch carries less of the noise "
                "of quantization.",
            ),
        ),
        data="made: 100 standard normal features, noise 0.1",
        notes=(
            "The step of each batch is the power of two with the least loss of the full precision after 6 epochs, as "
            "the paper tunes its own; the same step is taken at low precision.",
        ),
    )


EXPERIMENT = Experiment(
    name="zipml-fig6",
    title="mini-batches of quantized samples",
    paper=PAPER,
    where="Figure 6",
    claim="Larger mini-batches need more epochs at full precision, but quantization does not hurt them: with quantized "
    "samples the larger one converges faster.",
    recipe="Linear regression, 10,000 samples of 100 features, batches of 1, 16 and 256, samples of 5 bits with double "
    "sampling, 30 epochs, 3 seeds.",
    run=run,
)
