"""The run log that training writes and reports read: one JSON object per line.

Records, by their ``type``:

- ``study``: the first line. ``version``, ``command``, ``task``, ``workers``, ``seed``, ``parameters`` (elements),
  ``tensors`` (name -> elements), ``versions``; beside them ``runs`` (specs), ``steps``, ``batch_size`` (of one
  worker), ``lr``, ``refit``, ``nonfinite``, ``kind`` (``weight``, or ``neural``: then bits and variances are those of
  the gradients inside the backward passes; or ``linear``: then steps are epochs, losses are those of the whole
  training set, bits are those of samples, models and gradients, and several of these fields are missing), ``shadow``
  (steps between two shadow passes, or null), ``layers`` (``inner`` or ``all``; null for kind weight), ``weights``
  (levels of quantized weights, e.g. ``optimal5``, or null).
- ``step``: ``run`` (codec spec, ``none`` for the uncompressed twin), ``seed``, ``step``, ``loss`` (training loss,
  mean of the workers), ``lr``, ``bits`` (payload and shared bits that all workers sent up in this step),
  ``bits_float32`` (what float32 would have taken), ``relative_variance`` (||mean of decoded - mean of exact||^2 /
  ||mean of exact||^2), ``seconds`` (CPU), ``codec_seconds``; beside them ``shared_bits`` (part of ``bits``),
  ``envelope_bits`` (not part of it), ``worker_variance`` (||decoded - exact||^2 / ||exact||^2, both summed over the
  workers), ``fit_seconds`` (part of ``codec_seconds``), ``nonfinite`` (how many gradient values were NaN or infinite).
  If they apply: ``sim_seconds`` (of the step over the simulated network), ``codec_bits`` (bits of the codec that a
  policy chose), ``node``, ``reward``, ``explored`` (of MQGrad's agent; the last two at the steps of its decisions),
  ``down_bits`` (of averages that a server or all ranks sent on, one copy of each). A run whose bits are chosen is
  called ``CODEC@POLICY``.
  ``weight_error`` is ||quantized weights - weights||^2 / ||weights||^2, in runs that quantize them.
- ``measure``: ``run``, ``seed``, ``step``, and about the workers' averaged gradient of this step, before the optimizer
  used it: ``relative_variance``, ``noise_ratio`` (all of its squared error, bias included, over tr Cov of the exact
  gradients / workers), ``update_error`` (of optimizers that keep Adam's second moments; else null), ``bias``
  (squared norm of what the workers' errors have in common, estimated by products of different ones, over ||mean of
  exact||^2; null for one worker), ``step_error``
  (the same with each gradient over its own d, into which its own square has gone), ``w1``
  (Wasserstein-1 of the values of each tensor, summed over all values, over ||exact||_1), ``cosine`` (of the whole
  model's gradients), ``filtered_ratio`` (what the codec's noise costs over what the gradient's own noise costs, until
  the end of training; null for codecs with a bias or memory), ``equivalent_batch`` (all workers' samples over 1 +
  ``filtered_ratio``).
- ``shadow``: ``run``, ``seed``, ``step``, ``tensor`` (a weight gradient), and how far it is from the exact one of the
  same batch: ``cosine_alone``, ``error_alone`` (||compressed - exact|| / ||exact||) where only the gradients of this
  layer's own outputs are compressed, ``cosine``, ``error`` where those of all layers are.
- ``eval``: ``run``, ``seed``, ``step`` (the last one done), ``loss``, ``accuracy`` (null where the task has none).
- ``end``: ``run``, ``seed``, ``steps``, ``loss``, ``accuracy``, ``bits``, ``ratio`` (float32 bits / bits),
  ``seconds``; beside them ``diverged``.
- ``warning``: ``text``.

Numbers that are not finite are written as null, because JSON cannot express them. Fields with times have names
that end in ``seconds``; all others are the same whenever the same command runs on the same machine.

Appending a line is atomic enough to survive kill -9: a reader ignores a last line that is not complete.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import platform
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from gtrace import __version__
from gtrace.errors import TraceError, keep_existing, printable, writing
from gtrace.trace.files import parse_json, write_beside

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

VERSION = 1
#: bytes of the longest line that is read; a study's record names every tensor
MAX_LINE = 1 << 24


def versions() -> dict[str, str]:
    """Versions that numbers may depend on."""
    return {"gtrace": __version__, "numpy": np.__version__, "python": platform.python_version()}


class RunLogWriter:
    """Append records to a run log, each flushed as it comes. A context manager that closes it.

    The file appears complete with its study record, and replaces an old one only with ``force``.

    Args:
        path: the log, usually ``NAME.jsonl``.
        study: fields of the study record.
        force: replace an existing file at ``path``.
        before: called with the bytes of the study record before there is a log.

    Raises:
        OutputExistsError: ``path`` exists and ``force`` is off.
        UsageError: nothing can be written there.
    """

    def __init__(
        self,
        path: Path,
        study: Mapping[str, Any],
        *,
        force: bool = False,
        before: Callable[[int], None] = lambda _size: None,
    ) -> None:
        keep_existing(path, force=force)
        self.path = path
        line = _line("study", version=VERSION, **study).encode()
        before(len(line))
        with writing(path):
            write_beside(str(path), line)
            self._file = path.open("a", encoding="utf-8")

    @classmethod
    def reopen(cls, path: Path, size: int) -> Self:
        """Continue a log after its first ``size`` bytes; what follows them was written after the checkpoint.

        Raises:
            UsageError: nothing can be written there.
        """
        writer = cls.__new__(cls)
        writer.path = path
        with writing(path):
            os.truncate(path, size)
            writer._file = path.open("a", encoding="utf-8")
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
            TraceError: the disk is full or failed; earlier records are kept.
        """
        try:
            self._file.write(_line(kind, **fields))
            self._file.flush()
        except OSError as error:
            raise TraceError(f"{self.path}: cannot be written any further ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # what could not be written, write has said
            self._file.close()


def _line(kind: str, /, **fields: Any) -> str:
    return json.dumps({"type": kind, **{name: _plain(value) for name, value in fields.items()}}, allow_nan=False) + "\n"


def read_runlog(path: Path) -> list[dict[str, Any]]:
    """All complete records of a run log, the study record first.

    Raises:
        TraceError: missing, not a run log, a damaged line that is not the last, or a newer version.
    """
    records: list[dict[str, Any]] = []
    try:
        # Reading a pipe could block forever.
        if path.exists() and not path.is_file():
            raise TraceError(f"{path}: cannot be read (it is not a file); `gtrace train` writes run logs")
        with path.open("rb") as file:
            for number in itertools.count(1):
                line = file.readline(MAX_LINE + 1)
                if not line:
                    break
                if len(line) > MAX_LINE:
                    raise TraceError(f"{path}: line {number} is longer than {MAX_LINE} bytes; damaged or not a run log")
                if line.strip():
                    record = _record(line, f"{path}: line {number}")
                    if record is None:
                        break
                    records.append(record)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read ({error.strerror}); `gtrace train` writes run logs") from None
    if not records or records[0]["type"] != "study":
        raise TraceError(f"{path}: not a run log (its first record is not a study); `gtrace train` writes them")
    version = records[0].get("version")
    if type(version) is not int or version > VERSION:
        shown = printable(str(version)[:40])
        raise TraceError(f"{path}: written by a newer gtrace (run log {shown}, this one reads {VERSION}); upgrade")
    return records


def _record(line: bytes, where: str) -> dict[str, Any] | None:
    """The record of a line; None for a line that a killed writer left unfinished."""
    try:
        record = parse_json(line.decode(), where)
    except UnicodeDecodeError:
        raise TraceError(f"{where} is not UTF-8 text; damaged or not a run log, `gtrace train` writes them") from None
    except TraceError:
        if not line.endswith(b"\n"):
            return None
        raise TraceError(f"{where} is not JSON; the file is damaged or not a run log") from None
    if not isinstance(record, dict) or not isinstance(record.get("type"), str):
        raise TraceError(f"{where} is not a record of a run log; `gtrace train` writes them")
    return record


def _plain(value: Any) -> Any:
    """A number that is not finite as None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
