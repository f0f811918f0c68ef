"""The main job on shipped input: capture, sweep, train, report, each as the command that a user would type."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from gtrace.errors import EXIT_INTERRUPTED, GtraceError, OutputExistsError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

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
    """Where the shipped samples are: in a checkout beside the package, in an installation inside it."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parent / "samples", package / "workflows" / "samples"):
        if (folder / SCRIPT).is_file():
            return folder
    raise UsageError("the shipped samples are missing; reinstall gtrace, or run from a checkout")


def demo_commands() -> list[list[str]]:
    """The commands of the demo in its folder, as arguments of ``gtrace``; the last one is the report."""
    return [
        ["capture", "--steps", STEPS, str(samples_folder() / SCRIPT)],
        ["sweep", TRACE],
        ["train", "--codec", "qsgdinf", "--bits", "3", "--task", "digits-cnn", "-o", RUN],
        ["report", SWEEP, RUN, "-o", PAGE],
    ]


def run_demo(folder: Path, *, force: bool, say: Callable[[str], None]) -> Path:
    """Run the demo in ``folder``, which is made if it is missing, and return the path of the page.

    ``say`` is called with each command line before it runs, and with the answer of the report.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder}: is a file and was left untouched; choose another -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise OutputExistsError(f"{folder} holds files already. Use --force to replace them or -o to write elsewhere.")
    folder.mkdir(parents=True, exist_ok=True)
    printed = ""
    for arguments in demo_commands():
        say(f"$ gtrace {shlex.join(arguments)}")
        printed = _run([arguments[0], "--force", *arguments[1:]], folder)
    # The verdict and its table; the page's path is said by the caller.
    say("\n" + "\n\n".join(printed.split("\n\n")[:2]))
    return folder / PAGE


def _run(arguments: Sequence[str], folder: Path) -> str:
    """Run one command in the folder; what it prints is returned, and shown if it fails."""
    command = [sys.executable, "-m", "gtrace", *arguments]
    # One thread per library: the sample's tensors are too small for pools to pay.
    width = str(shutil.get_terminal_size().columns)
    environment = {"OMP_NUM_THREADS": "1", "COLUMNS": width, **os.environ}
    if sys.path[0]:
        # A checkout that is run from its own folder is found from the demo's folder, too.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    try:
        done = subprocess.run(
            command,
            env=environment,
            check=False,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        code, printed = done.returncode, done.stdout
    except KeyboardInterrupt:
        code, printed = EXIT_INTERRUPTED, ""
    if code:
        sys.stderr.write(printed)
        raise StepFailedError(f"demo: 'gtrace {arguments[0]}' ended with exit code {code}", code)
    return printed
