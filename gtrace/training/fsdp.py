"""Gradients of ``fully_shard`` (FSDP2) through codecs, instead of its reduce-scatter and of HSDP's all-reduce.

torch hands over one buffer for each group of parameters. It has a block for each rank, with that rank's chunk of every
gradient, padded to equal length. Each chunk is a piece with a codec state of its own; its owner averages it.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from gtrace.errors import UsageError
from gtrace.torch_hooks.hooks import never_compiled
from gtrace.training import device
from gtrace.training.ranks import Piece

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import CodecTable
    from gtrace.training.vectors import Vector


@dataclass(frozen=True, slots=True)
class ShardedGradient:
    """How a gradient is cut: along one dimension into equal chunks, of which the last ones may be shorter or empty.

    Attributes:
        shape: shape of the whole gradient.
        dim: the dimension that is cut.
        ranks: number of chunks.
        own: the rank whose chunk stays here.
    """

    name: str
    codec: Codec
    shape: tuple[int, ...]
    dim: int
    ranks: int
    own: int

    @property
    def padded(self) -> int:
        """Elements of a chunk in the buffer."""
        others = math.prod(self.shape[: self.dim] + self.shape[self.dim + 1 :])
        return -(-self.shape[self.dim] // self.ranks) * others

    def size(self, rank: int) -> int:
        """Elements of one rank's chunk."""
        return max(0, min(math.prod(self.shape) - rank * self.padded, self.padded))

    def pieces(self) -> list[Piece]:
        """The chunks that are not empty, by rank."""
        size, found = math.prod(self.shape), []
        for rank in range(self.ranks):
            start, part = rank * self.padded, self.size(rank)
            if part:
                name, shape = (
                    (self.name, self.shape) if part == size else (f"{self.name}[{start}:{start + part}]", None)
                )
                found.append(Piece(name, self.codec, part, None, shape, start, rank))
        return found

    def joined(self, blocks: torch.Tensor) -> torch.Tensor:
        """The whole gradient from [ranks, padded]."""
        if self.dim == 0:
            return blocks.reshape(-1)[: math.prod(self.shape)].view(self.shape)
        each = list(self.shape)
        each[self.dim] //= self.ranks
        return torch.cat([block.reshape(each) for block in blocks], self.dim)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's chunk of the whole gradient, flat."""
        if self.dim == 0:
            return whole.reshape(-1)[self.own * self.padded :][: self.size(self.own)]
        return whole.view(self.shape).chunk(self.ranks, self.dim)[self.own].reshape(-1)


class ChunkExchange(Protocol):
    """What a group needs of :class:`gtrace.training.State`."""

    rules: CodecTable

    def average(
        self, names: Sequence[str], values: Sequence[Vector], shapes: Sequence[tuple[int, ...]] | None = None
    ) -> list[Vector]:
        """The average of each tensor."""

    def scatter(self, pieces: Sequence[Piece], values: Sequence[Vector]) -> list[Vector]:
        """The averages of the pieces that this rank owns."""

    def average_replicas(self, pieces: Sequence[Piece], values: Sequence[Vector]) -> list[Vector]:
        """The average of each piece among the ranks that own it."""

    def name_groups(self) -> None:
        """Set the ``names`` of all groups."""

    def end_with_backward(self) -> None:
        """End the step when this backward pass ends."""


