"""``gtrace capture --live``: the view of :mod:`gtrace.cli.watch` below the output of the script that is captured.

A process of its own reads what is committed and writes the last lines of the terminal, outside of the region that
scrolls. The script's output is not touched: it goes to the terminal as it always does, above the view.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gtrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_NEEDS = "gtrace: --live needs a terminal as stderr; nothing is shown live"
#: The process that shows the view. It finds gtrace where this process found it, and nothing in the current folder.
_PROGRAM = "import sys; sys.path[0] = sys.argv.pop(1); from gtrace.cli.live import main; main(sys.argv[1])"
#: Seconds between two reports of how long training waited, and that the view gets to leave the terminal in order.
_EVERY, _GRACE = 1.0, 2.0
#: How far the view steps back behind the training.
_NICE = 5
#: Lines of the view at most.
_MOST_LINES = 12


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
        self._thread = threading.Thread(target=self._tell, name="gtrace-live", daemon=True)
        self._thread.start()

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

    def _tell(self) -> None:
        """Tell the view how long training waited, once a second."""
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
    from gtrace.cli.watch import identity

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


class Footer:
    """The last lines of a terminal, which do not scroll with the others.

    Args:
        terminal: its descriptor.
    """

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._size = (0, 0, 0)

    @property
    def width(self) -> int:
        """Characters of a line."""
        return os.get_terminal_size(self._terminal).columns

    def draw(self, lines: list[str]) -> None:
        """Replace the lines. Where the cursor is does not change, in what colors the script writes neither."""
        columns, rows = os.get_terminal_size(self._terminal)
        height = min(max(len(lines), self._size[2]), rows // 2)
        text = ""
        if self._size != (columns, rows, height):
            text = self._reserved(rows, height)
            self._size = (columns, rows, height)
        shown = [*lines, *[""] * (height - len(lines))][:height]
        placed = (f"\x1b[{rows - height + k};1H\x1b[0m\x1b[2K{one}" for k, one in enumerate(shown, 1))
        # In one write, so that nothing of the script's comes between.
        self._write(f"{text}\x1b7{''.join(placed)}\x1b8")

    def close(self) -> None:
        """Clear the lines, and let the whole terminal scroll again."""
        if self._size[2]:
            _, rows, height = self._size
            self._write(f"\x1b7\x1b[r\x1b[{rows - height + 1};1H\x1b[0m\x1b[0J\x1b8")
            self._size = (0, 0, 0)

    def _reserved(self, rows: int, height: int) -> str:
        # Scroll what is there up, where the cursor is too low, without moving it to another column.
        clear = f"\x1b7\x1b[r\x1b[{rows - self._size[2] + 1};1H\x1b[0J\x1b8" if self._size[2] else ""
        room = "\x1bD" * height + f"\x1b[{height}A"
        return f"{clear}{room}\x1b7\x1b[1;{rows - height}r\x1b8"

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._terminal, data) :]


def main(argument: str) -> None:
    """Show a capture until it or its process ends."""
    about: dict[str, Any] = json.loads(argument)
    os.nice(_NICE)
    # Ctrl-C is for the script, which may go on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    footer = Footer(sys.stdout.fileno())

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(0)

    def stop(_number: int, _frame: object) -> None:
        footer.close()
        os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGTSTP, stop)
    try:
        _show(about, footer)
    finally:
        footer.close()


def _show(about: dict[str, Any], footer: Footer) -> None:
    from rich.console import Console

    from gtrace.cli.watch import glances, view

    encoding = sys.stdout.encoding or "utf-8"
    os.set_blocking(sys.stdin.fileno(), False)
    waited, last = (0.0, 0.0), None
    shown = os.path.relpath(about["path"])
    for glance in glances(Path(about["path"]), lambda: os.getppid() != about["parent"], about["since"]):
        with contextlib.suppress(BlockingIOError, ValueError):
            told = os.read(sys.stdin.fileno(), 1 << 16).splitlines()
            waited = tuple(json.loads(told[-1])) if told else waited
        last = glance or last
        console = Console(width=footer.width, force_terminal=True, highlight=False, legacy_windows=False)
        with console.capture() as drawn:
            console.print(view(last, shown, encoding, waited), no_wrap=True)
        rule = ("─" if encoding.lower().startswith("utf") else "-") * footer.width
        footer.draw([f"\x1b[2m{rule}\x1b[0m", *drawn.get().splitlines()][:_MOST_LINES])
