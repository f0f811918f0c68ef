"""Gradients between real ranks: each encodes its own, bytes are exchanged, decoded and averaged.

:class:`State` is what a communication hook of ``DistributedDataParallel`` keeps between buckets and steps::

    state = gtrace.training.State("ef:topk:ratio=0.01")
    model.register_comm_hook(state, gtrace.training.ddp_comm_hook)

Everything is kept by parameter and not by bucket, because buckets are built anew after the first step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import torch

from gtrace.codecs.assignment import CodecTable
from gtrace.errors import UsageError, suggest
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.torch_hooks.naming import name_parameters
from gtrace.training import vectors
from gtrace.training.collectives import Collectives
from gtrace.training.ddp import Shots
from gtrace.training.exchange import NONFINITE, Nonfinite, NonfiniteGradientError, Tally
from gtrace.training.frames import NOT_FINITE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import torch.distributed as dist
    from torch import nn
    from torch._C._distributed_c10d import GradBucket

    from gtrace.codecs import Codec
    from gtrace.codecs.assignment import TableLike
    from gtrace.training.ddp import Values
    from gtrace.training.vectors import Vector

ExchangeKind: TypeAlias = Literal["allgather", "two-shot"]
EXCHANGES: tuple[ExchangeKind, ...] = get_args(ExchangeKind)
Levels: TypeAlias = Literal["own", "common"]
LEVELS: tuple[Levels, ...] = get_args(Levels)
FORMAT = 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """What a step would have been with plain all-reduces of the same gradients, measured beside it.

    Attributes:
        relative_variance: ||average of decoded - exact average||^2 / ||exact average||^2.
        bf16_variance: the same of an all-reduce in bfloat16.
        bf16_seconds: wall time of that all-reduce.
        float32_seconds: wall time of one in float32.
    """

    relative_variance: float
    bf16_variance: float
    bf16_seconds: float
    float32_seconds: float


@dataclass(slots=True)
class _Sums:
    """What comparisons add up over the buckets of a step."""

    energy: float = 0.0
    error: float = 0.0
    bf16_error: float = 0.0
    bf16_seconds: float = 0.0
    float32_seconds: float = 0.0

    def close(self) -> Comparison | None:
        if not self.float32_seconds:
            return None
        share = 1 / self.energy if self.energy > 0 else float("nan")
        return Comparison(self.error * share, self.bf16_error * share, self.bf16_seconds, self.float32_seconds)


#: a bucket that waits for the others: names, gradients, the buffer that they lie in, and what the hook promised
_Waiting: TypeAlias = "tuple[list[str], list[torch.Tensor], torch.Tensor, torch.futures.Future[torch.Tensor]]"


class State:
    """What a communication hook keeps: every parameter's codec states, the step, and what it all cost.

    Args:
        codec: a codec or its spec, for all tensors that no rule is about; or a table or plan, without rules.
        process_group: who exchanges; None for the default group.
        model: names the parameters; without it they are looked for among all live modules.
        exchange: ``allgather`` sends every rank's payload to all others; ``two-shot`` sends each rank a piece of every
            tensor, which it decodes, averages and encodes once more for all: fewer bytes from three ranks on, and
            a second error, which is measured. Messages of linear codecs go through all-reduces either way.
        levels: ``own``: each rank fits to its own gradient, and its levels travel with its payload; ``common``: where
            the schedule says so, ranks exchange their sketches and all fit to the sum.
        rules: pattern -> codec for some tensors: ``{"bias": "none"}``; see
            :class:`gtrace.codecs.assignment.CodecTable`.
        min_size: tensors with fewer elements go uncompressed.
        seed: of the rounding; ranks and stages have keys of their own.
        refit: when codecs are fitted, as :meth:`RefitSchedule.parse` reads it.
        nonfinite: what to do with a gradient that holds NaN or infinity. ``pass``, the default, makes the average NaN,
            as it would be without a codec, so that a gradient scaler skips the step; others as in :class:`Exchange`.
        compare_every: every so many steps the same gradients go through plain all-reduces in float32 and in bfloat16,
            too, for ``comparison``; 0 for never.
        on_step: called with this state after the last bucket of each step.

    Attributes:
        steps: steps that were exchanged to their end.
        tally: summed over the steps, of this rank.
        last: tally of the step before.
        comparison: of the step before; None where there was none.

    Raises:
        UsageError: an unknown codec or choice, a codec over the whole model, or one whose payloads are no bytes that
            a receiver could decode.
    """

    def __init__(
        self,
        codec: TableLike,
        process_group: dist.ProcessGroup | None = None,
        *,
        model: nn.Module | None = None,
        exchange: ExchangeKind = "allgather",
        levels: Levels = "own",
        rules: Mapping[str, str | Codec] | Iterable[tuple[str, str | Codec]] = (),
        min_size: int = 0,
        seed: int = 0,
        refit: str | RefitSchedule = DEFAULT_REFIT,
        nonfinite: Nonfinite = "pass",
        compare_every: int = 100,
        on_step: Callable[[State], None] | None = None,
    ) -> None:
        for what, value, allowed in (
            ("exchange", exchange, EXCHANGES),
            ("levels", levels, LEVELS),
            ("nonfinite", nonfinite, NONFINITE),
        ):
            if value not in allowed:
                raise UsageError(f"{what}: '{value}' is unknown; {suggest(str(value), allowed)}")
        if compare_every < 0:
            raise UsageError(f"compare_every: {compare_every} is below 0")
        self.rules = CodecTable.of(codec, rules, min_size)
        for one in self.rules.codecs:
            if one.needs is not None and one.needs.scope == "model":
                raise UsageError(
                    f"{one}: a codec over the whole model cannot go bucket by bucket; leave out scope=model"
                )
            if one.declared:
                raise UsageError(f"{one}: no other rank could decode its payloads, which are declared and not bytes")
        self.exchange, self.levels, self.seed, self.nonfinite = exchange, levels, seed, nonfinite
        self.refit = RefitSchedule.parse(refit) if isinstance(refit, str) else refit
        self.compare_every = compare_every
        self.steps = 0
        self.tally, self.last = Tally(), Tally()
        self.comparison: Comparison | None = None
        self.on_step = on_step
        self._names: dict[int, str] = {}
        if model is not None:
            groups = [{"params": list(model.parameters())}]
            self._names = {key: entry.name for key, entry in name_parameters(groups, [model], scan=False).items()}
        self._group = process_group
        self._collectives: Collectives | None = None
        self._shots = Shots(self.rules, seed, self.refit, common=levels == "common")
        self._sums = _Sums()
        self._waiting: list[_Waiting] = []

    def exchange_bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The work of the communication hook: the bucket's buffer with averages in the place of gradients."""
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
            devices=[buffer.device] if buffer.device.type == "cuda" else None
        )
        if bucket.index() == 0:
            # What a backward pass left that failed on its way.
            self._waiting = []
        self._waiting.append((self._names_of(bucket.parameters()), bucket.gradients(), buffer, future))
        # Shares come from the gradients of all tensors, so buckets wait for the last one.
        if bucket.is_last() or not self._shots.allocates:
            waiting, self._waiting = self._waiting, []
            self._exchange(
                [(name, one) for names, found, _, _ in waiting for name, one in zip(names, found, strict=True)]
            )
            if bucket.is_last():
                self.end_step()
            for _, _, held, promised in waiting:
                promised.set_result(held)
        return future

    def _exchange(self, gradients: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Put averages in the place of some gradients."""
        names = [name for name, _ in gradients]
        values = [vectors.flat(one, self.rules.choose(name, one.numel())) for name, one in gradients]
        shapes = [tuple(one.shape) for _, one in gradients]
        for (_, gradient), average in zip(gradients, self.average(names, values, shapes), strict=True):
            gradient.copy_(torch.as_tensor(average).view(gradient.shape))

    def average(
        self, names: Sequence[str], values: Sequence[Vector], shapes: Sequence[tuple[int, ...]] | None = None
    ) -> list[Vector]:
        """Exchange some tensors and average what arrives; every rank calls this with the same names in the same order.

        A codec that allocates shares out among the tensors of one call.

        Args:
            names: of the tensors.
            values: float32[n] of each, arrays or tensors; they are not changed.
            shapes: true shape of each, for codecs that look at it; None if they are not known.

        Returns:
            float32[n] of each, of the same kind, the same bytes on all ranks; zeros where no rank could send.

        Raises:
            NonfiniteGradientError: NaN or infinity under the policy ``error``.
            PayloadError: what arrived is damaged, or the ranks' models differ.
        """
        links = self._links()
        tally = self._shots.tally
        start, waited, before = time.thread_time(), links.seconds, links.sent
        shot = self._shots.one if self.exchange == "allgather" else self._shots.two
        sent = [self._finite(name, array) for name, array in zip(names, values, strict=True)]
        averages: list[Vector] = list(values)
        linear = [self.rules.choose(name, len(array)).linear for name, array in zip(names, values, strict=True)]
        for way, chosen in ((shot, False), (self._shots.averaged, True)):
            among = [k for k, one in enumerate(linear) if one is chosen]
            if among:
                found = way(
                    links,
                    [names[k] for k in among],
                    [sent[k] for k in among],
                    [values[k] for k in among],
                    self.steps,
                    None if shapes is None else [shapes[k] for k in among],
                )
                for k, average in zip(among, found, strict=True):
                    averages[k] = average
        tally.codec_seconds += time.thread_time() - start
        tally.wire_seconds += links.seconds - waited
        tally.wire_bytes += links.sent - before
        tally.float32_bits += 32 * sum(map(len, values))
        if self.compare_every and self.steps % self.compare_every == 0:
            self._compare(links, *(_joined(one, links.device) for one in (values, averages)))
        return averages

    def end_step(self) -> None:
        """All tensors of a step have been averaged."""
        self.last, self._shots.tally = self._shots.tally, Tally()
        self.comparison, self._sums = self._sums.close(), _Sums()
        self.tally.add(self.last)
        self.steps += 1
        if self.on_step is not None:
            self.on_step(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything that later steps depend on, of this rank: numbers, text and tensors for ``torch.save``.

        Ranks differ in it, so that a checkpoint holds one of each.
        """
        links = self._links()
        place = {"rank": links.rank, "world_size": links.size}
        return {
            "format": FORMAT,
            "settings": {**self._settings(), **place},
            "steps": self.steps,
            **self._shots.to_lists(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, with the same settings, on the same rank of as many.

        Raises:
            UsageError: something else is different, or the format is another one.
        """
        links = self._links()
        if saved.get("format") != FORMAT:
            raise UsageError(f"state: its format is {saved.get('format')}, and this gtrace reads {FORMAT}")
        theirs = saved["settings"]
        for name, value in {**self._settings(), "rank": links.rank, "world_size": links.size}.items():
            if theirs.get(name) != value:
                raise UsageError(f"state: saved with {name} {theirs.get(name)}, and here it is {value}")
        self.steps = int(saved["steps"])
        self._shots.load_lists(saved, links.rank)

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: without the process group and what else belongs to one process."""
        return {**vars(self), "_group": None, "_collectives": None, "on_step": None, "_names": {}}

    def _settings(self) -> dict[str, Any]:
        return {
            **self.rules.describe(),
            "exchange": self.exchange,
            "levels": self.levels,
            "seed": self.seed,
            "refit": str(self.refit),
            "nonfinite": self.nonfinite,
        }

    def _links(self) -> Collectives:
        if self._collectives is None:
            self._collectives = Collectives(self._group)
        return self._collectives

    def _names_of(self, parameters: Sequence[torch.Tensor]) -> list[str]:
        if any(id(parameter) not in self._names for parameter in parameters):
            found = name_parameters([{"params": list(parameters)}], [])
            self._names.update({key: entry.name for key, entry in found.items()})
        return [self._names[id(parameter)] for parameter in parameters]

    def _finite(self, name: str, values: Vector) -> Values:
        """What is to be encoded of this rank's values."""
        count = vectors.count_nonfinite(values)
        if count == 0:
            return values
        self._shots.tally.nonfinite += count
        if self.nonfinite == "error":
            raise NonfiniteGradientError(
                f"step {self.steps}, rank {self._links().rank}, {name}: {count} of {len(values)} gradient values are "
                "not finite; lower the learning rate, or choose nonfinite=pass, skip or zero"
            )
        if self.nonfinite == "zero":
            return vectors.zero_nonfinite(values)
        return NOT_FINITE if self.nonfinite == "pass" else None

    def _compare(self, links: Collectives, ours: torch.Tensor, averages: torch.Tensor) -> None:
        exact, seconds = links.mean(ours)
        rough, rough_seconds = links.mean(ours.to(torch.bfloat16))
        truth, sums = exact.double(), self._sums
        sums.energy += float(truth.square().sum())
        sums.error += float((truth - averages).square().sum())
        sums.bf16_error += float((truth - rough).square().sum())
        sums.float32_seconds += seconds
        sums.bf16_seconds += rough_seconds


def _joined(parts: Sequence[Vector], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.as_tensor(part).to(device) for part in parts])
