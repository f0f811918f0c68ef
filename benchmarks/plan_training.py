"""Plans by predicted cost against plans by error, and the best single codec, trained at equal bits; as Markdown.

Run with ``OMP_NUM_THREADS=1 python benchmarks/plan_training.py``; docs/planning.md holds its output.

From a trace of one training in full precision (another seed, four bursts of six steps) a sweep measures errors and what
the noise of codecs costs over all steps. Two plans for the same bits minimize the one and the other, out of the same
codecs. Then the task is trained with both, with the best single codec by error within these bits, and uncompressed: one
worker, the same model and batches for all runs of a seed.

CRITERIA, written down before the first training:

1. Bytes: the plan by cost sends at most 3% more than the plan by error, in the mean over seeds.
2. Loss: the logarithm of the test loss, averaged over the tests in the second half of training (one in ten
   steps; of char-lstm, whose test takes long, one in 25).
   Plan by cost minus plan by error, paired by seed, with a 95% t-interval: below 0 the plan by cost is better, above 0
   worse, otherwise there is no difference to be seen. A run that diverges has the loss of guessing from there on.
3. The same for the plan by error against the single codec, and for uncompressed training against the plan by error:
   without room between these two, no plan can show anything.

The bits of each task are the most of 2, 1.6, 1.3 and 1.1 at which the best single codec by error is predicted to be
worth at most half of the batch, or 1.1: with more bits noise costs little, so that no choice matters. Huffman
codes take at least one bit.
"""

import argparse
import math
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from gtrace import codec, create_trace, open_trace, run_sweep
from gtrace.noise import Dynamics
from gtrace.planning import Budget, curves_of, make_plan, noise_ratios
from gtrace.report.statistics import t_interval
from gtrace.sweep.noise_cost import noise_costs
from gtrace.trace import OptimizerFacts
from gtrace.training import Study
from gtrace.training.plain import PlainTraining
from gtrace.training.tasks import load_task

STEPS, BURST, STARTS, TRACED_SEED = 200, 6, (8, 60, 112, 164), 100
BITS = (2.0, 1.6, 1.3, 1.1)
#: steps from one test to the next
EVERY = {"digits-cnn": 10, "char-lstm": 25}
SEEDS = {"digits-cnn": 8, "char-lstm": 5}
#: loss of guessing
CHANCE = {"digits-cnn": math.log(10), "char-lstm": math.log(60)}
FACTS = {
    "digits-cnn": OptimizerFacts(kind="SGD", momentum=0.9, weight_decay=0.0),
    "char-lstm": OptimizerFacts(kind="AdamW", betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, decoupled=True),
}
CODECS = [
    f"{name}:bits={bits},bucket_size={size}"
    for name, bits in (
        *(("qsgdinf", bits) for bits in ("2", "3,steps=2", "3", "4,steps=5", "4", "5")),
        *(("nuqsgd", bits) for bits in ("2", "3")),
    )
    for size in (128, 1024, 8192)
]


def rate(task, step):
    """The learning rate of a step, as a study has it."""
    lr = task.recipe.lr
    return lr * (1 + math.cos(math.pi * step / STEPS)) / 2 if task.recipe.decay == "cosine" else lr


def record(name, path):
    """A trace of a training in full precision."""
    task = load_task(name)
    training = PlainTraining(task, TRACED_SEED)
    inputs, _ = task.batch(np.random.default_rng(0), 1)
    # A sequence of characters is as many terms of the loss.
    facts = FACTS[name] if inputs.is_floating_point() else replace(FACTS[name], tokens=inputs.shape[1])
    attrs = {"batch_size": task.recipe.batch_size, "optimizers": {"0": facts.describe()}}
    wanted = {start + k for start in STARTS for k in range(BURST)}
    with create_trace(path, attrs=attrs) as writer:
        for step in range(max(wanted) + 1):
            (found,) = training.step(rate(task, step))
            if step in wanted:
                for tensor, values in found.items():
                    writer.append(step, tensor, values)
                writer.commit(step, lr=rate(task, step))


