"""Run code as soon as torch is imported: here, and in the Python processes that a captured program launches.

This module never imports torch. A training script may set thread counts or devices in ``os.environ`` before it
imports torch; an earlier import would ignore those settings, and capture would change the training.

For launched processes a folder with a ``sitecustomize`` is put on ``PYTHONPATH``, and the environment holds the
instructions. Python children read both when they start; other programs never look.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import gtrace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _Finder:
    """Finds one module through the other finders and runs functions once its code has run."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.callbacks: list[Callable[[], None]] = []

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self.name:
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
            # The loader and its type stay the same: only this one call is watched.
            del loader.exec_module
            execute(module)
            for callback in self.callbacks:
                callback()

        loader.exec_module = exec_module  # type: ignore[method-assign]


def after_import(name: str, callback: Callable[[], None]) -> contextlib.ExitStack:
    """Call ``callback`` as soon as the top-level module ``name`` has been imported.

    It is called at once if the module is already imported, and never if nobody imports it, or if the result is closed
    before: at the end of a block, or by ``close``.
    """
    called_off = contextlib.ExitStack()
    if name in sys.modules:
        callback()
        return called_off
    # One for each module: two would look for it through each other.
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder) and one.name == name), None)
    if finder is None:
        finder = _Finder(name)
        sys.meta_path.insert(0, finder)
    finder.callbacks.append(callback)

    def call_off() -> None:
        if callback in finder.callbacks:
            finder.callbacks.remove(callback)
        if not finder.callbacks and finder in sys.meta_path:
            sys.meta_path.remove(finder)

    called_off.callback(call_off)
    return called_off


_VARIABLE = "GTRACE_CAPTURE"
#: holds the ``sitecustomize.py`` that ends in :func:`watch`, and nothing else
_INJECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "injected")
#: whether this process still does what its launcher asks for
_asked = contextlib.ExitStack()


@contextlib.contextmanager
def children_call(module: str, argument: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, every Python process that is launched calls ``module.start(argument)`` when it imports torch.

    The argument has JSON values.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(gtrace.__file__)))
    python = [sys.prefix, *sys.version_info[:2]]
    ours = {
        _VARIABLE: json.dumps({"module": module, "gtrace": package, "python": python, "argument": dict(argument)}),
        "PYTHONPATH": os.pathsep.join(filter(None, (_INJECTED, os.environ.get("PYTHONPATH", "")))),
    }
    before = {name: os.environ.get(name) for name in ours}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name, value in before.items():
            if os.environ.get(name) == ours[name]:
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def watch(message: Mapping[str, Any]) -> None:
    """Do in this process what its launcher asks for, as soon as torch is imported."""
    _asked.enter_context(
        after_import("torch", lambda: importlib.import_module(message["module"]).start(message["argument"]))
    )


def watch_no_more() -> None:
    """Leave this process alone: it looks after itself. To be called before torch is imported."""
    _asked.close()
