"""One compile policy for all kernels: nogil, cached, IEEE semantics (never fastmath)."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numba
from numba.core import config

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., Any]")


@cache
def cache_folder() -> str:
    """The folder of compiled kernels, named by a digest of every kernel's source.

    numba notices a change only in the file of the cached function itself; a helper edited in another file
    would keep its old machine code. A folder per digest cannot go stale.
    """
    if config.CACHE_DIR:
        return str(config.CACHE_DIR)
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return str(root / "gtrace" / f"kernels-{digest.hexdigest()}")


def jit(function: F) -> F:
    """Compile on first call with the package's policy.

    Division by zero follows IEEE instead of raising: a check in the loop would stop vectorization.
    """
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    try:
        compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
    finally:
        config.CACHE_DIR = before
    return compiled


def jit_slp(function: F) -> F:
    """Like :func:`jit`, with LLVM's vectorizer of straight-line code: the adds to one row of a table become one.

    The switch is global and read while compiling, so it is set around each compilation alone.
    """
    compiled: Any = jit(function)
    compile_plain = getattr(compiled, "compile", None)
    if compile_plain is None:  # compilation is switched off
        return compiled

    def compile_slp(signature: Any) -> Any:
        before = config.SLP_VECTORIZE
        config.SLP_VECTORIZE = 1
        try:
            return compile_plain(signature)
        finally:
            config.SLP_VECTORIZE = before

    compiled.compile = compile_slp
    return compiled


def inline(function: F) -> F:
    """A helper that kernels call; it is compiled into them and never on its own."""
    compiled: F = numba.njit(nogil=True, error_model="numpy")(function)
    return compiled
