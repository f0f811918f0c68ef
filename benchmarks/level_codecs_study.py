"""Level codecs in training: accuracy, variance and cost over seeds, as a Markdown table.

Run with ``python benchmarks/level_codecs_study.py [--task fashion-resnet8] [--seeds 3] [--steps N] [--batch-size N]``,
or with run logs of ``gtrace train --compare`` as arguments, which are then only summed up. docs/training.md holds its
output.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from gtrace.runlog import read_runlog
from gtrace.training import Study

CODECS = (
    "alq:bits=3",
    "alq-n:bits=3",
    "amq:bits=3",
    "amq-n:bits=3",
    "zipml:bits=3",
    "qsgdinf:bits=3",
    "terngrad",
    "nuqsgd:bits=3",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("logs", nargs="*", type=Path)
    parser.add_argument("--task", default="fashion-resnet8")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch-size", type=int)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not args.logs:
            args.logs = [Path(folder) / "log.jsonl"]
            study = Study(
                args.task, CODECS, seeds=args.seeds, steps=args.steps, batch_size=args.batch_size, eval_every=10**6
            )
            study.run(args.logs[0])
        records = [record for log in args.logs for record in read_runlog(log)]
    head = records[0]
    runs = {}
    for record in records:
        if "run" in record:
            runs.setdefault(record["run"], {}).setdefault(record["seed"], []).append(record)
    seeds = len(next(iter(runs.values())))
    print(
        f"{head['task']}, {head['workers']} workers with {head['batch_size']} samples each, {head['steps']} steps, "
        f"{seeds} seeds: mean and deviation over seeds.\n"
    )
    print("| codec | test accuracy | variance, one worker | variance of the mean | bits | codec CPU |")
    print("|---|---|---|---|---|---|")
    for name, by_seed in runs.items():
        found = [summary(one) for one in by_seed.values()]
        cells = [spread([one[k] for one in found], form) for k, form in enumerate((".2f", ".3g", ".3g", ".2f", ".0f"))]
        print(f"| `{name}` | {cells[0]} % | {cells[1]} | {cells[2]} | {cells[3]} | {cells[4].split(' ')[0]} % |")


def summary(records):
    """Of one run: accuracy in percent, both variances, bits per value, the codec's share of CPU time in percent."""
    steps = [record for record in records if record["type"] == "step"]
    ends = [record for record in records if record["type"] == "end"]
    total = {
        name: sum(record[name] for record in steps) for name in ("bits", "bits_float32", "codec_seconds", "seconds")
    }
    return (
        100 * ends[-1]["accuracy"],
        statistics.mean(record["worker_variance"] for record in steps),
        statistics.mean(record["relative_variance"] for record in steps),
        32 * total["bits"] / total["bits_float32"],
        100 * total["codec_seconds"] / total["seconds"],
    )


def spread(values, form):
    if len(values) < 2:
        return format(values[0], form)
    return f"{format(statistics.mean(values), form)} ± {format(statistics.stdev(values), form)}"


if __name__ == "__main__":
    main()
