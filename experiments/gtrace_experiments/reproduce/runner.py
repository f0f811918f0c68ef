"""Running experiments: results are kept as JSON, and what is finished is not done twice."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import json
import platform
import resource
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import gtrace
from gtrace.errors import TraceError, printable
from gtrace.report.files import put
from gtrace_experiments.reproduce.experiment import Context, Result

if TYPE_CHECKING:
    from pathlib import Path

    from gtrace_experiments.reproduce.experiment import Experiment

#: of a result that is read; real ones take some ten kilobytes
MAX_BYTES = 1 << 26


def run_experiment(experiment: Experiment, context: Context) -> Result:
    """Run one, and note what it took."""
    before = _cpu_seconds()
    outcome = experiment.run(context)
    return Result(
        name=experiment.name,
        outcome=outcome,
        seed=context.seed,
        quick=context.quick,
        full=context.full is not None,
        digest=source_digest(experiment),
        versions=_versions(),
        cpu_seconds=round(_cpu_seconds() - before, 1),
    )


def estimate(experiment: Experiment, context: Context) -> float:
    """Seconds of CPU that an experiment takes at its full size, by a few steps of each of its trainings."""
    costs: list[float] = []
    experiment.run(dataclasses.replace(context, quick=True, folder=None, costs=costs))
    return sum(costs)


def source_digest(experiment: Experiment) -> str:
    """Digest of the experiment's module, 16 hexadecimal digits: an edited recipe makes a result stale."""
    source = inspect.getsource(sys.modules[experiment.run.__module__])
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


def kept_result(path: Path, experiment: Experiment, context: Context) -> Result | None:
    """The stored result of the same experiment, seed and length; None without one, or if it is stale.

    Raises:
        TraceError: the file is not a result.
    """
    if not path.exists():
        return None
    result = read_result(path)
    same = (result.name, result.seed, result.quick, result.full, result.digest)
    wanted = (experiment.name, context.seed, context.quick, context.full is not None, source_digest(experiment))
    return result if same == wanted else None


def read_result(path: Path) -> Result:
    """Read what :func:`write_result` wrote.

    Raises:
        TraceError: unreadable, or no result.
    """
    try:
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ValueError("no file, or too large")
        return Result.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        reason = "nested too deep" if isinstance(error, RecursionError) else printable(str(error))
        raise TraceError(
            f"{path}: not the result of an experiment ({reason}); move it away, or choose another -o"
        ) from None


def write_result(path: Path, result: Result) -> None:
    """Store a result, beside its place and then moved in."""
    put(path, (json.dumps(result.to_json(), indent=1, ensure_ascii=False) + "\n").encode())


def _cpu_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _versions() -> dict[str, str]:
    found = {"gtrace": gtrace.__version__, "python": platform.python_version()}
    for name in ("numpy", "torch"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
