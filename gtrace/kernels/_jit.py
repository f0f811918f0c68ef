"""One compile policy for all kernels: nogil, cached, IEEE semantics (never fastmath).

A process that finds all its kernels in the cache compiles nothing. It loads their machine code alone. numba itself
would also load what compiling needs, and rebuild the intermediate code of each kernel, which takes most of the time.

A kernel is optimized and becomes machine code once, together with its helpers. numba would also do both with each
helper on its own, which takes as long again, and with each wrapper that lets C or Python call one.
"""

from __future__ import annotations

import fcntl
import gc
import hashlib
import logging
import os
import time
import zlib
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numba
from llvmlite import binding as llvm
from numba.core import config
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import compile_result
from numba.core.runtime import _nrt_python as runtime
from numba.core.types import unliteral

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = TypeVar("F", bound="Callable[..., Any]")
#: nothing calls kernels from C
_POLICY: Any = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
#: nor helpers from Python
_HELPER: Any = {**_POLICY, "no_cpython_wrapper": True}
#: A process says that it compiles when it reaches this kernel or helper, after a second or two. A first sweep has 200.
_MANY = 20
#: seconds that a process waits for another one to compile a kernel, and after which it looks again
_LONGEST, _LOOK = 120.0, 0.02
_compiled, _log = count(1), logging.getLogger(__name__)
#: a fork says nothing: it compiles for this process
_process = os.getpid()


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


def nothing_compiled() -> bool:
    """Whether no process has compiled any kernel on this machine."""
    return not any(Path(cache_folder()).rglob("*.nbc"))


@cache
def _name_runtime() -> None:
    """Give machine code the addresses of numba's memory management, as numba does before it compiles."""
    for name, address in runtime.c_helpers.items():
        llvm.add_symbol(name if name.startswith("_") else f"NRT_{name}", address)


class _Library(JITCodeLibrary):
    """The code of a kernel or a helper: machine code once a pointer into it is asked for, so never of a helper."""

    _waits = False

    def _optimize_functions(self, ll_module: Any) -> None:
        # What a helper needs before it is part of a kernel: references that cancel each other go, variables become
        # registers.
        ll_module.data_layout = self._codegen._data_layout
        for function in ll_module.functions:
            passes, builder = self._codegen._function_pass_manager(opt=1)  # type: ignore[no-untyped-call]
            passes.run(function, builder)

    def _optimize_final_module(self) -> None:
        """Wait, see :meth:`get_pointer_to_function`."""

    def _finalize_final_module(self) -> None:
        self._waits = self._finalized = True

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()  # type: ignore[no-untyped-call]
        if self._waits:
            functions = self.get_defined_functions()  # type: ignore[no-untyped-call]
            if name not in (function.name for function in functions):
                return 0
            self._waits = False
            super()._optimize_final_module()  # type: ignore[no-untyped-call]
            super()._finalize_final_module()  # type: ignore[no-untyped-call]
        address: int = super().get_pointer_to_function(name)  # type: ignore[no-untyped-call]
        return address


@contextmanager
def _whole(dispatcher: Any) -> Iterator[None]:
    """Compile with :class:`_Library`; numba's lock is held.

    The compiler makes millions of objects and no garbage worth collecting; looking for it takes a quarter of the time.
    """
    if next(_compiled) == _MANY and os.getpid() == _process:
        _log.warning("gtrace: compiling kernels, once on this machine: up to a minute")
    context = dispatcher.targetctx
    codegen, collects = context.codegen(), gc.isenabled()
    set_env = codegen.set_env
    codegen._library_class = _Library
    codegen.set_env = lambda name, value: codegen._engine.is_symbol_defined(name) and set_env(name, value)
    context.create_cfunc_wrapper = lambda *_: None
    gc.disable()
    try:
        yield
    finally:
        del codegen._library_class, codegen.set_env, context.create_cfunc_wrapper
        if collects:
            gc.enable()


