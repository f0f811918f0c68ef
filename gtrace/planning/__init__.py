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

__all__ = ["Budget", "Choice", "Curves", "Plan", "curves_of", "load_plan", "make_plan", "measure", "minimize"]
__all__ += ["noise_ratios", "save_plan"]

#: module -> what comes from it
_HOMES = {
    "gtrace.planning.curves": ("Curves", "curves_of", "measure", "noise_ratios"),
    "gtrace.planning.make": ("Budget", "make_plan"),
    "gtrace.planning.plan": ("Plan", "load_plan", "save_plan"),
    "gtrace.planning.solve": ("Choice", "minimize"),
}


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gtrace.planning' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
