"""Does compressed training behave like training in full precision at the predicted batch size?

Run with ``python benchmarks/equivalent_batch.py [--json FILE] [--figure FILE]``; docs/noise.md holds its output.

digits-cnn is trained in full precision with one worker and 64 samples a step. At every other step the gradients of four
batches of 64 go into a trace, as those of four ranks. A sweep of that trace and its report predict a batch for each
codec. Then, with five other seeds, the task is trained with each codec at batch 64, in full precision at the predicted
batch, and in full precision at a ladder of batches. What is compared is the loss over all training images, tested
every 10 steps: its logarithm, averaged over the tests from step 50 to the end.

Criteria, written down before the first run:

1. Alike: the 95% t-interval over seeds of the difference to full precision at the predicted batch (same seed, logarithm
   of the loss) holds 0.
2. Near: the batch that the codec is measured to be worth, by interpolation on the ladder, is within a factor of 1.5 of
   the predicted one, by its whole 95% t-interval over seeds of the logarithm.

The first run, of qsgdinf with 2 to 4 bits and nuqsgd with 4, failed both: no codec cost any of the batch. After it, two
coarser codecs and one more prediction were added, and a coarser ladder was taken. In the neighbourhood of a minimum
noise of covariance C costs the loss in proportion to tr(H C), and the Hessian H is near the covariance S of the
gradients themselves. So the *aligned* ratio is tr(S V) / tr(S S) for a codec of covariance V: rounding errors of single
coordinates lie in few of the directions in which the loss is steep.

3. Near, aligned: criterion 2 for the batch that the aligned ratio predicts.
"""

import argparse
import json
import math
import tempfile
from pathlib import Path

import numpy as np
from torch.nn.functional import cross_entropy

from gtrace import codec, create_trace, open_trace, run_sweep
from gtrace.report import analyze
from gtrace.report.statistics import t_interval
from gtrace.training import Study
from gtrace.training.plain import PlainTraining
from gtrace.training.tasks import Evaluation
from gtrace.training.tasks.images import DigitsCNN
from gtrace.types import Key

BATCH, STEPS, EVERY, FROM = 64, 200, 10, 50
CODECS = ("qsgdinf:bits=4", "nuqsgd:bits=4", "qsgdinf:bits=3", "qsgdinf:bits=2", "nuqsgd:bits=3", "nuqsgd:bits=2")
LADDER = (2, 4, 8, 16, 32, 64, 91)
SEEDS = range(1, 6)
RANKS, TRACED_SEED, TRACED_EVERY = 4, 100, 2
FACTOR = 1.5
CHANCE = math.log(10)


class WholeDigits(DigitsCNN):
    """digits-cnn, tested on all of its training images: that loss is what the noise of gradients acts upon."""

    def evaluate(self, model):
        images, digits = self._train
        scores = model(images)
        return Evaluation(cross_entropy(scores, digits).item(), (scores.argmax(1) == digits).double().mean().item())


def record(path):
    """A trace of training in full precision with the gradients of several batches at a step, as those of ranks."""
    task = WholeDigits()
    training = PlainTraining(task, TRACED_SEED, BATCH)
    with create_trace(path, attrs={"batch_size": BATCH, "world_size": RANKS}) as writer:
        for step in range(STEPS):
            lr = task.recipe.lr * (1 + math.cos(math.pi * step / STEPS)) / 2
            found = training.step(lr, RANKS if step % TRACED_EVERY == 0 else 1)
            if len(found) > 1:
                for rank, gradients in enumerate(found):
                    for name, values in gradients.items():
                        writer.append(step, name, values, rank=rank)
                writer.commit(step)


