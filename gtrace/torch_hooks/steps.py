"""What can be told of an optimizer's step while it is about to happen."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import CodeType, FrameType

    from torch.optim import Optimizer

    from gtrace.torch_hooks.rounds import Rounds


def grad_scale_of(optimizer: Optimizer | Rounds) -> float:
    """What a gradient scaler leaves on a fused optimizer for the time of a step."""
    scale = getattr(optimizer, "grad_scale", None)
    return 1.0 if scale is None else float(scale)


def is_nested(wrapper: FrameType, evaluation: CodeType | None) -> bool:
    """Whether this step is a part of another one: a subclass that calls super().step(), or a wrapper.

    ``wrapper`` is the frame of torch's own wrapper around every ``step``. Frames and not a flag, because a
    step that raises never comes to its end. A step that a closure takes while it is evaluated is its own:
    ``evaluation`` is the code that evaluates closures.
    """
    frame = wrapper.f_back
    while frame is not None and frame.f_code is not evaluation:
        if frame.f_code is wrapper.f_code:
            return True
        frame = frame.f_back
    return False
