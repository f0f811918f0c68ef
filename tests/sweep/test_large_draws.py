"""Draws on tensors beyond a chunk: the same bytes and errors as of the tensor as a whole."""

import numpy as np
import pytest
from helpers_sweep import rows_of

import gtrace
from gtrace.buckets import Blocks, spread
from gtrace.metrics import Histogram, Reference, RunningComparison, histogram_distance, scaled_distance
from gtrace.sweep import draws, fits
from gtrace.sweep.limits import MOST_CHUNKS, draw_obstacle
from gtrace.trace import Trace
from gtrace.types import Key, State

CHUNK = 1024
SIZE = MOST_CHUNKS * CHUNK + 1700
SPECS = [
    *(name for name in gtrace.codec_names() if name not in ("natural", "nuqsgd")),
    *("natural:coder=delta", "qsgd:bits=5,bucket_size=128,coder=elias", "qsgd:bits=7,zero=false,bucket_size=none"),
    *("qsgd:bits=6,bucket_size=256,tail=exact,coder=fixed", "nuqsgd:bits=3,bucket_size=none"),
    *("qsgd:norm=l1,bits=8,bucket_size=none", "alq:bits=3,bucket_size=none", "terngrad:clip=2.5"),
    *("qsgd:bits=3,bucket_size=none,clip=2", "alq:bits=3,bucket_size=256,clip=3,tail=exact"),
    *("fp:e4m3,rounding=stochastic", "fp:mxfp4", "fp:nvfp4", "fp:e3m2,block=48", "signsgd:scale=none"),
    *("signsgd:scale=energy", "prune:sparsity=0.8", "ef:qsgd", "rotate:qsgd:bucket_size=256", "minmax:bits=3"),
    *("mcgq:amount=0.3", "mcgq:bits=3,coder=delta", "eden:bits=2.5,block=256"),
]


#: what has to see all values at once
NOT_IN_PARTS = ("fp:e3m2,block=48", "eden", "int8")
#: codecs with memory, those that choose values among all, and those that turn them
_OF_ALL_VALUES = """
topk:ratio=0.1  topk:chunk=64  topk:ratio=0.1,values=intn:bits=2  mem-sgd:ratio=0.03  dgc:warmup=3  powersgd
signum  onebit:bucket_size=256  ef:qsgd:bucket_size=256  ef:topk:ratio=0.02  ef:alq:bits=3,bucket_size=256
dgc:clip=0.3  momentum:dgc:clip=0.3  eden:bits=0.6,block=64  ef:eden:bits=0.02,block=256,coder=fixed
ef:minmax  ef:memory_bits=8:intn  adacomp  adacomp:bin_size=300  accumulate:mcgq:amount=0.1  dropping:ratio=0.05
dropping:ratio=0.02,sample=0.05  randomk:ratio=0.03  randomk:ratio=0.6,coder=fixed  ef:randomk:scale=false
ef:terngrad:clip=2.5,bucket_size=256  ef:alq:bits=3,bucket_size=none,clip=2
ef:signsgd  ef21:topk:ratio=0.1  ef21:momentum=0.5:signsgd  momentum:signsgd  accumulate:topk
rotate:block=16,signs=fixed:fp:nvfp4,rounding=stochastic  ef:fp:nvfp4
rotate:block=64:topk  rotate:block=64:qsgd:bucket_size=256  ef:rotate:block=64:alq:bucket_size=256
"""
OF_ALL_VALUES = _OF_ALL_VALUES.split()


def with_buckets(spec):
    """Buckets that divide the chunk, where there are any."""
    item = gtrace.codec(spec)
    given = item.parameters.get("bucket_size")
    return str(gtrace.codec(spec, bucket_size=256)) if given and given > CHUNK else str(item)


def values(step, size=SIZE):
    rng = np.random.default_rng(step)
    found = (rng.standard_t(4, size) * 0.01).astype(np.float32)
    found[:: 7 + step] = 0
    # One chunk of nothing, which has no scale of its own.
    found[CHUNK : 2 * CHUNK] = 0
    return found


@pytest.fixture(scope="module")
def trace():
    return Trace.from_arrays({"large": {step: values(step) for step in range(2)}})


