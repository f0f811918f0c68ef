"""A Zarr trace with several writers: each process writes the group of its own rank.

No process ever writes into another's group, so nothing has to be merged and every process may die at any moment:
the trace keeps what each has committed. Only the root's metadata are shared. They change when a process joins and
when it ends, under a lock of this trace alone, which the system releases when its holder dies. Nobody waits long for
it: a holder may also be stopped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from gtrace.errors import UsageError
from gtrace.trace.files import (
    LOCAL,
    attributes_of,
    lock_file,
    make_group,
    start_folder,
    write_error,
    write_group,
    write_root,
)
from gtrace.trace.format import StreamKey, go_on
from gtrace.trace.journal import being_written, refuse_living
from gtrace.trace.writer import TraceWriter, root_attrs
from gtrace.trace.zarr import WRITERS, ZarrSink

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

    from gtrace.trace.format import Beat

#: attribute of the root: a word that all processes of one run share, and no other run has
RUN = "run"
#: attribute of the root: such words of the processes that started the writers, one on each of several machines
LAUNCHERS = "launchers"

#: seconds to wait for the lock: a process ends within two even if a stopped one holds it; and between two attempts
_PATIENCE = 1.5
_PAUSE = 0.01
#: traces whose lock could not be had in that time; they are not waited for again
_late: set[Path] = set()


def join_trace(
    path: str | PathLike[str],
    *,
    run: str,
    rank: int | None = None,
    writers: int = 1,
    force: bool = False,
    attrs: Mapping[str, Any] | None = None,
    launcher: str | None = None,
    first: bool = False,
) -> tuple[TraceWriter, int]:
    """Start the trace of a run, or join it if another process of the same run has started it.

    Args:
        path: the trace, ``.zarr``; its folder must exist.
        run: a word that only this run has.
        rank: number of this process, None if it has none.
        writers: expected number of processes; the trace is complete when all of them have finished.
        force: replace a trace of another run.
        attrs: attributes of the trace; each process's own are kept with its rank.
        launcher: the word of the process that started this one, if ``run`` belongs to a launch over several
            machines.
        first: no process of this rank and run can exist yet: a trace that has one is from an earlier launch
            with the same word.

    Returns:
        the writer, and the rank to write under: the requested one, or the next free number if another process
        has it (a worker that was started again) or none was requested.

    Raises:
        UsageError: another suffix, no such folder, or attributes that cannot be stored.
        OutputExistsError: something else is there; it is kept.
        TraceError: the trace cannot be written; if another process held its lock for too long, ``__cause__`` is
            TimeoutError, and another call may succeed.
    """
    place = Path(os.path.realpath(path))
    if place.suffix != ".zarr":
        raise UsageError(f"{path}: several processes can write only Zarr; the name must end in .zarr")
    launchers = {LAUNCHERS: [launcher]} if launcher else {}
    start = root_attrs({**(attrs or {}), RUN: run, WRITERS: writers, **launchers})
    try:
        with _locked(place):
            if belongs_to(place, run) and not (first and _is_earlier(place, rank, writers)):
                _reopen(place, writers, launcher)
            else:
                if force and not belongs_to(place, run):
                    refuse_living(place)
                start_folder(place, start, force=force)
            number = _free_rank(place, rank, writers)
            make_group(str(place / StreamKey(number).rank_group), {"rank": number, "status": "writing"})
    except (OSError, RuntimeError) as error:
        raise write_error(path, error) from error
    return TraceWriter(_SharedSink(place, number), os.fspath(path), start), number


def belongs_to(path: Path, run: str) -> bool:
    """Whether a process of this run, or one that it started, has started the trace at this place."""
    attrs = attributes_of(path)
    return attrs is not None and (attrs.get(RUN) == run or run in _launchers(attrs))


def settle(path: Path, run: str, status: Literal["complete", "interrupted"] | None = None) -> None:
    """Finish the root once all processes have finished their parts; does nothing for another run's trace.

    ``status`` is the end of the run as a whole, from the process that started all others: the run is over, whatever the
    parts say.

    Raises:
        TraceError: the files cannot be read or written.
    """
    try:
        if path.is_dir():
            with _locked(path):
                _settle(path, run, status)
    except OSError as error:
        raise write_error(path, error) from error


def parts(path: Path) -> list[dict[str, Any]]:
    """The attributes of each process's part, by rank; ``status`` is ``writing`` until it has finished."""
    names = [name for name in LOCAL.folders(str(path)) if name.startswith("rank")]
    found = [attributes_of(path / name) for name in names]
    return [attrs for attrs in found if attrs is not None]


