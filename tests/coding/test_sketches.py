import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gtrace.coding.sketches import pack_sketch, unpack_sketch
from gtrace.errors import PayloadError
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
LARGEST = float(np.abs(VALUES).max())


def stored(sketch, mantissa):
    return unpack_sketch(pack_sketch(sketch, mantissa))


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_sketch_survives_storage(spec):
    sketch = MomentSketch.from_spec(VALUES, spec)
    levels = np.concatenate([[0.0], np.geomspace(0.003, 1, 7)])
    levels *= LARGEST if spec.norm == "none" else 1.0
    again, truth = stored(sketch, 10), sketch.expected_error(levels)
    assert again.spec == sketch.spec
    for name in ("zeros", "nonfinite", "size", "buckets", "exact", "exact_zeros", "clipped", "dead", "clip_error"):
        assert getattr(again, name) == getattr(sketch, name), name
    assert np.array_equal(again.rows, sketch.rows)
    assert np.array_equal(again.sums[:, 0], sketch.sums[:, 0])
    assert again.energy == pytest.approx(sketch.energy, rel=1e-9)
    assert again.expected_error(levels) == pytest.approx(truth, rel=1e-6)
    # Six bits of mantissa keep the expected error to a thousandth.
    again = stored(sketch, 6)
    assert again.expected_error(levels) == pytest.approx(truth, rel=1e-3)
    assert abs(again.expected_error(levels) - truth) <= again.error_bound(levels) + sketch.error_bound(levels)


def test_coarser_bins_are_the_sums_of_the_finer_ones():
    coarse = MomentSketch.from_spec(VALUES, SummarySpec("l2", 512)).coarsen(3)
    wide, starts = VALUES.astype(np.float64), range(0, VALUES.size, 512)
    norms = [np.float32(np.sqrt(np.sum(wide[k : k + 512] ** 2))) for k in starts]
    scale = np.repeat(norms, 512)[: VALUES.size][VALUES != 0].astype(np.float64)
    r = np.abs(wide[VALUES != 0]) / scale
    where = np.searchsorted(coarse.lower, r, side="right") - 1
    distance = r - coarse.lower[where]
    for k, column in enumerate((np.ones_like(r), distance, distance**2)):
        assert np.allclose(np.bincount(where, column, coarse.rows.size), coarse.sums[:, k], rtol=1e-4, atol=0)
        assert np.allclose(np.bincount(where, column * scale**2, coarse.rows.size), coarse.sums[:, 3 + k], rtol=1e-4)
    assert np.all(coarse.upper[:-1] <= coarse.lower[1:])
    assert np.log2(coarse.upper / coarse.lower).max() == pytest.approx(np.log2(9 / 8))


def test_merging_takes_the_wider_bins():
    halves = [MomentSketch.of(part, "none") for part in np.array_split(VALUES, 2)]
    whole, merged = MomentSketch.of(VALUES, "none").coarsen(5), halves[0].coarsen(5) + halves[1]
    assert merged.mantissa == 5
    assert np.array_equal(merged.rows, whole.rows)
    assert np.allclose(merged.sums, whole.sums, rtol=1e-9, atol=0)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [1e-45], [3.4e38, -3.4e38, 0], [np.nan, 1.0]])
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_odd_tensors(values, spec):
    sketch = MomentSketch.from_spec(np.array(values, np.float32), spec)
    again = stored(sketch, 10)
    assert (again.size, again.zeros, again.nonfinite) == (sketch.size, sketch.zeros, sketch.nonfinite)
    assert again.energy == pytest.approx(sketch.energy, rel=1e-6)


STORED = pack_sketch(MomentSketch.of(VALUES[:3000], "l2", 100))


@given(st.integers(0, len(STORED) - 1), st.integers(1, 255), st.binary(max_size=300))
def test_damage_is_noticed(at, flip, noise):
    flipped, anything = bytearray(STORED), b"GTS1" + noise
    flipped[at] ^= flip
    for data in (bytes(flipped), STORED[:at], anything + zlib.crc32(anything).to_bytes(4, "little")):
        with pytest.raises(PayloadError):
            unpack_sketch(data)
