"""What several encodings on the way to an average cost, from the details of a sweep with ``--exchange``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gtrace.metrics import ratio

if TYPE_CHECKING:
    from gtrace.sweep import SweepResult

#: the first word of the details
_KIND = "exchange"


@dataclass(frozen=True, slots=True)
class ExchangeError:
    """One codec in one exchange, summed over tensors and steps.

    Attributes:
        codec: its spec.
        exchange: the way, e.g. ``ring``.
        ranks: their number.
        error: of the average that every rank ends with, relative to the exact average's energy.
        sent: bytes that a rank sends for each value.
        across: the part of them that leaves its node.
        source: where the ranks' gradients come from.
        tensors: number of tensors.
    """

    codec: str
    exchange: str
    ranks: int
    error: float
    sent: float
    across: float
    source: str
    tensors: int


def exchanges_of(result: SweepResult) -> tuple[ExchangeError, ...]:
    """The exchanges of a sweep, in the order of ranks and codecs."""
    sums: dict[tuple[int, str, str], list[float]] = {}
    seen: dict[tuple[int, str, str], tuple[set[str], set[str]]] = {}
    for (tensor, _, what), value in result.details.items():
        if what.partition(" ")[0] != _KIND:
            continue
        key = int(value["ranks"]), str(value["codec"]), str(value["exchange"])
        numbers = [float(value[name]) for name in ("error", "energy", "size", "sent", "across")]
        sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * len(numbers)), numbers, strict=True)]
        tensors, sources = seen.setdefault(key, (set(), set()))
        tensors.add(tensor)
        sources.add(str(value["source"]))
    found = []
    for key, (error, energy, size, sent, across) in sorted(sums.items()):
        ranks, codec, exchange = key
        tensors, sources = seen[key]
        each = max(1.0, size)
        found.append(
            ExchangeError(
                codec,
                exchange,
                ranks,
                float(ratio(error, energy)),
                sent / each,
                across / each,
                ", ".join(sorted(sources)),
                len(tensors),
            )
        )
    return tuple(found)
