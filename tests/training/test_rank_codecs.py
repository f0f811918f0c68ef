"""How tensors travel between ranks, side by side in one process: the same code but for the collective."""

import numpy as np
import pytest
from helpers_training import rank_codecs

import gtrace
from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError, UsageError
from gtrace.fitting.pooling import pooled
from gtrace.training import Exchange
from gtrace.training.exchange import Tally
from gtrace.training.ranks import NOT_FINITE, Piece, SimulatedRank, lockstep
from gtrace.training.ways import averaging, split_tensor, way
from gtrace.types import Key

MIXED = "prune:sparsity=0.8,allocation=heterogeneous"
_SPECS = "none qsgdinf:bits=3 alq:bits=3 zipml:bits=3 mcgq ef:topk:ratio=0.05 ef21:topk:ratio=0.05 signsgd"
SPECS = _SPECS.split()
NAMES = ("conv.weight", "fc.weight", "fc.bias")
SIZES = (20_000, 3_000, 10)
SHAPES = ((100, 200), (30, 10, 10), (10,))


def whole(spec):
    codec = gtrace.codec(spec)
    return [Piece(name, codec, size, None, shape) for name, size, shape in zip(NAMES, SIZES, SHAPES, strict=True)]


def gradients(rank, step=0, scale=1.0):
    random = np.random.default_rng([rank, step])
    return [(scale * random.standard_t(4, size)).astype(np.float32) for size in SIZES]


def means(world):
    """The exact averages of the first step."""
    return [np.mean([gradients(rank)[k] for rank in range(world)], axis=0) for k in range(len(SIZES))]


def apart(ours, theirs):
    """The squared error of lists of arrays."""
    return sum(float(np.sum((a - b) ** 2)) for a, b in zip(ours, theirs, strict=True))


def scaled(rank, step):
    """Each rank's gradients ten times as large as those of the one before."""
    return gradients(rank, step, 10.0**rank)


def averaged(everyone, spec, given, step, by="allgather"):
    """The averages that each rank has of a step."""
    running = zip(everyone, given, strict=True)
    return lockstep([averaging(codecs, way(by), whole(spec), values, step) for codecs, values in running])[0]


def exchanged(world, spec, by="allgather", steps=1, given=gradients, **options):
    """Of each rank the averages of each step, and its codecs."""
    everyone = [rank_codecs(SimulatedRank(rank, world), spec, **options) for rank in range(world)]
    results = [([], codecs) for codecs in everyone]
    for step in range(steps):
        found = averaged(everyone, spec, [given(rank, step) for rank in range(world)], step, by)
        for (averages, _), average in zip(results, found, strict=True):
            averages.append(average)
    return results


def energy(world):
    return sum(float(one @ one) for one in means(world))


def error_and_codecs(spec, by, world=8):
    results = exchanged(world, spec, by)
    averages = [found[0] for found, _ in results]
    for found in averages[1:]:
        for a, b in zip(found, averages[0], strict=True):
            np.testing.assert_array_equal(a, b)
    return apart(averages[0], means(world)) / energy(world), [codecs for _, codecs in results]


def shared_bytes(codecs):
    return [bytes(one.codec.shared(one.state)) for one in codecs._senders.values()]


@pytest.mark.parametrize("spec", [*SPECS, "powersgd", MIXED])
@pytest.mark.parametrize("world", [2, 4])
def test_one_shot_gives_every_rank_the_average_that_simulated_workers_have(spec, world):
    results, simulated = exchanged(world, spec, steps=3), Exchange(spec, world, seed=3, refit="once")
    for step in range(3):
        shaped = [zip(NAMES, gradients(rank, step), SHAPES, strict=True) for rank in range(world)]
        expected = simulated.step(step, [{name: g.reshape(shape) for name, g, shape in each} for each in shaped])
        for averages, _ in results:
            for name, average in zip(NAMES, averages[step], strict=True):
                wanted = expected.gradients[name].reshape(-1)
                # Ranks add rounds up in float32, simulated workers in float64.
                off = 1e-5 * float(np.abs(wanted).max()) if spec == "powersgd" else 0
                assert np.abs(average - wanted).max() <= off
    for _, codecs in results:
        if spec == "powersgd":
            assert codecs.tally.payload_bits == 3 * 32 * (2 * (100 + 200) + 2 * (30 + 100) + 10)
            assert codecs.tally.frame_bits == 3 * 8 * 3


