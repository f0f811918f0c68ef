"""The process that ``gtrace capture --live`` starts: the view of :mod:`gtrace.cli.watch` below a script's output.

It writes the last lines of the terminal, outside of the region that scrolls. The script's output is not touched: it
goes to the terminal as it always does, above the view.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from gtrace.cli.watch import glances, view

#: How far the view steps back behind the training.
_NICE = 5
#: Lines of the view at most.
_MOST_LINES = 12


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


class Reports:
    """What the training process says, and whether it lives.

    Args:
        parent: its id.
    """

    def __init__(self, parent: int) -> None:
        self._parent = parent
        self._socket = socket.socket(fileno=sys.stdin.fileno())
        self._socket.settimeout(0)
        #: seconds that training waited for capture, and seconds of training
        self.waited = (0.0, 0.0)

    def ended(self) -> bool:
        """Whether the capture is over; takes what has come meanwhile."""
        try:
            said = self._socket.recv(1 << 16)
        except BlockingIOError:
            said = b"\n"
        except OSError:
            said = b""
        if len(said) > 1:
            self.waited = tuple(json.loads(said.splitlines()[-1]))
        try:
            # Forked children of the training may hold its end of the socket open after its death.
            os.kill(self._parent, 0)
        except ProcessLookupError:
            return True
        return not said


def main(argument: str) -> None:
    """Show a capture until it or its process ends."""
    about: dict[str, Any] = json.loads(argument)
    os.nice(_NICE)
    # Ctrl-C is for the script, which may go on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    footer, reports = Footer(sys.stdout.fileno()), Reports(about["parent"])

    def stop(_number: int, _frame: object) -> None:
        footer.close()
        os.kill(os.getpid(), signal.SIGSTOP)

    signal.signal(signal.SIGTSTP, stop)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: sys.exit())
    try:
        _show(Path(about["path"]), about["since"], reports, footer)
    finally:
        footer.close()


def _show(path: Path, since: str, reports: Reports, footer: Footer) -> None:
    encoding, last = sys.stdout.encoding or "utf-8", None
    for glance in glances(path, reports.ended, since):
        last = glance or last
        console = Console(width=footer.width, force_terminal=True, highlight=False, legacy_windows=False)
        with console.capture() as drawn:
            console.print(view(last, str(path), encoding, reports.waited), no_wrap=True)
        rule = ("─" if encoding.lower().startswith("utf") else "-") * footer.width
        footer.draw([f"\x1b[2m{rule}\x1b[0m", *drawn.get().splitlines()][:_MOST_LINES])
