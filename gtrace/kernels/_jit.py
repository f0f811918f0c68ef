"""One compile policy for all kernels: nogil, cached, IEEE semantics (never fastmath).

A process that finds all its kernels in the cache compiles nothing. It loads their machine code alone. numba itself
would also load what compiling needs, and rebuild the intermediate code of each kernel, which takes most of the time.
"""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numba
from llvmlite import binding as llvm
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.compiler import compile_result
from numba.core.runtime import _nrt_python as runtime

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


@cache
def _name_runtime() -> None:
    """Give machine code the addresses of numba's memory management, as numba does before it compiles."""
    for name, address in runtime.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class _MachineCode(CompileResultCacheImpl):  # type: ignore[misc]
    """Stores machine code beside its intermediate code, and reads the latter only if another kernel is compiled."""

    def reduce(self, result: Any) -> tuple[Any, ...]:
        (name, _, (code, intermediate)), *rest = super().reduce(result)
        module = result.library._get_module_for_linking()
        defined, needed = set(), set()
        for value in (*module.functions, *module.global_variables):
            (needed if value.is_declaration else defined).add(value.name)
        needed = {symbol for symbol in needed if not symbol.startswith("llvm.")}
        # Environments hold Python objects. Helpers of numba that were compiled in have empty ones, which nothing reads,
        # but loading them would load numba's modules.
        rest[-1] = [environment for environment in rest[-1] if environment.consts]
        return name, code, intermediate, defined, needed, rest

    def rebuild(self, target_context: Any, stored: tuple[Any, ...]) -> Any:
        name, code, intermediate, defined, needed, rest = stored
        described, environment, signature, _, _, _, reload_init, environments = rest
        _name_runtime()
        if reload_init or not all(map(llvm.address_of_symbol, needed)):
            # It calls more of numba than kernels usually do.
            target_context.refresh()
        codegen = target_context.codegen()
        library = codegen.create_library(name)
        library.enable_object_caching()
        library._set_compiled_object(code)
        library._finalize_final_module()
        library._get_module_for_linking = cache(lambda: llvm.parse_bitcode(intermediate))
        codegen._engine._defined_symbols |= defined
        entry = target_context.get_executable(library, described, environment)
        for other in environments:
            codegen.set_env(other.env_name, other)
        return compile_result(
            target_context=target_context,
            typing_context=target_context.typing_context,
            library=library,
            environment=environment,
            entry_point=entry,
            fndesc=described,
            signature=signature,
            objectmode=False,
            lifted=(),
            reload_init=reload_init,
            referenced_envs=environments,
        )


class _Cache(FunctionCache):  # type: ignore[misc]
    """The compiled signatures of one kernel on disk."""

    _impl_class = _MachineCode

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target_context)


def jit(function: F) -> F:
    """Compile on first call with the package's policy.

    Division by zero follows IEEE instead of raising: a check in the loop would stop vectorization.
    """
    compiled: Any = numba.njit(nogil=True, error_model="numpy")(function)
    if compiled is function:  # compilation is switched off
        return function
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    try:
        compiled._cache = _Cache(function)
    finally:
        config.CACHE_DIR = before
    return compiled  # type: ignore[no-any-return]


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
