"""Compiled loops: arrays in, arrays out, no objects and no errors.

The only place that imports numba. Callers check their input; a kernel trusts it.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Singles: TypeAlias = NDArray[np.float32]
Ints: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]
Patterns: TypeAlias = NDArray[np.uint32]
Symbols: TypeAlias = NDArray[np.uint16]
Words: TypeAlias = NDArray[np.uint64]
Flags: TypeAlias = NDArray[np.bool_]
