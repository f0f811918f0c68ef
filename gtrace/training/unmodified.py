"""A codec in a training program that knows nothing of it.

Where ``DistributedDataParallel`` or ``fully_shard`` averages gradients between ranks, the codec takes its place, and
bytes travel. Everywhere else gradients go through the codec just before the optimizer uses them. With ``every`` each
process uses its own gradients, and what several steps change goes through the codec.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shlex
import sys
import time
import weakref
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.plugins import load_plugin
from gtrace.errors import GtraceError
from gtrace.runlog import RunLogWriter, read_runlog, versions
from gtrace.torch_hooks.children import after_import
from gtrace.torch_hooks.hooks import TrainingHooks, never_compiled
from gtrace.torch_hooks.naming import KeptNames, local_part
from gtrace.torch_hooks.processes import (
    before_abrupt_exit,
    before_shutdown,
    process_place,
    release_signals,
    seed_libraries,
)
from gtrace.torch_hooks.steps import OfTensors, Patch, Rounds, grad_scale_of, is_nested, parameters_of
from gtrace.trackers import Tracking, of_record
from gtrace.training.compression import after_closure, exchange_gradients, is_dense
from gtrace.training.ddp import AllReduceComparison, RankExchange, RankOptions, ddp_comm_hook, keep_own, meeting
from gtrace.training.exchange import BadGradients, Exchange, Tally
from gtrace.training.joint import ProgramRounds

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed import ProcessGroup

    from gtrace.torch_hooks.gradients import OptimizerStep

_WARNINGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOptions(RankOptions):
    """Options of a program's training in JSON values, so that they can be passed to launched processes.

    Those with a name of an option of ``gtrace train`` mean the same.
    """

    log: str
    #: its spec; for a table its name
    codec: str
    #: (pattern, spec) for some tensors
    rules: Sequence[tuple[str, str]] = ()
    min_size: int = 0
    every: int | None = None
    workers: int = 1
    #: the program, for the log
    argv: Sequence[str] = ()
    #: a word of this launch, so that its processes do not overwrite each other's logs
    launch: str = ""
    #: what ``CodecTable.describe`` says of a table, and the file that it is from; None if there is one codec
    table: dict[str, Any] | None = None
    plan: str = ""
    #: the gradients are left as they are, and the log has losses alone: the baseline
    watched: bool = False
    to: str | None = None


@dataclass(slots=True)
class ScriptSummary:
    """The result of a program's training."""

    #: that used gradients from the codec
    steps: int = 0
    optimizers: int = 0
    #: summed over the steps, of this process
    tally: Tally = field(default_factory=Tally)
    #: CPU time of this process after the first step, and of the codec in it
    seconds: float = 0.0
    codec_seconds: float = 0.0
    #: None if there is only one process
    rank: int | None = None
    world_size: int = 1
    #: gradients traveled between ranks as bytes
    exchanged: bool = False
    comparisons: list[AllReduceComparison] = field(default_factory=list)
    #: None if this process wrote none
    log: Path | None = None
    warnings: list[str] = field(default_factory=list)


