"""Precisions as they are written, and the levels that values are rounded to."""

import numpy as np
import pytest

from gtrace.codecs import split_specs
from gtrace.errors import UsageError
from gtrace_experiments.linear import Precision, column_levels, place
from gtrace_experiments.linear.levels import bits_per_value


@pytest.mark.parametrize(
    "spec",
    [
        "none",
        "naive:bits=5",
        "symmetrized:bits=6,quantize=samples+model+gradients",
        "double:bits=4,chebyshev=15,radius=24,gap=0.5",
        "naive:bits=8,refetch=jl,failure=0.00123456789,rows=128",
        "double:bits=5,quantize=samples+model,codec=ef:topk:ratio=0.1",
    ],
)
def test_specs_are_read_as_they_are_written(spec):
    assert str(Precision.parse(spec)) == spec
    assert split_specs(f"qsgd:bits=3,{spec},terngrad") == ["qsgd:bits=3", spec, "terngrad"]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("doubel:bits=3", "no precision or codec 'doubel'; did you mean double"),
        ("double:bits=1", "bits: 1 is out of range"),
        ("double:quantize=model", "sampling double does not go with model"),
        ("naive:chebyshev=3", "independent quantizations"),
        ("naive:refetch=jl,failure=0.7", "must be a probability below 0.5"),
        ("double:chebyshev=9,radius=0.1", "leaves nothing"),
        ("double:levels=best", "levels: 'best' is unknown"),
    ],
)
def test_what_cannot_be_is_said(spec, said):
    with pytest.raises(UsageError, match=said):
        Precision.parse(spec)


def test_uniform_levels_lie_on_either_side_of_zero():
    a = np.array([[1.0, -6.0, 0.0], [-3.0, 2.0, 0.0]], np.float32)
    levels = column_levels(a, 3, "uniform")
    assert levels[0].tolist() == [-3, -2, -1, 0, 1, 2, 3]
    assert levels[1].tolist() == [-6, -4, -2, 0, 2, 4, 6]
    assert levels[2].tolist() == [0]
    # Two bits are three levels: ceil((2^b - 1) / 2) positive ones would be one too many.
    assert len(column_levels(a, 2, "uniform")[0]) == 3


@pytest.mark.parametrize("rule", ["uniform", "optimal"])
def test_every_value_lies_between_its_levels(rule):
    a = np.random.default_rng(1).standard_t(2, (400, 3)).astype(np.float32)
    a[:, 2] = [1.5, 7.0] * 200  # fewer values than levels
    found = place(a, column_levels(a, 4, rule))
    for i in range(3):
        own, below = found.levels[i], found.index[:, i].astype(int)
        above = np.minimum(below + 1, len(own) - 1)
        assert ((own[below] <= a[:, i]) & (a[:, i] <= own[above] + (own[below] == a[:, i]) * 100)).all()
        mean = own[below] + found.part[:, i] * (own[above] - own[below])
        np.testing.assert_allclose(mean, a[:, i], rtol=1e-5, atol=1e-6)
        for level in (below, above):
            near = (found.part[:, i] > 0) | (level == below)
            assert (abs(a[near, i] - own[level[near]]) <= found.reach[i, level[near]] + 1e-12).all()


def test_nearest_levels_are_drawn_by_no_chance():
    a = np.random.default_rng(1).standard_normal((300, 2)).astype(np.float32)
    found = place(a, column_levels(a, 4, "uniform"), nearest=True)
    assert set(np.unique(found.part)) == {0.0, 1.0}
    for i in range(2):
        got = found.levels[i, found.index[:, i] + found.part[:, i].astype(int)]
        assert (abs(got - a[:, i]) == abs(found.levels[i][:, None] - a[:, i]).min(axis=0)).all()
        assert (abs(got - a[:, i]) <= found.reach[i].max() + 1e-12).all()
        assert found.reach[i].max() == pytest.approx(np.diff(found.levels[i]).max() / 2)


@pytest.mark.parametrize("bits", [2, 3, 8])
@pytest.mark.parametrize("draws", [1, 2, 3, 16])
def test_messages_are_counted_one_by_one(bits, draws):
    """The multisets that several draws of one value can be, over all values."""
    pairs = [(below, ups) for below in range(2**bits - 2) for ups in range(draws + 1)]
    messages = {tuple(sorted([below + 1] * ups + [below] * (draws - ups))) for below, ups in pairs}
    assert bits_per_value(bits, draws) == int(np.ceil(np.log2(len(messages))))