def compared(whole, found):
    """Rows of a run in chunks against those of the whole: equal but for the Wasserstein distances of draws."""
    assert len(found) == len(whole)
    for a, b in zip(found, whole, strict=True):
        for column, value in a.items():
            where = f"{a['codec']} {a['draw']} {column}"
            if column.startswith("w1") or (column == "note" and a["draw"] >= 0):
                continue
            if isinstance(value, float):
                assert value == b[column] or (np.isnan(value) and np.isnan(b[column])), where
            else:
                assert value == b[column], where


def test_every_codec_draws_the_same_in_chunks(trace):
    specs = list(map(with_buckets, SPECS))
    split = {spec for spec in specs if draw_obstacle(gtrace.codec(spec), CHUNK) is None}
    assert set(specs) - split == {str(gtrace.codec(spec)) for spec in NOT_IN_PARTS}
    whole = list(gtrace.run_sweep(trace, sorted(split), jobs=1).rows())
    found = gtrace.run_sweep(trace, sorted(split), jobs=2, chunk=CHUNK)
    assert not found.warnings
    compared(whole, list(found.rows()))
    draws = [row for row in found.rows() if row["draw"] >= 0]
    assert {row["w1_method"] for row in draws} == {"sketch", None}
    # Rounding that moves values by less than a bin is not told from none.
    unknown = {row["method"] for row in draws if np.isnan(row["w1"])}
    assert {"fp16"} <= unknown <= {"fp16", "bf16"}
    assert all("w1 is less than a histogram tells" in row["note"] for row in draws if np.isnan(row["w1"]))
    for a, b in zip(found.rows(), whole, strict=True):
        if a["draw"] >= 0 and "w1 " not in (a["note"] or ""):
            assert a["w1"] == pytest.approx(b["w1"], rel=1e-3), a["codec"]
            assert a["w1_mcgq"] == pytest.approx(b["w1_mcgq"], rel=0.02, abs=1e-3 / SIZE), a["codec"]


def test_what_cannot_be_split_is_named_with_its_reason(trace):
    specs = [
        "dct:chunk=8:topk",
        "qsgd:bits=3,bucket_size=100",
        "fp:e3m2,block=48",
    ]
    found = gtrace.run_sweep(trace, [*specs, "qsgdinf:bits=2,bucket_size=256"], jobs=1, chunk=CHUNK)
    assert set(found["method"]) == {"qsgdinf"}
    lines = "\n".join(found.warnings)
    for name, why in (
        ("dct:topk", "needs all values at once"),
        ("qsgd", "has buckets of 100, which do not divide the chunk"),
        ("fp", "has blocks of 48, which do not divide the chunk"),
    ):
        assert f"large has more than 4 chunks of 1024 values: without {name}, which {why}: raise --chunk" in lines


@pytest.mark.parametrize(("kind", "piece"), [("weight", 512), ("weight", 1 << 20), ("neural", 512)])
@pytest.mark.parametrize("refit", ["previous", "pooled"])
def test_choices_memories_and_rotations_in_pieces_are_those_of_the_whole(kind, piece, refit, monkeypatch):
    """Also the errors over windows, whose sums are kept on disk; neural gradients change their size on the way."""
    monkeypatch.setattr(fits, "BLOCK", piece)
    # Of 12 steps in a row, a window of ten ends before the last two.
    sizes = dict.fromkeys((*range(12), 20, 21), SIZE) | ({10: SIZE - 900} if kind == "neural" else {})
    made = {"large": {step: values(step, size) for step, size in sizes.items()}}
    trace = Trace.from_arrays(made, kind=kind)
    whole = list(gtrace.run_sweep(trace, OF_ALL_VALUES, jobs=1, refit=refit).rows())
    swept = gtrace.run_sweep(trace, OF_ALL_VALUES, jobs=1, refit=refit, chunk=CHUNK)
    assert not swept.warnings
    found = list(swept.rows())
    assert {row["codec"] for row in found} == {str(gtrace.codec(spec)) for spec in OF_ALL_VALUES}
    assert any(row["window_error"] > 0 for row in found) == (kind == "weight")
    # The same where a replay starts in the middle of a burst.
    later = list(gtrace.run_sweep(trace, OF_ALL_VALUES, jobs=1, refit=refit, chunk=CHUNK, steps=[6]).rows())
    for row in (*whole, *found, *later):
        # Sums over other pieces are added in another order.
        row["window_error"] = float(f"{row['window_error']:.12g}")
    compared(whole, found)
    compared([row for row in whole if row["step"] == 6], later)


