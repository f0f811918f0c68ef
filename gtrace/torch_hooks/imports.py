"""Run a function right after a module is imported, without importing it ourselves.

A training script may set thread counts or devices in ``os.environ`` before it imports torch. Importing torch
earlier on its behalf would make those settings void, and with them the promise that capture changes nothing.
"""

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds one module through the other finders and runs a function once its code has run."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            spec = None if finder is self else finder.find_spec(fullname, path, target)
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        if loader is None:
            return
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            # The loader stays what it was, its type included: only this one call is watched.
            del loader.exec_module
            execute(module)
            self._callback()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def call_after_import(name: str, callback: Callable[[], None]) -> Callable[[], None]:
    """Call ``callback`` as soon as the top-level module ``name`` has been imported.

    At once, when it is imported already; never, when nobody imports it.

    Returns:
        calls it off.
    """
    if name in sys.modules:
        callback()
        return lambda: None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)

    def call_off() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    return call_off


@contextlib.contextmanager
def after_import(name: str, callback: Callable[[], None]) -> Iterator[None]:
    """:func:`call_after_import` for the time of a block."""
    call_off = call_after_import(name, callback)
    try:
        yield
    finally:
        call_off()
