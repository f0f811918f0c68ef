"""What gradients cost between ranks: by hand, against a schedule played event by event, and against torch's buckets."""

import math
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from gtrace.costs import (
    EXCHANGES,
    Cluster,
    Network,
    assign_buckets,
    break_even_bandwidth,
    break_even_rate,
    coded,
    messages,
    parse_cluster,
    parse_network,
    sent,
    step_seconds,
    time_step,
)
from gtrace.errors import UsageError

CLUSTER = Cluster(Network.parse("25Gbit/s", "20us"), ranks=8, step_time=0.18)
SIZES = [3_000_000, 64, 20_000_000, 1000, 9_000_000, 9_000_000, 64, 400_000]


def ring(ranks, chunk, halves):
    """Chunks of a ring exchange moved one by one; bits that each rank sent, and messages of each."""
    sent_bits, count = np.zeros(ranks), 0
    for _ in range(halves * (ranks - 1)):
        for rank in range(ranks):
            sent_bits[rank] += chunk
        count += 1
    return sent_bits, count


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_and_messages_against_a_ring_played_out(ranks):
    for exchange, chunk, halves in (("allreduce", 840.0 / ranks, 2), ("allgather", 840.0, 1)):
        bits, count = ring(ranks, chunk, halves)
        assert bits == pytest.approx(sent(exchange, ranks, 840.0))
        assert count == messages(exchange, ranks)
    # All-to-all of pieces, then an all-gather of pieces: as many as the two halves of a ring all-reduce.
    assert sent("two-shot", ranks, 840.0) == pytest.approx(2 * sent("allgather", ranks, 840.0 / ranks))
    assert messages("two-shot", ranks) == 2 * (ranks - 1)


def test_transfer_times_by_hand():
    # Of three hundred million parameters 4 bits are 8 times less than 32, and by all-gather no faster than bf16.
    network, ways = Network.parse("25Gbit/s"), (("allreduce", 32), ("allreduce", 16), ("allgather", 4), ("two-shot", 4))
    times = [network.seconds(exchange, 8, bits * 300e6) for exchange, bits in ways]
    assert times == pytest.approx([0.672, 0.336, 0.336, 0.084])
    # 4 workers, a million values: exact ones of 32 bits, payloads of 2.
    for topology, bits, expected in (
        ("ring", 32e6, 2 * 3 * (0.01 + 1.0)),
        ("ring", 2e6, 3 * (0.01 + 0.25)),
        ("allgather", 32e6, 3 * (0.01 + 4.0)),
        ("ps", 2e6, 0.02 + 4 * (0.25 + 4.0)),
        ("ps", 32e6, 0.02 + 4 * 8.0),
    ):
        found = Network(8e6, 0.01, topology).transfer(4, bits, 10**6, exact=bits > 2e6)
        assert found == pytest.approx(expected)
    assert Network(8e6, 0.01).transfer(1, 32e6, 10**6, exact=True) == 0


@pytest.mark.parametrize("bucket_mb", [None, 25.0, 0.5, 1000.0])
def test_buckets_are_those_of_torch(bucket_mb):
    rng = np.random.default_rng(5)
    for sizes in ([10], [262_144, 262_144], SIZES, np.exp(rng.uniform(0, 15.5, 40)).astype(int).tolist()):
        # The reducer's limits, once it has seen the order of the gradients.
        default = bucket_mb is None
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20] if default else [int(bucket_mb * 2**20)]
        gradients = [torch.empty(size, device="meta") for size in reversed(sizes)]
        found, _ = dist._compute_bucket_assignment_by_size(gradients, limits)
        expected = np.empty(len(sizes), int)
        for number, members in enumerate(sorted(found)):
            expected[[len(sizes) - 1 - k for k in members]] = number
        assert assign_buckets(sizes, bucket_mb).tolist() == expected.tolist()


def played(bits, cluster, exchange, work):
    """A step event by event: the backward pass ends each gradient, the link takes each bucket when both are free."""
    bucket = assign_buckets(SIZES, cluster.bucket_mb)
    clock, link = 0.0, 0.0
    for place in reversed(range(len(SIZES))):
        clock += cluster.backward * work[place] / sum(work)
        if place == 0 or bucket[place - 1] != bucket[place]:
            size = sum(s * b for s, b, k in zip(SIZES, bits, bucket, strict=True) if k == bucket[place])
            link = max(link, clock) + cluster.network.seconds(exchange, cluster.ranks, size)
    return max(0.0, link - cluster.backward)


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("rate", ["1Gbit/s", "25Gbit/s", "400Gbit/s"])
@pytest.mark.parametrize("bucket_mb", [None, 4.0])
def test_exposed_time_against_a_schedule_played_event_by_event(exchange, rate, bucket_mb):
    rng = np.random.default_rng(11)
    cluster = Cluster(Network.parse(rate, "100us"), 6, 0.25, 0.1, bucket_mb)
    bits, work = rng.uniform(2, 32, len(SIZES)), rng.uniform(1, 9, len(SIZES))
    for given in (None, work):
        step = time_step(SIZES, bits, cluster, exchange, work=given)
        assert step.exposed == pytest.approx(played(bits, cluster, exchange, SIZES if given is None else given))
        assert step.ideal <= step.seconds + 1e-12
        assert step.seconds <= step.serial + 1e-12
        count = len(set(assign_buckets(SIZES, bucket_mb).tolist()))
        total = sent(exchange, 6, float(np.dot(SIZES, bits)))
        by_hand = count * messages(exchange, 6) * 1e-4 + total / cluster.network.bandwidth
        assert step.communication == pytest.approx(by_hand)