def test_errors_in_adams_updates_of_codecs_with_memory_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(fits, "BLOCK", 512)
    with gtrace.create_trace(tmp_path / "t.zarr") as writer:
        for step in range(3):
            writer.append(step, "large", values(step))
            moments = np.square(values(step + 5)) + np.float32(1e-6)
            writer.append(step, "large", moments, kind="second_moment", decay=0.9, eps=1e-8)
            writer.commit(step)
    specs = ["ef:signsgd", "topk:ratio=0.1", "powersgd", "qsgd:bucket_size=256,clip=2,tail=exact"]
    whole, found = (gtrace.run_sweep(tmp_path / "t.zarr", specs, jobs=1, chunk=c).columns for c in (2**24, CHUNK))
    assert np.isfinite(whole["update_error"]).all()
    np.testing.assert_allclose(found["update_error"], whole["update_error"], rtol=1e-12)


def test_the_whole_model_in_chunks_and_on_two_jobs():
    trace = Trace.from_arrays(
        {
            name: {step: values(step + k, size) for step in range(2)}
            for k, (name, size) in enumerate((("a", 3000), ("b", 1), ("c", 4000)))
        }
    )
    specs = [f"{name}:bits=3,bucket_size=512,scope=model" for name in ("qsgd", "alq", "qsgdinf", "nuqsgd")]
    specs += ["terngrad:bucket_size=512,scope=model", "natural:scope=model", "qsgd:bits=4,bucket_size=none,scope=model"]
    specs += ["fp:e4m3,scope=model", "ef:rotate:block=64:qsgd:bits=3,bucket_size=512,scope=model"]
    whole = list(gtrace.run_sweep(trace, specs, jobs=1).rows())
    assert {row["tensor"] for row in whole} == {"*"}
    assert {row["n"] for row in whole} == {7001}
    joined = Reference(np.concatenate([trace.read(name, 1) for name in "abc"]))
    assert next(row["energy"] for row in whole if row["step"] == 1) == joined.energy
    for jobs in (1, 2):
        compared(whole, list(gtrace.run_sweep(trace, specs, jobs=jobs, chunk=CHUNK).rows()))


def test_nonfinite_values_of_a_streamed_draw():
    bad = values(0)
    bad[[5, SIZE - 1]] = np.inf, np.nan
    trace = Trace.from_arrays({"large": bad})
    rows = [
        list(gtrace.run_sweep(trace, ["qsgd:bits=3,bucket_size=256"], chunk=c, nonfinite="zero").rows())
        for c in (CHUNK, 2**24)
    ]
    compared(rows[1], rows[0])
    assert set(gtrace.run_sweep(trace, ["qsgd:bucket_size=256"], chunk=CHUNK)["note"]) == {"2 non-finite, skipped"}


@pytest.mark.parametrize("spec", ["qsgd:bits=3,bucket_size=64", "natural", "fp:e3m2,rounding=stochastic", "signsgd"])
def test_a_part_far_into_a_tensor_draws_by_its_place(spec):
    """Beyond 2^32 values the key has other words; a place is part of what a value is rounded by."""
    item = gtrace.codec(spec)
    assert item.part_multiple
    x = values(3, 512)
    x[::2] = 0
    state, key = State(512, item.init(512).arrays), Key(1, 2)
    decoded = {item.encode_part(state, x, key, at).values.tobytes() for at in (0, 512, 1 << 32)}
    assert len(decoded) == 3


