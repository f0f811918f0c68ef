"""Builds the release and tries it: sdist, wheel from that sdist, and a fresh environment for each Python.

    python benchmarks/release_check.py [PYTHON ...]

Without arguments it takes python3.11, python3.12 and python3.13; one that is not installed is named and left out. In
each environment the wheel is installed with its dependencies and without PyTorch. Then gtrace makes a trace, sweeps it,
reports and compresses one gradient, outside the checkout. The first sweep compiles kernels: a minute or two each.
Exit status 1 if anything fails.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
IN_WHEEL = ("gtrace/py.typed", "gtrace/workflows/samples/digits_cnn.py", "share/man/man1/gtrace.1", "licenses/LICENSE")
IN_SDIST = (
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
    "README.md",
    "constraints.txt",
    "pyproject.toml",
    "docs/gtrace.1",
)
#: the smallest path that needs no PyTorch
MAKE = """
import numpy as np, gtrace
with gtrace.create_trace("run.zarr") as writer:
    for step in range(3):
        writer.append(step, "w", np.random.default_rng(step).standard_normal(4096).astype(np.float32))
        writer.commit(step, loss=1.0)
sent = gtrace.compress(gtrace.open_trace("run.zarr").read("w", 0), "qsgdinf:bits=4")
assert 0 < sent.error < 0.2 and 2 < sent.bits < 5, sent
"""
COMMANDS = (
    "gtrace --version",
    "python -c MAKE",
    "gtrace info run.zarr",
    "gtrace sweep run.zarr --methods qsgdinf,bf16 --bits 4",
    "gtrace report run.sweep.db -o page.html",
)


class FailedError(Exception):
    """What is wrong with the release, in one line."""


def run(words: list[str], cwd: Path | None = None) -> str:
    """The output of a program, which sees nothing of this checkout.

    Raises:
        FailedError: it ended with an error; the message has its last lines.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")} | {"OMP_NUM_THREADS": "1"}
    if cwd is not None:
        environment["XDG_CACHE_HOME"] = str(cwd / "cache")
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    if done.returncode:
        raise FailedError(f"{' '.join(words[:3])}: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def built(folder: Path) -> Path:
    """The wheel, made from the sdist, after a look into both."""
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)])
    version = re.search(r'__version__ = "(.*)"', (ROOT / "gtrace/__init__.py").read_text())[1]
    (wheel,), (sdist,) = (
        folder.glob(f"gradtrace-{version}-py3-none-any.whl"),
        folder.glob(f"gradtrace-{version}.tar.gz"),
    )
    with zipfile.ZipFile(wheel) as archive:
        check(wheel, archive.namelist(), IN_WHEEL)
    with tarfile.open(sdist) as archive:
        check(sdist, archive.getnames(), IN_SDIST)
    if f"\nversion: {version}\n" not in (ROOT / "CITATION.cff").read_text():
        raise FailedError(f"CITATION.cff: its version is not {version}")
    return wheel


def check(path: Path, names: list[str], wanted: tuple[str, ...]) -> None:
    """See that an archive holds files with these ends, and neither bytecode nor, in a wheel, tests."""
    missing = [end for end in wanted if not any(name.endswith(end) for name in names)]
    extra = [name for name in names if name.endswith(".pyc") or (path.suffix == ".whl" and "tests/" in name)]
    if missing or extra:
        raise FailedError(f"{path.name}: lacks {missing}, holds {extra[:5]}")


def tried(python: str, wheel: Path, folder: Path) -> str:
    """Install the wheel for a Python and run the smallest path; the versions that ran."""
    start = time.monotonic()
    run([python, "-m", "venv", str(folder)])
    here = folder / "bin"
    run([str(here / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
    work = folder / "work"
    work.mkdir()
    for line in COMMANDS:
        program, *words = [MAKE if word == "MAKE" else word for word in line.split()]
        run([str(here / program), *words], cwd=work)
    if not (folder / "share/man/man1/gtrace.1").is_file() or not (work / "page.html").is_file():
        raise FailedError("no manual page, or no report")
    version = run(
        [
            str(here / "python"),
            "-c",
            "import platform, numpy, numba; "
            "print(platform.python_version(), 'numpy', numpy.__version__, 'numba', numba.__version__)",
        ]
    )
    return f"{version.strip()}, {time.monotonic() - start:.0f} s"


def works(python: str) -> bool:
    """Whether there is such a Python; a shim may name one that is not."""
    found = shutil.which(python)
    return found is not None and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode


def main() -> None:
    failed = 0
    with tempfile.TemporaryDirectory(prefix="gtrace-release-") as scratch:
        folder = Path(scratch)
        try:
            wheel = built(folder)
        except FailedError as error:
            sys.exit(f"build: {error}")
        print(f"{wheel.name}: holds what it should, and so does the sdist", flush=True)
        for number, python in enumerate(sys.argv[1:] or PYTHONS):
            if not works(python):
                print(f"{python}: not installed, left out", flush=True)
                continue
            try:
                print(f"{python}: works, {tried(python, wheel, folder / str(number))}", flush=True)
            except FailedError as error:
                failed += 1
                print(f"{python}: FAILED: {error}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