class ScriptLog:
    """Writes one record per step; only the first of several ranks writes.

    If nothing can be written, training continues with a warning.
    """

    def __init__(self, training: ScriptTraining, on_record: Callable[[dict[str, Any]], None] | None) -> None:
        self._training, self._on_record = training, on_record
        self._writer: RunLogWriter | None = None
        self._broken = False
        self._label = {"run": str(training.rules), "seed": training.options.seed}
        self._loss = math.nan
        self._has_loss = False
        self._tracking = Tracking(training.options.to, lambda error: training.warn(str(error)))

    def step(self, step: OptimizerStep, tally: Tally, comparison: AllReduceComparison | None, seconds: float) -> None:
        """Record one optimizer step and its exchange."""
        self._loss = step.loss
        self._has_loss = self._has_loss or step.micro_batches > 0
        measured: dict[str, float] = {}
        if not self._training.summary.exchanged:
            measured["relative_variance"] = tally.relative_variance
        elif comparison is not None:
            names = ("relative_variance", "bf16_variance", "bf16_seconds", "float32_seconds")
            measured = {name: getattr(comparison, name) for name in names}
        record = {
            "type": "step",
            **self._label,
            "step": step.step,
            "stream": step.stream,
            "loss": step.loss,
            "lr": step.lr,
            **tally.record(),
            "frame_bits": tally.frame_bits,
            "down_bits": tally.down_bits,
            "wire_bytes": tally.wire_bytes,
            "seconds": seconds,
            "wire_seconds": tally.wire_seconds,
            **measured,
        }
        if not self._training.summary.rank:
            self._append(record)
            norm = {"norm": math.sqrt(tally.energy)} if tally.energy else {}
            self._tracking.log(of_record({**record, **norm}))
        if self._on_record is not None:
            self._on_record(record)

    def close(self) -> Path | None:
        """End the log; returns its path."""
        self._tracking.close()
        if self._writer is None:
            return None
        summary = self._training.summary
        for text in summary.warnings:
            self._append({"type": "warning", "text": text})
        diverged = self._has_loss and not math.isfinite(self._loss)
        end = summary.tally.ended(summary.steps, self._loss, None, diverged=diverged, seconds=summary.seconds)
        self._append({"type": "end", **self._label, **end})
        self._writer.close()
        return self._writer.path

    def _append(self, record: dict[str, Any]) -> None:
        if self._broken:
            return
        try:
            if self._writer is None:
                self._writer = RunLogWriter(self._path(), self._study(), force=True)
            self._writer.write(record["type"], **record)
        except GtraceError as error:
            self._broken = True
            self._training.warn(f"{error}; training goes on without a run log")

    def _path(self) -> Path:
        """The path to write: another name if a process of the same launch has taken this one."""
        wanted = path = Path(self._training.options.log)
        number = 1
        with contextlib.suppress(GtraceError):
            while path.exists() and read_runlog(path)[0].get("launch") == self._training.options.launch:
                number += 1
                path = wanted.with_name(f"{wanted.stem}-{number}.jsonl")
        return path

    def _command(self) -> str:
        options, default = self._training.options, ScriptOptions(log="", codec="")
        words = ["gtrace", "train", *(("--plan", options.plan) if options.plan else ("--codec", options.codec))]
        for pattern, spec in options.rules:
            words += ["--rule", f"{pattern}={spec}"]
        names = ("every", "min_size", "workers", "seed", "refit", "nonfinite", "exchange", "levels", "compare_every")
        for name in names:
            if getattr(options, name) != getattr(default, name):
                words += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        return shlex.join([*words, *options.argv])

    def _study(self) -> dict[str, Any]:
        options, summary = self._training.options, self._training.summary
        table, exchanged = self._training.rules.describe(), summary.exchanged
        return {
            "command": self._command(),
            "task": next((word for word in options.argv if not word.startswith("-")), ""),
            "workers": options.workers if not exchanged else 1,
            "world_size": summary.world_size,
            "exchange": options.exchange if exchanged else None,
            "levels": options.levels if exchanged else None,
            "seed": options.seed,
            "runs": [self._label["run"]],
            "steps": None,
            **{name: table[name] for name in ("codec", "rules", "min_size")},
            "plans": [table] if self._training.rules.tensors else None,
            "refit": str(options.refit),
            "nonfinite": options.nonfinite,
            "kind": "outer" if options.every else "weight",
            "every": options.every,
            "parameters": sum(self._training.sizes.values()),
            "tensors": dict(self._training.sizes),
            "launch": options.launch,
            "versions": {**versions(), "torch": torch.__version__},
        }


