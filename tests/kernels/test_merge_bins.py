import numpy as np
import pytest

from gtrace.kernels.sketching import COLUMNS, merge_bins


def bins(random, count):
    return np.sort(random.choice(300, count, replace=False)).astype(np.int32), random.random((count, COLUMNS))


@pytest.mark.parametrize(("first", "second"), [(0, 0), (0, 5), (7, 0), (1, 1), (40, 200), (300, 300), (300, 3)])
def test_merging_is_adding_by_number(first, second):
    random = np.random.default_rng([first, second])
    rows_a, sums_a = bins(random, first)
    rows_b, sums_b = bins(random, second)
    table = np.zeros((300, COLUMNS))
    table[rows_a] += sums_a
    table[rows_b] += sums_b
    rows, sums = np.empty(first + second, np.int32), np.empty((first + second, COLUMNS))
    count = merge_bins(rows_a, sums_a, rows_b, sums_b, rows, sums)
    np.testing.assert_array_equal(rows[:count], np.union1d(rows_a, rows_b))
    np.testing.assert_array_equal(sums[:count], table[rows[:count]])
