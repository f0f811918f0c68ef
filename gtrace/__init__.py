"""gtrace: record gradients of a training run and measure what every gradient codec would do to them.

The public names are loaded on first use, so that ``import gtrace`` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gtrace import capture, codecs, fitting, training
    from gtrace.capture import record_gradients
    from gtrace.codecs import codec, codec_names
    from gtrace.codecs.link import compress
    from gtrace.planning import load_plan
    from gtrace.sketch import MomentSketch
    from gtrace.sweep import SweepResult, run_sweep
    from gtrace.sweep.run import run_sweep as sweep
    from gtrace.trace import Trace, TraceWriter, create_trace, open_trace, sketch_trace

__version__ = "0.1.0"

_HOMES = {
    "MomentSketch": "gtrace.sketch",
    "SweepResult": "gtrace.sweep",
    "Trace": "gtrace.trace",
    "TraceWriter": "gtrace.trace",
    "codec": "gtrace.codecs",
    "codec_names": "gtrace.codecs",
    "compress": "gtrace.codecs.link",
    "create_trace": "gtrace.trace",
    "load_ipython_extension": "gtrace.cli.capture",
    "load_plan": "gtrace.planning",
    "open_trace": "gtrace.trace",
    "record_gradients": "gtrace.capture",
    "run_sweep": "gtrace.sweep",
    "sketch_trace": "gtrace.trace",
}
_MODULES = (
    "capture",
    "codecs",
    "distributions",
    "errors",
    "fitting",
    "report",
    "sweep",
    "testing",
    "training",
    "types",
)

__all__ = [
    "MomentSketch",
    "SweepResult",
    "Trace",
    "TraceWriter",
    "__version__",
    "capture",
    "codec",
    "codec_names",
    "codecs",
    "compress",
    "create_trace",
    "fitting",
    "load_plan",
    "open_trace",
    "record_gradients",
    "run_sweep",
    "sketch_trace",
    "sweep",
    "training",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"gtrace.{name}")
    raise AttributeError(f"module 'gtrace' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_MODULES})
