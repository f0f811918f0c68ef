"""What training writes and reports read: a run log, one JSON object a line.

Records, by their ``type``:

- ``study``: the first line. ``version``, ``command``, ``task``, ``workers``, ``seed``, ``parameters`` (elements),
  ``tensors`` (name -> elements), ``versions``; beside them ``runs`` (specs), ``steps``, ``batch_size`` (of one
  worker), ``lr``, ``refit``, ``nonfinite``, ``kind`` (``weight``, or ``neural``: then bits and variances are those of
  the gradients inside the backward passes; or ``linear``: then steps are epochs, losses are those of the whole
  training set, bits are those of samples, models and gradients, and several of these fields are missing), ``shadow``
  (steps between two shadow passes, or null), ``layers`` (``inner`` or ``all``; null for kind weight), ``weights``
  (levels of quantized weights as in ``optimal5``, or null).
- ``step``: ``run`` (codec spec, ``none`` for the uncompressed twin), ``seed``, ``step``, ``loss`` (training loss,
  mean of the workers), ``lr``, ``bits`` (payload and shared bits that all workers sent up in this step),
  ``bits_float32`` (what float32 would have taken), ``relative_variance`` (||mean of decoded - mean of exact||^2 /
  ||mean of exact||^2), ``seconds`` (CPU), ``codec_seconds``; beside them ``shared_bits`` (part of ``bits``),
  ``envelope_bits`` (not part of it), ``worker_variance`` (||decoded - exact||^2 / ||exact||^2, both summed over the
  workers), ``fit_seconds`` (part of ``codec_seconds``), ``nonfinite`` (how many gradient values were NaN or infinite).
  Where they apply: ``sim_seconds`` (of the step over the simulated network), ``codec_bits`` (bits of the codec that a
  policy chose), ``node``, ``reward``, ``explored`` (of MQGrad's agent; the last two at the steps of its decisions),
  ``down_bits`` (of the server's average on its way back, one copy). A run whose bits are chosen is called
  ``CODEC@POLICY``.
  ``weight_error`` is ||quantized weights - weights||^2 / ||weights||^2, in runs that quantize them.
- ``shadow``: ``run``, ``seed``, ``step``, ``tensor`` (a weight gradient), and how far it is from the exact one of the
  same batch: ``cosine_alone``, ``error_alone`` (||compressed - exact|| / ||exact||) where only the gradients of this
  layer's own outputs are compressed, ``cosine``, ``error`` where those of all layers are.
- ``eval``: ``run``, ``seed``, ``step`` (the last one done), ``loss``, ``accuracy`` (null where the task has none).
- ``end``: ``run``, ``seed``, ``steps``, ``loss``, ``accuracy``, ``bits``, ``ratio`` (float32 bits / bits),
  ``seconds``; beside them ``diverged``.
- ``warning``: ``text``.

A number that is not finite is written as null; JSON has no word for it. The fields that hold times are those whose
names end in ``seconds``; all others are the same whenever the same command runs on the same machine.

Appending a line is atomic enough to survive kill -9: a reader ignores a last line that is not complete.
"""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any, Self, TextIO

from gtrace.errors import OutputExistsError, TraceError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

VERSION = 1


class RunLogWriter:
    """Append records to a run log, each flushed as it comes. A context manager that closes it.

    The file appears complete with its study record, in the place of an old one where ``force`` allows it.

    Args:
        path: the log, usually ``NAME.jsonl``.
        study: fields of the study record.
        force: replace what stands at ``path``.

    Raises:
        OutputExistsError: ``path`` exists and ``force`` is off.
        UsageError: nothing can be written there.
    """

    def __init__(self, path: Path, study: Mapping[str, Any], *, force: bool = False) -> None:
        if path.exists() and not force:
            raise OutputExistsError(f"{path}: exists already and was left untouched; pass force or another path")
        self.path = path
        beside = path.with_name(f".{path.name}.{os.getpid()}.new")
        self._file: TextIO
        try:
            self._file = beside.open("w", encoding="utf-8")
            try:
                self.write("study", version=VERSION, **study)
                os.replace(beside, path)
            except BaseException:
                self._file.close()
                beside.unlink()
                raise
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror}); choose another path") from None

    @classmethod
    def reopen(cls, path: Path, size: int) -> Self:
        """Go on with a log after its first ``size`` bytes; what follows them was written after the checkpoint.

        Raises:
            UsageError: nothing can be written there.
        """
        writer = cls.__new__(cls)
        writer.path = path
        try:
            os.truncate(path, size)
            writer._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written ({error.strerror})") from None
        return writer

    @property
    def size(self) -> int:
        """Bytes so far."""
        self._file.flush()
        return os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, kind: str, /, **fields: Any) -> None:
        """Append one record.

        Raises:
            TraceError: the disk took no more; what was written before is kept.
        """
        line = json.dumps({"type": kind, **{name: _plain(value) for name, value in fields.items()}}, allow_nan=False)
        try:
            self._file.write(line + "\n")
            self._file.flush()
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be written any further ({error.strerror})") from None

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
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); `gtrace train` writes run logs") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path}: no run log (not UTF-8 text); `gtrace train` writes them") from None
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


def _plain(value: Any) -> Any:
    """A number that is not finite as None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
