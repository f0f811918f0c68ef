"""Who leads at 2, 3 and 4 measured bits, under each coder and for several numbers of workers.

    python benchmarks/leaders.py SWEEP.sweep.db [...]

Prints one Markdown table for each sweep: the first two methods at each rate with their errors (share of gradient
energy lost), for 1, 8 and 64 workers. A method that has less error with fewer bits is shown with those bits.
``--make FOLDER`` captures the shipped CNN and the shipped transformer there and sweeps both first: about ten minutes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from gtrace.report.analysis.sweep import analyze
from gtrace.sweep import ResultStore

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
TARGETS = (2.0, 3.0, 4.0)
CODERS = ("fixed", "huffman", "entropy")
WORKERS = (1, 8, 64)
TRACES = {"digits_cnn": "0+7,90+7,180+7,260+7", "char_transformer": "0+7,100+7,200+7,290+7"}
METHODS = "qsgd,qsgdinf,terngrad,nuqsgd,natural,alq,amq,zipml,fp,minmax,signsgd,ef:signsgd,topk,ef:topk"
SWEEP = ["--methods", METHODS, "--bits", "2-8", "--ratio", "0.01,0.05,0.1,0.2"]


def make(folder):
    """Capture and sweep both samples; paths of the sweeps."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, steps in TRACES.items():
        trace = folder / f"{name}.zarr"
        capture = ["capture", "-o", str(trace), "--steps", steps, "--force", str(SAMPLES / f"{name}.py")]
        found.append(folder / f"{name}.sweep.db")
        for command in (capture, ["sweep", str(trace), *SWEEP, "-o", str(found[-1]), "--force"]):
            subprocess.run([sys.executable, "-m", "gtrace", *command], check=True, stdout=subprocess.DEVNULL)
    return found


def shown(family, k, first):
    """``qsgdinf 0.7%``, with the bits if they are not the target's, and a star if it shares the lead."""
    at = family.at[k]
    rate = f" at {at.bits:.2f}" if at.elsewhere else ""
    return f"{family.label}{'' if family.label not in first else '*'} {100 * at.variance:.3g}%{rate}"


def table(path):
    """The table of one sweep."""
    lines = ["| coder | workers | " + " | ".join(f"{t:g} bits" for t in TARGETS) + " |", "|---|--:|---|---|---|"]
    result = ResultStore.load(path)
    for coder in CODERS:
        for workers in WORKERS:
            analysis = analyze(result, path.stem, TARGETS, workers=workers, coder=coder)
            cells = []
            for k in range(len(TARGETS)):
                first = {family.label for family in analysis.leaders(k)}
                cells.append(", ".join(shown(family, k, first) for family in analysis.ranking(k)[:2]) or "–")
            lines.append(f"| {coder} | {workers} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweeps", nargs="*", type=Path, metavar="SWEEP")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    for path in [*(make(args.make) if args.make else []), *args.sweeps]:
        print(f"\n{path.name}\n\n{table(path)}")


if __name__ == "__main__":
    main()
