"""Shared by the tests of the host layer and of capture: scripts in a folder, and processes that run them."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Self

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession
from gtrace.capture.options import EveryStep

SAMPLES = Path(__file__).resolve().parent.parent / "samples"


class Captured:
    """A captured block, every step of it unless options say otherwise; what the user is told is kept."""

    def __init__(self, path: Path, **options: object) -> None:
        self.path, self.said = path, []
        self.session = CaptureSession(CaptureOptions(path, **({"policy": EveryStep()} | options)), say=self.said.append)

    def __enter__(self) -> Self:
        self.session.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.summary = self.session.finish("complete")

    @functools.cached_property
    def trace(self) -> gtrace.Trace:
        return gtrace.open_trace(self.path)


def environment() -> dict[str, str]:
    """Of child processes: one thread, and no rank left over from a launcher."""
    kept = {name: value for name, value in os.environ.items() if name != "RANK"}
    return {**kept, "OMP_NUM_THREADS": "1"}


def write_script(path: Path, source: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(source).lstrip("\n"))
    return path


def run_python(*args: object, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, args)]
    return subprocess.run(
        command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout, check=False
    )


def run_gtrace(*args: object, cwd: Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "gtrace", *args, cwd=cwd, timeout=timeout)


def but_first_line(err: str) -> str:
    """What a capture prints to stderr, without the line that comes after the first recorded step."""
    lines = err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("gtrace: recording "))