def _dispatcher(function: Any) -> Any:
    """What numba makes of a function for Python; kernels that call it get a form of it that has no machine code."""
    compiled: Any = numba.njit(**_POLICY)(function)
    if compiled is function:  # compilation is switched off
        return function
    compile_plain = compiled._compiler.compile

    def compile_whole(*signature: Any) -> Any:
        try:
            with _whole(compiled):
                result = compile_plain(*signature)
        except BaseException:
            if isinstance(compiled._cache, _Cache):
                compiled._cache._turn(fcntl.LOCK_UN)
            raise
        for environment in result._find_referenced_environments():
            result.codegen.set_env(environment.env_name, environment)
        return result

    compiled._compiler.compile = compile_whole
    # Made when a kernel is compiled: a process that finds its kernels compiled would make a hundred for nothing.
    helper: Any = cache(lambda: numba.njit(**_HELPER)(function))
    compiled.get_overload = lambda *signature: helper().get_overload(*signature)
    # numba would compile a helper again for each constant among its arguments.
    compiled.get_call_template = lambda types, named: helper().get_call_template(tuple(map(unliteral, types)), named)
    return compiled


class _MachineCode(CompileResultCacheImpl):
    """Stores machine code alone: other kernels are compiled from the source of what they call."""

    def reduce(self, result: Any) -> tuple[Any, ...]:
        (name, _, (code, _)), *rest = result._reduce()
        module = result.library._final_module
        values = [*module.functions, *module.global_variables]
        defined = {value.name for value in values if not value.is_declaration}
        needed = {value.name for value in values if value.is_declaration and not value.name.startswith("llvm.")}
        # Environments hold Python objects. Helpers of numba that were compiled in have empty ones, which nothing reads,
        # but loading them would load numba's modules.
        rest[-1] = [environment for environment in rest[-1] if environment.consts]
        return name, code, defined, needed, rest

    def rebuild(self, target_context: Any, stored: tuple[Any, ...]) -> Any:
        name, code, defined, needed, rest = stored
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
        codegen._engine._defined_symbols |= defined
        entry = target_context.get_executable(library, described, environment)
        for other in environments:
            codegen.set_env(other.env_name, other)
        return compile_result(  # type: ignore[no-untyped-call]
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


class _Cache(FunctionCache):
    """The compiled signatures of one kernel on disk; processes that want the same kernel compile it once."""

    _impl_class = _MachineCode

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        found = self._stored(signature, target_context)
        if found is None and self._turn(fcntl.LOCK_EX | fcntl.LOCK_NB):
            # Another process may have stored it while this one waited.
            found = self._stored(signature, target_context)
            if found is not None:
                self._turn(fcntl.LOCK_UN)
        return found

    def save_overload(self, signature: Any, result: Any) -> None:
        try:
            super().save_overload(signature, result)  # type: ignore[no-untyped-call]
        finally:
            self._turn(fcntl.LOCK_UN)

    def _stored(self, signature: Any, target_context: Any) -> Any:
        with self._guard_against_spurious_io_errors():
            return self._load_overload(signature, target_context)  # type: ignore[no-untyped-call]

    def _turn(self, how: int) -> bool:
        """Take or end this process's turn to compile the kernel; False if the folder has no locks, or it takes long."""
        place, limit = zlib.crc32(self._impl.filename_base.encode()), time.monotonic() + _LONGEST
        while time.monotonic() < limit:
            try:
                # A child does not inherit these locks, and they end with a process.
                fcntl.lockf(_turns(self.cache_path), how, 1, place)
            except BlockingIOError:
                time.sleep(_LOOK)
            except OSError:
                break
            else:
                return True
        return False


@cache
def _turns(folder: str) -> int:
    """A file of which processes lock the byte of each kernel that they compile."""
    os.makedirs(folder, exist_ok=True)
    return os.open(os.path.join(folder, "turns"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)


def jit(function: F) -> F:
    """Compile on first call with the package's policy.

    Division by zero follows IEEE instead of raising: a check in the loop would stop vectorization.
    """
    compiled = _dispatcher(function)
    if compiled is function:  # compilation is switched off
        return function
    before = config.CACHE_DIR
    config.CACHE_DIR = cache_folder()
    try:
        compiled._cache = _Cache(function)  # type: ignore[no-untyped-call]
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
    compiled: F = _dispatcher(function)
    return compiled
