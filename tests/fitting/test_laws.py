"""The laws behind the fits: integrals over cells, derivatives, dynamic programming, the moments of buckets."""

import itertools

import numpy as np
import pytest
from helpers_fitting import MIXTURES, around, magnitude_density, quadrature, sampled_error, true_objective

from gtrace.distributions import TruncatedNormalMixture
from gtrace.errors import UsageError
from gtrace.fitting import expected_variance
from gtrace.fitting.laws import SketchLaw, as_law, bucket_moments, moment_mixture
from gtrace.fitting.levels import exponential_grid, named_grid, uniform_grid
from gtrace.kernels import descent, mixture
from gtrace.sketch import MomentSketch
from gtrace.types import SummarySpec

GRIDS = {True: np.array([0.0, 0.004, 0.03, 0.11, 0.3, 1.0]), False: np.array([0.004, 0.03, 0.11, 0.3, 1.0])}


def heavy(n=20000, seed=3):
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def all_laws():
    yield from ((f"mixture {name}", as_law(law)) for name, law in MIXTURES.items())
    with_zeros = heavy() * (np.random.default_rng(4).random(20000) < 0.7)
    for weighted in (True, False):
        yield f"sketch {weighted}", as_law(MomentSketch.of(with_zeros, bucket_size=1024), weighted=weighted)


LAWS = dict(all_laws())


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_the_objective_of_a_mixture_is_its_integral(name, zero):
    law = MIXTURES[name]
    for grid in (GRIDS[zero], uniform_grid(4, zero), exponential_grid(4, zero)):
        assert expected_variance(law, grid, zero) == pytest.approx(true_objective(law, grid, zero), rel=1e-10)


