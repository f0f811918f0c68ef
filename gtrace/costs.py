"""What gradients cost between ranks: bytes, seconds on the links, and how much of those a training step waits for.

Arithmetic alone. With N ranks, S bits of one rank's gradient or payload, links of B bits per second in either direction
and L seconds for each message, an exchange takes ``messages * L + bits sent / B``, where

=============  =================  ==================  ============================================================
exchange       messages           bits sent           what it is
=============  =================  ==================  ============================================================
``allreduce``  2 (N - 1)          2 (N - 1) / N * S   ring: exact numbers are added up on their way round
``allgather``  N - 1              (N - 1) * S         ring: payloads cannot be added up, so all of them go everywhere
``two-shot``   2 (N - 1)          2 (N - 1) / N * S   each rank gets its piece of every payload, averages, encodes the
                                                      average, and sends that to all
=============  =================  ==================  ============================================================

(Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009, for the first.) Every step of a ring sends and
receives at once, and every rank sends as much as every other.

A step of ``DistributedDataParallel`` sends gradients in buckets, while the backward pass still computes others:
see :func:`assign_buckets` and :func:`time_step`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

import numpy as np

from gtrace.errors import UsageError, suggest
from gtrace.units import parse_bandwidth, parse_seconds, parse_size, parse_values, rate_text

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

Topology: TypeAlias = Literal["ring", "allgather", "ps"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
Exchange: TypeAlias = Literal["allreduce", "allgather", "two-shot"]
EXCHANGES: tuple[Exchange, ...] = get_args(Exchange)

#: the part of a step's computing that the backward pass is, where nobody measured it: it multiplies twice as many
#: matrices as the forward pass
BACKWARD = 2 / 3
MIB = 1 << 20
#: bytes of a bucket of DistributedDataParallel, and of its first one, by default
BUCKET_MIB, FIRST_BUCKET_MIB = 25.0, 1.0
#: a step that a codec makes shorter by less than this part is not worth it, for the break-even bandwidth
WORTHWHILE = 0.01


@dataclass(frozen=True, slots=True)
class Network:
    """Links of equal speed between workers, with nothing else on them.

    Attributes:
        bandwidth: bits per second of each worker's link in either direction; of the server's, for ``ps``.
        latency: seconds of each message.
        topology: ``ring``: uncompressed gradients go by a ring all-reduce, payloads, which cannot be added up unless
            the codec is linear, by a ring all-gather; ``allgather``: both go by a ring all-gather; ``ps``: a parameter
            server whose one link carries every worker's payload, and then the average to every worker: uncompressed,
            unless it is encoded for that. Of :meth:`transfer` alone.
        compute: seconds of a step's computing and coding, instead of measured ones; None for measured ones.
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
        if topology not in TOPOLOGIES:
            raise UsageError(f"network: topology '{topology}' is unknown; {suggest(topology, TOPOLOGIES)}")
        bits = parse_bandwidth(bandwidth, "network")
        computing = None if compute is None else parse_seconds(compute, "network: compute")
        return cls(bits, parse_seconds(latency, "network: latency"), topology, computing)

    def seconds(self, exchange: Exchange, ranks: int, bits: float) -> float:
        """Seconds of one exchange between ``ranks`` of ``bits`` each, see the table above."""
        return messages(exchange, ranks) * self.latency + sent(exchange, ranks, bits) / self.bandwidth

    def transfer(self, workers: int, bits: float, values: int, *, exact: bool, down_bits: float | None = None) -> float:
        """Seconds that a step's gradients travel, all at once and in the ways of the topology.

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
        return self.seconds("allreduce" if exact and self.topology == "ring" else "allgather", workers, bits)

    @property
    def spec(self) -> str:
        """What :func:`parse_network` reads."""
        parts = [_plain(self.bandwidth), f"latency={self.latency:.12g}s", f"topology={self.topology}"]
        return ",".join(parts + ([] if self.compute is None else [f"compute={self.compute:.12g}s"]))

    def __str__(self) -> str:
        computing = "" if self.compute is None else f", {self.compute:g} s of computing a step"
        return f"{rate_text(self.bandwidth)}, latency {self.latency * 1e6:g} us, {self.topology}{computing}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal machines that train one model together, and what a step costs them without any exchange.

    Attributes:
        network: its bandwidth and latency.
        ranks: N, how many train together.
        step_time: seconds of computing in a step of one rank: forward, backward and optimizer, nothing exchanged; None
            if nobody measured it. Then there is no time of a step.
        backward_time: the part of them in which gradients appear; None for two thirds.
        bucket_mb: MiB of a bucket, as ``bucket_cap_mb`` of DistributedDataParallel; None for what it does by default.
        codec_rate: values per second that a rank encodes or decodes on its device, where somebody measured it; None
            lets codecs take no time.

    Raises:
        UsageError: a number out of range.
    """

    network: Network
    ranks: int
    step_time: float | None = None
    backward_time: float | None = None
    bucket_mb: float | None = None
    codec_rate: float | None = None

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise UsageError(f"ranks: {self.ranks} is too few; gradients travel between at least 2.")
        if self.backward_time is not None and self.step_time is None:
            raise UsageError("backward: needs the compute time of the step that it is a part of, e.g. 180ms.")
        positive = (("step time", "s", self.step_time), ("bucket", "MiB", self.bucket_mb))
        for name, unit, value in (*positive, ("codec", "values/s", self.codec_rate)):
            if value is not None and not 0 < value < math.inf:
                raise UsageError(f"{name}: {value:g} {unit} must be more than 0.")
        if self.backward_time is not None and not 0 <= self.backward_time <= self.computing:
            computing = f"the step's computing ({self.computing:g} s)"
            raise UsageError(f"backward: {self.backward_time:g} s is more than {computing}.")

    @property
    def computing(self) -> float:
        """Seconds of computing in a step.

        Raises:
            UsageError: nobody measured it.
        """
        if self.step_time is None:
            raise UsageError(f"cluster: '{self}' has no compute time of a step; add it, e.g. {self},180ms.")
        return self.step_time

    @property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return BACKWARD * self.computing if self.backward_time is None else self.backward_time

    def codec_seconds(self, exchange: Exchange, elements: float) -> float:
        """Seconds that a rank encodes and decodes in a step, with ``elements`` gradient values."""
        return 0.0 if self.codec_rate is None else coded(exchange, self.ranks, elements) / self.codec_rate

    def __str__(self) -> str:
        """What :func:`parse_cluster` reads."""
        parts = [f"{self.ranks}x{_plain(self.network.bandwidth)}"]
        if self.step_time is not None:
            parts.append(f"{self.step_time:.12g}s")
        if self.backward_time is not None:
            parts.append(f"backward={self.backward_time:.12g}s")
        if self.network.latency:
            parts.append(f"latency={self.network.latency:.12g}s")
        if self.bucket_mb is not None:
            parts.append(f"bucket={self.bucket_mb:.12g}MiB")
        if self.codec_rate is not None:
            parts.append(f"codec={_plain(self.codec_rate, 'values/s')}")
        return ",".join(parts)


