"""Results as plain values: dictionaries, lists and numbers, as JSON and tables of other programs have them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from gtrace.report.statistics import Interval

Record = dict[str, Any]
#: Fields that hold logarithms of ratios or of relative variances; records hold the ratios.
_LOGARITHMS = {"by_elements", "by_layers", "interval", "in_steps"}


def flat(value: Any) -> Record:
    """A dataclass as a dictionary in which each :class:`Interval` is five fields and no logarithm is left."""
    record: Record = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        if isinstance(item, Interval):
            ends = item.exp() if field.name in _LOGARITHMS else (item.estimate, item.low, item.high)
            record |= {f"{field.name}{end}": number for end, number in zip(("", "_low", "_high"), ends, strict=True)}
            record |= {f"{field.name}_p": item.p, f"{field.name}_why": item.why}
        else:
            record[field.name] = item
    return record


def plain(value: Any) -> Any:
    """``value`` in types that JSON has; numbers that are not finite become None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value
