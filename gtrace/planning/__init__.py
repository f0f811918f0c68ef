"""From measurement to decision: a codec and a number of bits for each tensor, within a budget.

``make_plan`` chooses from rate-distortion points, which ``measure`` takes from a trace and ``curves_of`` from a sweep;
``load_plan`` and ``save_plan`` are the file, whose ``table`` goes wherever a codec goes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace.planning.curves import Curves as Curves
    from gtrace.planning.curves import curves_of as curves_of
    from gtrace.planning.curves import measure as measure
    from gtrace.planning.curves import noise_ratios as noise_ratios
    from gtrace.planning.make import Budget as Budget
    from gtrace.planning.make import make_plan as make_plan
    from gtrace.planning.plan import Plan as Plan
    from gtrace.planning.plan import load_plan as load_plan
    from gtrace.planning.plan import save_plan as save_plan
    from gtrace.planning.solve import Choice as Choice
    from gtrace.planning.solve import minimize as minimize

#: module -> what comes from it
_HOMES = {
    "gtrace.planning.curves": ("Curves", "curves_of", "measure", "noise_ratios"),
    "gtrace.planning.make": ("Budget", "make_plan"),
    "gtrace.planning.plan": ("Plan", "load_plan", "save_plan"),
    "gtrace.planning.solve": ("Choice", "minimize"),
}

__all__ = sorted(name for names in _HOMES.values() for name in names)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = next((module for module, names in _HOMES.items() if name in names), None)
    if home is None:
        raise AttributeError(f"module 'gtrace.planning' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
