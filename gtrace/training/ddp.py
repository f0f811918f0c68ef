"""Gradients between real ranks: each encodes its own, bytes are exchanged, decoded and averaged.

:class:`State` is what lasts between steps. It takes the place of the average that ``DistributedDataParallel`` or
``fully_shard`` computes::

    state = gtrace.training.State("ef:topk:ratio=0.01").register(model)

State is kept per parameter instead of per bucket, because buckets are built again after the first step.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, get_args

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from gtrace.codecs.assignment import CodecTable, TableLike
from gtrace.codecs.link import LinkOptions
from gtrace.errors import UsageError, suggest
from gtrace.metrics import ratio
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.torch_hooks.hooks import never_compiled
from gtrace.torch_hooks.naming import KeptNames, Names
from gtrace.training import device, vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.exchange import NONFINITE, Nonfinite, Tally, check_saved, without_nonfinite
from gtrace.training.ranks import NOT_FINITE, Collectives, Piece, RankCodecs, sendable
from gtrace.training.ways import averaging, way

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from gtrace.codecs import Codec
    from gtrace.training.vectors import Vector

Levels: TypeAlias = Literal["own", "common"]
LEVELS: tuple[Levels, ...] = get_args(Levels)
FORMAT = 2


@dataclass(slots=True)
class AllReduceComparison:
    """The same step with plain all-reduces, measured for comparison.

    Attributes:
        energy: ||exact average||^2.
        error: ||average of decoded - exact average||^2.
        bf16_error: the same of an all-reduce in bfloat16.
        bf16_seconds: wall time of that all-reduce.
        float32_seconds: wall time of an all-reduce in float32.
    """

    energy: float = 0.0
    error: float = 0.0
    bf16_error: float = 0.0
    bf16_seconds: float = 0.0
    float32_seconds: float = 0.0

    @property
    def relative_variance(self) -> float:
        """Error of the decoded gradients' average, as a share of the exact one's energy."""
        return float(ratio(self.error, self.energy))

    @property
    def bf16_variance(self) -> float:
        """The same of an all-reduce in bfloat16."""
        return float(ratio(self.bf16_error, self.energy))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankOptions:
    """How ranks exchange gradients.

    Attributes:
        exchange: ``allgather`` sends every rank's payload to all others; ``two-shot`` sends each rank a piece of every
            tensor, which it decodes, averages and encodes once more for all: fewer bytes from three ranks on, and
            a second error, which is measured; further ways are those of :mod:`gtrace.training.ways`: ``ring``,
            ``hierarchical:N`` and ``shared-scale``. Messages of linear codecs go through all-reduces whatever the way.
        levels: ``own``: each rank fits to its own gradient, and its levels travel with its payload; ``common``: when
            the schedule says so, ranks exchange their sketches and all fit to the sum.
        seed: seed of the rounding; ranks and stages have keys of their own.
        refit: when codecs are fitted, as :meth:`RefitSchedule.parse` reads it.
        nonfinite: what to do with a gradient that holds NaN or infinity. ``pass``, the default, makes the average NaN,
            so that a gradient scaler skips the step; :class:`Exchange` has the others, and what memory does.
        compare_every: interval in steps at which the same gradients also go through plain all-reduces in float32 and
            bfloat16, for ``comparison``; 0 for never.

    Raises:
        UsageError: an unknown choice, or a negative number of steps.
    """

    exchange: str = "allgather"
    levels: Levels = "own"
    seed: int = 0
    refit: str | RefitSchedule = DEFAULT_REFIT
    nonfinite: Nonfinite = "pass"
    compare_every: int = 100

    def __post_init__(self) -> None:
        way(self.exchange)
        for what, allowed in (("levels", LEVELS), ("nonfinite", NONFINITE)):
            value = getattr(self, what)
            if value not in allowed:
                raise UsageError(f"{what}: '{value}' is unknown; {suggest(str(value), allowed)}")
        if self.compare_every < 0:
            raise UsageError(f"compare_every: {self.compare_every} is below 0")

    @property
    def schedule(self) -> RefitSchedule:
        """``refit``, read."""
        return RefitSchedule.parse(self.refit) if isinstance(self.refit, str) else self.refit


class RankExchange:
    """Codecs between ranks: every parameter's codec states, the step, and the costs.

    It has ``state_dict`` and ``load_state_dict``, so it can be an entry of what ``torch.distributed.checkpoint`` saves.

    Args:
        codec: a codec or its spec, for all tensors that no rule matches; or a table or plan, without rules.
        process_group: the ranks; None for the default group.
        model: names the parameters; by default they are searched among all live modules.
        rules: pattern -> codec for some tensors: ``{"bias": "none"}``; see
            :class:`gtrace.codecs.assignment.CodecTable`.
        min_size: tensors with fewer elements go uncompressed.
        on_step: called with this state after the last bucket of each step.
        options: how ranks exchange.
        settings: fields of :class:`~gtrace.training.ddp.RankOptions` that differ from ``options``.

    Attributes:
        group: the ranks; None for the default group.
        steps: number of completed steps.
        tally: this rank's tally, summed over the steps.
        last: tally of the last step.
        comparison: comparison of the last step; None without one.
        loss_scale: returns the factor that gradients carry, e.g. a gradient scaler's ``get_scale``; memory and
            comparisons are without it, so that they may go on when it changes. None for no factor.

    Raises:
        UsageError: an unknown codec or choice, a codec over the whole model, or one with declared payloads that
            a receiver cannot decode.
    """

    def __init__(
        self,
        codec: TableLike,
        process_group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        rules: Mapping[str, str | Codec] | Iterable[tuple[str, str | Codec]] = (),
        min_size: int = 0,
        on_step: Callable[[RankExchange], None] | None = None,
        options: RankOptions | None = None,
        **settings: Any,
    ) -> None:
        self.options = replace(options or RankOptions(), **settings)
        self.rules = CodecTable.of(codec, rules, min_size)
        for one in self.rules.codecs:
            if one.needs is not None and one.needs.scope == "model":
                raise UsageError(
                    f"{one}: a codec over the whole model cannot go bucket by bucket; leave out scope=model"
                )
            if one.declared:
                raise UsageError(f"{one}: no other rank could decode its payloads, which are declared and not bytes")
            if self.options.levels == "common" and one.needs is not None and one.needs.bucket_moments:
                raise UsageError(f"{one}: fits to moments of every bucket, which do not travel; choose levels own")
        self.steps = 0
        self.last = Tally()
        self.tally = Tally()
        self.comparison: AllReduceComparison | None = None
        self.on_step = on_step
        self.loss_scale: Callable[[], float] | None = None
        self._names, self._models = KeptNames(), [] if model is None else [model]
        if model is not None:
            self._name(list(model.parameters()))
        self._sharded: list[ShardedGroup] = []
        #: the backward pass whose end is the end of the step
        self._backward = -1
        #: the codecs among the ranks of a group and, with replicas, those between groups
        self._stages: list[RankCodecs] = []
        #: what was loaded, until a step ends: the model may be registered later
        self._loaded: list[Any] = []
        self._connect(process_group)
        self._compared = AllReduceComparison()
        #: names and gradients of buckets that wait for others, and what is promised of each bucket's buffer
        self._waiting: list[tuple[str, torch.Tensor]]
        self._promised: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]]
        self._waiting, self._promised = [], []

    def register(self, model: nn.Module) -> Self:
        """Average the gradients of a model through the codec; call it once, on a wrapped model, before training.

        With ``fully_shard`` each rank encodes the chunks of its gradients one by one, and sends each to its owner. With
        replicas (HSDP), owners of the same chunk then average it among themselves, through the same codec.

        Args:
            model: a ``DistributedDataParallel``, or a model with modules sharded by ``fully_shard`` (FSDP2).

        Returns:
            this state.

        Raises:
            UsageError: neither of these; modules that are sharded among different ranks; or torch is too old.
        """
        if isinstance(model, DistributedDataParallel):
            self._models.append(model.module)
            self._name(list(model.module.parameters()))
            self._connect(model.process_group)
            model.register_comm_hook(self, ddp_comm_hook)
            return self
        groups = list(groups_in(model))
        if not groups:
            raise UsageError(
                f"register: a {type(model).__name__} is neither a DistributedDataParallel nor sharded by fully_shard"
            )
        self._models.append(model)
        for group in groups:
            self.take(group)
        return self

    def take(self, group: Any) -> None:
        """Average a group of parameters that ``fully_shard`` made.

        Raises:
            UsageError: its ranks are not those of the groups before.
        """
        among, between = (None if one is None else dist.get_process_group_ranks(one) for one in meeting(group))
        if among is None:
            raise UsageError("register: replicas without shards; wrap the model in DistributedDataParallel")
        if not self._sharded:
            self._meets = among, between
            self._connect(*meeting(group))
        elif self._meets != (among, between):
            raise UsageError(f"register: sharded among ranks {among}, and other modules among {self._meets[0]}")
        self._sharded.append(ShardedGroup(group, self))

    @property
    def sharded_parameters(self) -> list[torch.Tensor]:
        """This rank's parts of the parameters that ``fully_shard`` gathers and this state averages."""
        return [parameter for group in self._sharded for parameter in group.parameters]

    def name_groups(self) -> None:
        """Name the parameters of all groups, by their places in the models."""
        held = [(group, group.held()) for group in self._sharded]
        found = Names().of([{"params": [one for _, some in held for one in some]}], self._models)
        for group, some in held:
            group.names = [found[id(one)].name for one in some]

    def exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Handle a bucket in the communication hook: returns its buffer, with averages instead of gradients."""
        buffer = bucket.buffer()
        future = future_of(buffer)
        if bucket.index() == 0:
            # A failed backward pass leaves buckets behind.
            self._waiting, self._promised = [], []
        parameters = bucket.parameters()
        self._name(parameters)
        self._waiting += zip(map(self._names.__getitem__, parameters), bucket.gradients(), strict=True)
        self._promised.append((buffer, future))
        # Shares depend on the gradients of all tensors, so buckets wait for the last one.
        if bucket.is_last() or not self._codecs.allocates:
            names, gradients = zip(*self._waiting, strict=True)
            values = [device.flat(one, self.rules.choose(name, one.numel())) for name, one in self._waiting]
            averages = self.average(names, values, [tuple(one.shape) for one in gradients])
            for gradient, average in zip(gradients, averages, strict=True):
                gradient.copy_(torch.as_tensor(average).view(gradient.shape))
            if bucket.is_last():
                self.end_step()
            for held, promised in self._promised:
                promised.set_result(held)
            self._waiting, self._promised = [], []
        return future

    def average(
        self, names: Sequence[str], values: Sequence[Vector], shapes: Sequence[tuple[int, ...]] | None = None
    ) -> list[Vector]:
        """Exchange tensors and average what arrives; every rank calls this with the same names in the same order.

        A codec that allocates shares out among the tensors of one call.

        Args:
            names: names of the tensors.
            values: float32[n] of each, arrays or tensors; they are not changed.
            shapes: true shape of each, for codecs that use it; None if they are not known.

        Returns:
            float32[n] of each, of the same kind, the same bytes on all ranks; zeros where no rank could send.

        Raises:
            NonfiniteGradientError: NaN or infinity under the policy ``error``.
            PayloadError: the received bytes are damaged, or the ranks' models differ.
        """
        known: Sequence[tuple[int, ...] | None] = shapes or [None] * len(names)
        pieces = [
            Piece(name, self.rules.choose(name, len(array)), len(array), shape=shape)
            for name, array, shape in zip(names, values, known, strict=True)
        ]
        return self._exchange(self._codecs, pieces, values)

    def scatter(self, pieces: Sequence[Piece], values: Sequence[Vector]) -> list[Vector]:
        """Average pieces of tensors as :meth:`average` does, each at its owner: float32[n] of this rank's, in order."""
        return self._exchange(self._codecs, pieces, values, scattered=True)

    def average_replicas(self, pieces: Sequence[Piece], values: Sequence[Vector]) -> list[Vector]:
        """Average pieces as :meth:`average` does, among the ranks that own them; what is sent counts as sent on."""
        codecs = self._between
        assert codecs is not None
        averages = self._exchange(codecs, pieces, values)
        tally, codecs.tally = codecs.tally, Tally()
        self._codecs.tally.add(tally.sent_on(self._codecs.place.size))
        return averages

    def end_step(self) -> None:
        """End the step: all tensors have been averaged."""
        self._loaded = []
        self.last, self._codecs.tally = self._codecs.tally, Tally()
        compared, self._compared = self._compared, AllReduceComparison()
        self.comparison = compared if compared.float32_seconds else None
        self.tally.add(self.last)
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self)

    def end_with_backward(self) -> None:
        """End the step when this backward pass ends; nothing says which group of parameters is the last."""
        task = torch._C._current_graph_task_id()
        if task != self._backward:
            self._backward = task
            torch.autograd.Variable._execution_engine.queue_callback(self.end_step)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for later steps, for ``torch.save`` or ``torch.distributed.checkpoint``.

        It differs from rank to rank, so its only key names the rank and their number. The value holds numbers, text and
        tensors in a tuple, which ``torch.distributed.checkpoint`` stores as one object.
        """
        codecs = [as_tensors(one.to_lists()) for one in self._stages]
        held = {"format": FORMAT, "settings": self._settings(), "steps": self.steps, "codecs": codecs}
        return {self._key(): (held,)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same settings, rank and number of ranks.

        Raises:
            UsageError: the settings, the number of ranks or the format differ.
        """
        if self._key() not in saved:
            theirs = ", ".join(map(str, saved))
            raise UsageError(f"state: saved by {theirs}, and this is {self._key()}")
        (found,) = saved[self._key()]
        if found["format"] != FORMAT:
            raise UsageError(f"state: its format is {found['format']}, and this gtrace reads {FORMAT}")
        check_saved(found["settings"], self._settings())
        self.steps = int(found["steps"])
        self._loaded = [as_arrays(lists) for lists in found["codecs"]]
        self._connect(self.group, self._replicas)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the parts that belong to one process."""
        empty: dict[str, Any] = {"_names": KeptNames(), "_models": [], "_sharded": []}
        return {**vars(self), **dict.fromkeys(("group", "_replicas", "on_step", "loss_scale")), **empty}

    def _connect(self, group: dist.ProcessGroup | None, replicas: dist.ProcessGroup | None = None) -> None:
        """Exchange within a group and, with replicas, what it averaged between groups."""
        options = self.options
        kept = self._loaded or [codecs.to_lists() for codecs in self._stages]
        links = LinkOptions(options.schedule, options.seed, vectors.engine)
        common = options.levels == "common"
        self.group, self._replicas, self._wire = group, replicas, Collectives(group)
        self._way = way(options.exchange)
        self._between: RankCodecs | None = None
        first = 0
        if replicas is not None:
            # The same chunk of two replicas is rounded with different randomness.
            first = dist.get_rank(replicas) * dist.get_world_size(group)
            self._between = RankCodecs(self.rules, links, Collectives(replicas), common=common)
        self._codecs = RankCodecs(self.rules, links, self._wire, common=common, first=first)
        self._stages = [self._codecs] if self._between is None else [self._codecs, self._between]
        for codecs, lists in zip(self._stages, kept, strict=False):
            codecs.load_lists(lists)

    def _name(self, parameters: Sequence[torch.Tensor]) -> None:
        self._names.add(parameters, [{"params": parameters}], lambda: self._models)

    def _exchange(
        self, codecs: RankCodecs, pieces: Sequence[Piece], values: Sequence[Vector], *, scattered: bool = False
    ) -> list[Vector]:
        """Encode, send, receive and average, and count what that costs; see :func:`gtrace.training.ways.averaging`."""
        tally, wire, options = codecs.tally, codecs.place, self.options
        assert isinstance(wire, Collectives)
        start, waited, before = time.thread_time(), wire.seconds, wire.sent
        scale = 1.0 if self.loss_scale is None else self.loss_scale()
        values = values if scale == 1.0 else [one / scale for one in values]
        placed, sending = list(pieces), list[Any](values)
        for k, (piece, array) in enumerate(zip(pieces, values, strict=True)):
            if not isinstance(array, np.ndarray):
                placed[k] = replace(piece, device=array.device)
            if count := vectors.count_nonfinite(array):
                tally.nonfinite += count
                where = f"step {self.steps}, rank {dist.get_rank()}, {piece.name}"
                kept = without_nonfinite(array, count, options.nonfinite, where)
                sending[k] = NOT_FINITE if options.nonfinite == "pass" else kept
        exchange = averaging(codecs, self._way, placed, sending, self.steps, scattered=scattered)
        answer: Any = None
        while True:
            try:
                asked = exchange.send(answer)
            except StopIteration as end:
                averages: list[Vector] = end.value
                break
            answer = wire.average(asked) if isinstance(asked, np.ndarray) else wire.scatter(asked)
        tally.codec_seconds += time.thread_time() - start
        tally.wire_seconds += wire.seconds - waited
        tally.wire_bytes += wire.sent - before
        # As many as were sent: those of a gradient that is left out would make every other one look smaller.
        tally.float32_bits += 32 * sum(len(one) for one in sending if sendable(one))
        apart = codecs is self._between or (scattered and self._between is not None)
        if not apart and options.compare_every and self.steps % options.compare_every == 0:
            self._compare(values, averages, [piece.owner == wire.rank for piece in pieces] if scattered else None)
        return averages if scale == 1.0 else [one * scale for one in averages]

    @staticmethod
    def _key() -> str:
        # A checkpoint without it is refused by torch, which names it.
        return f"rank {dist.get_rank()} of {dist.get_world_size()} (resume with as many ranks)"

    def _settings(self) -> dict[str, Any]:
        own = {name: getattr(self.options, name) for name in ("exchange", "levels", "seed", "nonfinite")}
        return {**self.rules.describe(), **own, "refit": str(self.options.schedule)}

    def _compare(self, values: Sequence[Vector], averages: Sequence[Vector], own: Sequence[bool] | None = None) -> None:
        """Compare averages with those of plain all-reduces; ranks that have only their own pieces' do so together."""
        wire, compared = self._wire, self._compared
        ours = torch.cat([torch.as_tensor(part).to(wire.device) for part in values])
        exact, seconds = wire.mean(ours)
        rough, rough_seconds = wire.mean(ours.to(torch.bfloat16))
        if own is not None:
            mine = torch.cat([torch.full((len(part),), one) for part, one in zip(values, own, strict=True)])
            exact, rough = exact[mine], rough[mine]
        truth = exact.double()
        found = torch.cat([truth.new_empty(0), *(torch.as_tensor(part).to(wire.device) for part in averages)])
        sums = torch.stack([one.square().sum() for one in (truth, truth - found, truth - rough)])
        if own is not None:
            sums = wire.mean(sums)[0] * wire.size
        compared.energy += float(sums[0])
        compared.error += float(sums[1])
        compared.bf16_error += float(sums[2])
        compared.float32_seconds += seconds
        compared.bf16_seconds += rough_seconds