class _SharedSink(ZarrSink):
    def __init__(self, path: Path, rank: int) -> None:
        super().__init__(path)
        self._rank = rank

    def close(self, attrs: Mapping[str, Any], beat: Beat = go_on) -> None:
        """Cut the arrays to the committed rows, store how this part ended, and finish the trace if it was the last."""
        place = str(self._path / StreamKey(self._rank).rank_group)
        final = {**attrs, "rank": self._rank}
        self.check_place()
        # First, as long as there is room: if the disk is full, rows stay in journals.
        write_group(place, {**final, "status": "writing"})
        try:
            self.cut(beat)
        except OSError:
            final["status"] = "interrupted"
            raise
        finally:
            write_group(place, final)
            with _locked(self._path):
                _settle(self._path, attrs[RUN], None)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a trace: a file beside it, since the trace itself may be replaced.

    TimeoutError if another process has held it for 1.5 seconds.
    """
    lock, until = path.with_name(f".{path.name}.gtrace-lock"), time.monotonic() + _PATIENCE * (path not in _late)
    while (descriptor := _take(lock)) is None:
        if time.monotonic() >= until:
            _late.add(path)
            raise TimeoutError("another process of this run, perhaps a stopped one, holds its lock")
        time.sleep(_PAUSE)
    _late.discard(path)
    try:
        yield
        # A child that is forked meanwhile has the descriptor, too, and would hold the lock as long as it lives.
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        if descriptor >= 0:
            # Before the lock ends: whoever opened the file meanwhile finds that it is another one.
            with contextlib.suppress(OSError):
                os.unlink(lock)
            os.close(descriptor)


def _take(lock: Path) -> int | None:
    """A descriptor that holds the lock; None if another process has it, -1 if none can be made here."""
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
    except OSError:
        # No room, or no permission: the trace itself can be finished all the same.
        return -1
    with contextlib.suppress(FileNotFoundError):
        if lock_file(descriptor, fcntl.LOCK_EX) and os.fstat(descriptor).st_ino == os.stat(lock).st_ino:
            return descriptor
    os.close(descriptor)
    return None


def _launchers(attrs: Mapping[str, Any]) -> list[Any]:
    found = attrs.get(LAUNCHERS)
    return found if isinstance(found, list) else []


def _is_earlier(path: Path, rank: int | None, writers: int) -> bool:
    attrs = attributes_of(path) or {}
    there = (path / StreamKey(rank or 0).rank_group).exists()
    return there or attrs.get("status") != "writing" or attrs.get(WRITERS) != writers


def _reopen(path: Path, writers: int, launcher: str | None) -> None:
    """Mark the trace as unfinished again, if it seemed finished before this process came."""
    attrs = attributes_of(path) or {}
    new = dict(attrs)
    if attrs.get("status") != "writing" or attrs.get(WRITERS, 1) < writers:
        new |= {"status": "writing", WRITERS: max(writers, attrs.get(WRITERS, 1))}
    if launcher and launcher not in _launchers(attrs):
        new[LAUNCHERS] = [*_launchers(attrs), launcher]
    if new != attrs:
        write_group(str(path), new)


def _free_rank(path: Path, rank: int | None, writers: int) -> int:
    taken = {name for name in LOCAL.folders(str(path)) if name.startswith("rank")}
    number = rank or 0
    while StreamKey(number).rank_group in taken:
        # Numbers below ``writers`` are reserved for processes that may still come.
        number = max(number + 1, writers if rank is not None else 0)
    return number


def _settle(path: Path, run: str, status: Literal["complete", "interrupted"] | None) -> None:
    attrs = attributes_of(path)
    if attrs is None or attrs.get(RUN) != run:
        return
    known = parts(path)
    ends = {part.get("status") for part in known}
    done = ends <= {"complete", "interrupted"}
    if status is None and (not done or len(known) < attrs.get(WRITERS, 1)):
        return
    right = done and "interrupted" not in (*ends, status, attrs.get("status"))
    worst = "complete" if right else "interrupted"
    if status == "complete" and not done and being_written(path):
        worst = "writing"  # one of them outlives its launcher, and may reach its end
    shared = {name: attrs[name] for name in (WRITERS, LAUNCHERS) if name in attrs}
    final = {**attrs, **(known[0] if known else {}), **shared, "status": worst}
    final.pop("rank", None)
    if done:
        write_root(str(path), final)
    else:
        # A process was killed, or outlives its launcher: its metadata may still change.
        write_group(str(path), final)
