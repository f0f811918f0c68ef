"""Kernels that come from the cache of compiled code."""

import itertools
import os
import subprocess
import sys

from gtrace.kernels import _jit

KERNELS = """
import numpy as np
from gtrace.kernels._jit import inline, jit

@inline
def square(x):
    return x * x

@jit
def squares(values):
    if values.size == 0:
        raise ValueError("no values")
    out = np.empty(values.size, values.dtype)
    for k in range(out.size):
        out[k] = square(values[k])
    return out, out.sum()
"""
USE = """
import sys
from own_kernels import np, squares

print(squares(np.arange(6.0)), squares(np.arange(3)))
try:
    squares(np.empty(0))
except ValueError as error:
    print(error)
print(sum(squares.stats.cache_hits.values()) > 0, "numba.np.arraymath" in sys.modules, file=sys.stderr)
"""


def test_a_kernel_from_the_cache_does_what_it_did_when_it_was_compiled(tmp_path):
    (tmp_path / "own_kernels.py").write_text(KERNELS)
    (tmp_path / "use.py").write_text(USE)
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *sys.path))),
    }
    env.pop("NUMBA_CACHE_DIR", None)
    command = [sys.executable, tmp_path / "use.py"]
    cold, warm = (subprocess.run(command, env=env, capture_output=True, text=True, check=True) for _ in range(2))
    assert warm.stdout == cold.stdout != ""
    # Only a process that compiles loads what compiling needs.
    assert (cold.stderr, warm.stderr) == ("False True\n", "True False\n")


def test_a_process_that_compiles_for_long_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(_jit, "_compiled", itertools.count(_jit._MANY - 1))
    for factor in range(3):
        _jit._dispatcher(lambda x, factor=factor: factor * x)(2)
    assert caplog.messages == ["gtrace: compiling kernels, once on this machine: up to a minute"]
