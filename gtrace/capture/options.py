"""What to record and where, read and checked before a program runs. Does not need torch."""

from __future__ import annotations

import bisect
import fnmatch
import functools
import math
import os
import re
import sys
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, TypeAlias

from gtrace.errors import OutputExistsError, UsageError, suggest
from gtrace.settings import KINDS, documented, option
from gtrace.torch_hooks.processes import launched_place
from gtrace.trace.files import HDF5_SUFFIXES, attributes_of, check_place
from gtrace.trackers import TO_HELP, Tracker, check_tracker
from gtrace.units import parse_size, step_ranges

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


DEFAULT_BUDGET = 4_000_000_000
#: seconds without progress of the thread that writes, after which training goes on without it
PATIENCE = 10.0
#: Automatic steps are spread over this many; later steps of a longer run are not recorded.
HORIZON = 1_000_000
_BURST = 16


@dataclass(frozen=True)
class ListedSteps:
    """The steps of some ranges."""

    ranges: tuple[range, ...]
    text: str

    def coming(self, step: int, _capacity: int) -> float:
        """The first step from ``step`` on that lies in one of the ranges, infinity without one.

        >>> [ListedSteps((range(3, 10, 3), range(5, 6)), "").coming(step, 0) for step in range(11)]
        [3, 3, 3, 3, 5, 5, 6, 9, 9, 9, inf]
        """
        nearest = math.inf
        for one in self.ranges:
            end = max(one.start, step + (one.start - step) % one.step)
            if end < nearest and end in one:
                nearest = end
        return nearest

    def __str__(self) -> str:
        return self.text


def every_step(stride: int = 1) -> ListedSteps:
    """Every ``stride``-th step, the first one included."""
    return ListedSteps((range(0, sys.maxsize, stride),), f"every {stride}")


@dataclass(frozen=True)
class AutomaticSteps:
    """Every step at first, then bursts of consecutive steps at logarithmic distances, within the budget."""

    def coming(self, step: int, capacity: int) -> float:
        """The first step from ``step`` on to record, infinity without one, if ``capacity`` steps fit the budget.

        >>> [step for step in range(3000) if AutomaticSteps().coming(step, 8) == step]
        [0, 1, 2, 3, 2000, 2001, 2002, 2003]
        """
        if capacity >= HORIZON:
            return step if step < HORIZON else math.inf
        dense, length, starts = _bursts(capacity)
        place = bisect.bisect_right(starts, step)
        if step < dense or (place and step < starts[place - 1] + length):
            return step
        return starts[place] if place < len(starts) else math.inf

    def most(self, capacity: int) -> int:
        """The largest number of steps that it records, for any length of run.

        >>> AutomaticSteps().most(8)
        8
        """
        if capacity >= HORIZON:
            return HORIZON
        dense, length, starts = _bursts(capacity)
        return dense + length * len(starts)

    def __str__(self) -> str:
        return "auto"


#: decides which steps of an optimizer are recorded; ``str()`` gives its option on the command line
StepPolicy: TypeAlias = ListedSteps | AutomaticSteps


