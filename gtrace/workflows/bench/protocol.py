"""What ``gtrace study bench`` measures, and on what: every number that a result depends on, and the standard traces.

Traces are made once and kept in the user's cache folder. Without PyTorch their gradients come from formulas: the
gradient of a linear layer is a sum over the batch of outer products of errors and activations. Activations are
rectified normal, errors have heavy tails, neurons have gains of their own, and late in training few samples of a batch
have most of the error. That gives matrices with the low rank, the heavy tails and the rows of different size that
trained networks show; it is not a network, and results say so.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata, util
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import gtrace
from gtrace.codecs import codec, codec_class, codec_names, parameter_fields, parse_spec
from gtrace.errors import TraceError, UsageError
from gtrace.sweep import expand
from gtrace.trace import create_trace, open_trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.codecs import Codec


@dataclass(frozen=True, slots=True)
class Model:
    """A network that is trained for its gradients.

    Attributes:
        name: in tables.
        task: the built-in task.
        batch_size: samples a step.
    """

    name: str
    task: str
    batch_size: int


@dataclass(frozen=True)
class Protocol:
    """How codecs are compared. Whoever changes a number gives it another name.

    Attributes:
        name: of this protocol, for papers.
        models: that are trained.
        phases: early and late -> the consecutive steps whose gradients are encoded. Levels are fitted on the step
            before, and codecs with memory are replayed over them.
        seed: of weights, batches and encodings.
        draws: encodings of each tensor at each step.
        ranges: parameter -> values that a codec is run with where its spec does not fix them.
        slow: codec -> its own ranges: those that fit by gradient descent, to the levels of the others.
        at: measured bits per coordinate of the first table.
    """

    name: str
    models: tuple[Model, ...]
    phases: Mapping[str, Sequence[int]]
    seed: int = 0
    draws: int = 1
    ranges: Mapping[str, tuple[Any, ...]] = field(
        default_factory=lambda: {
            "bits": (2, 3, 4, 5, 6, 8),
            "ratio": (0.01, 0.03, 0.1, 0.3),
            "sparsity": (0.5, 0.8, 0.9, 0.95),
            "rank": (1, 2, 4, 8),
            "bin_size": (50, 500),
        }
    )
    slow: Mapping[str, Mapping[str, tuple[Any, ...]]] = field(
        default_factory=lambda: {"alqg": {"bits": (2, 3, 4)}, "alqg-n": {"bits": (2, 3, 4)}}
    )
    at: float = 3.0

    def built_in(self) -> list[Codec]:
        """Every configuration of every built-in codec; float32 itself is none to compare with."""
        names = [n for n in codec_names() if codec_class(n).__module__.startswith("gtrace.") and n != "none"]
        return [item for name in names for item in self.configurations(name)]

    def configurations(self, spec: str) -> list[Codec]:
        """What is run of a spec: each value of the ranges that it leaves open and that the codec takes.

        Raises:
            UsageError: an unknown codec or parameter, or a value that it refuses.
        """
        parsed = parse_spec(spec)
        ranges = self.slow.get(parsed.name, self.ranges)
        known = {item.name for item in parameter_fields(codec_class(parsed.name))} - set(parsed.given)
        taken: dict[str, list[Any]] = {}
        for name in known & set(ranges):
            for value in ranges[name]:
                with contextlib.suppress(UsageError):  # beyond what this codec takes; the others are left
                    codec(spec, **{name: value})
                    taken.setdefault(name, []).append(value)
        return expand([spec], taken)


_CNN = Model("CNN", "digits-cnn", 16)
_LSTM = Model("LSTM", "char-lstm", 8)
_TRANSFORMER = Model("transformer", "char-transformer", 8)

FULL = Protocol("gtrace-bench-1", (_CNN, _LSTM, _TRANSFORMER), {"early": range(4, 8), "late": range(296, 300)})
#: a smoke test in seconds, whose numbers belong in no paper
QUICK = replace(
    FULL,
    name="gtrace-bench-1-quick",
    models=(_CNN,),
    phases={"early": range(4, 6), "late": range(48, 50)},
    ranges={"bits": (2, 3, 4, 6), "ratio": (0.01, 0.1, 0.3), "sparsity": (0.8, 0.95), "rank": (2, 8)},
)


#: what the gradients depend on beside the protocol
_SOURCES = ("training/plain.py", "training/tasks/*.py", "workflows/bench/protocol.py")


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
    for pattern in _SOURCES:
        for path in sorted(home.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()


#: task -> tensor -> shape; of an embedding only the rows of a batch's words have gradients
LAYERS: dict[str, dict[str, tuple[int, int]]] = {
    "digits-cnn": {
        "conv1.weight": (32, 9),
        "conv2.weight": (64, 288),
        "fc1.weight": (64, 1024),
        "fc2.weight": (10, 64),
    },
    "char-lstm": {
        "embedding.weight": (61, 32),
        "lstm.weight_ih": (512, 32),
        "lstm.weight_hh": (512, 128),
        "head.weight": (61, 128),
    },
    "char-transformer": {
        "embedding.weight": (61, 64),
        "attention.qkv": (192, 64),
        "attention.out": (64, 64),
        "up.weight": (256, 64),
        "down.weight": (64, 256),
        "head.weight": (61, 64),
    },
}


def make_trace(task: str, path: Path, steps: Sequence[int], *, late: bool, batch_size: int, seed: int) -> None:
    """Write a trace of made gradients, float32."""
    rng = np.random.default_rng([seed, zlib.crc32(task.encode()), late])
    spread = 2.0 if late else 0.5
    gains = {
        name: (rng.lognormal(-4, 1, (rows, 1)), rng.lognormal(0, 0.7, (1, columns)))
        for name, (rows, columns) in LAYERS[task].items()
    }
    with create_trace(path) as writer:
        for step in steps:
            for name, (rows, columns) in LAYERS[task].items():
                weight = rng.lognormal(0, spread, (batch_size, 1))
                errors = weight * rng.standard_t(4, (batch_size, rows))
                if name.startswith("embedding"):
                    errors *= rng.random((batch_size, rows)) < 1 / batch_size
                active = np.maximum(rng.normal(0.2, 1, (batch_size, columns)), 0)
                out, inside = gains[name]
                gradient: NDArray[np.float64] = out * (errors.T @ active) * inside / weight.sum()
                writer.append(step, name, gradient.astype(np.float32))
            writer.commit(step)
