"""Gradients between real ranks: each encodes its own, bytes are exchanged, decoded and averaged.

:class:`State` is the state of a communication hook of ``DistributedDataParallel`` between buckets and steps::

    state = gtrace.training.State("ef:topk:ratio=0.01")
    model.register_comm_hook(state, gtrace.training.ddp_comm_hook)

State is kept per parameter instead of per bucket, because buckets are built again after the first step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch
from torch._C._distributed_c10d import GradBucket

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.errors import UsageError, suggest
from gtrace.metrics import ratio
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.torch_hooks.naming import name_parameters
from gtrace.training import device, vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.exchange import NONFINITE, Nonfinite, Tally, without_nonfinite
from gtrace.training.frames import NOT_FINITE
from gtrace.training.ranks import Piece, RankCodecs
from gtrace.training.ways import averaging, way
from gtrace.training.wire import Collectives

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist
    from torch import nn

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import TableLike
    from gtrace.training.ranks import Values
    from gtrace.training.vectors import Vector

Levels: TypeAlias = Literal["own", "common"]
LEVELS: tuple[Levels, ...] = get_args(Levels)
FORMAT = 1


@dataclass(slots=True)
class AllReduceComparison:
    """The same step with plain all-reduces, measured for comparison.

    Attributes:
        energy: ||exact average||^2.
        error: ||average of decoded - exact average||^2.
        bf16_error: the same of an all-reduce in bfloat16.
        bf16_seconds: wall time of that all-reduce.
        float32_seconds: wall time of one in float32.
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
            as it would be without a codec, so that a gradient scaler skips the step; others as in :class:`Exchange`.
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
    """The state of a communication hook: every parameter's codec states, the step, and the costs.

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
        self.group = process_group
        self.rules = CodecTable.of(codec, rules, min_size)
        for one in self.rules.codecs:
            if one.needs is not None and one.needs.scope == "model":
                raise UsageError(
                    f"{one}: a codec over the whole model cannot go bucket by bucket; leave out scope=model"
                )
            if one.declared:
                raise UsageError(f"{one}: no other rank could decode its payloads, which are declared and not bytes")
        self.steps = 0
        self.last = Tally()
        self.tally = Tally()
        self.comparison: AllReduceComparison | None = None
        self.on_step = on_step
        self._names: dict[int, str] = {}
        #: kept alive: Python gives the id of a freed parameter to another one, which would then have its name
        self._named: list[torch.Tensor] = [] if model is None else list(model.parameters())
        if model is not None:
            found = name_parameters([{"params": self._named}], [model], scan=False)
            self._names = {key: entry.name for key, entry in found.items()}
        self._wire = Collectives(process_group)
        options = self.options
        links = LinkOptions(options.schedule, options.seed, vectors.ENGINE)
        self._codecs = RankCodecs(self.rules, links, self._wire, common=options.levels == "common")
        self._compared = AllReduceComparison()
        #: buckets that wait for others: names, gradients, their buffer, and the promised future
        self._waiting: list[tuple[list[str], list[torch.Tensor], torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Handle a bucket in the communication hook: returns its buffer, with averages instead of gradients."""
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        if bucket.index() == 0:
            # A failed backward pass leaves buckets behind.
            self._waiting = []
        parameters = bucket.parameters()
        if any(id(parameter) not in self._names for parameter in parameters):
            found = name_parameters([{"params": list(parameters)}], [])
            self._named += parameters
            self._names.update({key: entry.name for key, entry in found.items()})
        names = [self._names[id(parameter)] for parameter in parameters]
        self._waiting.append((names, bucket.gradients(), buffer, future))
        # Shares depend on the gradients of all tensors, so buckets wait for the last one.
        if bucket.is_last() or not self._codecs.allocates:
            waiting, self._waiting = self._waiting, []
            names = [name for some, _, _, _ in waiting for name in some]
            gradients = [gradient for _, some, _, _ in waiting for gradient in some]
            values = [
                device.flat(gradient, self.rules.choose(name, gradient.numel()))
                for name, gradient in zip(names, gradients, strict=True)
            ]
            averages = self.average(names, values, [tuple(gradient.shape) for gradient in gradients])
            for gradient, average in zip(gradients, averages, strict=True):
                gradient.copy_(torch.as_tensor(average).view(gradient.shape))
            if bucket.is_last():
                self.end_step()
            for _, _, held, promised in waiting:
                promised.set_result(held)
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
        wire, codecs = self._wire, self._codecs
        tally = codecs.tally
        start, waited, before = time.thread_time(), wire.seconds, wire.sent
        pieces: list[Piece] = []
        sent: list[Values] = []
        known: Sequence[tuple[int, ...] | None] = shapes or [None] * len(names)
        for name, array, shape in zip(names, values, known, strict=True):
            place = array.device if isinstance(array, torch.Tensor) else None
            pieces.append(Piece(name, self.rules.choose(name, len(array)), len(array), place, shape))
            count = vectors.count_nonfinite(array)
            sent.append(array if count == 0 else self._without_nonfinite(name, array, count))
        averages = wire.run(averaging(codecs, way(self.options.exchange), pieces, sent, self.steps))
        tally.codec_seconds += time.thread_time() - start
        tally.wire_seconds += wire.seconds - waited
        tally.wire_bytes += wire.sent - before
        tally.float32_bits += 32 * sum(map(len, values))
        if self.options.compare_every and self.steps % self.options.compare_every == 0:
            self._compare(values, averages)
        return averages

    def end_step(self) -> None:
        """End the step: all tensors have been averaged."""
        self.last, self._codecs.tally = self._codecs.tally, Tally()
        compared, self._compared = self._compared, AllReduceComparison()
        self.comparison = compared if compared.float32_seconds else None
        self.tally.add(self.last)
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state for later steps: numbers, text and tensors for ``torch.save``.

        It differs from rank to rank, so a checkpoint needs the state of each.
        """
        return {
            "format": FORMAT,
            "settings": self._settings(),
            "steps": self.steps,
            **as_tensors(self._codecs.to_lists()),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same settings, rank and number of ranks.

        Raises:
            UsageError: the settings or the format differ.
        """
        if saved.get("format") != FORMAT:
            raise UsageError(f"state: its format is {saved.get('format')}, and this gtrace reads {FORMAT}")
        theirs = saved["settings"]
        for name, value in self._settings().items():
            if theirs.get(name) != value:
                raise UsageError(f"state: saved with {name} {theirs.get(name)}, and here it is {value}")
        self.steps = int(saved["steps"])
        self._codecs.load_lists(as_arrays({name: saved[name] for name in ("senders", "receivers")}))

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the parts that belong to one process."""
        return {**vars(self), "group": None, "on_step": None, "_names": {}, "_named": []}

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            **self.rules.describe(),
            "exchange": options.exchange,
            "levels": options.levels,
            "seed": options.seed,
            "refit": str(options.schedule),
            "nonfinite": options.nonfinite,
            "rank": self._wire.rank,
            "world_size": self._wire.size,
        }

    def _without_nonfinite(self, name: str, values: Vector, count: int) -> Values:
        self._codecs.tally.nonfinite += count
        where = f"step {self.steps}, rank {self._wire.rank}, {name}"
        kept = without_nonfinite(values, count, self.options.nonfinite, where)
        return NOT_FINITE if self.options.nonfinite == "pass" else kept

    def _compare(self, values: Sequence[Vector], averages: Sequence[Vector]) -> None:
        ours, theirs = (
            torch.cat([torch.as_tensor(part).to(self._wire.device) for part in parts]) for parts in (values, averages)
        )
        exact, seconds = self._wire.mean(ours)
        rough, rough_seconds = self._wire.mean(ours.to(torch.bfloat16))
        truth, compared = exact.double(), self._compared
        compared.energy += float(truth.square().sum())
        compared.error += float((truth - theirs).square().sum())
        compared.bf16_error += float((truth - rough).square().sum())
        compared.float32_seconds += seconds
        compared.bf16_seconds += rough_seconds


#: the name that torch's own hooks use
State = RankExchange


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
    buffer = bucket.buffer()
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[buffer.device] if buffer.device.type == "cuda" else None
    )
    future.set_result(buffer)
    return future


# torch compares the annotations themselves, not their text.
for _hook in (ddp_comm_hook, keep_own):
    _hook.__annotations__.update(bucket=GradBucket, **{"return": torch.futures.Future[torch.Tensor]})
