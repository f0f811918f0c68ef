"""How long a step of simulated workers would take over a network: arithmetic on measured times and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gtrace.costs import Network
    from gtrace.training.exchange import Tally


def simulated_step(
    network: Network, workers: int, tally: Tally, seconds: float, *, exact: bool, linear: bool = False
) -> float:
    """Seconds of a training step of simulated workers, had each been a machine of its own.

    Computation and encoding happen on all at once, decoding of all payloads on each (or on the server); nothing
    overlaps. Where the network has a ``compute`` it stands for all of these, and the time depends on bytes alone.

    Args:
        network: between them.
        workers: that were simulated, one after the other.
        tally: of their exchange.
        seconds: CPU time of the whole step.
        exact: gradients travel as they are, in float32.
        linear: messages are added up on the way, as exact gradients are.
    """
    values = tally.float32_bits // 32 // workers
    bits = (tally.bits + tally.envelope_bits) / workers if not exact else 32.0 * values
    transfer = network.transfer(workers, bits, values, exact=exact or linear, down_bits=tally.down_bits or None)
    if network.compute is not None:
        return network.compute + transfer
    computed = (seconds - tally.codec_seconds) / workers
    encoded = (tally.codec_seconds - tally.decode_seconds) / workers
    return computed + encoded + tally.decode_seconds + transfer
