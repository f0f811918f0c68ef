"""``gtrace capture --live``: starts and ends the process that shows a capture below the script's output.

Importing this imports neither torch nor numpy: the program may set them up first.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import gtrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_NEEDS = "gtrace: --live needs a terminal as stderr; nothing is shown live"
#: The process that shows the view. It finds gtrace where this process found it, and nothing in the current folder.
_PROGRAM = "import sys; sys.path[0] = sys.argv.pop(1); from gtrace.cli.footer import main; main(sys.argv[1])"
#: Seconds between two reports of how long training waited, and that the view gets to leave the terminal in order.
_EVERY, _GRACE = 1.0, 2.0


class LiveView:
    """The process that shows a capture live.

    Args:
        path: the trace.
        waited: seconds that training waited for capture so far, and seconds of training.
        say: prints one line for the user.
    """

    def __init__(self, path: Path, waited: Callable[[], tuple[float, float]], say: Callable[[str], None]) -> None:
        self._waited = waited
        self._owner = os.getpid()
        self._done = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        try:
            terminal = sys.stderr.fileno()
            if not os.isatty(terminal) or os.environ.get("TERM", "dumb") == "dumb":
                say(_NEEDS)
                return
            self._child = _start(path.absolute(), terminal)
        except (OSError, ValueError, AttributeError) as error:
            say(f"{_NEEDS} ({error})")
            return
        self._thread = threading.Thread(target=self._report, name="gtrace-live", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int | None:
        """The process's id, None if nothing is shown."""
        return None if self._child is None else self._child.pid

    def close(self) -> None:
        """End the view; does nothing in a forked child, or a second time."""
        if self._child is None or os.getpid() != self._owner:
            return
        child, self._child = self._child, None
        self._done.set()
        self._thread.join(_GRACE)
        child.terminate()
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        with contextlib.suppress(OSError):
            child.stdin.close()  # type: ignore[union-attr]

    def _report(self) -> None:
        """Report once a second how long training waited."""
        stream = self._child.stdin.fileno()  # type: ignore[union-attr]
        os.set_blocking(stream, False)
        while not self._done.wait(_EVERY):
            try:
                os.write(stream, json.dumps(self._waited()).encode() + b"\n")
            except BlockingIOError:
                continue
            except OSError:
                return


@contextlib.contextmanager
def live_view(
    path: Path, waited: Callable[[], tuple[float, float]], say: Callable[[str], None], *, shown: bool
) -> Iterator[Callable[[], None]]:
    """Show a capture live inside the block, if it is to be ``shown``; yields what ends that earlier.

    The other arguments are those of :class:`LiveView`.
    """
    close = LiveView(path, waited, say).close if shown else lambda: None
    try:
        yield close
    finally:
        close()


def _start(path: Path, terminal: int) -> subprocess.Popen[bytes]:
    about = {"path": str(path), "since": identity(path), "parent": os.getpid()}
    package = os.path.dirname(os.path.dirname(os.path.abspath(gtrace.__file__)))
    # Kernels with one thread: the processors are for the training.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, package, json.dumps(about)],
        stdin=subprocess.PIPE,
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **threads},
    )


def identity(path: Path) -> str:
    """A word that another trace at the same path does not have; empty if nothing is there."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_ino}.{about.st_ctime_ns}"