def predict(path):
    """Spec -> noise ratio with its interval, and the batch that it predicts."""
    with open_trace(path) as trace:
        analysis = analyze(run_sweep(trace, CODECS, draws=0))
    out = {}
    for configuration, found in zip(analysis.configurations, analysis.safety.judged, strict=True):
        size, low, high = analysis.safety.equivalent(found.ratio)
        out[configuration.spec] = {
            "noise_ratio": [found.ratio.estimate, found.ratio.low, found.ratio.high],
            "predicted_batch": [size, low, high],
            "verdict": found.verdict,
        }
    return out, analysis.safety.noise.estimate


def aligned(path, specs):
    """Spec -> tr(S V) / tr(S S), sums over steps; the errors of single coordinates are independent."""
    with open_trace(path) as trace:
        names = sorted({info.name for info in trace.tensors})
        steps = trace.steps(names[0]).tolist()
        top, bottom = dict.fromkeys(specs, 0.0), 0.0
        for step in steps:
            ranks = [{name: trace.read(name, step, rank=rank) for name in names} for rank in range(RANKS)]
            one, other = (
                {name: ranks[k][name].astype(np.float64) - ranks[k + 1][name] for name in names} for k in (0, 2)
            )
            bottom += sum(float(one[name] @ other[name]) for name in names) ** 2 / 4
            for spec in specs:
                for name in names:
                    item, values = codec(spec), ranks[0][name]
                    key = Key.derive(0, tensor=name, step=step)
                    error = item.simulate(item.init(values.size), values, key).values - values.astype(np.float64)
                    top[spec] += float(np.square(other[name] * error).sum()) / 2
    return {spec: value / bottom for spec, value in top.items()}