def plans(name, folder):
    """The bits, plans by cost and by error, the best single codec, and the batch that each is predicted to be worth."""
    path = folder / f"{name}.zarr"
    record(name, path)
    with open_trace(path) as trace:
        result = run_sweep(trace, CODECS, draws=0, optimal=False)
    curves, costs, task = curves_of(result), noise_costs(result), load_task(name)
    lr = float(np.mean([rate(task, step) for step in range(STEPS)]))
    ratios = noise_ratios(curves, costs, Dynamics.of(FACTS[name], lr), STEPS, task.recipe.batch_size)
    priced = curves.priced(ratios.ratio)

    def worth(chosen):
        rows = {row.tensor: curves.codecs.index(row.codec) for row in chosen.tensors}
        ratio = sum(ratios.ratio[curves.tensors.index(tensor), column] for tensor, column in rows.items())
        return task.recipe.batch_size / (1 + ratio)

    for bits in BITS:
        budget = Budget("bits", bits, f"{bits} bits")
        by = {
            "plan by cost": make_plan(priced, budget, name="by-cost", provenance={}, objective="cost"),
            "plan by error": make_plan(curves, budget, name="by-error", provenance={}),
            "single codec": make_plan(curves, budget, name="single", provenance={}, one_for_all=True),
        }
        predicted = {key: worth(plan) for key, plan in by.items()}
        if predicted["single codec"] <= task.recipe.batch_size / 2:
            break
    return bits, by, predicted


def trained(name, by, seed):
    """Run -> level of the loss and bits sent."""
    runs = {key: codec(plan.default) if key == "single codec" else plan for key, plan in by.items()}
    study = Study(name, list(runs.values()), workers=1, steps=STEPS, seed=seed, eval_every=EVERY[name], min_size=0)
    curves = {}
    for found in study.records():
        if found["type"] == "eval":
            curves.setdefault(found["run"], []).append(found["loss"])
    of = dict(zip(["uncompressed", *runs], study.results, strict=True))
    out = {}
    for key, result in of.items():
        curve = [value if math.isfinite(value) else CHANCE[name] for value in curves[result.run]]
        curve += [CHANCE[name]] * (STEPS // EVERY[name] - len(curve))
        level = float(np.mean(np.log(curve[len(curve) // 2 :])))
        out[key] = level, result.tally.bits_per_element
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help="only plans and predictions, no training")
    parser.add_argument("tasks", nargs="*", default=list(SEEDS))
    args = parser.parse_args()
    print("| task | bits | run | predicted batch | bits sent | log loss | against the plan by error (95%) |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in args.tasks:
        with tempfile.TemporaryDirectory() as folder:
            bits, by, predicted = plans(name, Path(folder))
        whole = load_task(name).recipe.batch_size
        if args.predict:
            for key, plan in by.items():
                chosen = ", ".join(f"{row.tensor} {row.bits:.2f}" for row in plan.tensors)
                print(
                    f"| {name} | {bits} | {key} | {predicted[key]:.2g} of {whole} | {plan.totals.bits:.3f} | {chosen} |"
                )
            continue
        seeds = [trained(name, by, seed) for seed in range(SEEDS[name])]
        for key in ("uncompressed", "plan by cost", "plan by error", "single codec"):
            levels, sent = (np.array([seed[key][k] for seed in seeds]) for k in (0, 1))
            against = levels - [seed["plan by error"][0] for seed in seeds]
            found = t_interval(against)
            batch = f"{predicted[key]:.2g} of {whole}" if key in predicted else f"{whole}"
            apart = "" if key == "plan by error" else f"{against.mean():+.3f} ({found.low:+.3f} to {found.high:+.3f})"
            print(
                f"| {name}, {len(seeds)} seeds | {bits} | {key} | {batch} | {sent.mean():.3f} | {levels.mean():.3f} "
                f"| {apart} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