_MACHINES = re.compile(r"(?P<ranks>\d{1,9})\s*[x×]\s*(?P<speed>.*)", re.ASCII)
#: what a cluster and a simulated network may say beside their speed
_CLUSTER_PARTS = ("backward", "latency", "bucket", "codec")
_NETWORK_PARTS = ("latency", "topology", "compute")


def parse_cluster(text: str, where: str = "--cluster") -> Cluster:
    """Read ranks x link speed, then optional parts: ``8x25Gbit/s,180ms,backward=120ms,latency=20us,bucket=25MiB``.

    A time without a key is the compute time of a step; ``codec=2Gvalues/s`` is how fast a rank encodes and decodes.

    Args:
        text: the cluster.
        where: the option or key that it comes from, for messages.

    Raises:
        UsageError: something cannot be read, or a number is out of range.

    >>> cluster = parse_cluster("8x25Gbit/s,180ms,latency=20us")
    >>> cluster.ranks, cluster.network.bandwidth, cluster.step_time
    (8, 25000000000.0, 0.18)
    >>> str(cluster)
    '8x25Gbit/s,0.18s,latency=2e-05s'
    """
    machines, plain, parts = _split(text, where, _CLUSTER_PARTS)
    match = _MACHINES.fullmatch(machines)
    if match is None:
        raise UsageError(f"{where}: '{machines}' needs ranks and link speed, e.g. 8x25Gbit/s.")
    if len(plain) > 1:
        raise UsageError(f"{where}: '{plain[1]}' needs a key: {', '.join(f'{key}=' for key in _CLUSTER_PARTS)}.")
    bandwidth = parse_bandwidth(match["speed"], where)
    times = {key: parse_seconds(parts[key], f"{where}: {key}") for key in ("backward", "latency") if key in parts}
    try:
        return Cluster(
            Network(bandwidth, times.get("latency", 0.0)),
            int(match["ranks"]),
            parse_seconds(plain[0], where) if plain else None,
            times.get("backward"),
            parse_size(parts["bucket"], f"{where}: bucket") / MIB if "bucket" in parts else None,
            parse_values(parts["codec"], f"{where}: codec") if "codec" in parts else None,
        )
    except UsageError as error:
        said = str(error)
        raise UsageError(said if said.startswith(where) else f"{where}: {said}") from None


