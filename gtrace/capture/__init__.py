"""Record the gradients of a training run: from the command line, or around your own loop::

    with gtrace.capture.record(model, optimizer, "run.zarr"):
        train(model, optimizer)

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.capture.options import CaptureOptions, CaptureSettings, capture_options
from gtrace.capture.session import CaptureSession
from gtrace.capture.summary import CaptureSummary
from gtrace.torch_hooks.processes import first_of_launch, launch_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

__all__ = ["CaptureOptions", "CaptureSession", "CaptureSettings", "CaptureSummary", "capture_options", "record"]


@contextlib.contextmanager
def record(
    model: nn.Module, optimizer: Optimizer | Sequence[Optimizer], path: str | Path, **settings: Any
) -> Iterator[CaptureSession]:
    """Record the gradients of every ``optimizer.step()`` inside the block.

    The trace appears with the first recorded step. Recorded steps stay readable however the block ends.

    Args:
        model: names the parameters and modules.
        optimizer: the optimizer to watch, or several; the first is number 0.
        path: the trace to write, ``.zarr`` or ``.h5``.
        settings: what to record, the fields of :class:`CaptureSettings`: ``every=10``, ``steps="0,10,1000+50"``,
            ``tensors=["*.weight"]``, ``kind="neural"``, ``force=True`` and so on.

    Yields:
        the session; its ``finish("complete")`` gives a :class:`CaptureSummary` (and ends the capture).

    Raises:
        UsageError: a setting is not valid, two exclude each other, or no trace can be made at ``path``.
        OutputExistsError: ``path`` exists and ``force`` is off, or it is a folder other than a trace.
    """
    options = capture_options(Path(path), CaptureSettings(**settings), run=launch_token(), first=first_of_launch())
    session = CaptureSession(options)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    session.start(optimizers, [model])
    try:
        yield session
        session.finish("complete")
    except BaseException:
        session.finish("interrupted")
        raise
    if session.pressed:
        signal.raise_signal(signal.SIGINT)
