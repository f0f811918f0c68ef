"""What commands show on a terminal: tables of one line per tensor, progress, and the width of a pipe."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

import click

from gtrace.errors import printable
from gtrace.units import rate_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table

    from gtrace.costs import Cluster
    from gtrace.report.analysis.savings import Savings
    from gtrace.trace import TensorInfo


#: The first column may fold down to this width, and with few rows to the other; others are dropped before that.
_NAME_WIDTH, WHOLE_NAME = 20, 48
#: Rows of a table that is printed without --full.
FEW_ROWS = 8
_GAP = 2
#: Columns of a pipe, which has no width to respect: whoever reads it wants every column.
_PIPE_WIDTH = 100_000
#: Columns of a report in a pipe or a file, where nothing says how wide it is.
REPORT_WIDTH = 160


def echo(text: object, *, err: bool = False) -> None:
    """Print lines on standard output, or error; what a terminal would act on is shown as its escape.

    A log of errors that cannot be written, on a full disk, stops no work.
    """
    try:
        click.echo("\n".join(map(printable, str(text).split("\n"))), err=err)
    except OSError as error:
        if not err or error.errno == errno.EPIPE:
            raise


class TensorColumn(NamedTuple):
    """A column of a table; the higher its rank, the earlier it makes room for others."""

    heading: str
    cells: list[str]
    rank: int
    right: bool = True


def name_columns(names: list[str], infos: Sequence[TensorInfo]) -> list[TensorColumn]:
    """The tensors' names, and of their kinds, optimizers and ranks what tells them apart."""
    columns = [TensorColumn("tensor", names, 0, right=False)]
    for what in ("kind", "optimizer", "rank"):
        values = [str(getattr(info, what)) for info in infos]
        if len(set(values)) > 1:
            columns.append(TensorColumn(what, values, 1))
    return columns


def stdout_console() -> Console:
    """Standard output as rich sees it; a pipe gets every column."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def wide_console(*, err: bool = False) -> Console:
    """Standard output, or error, as rich sees it; if it is not a terminal, wide enough for every column."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() or os.environ.get("COLUMNS") else REPORT_WIDTH
    return Console(width=width, highlight=False, emoji=False, markup=False, stderr=err)


def print_columns(
    columns: Sequence[TensorColumn],
    console: Console,
    style: Callable[[int, str], str] = lambda _row, _heading: "",
    *,
    name_width: int = _NAME_WIDTH,
) -> None:
    """Print a table, and which columns did not fit the console's width.

    The first column names the rows and folds where it is long; others make room for ``name_width`` characters of it.
    ``style`` gives the style of a cell from the number of its row and its heading.
    """
    from rich.text import Text

    first = columns[0].heading
    widths = {c.heading: max(*map(len, c.heading.split(" ", 1)), *map(len, c.cells)) + _GAP for c in columns}
    widths[first] = min(widths[first], name_width + _GAP)
    kept = list(columns)
    for column in sorted(columns, key=lambda column: -column.rank):
        if column.rank == 0 or sum(widths[c.heading] for c in kept) - _GAP <= console.width:
            break
        kept.remove(column)
    table = plain_table()
    table.header_style = "dim"
    for column in kept:
        table.add_column(
            column.heading.replace(" ", "\n", 1),
            justify="right" if column.right else "left",
            no_wrap=column.heading != first,
            overflow="fold",
        )
    for place in range(len(columns[0].cells)):
        table.add_row(*(Text(c.cells[place], style=style(place, c.heading)) for c in kept))
    console.print()
    console.print(table)
    hidden = [column.heading for column in columns if column not in kept]
    if hidden:
        console.print(Text(f"No room for: {', '.join(hidden)}.", style="dim"))


def plain_table(gap: int = _GAP) -> Table:
    """A table without rules, for a terminal."""
    from rich.table import Table

    return Table(box=None, pad_edge=False, padding=(0, gap, 0, 0))


