"""This process's place among several training processes, and its end.

It also catches ends that no ``finally`` sees: ``os._exit`` and SIGTERM. Does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import os
import random
import signal
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from gtrace.torch_hooks.children import call_after_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType


#: environment variables of launchers (torchrun, accelerate, srun) that identify a launch
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
#: torchrun's name for a launch; it stays when workers are started again, while their port changes
_NAME = "TORCHELASTIC_RUN_ID"
_counter = itertools.count()
#: the seeds of two ranks differ by a multiple of this, so that a few seeds with a few ranks are all different
_BETWEEN_RANKS = 1_000_003


class Place(NamedTuple):
    """One process among those that train together.

    Attributes:
        rank: its number, None without one.
        world_size: number of processes that train together.
    """

    rank: int | None = None
    world_size: int = 1


def process_place() -> Place:
    """The place in the process group, if the program has made one; otherwise from the launcher's environment."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return Place(distributed.get_rank(), distributed.get_world_size())
    return launched_place()


def launched_place() -> Place:
    """The place in the launcher's environment (``RANK`` and ``WORLD_SIZE``)."""
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if not rank.isdecimal():
        return Place()
    return Place(int(rank), max(int(world) if world.isdecimal() else 1, int(rank) + 1))


def seed_libraries(seed: int) -> None:
    """Seed ``random`` now, numpy and torch as soon as they are imported; whatever the program seeds later counts.

    The ranks of a launch get different seeds, as they have different batches to draw.
    """
    rank = launched_place().rank
    if rank is None:
        spawning = sys.modules.get("multiprocessing.process")
        # What multiprocessing spawns is called SpawnProcess-1 and so on.
        number = spawning.current_process().name.rpartition("-")[2] if spawning is not None else ""
        rank = int(number) if number.isdecimal() else 0
    own = (seed + _BETWEEN_RANKS * rank) % 2**32
    random.seed(own)
    call_after_import("numpy", lambda: sys.modules["numpy"].random.seed(own))
    call_after_import("torch", lambda: sys.modules["torch"].manual_seed(own))


def launch_token() -> str | None:
    """A word that the processes of one launch share and no other launch has; None without a launcher.

    Each call returns another word; processes with the same number of calls get the same one.
    """
    if launched_place().rank is None:
        return None
    named = os.environ.get(_NAME, "") not in ("", "none")
    words = [f"{name}={os.environ.get(name, '')}" for name in ((_NAME,) if named else _LAUNCH)]
    if os.environ.get("LOCAL_WORLD_SIZE", "") == os.environ.get("WORLD_SIZE", ""):
        # All processes are children of one process here; a later launch with the same port has another parent.
        words.append(_process(os.getppid()))
    words.append(str(next(_counter)))
    return hashlib.blake2b("\n".join(words).encode(), digest_size=8).hexdigest()


def spans_machines() -> bool:
    """Whether this process's launch has processes on several machines."""
    world, here = os.environ.get("WORLD_SIZE", ""), os.environ.get("LOCAL_WORLD_SIZE", "")
    return launched_place().rank is not None and here.isdecimal() and world.isdecimal() and int(here) < int(world)


def first_of_launch() -> bool:
    """Whether :func:`launch_token` may also be an earlier launch's, and this worker was not started again.

    On one machine the token is unique to a launch. Over several machines it is made of what they share: the launch's
    name and address, which a later launch may use again.
    """
    return spans_machines() and not started_again()


def started_again() -> dict[str, int]:
    """``restart``: how often a launcher (torchrun's ``--max-restarts``) has started this worker again.

    Empty for a worker that was started once.
    """
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")
    return {"restart": int(count)} if count.isdecimal() and int(count) else {}


def _process(number: int) -> str:
    """A process id with its start time (in clock ticks), because ids are reused."""
    try:
        with open(f"/proc/{number}/stat", "rb") as file:
            started = file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        started = ""
    return f"{number}@{started}"


#: exit code that a shell sees after SIGTERM
TERMINATED = 128 + signal.SIGTERM


def before_shutdown(finish: Callable[[], object]) -> None:
    """Call ``finish`` when the program has ended, while threads can still start (``atexit`` is too late)."""
    # Imported first, so that its own callback, after which executors take no work, runs after this one.
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(finish)  # type: ignore[attr-defined]


def release_signals() -> None:
    """In a forked child: give back the signals that :func:`before_abrupt_exit` handles for its parent."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def before_abrupt_exit(finish: Callable[[int], int]) -> Iterator[None]:
    """Inside the block, call ``finish`` before this process ends by ``os._exit`` or SIGTERM.

    Forked children end as they always did. An existing SIGTERM handler, or one that the program
    installs, stays in charge.

    Args:
        finish: called with the exit code; its result is the code for ``os._exit``.
    """
    owner = os.getpid()
    leave = os._exit

    def exit_after_finish(status: int) -> None:
        if os.getpid() == owner:
            try:
                status = finish(status)
            finally:
                leave(status)
        leave(status)

    def terminate(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        try:
            if os.getpid() == owner:
                finish(TERMINATED)
        finally:
            os.kill(os.getpid(), number)

    watches_signal = (
        threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    )
    os._exit = exit_after_finish  # type: ignore[assignment]
    if watches_signal:
        signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if os._exit is exit_after_finish:
            os._exit = leave
        if watches_signal and signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
