"""Which runs a study has: codecs, and who chooses their bits; and the network that the time of a policy needs."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Literal

from gtrace.codecs import codec as build_codec
from gtrace.errors import UsageError
from gtrace.online.network import Network

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.codecs import Codec
    from gtrace.online.policy import PolicySpec

#: MQGrad's cluster: 10 MB/s at the parameter server, and about 5 seconds of computing an iteration
_PAPER_NETWORK = Network(8e7, topology="ps")
DEFAULT_COMPUTE = 5.0


def plan_runs(
    codecs: Sequence[Codec], policies: Sequence[PolicySpec], kind: str
) -> list[tuple[Codec, PolicySpec | None]]:
    """Each codec that has bits with each policy, the others once; policies in the outer order of the codecs.

    Raises:
        UsageError: no policy, the same one twice, one for neural gradients, for codecs without bits, or with bits
            that a codec cannot have.
    """
    if not policies or len({str(policy) for policy in policies}) < len(policies):
        raise UsageError("policy: none is named, or the same one twice")
    choosing = [policy for policy in policies if policy.chooses]
    if choosing and kind != "weight":
        raise UsageError(f"policy {choosing[0].name}: chooses bits of what travels between workers; choose kind weight")
    flexible = [codec for codec in codecs if "bits" in codec.parameters]
    if choosing and not flexible:
        raise UsageError(f"policy {choosing[0].name}: no codec with bits to choose; take one such as minmax or qsgdinf")
    plans: dict[tuple[str, str], tuple[Codec, PolicySpec | None]] = {}
    for codec in codecs:
        if codec not in flexible:
            plans[str(codec), ""] = codec, None
            continue
        for policy in policies:
            ends = [codec.at_bits(bits) for bits in policy.bits]
            # What a policy makes of two codecs that differ in bits alone is the same run.
            plans.setdefault((str(ends[0]) if ends else str(codec), str(policy)), (codec, policy))
    return list(plans.values())


def timed_network(network: Network | None, policies: Sequence[PolicySpec]) -> Network | None:
    """The network of a study: a policy that looks at the time gets one whose times are not measured."""
    if not any(policy.timed for policy in policies):
        return network
    chosen = network or _PAPER_NETWORK
    return chosen if chosen.compute is not None else dataclasses.replace(chosen, compute=DEFAULT_COMPUTE)


def run_name(codec: Codec, policy: PolicySpec | None) -> str:
    """What a run is called: its codec's spec, and behind an @ the policy that chooses its bits.

    >>> from gtrace.codecs import codec
    >>> from gtrace.online.policy import PolicySpec
    >>> run_name(codec("ef:minmax:bits=4"), PolicySpec("adaptive"))
    'ef:minmax@adaptive'
    """
    if policy is None or not policy.chooses:
        return str(codec)
    return f"{re.sub(r':bits=[0-9]+$|(?<=:)bits=[0-9]+,', '', str(codec))}@{policy}"


def down_codec(spec: str) -> Codec | Literal["same"] | None:
    """The codec of ``Settings.down``, ``same`` for what the workers use, None for none."""
    return "same" if spec == "same" else build_codec(spec) if spec else None