def parse_network(text: str, where: str = "--network") -> Network:
    """Read a simulated network: ``1Gbit/s``, ``10MB/s,latency=50us,topology=ps,compute=5s``.

    Raises:
        UsageError: something cannot be read, or is not positive.

    >>> parse_network("10MB/s,topology=ps").topology
    'ps'
    """
    speed, plain, parts = _split(text, where, _NETWORK_PARTS)
    if plain:
        raise UsageError(f"{where}: '{plain[0]}' needs a key: {', '.join(f'{key}=' for key in _NETWORK_PARTS)}.")
    try:
        return Network.parse(speed, **parts)
    except UsageError as error:
        raise UsageError(str(error).replace("network", where, 1)) from None


def _split(text: str, where: str, keys: tuple[str, ...]) -> tuple[str, list[str], dict[str, str]]:
    """The first part of a text with commas, the others without a key, and those with one."""
    first, *others = (part.strip() for part in text.split(","))
    parts: dict[str, str] = {}
    for part in others:
        key, equals, value = part.partition("=")
        if not equals:
            continue
        if key not in keys:
            raise UsageError(f"{where}: '{key}=' is unknown; {suggest(key, keys)}")
        if key in parts:
            raise UsageError(f"{where}: '{key}=' is given twice.")
        parts[key] = value
    return first, [part for part in others if "=" not in part], parts


def _plain(rate: float, unit: str = "bit/s") -> str:
    """A rate as it is typed."""
    return rate_text(rate, unit, 12).replace(" ", "")


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a training step, in parts.

    Attributes:
        computing: forward, backward and optimizer.
        backward: the part of ``computing`` that an exchange can hide behind.
        communication: all exchanges of the step, one after the other.
        exposed: how long the step waits for them after the backward pass, by the buckets.
        codec: encoding and decoding, on the device that computes, so nothing hides them.
    """

    computing: float
    backward: float
    communication: float
    exposed: float
    codec: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the step if the exchange of each bucket begins as early as possible."""
        return self.computing + self.exposed + self.codec

    @property
    def serial(self) -> float:
        """Seconds of the step without overlap: an upper bound."""
        return self.computing + self.communication + self.codec

    @property
    def ideal(self) -> float:
        """Seconds of the step if exchanges fill the whole backward pass: a lower bound."""
        return self.computing + max(0.0, self.communication - self.backward) + self.codec

    def speed_up(self, reference: StepTime) -> tuple[float, float, float]:
        """How many times faster than ``reference``: by the buckets, without overlap, with ideal overlap."""
        serial, ideal = reference.serial / self.serial, reference.ideal / self.ideal
        return reference.seconds / self.seconds, serial, ideal


def messages(exchange: Exchange, ranks: int) -> int:
    """Messages that each rank sends, one after the other."""
    _known(exchange)
    return (1 if exchange == "allgather" else 2) * (ranks - 1)


def sent(exchange: Exchange, ranks: int, bits: float) -> float:
    """Bits that each rank sends if its gradient or payload has ``bits``; bytes for bytes.

    >>> [sent(exchange, 8, 1200) for exchange in EXCHANGES]
    [2100.0, 8400.0, 2100.0]
    """
    _known(exchange)
    return (ranks - 1) * bits / (1.0 if exchange == "allgather" else ranks / 2)


