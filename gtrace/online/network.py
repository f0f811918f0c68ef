"""How long the gradients of a step would take over a network: arithmetic on measured times and bytes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from gtrace.errors import UsageError, suggest

if TYPE_CHECKING:
    from gtrace.online.exchange import Tally

Topology: TypeAlias = Literal["ring", "allgather", "ps"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_RATE = re.compile(r"([0-9.]+(?:e[0-9]+)?)\s*([kMGT]?)(bit|B)/s")
_TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_TIME = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)\s*(ns|us|ms|s)")


@dataclass(frozen=True, slots=True)
class Network:
    """Links of equal speed between workers, with nothing else on them.

    Attributes:
        bandwidth: bits per second of each worker's link in either direction; of the server's, for ``ps``.
        latency: seconds of each message.
        topology: ``ring``: uncompressed gradients go by a ring all-reduce, payloads, which cannot be added up, by a
            ring all-gather; ``allgather``: both go by a ring all-gather; ``ps``: a parameter server whose one
            link carries every worker's payload, and then the average to every worker: uncompressed, unless it is
            encoded for that.
        compute: seconds of a step's computing and coding, in the place of measured ones; None for those.
    """

    bandwidth: float
    latency: float = 0.0
    topology: Topology = "ring"
    compute: float | None = None

    @classmethod
    def parse(cls, bandwidth: str, latency: str = "0s", topology: str = "ring", compute: str | None = None) -> Network:
        """Read ``1Gbit/s`` or ``10MB/s``, and ``50us``.

        Raises:
            UsageError: something cannot be read, or is not positive.

        >>> Network.parse("10MB/s", "50us").bandwidth
        80000000.0
        """
        rate = _RATE.fullmatch(bandwidth.strip())
        if rate is None:
            raise UsageError(f"network: '{bandwidth}' is no rate; write 1Gbit/s or 10MB/s")
        if topology not in TOPOLOGIES:
            raise UsageError(f"topology: '{topology}' is unknown; {suggest(topology, TOPOLOGIES)}")
        bits = _number(rate[1], "network") * _PREFIXES[rate[2]] * (8 if rate[3] == "B" else 1)
        if bits <= 0:
            raise UsageError(f"network: {bandwidth} is no speed")
        computing = None if compute is None else _seconds(compute, "compute-time")
        return cls(bits, _seconds(latency, "latency"), topology, computing)

    def transfer(self, workers: int, bits: float, values: int, *, exact: bool, down_bits: float | None = None) -> float:
        """Seconds that a step's gradients travel.

        Args:
            workers: how many exchange.
            bits: that each of them sends.
            values: elements of the gradient.
            exact: the bits are plain numbers, which can be added up on the way.
            down_bits: of the average that a parameter server sends each of them; by default float32.
        """
        if self.topology == "ps":
            down = 32 * values if down_bits is None else down_bits
            return 2 * self.latency + workers * (bits + (bits if exact else down)) / self.bandwidth
        if exact and self.topology == "ring":
            return 2 * (workers - 1) * (self.latency + bits / workers / self.bandwidth)
        return (workers - 1) * (self.latency + bits / self.bandwidth)

    def step(self, workers: int, tally: Tally, seconds: float, *, exact: bool) -> float:
        """Seconds of a training step of simulated workers, had each been a machine of its own.

        Computation and encoding happen on all at once, decoding of all payloads on each (or on the server); nothing
        overlaps. Where ``compute`` is given it stands for all of these, and the time depends on bytes alone.

        Args:
            workers: that were simulated, one after the other.
            tally: of their exchange.
            seconds: CPU time of the whole step.
            exact: as for :meth:`transfer`.
        """
        values = tally.float32_bits // 32 // workers
        bits = (tally.bits + tally.envelope_bits) / workers if not exact else 32.0 * values
        transfer = self.transfer(workers, bits, values, exact=exact, down_bits=tally.down_bits or None)
        if self.compute is not None:
            return self.compute + transfer
        computed = (seconds - tally.codec_seconds) / workers
        encoded = (tally.codec_seconds - tally.decode_seconds) / workers
        return computed + encoded + tally.decode_seconds + transfer

    def __str__(self) -> str:
        for prefix in ("T", "G", "M", "k", ""):
            if self.bandwidth >= _PREFIXES[prefix]:
                break
        text = f"{self.bandwidth / _PREFIXES[prefix]:g} {prefix}bit/s"
        computing = "" if self.compute is None else f", {self.compute:g} s of computing a step"
        return f"{text}, latency {self.latency * 1e6:g} us, {self.topology}{computing}"


def _seconds(text: str, what: str) -> float:
    time = _TIME.fullmatch(text.strip())
    if time is None:
        raise UsageError(f"{what}: '{text}' is no time; write 50us or 1ms")
    return _number(time[1], what) * _TIMES[time[2]]


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{what}: '{text}' is no number") from None
    if not math.isfinite(value):
        raise UsageError(f"{what}: '{text}' is no finite number")
    return value
