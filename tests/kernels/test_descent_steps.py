"""Small kernels of fits, against the same in numpy."""

import numpy as np
import pytest

from gtrace.fitting.laws import SketchLaw
from gtrace.fitting.levels import gradient_descent
from gtrace.kernels import descent, interval_sums, optimal
from gtrace.sketch import MomentSketch


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("room", [1, 4, 50])
def test_distinct_values(dtype, room):
    rng = np.random.default_rng(room)
    x = np.sort(rng.choice(rng.standard_normal(30), 5000, p=np.arange(30) / 435)).astype(dtype)
    for low, high in ((x[0], x[-1]), (x[0] - 1.0, x[-1]), (x[0], x[-1] + 1.0), (-9.0, 9.0)):
        for values in (x, x[:0], x[:1]):
            ends = [float(low), float(high)] if values is not x[:1] else [float(x[0]), float(high)]
            found = np.empty(room)
            count = interval_sums.distinct(values, *ends, found)
            assert found[:count].tolist() == np.unique([*values, *ends])[:room].tolist()


def random_grid(rng, count, mirrored):
    levels = np.sort(rng.random(count)) ** 2
    levels[-1] = 1.0
    if not mirrored:
        levels[0] = 0.0
    return levels


class Twin:
    """The law of a sketch in plain numpy, on sums that the kernel of hinges gives."""

    def __init__(self, law):
        self._law = law

    def gradient(self, levels, mirrored):
        edges = np.concatenate([[0.0], levels]) if mirrored else levels
        sums = np.empty((edges.size, 2))
        descent.hinges(self._law._table, self._law._zeros, edges, sums)
        below, area = sums.T
        reach, (mean, square) = edges[2:] - edges[:-2], self._law._moments
        slopes = reach * below[1:-1] - (area[2:] - area[:-2])
        objective = reach @ area[1:-1] + (1.0 + edges[-2]) * mean - square - edges[-2]
        if mirrored:
            objective += levels[0] * area[1]
            slopes[:1] += levels[0] * below[1] + area[1]
        return objective, slopes


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("count", [2, 3, 9, 64])
def test_gradient_and_descent_are_those_of_plain_numpy(mirrored, count):
    rng = np.random.default_rng(3)
    law = SketchLaw(MomentSketch.of(rng.standard_t(3, 3000) * (rng.random(3000) < 0.8), "l2", 256))
    levels = random_grid(rng, count, mirrored)
    error, slopes = law.gradient(levels, mirrored)
    plain = Twin(law).gradient(levels, mirrored)
    assert slopes.tolist() == plain[1].tolist()
    assert error == pytest.approx(plain[0], rel=1e-12, abs=1e-15)
    # Errors differ in their last digits, and so may the best step: the grids are as close as the descent settles.
    for limit in (1, 5, 3000):
        found, errors = gradient_descent(law, levels, mirrored, limit)
        wanted, history = gradient_descent(Twin(law), levels, mirrored, limit)
        assert found == pytest.approx(wanted, abs=3e-8)
        assert errors[:20] == pytest.approx(history[:20], rel=1e-9)
        assert errors[-1] == pytest.approx(history[-1], rel=1e-9)


@pytest.mark.parametrize("mirrored", [False, True])
def test_the_largest_move_and_the_windows(mirrored):
    rng = np.random.default_rng(4)
    places = 0.45 * np.linspace(-1, 1, 9)
    for count in (2, 3, 9, 64):
        before, after = random_grid(rng, count, mirrored), random_grid(rng, count, mirrored)
        free = slice(0 if mirrored else 1, -1)
        gaps = np.diff(after, prepend=0.0) if mirrored else np.diff(after)
        shares = np.abs(after - before)[free] / np.minimum(gaps[:-1], gaps[1:])
        assert descent.largest_move(before, after, mirrored) == max(shares, default=0.0)
        below, above = np.diff(after, prepend=0.0), np.diff(after, append=1.0)
        for room in (below, above):
            room[-1] = 0.0
            if not mirrored:
                room[0] = 0.0
        points = np.empty((count, 9))
        descent.windows(after, mirrored, places, points)
        assert (points == after[:, None] + np.where(places < 0, below[:, None], above[:, None]) * places).all()


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("size", [3, 40, 700])
def test_the_best_points_before_each_are_those_of_a_plain_program(mirrored, size):
    rng = np.random.default_rng(size)
    points = np.unique(np.concatenate([rng.random(size), [1.0] if mirrored else [0.0, 1.0]]))
    areas = np.maximum(points[:, None] - rng.random(90) ** 2, 0).mean(axis=1)
    n, m = points.size, min(points.size, 12)
    cost = 2.0 * points * areas if mirrored else np.where(np.arange(n) > 0, np.inf, 0.0)
    steps = (points[:, None] - points) * (areas + areas[:, None])
    steps[np.triu_indices(n)] = np.inf
    came = optimal.best_before(points, areas, mirrored, m)
    for k in range(1, m):
        total = cost + steps
        assert came[k, k:].tolist() == total[k:].argmin(axis=1).tolist()
        cost = np.where(np.arange(n) >= k, total.min(axis=1), np.inf)
