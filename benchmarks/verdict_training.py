"""Verdicts of one recorded run against whole trainings: four scripts, twenty codecs; as Markdown.

Run with ``OMP_NUM_THREADS=1 python benchmarks/verdict_training.py FOLDER [SCRIPT]...``. FOLDER keeps the run logs, so
that an interrupted run goes on. With all scripts, the tables go to results/verdict-training.md; docs/noise.md says what
they mean.

Each script of samples/ is trained as a user would: recorded once (``gtrace capture``, seed 100), swept, and judged by
``gtrace report``. Then it trains from the start, with every codec and without, with other seeds (``gtrace train
--compare``), and without a codec at three quarters of the batch for as many steps. Where a codec is said to shorten
Adam's steps by a share x of at least a fiftieth, it trains once more with the learning rate divided by 1 - x.

CRITERIA, written down before the first training:

1. A run's loss is the mean of the logarithm of the training loss over its last tenth of steps. What counts is the
   difference from the run without a codec of the same seed, with a 95% t-interval over seeds.
2. A codec *loses* if the interval is above 0; it *loses nothing* if the interval ends below the mean loss of three
   quarters of the batch. Otherwise the trainings do not tell.
3. "Safe" promises a tenth of the batch at most. It is wrong if the interval is above the mean loss of three quarters of
   the batch, and above 0. "At risk" is wrong if the codec loses nothing.
4. "Cannot tell" is never wrong; how many of these codecs lose says what the caution is worth.

ADDED after two seeds of digits_mlp, which showed that losses followed the shorter steps: the trainings with another
learning rate. For the other scripts, what counts is decided beforehand: the higher rate *makes up* for shorter steps if
it takes away at least three quarters of what the codec loses, in the mean over seeds.

ADDED with the rule that the likely value of a prediction, a bias or shorter steps put a codec at risk: eight codecs
that the rule had not been looked at with, by the same criteria, with three seeds each and no other learning rate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

SAMPLES = Path(__file__).resolve().parents[1] / "samples"
RESULT = Path(__file__).parent / "results" / "verdict-training.md"
TITLE = """# Verdicts against whole trainings

Made by `python benchmarks/verdict_training.py`; docs/noise.md says what it means.

"""
CODECS = (
    "fp:e4m3",
    "qsgdinf:bits=4",
    "qsgdinf:bits=3",
    "qsgdinf:bits=2",
    "alq:bits=3",
    "nuqsgd:bits=4",
    "nuqsgd:bits=3",
    "randomk:ratio=0.1",
    "topk:ratio=0.05",
    "ef:topk:ratio=0.02",
    "signsgd",
    "ef:signsgd",
)
#: those that were chosen after the rule
LATER = (
    "natural",
    "terngrad",
    "zipml:bits=3",
    "qsgd:bits=4",
    "eden:bits=1",
    "int8",
    "powersgd",
    "dgc:ratio=0.05",
)


class Task(NamedTuple):
    """A script, its learning rate, options for three quarters of the batch and as many steps, and number of seeds."""

    script: str
    rate: float
    smaller: tuple[str, ...]
    seeds: int


TASKS = (
    Task("digits_mlp", 1e-3, ("--batch-size", "24", "--epochs", "15"), 4),
    Task("char_lstm", 4e-3, ("--batch-size", "12"), 4),
    Task("char_transformer", 3e-3, ("--batch-size", "12"), 3),
    Task("digits_cnn", 0.05, ("--batch-size", "48", "--epochs", "9"), 4),
)
#: of these
LATER_SEEDS = 3
#: the least share of a step whose loss is made up for by the learning rate
LEAST = 0.02


def gtrace(*arguments: object) -> str:
    """Standard output of a command."""
    command = [sys.executable, "-m", "gtrace", *map(str, arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def script(task: Task, seed: int, *more: str) -> tuple[str, ...]:
    """A training of a task, for the end of a command."""
    return str(SAMPLES / f"{task.script}.py"), "--seed", str(seed), *more


def verdicts(task: Task, folder: Path) -> dict[str, dict]:
    """Codec -> what a report of one recorded run says of it."""
    trace, judged = folder / f"{task.script}.zarr", {}
    if not trace.exists():
        gtrace("capture", "-o", trace, *script(task, 100))
    for name, codecs in ((task.script, CODECS), (f"{task.script}-later", LATER)):
        store = folder / f"{name}.db"
        if not store.exists():
            gtrace("sweep", trace, "--methods", ",".join(codecs), "-o", store)
        judged |= json.loads(gtrace("report", store, "--json"))["sweeps"][0]["safety"]["judged"]
    return judged


def losses(log: Path, *training: object) -> dict[str, float]:
    """Run -> mean logarithm of the training loss over the last tenth of its steps, of a training that may be made."""
    if not log.exists():
        partial = log.with_suffix(".partial")
        gtrace("train", "--force", "-o", partial, *training)
        partial.replace(log)
    found: dict[str, list[float]] = {}
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if record["type"] == "step":
            own = found.setdefault(record["run"], [])
            # A run that has diverged counts with the loss that it began with.
            own.append(own[0] if record["loss"] is None else record["loss"])
    return {run: float(np.log(loss[-(len(loss) // 10) :]).mean()) for run, loss in found.items()}


def trained(task: Task, judged: dict[str, dict], folder: Path) -> dict[str, list[float]]:
    """Run -> its loss less that of the run without a codec, by seed.

    "smaller" is three quarters of the batch; "raised CODEC" has a higher learning rate.
    """
    apart: dict[str, list[float]] = {}
    for seed in range(task.seeds):
        everything = "--compare", ",".join(CODECS), *script(task, seed)
        runs = losses(folder / f"{task.script}-{seed}.jsonl", *everything)
        more = {"smaller": ("none", task.smaller)}
        for spec in CODECS:
            shorter = shorter_steps(judged[spec])
            if shorter >= LEAST:
                more[f"raised {spec}"] = spec, ("--lr", f"{task.rate / (1 - shorter):.3g}")
        for name, (spec, options) in more.items():
            log = folder / f"{task.script}-{seed}-{name.replace(' ', '-').replace(':', '-')}.jsonl"
            (runs[name],) = losses(log, "--codec", spec, *script(task, seed, *options)).values()
        if seed < LATER_SEEDS:
            everything = "--compare", ",".join(LATER), *script(task, seed)
            runs |= losses(folder / f"{task.script}-{seed}-later.jsonl", *everything)
        none = runs.pop("none")
        for run, loss in runs.items():
            apart.setdefault(run, []).append(loss - none)
    return apart


def shorter_steps(judged: dict) -> float:
    """By what share a codec shortens Adam's steps, by a report; 0 if it does not say."""
    return (judged["prediction"] or {}).get("shorter_steps") or 0.0


