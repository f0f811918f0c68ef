"""What codecs save between ranks, as numbers: measured bits put into the arithmetic of :mod:`gtrace.costs`."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gtrace import costs
from gtrace.costs import BACKWARD, WORTHWHILE, Cluster, Exchange, Network, StepTime
from gtrace.report.analysis.families import PLAIN, method_of
from gtrace.report.analysis.runs import RunLogAnalysis, known_mean
from gtrace.report.names import count

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import ArrayLike

    from gtrace.kernels import Floats, Ints
    from gtrace.report.analysis.sweep import SweepAnalysis


#: how payloads travel, the better one if there are many ranks last
PAYLOADS: tuple[Literal["allgather", "two-shot"], ...] = ("allgather", "two-shot")

#: what an exchange is called
EXCHANGES: dict[Exchange, str] = {"allreduce": "ring all-reduce", "allgather": "all-gather", "two-shot": "two-shot"}
HOW = {"allgather": "by all-gather", "two-shot": "in two shots"}
#: kinds that ranks do not exchange at every step
_APART = ("neural", "outer")
_LARGEST = 1 << 53


@dataclass(frozen=True, slots=True)
class SentCodec:
    """What ranks send.

    Attributes:
        family: what it is compared as.
        bits: per value, payload and shared bytes.
        relative_variance: its error; NaN if it was not measured.
        pareto: no other codec of the section takes fewer bits at no more error.
    """

    spec: str
    method: str
    family: str
    bits: float
    relative_variance: float = math.nan
    pareto: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(SentCodec):
    """One codec with one way of exchanging its payloads.

    Attributes:
        exchange: of the payloads.
        sent_bytes: that each rank sends in a step.
        step: how long a step takes.
        coding: whose time ``step.codec`` is: ``measured`` in this very run, ``given`` by the reader, or empty: none.
        over_float32: how many times as long a float32 all-reduce's step is: by buckets, without and with ideal overlap.
        over_bfloat16: the same of bfloat16.
        rate_float32: values per second to encode or decode to match float32; infinite if none does, NaN without codec.
        rate_bfloat16: the same of bfloat16.
        bandwidth: bits per second above which a step is not even 1% shorter than bfloat16's; 0 for all, NaN likewise.
    """

    exchange: Exchange
    sent_bytes: float
    step: StepTime
    coding: str
    over_float32: tuple[float, float, float]
    over_bfloat16: tuple[float, float, float]
    rate_float32: float
    rate_bfloat16: float
    bandwidth: float


@dataclass(frozen=True, slots=True)
class Savings:
    """What the codecs of a sweep or of a run log save.

    Attributes:
        cluster: what they are computed for.
        elements: of all gradients of a step.
        buckets: in which they travel.
        plain: all-reduces of float32 and of bfloat16 gradients, which need no codec.
        rows: two for each codec, in the order of the results.
        notes: what a reader must know.
    """

    name: str
    cluster: Cluster
    elements: int
    buckets: int
    plain: tuple[Saving, Saving]
    rows: tuple[Saving, ...]
    notes: tuple[str, ...]

    def best(self, spec: str) -> Saving | None:
        """A codec with the exchange that makes its steps shortest, None if it is not known; or an all-reduce."""
        plain = PLAIN.get(spec.partition(":")[0])
        found = [row for row in (self.plain if plain else self.rows) if row.bits == plain or row.spec == spec]
        return min(found, key=lambda row: row.step.seconds, default=None)


def savings_of_sweep(analysis: SweepAnalysis, cluster: Cluster) -> Savings | None:
    """The savings of every codec of a sweep with known bits; None where nothing of it travels between ranks.

    Buckets are filled in the reverse of the trace's order. A tensor that was not measured with a codec counts with
    the codec's mean.
    """
    if analysis.provenance.get("kind") in _APART or not len(analysis.tensors):
        return None
    return _savings(analysis.name, cluster, *_measured(analysis))


def _measured(analysis: SweepAnalysis) -> tuple[list[int], list[tuple[SentCodec, Floats]], list[str]]:
    """Elements of every tensor, every codec with its bits of each, and what is to be said about them."""
    elements, notes = _elements(analysis.provenance.get("tensors")), []
    if not elements:
        known: Ints = analysis.elements
        elements = dict(zip(analysis.tensors, known.tolist(), strict=True))
        notes = ["The sweep does not say in which order the parameters are, so that buckets follow their names."]
    place = {name: k for k, name in enumerate(analysis.tensors)}
    at = np.array([place.get(name, -1) for name in elements])
    missing = int((at < 0).sum())
    if missing and "*" not in place:
        notes.append(f"{missing} of {count(len(at), 'tensor')} were not swept, and count with each codec's mean bits.")
    found = []
    for k, c in enumerate(analysis.configurations):
        if math.isfinite(c.bits) and c.method not in PLAIN:
            own = np.append(analysis.single.layer_bits[k], math.nan)[at]
            bits = np.where(np.isfinite(own), own, c.bits)
            found.append((SentCodec(c.spec, c.method, c.family, c.bits, c.relative_variance, c.pareto), bits))
    return list(elements.values()), found, notes


#: The cluster that a page shows first if its reader named none.
ASSUMED = Cluster(Network(25e9, 20e-6), ranks=8, step_time=0.1)


def network_model(analysis: SweepAnalysis, cluster: Cluster, drawn: Sequence[str]) -> dict[str, Any] | None:
    """What a page needs to time a step on any network, as plain numbers; None if nothing travels between ranks.

    Sizes and payloads are sums over each bucket of DistributedDataParallel, in the order of sending. The page shows
    ``cluster`` first, and the codecs with the specs ``drawn`` in its figure.
    """
    if analysis.provenance.get("kind") in _APART or not len(analysis.tensors):
        return None
    sizes, found, _ = _measured(analysis)
    bucket = costs.assign_buckets(sizes, cluster.bucket_mb)
    held = np.bincount(bucket, sizes)
    known = {codec.spec: np.bincount(bucket, np.multiply(sizes, bits)).round(1).tolist() for codec, bits in found}
    return {
        "sizes": held.tolist(),
        "ready": (np.cumsum(held) / max(1, sum(sizes))).tolist(),
        "elements": sum(sizes),
        "codecs": known,
        "drawn": [spec for spec in drawn if spec in known],
        "bandwidth": cluster.network.bandwidth,
        "latency": cluster.network.latency,
        "ranks": cluster.ranks,
        "step": cluster.computing,
        "backward": BACKWARD if cluster.backward_time is None else cluster.backward_time / cluster.computing,
        "rate": cluster.codec_rate,
        "worthwhile": WORTHWHILE,
    }


def savings_of_runs(log: RunLogAnalysis, cluster: Cluster) -> Savings | None:
    """The savings of every codec of a run log, means over its seeds; None where nothing of it travels between ranks.

    The bits of a step are spread evenly over its tensors. The codec's own time counts where it was measured between
    as many ranks with the same exchange.
    """
    sizes = list(_elements(log.study.get("tensors")).values())
    coded = [run for run in log.runs if run.spec.partition(":")[0] not in PLAIN]
    runs = [run for run in coded if math.isfinite(run.ratio) and run.ratio > 0]
    if log.study.get("kind") in _APART or log.linear or not sizes or not runs:
        return None
    world, exchange = log.study.get("world_size"), log.study.get("exchange")
    found, seconds = [], {}
    for spec in dict.fromkeys(run.spec for run in runs):
        own = [run for run in runs if run.spec == spec]
        bits = float(np.mean([32 / run.ratio for run in own]))
        variance = known_mean(np.array([run.mean_relative_variance for run in own]))
        spent = known_mean(np.array([run.ranks.codec_seconds for run in own if run.ranks is not None]))
        if world == cluster.ranks and math.isfinite(spent):
            seconds[spec, exchange] = spent
        found.append((SentCodec(spec, method_of(spec), spec, bits, variance, True), bits))
    notes = ["Bits are the mean over steps, the same for every tensor."]
    return _savings(log.name, cluster, sizes, found, notes, seconds)


def _savings(
    name: str,
    cluster: Cluster,
    sizes: list[int],
    codecs: Sequence[tuple[SentCodec, ArrayLike]],
    notes: list[str],
    seconds: Mapping[tuple[str, Any], float] | None = None,
) -> Savings:
    """``seconds`` of coding that were measured, by spec and exchange."""
    plain = {bits: costs.time_step(sizes, bits, cluster, "allreduce") for bits in (32, 16)}

    def row(codec: SentCodec, bits: ArrayLike, exchange: Exchange) -> Saving:
        measured = (seconds or {}).get((codec.spec, exchange))
        step = costs.time_step(sizes, bits, cluster, exchange, codec_seconds=measured)
        payload = float(np.dot(sizes, np.broadcast_to(np.asarray(bits, np.float64), len(sizes)))) / 8
        rates, bandwidth, coding = [math.nan] * 2, math.nan, ""
        if exchange != "allreduce":
            elements = costs.coded(exchange, cluster.ranks, sum(sizes))
            rates = [costs.break_even_rate(step, plain[bits], elements) for bits in (32, 16)]
            bandwidth = costs.break_even_bandwidth(sizes, bits, cluster, exchange, 16, codec_seconds=step.codec)
            coding = "measured" if measured is not None else "given" if cluster.codec_rate else ""
        return Saving(
            *astuple(codec),
            exchange=exchange,
            sent_bytes=costs.sent(exchange, cluster.ranks, payload),
            step=step,
            coding=coding,
            over_float32=step.speed_up(plain[32]),
            over_bfloat16=step.speed_up(plain[16]),
            rate_float32=rates[0],
            rate_bfloat16=rates[1],
            bandwidth=bandwidth,
        )

    uncompressed = (("none", 32), ("bf16", 16))
    float32, bfloat16 = (row(SentCodec(spec, spec, spec, bits), bits, "allreduce") for spec, bits in uncompressed)
    return Savings(
        name=name,
        cluster=cluster,
        elements=sum(sizes),
        buckets=int(costs.assign_buckets(sizes, cluster.bucket_mb).max(initial=-1)) + 1,
        plain=(float32, bfloat16),
        rows=tuple(row(codec, bits, exchange) for codec, bits in codecs for exchange in PAYLOADS),
        notes=tuple(notes),
    )


def _elements(elements: Any) -> dict[str, int]:
    """Name -> elements of a file, empty if it holds something else."""
    if not isinstance(elements, dict) or not all(type(n) is int and 0 <= n <= _LARGEST for n in elements.values()):
        return {}
    return elements if sum(elements.values()) <= _LARGEST else {}
