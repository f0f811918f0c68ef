"""What ``gtrace plan`` minimizes: how much each tensor's error counts, and which rows of a sweep are options."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gtrace.errors import TraceError, UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from gtrace.planning import Curves
    from gtrace.sweep import SweepResult

_MOST_BYTES = 4 << 20


def weigh(curves: Curves, objective: str, weights: Sequence[str]) -> Curves:
    """Curves whose errors are what is to be minimized.

    Raises:
        UsageError: a weight that cannot be read or fits no tensor.
        TraceError: a file of weights that cannot be read.
    """
    if objective == "relative":
        curves = curves.relative()
    pairs = [pair for text in weights for pair in _pairs(text)]
    if not pairs:
        return curves
    for pattern, _ in pairs:
        if not fnmatch.filter(curves.tensors, pattern):
            raise UsageError(f"--weight: no tensor matches '{pattern}'; {suggest(pattern, curves.tensors)}")
    found = [next((by for glob, by in pairs if fnmatch.fnmatchcase(name, glob)), 1.0) for name in curves.tensors]
    return curves.weighted(np.array(found))


def _pairs(text: str) -> Iterable[tuple[str, float]]:
    pattern, separator, number = text.rpartition("=")
    if separator:
        return [(pattern, _weight(number, f"--weight {text}"))]
    path = Path(text)
    if not path.is_file():
        raise UsageError(f"--weight {text}: write GLOB=NUMBER, as in fc*=2, or name a file of name: number")
    if path.stat().st_size > _MOST_BYTES:
        raise TraceError(f"{path}: has more than {_MOST_BYTES >> 20} MB; weights are name: number")
    import yaml

    try:
        # JSON is YAML.
        found = yaml.safe_load(path.read_bytes())
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is neither YAML nor JSON ({' '.join(str(error).split())[:100]})") from None
    if not isinstance(found, dict):
        raise TraceError(f"{path}: holds no weights; write name: number, a line each")
    return [(str(name), _weight(value, f"{path}: {str(name)[:80]}")) for name, value in found.items()]


def _weight(value: Any, where: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise UsageError(f"{where}: a weight is a positive number, as in fc*=2")
    return number


def chosen_rows(result: SweepResult, options: Mapping[str, Any]) -> SweepResult:
    """The rows of a sweep that a plan may look at: of the methods, tensors and steps asked for.

    Raises:
        UsageError: none is left, or an option that is about a trace alone.
    """
    from gtrace.cli.options import parse_range
    from gtrace.codecs import codec, split_specs

    for name in ("formats", "sparsity", "keep", "kind"):
        if options[name] is not None:
            raise UsageError(f"--{name} is for a trace; a sweep has the codecs that it was made with")
    keep = np.ones(len(result), np.bool_)
    if options["methods"] is not None:
        wanted = split_specs(options["methods"])
        specs = {spec: str(codec(spec)) for spec in wanted}
        known = set(result["codec"].tolist()) | set(result["method"].tolist())
        for spec, whole in specs.items():
            if spec not in known and whole not in known:
                raise UsageError(f"--methods: the sweep has no {spec}; {suggest(spec, known)}")
        keep &= np.isin(result["method"], wanted) | np.isin(result["codec"], [*wanted, *specs.values()])
    if options["tensors"] is not None:
        globs = [part.strip() for part in options["tensors"].split(",")]
        names = dict.fromkeys(result["tensor"].tolist())
        for glob in globs:
            if not fnmatch.filter(names, glob):
                raise UsageError(f"--tensors: no tensor matches '{glob}'; {suggest(glob, names)}")
        keep &= np.isin(result["tensor"], [name for glob in globs for name in fnmatch.filter(names, glob)])
    if options["steps"] is not None:
        keep &= np.isin(result["step"], [int(v) for v in parse_range(options["steps"], "--steps")])
    if not keep.any():
        raise UsageError("plan: nothing of the sweep is left by --methods, --tensors and --steps")
    return dataclasses.replace(result, columns={name: column[keep] for name, column in result.columns.items()})