def main() -> None:
    """Train what is missing, print the tables and write them."""
    folder, chosen = Path(sys.argv[1]), sys.argv[2:]
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[tuple[bool, str, str]] = Counter()
    lines = []
    for task in TASKS:
        if chosen and task.script not in chosen:
            continue
        judged = verdicts(task, folder)
        apart = trained(task, judged, folder)
        quarter = interval(apart["smaller"])
        lines += ["", f"{task.script}: three quarters of the batch {percent(quarter)}", ""]
        lines += ["| codec | verdict | batch left | shorter steps | loss | outcome | with the rate raised |"]
        lines += ["|---|---|--:|--:|--:|---|--:|"]
        for spec in (*CODECS, *LATER):
            verdict, found = judged[spec]["verdict"], interval(apart[spec])
            outcome = "unclear"
            if found.low > 0:
                outcome = "loses much" if found.low > quarter.estimate else "loses"
            elif found.high < quarter.estimate:
                outcome = "loses nothing"
            counts[spec in LATER, verdict, outcome] += 1
            told = judged[spec]["prediction"] or {}
            left = f"{told['equivalent_batch'] / told['batch']:.0%}" if told.get("equivalent_batch") else "–"
            shorter = f"{shorter_steps(judged[spec]):.0%}" if shorter_steps(judged[spec]) else "–"
            raised = percent(interval(apart[f"raised {spec}"])) if f"raised {spec}" in apart else "–"
            lines.append(f"| `{spec}` | {verdict} | {left} | {shorter} | {percent(found)} | {outcome} | {raised} |")
    outcomes = ("loses nothing", "unclear", "loses", "loses much")
    for later, title in ((False, "twelve codecs"), (True, "eight codecs chosen after the rule")):
        lines += ["", f"| {title} | " + " | ".join(outcomes) + " |", "|---|--:|--:|--:|--:|"]
        for verdict in ("safe", "cannot tell", "at risk"):
            numbers = (str(counts[later, verdict, outcome]) for outcome in outcomes)
            lines.append(f"| {verdict} | " + " | ".join(numbers) + " |")
    text = "\n".join(lines).strip() + "\n"
    print(text, end="")
    if not chosen:
        RESULT.write_text(TITLE + text)


class Interval(NamedTuple):
    """A mean over seeds, with the ends of its 95% interval."""

    estimate: float
    low: float
    high: float


def interval(values: list[float]) -> Interval:
    """The mean of values and its t-interval."""
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return Interval(float(np.mean(values)), float(low), float(high))


def percent(found: Interval) -> str:
    """A difference of logarithms and its interval: changes in percent, or multiples if they are large."""
    if found.estimate > np.log(4):
        estimate, low, high = np.exp(found)
        return f"{estimate:.3g}x ({low:.3g}x to {high:.3g}x)"
    digits = 0 if found.estimate > np.log(1.1) else 1
    estimate, low, high = (f"{np.expm1(value):+.{digits}%}" for value in found)
    return f"{estimate} ({low} to {high})"


if __name__ == "__main__":
    main()