def test_the_codecs_time_is_never_hidden_and_at_the_break_even_rate_the_steps_are_equally_long():
    free, paid = (time_step(SIZES, 4, CLUSTER, "two-shot", codec_seconds=s) for s in (0.0, 0.05))
    reference, names = time_step(SIZES, 32, CLUSTER, "allreduce"), ("seconds", "serial", "ideal")
    assert [getattr(paid, name) for name in names] == pytest.approx([getattr(free, name) + 0.05 for name in names])
    ratios = [getattr(reference, name) / getattr(paid, name) for name in names]
    assert paid.speed_up(reference) == pytest.approx(ratios)
    elements = coded("two-shot", 8, sum(SIZES))
    assert elements == (3 + 1 / 8) * sum(SIZES)
    reference = time_step(SIZES, 16, CLUSTER, "allreduce")
    rate = break_even_rate(free, reference, elements)
    as_long = time_step(SIZES, 4, CLUSTER, "two-shot", codec_seconds=elements / rate)
    assert as_long.seconds == pytest.approx(reference.seconds)
    assert break_even_rate(reference, free, elements) == math.inf


@pytest.mark.parametrize("codec_seconds", [0.0, 0.01])
def test_above_the_break_even_bandwidth_a_codec_saves_less_than_a_hundredth(codec_seconds):
    found = break_even_bandwidth(SIZES, 4, CLUSTER, "two-shot", 16, codec_seconds=codec_seconds)

    def gain(bandwidth):
        cluster = Cluster(Network(bandwidth, 20e-6), 8, 0.18)
        ours = time_step(SIZES, 4, cluster, "two-shot", codec_seconds=codec_seconds)
        return 1 - ours.seconds / time_step(SIZES, 16, cluster, "allreduce").seconds

    assert gain(found) == pytest.approx(0.01, abs=1e-4)
    assert gain(1.1 * found) < 0.01 < gain(0.9 * found)
    # 4 bits to 16 ranks are more than bf16's ring sends.
    wide = Cluster(Network(1e9), 16, 0.18)
    assert break_even_bandwidth(SIZES, 4, wide, "allgather", 16) == 0.0
    assert break_even_bandwidth(SIZES, 4, wide, "two-shot", 16) > 1e9


@pytest.mark.parametrize(
    ("text", "cluster"),
    [
        ("8x25Gbit/s", Cluster(Network(25e9), 8)),
        (
            "2 x 10MB/s, 1s, backward=120ms, latency=20us, bucket=4MiB, codec=2Gvalues/s",
            Cluster(Network(8e7, 20e-6), 2, 1.0, 0.12, 4.0, 2e9),
        ),
        ("8x25Gbit/s,latency=20us,180ms", Cluster(Network(25e9, 20e-6), 8, 0.18)),
    ],
)
def test_a_cluster_and_a_simulated_network_are_read_and_written(text, cluster):
    assert parse_cluster(text) == cluster == parse_cluster(str(cluster))
    network = parse_network("10MB/s,latency=50us,topology=ps,compute=5s")
    assert network == Network(8e7, 50e-6, "ps", 5.0) == parse_network(network.spec)


def cluster_with(**given):
    return Cluster(**{"network": Network(1e9), "ranks": 2, "step_time": 0.1, **given})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: Network.parse("fast"), "network: 'fast' is not a valid speed; write e.g. 25Gbit/s."),
        (lambda: Network.parse("25"), "network: '25' needs a unit, e.g. 25Gbit/s."),
        (lambda: parse_network("1Gbit/s,50us"), "--network: '50us' needs a key: latency=, topology=, compute=."),
        (lambda: cluster_with(ranks=1), "ranks: 1"),
        (lambda: cluster_with(backward_time=0.2), "backward: 0.2 s is more than the step's computing"),
        (lambda: time_step(SIZES, [1, 2], CLUSTER, "allgather"), "one number for each of the 8 sizes"),
        (lambda: time_step(SIZES, 4, CLUSTER, "ring"), "exchange: 'ring' is unknown"),
        (lambda: step_seconds(SIZES, 4.0, parse_cluster("8x25Gbit/s")), "'8x25Gbit/s' has no compute time of a step"),
    ],
)
def test_what_cannot_be_is_said(call, said):
    with pytest.raises(UsageError, match=re.escape(said)):
        call()