#: the name that torch's own hooks use
State = RankExchange


@never_compiled
def ddp_comm_hook(state: RankExchange, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that sends gradients through the codec of ``state``; register it once on a wrapped model::

        model.register_comm_hook(gtrace.training.State("alq:bits=3"), gtrace.training.ddp_comm_hook)

    Collectives block, so nothing overlaps with the backward pass; gloo could not overlap either.

    Args:
        state: see :class:`gtrace.training.State`.
        bucket: torch's bucket.

    Returns:
        A completed future of the bucket's buffer, with the average that arrived instead of the gradients.
    """
    return state.exchange_bucket(bucket)


def keep_own(_state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that sends nothing: each rank keeps its own gradient."""
    future = future_of(bucket.buffer())
    future.set_result(bucket.buffer())
    return future


def future_of(buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    """A future of a bucket's buffer."""
    return torch.futures.Future(devices=[buffer.device] if buffer.device.type == "cuda" else None)


# torch compares the annotations themselves, not their text.
for _hook in (ddp_comm_hook, keep_own):
    _hook.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[torch.Tensor]})


@dataclass(frozen=True, slots=True)
class ShardedGradient:
    """How a gradient of this shape is cut: along ``dim`` into equal chunks, one for each of the ``ranks``.

    The last ones may be shorter or empty. The chunk of rank ``own`` stays here.
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


class ShardedGroup:
    """Takes the place of a group's reduce-scatter and, with replicas (HSDP), of the all-reduce behind it.

    A group is parameters that torch gathers and reduces together. It hands over one buffer for them, which has a block
    for each rank, with that rank's chunk of every gradient, padded to equal length. Each chunk is a piece with a codec
    state of its own; its owner averages it.
    """

    def __init__(self, group: Any, exchange: RankExchange) -> None:
        self._group, self._exchange = group, exchange
        #: names of its parameters; empty before the first step
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
            op: mean, sum, or a sum with a factor.
            async_op: torch never asks for it.
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
        """Average this rank's chunks, [n], with those of its replicas; torch calls this after the reduce-scatter."""
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
            self._known = []
            for one in trained:
                name, shape, dim = names[id(one)], tuple(one._orig_size), one.fsdp_placement.dim
                codec = self._exchange.rules.choose(name, math.prod(shape))
                self._known.append(ShardedGradient(name, codec, shape, dim, ranks.size(), ranks.rank()))
        return self._known


def meeting(group: Any) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The ranks that a group's gradients are cut among, and those that have the same chunk; None if there are none."""
    about = group.mesh_info
    return getattr(about, "shard_process_group", None), getattr(about, "replicate_process_group", None)


def groups_in(model: nn.Module) -> Iterator[Any]:
    """The groups of all sharded modules of a model."""
    for module in model.modules():
        if hasattr(module, "set_custom_reduce_scatter"):
            sharded: Any = module
            state = sharded._get_fsdp_state()
            if not hasattr(state, "_fsdp_param_groups"):
                raise UsageError(f"fully_shard: torch {torch.__version__} is too old; codecs need 2.13")
            yield from state._fsdp_param_groups
