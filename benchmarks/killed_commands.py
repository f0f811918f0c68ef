"""Kills ``report``, ``plan`` and ``train`` with SIGKILL at random moments, and runs them again.

    python benchmarks/killed_commands.py [--kills 20] [--seed 0]

After each kill every output is absent or whole. Run again without a kill, a command leaves what it leaves undisturbed:
the same files, the same losses.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import gtrace
from gtrace.planning import load_plan

#: what it writes -> the command
COMMANDS = {
    "page.html": "report run.sweep.db -o page.html --force",
    "plan.toml": "plan run.zarr --max-bits 3 -o plan.toml --force",
    "log.jsonl": "train --task digits-mlp --codec qsgdinf:bits=3 --steps 30 --workers 2 -o log.jsonl",
}


class Process:
    """A command in a process of its own."""

    def __init__(self, *words, cwd):
        self._run = subprocess.Popen([sys.executable, "-m", "gtrace", *words], cwd=cwd, stdout=-3, stderr=-3)

    def end(self, by=None):
        """Its end, by a signal or by itself."""
        if by is not None:
            self._run.send_signal(by)
        self._run.wait()
        return self._run


def make(folder, *, swept):
    """A small trace, and its sweep."""
    with gtrace.create_trace(folder / "run.zarr") as writer:
        for step in range(6):
            values = np.random.default_rng(step).standard_normal(500).astype(np.float32)
            writer.append(step, "w", values)
            writer.append(step, "b", values[:50])
            writer.commit(step, loss=1 / (1 + step))
    if swept:
        gtrace.run_sweep(
            folder / "run.zarr", ["qsgdinf:bits=3", "nuqsgd:bits=3"], output=folder / "run.sweep.db", jobs=1
        )


def whole(path):
    """What an output says, which is the same in every run; None if there is none.

    Raises:
        AssertionError, TraceError: a part of it is there.
    """
    if not path.exists():
        return None
    if path.suffix == ".html":
        assert path.read_text().rstrip().endswith("</html>"), "half a page"
        return True
    if path.suffix == ".toml":
        return load_plan(path).tensors
    records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
    return [(record["step"], record["loss"]) for record in records if "loss" in record and "step" in record]


def kill(folder, kills, rng, start=Process, outputs=tuple(COMMANDS)):
    """Kill the command of each output so often; the number of kills that came before its end.

    Raises:
        AssertionError: an output is neither absent nor whole, or differs from that of an undisturbed run.
    """
    undisturbed, disturbed = folder / "undisturbed", folder / "disturbed"
    for place in (undisturbed, disturbed):
        place.mkdir()
        make(place, swept="page.html" in outputs)
    early = 0
    for name in outputs:
        line = COMMANDS[name]
        began = time.monotonic()
        assert start(*line.split(), cwd=undisturbed).end().returncode == 0
        seconds = time.monotonic() - began
        for _ in range(kills):
            running = start(*line.split(), cwd=disturbed)
            time.sleep(rng.uniform(0.1, 0.8) * seconds)
            try:
                early += running.end(signal.SIGKILL).returncode == -signal.SIGKILL
            except ProcessLookupError:
                running.end()
            if name != "log.jsonl":
                whole(disturbed / name)
        assert start(*line.split(), cwd=disturbed).end().returncode == 0
        assert whole(disturbed / name) == whole(undisturbed / name), name
        assert {path.name for path in disturbed.iterdir()} == {path.name for path in undisturbed.iterdir()}
    return early


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gtrace-killed-") as name:
        early = kill(Path(name), options.kills, random.Random(options.seed))
    print(f"{len(COMMANDS)} commands, {options.kills} kills each, {early} before the end: outputs whole and the same")
