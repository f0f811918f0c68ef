"""Training with a plan against training with the best single codec, at equal measured bytes; as Markdown.

Run with ``python benchmarks/plan_training.py [--bits 2] [--steps 120] [--seeds 3]``; docs/planning.md holds its output.

Criteria, set down before the first run:

1. Bytes: the plan sends at most 3 % more than the single codec it is compared with.
2. Error: the relative variance of the averaged gradient is lower with the plan, in every seed.
3. Loss and accuracy: a difference counts where all seeds have the same sign; otherwise there is none to be seen.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from gtrace.planning import load_plan
from gtrace.training import Study

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
#: task -> the sample that has the same model, and the objectives that are tried
TASKS = {"digits-cnn": ("digits_cnn.py", ("squared",)), "char-lstm": ("char_lstm.py", ("squared", "relative"))}
BURSTS = "0+2,10+2,30+2,60+2,90+2,120+2"


def gtrace(*words):
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    subprocess.run([sys.executable, "-m", "gtrace", *words], check=True, env=environment, stdout=subprocess.DEVNULL)


def plans(task, bits, folder):
    """The best single codec within the bits, and plans of no more than what it takes."""
    script, objectives = TASKS[task]
    trace = str(folder / f"{task}.zarr")
    gtrace("capture", "-o", trace, "--force", "--steps", BURSTS, str(SAMPLES / script))
    file = folder / f"{task}-single.yaml"
    gtrace("plan", trace, "--budget", f"{bits}bits", "--uniform", "-o", str(file), "--force")
    single = load_plan(file)
    made = []
    for objective in objectives:
        file = folder / f"{task}-{objective}.yaml"
        budget = f"{single.totals.bits:.6f}bits"
        gtrace("plan", trace, "--budget", budget, "--objective", objective, "-o", str(file), "--force")
        made.append(load_plan(file))
    return single, made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("tasks", nargs="*", default=list(TASKS))
    args = parser.parse_args()
    for task in args.tasks:
        with tempfile.TemporaryDirectory() as folder:
            single, made = plans(task, args.bits, Path(folder))
        study = Study(
            task, [single.default, *made], steps=args.steps, seeds=args.seeds, eval_every=args.steps, workers=4
        )
        study.run()
        found = {}
        for result in study.results:
            found.setdefault(result.run, []).append(result)
        print(
            f"\n{task}, 4 workers, {args.steps} steps, {args.seeds} seeds; planned for {single.totals.bits:.3g} bits\n"
        )
        print(
            "| codec | bits sent | variance of the average | over single's, by seed | loss | less single's | accuracy |"
        )
        print("|---|---|---|---|---|---|---|")
        base = found[single.default]
        for name, results in found.items():
            error = [r.relative_variance / b.relative_variance for r, b in zip(results, base, strict=True)]
            apart = [r.loss - b.loss for r, b in zip(results, base, strict=True)]
            print(
                f"| `{name}` | {spread([r.tally.bits_per_element for r in results], 3)} "
                f"| {spread([r.relative_variance for r in results], 4)} "
                f"| {', '.join(f'{value:.2f}' for value in error)} | {spread([r.loss for r in results], 4)} "
                f"| {', '.join(f'{value:+.4f}' for value in apart)} "
                f"| {'-' if results[0].accuracy is None else spread([100 * r.accuracy for r in results], 2) + ' %'} |",
                flush=True,
            )


def spread(values, digits):
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
