"""Processes that a captured program launches: how they come to be watched, too.

A folder with a ``sitecustomize`` is put on ``PYTHONPATH``, and in the environment stands what to do. Python children
read both at their start; others never look. Nothing is imported before the child imports torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
from typing import TYPE_CHECKING, Any

import gtrace
from gtrace.torch_hooks.imports import call_after_import

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_VARIABLE = "GTRACE_CAPTURE"
#: holds the ``sitecustomize.py`` that ends in :func:`watch`, and nothing else
_INJECTED = os.path.join(os.path.dirname(os.path.abspath(__file__)), "injected")
_call_off: list[Callable[[], None]] = []


@contextlib.contextmanager
def children_call(module: str, told: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, every Python process that is launched calls ``module.start(told)`` when it imports torch.

    Args:
        module: an importable module.
        told: JSON values.
    """
    package = os.path.dirname(os.path.dirname(os.path.abspath(gtrace.__file__)))
    python = [sys.prefix, *sys.version_info[:2]]
    ours = {
        _VARIABLE: json.dumps({"module": module, "gtrace": package, "python": python, "told": dict(told)}),
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
    """Do in this process what the one that launched it asks for, as soon as torch is imported."""
    _call_off.append(
        call_after_import("torch", lambda: importlib.import_module(message["module"]).start(message["told"]))
    )


def watch_no_more() -> None:
    """Leave this process alone: it looks after itself. To be called before torch is imported."""
    while _call_off:
        _call_off.pop()()
