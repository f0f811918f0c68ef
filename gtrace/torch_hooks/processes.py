"""This process's place among several training processes, and its end.

It also catches ends that no ``finally`` sees: ``os._exit``, SIGTERM and SIGHUP. Does not import torch.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import itertools
import os
import random
import signal
import socket
import struct
import sys
import threading
from typing import TYPE_CHECKING, NamedTuple

from gtrace.torch_hooks.children import after_import

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator
    from types import FrameType


#: environment variables of launchers (torchrun, accelerate, srun) that identify a launch
_LAUNCH = ("MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
#: torchrun's name for a launch; it stays when workers are started again, while their port changes
_NAME = "TORCHELASTIC_RUN_ID"
_counter = itertools.count()
#: the seeds of two ranks differ by a multiple of this, so that a few seeds with a few ranks are all different
_BETWEEN_RANKS = 1_000_003
#: how often this process was forked
forks = 0


def _forked() -> None:
    global forks  # noqa: PLW0603 - the process's own
    forks += 1


# Children run this first, before captures and trainings begin in them: those import this module to follow forks.
os.register_at_fork(after_in_child=_forked)


class Place(NamedTuple):
    """One process among those that train together: its number, None without one, and how many they are."""

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
    after_import("numpy", lambda: sys.modules["numpy"].random.seed(own))
    after_import("torch", lambda: sys.modules["torch"].manual_seed(own))


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


#: signals that end a program by default and that it may survive for a moment
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
#: seconds that the main thread has to act on such a signal: it does not while it waits in a collective
_REACTION = 0.5


def before_shutdown(finish: Callable[[], object]) -> None:
    """Call ``finish`` when the program and its threads have ended, while threads can start (``atexit`` is too late)."""
    # Imported first, so that its own callback, after which executors take no work, runs after this one.
    importlib.import_module("concurrent.futures.thread")
    threading._register_atexit(lambda: (threads_ended(), finish()))  # type: ignore[attr-defined]


def threads_ended(others: Collection[threading.Thread] = ()) -> bool:
    """Wait as the interpreter does at its end: for threads that are not daemons, and for the work of executors.

    Not for ``others``. Threads that wait for the main thread's end see that it has come. False if Ctrl-C ends the wait.
    """
    main, idle = threading.main_thread(), False
    main.is_alive = lambda: False  # type: ignore[method-assign]
    try:
        while found := [one for one in threading.enumerate() if not (one.daemon or one is main or one in others)]:
            busy = next((one for one in found if not _waits(one)), None)
            # Twice: between two pieces of work a thread of an executor looks as if it had none.
            if busy is None and idle:
                break
            idle = busy is None
            (busy or found[0]).join(0.05)
    except KeyboardInterrupt:
        return False
    finally:
        del main.is_alive
    return True


def _waits(thread: threading.Thread) -> bool:
    """Whether a thread waits for work or processes of an executor, or in ``join`` for the main thread."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame and (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("concurrent.futures.thread", "_worker"):
        return True
    while frame is not None:
        joins = frame.f_code is threading.Thread.join.__code__ and frame.f_locals["self"] is threading.main_thread()
        if joins or frame.f_globals.get("__name__") == "concurrent.futures.process":
            return True
        frame = frame.f_back
    return False


def release_signals() -> None:
    """In a forked child: give back the signals that :func:`before_abrupt_exit` handles for its parent."""
    for number in _ENDINGS:
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, signal.SIG_DFL)


