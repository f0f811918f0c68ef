"""A capture that ends the program once it has enough, and says how long a step takes without capture."""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gtrace.capture import session as sessions
from gtrace.capture.options import CaptureSettings, capture_options, parse_steps
from gtrace.capture.session import CaptureSession
from gtrace.torch_hooks.children import after_import, children_call, watch_no_more
from gtrace.torch_hooks.launcher import Program, run_program
from gtrace.torch_hooks.processes import before_abrupt_exit, before_shutdown, process_place
from gtrace.trace.facts import CUT
from gtrace.trace.files import write_beside

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class ProbeOptions:
    """What a probe records, as JSON values.

    Attributes:
        trace: to be written.
        timings: file for a :class:`ProbeTimings`, which appears when the probe has enough.
        steps: to be recorded, as :func:`gtrace.capture.options.parse_steps` reads them.
        most: recorded steps that are enough.
        seconds: of training that are enough.
        budget: bytes of gradients to record at most.
    """

    trace: str
    timings: str
    steps: str
    most: int
    seconds: float
    budget: int


@dataclass(frozen=True, slots=True)
class ProbeTimings:
    """How long steps take that are not recorded.

    Attributes:
        step: median seconds from one optimizer step to the next; None without such steps.
        backward: median seconds in backward passes of such a step; None likewise.
        timed: how many such steps were timed.
        steps: that the program took.
        seconds: from its first step to its last.
        ranks: processes that trained together, between which a step's exchange is part of ``step``.
    """

    step: float | None = None
    backward: float | None = None
    timed: int = 0
    steps: int = 0
    seconds: float = 0.0
    ranks: int = 1


class Stopwatch:
    """Ends the process when the first optimizer has stepped enough, and says what a capture measured."""

    def __init__(self, options: ProbeOptions, session: CaptureSession) -> None:
        self._options = options
        self._session = session
        self._policy = parse_steps(options.steps)
        #: this ended the program
        self.cut = False
        self._optimizer: int | None = None
        self._owner = os.getpid()
        self._step = self._recorded = 0
        self._first = self._last = 0.0

    def install(self) -> None:
        """Start to watch; torch is imported."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        from gtrace.torch_hooks.hooks import never_compiled
        from gtrace.torch_hooks.steps import is_nested

        self._is_nested = is_nested
        register_optimizer_step_pre_hook(never_compiled(self._before_step))

    def write(self) -> None:
        """Write what was measured of steps that were not recorded, once; of several ranks the first one does."""
        path = Path(self._options.timings)
        place = process_place()
        if path.exists() or place.rank or os.getpid() != self._owner or not self._step:
            return
        found = self._session.times
        if found.get("recorded", True):
            found = {}
        step, backward, timed = found.get("step"), found.get("backward"), found.get("steps", 0)
        timings = ProbeTimings(step, backward, timed, self._step, self._last - self._first, place.world_size)
        write_beside(str(path), json.dumps(asdict(timings)).encode())

    def _before_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if os.getpid() != self._owner or (self._optimizer or id(optimizer)) != id(optimizer):
            return
        if self._is_nested(sys._getframe(2), None):
            return
        self._optimizer = id(optimizer)
        self._recorded += self._policy.coming(self._step, 0) == self._step
        self._last = time.perf_counter()
        if not self._step:
            self._first = self._last
        self._step += 1
        enough = self._recorded >= self._options.most
        late = self._last - self._first >= self._options.seconds
        if not (enough or late):
            return
        self.write()
        if enough or process_place().world_size == 1:
            # Every rank takes as many steps; but only one of them knows that it is late, and whoever waits for its
            # file ends them.
            self.cut = True
            os._exit(0)


def run_probe(message: str) -> int:
    """Run a program under a probe; returns its exit code. ``message`` is JSON of it and a ProbeOptions, ``probe``."""
    asked = json.loads(message)
    program = Program(asked["target"], tuple(asked["args"]), asked["is_module"])
    options = ProbeOptions(**asked["probe"])
    watch_no_more()
    settings = CaptureSettings(steps=options.steps, noise=True, rank="0", budget=options.budget)
    chosen = capture_options(Path(options.trace), settings, run=secrets.token_hex(8))
    session = CaptureSession(chosen, {"argv": program.argv})
    stopwatch = Stopwatch(options, session)

    def begin() -> None:
        session.start()
        stopwatch.install()

    def conclude(exit_code: int) -> int:
        if not exit_code:
            stopwatch.write()
        session.note({CUT: stopwatch.cut})
        session.settle("interrupted" if exit_code else "complete")
        return exit_code

    setup = {
        "path": options.trace,
        "run": chosen.run,
        "settings": asdict(settings),
        "attrs": {CUT: True},
        "probe": asdict(options),
    }
    with before_abrupt_exit(conclude):
        with after_import("torch", begin), children_call(__name__, setup):
            outcome = run_program(program)
        return conclude(outcome.exit_code)


def start(setup: Mapping[str, Any]) -> None:
    """Probe this process, which the program launched, until it ends; called when it has imported torch."""
    sessions.start(setup)
    if (session := sessions.current_session()) is not None:
        stopwatch = Stopwatch(ProbeOptions(**setup["probe"]), session)
        stopwatch.install()
        before_shutdown(stopwatch.write)
