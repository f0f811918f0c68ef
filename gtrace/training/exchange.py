"""The exchange of gradients: workers encode, bytes travel, are decoded and aggregated, and everything is counted.

Simulated workers and hooks into your own training loop use the same :class:`Exchange`; real ranks use
:class:`gtrace.training.State`, which has the same senders and receivers.
"""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

import numpy as np

from gtrace.codecs import codec as build_codec
from gtrace.codecs.assignment import CodecTable, TableLike
from gtrace.codecs.base import Averaged, Codec, advance
from gtrace.codecs.link import LinkOptions, Receiver, Sender, allocate
from gtrace.coding import ENVELOPE_BYTES
from gtrace.errors import EXIT_INPUT, GtraceError, UsageError, suggest
from gtrace.metrics import relative
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.training import vectors
from gtrace.types import WHOLE_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from gtrace.training.vectors import Vector

#: number of the server, which sends averages on, among the numbers of workers
_SERVER = -1
Nonfinite: TypeAlias = Literal["error", "skip", "zero", "pass"]
NONFINITE: tuple[Nonfinite, ...] = get_args(Nonfinite)
#: ways of averaging between ranks, besides those that end in a number
EXCHANGES = ("allgather", "two-shot", "ring", "shared-scale")


class NonfiniteGradientError(GtraceError):
    """A gradient holds NaN or infinity and the policy is ``error``."""

    exit_code = EXIT_INPUT


def without_nonfinite(values: Vector, count: int, policy: Nonfinite, where: str) -> Vector | None:
    """The values to encode if ``count`` of them are NaN or infinite; None for nothing."""
    if policy == "error":
        raise NonfiniteGradientError(
            f"{where}: {count} of {len(values)} gradient values are not finite; lower the learning rate, or choose "
            "nonfinite=skip or zero"
        )
    return vectors.zero_nonfinite(values) if policy == "zero" else None


def node_of(exchange: str) -> int | None:
    """N of ``hierarchical:N``, None for the other ways of averaging between ranks; UsageError for none of them."""
    found = re.fullmatch(r"hierarchical:([1-9][0-9]{0,5})", exchange)
    if found is None and exchange not in EXCHANGES:
        raise UsageError(f"exchange: '{exchange}' is unknown; {suggest(exchange, (*EXCHANGES, 'hierarchical:8'))}")
    return None if found is None else int(found[1])


#: fields of a tally that are the same for averages that are sent on
_COSTS = (
    *("envelope_bits", "frame_bits", "codec_seconds", "fit_seconds", "decode_seconds"),
    *("wire_bytes", "wire_seconds"),
)


