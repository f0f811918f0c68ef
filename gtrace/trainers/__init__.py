"""Capture and codecs as callbacks of other people's trainers, a module for each, which imports that framework::

from gtrace.trainers.lightning import LightningCallback
callback = LightningCallback("run.zarr", codec="qsgdinf:bits=4")
lightning.pytorch.Trainer(callbacks=[callback]).fit(model, data)

from gtrace.trainers.transformers import TransformersCallback
callback = TransformersCallback("run.zarr", codec="qsgdinf:bits=4")
transformers.Trainer(model, arguments, train_dataset=data, callbacks=[callback]).train()
"""

from __future__ import annotations

import contextlib
import secrets
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gtrace.capture import record
from gtrace.errors import UsageError
from gtrace.torch_hooks.processes import before_shutdown
from gtrace.training.compression import compress
from gtrace.training.ddp import RankExchange, ddp_comm_hook

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn
    from torch.optim import Optimizer

    from gtrace.codecs.assignment import TableLike
    from gtrace.trackers import Tracker


class TrainerWatch:
    """What every callback does between the start and the end of training; each documents its arguments."""

    def __init__(
        self,
        path: str | Path | None = None,
        codec: TableLike | None = None,
        *,
        to: str | Tracker | None = None,
        **settings: Any,
    ) -> None:
        if path is None and codec is None:
            raise UsageError("name a trace to write, e.g. 'run.zarr', a codec, e.g. codec='qsgdinf:bits=4', or both")
        self._path, self._codec, self._to, self._settings = path, codec, to, settings
        self._stack: contextlib.ExitStack | None = None

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], to: Tracker | None = None) -> None:
        """Start, if it has not started, with all optimizers of a model, wrapped or not; the process's end would end it.

        ``to`` is a tracker if no other one was named.

        Raises:
            UsageError: the codec cannot go between ranks.
            OutputExistsError: there is a trace.
        """
        if self._stack is not None:
            return
        self._stack = contextlib.ExitStack()
        tracker = to if self._to is None else self._to
        before_shutdown(lambda: self.end(RuntimeError("training did not reach its end")))
        ranks = model if isinstance(model, DistributedDataParallel) else None
        # First, so that the gradients are recorded before the codec changes them.
        if self._path is not None:
            inner = model if ranks is None else ranks.module
            self._stack.enter_context(
                record(inner, optimizers, self._path, run=_shared_word(), to=tracker, **self._settings)
            )
        if self._codec is None:
            return
        if ranks is not None and ranks.process_group.size() > 1:
            ranks.register_comm_hook(RankExchange(self._codec, ranks.process_group, model=ranks.module), ddp_comm_hook)
        else:
            # Steps of several optimizers would be mixed up in one tracker.
            for optimizer in optimizers:
                known = tracker if optimizer is optimizers[0] else None
                self._stack.enter_context(compress(optimizer, self._codec, to=known))

    def end(self, error: BaseException | None = None) -> None:
        """Finish the trace, as interrupted if there was an error, and take the codec out."""
        if self._stack is not None:
            stack, self._stack = self._stack, None
            stack.__exit__(None if error is None else type(error), error, None)


def _shared_word() -> str | None:
    """A word of this training, the same in all its ranks: a trainer may start them itself. None in a single process."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    word = [secrets.token_hex(8)]
    dist.broadcast_object_list(word)
    return word[0]
