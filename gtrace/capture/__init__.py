"""Record the gradients of a training run: from the command line, or around your own loop::

    with gtrace.capture("run.zarr"):
        train()

    with gtrace.capture.record(model, optimizer, "run.zarr"):  # only these
        train(model, optimizer)

Importing this imports neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import math
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gtrace.capture.options import CaptureOptions, CaptureSettings, capture_options
from gtrace.capture.session import CaptureSession, captured, current_session
from gtrace.capture.summary import CaptureSummary
from gtrace.torch_hooks.processes import first_of_launch, launch_token

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import nn
    from torch.optim import Optimizer

__all__ = [
    "CaptureOptions",
    "CaptureSession",
    "CaptureSettings",
    "CaptureSummary",
    "capture_options",
    "record",
    "record_gradients",
]


@contextlib.contextmanager
def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | Path,
    *,
    run: str | None = None,
    **settings: Any,
) -> Iterator[CaptureSession]:
    """Record the gradients of every ``optimizer.step()`` inside the block.

    The trace appears with the first recorded step. Recorded steps stay readable however the block ends.

    Args:
        model: names the parameters and modules.
        optimizer: the optimizer to watch, or several; the first is number 0.
        path: the trace to write, ``.zarr`` or ``.h5``.
        run: a word that the ranks of one training share, so that all write this trace, and that no other training has;
            with a launcher such as torchrun it is not needed.
        settings: what to record, the fields of :class:`CaptureSettings`: ``every=10``, ``steps="0,10,1000+50"``,
            ``tensors=["*.weight"]``, ``kind="neural"``, ``force=True`` and so on.

    Yields:
        the session; its ``finish("complete")`` gives a :class:`CaptureSummary` (and ends the capture).

    Raises:
        UsageError: a setting is not valid, two exclude each other, or no trace can be made at ``path``.
        OutputExistsError: ``path`` exists and ``force`` is off, or it is a folder other than a trace.
    """
    first = run is None and first_of_launch()
    options = capture_options(Path(path), CaptureSettings(**settings), run=run or launch_token(), first=first)
    session = CaptureSession(options)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    session.start(optimizers, [model])
    with _finished(session):
        yield session


@contextlib.contextmanager
def _finished(session: CaptureSession) -> Iterator[None]:
    try:
        yield
        session.settle("complete")
    except BaseException:
        session.settle("interrupted")
        raise
    if session.pressed:
        signal.raise_signal(signal.SIGINT)


class _Callable(ModuleType):
    @contextlib.contextmanager
    def __call__(self, path: str | Path, **settings: Any) -> Iterator[CaptureSession]:
        """Record the gradients of everything that trains inside the block, as ``gtrace capture`` does.

        Also without an optimizer, and in processes that are forked or launched; see :func:`record` for the arguments
        and errors.
        """
        run = launch_token() or secrets.token_hex(8)
        options = capture_options(Path(path), CaptureSettings(**settings), run=run, first=first_of_launch())
        session = CaptureSession(options)
        session.start()
        with _finished(session), captured(session, options, {}):
            yield session


sys.modules[__name__].__class__ = _Callable


def record_gradients(gradients: Mapping[str, Any], *, loss: float = math.nan, lr: float = math.nan) -> None:
    """Hand the gradients of one step to the capture of this program; without a capture nothing happens.

    For programs whose gradients are in no parameter's ``grad``: ``torch.func.grad``, ``torch.autograd.grad``, other
    libraries. Steps count from 0. From the first call on, only what is handed over is recorded.

    Args:
        gradients: name of a tensor -> its gradient, a tensor or array of any shape; it is copied.
        loss: of the step.
        lr: its learning rate.
    """
    session = current_session()
    if session is not None:
        session.hand(gradients, loss, lr)
