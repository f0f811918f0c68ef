"""The standard traces, made once and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from contextlib import contextmanager
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import gtrace
from gtrace.errors import TraceError
from gtrace.trace import open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from gtrace.workflows.bench.protocol import Model, Protocol

#: what the gradients depend on beside the protocol
_SOURCES = ("training/plain.py", "training/tasks/digits.py", "training/tasks/text.py", "workflows/bench/made.py")


class StandardTrace(NamedTuple):
    """A trace of the protocol.

    Attributes:
        name: model and phase.
        path: where it is kept.
        source: what its gradients come from.
        fingerprint: of its gradients; equal fingerprints give equal results on any machine.
        tensors: how many.
        elements: of a step.
        steps: how many.
    """

    name: str
    path: Path
    source: str
    fingerprint: str
    tensors: int
    elements: int
    steps: int


@contextmanager
def cache_folder() -> Iterator[Path]:
    """``$XDG_CACHE_HOME/gtrace/bench``, or a folder for this run alone where nothing can be kept."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gtrace" / "bench"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK)
    except OSError:
        writable = False
    if writable:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="gtrace-bench-") as name:
        yield Path(name)


def gradient_source() -> str:
    """``torch 2.8.0`` where networks can be trained, otherwise ``formulas``."""
    return f"torch {metadata.version('torch')}" if util.find_spec("torch") is not None else "formulas (no torch)"


def standard_traces(protocol: Protocol, folder: Path, say: Callable[[str], None]) -> list[StandardTrace]:
    """The traces of a protocol, in the order of its models and phases; what is not in ``folder`` is made."""
    source = gradient_source()
    found = []
    for model in protocol.models:
        digest = _digest(protocol, model, source)
        paths = {phase: folder / f"{model.task}-{phase}-{digest}.zarr" for phase in protocol.phases}
        if not all(map(_whole, paths.values())):
            say(
                f"{model.name}: training for its gradients" if "torch " in source else f"{model.name}: making gradients"
            )
            _make(protocol, model, paths)
        for phase, path in paths.items():
            with open_trace(path) as trace:
                elements = sum(info.size for info in trace.tensors)
                steps = len(protocol.phases[phase])
                about = (path, source, trace.fingerprint, len(trace.tensors), elements, steps)
                found.append(StandardTrace(f"{model.name} {phase}", *about))
    return found


def _whole(path: Path) -> bool:
    """Whether a trace is kept there, every value as it was written."""
    if not path.exists():
        return False
    try:
        with open_trace(path) as trace:
            for info in trace.tensors:
                for step in trace.steps(info.name):
                    trace.read(info.name, int(step))
    except TraceError:
        return False
    return True


def _make(protocol: Protocol, model: Model, paths: dict[str, Path]) -> None:
    """Beside their places, then moved in: an interrupted run leaves nothing, and two runs do not disturb each other."""
    folder = next(iter(paths.values())).parent
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as name:
        making = {phase: Path(name) / path.name for phase, path in paths.items()}
        if util.find_spec("torch") is not None:
            from gtrace.training.plain import record_task

            steps = {making[phase]: tuple(protocol.phases[phase]) for phase in paths}
            record_task(model.task, steps, batch_size=model.batch_size, seed=protocol.seed)
        else:
            from gtrace.workflows.bench.made import make_trace

            for phase, path in making.items():
                late, size = phase == "late", model.batch_size
                make_trace(model.task, path, protocol.phases[phase], late=late, batch_size=size, seed=protocol.seed)
        for phase, path in paths.items():
            if path.exists():
                shutil.rmtree(path)
            os.replace(making[phase], path)


def _digest(protocol: Protocol, model: Model, source: str) -> str:
    phases = {phase: list(steps) for phase, steps in protocol.phases.items()}
    digest = hashlib.blake2b(repr((model, phases, protocol.seed, source)).encode(), digest_size=6)
    home = Path(gtrace.__file__).parent
    for name in _SOURCES:
        digest.update((home / name).read_bytes())
    return digest.hexdigest()
