"""From measurement to decision: a codec and a number of bits for each tensor, within a budget.

``make_plan`` chooses from rate-distortion points, which ``measure`` takes from a trace and ``curves_of`` from a sweep;
``load_plan`` and ``save_plan`` are the file, whose ``table`` goes wherever a codec goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace.planning.curves import Curves, curves_of, measure, noise_ratios
    from gtrace.planning.make import Budget, make_plan
    from gtrace.planning.plan import Plan, load_plan, save_plan
    from gtrace.planning.solve import Choice, minimize

_HOMES = {
    "Budget": "make",
    "Choice": "solve",
    "Curves": "curves",
    "Plan": "plan",
    "curves_of": "curves",
    "load_plan": "plan",
    "make_plan": "make",
    "measure": "curves",
    "minimize": "solve",
    "noise_ratios": "curves",
    "save_plan": "plan",
}

__all__ = [
    "Budget",
    "Choice",
    "Curves",
    "Plan",
    "curves_of",
    "load_plan",
    "make_plan",
    "measure",
    "minimize",
    "noise_ratios",
    "save_plan",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"gtrace.planning.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'gtrace.planning' has no attribute {name!r}")
