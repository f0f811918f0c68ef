"""Which runs a study has: codecs, and who chooses their bits; and the network that the time of a policy needs."""

from __future__ import annotations

import dataclasses
import re
from typing import TYPE_CHECKING, Literal, NamedTuple

from gtrace.codecs import Codec, Identity
from gtrace.codecs import codec as build_codec
from gtrace.costs import Network
from gtrace.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gtrace.codecs.assignment import Coding
    from gtrace.training.policy import PolicySpec
    from gtrace.training.weights import WeightLevels

#: MQGrad's cluster: 10 MB/s at the parameter server, and about 5 seconds of computing an iteration
_PAPER_NETWORK = Network(8e7, topology="ps")
DEFAULT_COMPUTE = 5.0


class Plan(NamedTuple):
    """What tells the runs of a study apart.

    Attributes:
        codec: what every worker sends through.
        policy: who chooses its bits; None for those that it has.
        weights: levels that forward and backward see in the place of weights; None for the weights themselves.
    """

    codec: Coding
    policy: PolicySpec | None = None
    weights: WeightLevels | None = None


def plan_runs(
    codecs: Sequence[Coding], policies: Sequence[PolicySpec], weights: Sequence[WeightLevels], kind: str
) -> list[Plan]:
    """Each codec that has bits with each policy, the others once; policies in the outer order of the codecs.

    With levels of weights, the first codec has a run with exact weights, and each other one (or the first, where it is
    alone) a run with each of the levels.

    Raises:
        UsageError: no policy, the same one twice, one for neural gradients, for codecs without bits, or with bits
            that a codec cannot have; the same levels twice, or levels for kind neural.
    """
    if len(set(weights)) < len(weights):
        raise UsageError("weights: the same levels are named twice")
    if weights and kind != "weight":
        raise UsageError("weights: with kind neural they stay exact; choose kind weight")
    if not policies or len({str(policy) for policy in policies}) < len(policies):
        raise UsageError("policy: none is named, or the same one twice")
    choosing = [policy for policy in policies if policy.chooses]
    if choosing and kind != "weight":
        raise UsageError(f"policy {choosing[0].name}: chooses bits of what travels between workers; choose kind weight")
    flexible = [codec for codec in codecs if isinstance(codec, Codec) and "bits" in codec.parameters]
    if choosing and not flexible:
        raise UsageError(f"policy {choosing[0].name}: no codec with bits to choose; take one such as minmax or qsgdinf")
    plans: dict[tuple[str, str], Plan] = {}
    for codec in codecs:
        if not isinstance(codec, Codec) or codec not in flexible:
            plans[str(codec), ""] = Plan(codec)
            continue
        for policy in policies:
            ends = [codec.at_bits(bits) for bits in policy.bits]
            # What a policy makes of two codecs that differ in bits alone is the same run.
            plans.setdefault((str(ends[0]) if ends else str(codec), str(policy)), Plan(codec, policy))
    plain, *others = plans.values()
    if not weights:
        return [plain, *others]
    return [plain, *(plan._replace(weights=levels) for plan in others or [plain] for levels in weights)]


def timed_network(network: Network | None, policies: Sequence[PolicySpec]) -> Network | None:
    """The network of a study: a policy that looks at the time gets one whose times are not measured."""
    if not any(policy.timed for policy in policies):
        return network
    chosen = network or _PAPER_NETWORK
    return chosen if chosen.compute is not None else dataclasses.replace(chosen, compute=DEFAULT_COMPUTE)


def run_name(codec: Coding, policy: PolicySpec | None = None, weights: WeightLevels | None = None) -> str:
    """What a run is called: its codec's spec, behind an @ the policy that chooses its bits, then its levels of weights.

    >>> from gtrace.codecs import codec
    >>> from gtrace.training.policy import PolicySpec
    >>> run_name(codec("ef:minmax:bits=4"), PolicySpec("adaptive"))
    'ef:minmax@adaptive'
    """
    name = str(codec)
    if policy is not None and policy.chooses:
        name = f"{re.sub(r':bits=[0-9]+$|(?<=:)bits=[0-9]+,', '', name)}@{policy}"
    if weights is None:
        return name
    return f"weights={weights}" if codec == Identity() else f"{name} weights={weights}"


def down_codec(spec: str) -> Codec | Literal["same"] | None:
    """The codec of ``Settings.down``, ``same`` for what the workers use, None for none."""
    return "same" if spec == "same" else build_codec(spec) if spec else None
