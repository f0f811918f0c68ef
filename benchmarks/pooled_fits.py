"""How many steps a fit should look back: error of levels one captured step after the data that they were fitted to.

    python benchmarks/pooled_fits.py [TRACE ...] [--bits 3,4,6,8]

Without a trace it captures two: the demo's, and a transformer's (benchmarks/char_transformer.py), both at the demo's
steps. Prints a Markdown table per trace: for each codec and rule the relative variance over all steps but the first,
how many times that of the best levels of the same number, and bits per value, without what is sent of levels and
codes. docs/concepts/fits.md shows it.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import gtrace
from gtrace.cli.advise import STEPS
from gtrace.fitting import optimal_levels, pooling

HERE = Path(__file__).resolve().parent
SCRIPTS = {"digits CNN": HERE.parent / "samples" / "digits_cnn.py", "transformer": HERE / "char_transformer.py"}
#: name -> steps looked back at, weight of a step relative to the next one, with a value of unknown magnitude
RULES = {
    "the step itself": (0, 1.0, False),
    "the step before": (1, 1.0, False),
    "5 steps, equal weights": (5, 1.0, False),
    "10 steps, 0.8": (10, 0.8, False),
    "10 steps, 0.5, unseen": (10, 0.5, True),
    "10 steps, 0.8, unseen": (10, 0.8, True),
    "20 steps, 0.9, unseen": (20, 0.9, True),
}


def fitted(sketches, k, rule):
    """What the codec of step ``k`` is fitted to."""
    steps, decay, unseen = rule
    if steps < 2:
        return sketches[k - steps]
    pooling.DECAY = decay
    pool = pooling.Pool()
    for sketch in sketches[max(0, k - steps) : k]:
        pool.add(sketch.alone)
    return (pool.mean() if unseen else pool.total)[0]


def judge(trace, spec, rules):
    """rule -> relative variance, bits; and the optimum."""
    codec = gtrace.codec(spec)
    errors, bits = dict.fromkeys(rules, 0.0), dict.fromkeys(rules, 0.0)
    energy = optimum = values = 0.0
    for info in trace.tensors:
        sketches = [
            gtrace.MomentSketch.from_spec(trace.read(info.name, step), codec.needs)
            for step in trace.steps(info.name).tolist()
        ]
        for k, now in enumerate(sketches[1:], 1):
            energy += now.energy
            values += info.size
            optimum += now.expected_error(optimal_levels(now, 2 ** (codec.bits - 1), method="sketch"))
            for name, rule in rules.items():
                state = codec.fit(codec.init(info.size), fitted(sketches, k, rule), k)
                found = codec.expect(state, now)
                errors[name] += found.squared_error
                coded = found.bits_payload if np.isfinite(found.bits_payload) else found.bits_fixed
                bits[name] += coded * info.size
    return {name: (errors[name] / energy, errors[name] / optimum, bits[name] / values) for name in rules}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--bits", default="3,4,6,8")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        traces = {path.name: path for path in args.traces}
        if not traces:
            for name, script in SCRIPTS.items():
                traces[name] = Path(folder, f"{script.stem}.zarr")
                command = [sys.executable, "-m", "gtrace", "capture", "--steps", STEPS, "-o", str(traces[name])]
                subprocess.run([*command, str(script)], check=True, stdout=subprocess.DEVNULL)
        specs = [f"{method}:bits={bits}" for method in ("alq", "zipml") for bits in args.bits.split(",")]
        for name, path in traces.items():
            print(f"\n{name}\n\n| fitted to | {' | '.join(specs)} |\n|---{'|---' * len(specs)}|")
            with gtrace.open_trace(path) as trace:
                columns = [judge(trace, spec, RULES) for spec in specs]
            for rule in RULES:
                cells = [
                    f"{error:.3g} ({times:.2f}x, {bits:.2f} bits)" for error, times, bits in (c[rule] for c in columns)
                ]
                print(f"| {rule} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