class ScriptTraining:
    """The hooks in one process, and what they saw; ``say`` prints a line, ``on_record`` gets each record of the log."""

    def __init__(
        self,
        options: ScriptOptions,
        say: Callable[[str], None],
        on_record: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        self.summary = ScriptSummary()
        self.options = options
        self._say = say
        self.rules = (
            CodecTable.of(options.codec, options.rules, options.min_size)
            if options.table is None
            else CodecTable.from_plain(options.table)
        )
        self._exchange = Exchange(
            self.rules, options.workers, seed=options.seed, refit=options.refit, nonfinite=options.nonfinite
        )
        self._hooks = TrainingHooks(lambda _stream, _step: True, self._told_step, self._told_error, reduced=True)
        # What a program does by hand with its gradients cannot go through a codec.
        self._hooks.unstepped = None
        self._rounds: ProgramRounds | None = None
        if options.every and not options.watched:
            self._rounds = ProgramRounds(self.rules, options, options.workers, options.every, self._warn_once)
            self._hooks.after = self._after_step
        #: takes out what was put in; None if nothing is in
        self._hooked: contextlib.ExitStack | None = None
        self._register = DistributedDataParallel.register_comm_hook
        self._owner = os.getpid()
        #: number of each optimizer, and how many times its gradients went through the codec
        self._counts: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        self._names = KeptNames()
        self.sizes: dict[str, int] = {}
        self._log = ScriptLog(self, on_record)
        self._wrapped: OfTensors[RankExchange] = OfTensors()
        self._sharded: dict[tuple[int, ...], RankExchange] = {}
        self._arrived: dict[int, Tally] = {}
        self._step: OptimizerStep | None = None
        self._pending = Tally()
        #: of the step whose record comes next, and of the one that the optimizer has not begun
        self._comparison: AllReduceComparison | None = None
        self._compared: AllReduceComparison | None = None
        self._bad = BadGradients()
        self._cpu = 0.0
        self._exchanging = False

    def start(self) -> None:
        """Install the hooks."""
        self._hooked = contextlib.ExitStack()
        self._hooks.install()
        self._hooked.callback(self._hooks.remove)
        # Registered after the hooks above, so that a step is known when its gradients are compressed.
        self._hooked.callback(register_optimizer_step_pre_hook(self._before_step).remove)
        if not self.options.watched:
            self._patch(DistributedDataParallel, "__init__", self._watch_wrapper)
            self._patch(DistributedDataParallel, "register_comm_hook", self._watch_registration)
        if self._rounds is not None:
            self._patch(Optimizer, "state_dict", self._rounds.saving)
            self._patch(Optimizer, "load_state_dict", self._rounds.loading)
        elif not self.options.watched:
            self._hooked.enter_context(after_import("torch.distributed.fsdp", self._watch_sharding))

    def finish(self) -> ScriptSummary:
        """Take the hooks out, and close the log."""
        if self._hooked is not None and os.getpid() == self._owner:
            self._flush()
            self._hooked.close()
            self._hooked = None
            for text in self.rules.unmatched(self.sizes) if self.sizes else ():
                self.warn(text)
            if text := str(self._bad):
                self.summary.warnings.append(text)
                self._say(f"gtrace: {text}")
            self.summary.log = self._log.close()
            if self.summary.exchanged:
                # A thread of gloo's may still want Python's lock, to let go of the last collective's tensors. If the
                # interpreter ends before it has it, torch aborts the process (without gtrace, too).
                time.sleep(0.05)
        return self.summary

    def _patch(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        original = vars(owner)[name]
        patch = Patch(owner, name, original, functools.wraps(original)(make(original)))
        patch.use(True)
        assert self._hooked is not None
        self._hooked.callback(patch.use, False)

    def warn(self, text: str) -> None:
        """Keep a warning, and print the first few."""
        if os.getpid() == self._owner:
            self.summary.warnings.append(text)
            if len(self.summary.warnings) <= _WARNINGS:
                self._say(f"gtrace: warning: {text}")

    def _warn_once(self, text: str) -> None:
        if text not in self.summary.warnings:
            self.warn(text)

    def _watch_wrapper(self, original: Any) -> Any:
        def __init__(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(wrapper, *args, **kwargs)
            if os.getpid() == self._owner and wrapper.process_group.size() > 1:
                state = self._between_ranks(wrapper.process_group.size(), wrapper.process_group, model=wrapper.module)
                self._register(wrapper, state, ddp_comm_hook if self._rounds is None else keep_own)
                for parameter in wrapper.parameters():
                    self._wrapped[parameter] = state

        return __init__

    def _between_ranks(self, ranks: int, *group: Any, model: torch.nn.Module | None = None) -> RankExchange:
        options = self.options
        if options.workers > 1:
            self._warn_once(f"--workers {options.workers} is left out: {ranks} real ranks train")
        state = RankExchange(self.rules, *group, model=model, options=options, on_step=self._ranks_stepped)
        state.loss_scale = self._hooks.loss_scale
        return state

    def _watch_sharding(self) -> None:
        module = sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]
        self._patch(module.FSDPParamGroup, "__init__", self._watch_group)

    def _watch_group(self, original: Any) -> Any:
        def __init__(group: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(group, *args, **kwargs)
            among, between = meeting(group)
            # Replicas without shards are averaged by the program, and no bytes travel.
            if os.getpid() == self._owner and among is not None and among.size() > 1:
                key = tuple(dist.get_process_group_ranks(among))
                if key not in self._sharded:
                    ranks = among.size() * (between.size() if between is not None else 1)
                    self._sharded[key] = self._between_ranks(ranks)
                self._sharded[key].take(group)

        return __init__

    def _watch_registration(self, original: Any) -> Any:
        def register_comm_hook(wrapper: DistributedDataParallel, state: object, hook: Any) -> Any:
            if os.getpid() == self._owner and wrapper.process_group.size() > 1:
                name = getattr(hook, "__name__", type(hook).__name__)
                self._warn_once(f"the program's own communication hook {name} is left out: the codec takes its place")
                return None
            return original(wrapper, state, hook)

        return register_comm_hook

    def _ranks_stepped(self, state: RankExchange) -> None:
        for parameter in state.sharded_parameters:
            self._wrapped[parameter] = state
        self._arrived.setdefault(id(state), Tally()).add(state.last)
        if state.comparison is not None:
            self._compared = state.comparison
            self.summary.comparisons.append(state.comparison)

    @never_compiled
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if os.getpid() != self._owner or is_nested(sys._getframe(2), self._hooks.evaluation):
            return None
        take = self._compress if self._rounds is None else functools.partial(self._begin_round, self._rounds)
        return after_closure(args, kwargs, lambda: take(optimizer))

    def _compress(self, optimizer: Optimizer) -> None:
        parameters = [p for p in parameters_of(optimizer.param_groups) if p.grad is not None]
        count = self._count(optimizer, parameters)
        if self.options.watched:
            bits = 32 * sum(local_part(parameter).numel() for parameter in parameters)
            self._pending.add(Tally(payload_bits=bits, float32_bits=bits))
            return
        ours: dict[str, torch.Tensor] = {}
        for parameter in parameters:
            if parameter in self._wrapped:
                state = self._wrapped[parameter]
                self._pending.add(self._arrived.pop(id(state), Tally()))
                self._comparison, self._compared = self._compared or self._comparison, None
                self.summary.exchanged = True
            elif is_dense(parameter):
                ours[self._names[parameter]] = parameter
            else:
                self._warn_once(f"{self._names[parameter]}: its gradient is sparse and goes uncompressed")
        if not ours:
            return
        world = process_place().world_size
        if world > 1:
            self._warn_once(
                f"{world} processes train together, and not through DistributedDataParallel or fully_shard alone: "
                "other gradients go through the codec after the program has averaged them, and no bytes travel"
            )
        sharing = next((one for one in self.rules.codecs if one.allocates), None)
        if sharing is not None and self.summary.optimizers > 1:
            self._warn_once(f"{sharing} shares out among each optimizer's tensors apart: they step one by one")
        exchanged = exchange_gradients(self._exchange, count, ours, grad_scale_of(optimizer))
        for bad in self._bad.add(exchanged.bad):
            self.warn(f"step {count}, {bad.tensor}: {bad.count} gradient values are not finite")
        self._pending.add(exchanged.tally)

    def _count(self, optimizer: Optimizer, parameters: list[torch.Tensor]) -> int:
        """Count the gradients of an optimizer, and name its parameters; returns how often this was done before."""
        number, count = self._counts.get(optimizer, (self.summary.optimizers, 0))
        self._counts[optimizer] = number, count + 1
        self.summary.optimizers = max(self.summary.optimizers, number + 1)
        modules = self._hooks.modules.modules
        for parameter in self._names.add(parameters, optimizer.param_groups, modules, stream=number):
            part = parameter if parameter in self._wrapped else local_part(parameter)
            self.sizes[self._names[parameter]] = part.numel()
        return count

    def _begin_round(self, rounds: ProgramRounds, optimizer: Optimizer) -> None:
        every = self.options.every
        if not self.summary.optimizers and not process_place().rank:
            self._say(
                f"gtrace: --every {every} changes the training: each process steps on its own gradients, and every "
                f"{every} steps the weights move by the averaged change, with DiLoCo's outer Nesterov momentum"
            )
        # Those without a gradient, too: ranks exchange the same parameters.
        parameters = [p for p in parameters_of(optimizer.param_groups) if p.requires_grad]
        self._count(optimizer, parameters)
        ours, group = self._in_rounds(parameters)
        rounds.of(optimizer, ours, group).begin(ours)

    def _in_rounds(self, parameters: Sequence[torch.Tensor]) -> tuple[dict[str, torch.Tensor], ProcessGroup | None]:
        """The parameters that local steps change, and the group of those that ranks have in common."""
        common = {self._names[p]: p for p in parameters if p in self._wrapped}
        if common:
            return common, self._wrapped[next(iter(common.values()))].group
        world = process_place().world_size
        if world > 1:
            self._warn_once(
                f"{world} processes train together, and not through DistributedDataParallel: the program goes on "
                "averaging gradients at each step, and what --every sends between processes is not saved"
            )
        return {self._names[p]: p for p in parameters}, None

    def _after_step(self, stepped: Optimizer | Rounds, _stream: int, _step: int) -> None:
        """An optimizer has stepped, or a gradient scaler has left the step out."""
        rounds = self._rounds
        if rounds is None:
            return
        for optimizer in stepped.members.values() if isinstance(stepped, Rounds) else (stepped,):
            if optimizer not in self._counts:
                self._begin_round(rounds, optimizer)
            named = [p for p in parameters_of(optimizer.param_groups) if p in self._names]
            parameters, group = self._in_rounds(named)
            self._exchanging = True
            around = rounds.of(optimizer, parameters, group)
            tally = around.end(parameters)
            self._exchanging = False
            self._pending.add(tally)
            self.summary.exchanged |= group is not None
            if around.comparison is not None:
                self._comparison = around.comparison
                self.summary.comparisons.append(around.comparison)

    def _told_step(self, step: OptimizerStep) -> None:
        if isinstance(step.optimizer, Rounds):
            # Where many step inside of a backward pass, all of them have.
            self._step = step
            self._flush()
        else:
            self._flush()
            self._step = step

    def _told_error(self, error: Exception) -> None:
        if self._exchanging:
            # Ranks that went on would train apart.
            raise error
        self.warn(f"{type(error).__name__}: {error}")

    def _flush(self) -> None:
        """Write the record of the step before; a line search may have evaluated more gradients since."""
        step, tally = self._step, self._pending
        if step is None:
            # What a step cost that was left out before the first one counts with that.
            return
        self._step, self._pending = None, Tally()
        now = time.process_time()
        seconds = now - self._cpu if self._cpu else float("nan")
        self._cpu = now
        summary = self.summary
        summary.steps += 1
        summary.tally.add(tally)
        if seconds == seconds:
            summary.seconds += seconds
            summary.codec_seconds += tally.codec_seconds
        place = process_place()
        # The last record may come after the program has left its process group.
        if place.rank is not None:
            summary.rank, summary.world_size = place.rank, place.world_size
        comparison, self._comparison = self._comparison, None
        self._log.step(step, tally, comparison, seconds)


def training(settings: Mapping[str, Any], on_record: Callable[[dict[str, Any]], None] | None = None) -> ScriptTraining:
    """The hooks for what the command line said, as JSON values."""
    known = {item.name for item in fields(ScriptOptions)}
    options = ScriptOptions(**{name: value for name, value in settings.items() if name in known})
    return ScriptTraining(options, _say, on_record)


def start(settings: Mapping[str, Any]) -> None:
    """Train with the codec in this process until it ends; called when it has imported torch."""
    for file in settings["plugins"]:
        load_plugin(Path(file))
    if settings.get("script_seed") is not None:
        seed_libraries(settings["script_seed"])
    _train_here(settings)
    _open.enter_context(forks_trained(settings))


def _train_here(settings: Mapping[str, Any]) -> None:
    child = training(settings)
    child.start()

    def leave(exit_code: int) -> int:
        child.finish()
        return exit_code

    _open.enter_context(before_abrupt_exit(leave))
    before_shutdown(child.finish)


#: until the process ends
_open = contextlib.ExitStack()
#: of forked children
_settings: dict[str, Any] = {}


@contextlib.contextmanager
def forks_trained(settings: Mapping[str, Any]) -> Iterator[None]:
    """Inside the block, train with the codec in forked children of this process, too: they may be ranks."""
    _settings.update(settings)
    try:
        yield
    finally:
        _settings.clear()


def _after_fork() -> None:
    if not _settings:
        return
    try:
        release_signals()
        _train_here(_settings)
    except Exception as error:  # noqa: BLE001 - the child must live as without a codec
        _say(f"gtrace: warning: a forked process trains without the codec: {type(error).__name__}: {error}")


os.register_at_fork(after_in_child=_after_fork)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
