"""Fuzzes what reads untrusted bytes: decoders, parsers, traces, result files.

    python tests/fuzz/run.py --list
    python tests/fuzz/run.py --target decoder-alq --minutes 10
    python tests/fuzz/run.py --all --minutes 10 -o fuzzed        each target in a process of its own

With atheris installed the search is guided by coverage, with NUMBA_DISABLE_JIT=1 so that it sees into the kernels;
without it, or with ``--engine random``, seeds are edited at random. A finding is an exception other than GtraceError, a
broken promise, an input that takes more than ten seconds of the processor, or memory beyond 2 GB; its input is kept in
the output folder as TARGET-DIGEST.bin. Put it into tests/fuzz/findings/ under the same name and it is tried again by
every test run.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

HERE = Path(__file__).resolve().parent
SLOW_SECONDS = 10
MEMORY = 2 << 30


class Watch:
    """Runs inputs, counts them, and keeps those that are findings."""

    def __init__(self, name, seconds, folder):
        from fuzz.targets import target

        from gtrace.errors import GtraceError

        self.target = target(name)
        self._refusals = (GtraceError, UnicodeDecodeError) if self.target.text else (GtraceError,)
        self._name, self._folder, self._end = name, folder, time.monotonic() + seconds
        self.counts = {"executions": 0, "refused": 0, "answered": 0}
        self._known = set()

    @property
    def over(self):
        return time.monotonic() >= self._end

    def __call__(self, data):
        self.counts["executions"] += 1
        start = time.process_time()
        try:
            self.target.run(data)
            self.counts["answered"] += 1
        except self._refusals:
            self.counts["refused"] += 1
        except Exception as error:  # noqa: BLE001 - every other exception is what is looked for
            frames = [f for f in traceback.extract_tb(error.__traceback__) if "gtrace" in f.filename]
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
            self.keep(data, f"{type(error).__name__} at {where}: {str(error)[:200]}", f"{type(error).__name__} {where}")
        spent = time.process_time() - start
        if spent > SLOW_SECONDS:
            self.keep(data, f"{spent:.0f} s", "slow")

    def keep(self, data, told, kind):
        if kind in self._known:
            return
        self._known.add(kind)
        digest = hashlib.blake2b(data, digest_size=6).hexdigest()
        (self._folder / f"{self._name}-{digest}.bin").write_bytes(data)
        with (self._folder / f"{self._name}.findings").open("a") as file:
            file.write(json.dumps({"input": f"{self._name}-{digest}.bin", "what": told}) + "\n")

    def finish(self):
        counts = {**self.counts, "processor_seconds": time.process_time()}
        (self._folder / f"{self._name}.counts").write_text(json.dumps(counts))


def child(name, seconds, folder, engine):
    """Fuzz one target in this process and leave the counts in the folder."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY + (4 << 30),) * 2)
    if engine == "random":
        watch = Watch(name, seconds, folder)
        from fuzz.mutations import edited, random_edits

        rng = random.Random(0)
        for seed in watch.target.seeds:
            watch(seed)
        while not watch.over:
            watch(edited(rng.choice(watch.target.seeds), random_edits(rng)))
        watch.finish()
        return
    import atheris

    with atheris.instrument_imports(include=["gtrace"], enable_loader_override=False):
        watch = Watch(name, seconds, folder)
    corpus = folder / f"{name}.corpus"
    corpus.mkdir(exist_ok=True)
    for k, seed in enumerate(watch.target.seeds):
        (corpus / f"seed{k}").write_bytes(seed)

    def one(data):
        watch(data)
        if watch.over:
            watch.finish()
            os._exit(0)

    # By the clock, which runs on while other processes have the processor.
    limits = [f"-timeout={30 * SLOW_SECONDS}", f"-rss_limit_mb={MEMORY >> 20}", "-max_len=524288", "-seed=1"]
    atheris.Setup([sys.argv[0], str(corpus), *limits, "-verbosity=1", f"-artifact_prefix={folder}/{name}-"], one)
    atheris.Fuzz()


def fuzz(name, seconds, folder, engine):
    """Fuzz one target in a process of its own and return what came of it."""
    for suffix in (".counts", ".findings"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])}
    if engine == "atheris":
        env["NUMBA_DISABLE_JIT"] = "1"
    command = [sys.executable, __file__, "--child", name, "--seconds", str(seconds), "-o", str(folder)]
    # Every input is a file for some targets: in memory where there is such a place, and gone however the process ends.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="gtrace-fuzz-", dir=memory) as place:
        env["TMPDIR"] = place
        done = subprocess.run([*command, "--engine", engine], env=env, capture_output=True, text=True, errors="replace")
    counts, findings = folder / f"{name}.counts", folder / f"{name}.findings"
    found = [json.loads(line) for line in findings.read_text().splitlines()] if findings.exists() else []
    if not counts.exists():
        found.append({"input": "", "what": f"the process ended with {done.returncode}: {done.stderr[-500:]}"})
    covered = re.findall(r"cov: (\d+)", done.stderr)
    return {
        "target": name,
        "engine": engine,
        "seconds": seconds,
        **(json.loads(counts.read_text()) if counts.exists() else {"executions": None}),
        "coverage": int(covered[-1]) if covered else None,
        "findings": found,
    }


def table(results):
    """The results as a Markdown table."""
    lines = [
        "| target | minutes | of the processor | inputs | answered | refused | edges covered | findings |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in results:
        counts = (r.get(key) for key in ("executions", "answered", "refused", "coverage"))
        numbers = " | ".join("" if count is None else f"{count:,}" for count in counts)
        spent = f"{r['processor_seconds'] / 60:.2g}" if "processor_seconds" in r else ""
        lines.append(f"| {r['target']} | {r['seconds'] / 60:.2g} | {spent} | {numbers} | {len(r['findings'])} |")
    return "\n".join(lines)


def main():
    """Run the command line."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--target", nargs="+", default=[])
    options.add_argument("--all", action="store_true")
    options.add_argument("--list", action="store_true")
    options.add_argument("--minutes", type=float, default=10)
    options.add_argument("--engine", choices=["atheris", "random"])
    options.add_argument("--jobs", type=int, default=1, help="targets at a time")
    options.add_argument("-o", "--output", type=Path, default=Path("fuzzed"))
    options.add_argument("--child", help=argparse.SUPPRESS)
    options.add_argument("--seconds", type=float, help=argparse.SUPPRESS)
    given = options.parse_args()
    engine = given.engine or ("atheris" if importlib.util.find_spec("atheris") else "random")
    if given.child:
        child(given.child, given.seconds, given.output, engine)
        return 0
    sys.path.insert(0, str(HERE.parent))
    from fuzz.targets import MAKERS

    if given.list:
        print("\n".join(MAKERS))
        return 0
    given.output.mkdir(parents=True, exist_ok=True)
    results, names = [], list(MAKERS) if given.all else given.target
    with ThreadPoolExecutor(given.jobs) as pool:
        for done in as_completed([pool.submit(fuzz, name, 60 * given.minutes, given.output, engine) for name in names]):
            results.append(done.result())
            print(table(results[-1:]).splitlines()[-1], flush=True)
            for finding in results[-1]["findings"]:
                print(f"    {finding['input']}  {finding['what']}", flush=True)
            results.sort(key=lambda result: names.index(result["target"]))
            (given.output / "fuzz.json").write_text(json.dumps(results, indent=1) + "\n")
    return 1 if any(r["findings"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
