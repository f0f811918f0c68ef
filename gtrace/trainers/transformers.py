"""A callback of Hugging Face's ``Trainer``, and of the trainers that derive from it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from gtrace.errors import UsageError
from gtrace.trainers import TrainerWatch


class TransformersCallback(TrainerWatch, TrainerCallback):
    """Records the gradients of a training, trains with a codec, or both.

    Args:
        path: the trace to write, ``.zarr`` or ``.h5``; None for none.
        codec: the codec of the gradients, its spec, or a table or plan; None leaves them as they are. The trace has the
            exact ones.
        to: a tracker for the numbers of each step, e.g. ``tensorboard:runs``; ``wandb``, ``mlflow`` and ``trackio``
            join the run that ``report_to`` has begun.
        settings: of the capture, the fields of :class:`gtrace.capture.CaptureSettings`: ``every=10`` and so on.

    Raises:
        UsageError: neither a path nor a codec; or, when training starts, one that is not valid, or a codec between
            several processes.
        OutputExistsError: when training starts, ``path`` exists and ``force`` is off.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start, unless the optimizer is still to be made."""
        if args.world_size > 1 and self._codec is not None:
            raise UsageError(
                "TransformersCallback: the trainer does not show its callbacks what averages gradients between "
                f"processes; leave codec= out, and launch `gtrace train --codec {self._codec} SCRIPT` instead of SCRIPT"
            )
        if objects["optimizer"] is not None:
            self.on_pre_optimizer_step(args, state, control, **objects)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Start at the latest before the first step; gradients are there, accumulated and clipped."""
        optimizer = objects["optimizer"]
        # Accelerate wraps it.
        self.begin(objects["model"], [getattr(optimizer, "optimizer", optimizer)])

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Finish."""
        self.end()
