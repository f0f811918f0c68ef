"""The schedule of fits: the steps at which levels and codes are fitted again.

Commands check a schedule before anything heavy is loaded, so nothing heavy is imported here.
"""

from __future__ import annotations

import itertools
import re
from bisect import bisect_right
from dataclasses import dataclass

from gtrace.errors import UsageError

#: Early gradients change fast and later ones slowly, so the fits thin out; see docs/training.md for what they cost.
_STEPS = "0,10,20,50,100,200,500,+1000"
_POOLED = "pooled"
#: those steps, with pooled sketches
DEFAULT_REFIT = _POOLED
#: steps that a pool of sketches looks back; the next one would weigh a tenth of the latest
WINDOW = 10
_WORDS = {"every": "0,+1", "once": "0"}
_FORM = re.compile(r"\d{1,18}(,\d{1,18})*(,\+[1-9]\d{0,17})?")


@dataclass(frozen=True, slots=True)
class RefitSchedule:
    """The training steps at which codecs are fitted.

    Attributes:
        steps: ascending steps, at least one.
        period: interval of further steps after the last of them; 0 for none.
        pooled: fit to a decayed mean of the gradient and of those of the steps before, not to the gradient alone.
    """

    steps: tuple[int, ...]
    period: int = 0
    pooled: bool = False

    @classmethod
    def parse(cls, text: str) -> RefitSchedule:
        """Read ``every``, ``once`` (at step 0), or steps such as ``0,100,2000,+10000``; any of them after ``pooled:``.

        ``pooled`` alone is ``pooled:0,10,20,50,100,200,500,+1000``.

        Raises:
            UsageError: none of these.

        >>> RefitSchedule.parse("0,100,+50")
        RefitSchedule(steps=(0, 100), period=50, pooled=False)
        """
        head, colon, rest = text.replace(" ", "").partition(":")
        pooled = head == _POOLED
        form = (rest if colon else _STEPS) if pooled else text.replace(" ", "")
        form = _WORDS.get(form, form)
        if not _FORM.fullmatch(form):
            raise UsageError(
                f"refit: '{text}' is not a schedule; write pooled, every, once, steps such as 0,100,2000,+10000, "
                "or pooled:STEPS"
            )
        *first, last = form.split(",")
        period = int(last[1:]) if last.startswith("+") else 0
        steps = tuple(int(part) for part in (first if period else [*first, last]))
        if any(b <= a for a, b in itertools.pairwise(steps)):
            raise UsageError(f"refit: the steps of '{text}' must ascend")
        return cls(steps, period, pooled)

    def latest(self, step: int) -> int:
        """The last scheduled step, at most ``step``, -1 before the first.

        A codec is due when this is later than its last fit; so a fit that could not happen at its step (the
        gradient was missing or not finite) happens at the next chance.

        >>> [RefitSchedule.parse("1,4,+3").latest(step) for step in range(9)]
        [-1, 1, 1, 1, 4, 4, 4, 7, 7]
        """
        last = self.steps[-1]
        if self.period and step >= last:
            return last + (step - last) // self.period * self.period
        place = bisect_right(self.steps, step)
        return self.steps[place - 1] if place else -1

    def watches(self, step: int) -> bool:
        """Whether the sketch of this step is pooled: a fit is due at it or within the next ``WINDOW`` - 1 steps.

        >>> schedule = RefitSchedule.parse("pooled:0,100")
        >>> [step for step in range(200) if schedule.watches(step)]
        [0, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100]
        """
        return self.pooled and self.latest(step + WINDOW - 1) >= step

    def __str__(self) -> str:
        steps = ",".join([str(step) for step in self.steps] + ([f"+{self.period}"] if self.period else []))
        return f"{_POOLED}:{steps}" if self.pooled else steps
