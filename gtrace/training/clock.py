"""The clock of a parameter server, in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gtrace.errors import UsageError


@dataclass(frozen=True, slots=True)
class ParameterServerClock:
    """A server whose single link carries every worker's push, and then every worker's pull.

    Computing and communicating do not overlap. :class:`~gtrace.costs.Network` with the topology ``ps`` is the
    same for the bytes that really travel.

    Attributes:
        workers: P.
        bandwidth: of the server's link, in bits per second.
        compute_seconds: of an iteration.
        n_quantized: elements that are sent in ``bits`` each.
        n_full: elements that are sent in 32 bits each.

    Raises:
        UsageError: a number out of range.
    """

    workers: int
    bandwidth: float
    compute_seconds: float
    n_quantized: int
    n_full: int = 0

    def __post_init__(self) -> None:
        if self.workers < 1:
            raise UsageError(f"clock: {self.workers} workers; it must be at least 1")
        if not 0 < self.bandwidth < math.inf:
            raise UsageError(f"clock: a bandwidth of {self.bandwidth:g} bit/s is no speed")
        for name in ("compute_seconds", "n_quantized", "n_full"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"clock: {name}={getattr(self, name):g} is out of range; it must not be negative")

    def message_bits(self, bits: float) -> float:
        """V, what one worker sends, or is sent, in an iteration: 32 ``n_full`` + bits ``n_quantized``."""
        return 32 * self.n_full + bits * self.n_quantized

    def communication(self, bits: float) -> float:
        """Seconds of all pushes and pulls of an iteration: 2 P V / bandwidth."""
        return 2 * self.workers * self.message_bits(bits) / self.bandwidth

    def iteration(self, bits: float) -> float:
        """Seconds of an iteration.

        >>> round(ParameterServerClock(18, 8e7, 5.0, 16_072_704).iteration(1), 2)
        12.23
        """
        return self.compute_seconds + self.communication(bits)
