"""Which steps and which tensors to record. Nothing here needs torch."""

from __future__ import annotations

import bisect
import fnmatch
import functools
import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

DEFAULT_BUDGET = 4_000_000_000
#: Automatic steps are spread over this many; a longer run records nothing beyond.
HORIZON = 1_000_000
_BURST = 16

_STEPS = re.compile(r"(?P<first>\d{1,18})(?:-(?P<last>\d{1,18})(?::(?P<stride>\d{1,18}))?|\+(?P<burst>\d{1,18}))?")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[kmgt]?i?b?)", re.IGNORECASE | re.ASCII)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


class StepPolicy(Protocol):
    """Decides about one step of one optimizer; ``str()`` of it is its option on the command line."""

    def wants(self, step: int, capacity: int) -> bool:
        """Whether to record a step, where ``capacity`` steps fit the budget."""


@dataclass(frozen=True)
class EveryStep:
    """Every ``stride``-th step, the first one included."""

    stride: int = 1

    def wants(self, step: int, capacity: int) -> bool:
        """Whether ``step`` is a multiple of the stride."""
        return step % self.stride == 0

    def __str__(self) -> str:
        return f"every {self.stride}"


@dataclass(frozen=True)
class ListedSteps:
    """The steps of some ranges."""

    ranges: tuple[range, ...]
    text: str

    def wants(self, step: int, capacity: int) -> bool:
        """Whether ``step`` lies in one of the ranges."""
        return any(step in one for one in self.ranges)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class AutomaticSteps:
    """Every step at first, then bursts of consecutive steps at logarithmic distances, within the budget."""

    def wants(self, step: int, capacity: int) -> bool:
        """Whether ``step`` belongs to the dense start or to a burst.

        >>> [step for step in range(400) if AutomaticSteps().wants(step, 8)]
        [0, 1, 2, 3, 252, 253]
        """
        if capacity >= HORIZON:
            return step < HORIZON
        dense, length, starts = _bursts(capacity)
        if step < dense:
            return True
        place = bisect.bisect_right(starts, step) - 1
        return place >= 0 and step < starts[place] + length

    def most(self, capacity: int) -> int:
        """How many steps it records of the longest run.

        >>> AutomaticSteps().most(8)
        8
        """
        if capacity >= HORIZON:
            return HORIZON
        dense, length, starts = _bursts(capacity)
        return dense + length * len(starts)

    def __str__(self) -> str:
        return "auto"


@functools.lru_cache(maxsize=8)
def _bursts(capacity: int) -> tuple[int, int, list[int]]:
    """How many steps come first, how long bursts are, and their starts: ``capacity`` steps at most, 1 at least."""
    dense = max(1, (capacity + 1) // 2)
    rest = capacity - dense
    # Even in few bursts: how a gradient changes from one step to the next takes two.
    length = max(1, min(2, rest), min(_BURST, rest // 8))
    count = max(0, rest // length)
    starts: list[int] = []
    earliest = dense
    for place in range(1, count + 1):
        start = max(earliest, round(dense * (HORIZON / dense) ** (place / (count + 1))))
        starts.append(start)
        earliest = start + length
    return dense, length, starts


def parse_steps(text: str, where: str = "--steps") -> StepPolicy:
    """Read ``auto`` or a list such as ``0,10,100-200,500-900:100,1000+50``.

    ``A-B`` holds both ends, ``A-B:S`` every S-th of them, ``A+K`` is a burst of K steps from A on.

    >>> policy = parse_steps("0,10,1000+50")
    >>> [step for step in (0, 1, 10, 999, 1000, 1049, 1050) if policy.wants(step, 0)]
    [0, 10, 1000, 1049]

    Raises:
        UsageError: not such a list, a falling range, or an empty burst.
    """
    if text.strip() == "auto":
        return AutomaticSteps()
    ranges = []
    for part in text.split(","):
        match = _STEPS.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"{where}: '{part.strip()}' is no step; write auto or 0,10,100-200,1000+50")
        first = int(match["first"])
        last, stride = int(match["last"] or first), int(match["stride"] or 1)
        if match["burst"] is not None:
            last = first + int(match["burst"]) - 1
        if last < first or stride < 1:
            raise UsageError(f"{where}: '{part.strip()}' holds no step; ranges rise, bursts and strides are positive")
        ranges.append(range(first, last + 1, stride))
    return ListedSteps(tuple(ranges), text.strip())


def step_policy(steps: str | None, every: int | None) -> StepPolicy:
    """The policy of ``--steps`` and ``--every``, of which at most one may be given; automatic without either.

    Raises:
        UsageError: both are given, or ``every`` is below 1.
    """
    if every is None:
        return parse_steps("auto" if steps is None else steps)
    if steps is not None:
        raise UsageError("--every and --steps exclude each other; --steps 0-1000:10 says both")
    if every < 1:
        raise UsageError(f"--every: {every} is no distance between steps; write 1 or more")
    return EveryStep(every)


def parse_size(text: str, where: str = "--budget") -> int:
    """Read a number of bytes such as ``4GB``, ``500M``, ``1.5GiB`` or ``1000``.

    >>> parse_size("1.5GiB")
    1610612736

    Raises:
        UsageError: not a size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"{where}: '{text}' is no size; write 4GB, 500MB or 1GiB")
    unit = match["unit"].lower().removesuffix("b")
    base = 1024 if unit.endswith("i") else 1000
    size = float(match["number"]) * base ** _POWERS[unit.removesuffix("i")]
    if size > sys.maxsize:
        raise UsageError(f"{where}: '{text}' is more than any disk holds")
    return int(size)


@dataclass
class TensorSelection:
    """Keeps tensors by shell patterns on their names and aliases.

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
        """One line for each pattern that has matched none of the names asked about, with the nearest ones."""
        if not self._seen:
            return []
        options = [("--tensors", pattern) for pattern in self.include]
        options += [("--exclude", pattern) for pattern in self.exclude]
        return [
            f"{option} '{pattern}' matched no tensor; {suggest(re.sub(r'[*?]', '', pattern), self._seen)}"
            for option, pattern in options
            if pattern not in self._matched
        ]

    def _matching(self, patterns: Sequence[str], names: tuple[str, ...]) -> bool:
        hits = {p for p in patterns if any(fnmatch.fnmatchcase(name, p) for name in names)}
        self._matched |= hits
        return bool(hits)
