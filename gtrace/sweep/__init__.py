"""Replay a trace through codecs and measure what each does::

    result = gtrace.sweep("run.zarr", "alq,mcgq", bits=range(2, 9))

Reading results needs no codec and no trace, so what runs a sweep is loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gtrace.sweep.schema import COLUMNS, EXPECTATION
from gtrace.sweep.store import ResultStore, SweepResult

if TYPE_CHECKING:
    import os
    from collections.abc import Iterable

    from gtrace.codecs.assignment import TableLike
    from gtrace.sweep.run import SweepOptions, expand, run_sweep
    from gtrace.trace import Trace

__all__ = ["COLUMNS", "EXPECTATION", "ResultStore", "SweepOptions", "SweepResult", "expand", "run_sweep"]


def __getattr__(name: str) -> Any:
    if name in ("SweepOptions", "expand", "run_sweep"):
        return getattr(importlib.import_module("gtrace.sweep.run"), name)
    raise AttributeError(f"module 'gtrace.sweep' has no attribute {name!r}")


class _SweepModule(ModuleType):
    """This module, which can be called."""

    def __call__(
        self,
        trace: Trace | str | os.PathLike[str],
        codecs: str | TableLike | Iterable[TableLike] | None = None,
        **options: Any,
    ) -> SweepResult:
        """Run codecs over a trace, see :func:`~gtrace.sweep.run.run_sweep`.

        Without codecs it measures what ``gtrace sweep TRACE`` does: eight methods at 2 to 5 bits on at most 32 steps.
        """
        from gtrace.sweep.quick import quick_sweep
        from gtrace.sweep.run import run_sweep

        return quick_sweep(trace, **options) if codecs is None else run_sweep(trace, codecs, **options)


sys.modules[__name__].__class__ = _SweepModule
