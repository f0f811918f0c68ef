"""A training while it is recorded, read from the rows that are committed so far.

``gtrace info --follow`` shows it, and so does the process that ``gtrace capture --live`` starts: it writes the last
lines of the terminal, outside of the region that scrolls. The script's output is not touched.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gtrace.cli.capture import identity
from gtrace.errors import TraceError, UsageError, size_text
from gtrace.report.analysis.history import WRITING, RunHistory, StreamHistory, TensorHistory, status_in_words
from gtrace.report.names import count, literal, number, shorten, sparkline
from gtrace.trace import TensorInfo, Trace, open_trace
from gtrace.trace.choose import choose_infos
from gtrace.trace.files import disk_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


#: Codecs whose errors are predicted, and their bits.
CODECS, BITS = ("alq", "nuqsgd", "qsgdinf"), 4
#: Seconds between two looks at least, and for each second of a processor that a look took; between two at the clock.
_PAUSE, _SHARE, _TICK = 1.0, 20.0, 0.1
#: Seconds that count of a look at most: the first with predictions loads, and may compile, the kernels.
_MOST_COST = 0.5
#: Seconds without a new step after which is asked whether the process still runs.
_QUIET = 5.0
#: Recorded steps whose energies and speed count as the present ones.
_RECENT = 16
#: Layers that have a line, and values that are read for the predicted errors.
_LAYERS, _MOST_VALUES = 4, 1 << 22
_SPARK, _BAR, _NAME = 32, 16, 24


@dataclass(frozen=True)
class Glance:
    """What is known about a training at one moment."""

    path: str
    #: a line: the step, and how many are recorded at what rate
    head: str
    #: how the capture ended, empty while it goes on
    ended: str
    #: what is wrong, each with a word before it
    troubles: list[tuple[str, str]]
    losses: list[float]
    #: of the whole gradient, infinite if some values are not finite
    norms: list[float]
    #: names and shares of the energy, the largest first; the others together are the last
    layers: list[tuple[str, float]]
    #: predicted share of the energy that each codec of ``CODECS`` loses; empty while that is not known
    errors: dict[str, float] = field(default_factory=dict)
    #: bytes on disk
    size: int = 0


class Watch:
    """Reads a trace again and again; after a while without a step it ``asks`` whether the writing process is alive."""

    def __init__(self, path: Path, *, asks: bool) -> None:
        self._path, self._asks = path, asks
        self._seen: tuple[int, ...] = (-1,)
        self._changed = time.monotonic()
        #: what errors are predicted of next, and of what they are known
        self._wanted: tuple[int, list[TensorInfo]] = (-1, [])
        self._predicted = -1
        self._errors: dict[str, float] = {}

    def look(self) -> Glance:
        """Read the trace, which may not be there, or not be readable at this moment."""
        with open_trace(self._path) as trace:
            # An empty trace has no tensor that could be chosen.
            run = RunHistory(trace, choose_infos(trace) if trace.tensors else ())
            seen = tuple(stream.steps.size for stream in run.streams)
            if seen != self._seen:
                self._seen, self._changed = seen, time.monotonic()
            # The first rank's optimizer with most steps; weights rather than other gradients.
            there = [stream for stream in run.streams if stream.steps.size]
            stream = min(there, key=lambda it: (it.key.kind != "weight", it.key.rank, -it.steps.size), default=None)
            if stream is None:
                return Glance(trace.path, "no step is recorded yet", self._end(trace), [], [], [], [])
            tensors = [one for one in run.tensors if one.info.stream == stream.key]
            norms = stream.norms(tensors)
            if (finite := stream.steps[np.isfinite(norms) & (norms > 0)]).size:
                self._wanted = int(finite[-1]), _largest(tensors, int(finite[-1]))
            steps, times = stream.steps[-_RECENT:], stream.times[-_RECENT:]
            passed = float(times[-1] - times[0])
            speed = f", {number((steps[-1] - steps[0]) / passed, 2)} steps/s" if passed > 0 else ""
            return Glance(
                path=trace.path,
                head=f"step {stream.steps[-1]:,}, {run.steps} recorded{speed}",
                ended=self._end(trace),
                troubles=run.troubles(),
                losses=stream.losses.tolist(),
                norms=norms.tolist(),
                layers=_layers(stream, tensors),
                errors=self._errors,
                size=disk_bytes(self._path),
            )

    def _end(self, trace: Trace) -> str:
        quiet = self._asks and time.monotonic() - self._changed > _QUIET
        if trace.attrs.get("status") == "writing" and not quiet:
            return ""
        status = status_in_words(trace)
        return "" if status == WRITING else status

    def predict(self) -> dict[str, float]:
        """Expected errors at the last step that was finite, of the tensors with most energy; later looks have them."""
        step, infos = self._wanted
        if infos and step != self._predicted:
            with open_trace(self._path) as trace:
                self._predicted, self._errors = step, predicted_errors(trace, step, infos)
        return self._errors


def predicted_errors(trace: Trace, step: int, infos: Sequence[TensorInfo]) -> dict[str, float]:
    """The share of the energy of some tensors at a step that each codec of ``CODECS`` is expected to lose."""
    # The kernels take a second to load.
    from gtrace.codecs import codec
    from gtrace.planning.curves import measure

    names = [escape(info.name) for info in infos]
    try:
        curves, _ = measure(
            trace, [codec(name, bits=BITS) for name in CODECS], steps=[step], tensors=names, kind=infos[0].kind, jobs=1
        )
    except UsageError:
        # A trace of sketches may lack those that a codec needs.
        return {}
    energy = np.nansum(curves.energy)
    lost = np.nansum(curves.error, axis=(0, 1)) / energy if energy > 0 else np.full(len(curves.codecs), math.nan)
    return dict(zip(CODECS, lost.tolist(), strict=False))


def _layers(stream: StreamHistory, tensors: Sequence[TensorHistory]) -> list[tuple[str, float]]:
    """Parts of the energy of the last steps by module, the largest first and the others in one."""
    first = stream.steps[-_RECENT:][0]
    energies: dict[str, float] = {}
    for one in tensors:
        layer = one.info.name.rpartition(".")[0] or one.info.name
        energies[layer] = energies.get(layer, 0.0) + float(np.square(one.norms[one.steps >= first]).sum())
    whole = sum(energies.values())
    if not 0 < whole < math.inf:
        return []
    order = sorted(energies, key=lambda name: -energies[name])
    most = _LAYERS if len(order) > _LAYERS + 1 else len(order)
    shown = [(name, energies[name] / whole) for name in order[:most]]
    rest = sum(energies[name] for name in order[most:]) / whole
    return shown + ([(count(len(order) - most, "other"), rest)] if order[most:] else [])


def _largest(tensors: Sequence[TensorHistory], step: int) -> list[TensorInfo]:
    """The tensors with most energy at a step, as many as can be read quickly."""
    there = [(one, float(one.norms[one.steps == step][0])) for one in tensors if step in one.steps]
    chosen: list[TensorInfo] = []
    values = 0
    for one, _ in sorted(there, key=lambda pair: -pair[1]):
        values += one.stored
        if chosen and values > _MOST_VALUES:
            break
        chosen.append(one.info)
    return chosen


def glances(path: Path, ended: Callable[[], bool] | None = None, since: str = "") -> Iterator[Glance | None]:
    """Look at a trace until its capture has ended; None while it is not there yet or cannot be read.

    Looks take at most a twentieth of one processor's time. ``ended`` is called ten times a second, and no look follows
    once it is true; without it the trace alone shows that. ``since`` is the :func:`identity` of what was at the path
    before, which is not looked at.
    """
    watch = Watch(path, asks=ended is None)
    ended = ended or (lambda: False)
    while not ended():
        begun = time.process_time()
        found = None
        if identity(path) != since:
            # A chunk may be replaced while it is read.
            with contextlib.suppress(TraceError):
                found = watch.look()
        if found is not None and found.ended:
            yield replace(found, errors=watch.predict())
            return
        yield found
        with contextlib.suppress(TraceError):
            # Not before: at first the kernels have to be loaded, or compiled.
            watch.predict()
        until = time.monotonic() + max(_PAUSE, _SHARE * min(time.process_time() - begun, _MOST_COST))
        while time.monotonic() < until and not ended():
            time.sleep(_TICK)


def view(glance: Glance | None, path: str, encoding: str, waited: tuple[float, float] = (0.0, 0.0)) -> RenderableType:
    """A glance, None for nothing yet, as a few lines of text.

    ``waited``: seconds that training waited for capture, and seconds of training.
    """
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True, style="dim", width=8)
    table.add_column(no_wrap=True, overflow="ellipsis")
    shown = shorten(literal(os.path.basename(path), encoding), _NAME)
    if glance is None:
        table.add_row("trace", f"{shown}: waiting for the first recorded step")
        return table
    table.add_row("trace", Text(f"{shown}: {glance.head}", "bold"))
    for word, text in glance.troubles[:2]:
        table.add_row(Text(word, "bold red"), Text(text, "red"))
    for word, values in (("loss", glance.losses), ("norm", glance.norms)):
        known = [value for value in values if math.isfinite(value)]
        if known:
            now = number(values[-1]) if math.isfinite(values[-1]) else "NaN"
            table.add_row(word, f"{now:<9} {sparkline(values, _SPARK, encoding)}  from {number(known[0])}")
    full, partly = ("█", "░") if literal("█░", encoding) == "█░" else ("#", ".")
    for place, (name, share) in enumerate(glance.layers):
        bar = full * round(_BAR * share)
        short = shorten(literal(name, encoding), _NAME)
        table.add_row("energy" if not place else "", f"{share:<9.1%} {bar:{partly}<{_BAR}}  {short}")
    if glance.errors:
        said = ", ".join(f"{name} {share:.1%}" for name, share in glance.errors.items())
        table.add_row("error", f"{said} of gradient energy, expected at {BITS} bits")
    amounts = f"{size_text(glance.size)} on disk"
    if waited[1] > 0:
        amounts = f"training waited {waited[0] / waited[1]:.1%} of its time ({waited[0]:.1f} s); {amounts}"
    table.add_row("capture", f"{glance.ended}; {amounts}" if glance.ended else amounts)
    return table


def line(glance: Glance) -> str:
    """A glance as one line."""
    said = [f"{glance.path}: {glance.head}"]
    for word, values in (("loss", glance.losses), ("norm", glance.norms)):
        said += [f"{word} {number(values[-1]) if math.isfinite(values[-1]) else 'NaN'}"] if values else []
    errors = ", ".join(f"{name} {share:.1%}" for name, share in glance.errors.items())
    said += [f"expected error at {BITS} bits: {errors}"] if errors else []
    return "; ".join([*said, *(f"{word} {text}" for word, text in glance.troubles), *filter(None, [glance.ended])])


def follow(path: Path, console: Console) -> None:
    """Show a trace until its capture ends: one view on a terminal, else a line whenever there is something new."""
    open_trace(path).close()
    encoding, last = console.encoding or "utf-8", ""
    drawn = console.is_terminal and not console.is_dumb_terminal
    with _ends_by_signal(), contextlib.suppress(KeyboardInterrupt), contextlib.ExitStack() as stack:
        live = stack.enter_context(Live(console=console, auto_refresh=False)) if drawn else None
        for glance in glances(path):
            if glance is None:
                if not path.exists():
                    raise TraceError(f"{path}: the trace is gone")
            elif live is not None:
                live.update(view(glance, str(path), encoding), refresh=True)
            elif (said := literal(line(glance), encoding)) != last:
                print(said, flush=True)
                last = said


@contextlib.contextmanager
def _ends_by_signal() -> Iterator[None]:
    """Ctrl-C and SIGTERM end the block, so that the terminal's cursor comes back.

    Not by KeyboardInterrupt: after one in the middle of an import ``python -m`` ends by the signal, whoever caught it.
    """
    codes: dict[int, int] = {signal.SIGINT: 0, signal.SIGTERM: 128 + signal.SIGTERM}
    before = {number: signal.signal(number, lambda number, _: sys.exit(codes[number])) for number in codes}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


#: How far the view steps back behind the training.
_NICE = 5
#: Seconds between two looks at whether the capture is over.
_LOOK = 0.5
#: Lines of the view at most.
_MOST_LINES = 12


class Footer:
    """The last lines of the terminal with a descriptor, which do not scroll with the others."""

    def __init__(self, terminal: int) -> None:
        self._terminal = terminal
        self._size = (0, 0, 0)

    @property
    def width(self) -> int:
        return os.get_terminal_size(self._terminal).columns

    def draw(self, lines: list[str]) -> None:
        """Replace the lines. Where the cursor is does not change, in what colors the script writes neither."""
        columns, rows = os.get_terminal_size(self._terminal)
        height = min(max(len(lines), self._size[2]), rows // 2)
        text = ""
        if self._size != (columns, rows, height):
            # Scroll what is there up, where the cursor is too low, without moving it to another column.
            clear = f"\x1b7\x1b[r\x1b[{rows - self._size[2] + 1};1H\x1b[0J\x1b8" if self._size[2] else ""
            text = clear + "\x1bD" * height + f"\x1b[{height}A\x1b7\x1b[1;{rows - height}r\x1b8"
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

    def _write(self, text: str) -> None:
        data = text.encode()
        while data:
            data = data[os.write(self._terminal, data) :]


class Reports:
    """What the training process, of which only the id is known, says, and whether it lives."""

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

    def end_with_it(self) -> None:
        """End this process soon after the capture, whatever it does at that moment: it may compile kernels."""
        while not self.ended():
            time.sleep(_LOOK)
        os.kill(os.getpid(), signal.SIGTERM)


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

    def leave(_number: int, _frame: object) -> None:
        # Not by an exception, which could come in the middle of clearing the lines.
        footer.close()
        os._exit(0)

    signal.signal(signal.SIGTSTP, stop)
    for ending in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(ending, leave)
    threading.Thread(target=reports.end_with_it, daemon=True).start()
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
