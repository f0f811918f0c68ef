"""Where sums happen: the error of the average after exchanges that encode sums again, in words and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gtrace.report.analysis.exchanges import exchanges_of
from gtrace.report.names import count, number
from gtrace.report.section import NOTHING, Cell, Column, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.report.analysis.exchanges import ExchangeError
    from gtrace.sweep import SweepResult

#: ways in the order of their error
_ORDER = ("allgather", "shared-scale", "two-shot", "hierarchical", "ring")
_MANY = 10.0


def exchanges_shown(result: SweepResult) -> tuple[Table, list[str]]:
    """The table of a sweep's exchanges, and what it says."""
    found = exchanges_of(result)
    return exchange_table(found), exchange_sentence(found)


def exchange_sentence(found: Sequence[ExchangeError]) -> list[str]:
    """What the worst exchange of the most ranks costs; nothing if no exchange was measured beside an all-gather."""
    most = max((one.ranks for one in found), default=0)
    plain = {one.codec: one.error for one in found if one.ranks == most and one.exchange == "allgather"}
    worse = [one for one in found if one.ranks == most and one.error > _MANY * plain.get(one.codec, float("inf"))]
    worse = sorted(worse, key=lambda one: -one.error / plain[one.codec])
    return [
        f"Between {most} ranks {one.codec} loses {number(one.error)} of the average in {_in_words(one.exchange)}, "
        f"{number(one.error / plain[one.codec])} times what it loses in an all-gather: sums are encoded again."
        for one in worse[:1]
    ]


def exchange_table(found: Sequence[ExchangeError]) -> Table:
    """A line for each codec and number of ranks, a column for each exchange."""
    ways = sorted({one.exchange for one in found}, key=_place)
    cells = {(one.codec, one.ranks, one.exchange): one for one in found}
    lines = sorted({(ranks, codec) for codec, ranks, _ in cells})

    def cell(ranks: int, codec: str, exchange: str) -> Cell:
        one = cells.get((codec, ranks, exchange))
        if one is None:
            return NOTHING
        here = [cells[codec, ranks, each].error for each in ways if (codec, ranks, each) in cells]
        across = "" if one.across == one.sent else f", {number(one.across)} out"
        return Cell(number(one.error), f"{number(one.sent)} B{across}", "best" if one.error == min(here) else "")

    columns = (
        Column("codec", numeric=False),
        Column("ranks", "that exchange"),
        *(
            Column(
                way,
                "vNMSE of the average that every rank ends with, like DynamiQ's; below: bytes a rank sends for a value",
            )
            for way in ways
        ),
    )
    rows = [(Cell(codec), Cell(str(ranks)), *(cell(ranks, codec, way) for way in ways)) for ranks, codec in lines]
    tensors = max((one.tensors for one in found), default=0)
    sources = sorted({one.source for one in found})
    return Table(
        "Where sums happen",
        columns,
        tuple(rows),
        notes=(
            (
                "Error of the average that every rank ends with, as a share of the exact average's energy, over "
                f"{count(tensors, 'tensor')}; below it the bytes that a rank sends for each value. By the code that "
                "real ranks run; out: what leaves a node."
            ),
            f"Gradients of the ranks: {'; '.join(sources)}.",
        ),
        empty="No codec fits these exchanges.",
        place="network",
    )


def _place(exchange: str) -> tuple[int, str]:
    name = exchange.partition(":")[0]
    return _ORDER.index(name) if name in _ORDER else len(_ORDER), exchange


def _in_words(exchange: str) -> str:
    name, _, node = exchange.partition(":")
    return {"ring": "a ring", "two-shot": "two shots", "hierarchical": f"nodes of {node}"}.get(name, exchange)