@functools.lru_cache(maxsize=8)
def _bursts(capacity: int) -> tuple[int, int, list[int]]:
    """Number of first steps, length of bursts, and their starts: ``capacity`` steps at most, 1 at least."""
    rest = capacity // 2
    # Noise is estimated from three steps in a row; four give two estimates.
    length = max(3 if capacity < 8 else 4, min(_BURST, rest // 8))
    count = rest // length
    dense = max(1, capacity - count * length)
    starts: list[int] = []
    earliest = dense
    for place in range(1, count + 1):
        start = max(earliest, round(dense * (HORIZON / dense) ** (place / (count + 1))))
        starts.append(start)
        earliest = start + length
    return dense, length, starts


def parse_steps(text: str) -> StepPolicy:
    """Read ``auto``, or steps as :func:`gtrace.units.step_ranges` does.

    >>> policy = parse_steps("0,10,1000+50")
    >>> [step for step in (0, 1, 10, 999, 1000, 1049, 1050) if policy.coming(step, 0) == step]
    [0, 10, 1000, 1049]

    Raises:
        UsageError: not such steps.
    """
    if text.strip() == "auto":
        return AutomaticSteps()
    return ListedSteps(step_ranges(text), text.strip())


def step_policy(steps: str | None, every: int | None) -> StepPolicy:
    """The policy of ``--steps`` or ``--every``, else automatic; UsageError for both, or an ``every`` below 1."""
    if every is None:
        return parse_steps("auto" if steps is None else steps)
    if steps is not None:
        raise UsageError("--every and --steps exclude each other; --steps 0-1000:10 says both.")
    if every < 1:
        raise UsageError(f"--every: {every} must be at least 1.")
    return every_step(every)


@dataclass
class TensorSelection:
    """Selects tensors by shell patterns on their names and aliases.

    Attributes:
        include: patterns of which one must match; empty means all tensors.
        exclude: patterns of which none may match.
    """

    include: Sequence[str] = ()
    exclude: Sequence[str] = ()
    _seen: set[str] = field(default_factory=set)
    _matched: set[str] = field(default_factory=set)

    def keeps(self, name: str, aliases: Iterable[str] = ()) -> bool:
        """Whether to record the tensor of this name."""
        names = (name, *aliases)
        self._seen.update(names)
        wanted = self._matching(self.include, names) or not self.include
        return not self._matching(self.exclude, names) and wanted

    def complaints(self) -> list[str]:
        """One line for each pattern that matched no name so far, with the nearest names."""
        if not self._seen:
            return []
        return [
            f"{option} '{pattern}' matched no tensor; {suggest(re.sub(r'[*?]', '', pattern), self._seen)}"
            for option, patterns in (("--tensors", self.include), ("--exclude", self.exclude))
            for pattern in patterns
            if pattern not in self._matched
        ]

    def _matching(self, patterns: Sequence[str], names: tuple[str, ...]) -> bool:
        hits = {p for p in patterns if any(fnmatch.fnmatchcase(name, p) for name in names)}
        self._matched |= hits
        return bool(hits)


MAX_ELEMENTS = 262_144

#: A copy of the rules of ``trace.SketchPlan``, which imports numpy: the program must import that first.
_SKETCHES = re.compile(r"(none|(l2|linf|l1)(:none|:[1-9]\d{0,14})?)(,(none|(l2|linf|l1)(:none|:[1-9]\d{0,14})?))*")

#: settings for numbers about gradients of weights
_BESIDE = ("optimizer_state", "second_moments", "noise")


@documented
@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """What to record: the options of ``gtrace capture``."""

    every: int | None = option(None, metavar="N", help="Record every N-th step.")
    steps: str | None = option(
        None,
        metavar="LIST",
        help="Record these steps: 0,10,100-200,500-900:100; 1000+50 is a burst of 50.  [default: auto: every step "
        "at first, then bursts at growing distances, within the budget]",
    )
    tensors: Sequence[str] = option((), metavar="GLOB", commas=True, help="Record only tensors with such names.")
    exclude: Sequence[str] = option((), metavar="GLOB", commas=True, help="Leave out tensors with such names.")
    budget: int | str | None = option(
        None,
        metavar="SIZE",
        help="Limit on the recorded bytes of gradients.  [default: 4GB with automatic steps, else none]",
    )
    reduced: bool = option(
        False,
        advanced=True,
        opposite="local",
        help="Of several processes, record each one's own gradients, or the average that they share.  [default: local]",
    )
    rank: str = option(
        "all",
        advanced=True,
        choices=("all", "0"),
        help="Of several processes that train together, record all or the first.",
    )
    kind: str = option(
        "weight",
        metavar="LIST",
        help="What to record: weight (gradients of parameters), neural (of the outputs of modules), both of these, "
        "update (what a step takes from the weights), outer (what --every H steps take), momentum (the optimizer's).",
    )
    max_elements: int | None = option(
        None,
        advanced=True,
        metavar="N",
        help="Keep N elements of a larger gradient: whole blocks of 16384 for weights, a sample of single elements "
        "for neural ones.  [default: all; 262144]",
    )
    optimizer_state: bool = option(False, advanced=True, help="Record the sums of Adam's second moments, too.")
    second_moments: bool = option(
        False,
        advanced=True,
        help="Record Adam's second moments element by element, as many bytes as the gradients, for update errors.",
    )
    noise: bool = option(False, help="Record how the gradients of a step's micro-batches scatter, too.")
    verbose: bool = option(False, advanced=True, help="Say something after every 100 recorded steps.")
    drop: bool = option(
        False, advanced=True, help="Leave out steps while the disk cannot keep up, instead of making training wait."
    )
    sketch: str | None = option(
        None,
        advanced=True,
        metavar="LIST",
        help="Keep moment sketches of large gradients instead of their values: norms and bucket sizes, e.g. "
        "l2:8192,linf:8192,none.",
    )
    sketch_mantissa: int | None = option(
        None,
        advanced=True,
        minimum=0,
        maximum=10,
        help="Width of a sketch's bins: 2^N in an octave; 10 loses nothing.  [default: 6]",
    )
    to: str | Tracker | None = option(None, advanced=True, type=str, metavar="TRACKER", help=TO_HELP)
    force: bool = option(False, help="Replace an existing trace.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """What to record, names of :data:`gtrace.settings.KINDS`."""
        return tuple(dict.fromkeys(self.kind.replace("both", "weight,neural").split(",")))


@dataclass(frozen=True)
class CaptureOptions(CaptureSettings):
    """Checked settings, with their place and launch.

    Attributes:
        path: the trace, ``.zarr`` or ``.h5``.
        policy: which steps, from ``steps`` and ``every``.
        budget: limit on bytes of gradients (as float32); None for no limit.
        run: a word that the processes of this run share; None if one process alone writes the trace.
        queue_bytes: limit on the waiting rows of one optimizer; beyond it training waits.
        launcher: the ``run`` of the process that launched this one, if its own belongs to a launch over several
            machines.
        first: no process of this rank and run can have recorded before.
    """

    path: Path
    policy: StepPolicy = field(default_factory=AutomaticSteps)
    budget: int | None = field(default=None, kw_only=True)
    run: str | None = None
    queue_bytes: int = 256 * 1024 * 1024
    launcher: str | None = None
    first: bool = False

    def describe(self) -> dict[str, object]:
        """The options as JSON values, for the trace's attributes."""
        return {
            "steps": str(self.policy),
            "tensors": list(self.tensors),
            "exclude": list(self.exclude),
            "budget": self.budget,
            "ranks": self.rank,
            "stage": "reduced" if self.reduced else "local",
            "kind": self.kind,
            **({} if self.max_elements is None else {"max_elements": self.max_elements}),
            **{name: True for name in _BESIDE if getattr(self, name)},
            "drop": self.drop,
            **({} if self.sketch is None else {"sketch": self.sketch}),
        }


def capture_options(
    path: Path,
    settings: CaptureSettings | None = None,
    *,
    run: str | None = None,
    launcher: str | None = None,
    first: bool = False,
) -> CaptureOptions:
    """Read and check settings.

    Args:
        path: the trace to write.
        settings: what to record; the defaults if None.
        run, launcher, first: see :class:`CaptureOptions`.

    Raises:
        UsageError: a setting is not valid, two exclude each other, or no trace can be made at ``path``.
        OutputExistsError: something is there that must stay.
    """
    given = settings or CaptureSettings()
    policy = step_policy(given.steps, given.every)
    _check_kind(given)
    if given.max_elements is not None and given.max_elements < 1:
        raise UsageError(f"--max-elements: needs a number of 1 or more, not {given.max_elements}")
    _check_sketch(given.sketch, given.sketch_mantissa)
    if isinstance(given.to, str):
        check_tracker(given.to)
    size = parse_size(given.budget, "--budget") if isinstance(given.budget, str) else given.budget
    if size is None and isinstance(policy, AutomaticSteps):
        size = DEFAULT_BUDGET
    _check_place(path, force=given.force, run=run, first=first)
    world = launched_place().world_size
    if world > 1 and given.rank == "all" and path.suffix != ".zarr":
        raise UsageError(f"{path}: {world} processes cannot write one HDF5 file; choose a name that ends in .zarr")
    found = {one.name: getattr(given, one.name) for one in fields(CaptureSettings)}
    if given.max_elements is None and given.kinds == ("neural",):
        found["max_elements"] = MAX_ELEMENTS
    # The script may change the current folder before the trace is made.
    place = path.absolute()
    return CaptureOptions(place, policy, **{**found, "budget": size}, run=run, launcher=launcher, first=first)


def _check_kind(given: CaptureSettings) -> None:
    kinds = given.kinds
    for kind in kinds:
        if kind not in KINDS:
            raise UsageError(f"--kind: unknown kind '{kind}'; {suggest(kind, (*KINDS, 'both'))}")
    if "outer" in kinds and given.every is None:
        raise UsageError("--kind outer: give the number of steps of an outer gradient, e.g. --every 100")
    beside = [name.replace("_", "-") for name in _BESIDE if getattr(given, name)]
    if "weight" not in kinds and beside:
        raise UsageError(f"--{beside[0]} is about gradients of weights; add weight to --kind")
    if given.second_moments and given.sketch is not None:
        raise UsageError("--second-moments needs the gradients' values too; leave --sketch out")


def _check_sketch(sketch: str | None, mantissa: int | None) -> None:
    if sketch is None:
        if mantissa is not None:
            raise UsageError("--sketch-mantissa is for sketches; add --sketch l2:8192,linf:8192,none")
        return
    if not _SKETCHES.fullmatch(sketch) or len(set(sketch.split(","))) != len(sketch.split(",")):
        raise UsageError(f"--sketch: '{sketch[:60]}' is not a list of norms with bucket sizes; write l2:8192,none")
    if mantissa is not None and not 0 <= mantissa <= 10:
        raise UsageError(f"--sketch-mantissa: needs 0 to 10 bits, not {mantissa}")


def _check_place(path: Path, *, force: bool, run: str | None, first: bool) -> None:
    """Find what would prevent the trace: before a long training run, not after it."""
    if path.suffix not in (".zarr", *HDF5_SUFFIXES):
        raise UsageError(f"{path}: a trace ends in .zarr or .h5; choose another name")

    def has_begun() -> bool:
        # A rank that exists too early is from an earlier launch with the same --rdzv-id and port.
        earlier = first and os.path.lexists(path / f"rank{launched_place().rank or 0:05d}")
        return run is not None and (attributes_of(path) or {}).get("run") == run and not earlier

    # Another process of this run may have been quicker, also between two looks.
    if not has_begun():
        try:
            check_place(path, force=force)
        except OutputExistsError:
            if not has_begun():
                raise
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path}: the folder {path.parent} cannot be written; choose another place")
