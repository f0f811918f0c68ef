"""Training with compressed neural gradients, over several seeds, as Markdown tables.

Run with ``OMP_NUM_THREADS=1 python benchmarks/neural_training.py [--task digits-mlp] [--seeds 3] [TABLE...]``; its
output is in docs/neural-training.md. All tables of both tasks take about five minutes of CPU time. Cosines are means
over the weight gradients, from a shadow pass every 10 steps.
"""

import argparse
import statistics

from gtrace.training import Study

SPARSITIES = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
STATIC = (0, 4, 8, 12, 16, 20)
STEPS = {"digits-cnn": 100, "digits-mlp": 150}

#: table -> (layers, codecs)
TABLES = {
    "formats and pruning": (
        "inner",
        [f"fp:bits={bits}" for bits in (8, 6, 5, 4)]
        + [f"prune:sparsity={s}" for s in SPARSITIES]
        + [f"prune:sparsity={s},allocation=heterogeneous" for s in SPARSITIES[3:]]
        + [f"topk-prune:sparsity={s}" for s in SPARSITIES[3::2]],
    ),
    "exponents": (
        "inner",
        [
            *("fp:e3m0", "fp:e2m1", "fp:bits=4,scale=max,law=normal"),
            *("fp:e4m0", "fp:e3m1", "fp:e2m2", "fp:bits=5,scale=max,law=normal"),
            *("fp:e5m0", "fp:e4m1", "fp:e3m2", "fp:e2m3", "fp:bits=6,scale=max,law=normal"),
        ],
    ),
    "scales": (
        "inner",
        [
            *("fp:e3m0", "fp:e3m0,scale=absmax", "fp:e3m0,scale=max", "fp:e3m0,scope=model"),
            *(f"fp:e3m0,exponent={k}" for k in STATIC),
        ],
    ),
    "all layers": (
        "all",
        ["fp:bits=8", "fp:bits=6", "fp:bits=5", "fp:e3m0", "fp:e3m0,scale=absmax", "fp:e3m0,scale=max"]
        + ["fp:e3m0,scope=model"]
        + [f"fp:e3m0,exponent={k}" for k in STATIC[:4]]
        + ["prune:sparsity=0.8", "prune:sparsity=0.9"],
    ),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", action="append")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=None)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--refit", default="0,+10")
    parser.add_argument("tables", nargs="*", default=list(TABLES), metavar="TABLE")
    args = parser.parse_args()
    for task in args.task or ["digits-cnn", "digits-mlp"]:
        for table in args.tables:
            layers, codecs = TABLES[table]
            found = {}
            for seed in range(args.seeds):
                study = Study(
                    task,
                    codecs,
                    kind="neural",
                    layers=layers,
                    steps=args.steps or STEPS[task],
                    batch_size=args.batch_size,
                    seed=seed,
                    refit=args.refit,
                    shadow=10,
                    eval_every=10**9,
                )
                study.run()
                for result in study.results:
                    found.setdefault(result.run, []).append(result)
            steps, batch = study.settings.steps, study.settings.batch_size
            print(f"\n{table}: {task}, layers={layers}, {steps} steps of {batch} samples, refit {args.refit}, ", end="")
            print(f"{args.seeds} seeds: mean and deviation\n")
            print("| codec | accuracy | loss | cosine | lowest tensor | relative variance | zeros | smaller |")
            print("|---|---|---|---|---|---|---|---|", flush=True)
            for name, results in found.items():
                print(row(name, results), flush=True)


def row(name, results):
    """One line of a table."""
    cells = [f"`{name}`", f"{show([100 * r.accuracy for r in results], 1)} %", show([r.loss for r in results], 3)]
    worst = [r.shadow.worst for r in results]
    if None in worst:
        cells += ["-", "-"]
    else:
        cells += [f"{statistics.mean(r.shadow.cosine for r in results):.3f}"]
        cells += [f"{statistics.mean(w.cosine for w in worst):.3f}"]
    cells.append(f"{statistics.mean(r.relative_variance for r in results):.2g}")
    cells.append(f"{100 * statistics.mean(r.tally.sparsity for r in results):.0f} %")
    cells.append(f"{statistics.mean(r.tally.ratio for r in results):.1f}x")
    return f"| {' | '.join(cells)} |"


def show(values, digits):
    deviation = statistics.stdev(values) if len(values) > 1 else float("nan")
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}"


if __name__ == "__main__":
    main()
