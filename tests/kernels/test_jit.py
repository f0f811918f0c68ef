"""Kernels that come from the cache of compiled code."""

import itertools
import os
import subprocess
import sys

import pytest

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
print(sum(squares.stats.cache_misses.values()), "numba.np.arraymath" in sys.modules, file=sys.stderr)
"""


@pytest.fixture
def use(tmp_path):
    """Starts a process that uses a kernel with two signatures; it says how many it compiled."""
    (tmp_path / "own_kernels.py").write_text(KERNELS)
    (tmp_path / "use.py").write_text(USE)
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, *sys.path))),
    }
    env.pop("NUMBA_CACHE_DIR", None)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return lambda name="use.py", *args: subprocess.Popen([sys.executable, tmp_path / name, *args], env=env, **pipes)


def test_a_kernel_from_the_cache_does_what_it_did_when_it_was_compiled(use):
    (cold, said), (warm, then) = (use().communicate() for _ in range(2))
    assert warm == cold != ""
    # Only a process that compiles loads what compiling needs.
    assert (said, then) == ("2 True\n", "0 False\n")


def test_processes_that_want_a_kernel_at_once_compile_it_once(use):
    found = [process.communicate() for process in [use() for _ in range(3)]]
    assert len({out for out, _ in found}) == 1
    assert sum(int(said.split()[0]) for _, said in found) == 2


FAIL = """
import subprocess, sys
from own_kernels import squares

try:
    squares("text")
except Exception as error:
    print(type(error).__name__)
print(subprocess.run([sys.executable, sys.argv[1]], timeout=60, capture_output=True, text=True).stderr)
"""


def test_a_process_that_could_not_compile_a_kernel_lets_others_do_so(use, tmp_path):
    (tmp_path / "fail.py").write_text(FAIL)
    said, error = use("fail.py", tmp_path / "use.py").communicate()
    assert said == "TypingError\n2 True\n\n", error


def test_a_process_that_compiles_for_long_says_so_once(monkeypatch, caplog):
    monkeypatch.setattr(_jit, "_compiled", itertools.count(_jit._MANY - 1))
    for factor in range(3):
        _jit._dispatcher(lambda x, factor=factor: factor * x)(2)
    assert caplog.messages == ["gtrace: compiling kernels, once on this machine: up to a minute"]