class ShardedGroup:
    """Takes the place of a group's reduce-scatter and, with replicas, of the all-reduce behind it.

    Args:
        group: torch's group of parameters that are gathered and reduced together.

    Attributes:
        names: names of its parameters; empty before the first step.
    """

    def __init__(self, group: Any, exchange: ChunkExchange) -> None:
        self._group, self._exchange = group, exchange
        self.names: list[str] = []
        self._known: list[ShardedGradient] = []
        self._known_for: list[Any] = []
        #: what waits while a program accumulates gradients without its replicas
        self._partial: torch.Tensor | None = None
        self._replicas = 1
        group._reduce_scatter_comm = self
        between = meeting(group)[1]
        if between is not None:
            self._replicas = between.size()
            # Keep torch from averaging among replicas: its hook runs after that, unless it knows of no replicas.
            before = group.mesh_info
            kind = sys.modules[type(before).__module__].FSDPMeshInfo
            group.mesh_info = kind(before.mesh, before.shard_mesh_dim, before.replicate_mesh_dim)
            if group.post_forward_mesh_info == before:
                group.post_forward_mesh_info = group.mesh_info
            group._all_reduce_hook = self.reduce_replicas

    @property
    def parameters(self) -> list[torch.Tensor]:
        """This rank's parts of the parameters, which an optimizer updates."""
        return [one.sharded_param for one in self._group.fsdp_params]

    @property
    def held(self) -> list[torch.Tensor]:
        """The same parameters as their modules hold them now, which may be gathered."""
        infos = [one._module_info for one in self._group.fsdp_params]
        return [getattr(info.module, info.param_name) for info in infos]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for a buffer; torch calls this."""
        return torch.empty(*size, dtype=dtype, device=device)

    @never_compiled
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Average this rank's chunks; torch calls this in the backward pass.

        Args:
            output_tensor: [n], this rank's chunks.
            input_tensor: [ranks * n], the chunks of every rank.
            group: the ranks.
            op: mean, sum, or a sum with a factor.
            async_op: torch never asks for it.

        Raises:
            UsageError: a parameter of the group has no gradient, so that nothing says which chunks these are.
        """
        self._exchange.end_with_backward()
        chunks = self._chunks(group)
        widths = [one.padded for one in chunks]
        blocks = input_tensor.view(group.size(), -1)
        if blocks.shape[1] != sum(widths):
            names = ", ".join(one.name for one in chunks)
            raise UsageError(
                f"fully_shard: one of {names} has no gradient in this step; "
                "call set_reduce_scatter_unused_params(True) on their module"
            )
        output_tensor.zero_()
        each = list(zip(chunks, torch.split(blocks, widths, 1), torch.split(output_tensor, widths), strict=True))
        self._average_whole([one for one in each if one[0].codec.linear])
        self._average_chunks([one for one in each if not one[0].codec.linear])
        if op == dist.ReduceOp.SUM:
            output_tensor.mul_(group.size())
        elif op != dist.ReduceOp.AVG:
            output_tensor.mul_(group.size() / self._group.gradient_divide_factor)

    def _average_whole(self, each: Sequence[tuple[ShardedGradient, torch.Tensor, torch.Tensor]]) -> None:
        """Factors of a matrix are those of the whole one."""
        if each:
            names, shapes = [one.name for one, _, _ in each], [one.shape for one, _, _ in each]
            values = [device.flat(one.joined(part), one.codec) for one, part, _ in each]
            means = self._exchange.average(names, values, shapes)
            for (one, _, target), mean in zip(each, means, strict=True):
                target[: one.size(one.own)] = one.cut(torch.as_tensor(mean))

    def _average_chunks(self, each: Sequence[tuple[ShardedGradient, torch.Tensor, torch.Tensor]]) -> None:
        items = [(piece, part, target) for one, part, target in each for piece in one.pieces()]
        if items:
            pieces = [piece for piece, _, _ in items]
            values = [device.flat(part[piece.owner, : piece.size], piece.codec) for piece, part, _ in items]
            means = self._exchange.scatter(pieces, values)
            own = [(piece, target) for piece, _, target in items if piece.owner == each[0][0].own]
            for (piece, target), mean in zip(own, means, strict=True):
                target[: piece.size] = torch.as_tensor(mean)

    @never_compiled
    def reduce_replicas(self, reduced: torch.Tensor) -> None:
        """Average this rank's chunks with those of its replicas; torch calls this after the reduce-scatter.

        Args:
            reduced: [n], this rank's chunks.
        """
        if self._partial is not None:
            reduced += self._partial
            self._partial = None
        if not self._group.all_reduce_grads:
            self._partial = reduced.clone()
            reduced.zero_()
            return
        parts = torch.split(reduced, [one.padded for one in self._known])
        pieces, targets = [], []
        for one, part, sharded in zip(self._known, parts, self._trained(), strict=True):
            for piece in one.pieces():
                if piece.owner == one.own:
                    # Whole rows or columns: what holds for matrices holds for these.
                    pieces.append(replace(piece, name=f"{piece.name}+replicas", shape=tuple(sharded.sharded_size)))
                    targets.append(part[: piece.size])
        values = [device.flat(part, piece.codec) for piece, part in zip(pieces, targets, strict=True)]
        for target, mean in zip(targets, self._exchange.average_replicas(pieces, values), strict=True):
            target.copy_(torch.as_tensor(mean))
        if self._group.gradient_divide_factor is not None:
            # torch sums replicas up if the program has a divisor of its own.
            reduced.mul_(self._replicas)

    def _trained(self) -> list[Any]:
        return [one for one in self._group.fsdp_params if one.sharded_param.requires_grad]

    def _chunks(self, ranks: dist.ProcessGroup) -> list[ShardedGradient]:
        """Those of a step in which every parameter has a gradient; a program may freeze some between steps."""
        trained = self._trained()
        if trained != self._known_for:
            self._known_for = trained
            if not self.names:
                self._exchange.name_groups()
            names = dict(zip(map(id, self._group.fsdp_params), self.names, strict=True))
            self._known = [
                ShardedGradient(
                    names[id(one)],
                    self._exchange.rules.choose(names[id(one)], one._orig_size.numel()),
                    tuple(one._orig_size),
                    one.fsdp_placement.dim,
                    ranks.size(),
                    ranks.rank(),
                )
                for one in trained
            ]
        return self._known


def meeting(group: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The ranks that a group's gradients are cut among, and those that have the same chunk; None if there are none."""
    about = group.mesh_info
    return getattr(about, "shard_process_group", None), getattr(about, "replicate_process_group", None)


def groups_in(model: nn.Module) -> Iterator[Any]:
    """The groups of all sharded modules of a model.

    Raises:
        UsageError: a version of torch without what this needs.
    """
    for module in model.modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            sharded: Any = module
            state = sharded._get_fsdp_state()
            if not hasattr(state, "_fsdp_param_groups"):
                raise UsageError(f"fully_shard: torch {torch.__version__} is too old; codecs need 2.13")
            yield from state._fsdp_param_groups