@pytest.mark.parametrize("spec", ["alq:bits=3", "ef:topk:ratio=0.05", "ef21:topk:ratio=0.05", "powersgd", MIXED])
def test_what_passes_with_nan_leaves_the_memory_of_simulated_workers_as_that_of_ranks(spec):
    everyone = [rank_codecs(SimulatedRank(rank, 3), spec) for rank in range(3)]
    simulated = Exchange(spec, 3, seed=3, refit="once", nonfinite="pass")
    for step in range(3):
        own = [gradients(rank, step) for rank in range(3)]
        if step < 2:
            own[step][1][7] = np.nan
        given = [[NOT_FINITE if np.isnan(values).any() else values for values in each] for each in own]
        averages = averaged(everyone, spec, given, step)[0]
        shaped = [zip(NAMES, each, SHAPES, strict=True) for each in own]
        found = simulated.step(step, [{name: g.reshape(shape) for name, g, shape in each} for each in shaped])
        assert np.isnan(averages[1]).all() == (step < 2)
        for name, average in zip(NAMES, averages, strict=True):
            off = 1e-5 * float(np.abs(average).max()) if spec == "powersgd" else 0
            np.testing.assert_allclose(found.gradients[name].reshape(-1), average, atol=off, rtol=0)
        for field in ("payload_bits", "shared_bits", "worker_squared_error"):
            total = sum(getattr(one.tally, field) for one in everyone)
            assert getattr(found.tally, field) == pytest.approx(total, rel=1e-5), field
        for one in everyone:
            one.tally = Tally()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("world", [2, 4])
def test_two_shots_give_all_ranks_the_same_and_measure_the_second_error(spec, world):
    error, everyone = error_and_codecs(spec, "two-shot", world)
    down, up = (sum(getattr(one.tally, f"{which}_squared_error") for one in everyone) for which in ("down", "worker"))
    if spec == "none":
        assert error < 1e-12
        assert down == 0
    elif gtrace.codec(spec).unbiased:
        # Both errors are independent and add up: sampling makes them differ by a few percent.
        assert error == pytest.approx((up / world**2 + down) / energy(world), rel=0.2)
        assert down > 0
    pieces = [piece for tensor in whole(spec) for piece in split_tensor(tensor, world)]
    assert sum(piece.size for piece in pieces) == sum(SIZES)
    bucket = (gtrace.codec(spec).needs.bucket_size if gtrace.codec(spec).needs else None) or 1
    assert all(piece.start % bucket == 0 for piece in pieces)


def test_ranks_and_stages_draw_from_keys_of_their_own(monkeypatch):
    seen, derive = [], Key.derive

    def watched(seed, **of):
        seen.append((seed, *sorted(of.items())))
        return derive(seed, **of)

    monkeypatch.setattr(Key, "derive", watched)
    exchanged(4, "qsgdinf:bits=2", "two-shot", steps=2)
    assert len(seen) == len(set(seen)) > 2 * 4 * len(NAMES)
    assert {dict(of[1:])["role"] for of in seen} == {"up", "down"}


@pytest.mark.parametrize("refit", ["once", "pooled:2"])
def test_common_levels_fit_the_sum_of_all_sketches_or_pools(refit):
    steps = 4 if refit == "pooled:2" else 2
    results = exchanged(3, "alq:bits=3", steps=steps, given=scaled, refit=refit, common=True)
    found = [shared_bytes(codecs) for _, codecs in results]
    assert found[0] == found[1] == found[2]
    codec, fitted = gtrace.codec("alq:bits=3"), 2 if refit == "pooled:2" else 0
    for k in range(3):
        total = None
        for rank in range(3):
            seen = [scaled(rank, step)[k] for step in range(fitted + 1)]
            sketches = [gtrace.MomentSketch.from_spec(values, codec.needs) for values in seen]
            part = unpack_sketch(pack_sketch(pooled(sketches) if fitted else sketches[0]))
            total = part if total is None else total + part
        assert found[0][k] == codec.shared(codec.fit(codec.init(SIZES[k]), total, fitted))


def spread(rank, _step=0):
    """Tensors of unlike spread, so that shares differ."""
    random = np.random.default_rng(rank)
    spreads = zip(SIZES, (2.5, 0.5, 0.2), strict=True)
    return [random.lognormal(0, scale, size).astype(np.float32) for size, scale in spreads]


def targets(codecs):
    """What each tensor's codec was given, whether it is wrapped or not."""
    arrays = [dict(one.state.arrays) for (of, _), one in codecs._senders.items() if of == "up"]
    return [float(each.get("target", each.get("inner.target"))) for each in arrays]


@pytest.mark.parametrize("spec", [MIXED, f"rotate:{MIXED}"])
@pytest.mark.parametrize("common", [False, True])
def test_ranks_allocate_from_their_own_gradients_or_from_merged_sketches(common, spec):
    found = [targets(codecs) for _, codecs in exchanged(3, spec, given=spread, common=common)]
    own = [[gtrace.MomentSketch.of(values, norm="none") for values in spread(rank)] for rank in range(3)]
    if common:
        coarse = [[sketch.coarsen(6) for sketch in each] for each in own]
        own = [[sum(parts[1:], parts[0]) for parts in zip(*coarse, strict=True)]] * 3
    for rank in range(3):
        assert found[rank] == pytest.approx(list(gtrace.fitting.allocate_sparsity(own[rank], 0.8)))
        assert max(found[rank]) - min(found[rank]) > 0.2
    assert (found[0] == found[1]) == common


