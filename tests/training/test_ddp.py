"""How tensors travel between ranks, with threads in the place of processes: the same code but for the collective."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions, Receiver, Sender
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError
from gtrace.fitting.pooling import pooled
from gtrace.schedule import RefitSchedule
from gtrace.training import Exchange, ddp
from gtrace.training.wire import NOT_FINITE
from gtrace.types import Key

SPECS = ("none", "qsgdinf:bits=3", "alq:bits=3", "zipml:bits=3", "mcgq", "ef:topk:ratio=0.05", "signsgd")
MIXED = "prune:sparsity=0.8,allocation=heterogeneous"
NAMES = ("conv.weight", "fc.weight", "fc.bias")
SIZES = (20_000, 3_000, 10)
#: what averages are to be like
LIKES = [np.empty(size, np.float32) for size in SIZES]


class Links:
    """One rank's end of a collective among threads."""

    def __init__(self, rank, size, board, barrier):
        self.rank, self.size, self.sent, self.seconds = rank, size, 0, 0.0
        self._board, self._barrier = board, barrier

    def scatter(self, parts):
        self._board[self.rank] = list(parts)
        self._barrier.wait(60)
        arrived = [self._board[rank][self.rank] for rank in range(self.size)]
        self._barrier.wait(60)
        self.sent += sum(len(part) for rank, part in enumerate(parts) if rank != self.rank)
        return arrived

    def gather(self, part):
        return self.scatter([part] * self.size)

    def average(self, values):
        return np.mean([np.frombuffer(part, np.float32) for part in self.gather(values.tobytes())], axis=0)


def together(world, work):
    """Run ``work(links)`` on every rank; returns what each gave."""
    board, barrier = [None] * world, threading.Barrier(world)
    results, errors = [None] * world, []

    def run(rank):
        try:
            results[rank] = work(Links(rank, world, board, barrier))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the thread of the test
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def in_one(shots, names=NAMES, likes=LIKES, shapes=None):
    """Tensors in one piece each."""
    return [shots.piece(*each) for each in zip(names, likes, shapes or [None] * len(names), strict=True)]


def gradients(rank, step=0, scale=1.0):
    random = np.random.default_rng([rank, step])
    return [(scale * random.standard_t(4, size)).astype(np.float32) for size in SIZES]


def fresh(spec, seed=3, refit="once", common=False):
    return ddp.Shots(CodecTable.of(spec), seed, RefitSchedule.parse(refit), common=common)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world", [2, 4])
def test_one_shot_gives_every_rank_the_average_of_all_encodings(spec, world):
    codec = gtrace.codec(spec)

    def work(links):
        one = fresh(spec)
        return [one.one(links, in_one(one), gradients(links.rank, step), step) for step in range(3)], one.tally

    results = together(world, work)
    senders = {
        (name, rank): Sender(codec, size, LinkOptions(RefitSchedule.parse("once"), 3), tensor=name, worker=rank)
        for name, size in zip(NAMES, SIZES, strict=True)
        for rank in range(world)
    }
    receivers = {key: Receiver(codec, sender.state.size) for key, sender in senders.items()}
    for step in range(3):
        for k, name in enumerate(NAMES):
            arrived = []
            for rank in range(world):
                values = gradients(rank, step)[k]
                arrived.append(receivers[name, rank].receive(senders[name, rank].send(values, step)))
                senders[name, rank].settle(values, arrived[-1])
            expected = codec.aggregate(arrived)
            for averages, _ in results:
                np.testing.assert_array_equal(averages[step][k], expected)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world", [2, 4])
def test_two_shots_give_all_ranks_the_same_and_measure_the_second_error(spec, world):
    def work(links):
        two = fresh(spec)
        return two.two(links, in_one(two), gradients(links.rank), 0), two.tally

    results = together(world, work)
    first = results[0][0]
    for averages, _ in results:
        for a, b in zip(averages, first, strict=True):
            np.testing.assert_array_equal(a, b)
    exact = [np.mean([gradients(rank)[k] for rank in range(world)], axis=0) for k in range(3)]
    error = sum(float(np.sum((a - b) ** 2)) for a, b in zip(first, exact, strict=True))
    down = sum(tally.down_squared_error for _, tally in results)
    up = sum(tally.worker_squared_error for _, tally in results) / world**2
    if spec == "none":
        assert error < 1e-8
        assert down == 0
    elif gtrace.codec(spec).unbiased:
        # Both errors are independent and add up: sampling makes them differ by a few percent.
        assert error == pytest.approx(up + down, rel=0.2)
        assert down > 0
    pieces = [
        piece
        for size, name in zip(SIZES, NAMES, strict=True)
        for piece in fresh(spec)._split(fresh(spec).piece(name, np.empty(size, np.float32)), world)
    ]
    assert sum(piece.size for piece in pieces) == sum(SIZES)
    bucket = (gtrace.codec(spec).needs.bucket_size if gtrace.codec(spec).needs else None) or 1
    assert all(piece.start % bucket == 0 for piece in pieces)


