"""Final accuracy and measured compression of codecs in training, over several seeds, as a Markdown table.

Run with ``python benchmarks/training_table.py [--task digits-mlp] [--seeds 5] SPEC...``; docs/baselines.md holds
its output.
"""

import argparse
import statistics

from gtrace.training import Study

DEFAULT = (
    "mcgq",
    "mcgq:amount=0.1",
    "mcgq:accumulate=true",
    "mcgq:amount=0.1,accumulate=true",
    "dgc:ratio=0.01",
    "mem-sgd:ratio=0.01",
    "topk:ratio=0.01",
    "ef-signsgd",
    "signsgd",
    "qsgdinf:bits=3",
    "alq:bits=3",
    "powersgd:rank=2",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="digits-cnn")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("codecs", nargs="*", default=DEFAULT)
    args = parser.parse_args()
    found = {}
    for seed in range(args.seeds):
        study = Study(args.task, args.codecs, workers=args.workers, seed=seed, eval_every=10**9)
        study.run()
        for result in study.results:
            found.setdefault(result.run, []).append(result)
    exact = found.pop("none")
    print(f"{args.task}, {args.workers} workers, {exact[0].steps} steps, {args.seeds} seeds: mean and deviation\n")
    print("| codec | accuracy | difference to float32, paired | loss | bits per value | smaller than float32 |")
    print("|---|---|---|---|---|---|")
    for name, results in {"none": exact, **found}.items():
        accuracy = [100 * r.accuracy for r in results]
        apart = [100 * (r.accuracy - e.accuracy) for r, e in zip(results, exact, strict=True)]
        loss = [r.loss for r in results]
        ratio = statistics.mean(r.tally.ratio for r in results)
        print(
            f"| `{name}` | {show(accuracy, 2)} % | {show(apart, 2)} | {show(loss, 3)} "
            f"| {32 / ratio:.3g} | {ratio:.1f}x |"
        )


def show(values, digits):
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