@contextlib.contextmanager
def counting_ctrl_c(press: Callable[[int], None]) -> Iterator[list[int]]:
    """Inside the block, Ctrl-C raises nothing; ``press`` is called with how often it came, the list holds these."""
    presses: list[int] = []
    # None is a handler that only C knows, and that cannot be put back.
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) in (
        signal.SIG_IGN,
        None,
    ):
        yield presses
        return

    def count(_number: int, _frame: FrameType | None) -> None:
        presses.append(len(presses) + 1)
        press(len(presses))

    before = signal.signal(signal.SIGINT, count)
    try:
        yield presses
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def before_abrupt_exit(finish: Callable[[int], int], hurry: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Inside the block, call ``finish`` before this process ends by ``os._exit``, SIGTERM or SIGHUP.

    Forked children end as they always did. An existing handler of a signal, or one that the program installs, stays in
    charge. If the main thread is in a call that no signal handler can interrupt, another one does it.

    Args:
        finish: called with the exit code; its result is the code for ``os._exit``.
        hurry: called first at a signal. If it returns True, the end is already under way, and the process ends by the
            signal when the block does.
    """
    ends, leave = _Ends(finish, hurry), os._exit

    def exit_after_finish(status: int) -> None:
        if ends.here():
            try:
                status = finish(status)
            finally:
                leave(status)
        leave(status)

    def watch() -> None:
        if threading.current_thread() is threading.main_thread():
            held.enter_context(_watching(ends.see))

    main = threading.current_thread() is threading.main_thread()
    ours = [number for number in _ENDINGS if main and signal.getsignal(number) is signal.SIG_DFL]
    os._exit = exit_after_finish  # type: ignore[assignment]
    for number in ours:
        signal.signal(number, ends.handle)
    try:
        # Not earlier: a program that never imports torch has no collectives, and gets no thread.
        with contextlib.ExitStack() as held, after_import("torch", watch if ours else lambda: None):
            yield
    finally:
        if os._exit is exit_after_finish:
            os._exit = leave
        for number in ours:
            if signal.getsignal(number) == ends.handle:
                signal.signal(number, signal.SIG_DFL)
        if ends.late and ends.here():
            _die(ends.late[0])


class _Ends:
    """Ends a process by a signal, once, from whichever thread comes first."""

    def __init__(self, finish: Callable[[int], int], hurry: Callable[[], bool]) -> None:
        self._finish, self._hurry = finish, hurry
        self._owner = os.getpid()
        self._once, self._seen = threading.Lock(), threading.Event()
        #: signals that came when the end was already under way
        self.late: list[int] = []

    def here(self) -> bool:
        """Whether this is the process, and not a forked child of it."""
        return os.getpid() == self._owner

    def handle(self, number: int, _frame: FrameType | None) -> None:
        self._seen.set()
        self._end(number)

    def see(self, number: int) -> None:
        """A signal has come; called in another thread than the main one."""
        if signal.getsignal(number) == self.handle and not self._seen.wait(_REACTION):
            self._end(number)

    def _end(self, number: int) -> None:
        if self.here():
            if self._hurry() or not self._once.acquire(blocking=False):
                self.late.append(number)
                return
            try:
                self._finish(128 + number)
            finally:
                _die(number)
        _die(number)


def _die(number: int) -> None:
    """End this process by a signal, from any thread: Python lets only the main one change a handler."""
    ctypes.CDLL(None).signal(number, 0)  # SIG_DFL
    os.kill(os.getpid(), number)


@contextlib.contextmanager
def _watching(act: Callable[[int], None]) -> Iterator[None]:
    """Inside the block, call ``act`` in a thread for each signal that has a handler of Python's, as soon as it comes.

    A handler itself only runs once the main thread is back from C. The program may take the descriptor for itself.
    """
    if not hasattr(socket, "SO_PASSCRED"):
        yield
        return
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    # A forked child writes its own signals into the same socket; the system says who wrote.
    here.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    there.setblocking(False)

    def watch() -> None:
        owner = os.getpid()
        while True:
            data, about, *_ = here.recvmsg(1, socket.CMSG_SPACE(_CREDENTIALS.size))
            writer = _CREDENTIALS.unpack(about[0][2])[0] if about else 0
            if writer == owner:
                if data == b"\0":
                    return
                act(data[0])

    before = signal.set_wakeup_fd(there.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
    thread = threading.Thread(target=watch, name="gtrace-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        # A program that closes all descriptors, as daemons do, has closed these, too; the thread then waits for ever.
        with contextlib.suppress(OSError):
            if (last := signal.set_wakeup_fd(-1)) != there.fileno():
                signal.set_wakeup_fd(last)
            there.send(b"\0")
            thread.join()
        for end in (here, there):
            with contextlib.suppress(OSError):
                end.close()


#: of a process that writes into a socket: its id, its user, its group
_CREDENTIALS = struct.Struct("3i")
