"""The main job on shipped input: capture, sweep, train, report, each as the command that a user would type."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gtrace.errors import EXIT_INTERRUPTED, GtraceError, OutputExistsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

METHODS = "qsgd,qsgdinf,terngrad,nuqsgd,natural,alq,amq,zipml"
#: early, two in the middle, late: bursts of consecutive steps, so that codecs with memory can be replayed on it too
STEPS = "0+7,90+7,180+7,260+7"
SCRIPT = "digits_cnn.py"
#: what a demo writes into its folder
TRACE, SWEEP, RUN, PAGE = "digits_cnn.zarr", "digits_cnn.sweep.db", "digits_cnn.jsonl", "report.html"


class StepFailedError(GtraceError):
    """A command of a chain failed; its own message has been printed."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def samples_folder() -> Path:
    """Where the shipped samples are: in a checkout beside the package, in an installation inside it.

    Raises:
        UsageError: neither is there.
    """
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "samples", package / "workflows" / "samples"):
        if (folder / SCRIPT).is_file():
            return folder
    raise UsageError("the shipped samples are missing; reinstall gtrace, or run from a checkout")


def demo_commands(folder: Path) -> list[list[str]]:
    """The commands of the demo, as arguments of ``gtrace``."""
    script = str(samples_folder() / SCRIPT)
    trace, sweep, run = str(folder / TRACE), str(folder / SWEEP), str(folder / RUN)
    return [
        ["capture", "-o", trace, "--force", "--steps", STEPS, script],
        ["sweep", trace, "--methods", METHODS, "--bits", "2-8", "-o", sweep, "--force"],
        ["train", "--codec", "qsgdinf", "--bits", "3", "--workers", "4", "--task", "digits-cnn", "-o", run, "--force"],
        ["report", sweep, run, "-o", str(folder / PAGE), "--force"],
    ]


def run_demo(folder: Path, *, force: bool, say: Callable[[str], None]) -> Path:
    """Run the demo in ``folder``.

    Args:
        folder: made where it is missing.
        force: replace what an earlier demo wrote there.
        say: called with each command line before it runs.

    Returns:
        the path of the page.

    Raises:
        OutputExistsError: the folder holds files and ``force`` is off.
        UsageError: torch is missing.
        StepFailedError: a command failed.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder}: is a file and was left untouched; choose another -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise OutputExistsError(f"{folder}: holds files already and was left untouched; pass --force or another -o")
    folder.mkdir(parents=True, exist_ok=True)
    for arguments in demo_commands(folder):
        say(f"$ gtrace {shlex.join(arguments)}")
        _run(arguments)
    return folder / PAGE


def _run(arguments: Sequence[str]) -> None:
    command = [sys.executable, "-m", "gtrace", *arguments]
    # One thread per library: the sample's tensors are too small for pools to pay.
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    try:
        code = subprocess.run(command, env=environment, check=False).returncode
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    if code:
        raise StepFailedError(f"demo: 'gtrace {arguments[0]}' ended with exit code {code}", code)
