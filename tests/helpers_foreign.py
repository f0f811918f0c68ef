"""Files of arrays as other programs write them, and damaged ones."""

import json

import numpy as np
from helpers_trace import gradient

from gtrace.trace import open_trace

#: name -> shape of the tensors of the made-up files
SHAPES = {"fc.weight": (7, 31), "fc.bias": (7,), "scale": ()}


def tensors(step):
    """The gradients of a step by name."""
    return {name: np.asarray(gradient(name, step, shape)) for name, shape in SHAPES.items()}


def write_safetensors(path, arrays, *, dtypes=None):
    """A safetensors file by the format's own words: no library, any type."""
    header, blobs, at = {}, [], 0
    for name, array in arrays.items():
        data = np.ascontiguousarray(array).tobytes()
        kind = (dtypes or {}).get(name) or {"float32": "F32", "float16": "F16", "int64": "I64"}[str(array.dtype)]
        header[name] = {"dtype": kind, "shape": list(np.shape(array)), "data_offsets": [at, at + len(data)]}
        blobs.append(data)
        at += len(data)
    return write_raw_safetensors(path, header, b"".join(blobs))


def write_raw_safetensors(path, header, data):
    """A safetensors file of this header, whatever it says."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def check_trace(path, steps, names=tuple(SHAPES), prefix=""):
    """The trace holds the made-up gradients of these steps, and nothing else."""
    with open_trace(path) as trace:
        assert trace.status == "complete"
        assert {info.name for info in trace.tensors} == {prefix + name for name in names}
        for info in trace.tensors:
            name = info.name.removeprefix(prefix)
            assert info.shape == SHAPES[name]
            assert trace.steps(info.name).tolist() == list(steps)
            for step in steps:
                np.testing.assert_array_equal(trace.read(info.name, step), tensors(step)[name].ravel())