@dataclass(slots=True)
class Tally:
    """Costs and errors of an exchange; tallies add up.

    Attributes:
        payload_bits: bits of payloads, envelopes not included, over all workers.
        shared_bits: bits of levels and codes, counted whenever they change.
        envelope_bits: bits of envelopes.
        float32_bits: bits of the same values in float32.
        squared_error: ||mean of decoded - mean of exact||^2.
        energy: ||mean of exact||^2.
        worker_squared_error: sum over workers of ||decoded - exact||^2.
        worker_energy: sum over workers of ||exact||^2.
        zeros: decoded values that are exactly zero.
        nonfinite: gradient values that were NaN or infinite.
        codec_seconds: CPU time of fitting, encoding, decoding and aggregating.
        fit_seconds: the part of it that fitting took.
        decode_seconds: the part of it that decoding and aggregating took.
        down_bits: bits of averages that were sent on, by all ranks in two shots, or by a server; one copy of each.
        down_squared_error: ||sent on - sum||^2 there, over the pieces that this rank sums up.
        down_energy: ||sum||^2 of those pieces.
        frame_bits: bits that separate several messages of a rank.
        wire_bytes: bytes that this rank gave to collectives for other ranks, headers and sizes included.
        wire_seconds: wall time of this rank in collectives.
    """

    payload_bits: int = 0
    shared_bits: int = 0
    envelope_bits: int = 0
    float32_bits: int = 0
    squared_error: float = 0.0
    energy: float = 0.0
    worker_squared_error: float = 0.0
    worker_energy: float = 0.0
    zeros: int = 0
    nonfinite: int = 0
    codec_seconds: float = 0.0
    fit_seconds: float = 0.0
    decode_seconds: float = 0.0
    down_bits: int = 0
    down_squared_error: float = 0.0
    down_energy: float = 0.0
    frame_bits: int = 0
    wire_bytes: int = 0
    wire_seconds: float = 0.0

    @property
    def bits(self) -> int:
        """Bits to compare with the papers': payloads and shared bytes."""
        return self.payload_bits + self.shared_bits

    @property
    def ratio(self) -> float:
        """float32 bits over bits; NaN before anything was sent."""
        return self.float32_bits / self.bits if self.bits else float("nan")

    @property
    def bits_per_element(self) -> float:
        """Bits per value; NaN before anything was sent."""
        return 32.0 * self.bits / self.float32_bits if self.float32_bits else float("nan")

    @property
    def sparsity(self) -> float:
        """Fraction of decoded values that are zero; NaN before anything was sent."""
        return 32.0 * self.zeros / self.float32_bits if self.float32_bits else float("nan")

    @property
    def relative_variance(self) -> float:
        """Squared error of the mean over its energy; NaN if the mean is zero and the error is not."""
        return float(relative(self.squared_error, self.energy))

    @property
    def worker_variance(self) -> float:
        """Squared error of single workers' gradients over their energy."""
        return float(relative(self.worker_squared_error, self.worker_energy))

    def record(self) -> dict[str, Any]:
        """The fields of every run log about a step."""
        names = ("shared_bits", "envelope_bits", "worker_variance", "nonfinite", "codec_seconds", "fit_seconds")
        own = {name: getattr(self, name) for name in names}
        return {"bits": self.bits, "bits_float32": self.float32_bits, **own}

    def ended(
        self, steps: int, loss: float, accuracy: float | None, *, diverged: bool, seconds: float
    ) -> dict[str, Any]:
        """The fields of every run log about the end of a run."""
        costs = {"bits": self.bits, "ratio": self.ratio}
        return {"steps": steps, "loss": loss, "accuracy": accuracy, **costs, "diverged": diverged, "seconds": seconds}

    def add_sent(self, exact: Vector, decoded: Vector) -> None:
        """Add the error of one worker's values."""
        energy, error = vectors.error_of(exact, decoded)
        self.worker_energy += energy
        self.worker_squared_error += error

    def add_sent_on(self, total: Vector, decoded: Vector) -> None:
        """Add the error of a sum that was sent on."""
        energy, error = vectors.error_of(total, decoded)
        self.down_energy += energy
        self.down_squared_error += error

    def sent_on(self, owners: int) -> Tally:
        """The same for one of ``owners`` equal parts of averages, beside the costs of the exchange that made them."""
        sent_on = Tally(**{name: getattr(self, name) for name in _COSTS}, down_bits=owners * self.bits)
        sent_on.down_squared_error, sent_on.down_energy = self.worker_squared_error, self.worker_energy
        return sent_on

    def add(self, other: Tally) -> None:
        """Add the costs of another exchange."""
        for item in fields(self):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


@dataclass(frozen=True, slots=True)
class Bad:
    """NaN or infinity in one worker's gradient of one tensor."""

    tensor: str
    worker: int
    count: int


