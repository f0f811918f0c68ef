import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError, UsageError
from gtrace.sketch import MomentSketch
from gtrace.types import SummarySpec

SPECS = [
    SummarySpec("l2", None),
    SummarySpec("l2", 512),
    SummarySpec("linf", 512, "exact"),
    SummarySpec("l1", 100, "quantized", 2.5),
    SummarySpec("none", None),
]
VALUES = np.random.default_rng(7).lognormal(-8, 2, 100_003).astype(np.float32)
VALUES[::7] *= -1
VALUES[::50] = 0
LEVELS = {bits: np.concatenate([[0.0], np.geomspace(0.003, 1, 2 ** (bits - 1) - 1)]) for bits in (3, 4)}


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_sketch_survives_storage_at_full_width(spec):
    sketch = MomentSketch.from_spec(VALUES, spec)
    again = unpack_sketch(pack_sketch(sketch, 10))
    assert again.spec == sketch.spec
    for name in ("zeros", "nonfinite", "size", "buckets", "exact", "exact_zeros", "clipped", "dead", "clip_error"):
        assert getattr(again, name) == getattr(sketch, name), name
    assert np.array_equal(again.rows, sketch.rows)
    assert np.array_equal(again.sums[:, 0], sketch.sums[:, 0])
    assert again.energy == pytest.approx(sketch.energy, rel=1e-9)
    levels = LEVELS[4] * (float(np.abs(VALUES).max()) if spec.norm == "none" else 1.0)
    assert again.expected_error(levels) == pytest.approx(sketch.expected_error(levels), rel=1e-6)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("bits", LEVELS)
def test_six_bits_of_mantissa_keep_the_expected_error_to_a_thousandth(spec, bits):
    sketch = MomentSketch.from_spec(VALUES, spec)
    again = unpack_sketch(pack_sketch(sketch, 6))
    levels = LEVELS[bits] * (float(np.abs(VALUES).max()) if spec.norm == "none" else 1.0)
    truth = sketch.expected_error(levels)
    assert again.expected_error(levels) == pytest.approx(truth, rel=1e-3)
    assert abs(again.expected_error(levels) - truth) <= again.error_bound(levels) + sketch.error_bound(levels)


def test_coarser_bins_are_the_sums_of_the_finer_ones():
    sketch = MomentSketch.from_spec(VALUES, SummarySpec("l2", 512))
    coarse = sketch.coarsen(3)
    r = np.abs(VALUES[VALUES != 0].astype(np.float64))
    scale = np.repeat(
        [np.float32(np.sqrt(np.sum(VALUES[k : k + 512].astype(np.float64) ** 2))) for k in range(0, VALUES.size, 512)],
        512,
    )[: VALUES.size][VALUES != 0].astype(np.float64)
    r /= scale
    where = np.searchsorted(coarse.lower, r, side="right") - 1
    distance = r - coarse.lower[where]
    for k, column in enumerate((np.ones_like(r), distance, distance**2)):
        assert np.allclose(np.bincount(where, column, coarse.rows.size), coarse.sums[:, k], rtol=1e-4, atol=0)
        assert np.allclose(np.bincount(where, column * scale**2, coarse.rows.size), coarse.sums[:, 3 + k], rtol=1e-4)
    assert np.all(coarse.upper[:-1] <= coarse.lower[1:])
    assert np.log2(coarse.upper / coarse.lower).max() == pytest.approx(np.log2(9 / 8))


def test_merging_takes_the_wider_bins():
    halves = [MomentSketch.of(part, "none") for part in np.array_split(VALUES, 2)]
    whole = MomentSketch.of(VALUES, "none").coarsen(5)
    merged = halves[0].coarsen(5) + halves[1]
    assert merged.mantissa == 5
    assert np.array_equal(merged.rows, whole.rows)
    assert np.allclose(merged.sums, whole.sums, rtol=1e-9, atol=0)


def test_the_catch_all_and_the_largest_value_keep_their_own_bins():
    values = np.array([1.0, 0.75, 1e-45, 3e-39], np.float32)
    sketch = MomentSketch.of(values, "linf").coarsen(2)
    assert sketch.sums[-1, 0] == 1
    assert sketch.lower[-1] == 1.0
    assert int(sketch.sums[:, 0].sum()) == 4


def test_a_stored_sketch_is_small_beside_a_large_tensor():
    values = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    stored = pack_sketch(MomentSketch.of(values, "l2", 8192))
    assert len(stored) < 0.02 * values.nbytes


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [1e-45], [3.4e38, -3.4e38, 0], [np.nan, 1.0]])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_odd_tensors(values, spec):
    sketch = MomentSketch.from_spec(np.array(values, np.float32), spec)
    again = unpack_sketch(pack_sketch(sketch, 10))
    assert (again.size, again.zeros, again.nonfinite) == (sketch.size, sketch.zeros, sketch.nonfinite)
    assert again.energy == pytest.approx(sketch.energy, rel=1e-6)


def test_what_cannot_be_stored_is_refused():
    sketch = MomentSketch.from_spec(VALUES, SummarySpec("l2", 512, bucket_moments=True))
    with pytest.raises(UsageError, match="bucket"):
        pack_sketch(sketch)
    with pytest.raises(UsageError, match="mantissa"):
        pack_sketch(MomentSketch.of(VALUES), 11)
    with pytest.raises(UsageError, match="mantissa"):
        MomentSketch.of(VALUES).coarsen(5).coarsen(6)


STORED = pack_sketch(MomentSketch.of(VALUES[:3000], "l2", 100))


@given(st.integers(0, len(STORED) - 1), st.integers(1, 255))
def test_a_damaged_byte_is_noticed(at, flip):
    data = bytearray(STORED)
    data[at] ^= flip
    with pytest.raises(PayloadError):
        unpack_sketch(bytes(data))


@given(st.integers(0, len(STORED) - 1))
def test_a_truncated_sketch_is_noticed(size):
    with pytest.raises(PayloadError):
        unpack_sketch(STORED[:size])


@given(st.binary(max_size=300))
def test_any_bytes_behind_a_right_checksum(data):
    import zlib

    body = b"GTS1" + data
    with pytest.raises(PayloadError):
        unpack_sketch(body + zlib.crc32(body).to_bytes(4, "little"))