def losses(codecs, batch, seed):
    """Run -> loss at each test, for the uncompressed run and each codec."""
    study = Study(
        WholeDigits(), codecs, workers=1, batch_size=batch, steps=STEPS, seed=seed, eval_every=EVERY, min_size=0
    )
    curves = {}
    for found in study.records():
        if found["type"] == "eval":
            curves.setdefault(found["run"], []).append(found["loss"])
    # A run that diverged ends early, with a loss that is not a number: from there on its accuracy counts as chance.
    whole = {}
    for run, curve in curves.items():
        known = [value if math.isfinite(value) else CHANCE for value in curve]
        whole[run] = known + [CHANCE] * (STEPS // EVERY - len(known))
    return whole


def level(curve):
    """What is compared: mean log loss from step FROM to the end."""
    return float(np.mean(np.log(curve[FROM // EVERY - 1 :])))


def worth(value, ladder):
    """log of the batch in full precision that reaches this level; levels fall with the batch but for their scatter."""
    sizes, levels = np.log(sorted(ladder)), np.array([ladder[size] for size in sorted(ladder)])
    # The nearest monotonous curve, by pooling neighbours that are out of order.
    blocks = []
    for found in levels:
        blocks.append([found, 1])
        while len(blocks) > 1 and blocks[-1][0] >= blocks[-2][0]:
            (a, n), (b, m) = blocks[-2], blocks[-1]
            blocks[-2:] = [[(a * n + b * m) / (n + m), n + m]]
    smooth = np.concatenate([np.full(n, v) for v, n in blocks])
    return float(np.interp(-value, -smooth, sizes))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        record(Path(folder) / "run.zarr")
        predicted, noise = predict(Path(folder) / "run.zarr")
        for spec, ratio in aligned(Path(folder) / "run.zarr", predicted).items():
            predicted[spec] |= {"aligned_ratio": ratio, "aligned_batch": BATCH / (1 + ratio)}
    print(json.dumps(predicted, indent=1), flush=True)
    specs = list(predicted)
    wanted = {spec: max(1, round(found["predicted_batch"][0])) for spec, found in predicted.items()}
    curves = {spec: [] for spec in specs}
    plain = {size: [] for size in sorted({*LADDER, *wanted.values()})}
    for seed in SEEDS:
        for size in plain:
            # The codecs are trained beside the uncompressed run at their own batch.
            found = losses(specs if size == BATCH else (), size, seed)
            plain[size].append(found.pop("none"))
            for spec, curve in found.items():
                curves[spec].append(curve)
        print(f"seed {seed}", json.dumps([{n: runs[-1] for n, runs in found.items()} for found in (curves, plain)]))
    result = {
        "task": "digits-cnn",
        "batch": BATCH,
        "steps": STEPS,
        "seeds": list(SEEDS),
        "gradient_noise": noise,
        "codecs": [],
        "ladder": {size: float(np.mean([level(c) for c in runs])) for size, runs in plain.items()},
    }
    for spec in specs:
        runs, size = curves[spec], wanted[spec]
        apart = t_interval([level(c) - level(p) for c, p in zip(runs, plain[size], strict=True)])
        each = [
            worth(level(curve), {n: level(plain[n][k]) for n in plain}) - math.log(size) for k, curve in enumerate(runs)
        ]
        measured = t_interval(each)
        beside = math.log(size / predicted[spec]["aligned_batch"])
        result["codecs"].append(
            {
                "spec": spec,
                **predicted[spec],
                "trained_at": size,
                "difference": [apart.estimate, apart.low, apart.high],
                "measured_batch": [size * math.exp(v) for v in (measured.estimate, measured.low, measured.high)],
                "alike": apart.low <= 0 <= apart.high,
                "near": -math.log(FACTOR) <= measured.low and measured.high <= math.log(FACTOR),
                "near_aligned": abs(beside + measured.low) <= math.log(FACTOR)
                and abs(beside + measured.high) <= math.log(FACTOR),
                "curve": np.exp(np.mean(np.log(runs), axis=0)).tolist(),
                "curve_at_predicted": np.exp(np.mean(np.log(plain[size]), axis=0)).tolist(),
            }
        )
    result["curve_at_batch"] = np.exp(np.mean(np.log(plain[BATCH]), axis=0)).tolist()
    show(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    if args.figure:
        draw(result, args.figure)


def show(result):
    heads = ("codec", "noise ratio", "predicted", "aligned ratio", "predicted", "measured", "apart", "1", "2", "3")
    print(f"\n| {' | '.join(heads)} |\n|{'---|' * len(heads)}")
    for found in result["codecs"]:
        cells = (
            f"`{found['spec']}`",
            "{:.3g} ({:.3g} to {:.3g})".format(*found["noise_ratio"]),
            f"{found['predicted_batch'][0]:.1f}",
            f"{found['aligned_ratio']:.2g}",
            f"{found['aligned_batch']:.1f}",
            "{:.1f} ({:.1f} to {:.1f})".format(*found["measured_batch"]),
            "{:+.2f} ({:+.2f} to {:+.2f})".format(*found["difference"]),
            *("yes" if found[name] else "no" for name in ("alike", "near", "near_aligned")),
        )
        print(f"| {' | '.join(cells)} |")


def draw(result, path):
    from matplotlib.figure import Figure

    columns = len(result["codecs"]) // 2
    figure = Figure(figsize=(3.6 * columns, 5.6), layout="constrained")
    panels = figure.subplots(2, columns, sharex=True, sharey=True).ravel()
    steps = np.arange(1, result["steps"] // EVERY + 1) * EVERY
    for axes, found in zip(panels, result["codecs"], strict=True):
        axes.plot(steps, result["curve_at_batch"], color="0.6", linewidth=1, label=f"float, batch {result['batch']}")
        size = found["trained_at"]
        axes.plot(steps, found["curve_at_predicted"], "--", color="black", label=f"float, batch {size} (predicted)")
        axes.plot(steps, found["curve"], color="#d55e00", label=f"{found['spec']}, batch {result['batch']}")
        axes.set_yscale("log")
        # What diverges leaves through the top.
        axes.set_ylim(0.015, 5)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, frameon=False)
    for axes in panels[columns:]:
        axes.set_xlabel("training step")
    for axes in panels[::columns]:
        axes.set_ylabel("loss over all training images")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