@pytest.mark.parametrize("edges", [(0.0, 1e-7), (0.05, 0.0500001), (0.2, 0.9), (0.0, 1.0), (0.85, 1.0)])
@pytest.mark.parametrize("name", MIXTURES)
def test_cells_keep_their_digits_however_narrow_and_far_out(name, edges):
    law = MIXTURES[name]
    a, b = edges
    out = np.empty((1, 4))
    mixture.cells(as_law(law)._table, np.array(edges), out)
    breaks = around(law)
    assert out[0, 0] == pytest.approx(quadrature(lambda r: magnitude_density(law, r), a, b, breaks), rel=1e-10)
    # (r - a) and (b - r) lose digits in the quadrature of a cell of 1e-7, not in the kernel
    tolerance = 1e-10 if b - a > 1e-3 else 1e-6
    for column, f in enumerate((lambda r: r - a, lambda r: b - r, lambda r: (b - r) * (r - a)), start=1):
        expected = quadrature(lambda r: f(r) * magnitude_density(law, r), a, b, breaks)  # noqa: B023
        assert out[0, column] == pytest.approx(expected, rel=tolerance)
    assert out[0, 1] + out[0, 2] == pytest.approx((b - a) * out[0, 0], rel=1e-13)


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("name", LAWS)
def test_gradients_are_differences_of_objectives(name, mirrored):
    law, levels = LAWS[name], GRIDS[not mirrored]
    objective, slopes = law.gradient(levels, mirrored)
    assert law.objectives(levels[None], mirrored)[0] == pytest.approx(objective, rel=1e-13)
    first = 0 if mirrored else 1
    assert slopes.size == levels.size - 1 - first
    for i, slope in enumerate(slopes):
        step = np.zeros(levels.size)
        step[first + i] = 1e-6
        above, below = law.objectives(np.stack([levels + step, levels - step]), mirrored)
        assert slope == pytest.approx((above - below) / 2e-6, rel=1e-4, abs=1e-9)


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("name", MIXTURES)
def test_curvatures_are_differences_of_gradients(name, mirrored):
    law, levels = as_law(MIXTURES[name]), GRIDS[not mirrored]
    diagonal, coupling = law.curvature(levels, mirrored)
    n = diagonal.size
    hessian = np.diag(diagonal) + np.diag(coupling, 1) + np.diag(coupling, -1)
    for i in range(n):
        step = np.zeros(levels.size)
        step[i + (0 if mirrored else 1)] = 1e-7
        difference = law.gradient(levels + step, mirrored)[1] - law.gradient(levels - step, mirrored)[1]
        assert hessian[i] == pytest.approx(difference / 2e-7, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("name", LAWS)
def test_a_sweep_puts_each_level_at_its_best_place(name, mirrored):
    law, levels = LAWS[name], GRIDS[not mirrored].copy()
    before = law.gradient(levels, mirrored)[0]
    law.sweep(levels, mirrored)
    assert (np.diff(levels) > 0).all()
    assert levels[-1] == 1.0
    assert law.gradient(levels, mirrored)[0] <= before
    # The last free level was moved last, so it is still at its best place.
    tried = np.linspace(levels[-3], 1.0, 4001)[1:-1]
    grids = np.repeat(levels[None], tried.size, axis=0)
    grids[:, -2] = tried
    reached = law.gradient(levels, mirrored)[0]
    assert reached <= law.objectives(grids, mirrored).min() * (1 + 1e-12) + 1e-15


@pytest.mark.parametrize("name", LAWS)
def test_areas_are_the_hinge_and_convex(name):
    law = LAWS[name]
    points = np.array([0.5, 0.0, 0.01, 1.0, 0.1, 0.01])
    areas = law.areas(points)
    assert (areas[1], areas[2]) == (0.0, areas[5])
    assert (np.diff(law.areas(np.linspace(0, 1, 101)), 2) >= -1e-15).all()
    if name in ("mixture shifted", "mixture half"):
        source = MIXTURES[name.split()[1]]
        for t, area in zip(points, areas, strict=True):
            expected = quadrature(
                lambda r: (t - r) * magnitude_density(source, r),  # noqa: B023
                0.0,
                t,
                around(source),
            )
            assert area == pytest.approx(expected, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_a_sketch_law_is_what_the_sketch_expects(weighted, zero):
    values = heavy() * (np.random.default_rng(1).random(20000) < 0.6)
    sketch = MomentSketch.of(values, bucket_size=4096)
    law = SketchLaw(sketch, weighted=weighted)
    on_edges = np.array([*([0.0] if zero else []), 2.0**-9, 2.0**-6, 2.0**-4, 1.0])
    for grid, tolerance in ((on_edges, 1e-12), (GRIDS[zero], 1e-6)):
        objective = law.gradient(grid, not zero)[0]
        assert objective == pytest.approx(expected_variance(sketch, grid, zero, weighted), rel=1e-12)
        assert objective == pytest.approx(sampled_error(values, 4096, grid, zero, weighted), rel=tolerance)


def test_uniform_and_exponential_grids():
    assert uniform_grid(4, True) == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert uniform_grid(4, False) == pytest.approx([1 / 7, 3 / 7, 5 / 7, 1])
    assert exponential_grid(4, True).tolist() == [0, 0.25, 0.5, 1]
    assert exponential_grid(3, False, 0.1) == pytest.approx([0.01, 0.1, 1])
    signed = as_law(MIXTURES["one"], symmetric=False)
    assert named_grid(signed, "uniform", 4, False) == pytest.approx([-1, -1 / 3, 1 / 3, 1])
    assert named_grid(signed, "exponential", 4, False) == pytest.approx([-1, -0.5, 0.5, 1])
    half = as_law(MIXTURES["half"], symmetric=False)
    assert named_grid(half, "exponential", 4, False) == pytest.approx([0, 0.25, 0.5, 1])


@pytest.mark.parametrize("mirrored", [True, False])
def test_choosing_is_as_good_as_trying_all(mirrored):
    rng = np.random.default_rng(8)
    for _ in range(20):
        values = rng.random(12)
        points = np.unique(np.concatenate([rng.random(8), [1.0] if mirrored else [0.0, 1.0]]))
        areas = np.maximum(points[:, None] - values, 0).sum(axis=1)

        def cost(grid, at):
            reach = np.concatenate([[-grid[0] if mirrored else grid[0]], grid, grid[-1:]])
            return float(np.sum((reach[2:] - reach[:-2]) * at))

        inner = range(0 if mirrored else 1, points.size - 1)
        for free in (1, 2, 3):
            best = min(
                cost(points[list(chosen)], areas[list(chosen)])
                for some in itertools.combinations(inner, free)
                for chosen in [(*(() if mirrored else (0,)), *some, points.size - 1)]
            )
            found = np.empty(free + (1 if mirrored else 2), np.int64)
            descent.choose(points, areas, mirrored, found)
            assert cost(points[found], areas[found]) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("mirrored", [True, False])
def test_choosing_many_levels_is_as_good_as_layer_by_layer(mirrored, few):
    """Of few values, most candidates save nothing: no price per level makes as many levels."""
    rng = np.random.default_rng(9)
    values = rng.choice(rng.random(20), 2000) if few else rng.random(2000) ** 3
    points = np.unique(np.concatenate([rng.random(200) ** 2, [1.0] if mirrored else [0.0, 1.0]]))
    areas = np.maximum(points[:, None] - values, 0).mean(axis=1)
    cells = np.triu(np.subtract.outer(points, points).T * np.add.outer(areas, areas), 1)
    cells[np.tril_indices(points.size)] = np.inf
    least = 2 * points * areas if mirrored else np.where(points == 0, 0.0, np.inf)
    for m in range(2, points.size + 1):
        least = (least[:, None] + cells).min(axis=0)
        if m > descent.LAYERS and (m % 16 == 1 or m >= points.size - 2):
            found = np.empty(m, np.int64)
            descent.choose(points, areas, mirrored, found)
            first = 2 * points[found[0]] * areas[found[0]] if mirrored else points[found[0]]
            assert first + cells[found[:-1], found[1:]].sum() == pytest.approx(least[-1], rel=1e-13)
            assert found[-1] == points.size - 1


@pytest.mark.parametrize("mirrored", [True, False])
def test_choosing_near_is_as_good_as_trying_all(mirrored):
    law = LAWS["mixture shifted"]
    levels = GRIDS[not mirrored][-4:].copy()
    if not mirrored:
        levels[0] = 0.0
    steps = np.array([-0.2, 0.0, 0.2])
    gaps = np.diff(levels, prepend=0.0)
    points = levels[:, None] + gaps[:, None] * steps
    points[-1] = 1.0
    if not mirrored:
        points[0] = 0.0
    areas = law.areas(points.reshape(-1)).reshape(points.shape)
    found = np.empty(levels.size)
    descent.choose_near(points, areas, mirrored, found)
    every = np.array([grid for grid in itertools.product(*points) if (np.diff(grid) > 0).all()])
    assert law.objectives(found[None], mirrored)[0] == pytest.approx(law.objectives(every, mirrored).min(), rel=1e-10)


def test_tridiagonal_systems():
    rng = np.random.default_rng(0)
    coupling = -rng.random(6)
    diagonal = 2.0 + rng.random(7)
    right = rng.standard_normal(7)
    matrix = np.diag(diagonal) + np.diag(coupling, 1) + np.diag(coupling, -1)
    solved = right.copy()
    assert descent.solve_tridiagonal(diagonal.copy(), coupling, solved)
    assert solved == pytest.approx(np.linalg.solve(matrix, right), rel=1e-12)
    # Where a Newton step would climb, the solution still descends.
    indefinite = matrix - np.diag(diagonal - 0.1)
    values, vectors = np.linalg.eigh(indefinite)
    assert values[0] < 0
    direction = vectors[:, 0].copy()
    assert descent.solve_tridiagonal(np.full(7, 0.1), coupling, direction)
    assert direction @ vectors[:, 0] > 0
    assert not descent.solve_tridiagonal(np.array([1.0, 0.0]), np.array([0.1]), np.ones(2))


def test_what_is_no_law_is_refused():
    with pytest.raises(UsageError, match="not ndarray"):
        as_law(np.ones(3))
    with pytest.raises(UsageError, match="norm none"):
        as_law(MomentSketch.of(np.ones(3), norm="none"))
    with pytest.raises(UsageError, match="no signs; zero=None needs a mixture"):
        as_law(MomentSketch.of(np.ones(3)), symmetric=False)


def test_variance_asks_for_levels_that_cover_the_law():
    law = MIXTURES["one"]
    with pytest.raises(UsageError, match="cover"):
        expected_variance(law, [0.0, 0.5])
    with pytest.raises(UsageError, match=r"0 to 0\.5 do not cover"):
        expected_variance(MomentSketch.of([3.0, -4.0]), [0.0, 0.5])
    with pytest.raises(UsageError, match="first level must be 0"):
        expected_variance(law, [0.5, 1.0])
    inner = TruncatedNormalMixture([0.0], [0.1], [1.0], support=(-0.25, 0.5))
    assert expected_variance(inner, [0.0, 0.5]) > 0
    assert expected_variance(MomentSketch.of([]), [0.0, 1.0]) == 0.0


@pytest.mark.parametrize(
    ("norm", "bucket", "tail"), [("l2", 64, "quantized"), ("linf", 300, "exact"), ("l2", None, "quantized")]
)
def test_moments_of_buckets(norm, bucket, tail):
    values = (3 + heavy(1000)).astype(np.float32)
    values[:64] = 0.0
    values[70] = np.nan
    got = bucket_moments(values, SummarySpec(norm, bucket, tail))
    clean = np.nan_to_num(values)
    size = bucket or clean.size
    starts = [s for s in range(0, clean.size, size) if tail == "quantized" or s + size <= clean.size]
    assert len(got) == len(starts)
    for row, start in zip(got, starts, strict=True):
        v = clean[start : start + size].astype(np.float64)
        scale = np.float64(np.float32(np.sqrt(v @ v) if norm == "l2" else np.abs(v).max()))
        assert row[2] == scale
        if scale == 0:
            assert row.tolist() == [0, 0, 0]
        else:
            assert row[0] == pytest.approx(np.mean(v / scale), rel=1e-13)
            assert row[1] == pytest.approx(np.std(v / scale, ddof=1), rel=1e-13)


def test_moments_of_buckets_that_are_all_but_constant():
    values = (1000 + np.random.default_rng(0).random(4096) * 1e-3).astype(np.float32)
    _, sigma, scale = bucket_moments(values, SummarySpec("l2", None))[0]
    assert sigma == pytest.approx(np.std(values.astype(np.float64), ddof=1) / scale, rel=1e-12)
    assert bucket_moments(np.full(64, 7.0), SummarySpec("l2", None))[0] == pytest.approx([0.125, 0.0, 56.0])
    assert bucket_moments([5.0], SummarySpec("l2", None))[0].tolist() == [1.0, 0.0, 5.0]
    assert bucket_moments([], SummarySpec("l2", 8)).shape == (0, 3)
    assert bucket_moments([1.0, -1.0, 1.0, 9.0], SummarySpec("linf", None, clip=1.0))[0, 2] < 9


def test_the_law_of_the_papers():
    moments = bucket_moments(heavy(64 * 50), SummarySpec("l2", 64))
    law = moment_mixture(moments, components=None)
    assert (law.means, law.sigmas) == (pytest.approx(moments[:, 0]), pytest.approx(moments[:, 1]))
    assert law.weights == pytest.approx(moments[:, 2] ** 2 / np.sum(moments[:, 2] ** 2))
    assert moment_mixture(moments, None, weighted=False).weights == pytest.approx(np.full(50, 1 / 50))
    drawn = moment_mixture(moments, 20, seed=1)
    assert drawn.means.size == 20
    assert set(drawn.means) <= set(moments[:, 0])
    assert (drawn.means == moment_mixture(moments, 20, seed=1).means).all()
    assert (drawn.means != moment_mixture(moments, 20, seed=2).means).any()
    mean = moment_mixture(moments, mean_only=True)
    assert (mean.means.item(), mean.sigmas.item()) == pytest.approx(moments[:, :2].mean(axis=0))