WAYS = ("allgather", "two-shot", "ring", "hierarchical:2", "shared-scale")


@pytest.mark.parametrize("by", WAYS)
def test_what_one_rank_cannot_send_goes_to_all_from_the_others(by):
    def given(rank, step):
        values = gradients(rank, step)
        return [None if step else values[0], NOT_FINITE if rank == 1 else values[1], None if rank == 0 else values[2]]

    for (first, second), _ in exchanged(4, "qsgdinf:bits=8", by, steps=2, given=given):
        assert np.isfinite(first[0]).all()
        assert not second[0].any()
        assert np.isnan(first[1]).all()
        assert np.allclose(first[2], np.mean([gradients(rank)[2] for rank in (1, 2, 3)], axis=0), atol=0.1)


@pytest.mark.parametrize("missing", [None, NOT_FINITE])
def test_what_one_rank_cannot_send_of_a_linear_codec(missing):
    everyone = [rank_codecs(SimulatedRank(rank, 3), "powersgd") for rank in range(3)]
    averaged(everyone, "powersgd", [gradients(rank) for rank in range(3)], 0)
    firsts = [one.to_lists()["senders"] for one in everyone]
    second = [gradients(rank, 1) for rank in range(3)]
    second[1][0] = missing
    found = averaged(everyone, "powersgd", second, 1)
    expected = np.full(SIZES[0], np.nan) if missing else (gradients(0, 1)[0] + gradients(2, 1)[0]) / 2
    for averages, before, one in zip(found, firsts, everyone, strict=True):
        after = one.to_lists()["senders"]
        np.testing.assert_allclose(averages[0], expected, rtol=1e-6, atol=1e-6)
        assert np.isfinite(averages[1]).all()
        for name in ("q", "residual"):
            assert np.array_equal(before[0][3]["state"][name], after[0][3]["state"][name])
            assert not np.array_equal(before[1][3]["state"][name], after[1][3]["state"][name])


def test_ranks_of_other_models_are_noticed():
    everyone, sizes = [rank_codecs(SimulatedRank(rank, 2), "powersgd") for rank in range(2)], (3, 2)
    exchanges = [
        averaging(codecs, way("ring"), whole("powersgd")[:some], gradients(0)[:some], 0)
        for codecs, some in zip(everyone, sizes, strict=True)
    ]
    with pytest.raises(PayloadError, match="ranks differ in their model"):
        lockstep(exchanges)


@pytest.mark.parametrize("by", WAYS[:4])
def test_on_every_way_nothing_is_lost_but_what_codecs_lose_and_each_message_changes_an_estimate_once(by):
    """Gradients that stay: what is sent a quarter at a time adds up to them, on every rank."""
    assert error_and_codecs("none", by)[0] < 1e-12
    results = exchanged(4, "ef21:topk:ratio=0.25", by, steps=24, given=lambda rank, _step: gradients(rank))
    for averages, _ in results:
        for found, exact in zip(averages[-1], means(4), strict=True):
            assert found == pytest.approx(exact, abs=1e-5)


def test_each_further_encoding_of_a_sum_adds_its_error():
    spec = "qsgdinf:bits=4,bucket_size=512"
    errors = {}
    for by in WAYS:
        errors[by], everyone = error_and_codecs(spec, by)
        if by in ("allgather", "two-shot"):
            own = sum(codecs.tally.worker_squared_error for codecs in everyone) / 64
            down = sum(codecs.tally.down_squared_error for codecs in everyone)
            assert errors[by] == pytest.approx((own + down) / energy(8), rel=0.15)
    assert errors["allgather"] < errors["two-shot"] < errors["hierarchical:2"] < errors["ring"]
    # The largest of eight norms is larger than each one's own.
    assert errors["allgather"] < errors["shared-scale"]


@pytest.mark.parametrize("spec", ["qsgdinf:bits=4,bucket_size=512", "qsgdinf:bits=3,zero=false", "thc:bits=3"])
def test_codes_under_a_common_scale_add_up_to_the_mean_of_what_they_mean(spec):
    """Sums of integers lose nothing, so the error is that of rounding under the larger scales alone."""
    error, everyone = error_and_codecs(spec, "shared-scale")
    own = sum(codecs.tally.worker_squared_error for codecs in everyone) / 64
    assert error == pytest.approx(own / energy(8), rel=0.1)


@pytest.mark.parametrize(
    ("spec", "by", "world", "message"),
    [
        ("alq:bits=3", "shared-scale", 2, "has no codes that add up"),
        ("qsgdinf:bits=15", "shared-scale", 8, "needs 18 bits"),
        ("qsgdinf:clip=2", "shared-scale", 2, "take qsgd, qsgdinf or thc"),
        ("none", "hierarchical:3", 4, "not whole nodes"),
        ("none", "tree", 2, "'tree' is unknown"),
    ],
)
def test_ways_that_do_not_fit(spec, by, world, message):
    with pytest.raises(UsageError, match=message):
        exchanged(world, spec, by)