def coded(exchange: Exchange, ranks: int, elements: float) -> float:
    """Elements that each rank encodes and decodes, in sum, if its gradient has ``elements``.

    ``allgather``: encodes its own and decodes everyone's, (1 + N) n. ``two-shot``: encodes its own, decodes N pieces of
    n / N, encodes their average, decodes the averages of all: (3 + 1 / N) n. ``allreduce``: none.
    """
    _known(exchange)
    return {"allreduce": 0.0, "allgather": 1 + ranks, "two-shot": 3 + 1 / ranks}[exchange] * elements


def assign_buckets(sizes: ArrayLike, bucket_mb: float | None = None, element_bytes: int = 4) -> NDArray[np.int64]:
    """The bucket in which DistributedDataParallel sends each gradient; the first to be sent is 0.

    What its reducer does once it has seen one step: gradients in the order in which they appear, here the reverse of
    the parameters', go into a bucket until it holds its limit or more. The limit is 25 MiB, and 1 MiB for the first
    bucket; a limit that was chosen counts for the first one, too.

    Args:
        sizes: (T,) elements of each gradient, in the order of the model's parameters.
        bucket_mb: the limit in MiB; None for the default.
        element_bytes: of a gradient's dtype; 4 also where a hook compresses the bucket later.

    Returns:
        (T,) int64, falling.

    >>> assign_buckets([7_000_000, 10, 300_000, 100]).tolist()
    [1, 1, 0, 0]
    """
    last = (BUCKET_MIB if bucket_mb is None else bucket_mb) * MIB
    limit = FIRST_BUCKET_MIB * MIB if bucket_mb is None else last
    reverse = np.asarray(sizes, np.int64)[::-1]
    bucket = np.zeros(len(reverse), np.int64)
    held, number = 0, 0
    for place, size in enumerate(reverse.tolist()):
        bucket[place] = number
        held += element_bytes * size
        if held >= limit:
            held, number, limit = 0, number + 1, last
    return bucket[::-1]


def time_step(
    sizes: ArrayLike,
    bits: ArrayLike,
    cluster: Cluster,
    exchange: Exchange,
    *,
    work: ArrayLike | None = None,
    codec_seconds: float | None = None,
) -> StepTime:
    """Seconds of a step whose gradients travel in buckets while the backward pass goes on.

    The backward pass takes ``cluster.backward`` seconds; each gradient takes a part of it that is in proportion to its
    elements, or to ``work``, the last parameter's first. A bucket is ready when its last gradient is, and buckets
    travel one after the other: with ready times r_1 <= r_2 <= ... and seconds c_k, the last arrives at
    max over k of (r_k + c_k + c_(k+1) + ...), and what of this lies behind the end of the backward pass is exposed.

    Args:
        sizes: (T,) elements of each gradient, in the order of the model's parameters.
        bits: per value of what one rank sends of each gradient, (T,) or one number: 32, 16, or what a sweep measured.
        cluster: who exchanges.
        exchange: how.
        work: (T,) what the backward pass spends on each gradient, in any unit.
        codec_seconds: of encoding and decoding in a step; None for what the cluster's ``codec_rate`` gives.

    Raises:
        UsageError: an unknown exchange, or arrays that do not fit each other.
    """
    plan = _Schedule.of(sizes, bits, cluster, exchange, work)
    network = cluster.network
    if codec_seconds is None:
        codec_seconds = cluster.codec_seconds(exchange, float(np.sum(sizes)))
    return StepTime(
        computing=cluster.computing,
        backward=cluster.backward,
        communication=float(plan.seconds(network.latency, network.bandwidth).sum()),
        exposed=float(plan.exposed(network.latency, network.bandwidth)),
        codec=codec_seconds,
    )


def step_seconds(sizes: ArrayLike, bits: ArrayLike, cluster: Cluster, exchange: Exchange = "two-shot") -> float:
    """Seconds of a training step with bits per value for each gradient; :func:`time_step` gives them in parts.

    >>> cluster = Cluster(Network.parse("25Gbit/s"), ranks=8, step_time=0.18)
    >>> round(step_seconds([100_000_000] * 3, [4, 3, 5], cluster), 3)
    0.208
    """
    return time_step(sizes, bits, cluster, exchange).seconds


