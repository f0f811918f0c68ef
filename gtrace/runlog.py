"""What training writes and reports read: a run log, one JSON object a line.

Records, by their ``type``:

- ``study``: the first line. ``version``, ``command``, ``task``, ``workers``, ``seed``, ``parameters`` (elements),
  ``tensors`` (name -> elements), ``versions``.
- ``step``: ``run`` (codec spec, ``none`` for the uncompressed twin), ``seed``, ``step``, ``loss``, ``lr``,
  ``bits`` (payload and shared bits that all workers sent up in this step), ``bits_float32`` (what float32 would have
  taken), ``relative_variance`` (||mean of decoded - mean of exact||^2 / ||mean of exact||^2), ``seconds`` (CPU), ``codec_seconds``.
- ``eval``: ``run``, ``seed``, ``step``, ``loss``, ``accuracy`` (null where the task has none).
- ``end``: ``run``, ``seed``, ``steps``, ``loss``, ``accuracy``, ``bits``, ``ratio`` (float32 bits / bits), ``seconds``.
- ``warning``: ``text``.

Appending a line is atomic enough to survive kill -9: a reader ignores a last line that is not complete.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gtrace.errors import TraceError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION = 1


class RunLogWriter:
    """Append records to a run log, each flushed as it comes."""

    def __init__(self, path: Path, study: Mapping[str, Any]) -> None:
        self._file = path.open("w", encoding="utf-8")
        self.write("study", version=VERSION, **study)

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record."""
        self._file.write(json.dumps({"type": kind, **fields}, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_runlog(path: Path) -> list[dict[str, Any]]:
    """All complete records of a run log, the study record first.

    Raises:
        TraceError: missing, not a run log, a damaged line that is not the last, or a newer version.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read as a run log ({error})") from None
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError:
            if number == len(lines):
                break
            raise TraceError(f"{path}: line {number} is not JSON; the file is damaged or no run log") from None
        if not isinstance(record, dict) or "type" not in record:
            raise TraceError(f"{path}: line {number} is no record of a run log; `gtrace train` writes them")
        records.append(record)
    if not records or records[0]["type"] != "study":
        raise TraceError(f"{path}: no run log (its first record is not a study); `gtrace train` writes them")
    version = records[0].get("version")
    if not isinstance(version, int) or version > VERSION:
        raise TraceError(f"{path}: written by a newer gtrace (run log {version}, this one reads {VERSION}); upgrade")
    return records