@dataclass(slots=True)
class BadGradients:
    """Those of a whole training, counted, and their values by tensor; the first three are reported one by one."""

    gradients: int = 0
    steps: int = 0
    tensors: dict[str, int] = field(default_factory=dict)

    def add(self, bad: Sequence[Bad]) -> Sequence[Bad]:
        """Count those of a step; returns the ones to report."""
        shown = bad[: max(0, 3 - self.gradients)]
        self.gradients += len(bad)
        self.steps += bool(bad)
        for item in bad:
            self.tensors[item.tensor] = self.tensors.get(item.tensor, 0) + item.count
        return shown

    def __str__(self) -> str:
        """What there was besides those; empty if that is nothing."""
        if self.gradients <= 3:
            return ""
        where = f"{len(self.tensors)} tensor{'s' * (len(self.tensors) > 1)}"
        steps = f"{self.steps} step{'s' * (self.steps > 1)}"
        return f"{sum(self.tensors.values())} gradient values in {where} were not finite, at {steps}"


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The result of one exchange.

    Attributes:
        gradients: tensor -> aggregated gradient, float32, in its shape, on the device that encoded it; tensors
            that no worker could send are missing.
        tally: the tally of this exchange.
        bad: tensors with NaN or infinity.
    """

    gradients: dict[str, Vector]
    tally: Tally
    bad: tuple[Bad, ...] = ()


def check_saved(saved: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    """Raise UsageError if a state was saved with other settings than those here."""
    other = next((name for name, value in here.items() if saved.get(name) != value), None)
    if other is not None:
        raise UsageError(f"state: saved with {other} {saved.get(other)}, and here it is {here[other]}")


class Exchange:
    """All workers' senders and receivers.

    Each worker fits levels and codes to its own gradients and sends them along. Messages of a
    linear codec are averaged round by round. If a worker lacks a tensor of one, or cannot send it, the others average
    it exactly, in float32, and no memory changes: all workers must continue from the same start.

    Args:
        codec: the codec of every worker, or a table or plan with one for each tensor.
        workers: number of workers.
        seed: seed of the rounding.
        refit: when codecs are fitted, as :meth:`RefitSchedule.parse` reads it.
        nonfinite: what to do with a gradient that holds NaN or infinity: ``skip`` leaves this worker's tensor
            out of the mean, ``zero`` sends zeros instead, ``error`` raises, ``pass`` makes the tensor's average NaN
            (a lone worker's stays as it is), for the training to handle: a gradient scaler skips the step. The other
            workers, as other ranks, have sent theirs by then, and memory has settled, except with a linear codec.
        down: a server sends the average through this codec, or that of this spec, with keys of its own, and all
            workers get the same bytes; ``same`` for the workers' codec. None: the average is sent exactly.

    Raises:
        UsageError: fewer than one worker, or an unknown schedule or policy.
    """

    def __init__(
        self,
        codec: TableLike,
        workers: int = 1,
        *,
        seed: int = 0,
        refit: str | RefitSchedule = DEFAULT_REFIT,
        nonfinite: Nonfinite = "skip",
        down: Codec | str | None = None,
    ) -> None:
        if workers < 1:
            raise UsageError(f"workers: {workers} is below 1")
        if nonfinite not in NONFINITE:
            raise UsageError(f"nonfinite: '{nonfinite}' is unknown; {suggest(str(nonfinite), NONFINITE)}")
        self.rules = CodecTable.of(codec)
        self.workers = workers
        schedule = RefitSchedule.parse(refit) if isinstance(refit, str) else refit
        self._options = LinkOptions(schedule, seed, vectors.engine)
        self.nonfinite = nonfinite
        self._down = build_codec(down) if isinstance(down, str) and down != "same" else down
        self._whole = self.rules.over_model
        self._layout: dict[str, tuple[int, ...]] | None = None
        self._links: dict[tuple[str, int], tuple[Sender, Receiver]] = {}
        #: tensors of the current step
        self._shapes: dict[str, tuple[int, ...]] = {}

    @property
    def noisy(self) -> bool:
        """Whether its error is noise: no bias, and no memory that repays it."""
        every = [*self.rules.codecs, *(self._rules_of(_SERVER).codecs if self._down is not None else [])]
        return all(one.unbiased and not one.stateful for one in every)

    def use(self, codec: Codec) -> None:
        """Continue with other ``bits`` for tensors that no rule matches; codecs are fitted again, memory is kept.

        Args:
            codec: the current one, or a result of its ``at_bits``.
        """
        self.rules = replace(self.rules, codec=codec)

    def step(
        self,
        step: int,
        gradients: Sequence[Mapping[str, Vector]],
        watch: Callable[[str, Sequence[Vector], Sequence[Vector], Vector], None] | None = None,
    ) -> Exchanged:
        """Send every worker's gradients and aggregate what arrives.

        Args:
            step: number of the training step, part of the keys.
            gradients: per worker, tensor -> float32 array of any shape. A tensor that a worker lacks is
                aggregated over the others. Torch tensors on an accelerator are encoded there if the codec supports it.
            watch: called for each tensor (``*`` for the whole model) with the workers' exact gradients, the decoded
                ones, and the aggregate.

        Raises:
            UsageError: not one mapping per worker, or a tensor that changed its shape.
            NonfiniteGradientError: NaN or infinity under the policy ``error``.
        """
        if len(gradients) != self.workers:
            raise UsageError(f"exchange: got gradients of {len(gradients)} workers; expected {self.workers}")
        shapes = {name: tuple(array.shape) for tensors in gradients for name, array in tensors.items()}
        self._shapes = {} if self._whole else shapes
        flat = [self._flatten(tensors) for tensors in gradients]
        tally, bad = Tally(), list[Bad]()
        sending, passing = self._sendable(flat, step, bad)
        aggregated = dict(passing)
        for worker in range(self.workers):
            own = ((name, values) for name, sent in sending.items() for one, values in sent if one == worker)
            self._allocate(worker, own, step, tally)
        down = self._down is not None and any(one.allocates for one in self._rules_of(_SERVER).codecs)
        waiting: dict[str, tuple[list[Vector], list[Vector]]] = {}
        for name, sent in sending.items():
            if not sent:
                continue
            exact = [values for _, values in sent]
            codec = self.rules.choose(name, len(exact[0]))
            if codec.linear:
                decoded, aggregated[name] = self._average(name, sent, step, tally)
            else:
                decoded = [self._travel(name, worker, values, step, tally) for worker, values in sent]
            start = time.thread_time()
            if name not in aggregated:
                aggregated[name] = vectors.aggregate(codec, decoded)
            seconds = time.thread_time() - start
            tally.codec_seconds += seconds
            tally.decode_seconds += seconds
            for values, arrived in zip(exact, decoded, strict=True):
                tally.add_sent(values, arrived)
            if name not in passing:
                waiting[name] = exact, decoded
            # A server that allocates among tensors needs all averages before it sends one on.
            if not down:
                self._finish(waiting, aggregated, step, tally, watch)
                waiting.clear()
        self._finish(waiting, aggregated, step, tally, watch)
        tally.nonfinite = sum(item.count for item in bad)
        return Exchanged(self._unflatten(aggregated, shapes), tally, tuple(bad))

    def _sendable(
        self, flat: Sequence[Mapping[str, Vector]], step: int, bad: list[Bad]
    ) -> tuple[dict[str, list[tuple[int, Vector]]], dict[str, Vector]]:
        """The values that go through codecs, by tensor and worker, and averages that are not finite."""
        sending: dict[str, list[tuple[int, Vector]]] = {}
        passing: dict[str, Vector] = {}
        for name in dict.fromkeys(name for tensors in flat for name in tensors):
            sent = [(worker, tensors[name]) for worker, tensors in enumerate(flat) if name in tensors]
            sending[name] = []
            for worker, values in sent:
                kept: Vector | None = values
                if count := vectors.count_nonfinite(values):
                    bad.append(Bad(name, worker, count))
                    where = f"step {step}, worker {worker}, {name}"
                    kept = without_nonfinite(values, count, self.nonfinite, where)
                if kept is not None:
                    sending[name].append((worker, kept))
            if self.nonfinite == "pass" and len(sending[name]) < len(sent):
                # As between ranks: the others send theirs, because they do not know of it.
                if self.rules.choose(name, len(values)).linear:
                    sending[name] = []
                passing[name] = values if self.workers == 1 else values * math.nan
        return sending, passing

    def _finish(
        self,
        waiting: Mapping[str, tuple[list[Vector], list[Vector]]],
        aggregated: dict[str, Vector],
        step: int,
        tally: Tally,
        watch: Callable[[str, Sequence[Vector], Sequence[Vector], Vector], None] | None,
    ) -> None:
        """Send averages on if a server does so, and measure their error."""
        if self._down is not None:
            self._allocate(_SERVER, [(name, aggregated[name]) for name in waiting], step, tally)
        for name, (exact, decoded) in waiting.items():
            if self._down is not None:
                aggregated[name] = self._travel(name, _SERVER, aggregated[name], step, tally)
            # The mean is rounded to float32 like every aggregate, so that an exact exchange has no error.
            energy, error = vectors.error_of(vectors.plain_mean(exact), aggregated[name])
            tally.energy += energy
            tally.squared_error += error
            if watch is not None:
                watch(name, exact, decoded, aggregated[name])

    def _allocate(self, worker: int, sending: Iterable[tuple[str, Vector]], step: int, tally: Tally) -> None:
        if not any(one.allocates for one in self._rules_of(worker).codecs):
            return
        start = time.thread_time()
        allocate([(self._link(name, worker, len(values))[0], values) for name, values in sending], step)
        seconds = time.thread_time() - start
        tally.codec_seconds += seconds
        tally.fit_seconds += seconds

    def to_arrays(self) -> dict[str, Any]:
        """The state for later steps, as plain values and arrays."""
        return {
            "codecs": self.rules.describe(),
            "layout": None if self._layout is None else [[name, list(shape)] for name, shape in self._layout.items()],
            "links": [
                [name, worker, sender.to_arrays(), receiver.to_arrays()]
                for (name, worker), (sender, receiver) in self._links.items()
            ],
        }

    def load_arrays(self, saved: Mapping[str, Any]) -> None:
        """Undo :meth:`to_arrays`, for an exchange with the same arguments.

        Raises:
            UsageError: the codecs differ.
        """
        check_saved(saved.get("codecs", {}), self.rules.describe())
        layout = saved["layout"]
        self._layout = None if layout is None else {name: tuple(shape) for name, shape in layout}
        self._links = {}
        for name, worker, sent, received in saved["links"]:
            sender, receiver = self._link(name, worker, int(sent["state"]["size"]))
            sender.load_arrays(sent)
            receiver.load_arrays(received)

    def _link(self, name: str, worker: int, size: int) -> tuple[Sender, Receiver]:
        link = self._links.get((name, worker))
        codec = self._rules_of(worker).choose(name, size)
        if link is None:
            about: dict[str, Any] = {"tensor": name, "worker": worker, "shape": self._shapes.get(name)}
            if worker == _SERVER:
                about |= {"worker": 0, "role": "down"}
            sender = Sender(codec, size, self._options, **about)
            link = self._links[name, worker] = (sender, Receiver(codec, size, vectors.engine))
        elif codec != link[0].codec:
            link[0].adopt(codec)
            link[1].codec = codec
        return link

    def _rules_of(self, worker: int) -> CodecTable:
        if worker == _SERVER and isinstance(self._down, Codec):
            return replace(self.rules, codec=self._down, tensors={})
        return self.rules

    def _travel(self, name: str, worker: int, values: Vector, step: int, tally: Tally) -> Vector:
        """Send one tensor to the other end, decode it there, and count it."""
        start = time.thread_time()
        sender, receiver = self._link(name, worker, len(values))
        fitting = sender.fit_seconds
        message = sender.send(values, step)
        sent = time.thread_time()
        arrived: Vector = receiver.receive(message, vectors.place_of(values))
        tally.decode_seconds += time.thread_time() - sent
        sender.settle(values, arrived)
        tally.codec_seconds += time.thread_time() - start
        tally.fit_seconds += sender.fit_seconds - fitting
        if worker == _SERVER:
            tally.down_bits += message.payload_bits + message.shared_bits
            tally.add_sent_on(values, arrived)
        else:
            tally.payload_bits += message.payload_bits
            tally.shared_bits += message.shared_bits
            tally.envelope_bits += 8 * ENVELOPE_BYTES
            tally.float32_bits += 32 * len(values)
            tally.zeros += vectors.count_zeros(arrived)
        return arrived

    def _average(
        self, name: str, sent: Sequence[tuple[int, Vector]], step: int, tally: Tally
    ) -> tuple[list[Vector], Vector]:
        """Send one tensor of all workers by the rounds of its codec: each worker's part, and the common result."""
        start = time.thread_time()
        tally.float32_bits += sum(32 * len(values) for _, values in sent)
        if len(sent) < self.workers:
            tally.payload_bits += sum(32 * len(values) for _, values in sent)
            own = [values for _, values in sent]
            average = vectors.plain_mean(own)
        else:
            runs = [self._link(name, worker, len(values))[0].rounds(values, step) for worker, values in sent]
            found = [advance(run) for run in runs]
            while messages := [one for one in found if not isinstance(one, Averaged)]:
                tally.payload_bits += sum(8 * message.nbytes for message in messages)
                mean: NDArray[np.float32] = np.asarray(np.mean(messages, axis=0, dtype=np.float64), np.float32)
                found = [advance(run, mean) for run in runs]
            ended = [one for one in found if isinstance(one, Averaged)]
            own, average = [one.own for one in ended], ended[0].decoded
        tally.zeros += sum(map(vectors.count_zeros, own))
        tally.codec_seconds += time.thread_time() - start
        return own, average

    def _flatten(self, tensors: Mapping[str, Vector]) -> dict[str, Vector]:
        layout = {name: tuple(array.shape) for name, array in tensors.items()}
        chosen = {name: self.rules.choose(name, math.prod(shape)) for name, shape in layout.items()}
        flat = {name: vectors.flat(array, chosen[name]) for name, array in tensors.items()}
        if not self._whole:
            return flat
        if self._layout is None:
            self._layout = layout
        if layout != self._layout:
            missing = sorted(set(self._layout) ^ set(layout))
            raise UsageError(
                f"exchange: a codec over the whole model needs the same tensors at every step; "
                f"{', '.join(missing) or 'a shape'} differs from the first step"
            )
        return {WHOLE_MODEL: vectors.concatenated([flat[name] for name in self._layout])}

    def _unflatten(self, aggregated: dict[str, Vector], shapes: dict[str, tuple[int, ...]]) -> dict[str, Vector]:
        if self._layout is not None:
            whole = aggregated.get(WHOLE_MODEL)
            if whole is None:
                return {}
            parts = vectors.cut(whole, [math.prod(shape) for shape in self._layout.values()])
            aggregated = dict(zip(self._layout, parts, strict=True))
        return {name: values.reshape(shapes[name]) for name, values in aggregated.items()}
