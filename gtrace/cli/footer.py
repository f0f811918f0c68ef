"""The process that ``gtrace capture --live`` starts: the view of :mod:`gtrace.cli.watch` below a script's output.

It writes the last lines of the terminal, outside of the region that scrolls. The script's output is not touched: it
goes to the terminal as it always does, above the view.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
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
    encoding = sys.stdout.encoding or "utf-8"
    os.set_blocking(sys.stdin.fileno(), False)
    waited, last = (0.0, 0.0), None
    shown = os.path.relpath(about["path"])
    for glance in glances(Path(about["path"]), lambda: os.getppid() != about["parent"], about["since"]):
        with contextlib.suppress(BlockingIOError, ValueError):
            reports = os.read(sys.stdin.fileno(), 1 << 16).splitlines()
            waited = tuple(json.loads(reports[-1])) if reports else waited
        last = glance or last
        console = Console(width=footer.width, force_terminal=True, highlight=False, legacy_windows=False)
        with console.capture() as drawn:
            console.print(view(last, shown, encoding, waited), no_wrap=True)
        rule = ("─" if encoding.lower().startswith("utf") else "-") * footer.width
        footer.draw([f"\x1b[2m{rule}\x1b[0m", *drawn.get().splitlines()][:_MOST_LINES])