def test_ranks_and_stages_draw_from_keys_of_their_own(monkeypatch):
    seen, derive = [], Key.derive

    def watched(seed, **of):
        seen.append((seed, *sorted(of.items())))
        return derive(seed, **of)

    monkeypatch.setattr(Key, "derive", watched)

    def work(links):
        two = fresh("qsgdinf:bits=2")
        for step in range(2):
            two.two(links, in_one(two), gradients(links.rank, step), step)

    together(4, work)
    assert len(seen) == len(set(seen)) > 2 * 4 * len(NAMES)
    assert {dict(of[1:])["role"] for of in seen} == {"up", "down"}


def test_equal_gradients_average_to_a_fraction_of_one_error():
    """Shared randomness would leave the error of the mean as large as that of one."""

    def work(links):
        one = fresh("qsgdinf:bits=2")
        return one.one(links, in_one(one), gradients(0), 0), one.tally

    averages, tally = together(4, work)[0]
    error = sum(float(np.sum((a - b) ** 2)) for a, b in zip(averages, gradients(0), strict=True))
    assert error / tally.worker_squared_error == pytest.approx(1 / 4, rel=0.15)


def test_common_levels_fit_the_sum_of_all_sketches():
    def work(links):
        one = fresh("alq:bits=3", common=True)
        scale = 10.0**links.rank
        for step in range(2):
            one.one(links, in_one(one), gradients(links.rank, 0, scale), step)
        return {name: bytes(sender.codec.shared(sender.state)) for (_, name), sender in one._senders.items()}, one.tally

    results = together(3, work)
    assert results[0][0] == results[1][0] == results[2][0]
    codec = gtrace.codec("alq:bits=3")
    for k, name in enumerate(NAMES):
        total = None
        for rank in range(3):
            part = gtrace.MomentSketch.from_spec(gradients(rank, 0, 10.0**rank)[k], codec.needs).coarsen(6)
            total = part if total is None else total + part
        expected = codec.shared(codec.fit(codec.init(SIZES[k]), total, 0))
        assert results[0][0][name] == expected


def spread(rank):
    """Tensors of unlike spread, so that shares differ."""
    random = np.random.default_rng(rank)
    return [
        random.lognormal(0, scale, size).astype(np.float32) for size, scale in zip(SIZES, (2.5, 0.5, 0.2), strict=True)
    ]


def targets(one, role="up"):
    """What each tensor's codec was given, whether it is wrapped or not."""
    arrays = [dict(sender.state.arrays) for (of, _), sender in one._senders.items() if of == role]
    return [float(each.get("target", each.get("inner.target"))) for each in arrays]


@pytest.mark.parametrize("spec", [MIXED, f"rotate:{MIXED}"])
@pytest.mark.parametrize("common", [False, True])
def test_ranks_allocate_from_their_own_gradients_or_from_merged_sketches(common, spec):
    def work(links):
        one = fresh(spec, common=common)
        one.one(links, in_one(one), spread(links.rank), 0)
        return targets(one)

    found = together(3, work)
    own = [[gtrace.MomentSketch.of(values, norm="none") for values in spread(rank)] for rank in range(3)]
    if common:
        coarse = [[sketch.coarsen(6) for sketch in each] for each in own]
        own = [[sum(parts[1:], parts[0]) for parts in zip(*coarse, strict=True)]] * 3
    for rank in range(3):
        assert found[rank] == pytest.approx(list(gtrace.fitting.allocate_sparsity(own[rank], 0.8)))
        assert max(found[rank]) - min(found[rank]) > 0.2
    assert (found[0] == found[1]) == common


def test_two_shots_allocate_among_pieces_on_the_way_up_and_down():
    def work(links):
        two = fresh(MIXED)
        two.two(links, in_one(two), spread(links.rank), 0)
        return two

    for two in together(2, work):
        for role in ("up", "down"):
            assert max(targets(two, role)) - min(targets(two, role)) > 0.1


def test_common_levels_fit_the_sum_of_all_pools():
    def work(links):
        one = fresh("alq:bits=3", refit="pooled:2", common=True)
        for step in range(4):
            one.one(links, in_one(one), gradients(links.rank, step), step)
        return {name: bytes(sender.codec.shared(sender.state)) for (_, name), sender in one._senders.items()}

    results = together(3, work)
    assert results[0] == results[1] == results[2]
    codec = gtrace.codec("alq:bits=3")
    for k, name in enumerate(NAMES):
        total = None
        for rank in range(3):
            sketches = [gtrace.MomentSketch.from_spec(gradients(rank, step)[k], codec.needs) for step in range(3)]
            part = unpack_sketch(pack_sketch(pooled(sketches)))
            total = part if total is None else total + part
        assert results[0][name] == codec.shared(codec.fit(codec.init(SIZES[k]), total, 2))


