"""Small traces for sweeps."""

import numpy as np
import pytest

import gtrace

TENSORS = (("conv.weight", 3000), ("fc.weight", 700), ("fc.bias", 10))


def write_trace(path, *, steps=(0, 1, 2, 3), seed=0, tensors=TENSORS):
    rng = np.random.default_rng(seed)
    with gtrace.create_trace(path) as writer:
        for step in steps:
            for name, size in tensors:
                writer.append(step, name, (rng.standard_t(4, size) * 0.01).astype(np.float32))
            writer.commit(step, loss=1.0 / (step + 1), lr=0.1)
    return path


def rows_of(result):
    """Rows as plain tuples, NaN made comparable."""
    return [tuple(None if isinstance(v, float) and v != v else v for v in row.values()) for row in result.rows()]


def pick(result, **wanted):
    """The one row with these fields."""
    (row,) = (row for row in result.rows() if all(row[name] == value for name, value in wanted.items()))
    return row


def stop_sweep(count, *arguments, **options):
    """A sweep that is stopped when this many of its jobs are done."""

    def progress(done, _all):
        if done >= count:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        gtrace.run_sweep(*arguments, progress=progress, **options)


#: a codec of two plain functions, as a file of a user's has it
PLUGIN = """
import numpy as np

def compress(values):
    return values.astype("<f2").tobytes()

def decompress(data, size):
    return np.frombuffer(data, "<f2", size).astype(np.float32)
"""
