"""Traces made up for tests: every gradient follows from its tensor and step, so any of them can be checked alone."""

import json
import zlib
from contextlib import contextmanager
from functools import lru_cache
from itertools import zip_longest

import numpy as np
import pytest

from gtrace.errors import TraceError
from gtrace.trace import Trace, create_trace, open_trace
from gtrace.trace.rows import row_statistics

SUFFIXES = (".zarr", ".h5")

#: name -> shape; a bias, a matrix, one whose rows fill chunks of their own, and a scalar
SHAPES = {"fc.bias": (7,), "fc.weight": (7, 31), "embed/weight": (180, 200), "scale": ()}
#: name -> steps at which it is absent
ABSENT = {"fc.weight": {1, 2}, "scale": {0, 1, 9}}
STEPS = (0, 1, 2, 4, 8, 9)


@lru_cache(400)
def gradient(name, step, shape=None):
    rng = np.random.default_rng([step, zlib.crc32(name.encode())])
    made = np.asarray(rng.standard_normal(SHAPES[name] if shape is None else shape) * 1e-3, np.float32)
    made.flags.writeable = False
    return made


def loss(step):
    return 2.5 / (step + 1)


def present(name, steps=STEPS):
    """The steps at which a tensor is there."""
    return [step for step in steps if step not in ABSENT.get(name, ())]


def write_trace(path, steps=STEPS, **options):
    """Write the made-up trace and close it."""
    with create_trace(path, **options) as writer:
        write_steps(writer, steps)
    return path


def write_arrays(path, tensors, losses=(), attrs=None, **about):
    """Write a trace of ``{name: {step: array}}`` or ``{name: array}`` and close it; every step is committed."""
    by_step = {name: values if isinstance(values, dict) else {0: values} for name, values in tensors.items()}
    steps = sorted({step for values in by_step.values() for step in values})
    with create_trace(path, attrs=attrs) as writer:
        for step, told in zip_longest(steps, losses):
            for name, values in by_step.items():
                if step in values:
                    writer.append(step, name, values[step], **about)
            writer.commit(step, loss=told)
    return path


def write_steps(writer, steps=STEPS):
    for step in steps:
        for name in SHAPES:
            if present(name, [step]):
                writer.append(step, name, gradient(name, step))
        writer.commit(step, loss=loss(step), lr=0.1)


def memory_trace(steps=STEPS):
    """The made-up trace in memory."""
    tensors = {name: {step: gradient(name, step) for step in present(name, steps)} for name in SHAPES}
    return Trace.from_arrays(tensors, scalars={step: {"loss": loss(step), "lr": 0.1} for step in steps})


@contextmanager
def opened(backend, folder, steps=STEPS):
    """The made-up trace in a backend: ``.zarr``, ``.h5`` or ``memory``."""
    if backend == "memory":
        with memory_trace(steps) as trace:
            yield trace
    else:
        with open_trace(write_trace(folder / f"run{backend}", steps)) as trace:
            yield trace


def check_gradients(trace, steps):
    """Every gradient of the made-up trace, open or at a path, is there up to the given steps, and nothing else."""
    if not isinstance(trace, Trace):
        with open_trace(trace) as opened_here:
            check_gradients(opened_here, steps)
        return
    for name in SHAPES:
        expected = present(name, steps)
        if expected:
            assert trace.steps(name).tolist() == expected
    assert {info.name for info in trace.tensors} == {name for name in SHAPES if present(name, steps)}
    for info in trace.tensors:
        for step in trace.steps(info.name):
            if info.sketches:
                truth = row_statistics(gradient(info.name, step).ravel())
                assert trace.sketch_row(info.name, step, info.sketches).norm2 == truth.norm2
            else:
                np.testing.assert_array_equal(trace.read(info.name, step), gradient(info.name, step).ravel())


def read_all(path):
    """Read everything that a trace at this path has, and return its scalars."""
    with open_trace(path) as trace:
        assert trace.fingerprint
        for info in trace.tensors:
            assert trace.statistics(info.name)
            for step in trace.steps(info.name):
                trace.read(info.name, step)
        return trace.scalars()


def refused(path, *words, read=read_all):
    """Reading everything ends in a TraceError of one line that says these words."""
    with pytest.raises(TraceError) as error:
        read(path)
    message = str(error.value)
    assert (error.value.exit_code, message.isprintable()) == (3, True)
    for word in (str(path), *words):
        assert word in message, message


def edit_json(path, change):
    """Change a JSON file in place."""
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