def test_blocks_are_fixed_whatever_comes(monkeypatch):
    monkeypatch.setattr("gtrace.kernels.norms.BLOCK", 8)
    x = np.arange(29, dtype=np.float32)
    for sizes in ([29], [3] * 9 + [2], [8, 8, 13], [1, 0, 28], [20, 9]):
        blocks, at, found = Blocks(), 0, []
        for size in sizes:
            for a, b in blocks.add(x[at : at + size], -x[at : at + size]):
                np.testing.assert_array_equal(a, -b)
                found.append(a.copy())
            at += size
        found += [a.copy() for a, _ in blocks.rest()]
        assert [part.size for part in found] == [8, 8, 8, 5]
        np.testing.assert_array_equal(np.concatenate(found), x)


def test_the_spread_of_a_tensor_in_parts_is_that_of_the_whole(monkeypatch):
    """Also far from zero, where squares about 0 would cancel."""
    monkeypatch.setattr("gtrace.kernels.norms.BLOCK", 64)
    x = (1000 + 1e-3 * np.random.default_rng(3).standard_normal(1001)).astype(np.float32)
    whole = spread([x])
    assert {spread(np.split(x, cuts)) for cuts in ([], [5], [64, 128, 1000], list(range(1, 1001)))} == {whole}
    wide = x.astype(np.float64)
    assert whole == pytest.approx((x.size, wide.mean(), np.square(wide - wide.mean()).sum()), rel=1e-12)
    assert spread([]) == spread([x[:0]]) == (0, 0.0, 0.0)


LAWS = {
    "normal": lambda rng, n: rng.standard_normal(n),
    "lognormal": lambda rng, n: np.exp(2 * rng.standard_normal(n)) * rng.choice([-1, 1], n),
    "few values": lambda rng, n: rng.choice([-2.0, 0.0, 0.5, 3.0], n),
    "one value": lambda rng, n: np.full(n, 0.7),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("noise", [0.5, 1e-2, 1e-4, 1e-6])
def test_distance_from_histograms_is_within_its_doubt(law, noise):
    rng = np.random.default_rng(5)
    g = LAWS[law](rng, 20_000).astype(np.float32)
    q = (g * (1 + noise * rng.standard_normal(g.size))).astype(np.float32)
    a, b = Histogram(), Histogram()
    for part in np.array_split(g, 7):
        a.add(part)
    b.add(q)
    exact = float(np.abs(np.sort(g).astype(np.float64) - np.sort(q)).mean())
    found, doubt = histogram_distance(a, b)
    assert abs(found - exact) <= doubt + 1e-12 * exact
    # It is a small part of a distance that is wider than bins.
    if noise == 0.5:
        assert doubt < 0.02 * exact
    # What it is worth: of smooth laws the distance is known much better.
    if noise >= 1e-2 and law in ("normal", "lognormal"):
        assert found == pytest.approx(exact, rel=0.02)
    assert scaled_distance(a, b, 1.0, 1.0) == pytest.approx(exact, rel=0.01, abs=float(np.abs(g).mean()) * 2**-10)


def test_running_comparison_is_the_reference_bit_by_bit(monkeypatch):
    rng = np.random.default_rng(1)
    g, q = (rng.standard_normal(3_000_000).astype(np.float32) for _ in range(2))
    reference = Reference(g)
    exact = Histogram()
    running = RunningComparison(exact, reference.energy, reference.norm1)
    for a, b in zip(np.array_split(g, 11), np.array_split(q, 11), strict=True):
        exact.add(a)
        running.add(a, b)
    found, _ = running.finish()
    whole = reference.compare(q)
    for name in ("squared_error", "mean_abs_error", "mean_relative_error", "cosine", "sparsity", "snr_db"):
        assert getattr(found, name) == getattr(whole, name), name
    assert found.w1 == pytest.approx(whole.w1, rel=1e-3)


def test_rows_do_not_hang_on_how_many_encodings_share_a_pass(trace, monkeypatch):
    specs = ["qsgd:bits=3,bucket_size=256", "fp:e4m3"]
    one = gtrace.run_sweep(trace, specs, draws=3, jobs=1, chunk=CHUNK)
    monkeypatch.setattr(draws, "_TOGETHER", 2)
    assert rows_of(gtrace.run_sweep(trace, specs, draws=3, jobs=1, chunk=CHUNK)) == rows_of(one)