def break_even_rate(codec: StepTime, reference: StepTime, elements: float) -> float:
    """Elements per second that must be encoded or decoded, all in all, for the step not to be longer than another's.

    Args:
        codec: the step with a codec, whose own time is left out.
        reference: the step without one.
        elements: encoded and decoded in a step, see :func:`coded`.

    Returns:
        the rate; infinite if no codec is fast enough.
    """
    spare = reference.seconds - (codec.seconds - codec.codec)
    return elements / spare if spare > 0 else math.inf


def break_even_bandwidth(
    sizes: ArrayLike,
    bits: ArrayLike,
    cluster: Cluster,
    exchange: Exchange,
    reference_bits: float,
    *,
    codec_seconds: float | None = None,
) -> float:
    """Bits per second above which a codec no longer makes the step 1% shorter than an all-reduce does.

    Args:
        sizes: see :func:`time_step`, also for the rest.
        bits: per value.
        cluster: the bandwidth of its network does not matter.
        exchange: of the payloads.
        reference_bits: per value of the all-reduce that it is compared with.
        codec_seconds: see :func:`time_step`.

    Returns:
        0 if it is not shorter on any network from 1 Mbit/s up.
    """
    latency = cluster.network.latency
    if codec_seconds is None:
        codec_seconds = cluster.codec_seconds(exchange, float(np.sum(sizes)))
    computing = cluster.computing + codec_seconds
    ours = _Schedule.of(sizes, bits, cluster, exchange, None)
    theirs = _Schedule.of(sizes, reference_bits, cluster, "allreduce", None)

    def pays(bandwidth: NDArray[np.float64]) -> NDArray[np.bool_]:
        plain = cluster.computing + theirs.exposed(latency, bandwidth)
        return computing + ours.exposed(latency, bandwidth) < (1 - WORTHWHILE) * plain

    low, high = 1e6, 1e15
    for _ in range(3):
        rates = np.geomspace(low, high, 300)
        paying = np.flatnonzero(pays(rates))
        if not len(paying):
            return 0.0
        if paying[-1] + 1 == len(rates):
            return math.inf
        low, high = rates[paying[-1]], rates[paying[-1] + 1]
    return float(low)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """Buckets in the order of sending: when each is ready, bits that a rank sends of it, and messages of each."""

    ready: NDArray[np.float64]
    bits: NDArray[np.float64]
    messages: int
    backward: float

    @classmethod
    def of(
        cls, sizes: ArrayLike, bits: ArrayLike, cluster: Cluster, exchange: Exchange, work: ArrayLike | None
    ) -> _Schedule:
        elements = np.asarray(sizes, np.int64)
        try:
            payload = elements * np.broadcast_to(np.asarray(bits, np.float64), elements.shape)
            spent = np.broadcast_to(np.asarray(elements if work is None else work, np.float64), elements.shape)
        except ValueError:
            raise UsageError(f"bits, work: they must hold one number for each of the {elements.size} sizes") from None
        bucket = assign_buckets(elements, cluster.bucket_mb)
        count = int(bucket.max(initial=-1)) + 1
        held, done = np.zeros(count), np.zeros(count)
        np.add.at(held, bucket, payload)
        np.add.at(done, bucket, spent)
        done = np.cumsum(done)
        total = float(done[-1]) if count else 0.0
        return cls(
            ready=done * (cluster.backward / total if total > 0 else 0.0),
            bits=held * sent(exchange, cluster.ranks, 1.0),
            messages=messages(exchange, cluster.ranks),
            backward=cluster.backward,
        )

    def seconds(self, latency: float, bandwidth: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """(..., K) of each bucket's exchange, for bandwidths of shape (...)."""
        return self.messages * latency + self.bits / np.asarray(bandwidth, np.float64)[..., None]

    def exposed(self, latency: float, bandwidth: float | NDArray[np.float64]) -> NDArray[np.float64]:
        """(...) seconds from the end of the backward pass to the arrival of the last bucket."""
        remaining = np.cumsum(self.seconds(latency, bandwidth)[..., ::-1], axis=-1)[..., ::-1]
        arrival: NDArray[np.float64] = (self.ready + remaining).max(axis=-1, initial=self.backward)
        return arrival - self.backward


def _known(exchange: str) -> None:
    if exchange not in EXCHANGES:
        raise UsageError(f"exchange: '{exchange}' is unknown; {suggest(exchange, EXCHANGES)}")