def test_ranks_agree_on_nothing_where_every_payload_has_its_own_scale():
    def work(links, common):
        one = fresh("fp:e4m3", common=common)
        out = [one.one(links, in_one(one), gradients(links.rank, step, 10.0**links.rank), step) for step in range(2)]
        return out, one.tally.shared_bits

    common, own = (together(3, lambda links, common=common: work(links, common)) for common in (True, False))
    assert [bits for _, bits in common] == [0, 0, 0]
    for averages, others in zip(common[0][0], own[0][0], strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(averages, others, strict=True))


@pytest.mark.parametrize("shot", ["one", "two"])
def test_what_one_rank_cannot_send(shot):
    def work(links):
        mine = fresh("qsgdinf:bits=4")
        values = gradients(links.rank)
        if links.rank == 1:
            values[1] = NOT_FINITE
            values[2] = None
        if links.rank == 0:
            values[2] = None
        return getattr(mine, shot)(links, in_one(mine), values, 0)

    for averages in together(2, work):
        assert np.isfinite(averages[0]).all()
        assert np.isnan(averages[1]).all()
        assert not averages[2].any()


def test_states_come_back_from_lists():
    def work(links):
        whole, first = fresh("ef:alq:bits=2", refit="0,3"), fresh("ef:alq:bits=2", refit="0,3")
        expected = [whole.two(links, in_one(whole), gradients(links.rank, step), step) for step in range(5)]
        for step in range(2):
            first.two(links, in_one(first), gradients(links.rank, step), step)
        second = fresh("ef:alq:bits=2", refit="0,3")
        second.load_lists(first.to_lists(), links.rank)
        found = [second.two(links, in_one(second), gradients(links.rank, step), step) for step in range(2, 5)]
        return all(
            np.array_equal(a, b) for x, y in zip(expected[2:], found, strict=True) for a, b in zip(x, y, strict=True)
        )

    assert together(2, work) == [True, True]


SHAPES = [(100, 200), (30, 10, 10), (10,)]


def test_linear_codecs_average_what_they_send():
    """Real ranks against the simulated exchange, and with it against the published algorithm."""

    def work(links):
        one = fresh("powersgd")
        return [
            one.averaged(links, in_one(one, NAMES, LIKES, SHAPES), gradients(links.rank, step), step)
            for step in range(3)
        ], one

    results = together(4, work)
    simulated = Exchange("powersgd", 4)
    for step in range(3):
        workers = [
            {name: g.reshape(shape) for name, g, shape in zip(NAMES, gradients(rank, step), SHAPES, strict=True)}
            for rank in range(4)
        ]
        expected = simulated.step(step, workers)
        for averages, _ in results:
            for name, average in zip(NAMES, averages[step], strict=True):
                wanted = expected.gradients[name].reshape(-1)
                assert average == pytest.approx(wanted, abs=1e-5 * float(np.abs(wanted).max()))
    for _, one in results:
        assert one.tally.payload_bits == 3 * 32 * (2 * (100 + 200) + 2 * (30 + 100) + 10)
        assert one.tally.frame_bits == 3 * 8 * 3


@pytest.mark.parametrize("missing", [None, NOT_FINITE])
def test_what_one_rank_cannot_send_of_a_linear_codec(missing):
    def work(links):
        one = fresh("powersgd")
        one.averaged(links, in_one(one, NAMES, LIKES, SHAPES), gradients(links.rank), 0)
        before = one.to_lists()["senders"]
        second = gradients(links.rank, 1)
        if links.rank == 1:
            second[0] = missing
        averages = one.averaged(links, in_one(one, NAMES, LIKES, SHAPES), second, 1)
        return averages, before, one.to_lists()["senders"]

    results = together(3, work)
    expected = np.full(SIZES[0], np.nan) if missing else (gradients(0, 1)[0] + gradients(2, 1)[0]) / 2
    for averages, before, after in results:
        np.testing.assert_allclose(averages[0], expected, rtol=1e-6, atol=1e-6)
        assert np.isfinite(averages[1]).all()
        for name in ("q", "residual"):
            assert torch.equal(before[0][3]["state"][name], after[0][3]["state"][name])
            assert not torch.equal(before[1][3]["state"][name], after[1][3]["state"][name])


def test_ranks_of_other_models_are_noticed():
    def work(links):
        some = slice(0, 3 - links.rank)
        one = fresh("powersgd")
        return one.averaged(links, in_one(one, NAMES[some], LIKES[some]), gradients(0)[some], 0)

    with pytest.raises(PayloadError, match="ranks differ"):
        together(2, work)


def test_a_state_comes_back_with_its_shape():
    def work(links):
        one = fresh("powersgd")
        one.averaged(links, in_one(one, NAMES, LIKES, SHAPES), gradients(links.rank), 0)
        again = fresh("powersgd")
        again.load_lists(one.to_lists(), links.rank)
        return [
            shot.averaged(links, in_one(shot, NAMES, LIKES, SHAPES), gradients(links.rank, 1), 1)
            for shot in (one, again)
        ], again._senders["up", "fc.weight"].state.shape

    for (expected, found), shape in together(2, work):
        assert shape == (30, 10, 10)
        for wanted, average in zip(expected, found, strict=True):
            np.testing.assert_array_equal(average, wanted)
