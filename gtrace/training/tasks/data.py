"""Where the data of the samples lie: in the installed package, or beside it in a checkout."""

from __future__ import annotations

from pathlib import Path

from gtrace.errors import TraceError

_PACKAGE = Path(__file__).resolve().parents[2]
_FOLDERS = (_PACKAGE / "workflows" / "samples" / "data", _PACKAGE.parent / "samples" / "data")


def sample_file(name: str) -> Path:
    """The path of a shipped data file.

    Raises:
        TraceError: this installation lacks it.
    """
    for folder in _FOLDERS:
        if (folder / name).is_file():
            return folder / name
    looked = " and ".join(str(folder) for folder in _FOLDERS)
    raise TraceError(f"{name}: the data of the samples are missing (looked in {looked}); install gtrace again")