def print_results(columns: Mapping[str, Sequence[str]], *, width: int = 10, gap: int = _GAP) -> Console:
    """Print a table of runs whose first column, at least so wide, folds; returns where it went."""
    from rich.console import Console

    table = plain_table(gap)
    first, *others = columns
    table.add_column(first, overflow="fold", min_width=width)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    return console


def savings_of_log(path: Path, cluster: Cluster | None) -> Savings | None:
    """What the codecs of a run log save; None without a cluster, or where nothing travels between ranks."""
    if cluster is None:
        return None
    from gtrace.report.analysis.runs import analyze_runs
    from gtrace.report.analysis.savings import savings_of_runs
    from gtrace.runlog import read_runlog

    return savings_of_runs(analyze_runs(read_runlog(path), path.name), cluster)


def print_savings(savings: Savings | None, *, err: bool = False) -> None:
    """The section of a report on what codecs save, on a terminal."""
    if savings is None:
        return
    from gtrace.report.sections.savings import savings_section
    from gtrace.report.text import print_sections

    print_sections([savings_section(savings)], wide_console(err=err))


def status_line(line: str) -> None:
    """One line that the next replaces, on a terminal."""
    if sys.stderr.isatty():
        click.echo(f"\r\x1b[K{line[:100]}", nl=False, err=True)


#: Seconds between two lines about long work in a pipe.
_A_LINE_EVERY = 60.0
#: Seconds between two states of a bar.
_A_BAR_EVERY = 0.1


@contextlib.contextmanager
def work_progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """How far work is, at what rate, and how long it goes on: a bar on a terminal, a line a minute in a pipe.

    Yields:
        A function of (values done, all of them); None when ``quiet``.
    """
    if quiet:
        yield None
        return

    last, begun, first = time.monotonic(), 0.0, 0
    # Drawn only when it is updated: a thread that draws it would forbid a sweep to fork.
    bar = _bar(what, "{task.description}", auto_refresh=False) if _draws() else None

    def update(done: int, total: int) -> None:
        nonlocal last, begun, first
        now = time.monotonic()
        said = f"{rate_text(done, '', 3)} of {rate_text(total, '', 3)} values"
        if not begun:
            # What comes first may have waited for kernels to be compiled.
            begun, first = now, done
        else:
            # The mean since then: it is weighted by cost, so that the time left does not jump.
            rate = max(done - first, 1) / max(now - begun, 1e-3)
            said += f", {rate_text(rate, 'values/s', 2)}, {(total - done) / rate:.0f} s left"
        if bar is not None and (now - last >= _A_BAR_EVERY or done == total):
            last = now
            bar.update(bar.task_ids[0], completed=done, total=total, description=said, refresh=True)
        elif bar is None and now - last >= _A_LINE_EVERY:
            last = now
            click.echo(f"gtrace: {what}: {said}", err=True)

    with bar or contextlib.nullcontext():
        yield update


def _draws() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _bar(what: str, *columns: str | ProgressColumn, auto_refresh: bool = True) -> Progress:
    """A bar with one task."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    bar = Progress(TextColumn(what), BarColumn(), *columns, console=console, transient=True, auto_refresh=auto_refresh)
    bar.add_task("", total=None)
    return bar


@contextlib.contextmanager
def step_progress(what: str, *, quiet: bool, unit: str = "steps") -> Iterator[Callable[..., None] | None]:
    """A bar on a terminal, nothing in a pipe or when ``quiet``; yields a function of (done, total, words)."""
    if quiet or not _draws():
        yield None
        return
    from rich.progress import MofNCompleteColumn, TimeRemainingColumn

    with _bar(what, MofNCompleteColumn(), unit + "{task.description}", TimeRemainingColumn()) as bar:

        def update(done: int, total: int, more: str = "") -> None:
            bar.update(bar.task_ids[0], completed=done, total=total, description=f"  {more}" if more else "")

        yield update
