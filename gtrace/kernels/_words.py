"""Words of 64 bits at any byte of an array, little-endian: what numba's arrays cannot read or write by themselves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import types
from numba.core import config
from numba.extending import intrinsic, overload

if TYPE_CHECKING:
    from numpy.typing import NDArray


def load64(data: NDArray[np.uint8], at: int) -> np.uint64:
    """The eight bytes from ``at`` on, all of them inside the array, which is contiguous."""
    return data[at : at + 8].copy().view("<u8")[0]


def store64(data: NDArray[np.uint8], at: int, value: np.uint64) -> None:
    """Write eight bytes from ``at`` on, all of them inside the array, which is contiguous."""
    data[at : at + 8] = np.array([value], "<u8").view(np.uint8)


def _place(context: Any, builder: Any, array_type: Any, array: Any, at: Any) -> Any:
    from llvmlite import ir

    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), ir.IntType(64).as_pointer())


if not config.DISABLE_JIT:

    @intrinsic
    def _load(typing: Any, data: Any, at: Any) -> Any:
        del typing, at

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _place(context, builder, signature.args[0], *arguments)
            return builder.load(place, align=1)

        return types.uint64(data, types.intp), generate

    @intrinsic
    def _store(typing: Any, data: Any, at: Any, value: Any) -> Any:
        del typing, at, value

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            place = _place(context, builder, signature.args[0], *arguments[:2])
            builder.store(arguments[2], place, align=1)
            return context.get_dummy_value()

        return types.void(data, types.intp, types.uint64), generate

    # numba wants functions of the same signature, annotations included, around what it compiles.
    overload(load64, inline="always")(lambda data, at: lambda data, at: _load(data, at))  # type: ignore[call-arg]  # noqa: PLW0108
    overload(store64, inline="always")(
        lambda data, at, value: lambda data, at, value: _store(data, at, value)  # type: ignore[call-arg]  # noqa: PLW0108
    )
