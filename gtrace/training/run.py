"""One run of a study: a model that simulated workers train through one codec.

The workers share one model, since all of them step with the same aggregated gradient.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from gtrace.codecs import Codec, Identity
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.noise import equivalent_batch
from gtrace.training import vectors
from gtrace.training.checkpoint import as_arrays, as_tensors
from gtrace.training.exchange import Bad, BadGradients, Exchange, Nonfinite, Tally
from gtrace.training.joint import JointOptimizer, JointWorkers, LocalSteps, OneBitAdam, ZeroOneAdam
from gtrace.training.measure import Measurement, NoiseAhead
from gtrace.training.neural import NeuralCompression, ShadowError, ShadowSummary, finite_mean, shadow
from gtrace.training.plain import fresh_model, seeded_batch
from gtrace.training.policies import BitControl
from gtrace.training.settings import JOINT, OPTIMIZERS, Kind, RunPlan, StudySettings
from gtrace.training.weights import QuantizedWeights

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray
    from torch import nn

    from gtrace.costs import Network
    from gtrace.training.ranks import RankCodecs
    from gtrace.training.tasks import Evaluation, Task

#: torch's in clip_grad_norm_
_CLIP_EPSILON = 1e-6
_HANDLED: dict[tuple[Kind, Nonfinite], str] = {
    ("weight", "pass"): "the step goes on with them",
    ("weight", "error"): "the run stops",
    ("weight", "skip"): "this worker's tensor is left out of the mean",
    ("weight", "zero"): "zeros are sent in their place",
    ("neural", "error"): "the run stops",
    ("neural", "skip"): "weight gradients that hold any are left out",
    ("neural", "zero"): "zeros replace them",
}


@dataclass(slots=True)
class RunResult:
    """The result of one run of a study, so far or at the end.

    Attributes:
        run: spec of its codec; with quantized weights see :class:`gtrace.training.settings.RunPlan`.
        seed: seed of the run.
        steps: number of steps done.
        loss: loss at the last evaluation; NaN before the first.
        accuracy: accuracy at the last evaluation; None if the task has none.
        tally: bits and errors summed over the steps; its variances are those of the whole run.
        relative_variance: mean over the steps of the aggregated gradient's relative variance; of all layers' neural
            gradients together, if those are compressed.
        worker_variance: mean over the steps of a single worker's relative variance.
        seconds: CPU time of the steps; evaluations and shadow passes are not included.
        sim_seconds: duration of the steps over the simulated network; NaN without a network.
        weight_error: ||quantized weights - weights||^2 / ||weights||^2 in the last step; NaN without quantized ones.
        shadow: difference of weight gradients from exact ones, over the shadow passes.
        first_loss: test loss before the first step.
        diverged: in words, if the training loss became non-finite, or the final test loss exceeds the first;
            otherwise empty.
        finished: whether the run reached its end.
    """

    run: str
    seed: int
    steps: int = 0
    loss: float = math.nan
    accuracy: float | None = None
    tally: Tally = field(default_factory=Tally)
    shadow: ShadowSummary = field(default_factory=ShadowSummary)
    relative_variance: float = math.nan
    worker_variance: float = math.nan
    weight_error: float = math.nan
    seconds: float = 0.0
    sim_seconds: float = math.nan
    first_loss: float = math.nan
    diverged: str = ""
    finished: bool = False

    def to_plain(self) -> dict[str, Any]:
        """For checkpoints, which runs with shadow passes do not have."""
        return {name: value for name, value in asdict(self).items() if name != "shadow"}

    @classmethod
    def from_plain(cls, saved: Mapping[str, Any]) -> RunResult:
        """Undo :meth:`to_plain`."""
        return cls(**{**saved, "tally": Tally(**saved["tally"])})


class TrainingRun:
    """One codec's training; its ``plan`` sets it apart from the study's other runs, which have the same ``settings``.

    Args:
        first_loss: test loss of the untrained model, if another run with the same seed has measured it.

    Attributes:
        label: the fields that all of its records in the run log have.
        tensors: name -> number of elements of each trained tensor.
    """

    def __init__(self, task: Task, plan: RunPlan, settings: StudySettings, first_loss: float | None = None) -> None:
        codec, policy, weights, joint = plan
        self._task, self._codec, self._settings = task, codec, settings
        self._model = fresh_model(task, settings.seed)
        self._named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        self._optimizer = self._own_optimizer(self._model)
        self._neural: NeuralCompression | None = None
        if settings.kind == "neural":
            assert isinstance(codec, Codec), "a study refuses plans of neural gradients"
            self._neural = NeuralCompression(self._model, codec, settings)
        self._joint: JointWorkers | None = None
        if joint:
            rules = CodecTable.of(codec, min_size=settings.min_size)
            options = LinkOptions(settings.refit, settings.seed, vectors.engine)
            self._joint = JointWorkers(self._model, settings.workers, self._joint_optimizer, rules, options)
        self._exchange = Exchange(
            # If neural gradients are compressed, weight gradients are averaged exactly.
            CodecTable.of(codec, min_size=settings.min_size) if self._neural is None else Identity(),
            settings.workers,
            seed=settings.seed,
            refit=settings.refit,
            nonfinite=settings.nonfinite,
            down=(settings.down or None) if codec != Identity() else None,
        )
        self._clip = settings.clip or task.recipe.clip
        self._ahead = NoiseAhead(task, self._model, self._optimizer, settings)
        chooser = None if policy is None else policy.begin(settings.seed)
        self._control: BitControl | None = None
        if chooser is not None:
            assert isinstance(codec, Codec), "a table has no policy"
            self._control = BitControl(chooser, codec, self._exchange)
        #: CPU time within a step that does not count: shadow passes, measurements
        self._aside = 0.0
        self._variances: tuple[list[float], list[float]] = [], []
        self._bad = BadGradients()
        self.result = RunResult(plan.name, settings.seed)
        self.weights = QuantizedWeights(self._model, weights, settings.refit)
        self.label = {"run": self.result.run, "seed": settings.seed}
        self.tensors = {name: p.numel() for name, p in self._named}
        self.result.first_loss = self._test().loss if first_loss is None else first_loss
        self._remedy = f"a lower learning rate than {settings.lr:g}"
        if codec != Identity():
            self._remedy += ", or a codec with less error"
        if weights is not None:
            self._remedy += ", or more levels of weights"

    def _own_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        settings = self._settings
        if not settings.optimizer:
            return self._task.optimizer(model, settings.lr)
        name, options = OPTIMIZERS[settings.method]
        return getattr(torch.optim, name)(model.parameters(), lr=settings.lr, **options)

    def _joint_optimizer(self, model: nn.Module, codecs: RankCodecs) -> JointOptimizer:
        settings = self._settings
        if settings.method == "onebit-adam":
            return OneBitAdam(model, codecs, warmup=settings.warmup)
        if settings.method == "zeroone-adam":
            every = settings.every or JOINT["zeroone-adam"] or 1
            # By the end of training the interval has reached its limit.
            doubling = max(1, (settings.steps - settings.warmup) // every.bit_length())
            return ZeroOneAdam(model, codecs, warmup=settings.warmup, every=every, doubling=doubling)
        return LocalSteps(model, codecs, inner=self._own_optimizer(model), every=settings.every or 1)

    def advance(self, step: int) -> Iterator[dict[str, Any]]:
        """Make a step, and test the model if that is due; yields the run log's records, warnings among them."""
        settings, result = self._settings, self.result
        record = yield from self._step(step)
        if not math.isfinite(record["loss"]):
            result.diverged = (
                f"{result.run}: diverged; no worker's training loss is finite at step {step}, and the run stops there. "
                f"Try {self._remedy}"
            )
        last = bool(result.diverged) or step == settings.steps - 1
        if last or (step + 1) % settings.eval_every == 0:
            found = self._test()
            result.loss, result.accuracy = found.loss, found.accuracy
            yield {"type": "eval", **self.label, "step": step, "loss": found.loss, "accuracy": found.accuracy}
        if last:
            if not result.diverged and not result.loss <= result.first_loss:
                result.diverged = (
                    f"{result.run}: learned nothing; the test loss ends at {result.loss:.4g}, above the "
                    f"{result.first_loss:.4g} it began with. Try {self._remedy}"
                )
            yield from map(warning, self._last_words())
            result.finished = True
            end = result.tally.ended(
                result.steps, result.loss, result.accuracy, diverged=bool(result.diverged), seconds=result.seconds
            )
            yield {"type": "end", **self.label, **end}

    def _step(self, step: int) -> Generator[dict[str, Any], None, dict[str, Any]]:
        start, self._aside = time.process_time(), 0.0
        result = self.result
        lr = self._learning_rate(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.weights.fit(step)
        with self.weights.in_place():
            losses, gradients, errors = self._gradients(step)
        # One worker's bad batch is not a divergence: that needs every worker's loss to be non-finite.
        loss = finite_mean(losses)
        chosen = {} if self._control is None else self._control.before(step, loss, gradients)
        measured: dict[str, float] = {}
        if self._joint is None:
            tally, bad, measured = self._exchange_and_step(step, gradients)
        else:
            tally, bad = self._step_jointly(self._joint, step, lr)
        seconds = time.process_time() - start - self._aside
        result.steps = step + 1
        result.seconds += seconds
        result.tally.add(tally)
        variances = tally.relative_variance, tally.worker_variance
        if self._joint is not None and not tally.worker_energy:
            variances = math.nan, math.nan  # nothing was encoded
        for seen, value in zip(self._variances, variances, strict=True):
            if math.isfinite(value):
                seen.append(value)
        result.relative_variance, result.worker_variance = map(finite_mean, self._variances)
        record = {
            "type": "step",
            **self.label,
            "step": step,
            "loss": loss,
            "lr": lr,
            **tally.record(),
            "relative_variance": variances[0],
            "worker_variance": variances[1],
            "seconds": seconds,
            **chosen,
        }
        if self._settings.down:
            record["down_bits"] = tally.down_bits
        if self.weights.levels is not None:
            record["weight_error"] = result.weight_error = self.weights.error
        if self._settings.network is not None:
            record["sim_seconds"] = self._simulated(self._settings.network, tally, seconds)
        yield record
        if measured:
            yield {"type": "measure", **self.label, "step": step, **measured}
        for error in errors:
            yield {"type": "shadow", **self.label, "step": step, **asdict(error)}
        for item in self._bad.add(bad):
            yield warning(
                f"{result.run}: step {step}, worker {item.worker}, {item.tensor}: {item.count} gradient values "
                f"are not finite; {_HANDLED[self._settings.kind, self._settings.nonfinite]}"
            )
        return record

    def _exchange_and_step(
        self, step: int, gradients: Sequence[Mapping[str, NDArray[np.float32]]]
    ) -> tuple[Tally, Sequence[Bad], dict[str, float]]:
        every, clip = self._settings.measure, self._clip
        measurement = Measurement(self._optimizer, dict(self._named)) if every and step % every == 0 else None
        exchanged = self._exchange.step(step, gradients, None if measurement is None else measurement.add)
        tally, bad = exchanged.tally, exchanged.bad
        if self._neural is not None:
            tally, found = self._neural.collect()
            tally.nonfinite += exchanged.tally.nonfinite
            bad = found + bad
        for name, parameter in self._named:
            averaged = exchanged.gradients.get(name)
            parameter.grad = None if averaged is None else torch.from_numpy(averaged).to(parameter.device)
        norm = None if clip is None else torch.nn.utils.clip_grad_norm_((p for _, p in self._named), clip)
        measured: dict[str, float] = {}
        if measurement is not None:
            began = time.process_time()
            clipped = 1.0 if clip is None or norm is None else min(1.0, clip / (float(norm) + _CLIP_EPSILON))
            # What the codec's noise costs over the steps that are left.
            ratio = math.nan
            if not self._ahead.why and self._exchange.noisy:
                rates = [self._learning_rate(k) for k in range(step, self._settings.steps)]
                with self.weights.in_place():
                    ratio = self._ahead.ratio(step, gradients, exchanged.gradients, clipped, finite_mean(rates))
            batch = equivalent_batch(self._settings.workers * self._settings.batch_size, ratio)
            self._aside += measurement.seconds + time.process_time() - began
            measured = {**measurement.fields(), "filtered_ratio": ratio, "equivalent_batch": batch}
        self._optimizer.step()
        return tally, bad, measured

    def _step_jointly(self, joint: JointWorkers, step: int, lr: float) -> tuple[Tally, Sequence[Bad]]:
        bad = joint.check(step, self._settings.nonfinite)
        if self._clip is not None:
            for model in joint.models:
                torch.nn.utils.clip_grad_norm_(model.parameters(), self._clip)
        tally = joint.step(lr, last=step == self._settings.steps - 1)
        tally.nonfinite = sum(item.count for item in bad)
        return tally, bad

    def _gradients(self, step: int) -> tuple[list[float], list[dict[str, NDArray[np.float32]]], list[ShadowError]]:
        """Loss and gradients of each worker on its own batch, and the first worker's shadow."""
        settings = self._settings
        losses, gradients = [], []
        errors: list[ShadowError] = []
        for worker in range(settings.workers):
            model = self._model if self._joint is None else self._joint.models[worker]
            with (
                seeded_batch(self._task, settings.seed, step, worker, settings.batch_size) as batch,
                contextlib.nullcontext() if self._neural is None else self._neural.batch(step, worker) as layers,
            ):
                loss = self._task.loss(model, batch)
                every = settings.shadow if worker == 0 and self._codec != Identity() else None
                shadowed = every is not None and step % every == 0
                model.zero_grad(set_to_none=True)
                loss.backward(retain_graph=shadowed)  # type: ignore[no-untyped-call]
                if shadowed and self._neural is not None and layers is not None:
                    start = time.process_time()
                    errors = shadow(layers, loss, dict(self._named), self._neural.owners)
                    spent = time.process_time() - start
                    self._aside += spent
                    self.result.shadow.add(errors, spent)
            losses.append(loss.item())
            gradients.append({name: p.grad.cpu().numpy() for name, p in self._named if p.grad is not None})
        return losses, gradients, errors

    def _simulated(self, network: Network, tally: Tally, seconds: float) -> float:
        """Duration of a step over the network; adds it to the result and passes it to the policy's next choice."""
        exact = self._codec == Identity()
        linear = not self._settings.down and all(one.linear for one in self._exchange.rules.codecs)
        simulated = simulated_step(network, self._settings.workers, tally, seconds, exact=exact, linear=linear)
        before = self.result.sim_seconds
        self.result.sim_seconds = simulated + (0.0 if math.isnan(before) else before)
        if self._control is not None:
            self._control.seconds = simulated
        return simulated

    def _learning_rate(self, step: int) -> float:
        return self._task.recipe.rate(self._settings.lr, step, self._settings.steps)

    def _test(self) -> Evaluation:
        if self._joint is not None:
            self._joint.common_to(self._model)
        self._model.eval()
        with torch.no_grad(), self.weights.in_place():
            found = self._task.evaluate(self._model)
        self._model.train()
        return found

    def state_dict(self) -> dict[str, Any]:
        """The state for later steps, and the result so far; for runs on weight gradients."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "control": None if self._control is None else as_tensors(self._control.state_dict()),
            "exchange": as_tensors(self._exchange.to_arrays()),
            "joint": None if self._joint is None else self._joint.state_dict(),
            "weights": as_tensors(self.weights.to_arrays()),
            "result": self.result.to_plain(),
            "variances": [list(seen) for seen in self._variances],
            "bad": asdict(self._bad),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue from a :meth:`state_dict`, with the same task, codec and settings."""
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        if self._control is not None:
            # Bits come first: the codec's state depends on them.
            self._control.load_state_dict(as_arrays(saved["control"]))
        self._exchange.load_arrays(as_arrays(saved["exchange"]))
        if self._joint is not None:
            self._joint.load_state_dict(saved["joint"])
        self.weights.load_arrays(as_arrays(saved["weights"]))
        self.result = RunResult.from_plain(saved["result"])
        for seen, values in zip(self._variances, saved["variances"], strict=True):
            seen[:] = values
        self._bad = BadGradients(**saved["bad"])

    def announce(self) -> list[str]:
        """Warnings before the first step."""
        found = self._exchange.rules.unmatched(self.tensors)
        if self._codec.declared:
            found.append(
                f"{self.result.run}: bits are what the method declares; its decoder needs more than these bytes"
            )
        return found

    def _last_words(self) -> list[str]:
        texts = []
        if said := str(self._bad):
            texts.append(f"{self.result.run}: {said}")
        if self._control is not None and self._control.warning():
            texts.append(f"{self.result.run}: {self._control.warning()}")
        if self._settings.measure and self._ahead.why:
            texts.append(f"{self.result.run}: what noise costs is not known: {self._ahead.why}")
        if self.result.diverged:
            texts.append(self.result.diverged)
        return texts


def warning(text: str) -> dict[str, Any]:
    """The record of a warning."""
    return {"type": "warning", "text": text}


def simulated_step(
    network: Network, workers: int, tally: Tally, seconds: float, *, exact: bool, linear: bool = False
) -> float:
    """Seconds of a training step if each simulated worker were a separate machine.

    Computation and encoding run on all machines at once, decoding of all payloads on each (or on the server); nothing
    overlaps. If the network has ``compute``, it replaces all of these, and the time depends on bytes alone. The CPU
    ``seconds`` are those of all workers, one after the other. Messages of ``linear`` codecs are added up on the way.
    """
    values = tally.float32_bits // 32 // workers
    bits = (tally.bits + tally.envelope_bits) / workers if not exact else 32.0 * values
    transfer = network.transfer(workers, bits, values, exact=exact or linear, down_bits=tally.down_bits or None)
    if network.compute is not None:
        return network.compute + transfer
    computed = (seconds - tally.codec_seconds) / workers
    encoded = (tally.codec_seconds - tally.decode_seconds) / workers
    return computed + encoded + tally.decode_seconds + transfer
