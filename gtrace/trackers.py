"""Numbers of a run, step by step, in an experiment tracker: TensorBoard, Weights & Biases, MLflow or Trackio.

A tracker is anything with ``log(numbers, step)``: Accelerate's ``Accelerator``, torchtitan's loggers and a run of
Weights & Biases have it already. One that is named by a text, e.g. ``tensorboard:runs``, is opened here; its package is
imported when the first number comes.

Names begin with ``gtrace/``: ``capture/`` for recorded gradients, ``train/CODEC/`` for training with a codec, and
``sweep/CODEC/`` for a replay.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


class Tracker(Protocol):
    """Takes the numbers of a step."""

    def log(self, numbers: dict[str, float], step: int) -> object:
        """Store numbers by their names."""


@dataclass(frozen=True, slots=True)
class OpenTracker:
    """A tracker that can be closed: takes numbers by name, and their step, and ends what was opened for it."""

    log: Callable[[dict[str, float], int], object]
    close: Callable[[], object] = lambda: None


def _tensorboard(place: str) -> OpenTracker:
    writer = importlib.import_module("tensorboard.summary.writer.event_file_writer").EventFileWriter(place)
    event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
    summary = importlib.import_module("tensorboard.compat.proto.summary_pb2").Summary

    def log(numbers: dict[str, float], step: int) -> None:
        # One event for all: an event for each number takes sixteen times as long.
        values = [summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        writer.add_event(event(wall_time=time.time(), step=step, summary=summary(value=values)))

    return OpenTracker(log, writer.close)


def _wandb(place: str) -> OpenTracker:
    wandb = importlib.import_module("wandb")
    theirs = wandb.run
    run = theirs or wandb.init(project=place)
    # A run has one counter, which goes up with the program's own calls: these numbers get an axis of their own.
    run.define_metric("gtrace/step")
    run.define_metric("gtrace/*", step_metric="gtrace/step")
    close = run.finish if theirs is None else lambda: None
    return OpenTracker(lambda numbers, step: run.log({**numbers, "gtrace/step": step}), close)


def _mlflow(place: str) -> OpenTracker:
    mlflow = importlib.import_module("mlflow")
    theirs = mlflow.active_run()
    if theirs is None:
        mlflow.set_experiment(place)
    run = theirs or mlflow.start_run()

    def log(numbers: dict[str, float], step: int) -> None:
        # Its names have no "=" and no commas.
        allowed = {re.sub(r"[^\w.:/ -]", "_", name): value for name, value in numbers.items()}
        mlflow.log_metrics(allowed, step=step, run_id=run.info.run_id)

    return OpenTracker(log, mlflow.end_run if theirs is None else lambda: None)


def _trackio(place: str) -> OpenTracker:
    trackio = importlib.import_module("trackio")
    theirs = trackio.context_vars.current_run.get()
    run = theirs or trackio.init(project=place)
    return OpenTracker(lambda numbers, step: run.log(numbers, step=step), trackio.finish if theirs is None else int)


#: package -> how to open it, and its usual place, which is a folder, a project, an experiment, a project
KINDS: dict[str, tuple[Callable[[str], OpenTracker], str]] = {
    "tensorboard": (_tensorboard, "runs"),
    "wandb": (_wandb, "gtrace"),
    "mlflow": (_mlflow, "gtrace"),
    "trackio": (_trackio, "gtrace"),
}
#: of the option ``--to``
TO_HELP = (
    "Also send numbers of each step to a tracker: tensorboard[:FOLDER], wandb[:PROJECT], mlflow[:EXPERIMENT] or "
    "trackio[:PROJECT]."
)


def check_tracker(to: str) -> None:
    """Refuse a text that names no tracker, or one that is not installed; imports nothing."""
    package = to.partition(":")[0]
    if package not in KINDS:
        raise UsageError(f"--to {to}: unknown tracker '{package}'; {suggest(package, KINDS)}")
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"--to {to}: needs {package}, which is not installed: pip install 'gradtrace[{package}]'")


def open_tracker(to: str | Tracker) -> OpenTracker:
    """A tracker by its name, ``PACKAGE`` or ``PACKAGE:PLACE``; any other one as it is, which its owner closes.

    A run of Weights & Biases, MLflow or Trackio that the program has begun takes the numbers and stays open.
    """
    if not isinstance(to, str):
        return OpenTracker(to.log)
    check_tracker(to)
    package, _, place = to.partition(":")
    opening, usual = KINDS[package]
    return opening(place or usual)


class Tracking:
    """Sends numbers to a tracker, which is opened with the first ones. After an error it sends nothing more.

    Args:
        to: a tracker or the name of one; None to send nothing.
        on_error: gets the error, once; None raises it.
    """

    def __init__(self, to: str | Tracker | None, on_error: Callable[[Exception], object] | None = None) -> None:
        self._to = to
        self._on_error = on_error
        self._open: OpenTracker | None = None
        self._broken = False

    def log(self, steps: Iterable[tuple[Mapping[str, float], int]]) -> int:
        """Send the numbers of steps that are known, those other than NaN; returns how many steps had any.

        Raises:
            UsageError: the tracker does not take them, and nobody else gets the error.
        """
        count = 0
        if self._to is None:
            return count
        try:
            for numbers, step in () if self._broken else steps:
                if known := {name: value for name, value in numbers.items() if not math.isnan(value)}:
                    self._open = self._open or open_tracker(self._to)
                    self._open.log(known, step)
                    count += 1
        except Exception as error:  # noqa: BLE001 - each package has its own, and training goes on
            self._fail(error)
        return count

    def close(self) -> None:
        """Close what was opened."""
        opened, self._open = self._open, None
        try:
            if opened is not None:
                opened.close()
        except Exception as error:  # noqa: BLE001 - as above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._broken = True
        if not isinstance(error, UsageError):
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            shown = self._to if isinstance(self._to, str) else type(self._to).__name__
            error = UsageError(f"--to {shown}: the tracker takes no numbers ({reason}); fix it, or leave --to out")
        if self._on_error is None:
            raise error
        self._on_error(error)


def of_record(record: Mapping[str, Any]) -> Iterator[tuple[dict[str, float], int]]:
    """The numbers of a record of a run log; nothing for one without a step.

    Yields:
        ``loss``, ``lr``, ``error`` (share of gradient energy lost: of the mean of the workers, or else of single
        gradients), ``bits_per_value``, and ``norm`` (of the exact gradient) if it is known; at measured steps
        ``noise_ratio``; at tests ``test_loss`` and ``accuracy``. And their step.
    """
    names = _OF_RECORDS.get(record["type"])
    if names is None:
        return
    found = {shown: record.get(name) for name, shown in names.items()}
    if record["type"] == "step":
        error = record.get("relative_variance")
        found["error"] = record.get("worker_variance") if error is None or math.isnan(error) else error
        found["bits_per_value"] = 32 * record["bits"] / record["bits_float32"] if record["bits_float32"] else None
    start = f"gtrace/train/{record['run']}" + (f"/seed{record['seed']}" if record["seed"] else "")
    yield {f"{start}/{name}": float(value) for name, value in found.items() if value is not None}, record["step"]


#: type of a record -> its fields and how they are shown
_OF_RECORDS = {
    "step": {"loss": "loss", "lr": "lr", "norm": "norm"},
    "measure": {"noise_ratio": "noise_ratio"},
    "eval": {"loss": "test_loss", "accuracy": "accuracy"},
}
