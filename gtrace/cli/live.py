"""``gtrace capture --live``: starts and ends the process that shows a capture below the script's output.

Importing this imports neither torch nor numpy: the program may set them up first.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import gtrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

_NEEDS = "gtrace: --live needs a terminal as stderr; nothing is shown live"
#: The process that shows the view. It is nobody's child, so that a script which waits for all of its own does not wait
#: for this one, and finds gtrace where this process found it, and nothing in the current folder. It takes only
#: processor time that the training leaves.
_PROGRAM = (
    "import os, sys; os.fork() and os._exit(0); os.nice(19); os.write(0, b'%d' % os.getpid()); "
    "sys.path[0] = sys.argv.pop(1); from gtrace.cli.watch import main; main(sys.argv[1])"
)
#: Seconds between two reports of how long training waited; that the view gets to start, and to leave the terminal.
_EVERY, _START, _GRACE = 1.0, 10.0, 2.0
#: Lets the whole terminal scroll again, and does not move the cursor.
WHOLE = "\x1b7\x1b[r\x1b8"


class LiveView:
    """The process that shows a capture live.

    Args:
        path: the trace.
        waited: seconds that training waited for capture so far, and seconds of training.
        say: prints one line for the user.

    Attributes:
        pid: the process's id, None if nothing is shown.
    """

    def __init__(self, path: Path, waited: Callable[[], tuple[float, float]], say: Callable[[str], None]) -> None:
        self.pid: int | None = None
        self._waited = waited
        self._owner = os.getpid()
        self._done = threading.Event()
        try:
            self._terminal = sys.stderr.fileno()
            if not os.isatty(self._terminal) or os.environ.get("TERM", "dumb") == "dumb":
                say(_NEEDS)
                return
            self._socket, theirs = socket.socketpair()
            self._socket.settimeout(_START)
            with theirs:
                _start(path.absolute(), self._terminal, theirs)
            self.pid = int(self._socket.recv(32))
        except (OSError, ValueError, AttributeError, subprocess.SubprocessError) as error:
            say(f"gtrace: --live could not start ({error}); nothing is shown live")
            return
        self._thread = threading.Thread(target=self._report, name="gtrace-live", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the view; does nothing in a forked child, or a second time."""
        if self.pid is None or os.getpid() != self._owner:
            return
        view, self.pid = self.pid, None
        self._done.set()
        self._thread.join(_GRACE)
        with self._socket:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if self._ended(0.0):
                    break
                with contextlib.suppress(ProcessLookupError):
                    os.kill(view, number)
                self._ended(_GRACE)
        # It may have been killed with its lines on the terminal, which takes nothing at all after Ctrl-S.
        with contextlib.suppress(OSError, ValueError):
            if os.isatty(self._terminal) and select.select([], [self._terminal], [], 0)[1]:
                os.write(self._terminal, WHOLE.encode())

    def _ended(self, seconds: float) -> bool:
        """Whether the process ends within some seconds, with which its end of the socket is closed."""
        self._socket.settimeout(seconds)
        try:
            return not self._socket.recv(1)
        except (TimeoutError, BlockingIOError):
            return False
        except OSError:
            return True

    def _report(self) -> None:
        """Report once a second how long training waited."""
        self._socket.settimeout(0)
        while not self._done.wait(_EVERY):
            try:
                self._socket.send(json.dumps(self._waited()).encode() + b"\n")
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


def _start(path: Path, terminal: int, reports: socket.socket) -> None:
    about = {"path": str(path), "since": identity(path), "parent": os.getpid()}
    package = os.path.dirname(os.path.dirname(os.path.abspath(gtrace.__file__)))
    # Kernels with one thread: the processors are for the training.
    threads = dict.fromkeys(("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    subprocess.run(
        [sys.executable, "-c", _PROGRAM, package, json.dumps(about)],
        stdin=reports.fileno(),
        stdout=terminal,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **threads},
        timeout=_START,
        check=True,
    )


def identity(path: Path) -> str:
    """A word that another trace at the same path does not have; empty if nothing is there."""
    try:
        about = path.stat()
    except OSError:
        return ""
    return f"{about.st_ino}.{about.st_ctime_ns}"
