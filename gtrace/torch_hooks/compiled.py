"""Keep ``torch.compile`` from tracing hooks: it would break their work, and recompile for it.

Done without importing ``torch._dynamo``, which takes long and is for the program to decide.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, TypeVar

from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType

    _F = TypeVar("_F", bound=Callable[..., Any])


def _skip(code: CodeType) -> None:
    """Have frames of this code run as they are."""
    if hasattr(eval_frame, "skip_code"):  # torch before 2.7
        eval_frame.skip_code(code)
    else:
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(code, strategy)


def never_compiled(function: _F) -> _F:
    """The function, with everything that it calls, as plain Python; a compiled region is split where it calls it."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    plain._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(plain.__code__)  # type: ignore[attr-defined]
    return plain  # type: ignore[return-value]


def not_compiled_itself(function: _F) -> _F:
    """The function as plain Python, while what it calls may be compiled."""
    _skip(function.__code__)
    return function
