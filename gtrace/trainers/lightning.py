"""A callback of Lightning's ``Trainer``."""

from __future__ import annotations

import os
from typing import Any

from lightning.pytorch import Callback

from gtrace.trainers import TrainerWatch


class LightningCallback(TrainerWatch, Callback):
    """Records the gradients of a fit, trains with a codec, or both; numbers of each step go to the trainer's loggers.

    With ``DistributedDataParallel`` the codec becomes its communication hook, and payloads travel between the ranks.

    Args:
        path: the trace to write, ``.zarr`` or ``.h5``; None for none.
        codec: the codec of the gradients, its spec, or a table or plan; None leaves them as they are. The trace has the
            exact ones.
        to: a tracker instead of the trainer's loggers, e.g. ``tensorboard:runs``.
        settings: of the capture, the fields of :class:`gtrace.capture.CaptureSettings`: ``every=10`` and so on.

    Raises:
        UsageError: neither a path nor a codec; or, when the fit starts, one that is not valid.
        OutputExistsError: when the fit starts, ``path`` exists and ``force`` is off.
    """

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start."""
        wrapped = trainer.strategy.model
        self.begin(pl_module if wrapped is None else wrapped, trainer.optimizers, _Loggers(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Finish."""
        self.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Finish; the trace says that it was interrupted."""
        self.end(exception)


class _Loggers:
    """A trainer's loggers as one tracker."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def log(self, numbers: dict[str, float], step: int) -> None:
        for logger in self._trainer.loggers:
            logger.log_metrics(numbers, step)


def callbacks() -> list[Callback]:
    """What Lightning adds to every trainer, because the entry point names this function.

    Nothing, unless ``GTRACE_TRACE`` names a trace to write or ``GTRACE_CODEC`` a codec: so a program is captured that
    cannot be changed, e.g. ``GTRACE_TRACE=run.zarr python train.py``.
    """
    path, codec = os.environ.get("GTRACE_TRACE"), os.environ.get("GTRACE_CODEC")
    return [LightningCallback(path or None, codec or None)] if path or codec else []
