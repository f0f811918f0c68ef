"""Record the gradients of a training run: from the command line, or around a loop of one's own::

    with gtrace.capture.record(model, optimizer, "run.zarr"):
        train(model, optimizer)

Importing this imports no torch, but raises UsageError where torch is not installed.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gtrace.capture.options import CaptureOptions, capture_options
from gtrace.capture.session import CaptureSession
from gtrace.capture.summary import CaptureSummary
from gtrace.errors import UsageError
from gtrace.torch_hooks.processes import first_of_launch, launch_token

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.optim import Optimizer

if importlib.util.find_spec("torch") is None:
    raise UsageError("gtrace.capture needs PyTorch, which is not installed: pip install 'gtrace[torch]'")

__all__ = ["CaptureOptions", "CaptureSession", "CaptureSummary", "capture_options", "record"]


@contextlib.contextmanager
def record(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    path: str | Path,
    *,
    steps: str | None = None,
    every: int | None = None,
    tensors: Sequence[str] = (),
    exclude: Sequence[str] = (),
    budget: int | str | None = None,
    force: bool = False,
    kind: str = "weight",
    max_elements: int | None = None,
    drop: bool = False,
    optimizer_state: bool = False,
    second_moments: bool = False,
    noise: bool = False,
    verbose: bool = False,
    reduced: bool = False,
    sketch: str | None = None,
    sketch_mantissa: int | None = None,
) -> Iterator[CaptureSession]:
    """Record the gradients of every ``optimizer.step()`` inside the block.

    The trace appears with the first recorded step. What is recorded stays readable however the block is left.

    Args:
        model: names the parameters and modules.
        optimizer: the optimizer to watch, or several; the first is number 0.
        path: the trace to write, ``.zarr`` or ``.h5``.
        steps: ``"auto"`` (the default) or a list such as ``"0,10,100-200,1000+50"``.
        every: record every so many steps instead.
        tensors: shell patterns of the names to record; all by default.
        exclude: shell patterns of the names to leave out.
        budget: bytes of gradients to record at most, such as ``"4GB"``, which is the default for automatic
            steps; others have no limit.
        force: replace an existing trace.
        kind: ``"weight"``, ``"neural"`` (of the loss with respect to the outputs of ``model``'s modules) or ``"both"``.
        max_elements: elements that are kept of one gradient. Of a weight's, whole blocks of 16,384, drawn once, and
            all of it by default; of a neural one, single elements, and 262,144 by default.
        drop: leave out steps while 256 MiB of gradients wait to be written, instead of making training wait; the
            trace's attribute ``capture`` says which.
        optimizer_state: record the sum of Adam's second moments (``exp_avg_sq``) of each tensor, too.
        second_moments: record all their elements, too, in as many bytes as the gradients take; update errors of
            codecs can then be told.
        noise: record how the gradients of a step's micro-batches scatter, too.
        verbose: print a line to stderr for every 100 recorded steps.
        reduced: of several processes that train together, record the average instead of each one's own gradients.
        sketch: keep moment sketches of large gradients instead of their values: norms and bucket sizes, such as
            ``"l2:8192,linf:8192,none"``; tensors whose values take less room keep them.
        sketch_mantissa: width of the sketches' bins, 2^n in an octave; 6 by default, 10 loses nothing.

    Yields:
        the session; its ``finish("complete")`` gives a :class:`CaptureSummary` (and ends the capture).

    Raises:
        UsageError: ``steps``, ``budget``, ``kind`` or ``sketch`` cannot be read, ``steps`` and ``every`` both given,
            or no trace can be made at ``path``.
        OutputExistsError: ``path`` exists and ``force`` is off, or it is a folder that is no trace.
    """
    options = capture_options(
        Path(path),
        steps=steps,
        every=every,
        tensors=tensors,
        exclude=exclude,
        budget=budget,
        force=force,
        kind=kind,
        max_elements=max_elements,
        drop=drop,
        optimizer_state=optimizer_state,
        second_moments=second_moments,
        noise=noise,
        verbose=verbose,
        reduced=reduced,
        sketch=sketch,
        sketch_mantissa=sketch_mantissa,
        run=launch_token(),
        first=first_of_launch(),
    )
    session = CaptureSession(options)
    optimizers = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
    session.start(optimizers, [model])
    try:
        yield session
    except BaseException:
        session.finish("interrupted")
        raise
    session.finish("complete")
