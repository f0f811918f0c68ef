"""Exact optimal levels of sorted points, as ratios to np.sort of the same data and to the plain dynamic program.

The baseline is the layered program over all points, with prefix sums and divide and conquer over the monotone
best predecessor, compiled as our kernels are. It answers the same question on the same sorted points.
"""

import time
from dataclasses import replace

import numba
import numpy as np
import pytest

from gtrace import MomentSketch
from gtrace.fitting import alq_level_sets, certified_levels, objective, optimal_level_sets, optimal_levels


def best(function, repeats):
    """Least CPU seconds of several calls, after one to warm up."""
    function()
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return min(times)


@numba.njit(nogil=True, error_model="numpy")
def plain_program(x, s):
    """Least objective of s levels at points of sorted x, in O(s n log n) time."""
    n = x.size
    shifted = x.astype(np.float64) - x[n // 2]
    m1, m2 = np.zeros(n + 1), np.zeros(n + 1)
    for i in range(n):
        m1[i + 1] = m1[i] + shifted[i]
        m2[i + 1] = m2[i] + shifted[i] * shifted[i]
    before, now = np.empty(n), np.empty(n)
    for b in range(n):
        low, high = shifted[0], shifted[b]
        before[b] = (low + high) * (m1[b] - m1[0]) - (m2[b] - m2[0]) - low * high * b
    stack = np.empty((256, 4), np.int64)
    for _ in range(s - 2):
        now[0] = 0.0
        top = 1
        stack[0] = np.array([1, n - 1, 0, n - 2])
        while top:
            top -= 1
            first, last, low, high = stack[top]
            b = (first + last) // 2
            xb = shifted[b]
            least, place = np.inf, low
            for a in range(low, min(high, b - 1) + 1):
                xa = shifted[a]
                cost = before[a] + (xa + xb) * (m1[b] - m1[a]) - (m2[b] - m2[a]) - xa * xb * (b - a)
                if cost < least:
                    least, place = cost, a
            now[b] = least
            if first < b:
                stack[top] = np.array([first, b - 1, low, place])
                top += 1
            if b < last:
                stack[top] = np.array([b + 1, last, place, high])
                top += 1
        before, now = now, before
    return before[n - 1]


def sample(law, n):
    rng = np.random.default_rng(0)
    draws = {
        "student t3": lambda: rng.standard_t(3, n),
        "normal": lambda: rng.standard_normal(n),
        "lognormal3": lambda: rng.lognormal(0, 3, n),
    }
    return draws[law]().astype(np.float32)


@pytest.mark.parametrize("law", ["student t3", "normal", "lognormal3"])
@pytest.mark.parametrize(("n", "s"), [(10**6, 8), (10**6, 16), (10**6, 256), (10**7, 8), (10**7, 16)])
def test_exact_levels(benchmark, law, n, s):
    x = sample(law, n)
    repeats = 3 if n > 10**6 or s > 16 else 7
    sort = best(lambda: np.sort(x), repeats)
    x.sort()
    seconds = best(lambda: optimal_levels(x, s), repeats)
    certified = best(lambda: certified_levels(x, s), repeats)
    benchmark.extra_info.update(
        milliseconds=round(seconds * 1e3, 2), sorts=round(seconds / sort, 2), certified_sorts=round(certified / sort, 2)
    )
    print(f"\nlevels {law} n={n:.0e} s={s}: {dict(benchmark.extra_info)}")
    benchmark.pedantic(lambda: optimal_levels(x, s), rounds=3, iterations=1)


@pytest.mark.parametrize(("n", "s"), [(10**5, 8), (10**6, 8)])
def test_plain_program(benchmark, n, s):
    x = np.sort(sample("student t3", n))
    plain = best(lambda: plain_program(x, s), 1)
    seconds = best(lambda: optimal_levels(x, s), 7)
    assert objective(x, optimal_levels(x, s)) == pytest.approx(plain_program(x, s), rel=1e-6)
    benchmark.extra_info.update(plain_milliseconds=round(plain * 1e3), times_slower=round(plain / seconds))
    print(f"\nplain program n={n:.0e} s={s}: {dict(benchmark.extra_info)}")
    benchmark.pedantic(lambda: optimal_levels(x, s), rounds=3, iterations=1)


@pytest.mark.parametrize("s", [8, 16, 256])
def test_levels_of_a_sketch(benchmark, s):
    v = sample("student t3", 10**6)
    sketch = MomentSketch.of(v, norm="linf")
    seconds = best(lambda: optimal_levels(sketch, s), 7)
    r = np.abs(v.astype(np.float64))
    r /= r.max()
    above = objective(r, optimal_levels(sketch, s)) / certified_levels(r, s, lo=0, hi=1)[1] - 1
    benchmark.extra_info.update(milliseconds=round(seconds * 1e3, 2), excess=f"{above:.1e}")
    print(f"\nsketch s={s}: {dict(benchmark.extra_info)}")
    benchmark.pedantic(lambda: optimal_levels(sketch, s), rounds=3, iterations=1)


@pytest.mark.parametrize(
    ("law", "sets", "numbers"), [("optimal", optimal_level_sets, (2, 4, 8, 16)), ("alq", alq_level_sets, (2, 3, 4, 5))]
)
def test_fits_of_a_sweep(benchmark, law, sets, numbers):
    """4,700 fits: 1,175 sketches of 256 to 262,144 values, each with the levels of 2 to 5 bits."""
    rng = np.random.default_rng(0)
    sizes = [256 << (2 * (k % 6)) for k in range(1175)]
    scales = [("l2", None), ("linf", 512), ("l2", 8192)]
    sketches = [MomentSketch.of(rng.standard_t(3, size), *scales[k % 3]) for k, size in enumerate(sizes)]

    def fit():
        for sketch in sketches:
            # without the results of the call before
            sets(replace(sketch).alone, numbers)

    values = rng.standard_normal(10**6)
    sort = best(lambda: np.sort(values), 3)
    seconds = best(fit, 3)
    benchmark.extra_info.update(
        seconds=round(seconds, 2), microseconds_a_fit=round(seconds / 4700 * 1e6), sorts=round(seconds / sort, 1)
    )
    print(f"\n{law} levels of 1,175 sketches: {dict(benchmark.extra_info)}")
    benchmark.pedantic(fit, rounds=1, iterations=1)
