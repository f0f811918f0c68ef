"""The communication hook of ``DistributedDataParallel``.

No ``from __future__ import annotations`` here: torch compares the annotations themselves, not their text. It also asks
for a plain function whose second parameter is called ``bucket``.
"""

import torch
from torch._C._distributed_c10d import GradBucket

from gtrace.training.ranks import State


def ddp_comm_hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Send a bucket of gradients through the codec of ``state``, to be registered once with a wrapped model::

        model.register_comm_hook(gtrace.training.State("alq:bits=3"), gtrace.training.ddp_comm_hook)

    Collectives block, so nothing overlaps with the backward pass; what gloo offers would not, either.

    Args:
        state: see :class:`gtrace.training.State`.
        bucket: of torch.

    Returns:
        A completed future of the bucket's buffer, with the average that arrived in the place of the gradients.
    """
    return state.exchange_bucket(bucket)
