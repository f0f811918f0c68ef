"""What gtrace computes and shows, pinned, so that a change of its structure can show that nothing moved.

    python benchmarks/pins.py            # compare with results/pins.json; exit code 1 if anything moved
    python benchmarks/pins.py --write    # keep what is computed now

Pins, for every configuration that the tests know (``tests/helpers_variants.py``): the sums of every numeric column over
the rows of a small made-up trace, and the SHA-256 of three payloads with what a receiver must hold. Also the help of
every command, and the words and tables of a report. Digests depend on the processor's rounding, so compare on the
machine, or the kind of machine, that wrote them.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
sys.path.insert(0, str(ROOT))
PINS = ROOT / "benchmarks" / "results" / "pins.json"
TENSORS = (("conv.weight", (24, 5, 5, 5)), ("fc.weight", (20, 35)), ("fc.bias", (10,)))
#: columns that are times
TIMED = re.compile("seconds|_ms$|_ns$")


def gradients(step):
    """The made-up gradients of a step: heavy tails, one tensor falls and one has exact zeros."""
    rng = np.random.default_rng(step)
    for name, shape in TENSORS:
        values = (rng.standard_t(4, shape) * 0.01 / (1 + step)).astype(np.float32)
        if name == "fc.weight":
            values[np.abs(values) < 0.002] = 0
        yield name, values


def sweep_rows(folder, variants):
    """Spec -> {column: sum over its rows}, of expectations and draws apart."""
    import gtrace

    path = folder / "pins.zarr"
    with gtrace.create_trace(path) as writer:
        for step in range(4):
            for name, values in gradients(step):
                writer.append(step, name, values)
            writer.commit(step, loss=1.0 / (step + 1), lr=0.1)
    found = {}
    for row in gtrace.run_sweep(path, variants, draws=2, jobs=1).rows():
        entry = found.setdefault(f"{row['codec']} {'expected' if row['draw'] < 0 else 'drawn'}", {"rows": 0})
        entry["rows"] += 1
        for column, value in row.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if number and math.isfinite(value) and not TIMED.search(column):
                entry[column] = entry.get(column, 0.0) + value
    return {spec: {column: float(f"{value:.9g}") for column, value in entry.items()} for spec, entry in found.items()}


def payloads(variants):
    """Spec -> digest of the payloads and shared bytes of one tensor over three steps, with memory."""
    import gtrace
    from gtrace.sketch import MomentSketch
    from gtrace.types import Key

    found = {}
    for spec in variants:
        codec, digest = gtrace.codec(spec), hashlib.sha256()
        state = codec.init(3000, (24, 5, 5, 5))
        for step in range(3):
            values = dict(gradients(step))["conv.weight"].reshape(-1)
            if codec.needs is not None:
                summary = MomentSketch.from_spec(codec.view(state, values), codec.needs)
                if codec.allocates:
                    state = codec.with_target(state, codec.allocate([summary])[0])
                state = codec.fit(state, summary, step)
            shared = codec.shared(state)
            payload = codec.encode(state, values, Key.derive(0, tensor="conv.weight", step=step, worker=0, role="up"))
            # What a receiver keeps, the sender keeps, too.
            decoded = codec.receive(state, shared, payload)[0]
            state = codec.update(state, values, decoded)
            for part in (shared, payload, decoded.tobytes()):
                digest.update(hashlib.sha256(part).digest())
        found[spec] = digest.hexdigest()[:16]
    return found


def helps():
    """Command -> its help, white space as one blank."""

    def shown(*command):
        run = [sys.executable, "-m", "gtrace", *command, "--help"]
        return subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout

    listed = shown()
    # Two blanks at least follow a command's name; prose below the commands has one.
    names = re.findall(r"^  ([a-z]+)  ", listed.partition("Commands:")[2], re.MULTILINE)
    found = {"": listed, **{name: shown(name) for name in names}}
    return {name: " ".join(text.split()) for name, text in found.items()}


def pages(folder):
    """The words of a report of made-up rows, as a page and as text."""
    from helpers_report import PROVENANCE, result_of, rows_of, write_runs

    import gtrace.report

    result = result_of(rows_of(bits=range(2, 7), steps=(0, 10, 20), draws=1), ["fc1: 2 NaN"], PROVENANCE)
    log = write_runs(folder / "train.jsonl", steps=40)
    page = gtrace.report.write_html(folder / "page.html", [result], [log]).read_text(encoding="utf-8")
    pictures = page.count("<svg")
    page = re.sub(r"<(script|style|svg).*?</\1>", " ", page, flags=re.DOTALL)
    words = html.unescape(re.sub(r"<[^>]+>", " ", page)).replace(str(folder), "FOLDER")
    return {"words": " ".join(words.split()), "pictures": pictures, "tables": page.count("<table")}


def measure():
    """All pins."""
    from helpers_variants import VARIANTS

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return {
            "rows": sweep_rows(folder, VARIANTS),
            "payloads": payloads(VARIANTS),
            "help": helps(),
            "page": pages(folder),
        }


def differences(old, new, path=""):
    """One line for each value that is not the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys(), key=str):
            where = f"{path}/{key}"
            if key not in new or key not in old:
                yield f"{where}: {'gone' if key not in new else 'new'}"
            else:
                yield from differences(old[key], new[key], where)
    elif isinstance(old, float) and isinstance(new, float):
        if not math.isclose(old, new, rel_tol=1e-6):
            yield f"{path}: {old!r} -> {new!r}"
    elif old != new:
        was, now = str(old), str(new)
        at = next((k for k, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), 0)
        yield f"{path}: ...{was[max(0, at - 40) : at + 60]!r} -> ...{now[max(0, at - 40) : at + 60]!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = measure()
    if args.write:
        PINS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return 0
    moved = list(differences(json.loads(PINS.read_text(encoding="utf-8")), found))
    print("\n".join(moved) or "nothing moved")
    return int(bool(moved))


if __name__ == "__main__":
    sys.exit(main())
