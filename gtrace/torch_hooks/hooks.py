"""Hooks into any torch training: they call one function at each optimizer step.

Nothing here changes a value, draws a random number or keeps a graph alive, so training goes on bit for bit as
it would without.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from gtrace.torch_hooks import processes
from gtrace.torch_hooks.gradients import LOCAL, REDUCED, LocalGradients, MicroBatches, OptimizerStep, own_gradient
from gtrace.torch_hooks.naming import ModuleCollector
from gtrace.torch_hooks.optimizers import Schedulers
from gtrace.torch_hooks.processes import launched_place, process_place
from gtrace.torch_hooks.steps import (
    Losses,
    Patch,
    Rounds,
    Samples,
    backward_in_progress,
    grad_scale_of,
    has_compiled,
    is_nested,
    living,
    parameters_of,
)
from gtrace.torch_hooks.times import StepClock
from gtrace.torch_hooks.unstepped import HandedStream, Unstepped, step_by_hand

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import CodeType
    from typing import TypeAlias

    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.hooks import RemovableHandle

    _F = TypeVar("_F", bound=Callable[..., Any])
    _Function: TypeAlias = Callable[..., object]


_DISTRIBUTED = torch.distributed.is_available()


def never_compiled(function: _F) -> _F:
    """The function, and everything that it calls, as plain Python; a compiled region is split at the call."""

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        before = eval_frame.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            eval_frame.set_eval_frame(before)

    return _splits(plain)  # type: ignore[return-value]


def _splits(function: _F) -> _F:
    """The function as plain Python; a compiled region is split at the call. What it calls may be compiled."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return not_compiled_itself(function)


def not_compiled_itself(function: _F) -> _F:
    """The function as plain Python, while what it calls may be compiled."""
    if hasattr(eval_frame, "skip_code"):  # torch before 2.7
        eval_frame.skip_code(function.__code__)
    else:
        strategy = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
    return function


not_compiled_itself(is_nested)


@dataclass(slots=True)
class _Stream:
    """The steps so far of one optimizer, whose number is its place in the order of first steps."""

    number: int
    optimizer: weakref.ref[Any]
    steps: int = 0
    #: the code that called its last step, steps within other steps aside
    caller: CodeType | None = None
    #: the first of its steps that needs more than to be counted
    quiet: float = 0
    #: its next step is wanted, and may be like the one before
    again: bool = False
    #: if it counts on before that, the step needs more, too; and its count so far
    scheduler: weakref.ref[LRScheduler] | None = None
    count: int = 0


class TrainingHooks:
    """Watch every optimizer of this process, or only those given.

    Args:
        wants: asked with (stream, step) before each step that ``coming`` names, and some others; ``on_step`` is called
            only if it says yes.
        on_step: called with each wanted step before the optimizer changes the weights.
        on_error: called with an exception of the hooks or of ``on_step``; training continues.
        optimizers: watch only these.
        upcoming: called after each step of which ``wants`` was asked, with the numbers of each optimizer's next one.
        coming: says in advance, any number of times, which is the first wanted step from this one on; what it says of a
            step changes at none but those that it names.
        reduced: with several processes that train together, take the shared gradients instead of each one's own.
        noise: read the gradient of each micro-batch.
    """

    def __init__(
        self,
        wants: Callable[[int, int], bool],
        on_step: Callable[[OptimizerStep], None],
        on_error: Callable[[Exception], None],
        optimizers: Iterable[Optimizer] | None = None,
        upcoming: Callable[[Iterable[int]], None] | None = None,
        coming: Callable[[int], float] = lambda step: step,
        *,
        reduced: bool = False,
        noise: bool = False,
    ) -> None:
        self.modules = ModuleCollector()
        #: seconds that training waited here
        self.seconds = 0.0
        #: the same, with what is waited for elsewhere
        self.waited: Callable[[], float] = lambda: self.seconds
        self.clock = StepClock(lambda: self.waited(), self._guarded)  # noqa: PLW0108 - it is set later
        #: called if a step may be like the one before: with the optimizer, the numbers of both, and what came before;
        #: takes the step, or returns False
        self.again: Callable[[Optimizer, int, int, Losses, Samples], bool] = lambda *_: False
        #: called after each step, and after one that was left out, with the optimizer, its number and the step's; set
        #: it before ``install``
        self.after: Callable[[Optimizer | Rounds, int, int], None] | None = None
        #: called with the numbers of an optimizer and of a step that a gradient scaler left out
        self.left_out: Callable[[int, int], None] = lambda _stream, _step: None
        self._ending: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._inside = False
        self._skipped: int | torch.Tensor = 0
        self._wants = wants
        self._on_step = on_step
        self._on_error = on_error
        self._upcoming = upcoming
        self._coming = coming
        #: whether anything but a step is looked at: one that is near needs it; None before the first one. To be asked
        #: after ``is_compiling``, or a change would compile again
        self._listens: bool | None = None
        self._reduced = reduced
        self._local = LocalGradients(self._guarded)
        #: watches nothing without ``noise``
        self._micro_batches = MicroBatches(self._guarded)
        self._noise = noise
        self._rounds = Rounds(self._begin_round, self._end_round)
        #: A closure is evaluated once more within a step: its gradients belong to no step.
        self.repeating = False
        self.evaluation: CodeType | None = None
        self._only = None if optimizers is None else {id(optimizer): optimizer for optimizer in optimizers}
        #: finds steps without an optimizer; None once one has stepped, and if such steps are not wanted
        self.unstepped: Unstepped | None = None
        if self._only is None:
            self.unstepped = Unstepped(
                lambda waiting: any(
                    self._coming(n) == n for n in [stream.steps for stream in self._streams.values()] or [waiting]
                ),
                self._own_gradient,
                self._take_by_hand,
                self.modules.modules,
            )
        self._handed: HandedStream | None = None
        #: calls of ``torch.autograd.grad``, which leave no gradients behind
        self.functional = 0
        self._streams: dict[int, _Stream] = {}
        #: what is known of each optimizer's steps, by its number; ``_streams`` by its id while it exists
        self.numbered: list[_Stream] = []
        #: optimizers that have not stepped, once it is of interest
        self._fresh: weakref.WeakSet[Optimizer] | None = None
        self._started = 0
        #: thread -> its losses; those of the first thread are also of threads that step without a backward pass
        self._threads: dict[int, Losses] = {}
        self._first_losses = Losses()
        #: backward passes so far
        self.backward_passes = 0
        #: how many they were when listening last ended
        self._unheard_from = -1
        #: an optimizer was made after its first backward pass: listen always, or the loss of the next such one is lost
        self._made_late = False
        self._samples = Samples(self._guarded)
        self.schedulers = Schedulers()
        self._born = processes.forks
        self._launched = launched_place().world_size
        self._watching = False
        self._handles: list[RemovableHandle] = []
        self._patches: list[Patch] = []
        #: of them, what is in place only if a wanted step is near
        self._near: list[Patch] = []

    @property
    def steps(self) -> int:
        """Steps of all optimizers so far, including those that a gradient scaler left out."""
        return sum(stream.steps for stream in self.numbered)

    @property
    def skipped_steps(self) -> int:
        """Steps that a gradient scaler left out because a gradient was infinite or NaN."""
        return int(self._skipped)

    def loss_scale(self) -> float:
        """The factor of the gradient scaler that scaled a loss since this thread's last step; 1 without one."""
        scaler = self._losses.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    @property
    def _losses(self) -> Losses:
        return self._threads.get(threading.get_ident(), self._first_losses)

    def _own_losses(self) -> Losses:
        """The losses of this thread, which begins to have its own."""
        thread = threading.get_ident()
        if thread not in self._threads:
            self._threads[thread] = Losses() if self._threads else self._first_losses
        return self._threads[thread]

    def stepped(self) -> list[tuple[int, Optimizer | Rounds]]:
        """The optimizers that have stepped and still exist, with their numbers, ascending."""
        return [(stream.number, one) for stream in self._streams.values() if (one := stream.optimizer()) is not None]

    def follow(self, stream: int, scheduler: LRScheduler | None) -> None:
        """Ask about the step of an optimizer that finds another ``last_epoch`` of this scheduler; None: of none."""
        one = self.numbered[stream]
        one.scheduler = None if scheduler is None else weakref.ref(scheduler)
        one.count = 0 if scheduler is None else scheduler.last_epoch

    def install(self) -> None:
        """Start watching."""
        self._watching = True
        self._rounds.weights = self.after is not None
        self.modules.install()
        self._handles.append(register_optimizer_step_pre_hook(self._before_step))
        self._near = [self._patch(torch.autograd, "backward", self._watch_backward)]
        # And not ``grad`` itself: torch.compile knows that by its identity.
        self._engine = self._patch(torch.autograd, "_engine_run_backward", self._watch_engine)
        self._patch_after(GradScaler, "scale", lambda one, result, loss: self._own_losses().scaled(one, loss, result))
        self._patch(GradScaler, "step", self._watch_scaler_step)
        # The other two do not call the __init__ of the first.
        for kind in (lr_scheduler.LRScheduler, lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler):
            self._patch_after(kind, "__init__", self.schedulers.saw)
        for owner in (torch.nn.Module, torch.optim.Optimizer):
            zero = self._patch_after(owner, "zero_grad", self._zeroed, lambda: self._losses.begun())  # noqa: PLW0108 - this thread's
        self._near.append(zero)
        self._patch(torch.nn.utils.clip_grad, "clip_grad_norm_", self._watch_clip)
        # The same function under its other name: pickle looks it up there.
        ours = torch.nn.utils.clip_grad.clip_grad_norm_
        self._replace(torch.nn.utils, "clip_grad_norm_", ours)
        self._local.wanted = self._micro_batches.wanted = self._coming(0) == 0
        if not self._reduced:
            self._patch_after(DistributedDataParallel, "__init__", self._watch_averaged)
        self._patch_after(torch.optim.Optimizer, "add_param_group", self._watch_group)
        self._patch_after(torch.optim.Optimizer, "__setstate__", self._expect)
        if self._noise or not (self._reduced or process_place().world_size == 1):
            for optimizer in self._existing():
                self._guarded(self._watch_parameters, optimizer.param_groups)

    def adopt(self, earlier: TrainingHooks) -> None:
        """In a forked child: know the modules, schedulers and parameters that the parent's hooks have seen."""
        self.modules.adopt(earlier.modules)
        self.schedulers = earlier.schedulers
        for parameter, copy in earlier._local.watched():
            self._local.watch([parameter], strict=copy.strict)
        self._micro_batches.watch(parameter for parameter, _ in earlier._micro_batches.watched())

    def remove(self) -> None:
        """Stop watching, and restore everything; a wrapper that is itself wrapped stays and does nothing."""
        self._watching = self._listens = False
        self.clock.stop()
        parts: list[Any] = [self.modules, self._local, self._micro_batches, self._samples]
        for one in [*parts, *self._handles]:
            one.remove()
        for patch in reversed(self._patches):
            patch.use(False)
        self._handles, self._patches = [], []

    def _listen(self, near: bool) -> None:
        """Whether a backward pass, and what comes between it and a step, may matter to a step that is wanted."""
        if near is self._listens:
            return
        self._listens = near
        if not near:
            self._unheard_from = self.backward_passes
            for losses in (self._first_losses, *self._threads.values()):
                losses.forget()
        if has_compiled():
            return  # it would compile again
        # Of what programs import and call the flag is looked at instead.
        for patch in self._near:
            patch.use(near)
        if self.unstepped is None and self._handed is None:
            self._engine.use(False)

    def _patch(self, owner: object, name: str, make: Callable[[_Function], _Function]) -> Patch:
        original = vars(owner)[name]
        # Never traced itself; a compiled region that calls it calls the original directly.
        return self._replace(owner, name, functools.wraps(original)(not_compiled_itself(make(original))))

    def _patch_after(
        self, owner: object, name: str, then: Callable[..., None], when: Callable[[], bool] = lambda: True
    ) -> Patch:
        """If ``when`` says so, call ``then`` with the object, the result of its method, and the method's arguments."""

        def make(original: _Function) -> _Function:
            def method(thing: object, *args: object, **kwargs: object) -> object:
                result = original(thing, *args, **kwargs)
                if not torch.compiler.is_compiling() and when():
                    self._guarded(then, thing, result, *args, *kwargs.values())
                return result

            return method

        return self._patch(owner, name, make)

    def _replace(self, owner: object, name: str, ours: _Function) -> Patch:
        self._patches.append(Patch(owner, name, vars(owner)[name], ours))
        setattr(owner, name, ours)
        return self._patches[-1]

    def _safely(self, function: Callable[..., None], *args: object) -> None:
        """Call a function; its errors stop nothing. In a forked child, do nothing."""
        if not self._watching or self._born != processes.forks:
            return
        outermost, self._inside = not self._inside, True
        started = time.perf_counter()
        try:
            function(*args)
        except Exception as error:  # noqa: BLE001 - an error of capture must not stop training
            self._on_error(error)
        finally:
            if outermost:
                self._inside = False
                self.seconds += time.perf_counter() - started

    _guarded = never_compiled(_safely)

    def _watch_backward(self, original: _Function) -> _Function:
        def backward(tensors: object, grad_tensors: object = None, *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling() or self._listens is False:
                return original(tensors, grad_tensors, *args, **kwargs)
            self._guarded(self._begin_backward, tensors, grad_tensors, kwargs.get("inputs"))
            result = original(tensors, grad_tensors, *args, **kwargs)
            if self.clock.runs:
                self._guarded(self.clock.backward_ends)
            if self.unstepped is not None:
                self._guarded(self.unstepped.end)
            return result

        return backward

    def _watch_engine(self, original: _Function) -> _Function:
        def run(*args: object, **kwargs: object) -> object:
            self.functional += not kwargs.get("accumulate_grad")
            return original(*args, **kwargs)

        return run

    def _begin_backward(self, tensors: object, gradients: object, inputs: object) -> None:
        if self.unstepped is not None:
            self.unstepped.begin(tensors, gradients, inputs)
        self.backward_passes += 1
        self._own_losses().backward(tensors, gradients)
        self._samples.backward()
        if self.clock.runs:
            self.clock.backward_begins()

    def _watch_scaler_step(self, original: _Function) -> _Function:
        def step(scaler: GradScaler, optimizer: object, *args: object, **kwargs: object) -> object:
            before = self._started
            stream = self._streams.get(id(optimizer))
            if stream is not None:
                stream.quiet, stream.again = 0, False  # a fused optimizer leaves its step out by itself
            result = original(scaler, optimizer, *args, **kwargs)
            if self._started == before and self._watches(optimizer):
                self._guarded(self._skip, optimizer)
            return result

        return step

    def _zeroed(self, owner: Optimizer | torch.nn.Module, *_: object) -> None:
        groups = [{"params": owner.parameters()}] if isinstance(owner, torch.nn.Module) else owner.param_groups
        parameters = parameters_of(groups)
        self._losses.zeroed(parameters)
        if self.unstepped is not None:
            self.unstepped.zeroed(parameters)

    def _watch_clip(self, original: _Function) -> _Function:
        def clip_grad_norm_(parameters: Iterable[torch.Tensor], *args: object, **kwargs: object) -> object:
            if torch.compiler.is_compiling() or self._listens is False:
                return original(parameters, *args, **kwargs)
            # Most programs pass a generator, which can be read only once.
            several = (parameters,) if isinstance(parameters, torch.Tensor) else tuple(parameters)
            norm = original(several or parameters, *args, **kwargs)
            self._guarded(self._losses.clipped, several, norm)
            if self.unstepped is not None:
                self._guarded(self.unstepped.clipped, several, norm)
            return norm

        return clip_grad_norm_

    def _watch_averaged(self, wrapper: DistributedDataParallel, *_: object) -> None:
        if wrapper.process_group.size() > 1:
            self._local.watch(wrapper.parameters(), strict=True)

    def _watch_group(self, optimizer: Optimizer, *_: object) -> None:
        self._watch_parameters(optimizer.param_groups)
        self._expect(optimizer)

    def _expect(self, optimizer: Optimizer, *_: object) -> None:
        """Listen from now on if an optimizer's first step may be wanted."""
        if self._fresh is not None and self._watches(optimizer) and id(optimizer) not in self._streams:
            self._fresh.add(optimizer)
            self._look_ahead()

    def _expects(self) -> bool:
        """Whether a step of an optimizer that has not stepped yet may be wanted."""
        if self._coming(0) > 0:
            return False
        if self._fresh is None:
            self._fresh = weakref.WeakSet(one for one in self._existing() if id(one) not in self._streams)
        return bool(self._fresh)

    def _existing(self) -> Iterable[Optimizer]:
        """The optimizers to watch that have been made."""
        if self._only is not None:
            return self._only.values()
        # One whose __init__ has not run yet has no groups.
        return (one for one in living(torch.optim.Optimizer) if hasattr(one, "param_groups"))

    def _watch_parameters(self, groups: Iterable[Mapping[str, Any]]) -> None:
        parameters = parameters_of(groups)
        if not self._reduced and process_place().world_size > 1:
            self._local.watch(parameters)
        if self._noise:
            self._micro_batches.watch(parameters)

    @_splits
    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        stream, wrapper = self._streams.get(id(optimizer)), sys._getframe(1)
        caller = wrapper.f_back and wrapper.f_back.f_code
        if stream is None or stream.caller is not caller:
            if is_nested(wrapper, self.evaluation):
                if self._fresh:
                    self._fresh.discard(optimizer)
                return None
            if stream is not None:
                stream.caller = caller
        # All that most steps of a training see. A closure is evaluated by the optimizer.
        if stream is not None and len(args) == 1 and not kwargs and backward_in_progress() < 0:
            still = stream.scheduler is None or getattr(stream.scheduler(), "last_epoch", None) == stream.count
            if stream.steps < stream.quiet and still:
                stream.steps += 1
                return None
            if stream.again and self._take_again(optimizer, stream):
                return None
        return self._begin_step(optimizer, args, kwargs)

    @never_compiled
    def _take_again(self, optimizer: Optimizer, stream: _Stream) -> bool:
        """Take a wanted step if it is like the one before; most Python code is slow when a step begins."""
        steps = stream.steps
        self._safely(self._repeat, optimizer, stream)
        return stream.steps > steps

    def _repeat(self, optimizer: Optimizer, stream: _Stream) -> None:
        losses = self._losses
        if not losses.usual or (_DISTRIBUTED and torch.distributed.is_initialized()):
            return
        taken = True
        try:
            taken = self.again(optimizer, stream.number, stream.steps, losses, self._samples)
        finally:
            if taken:
                losses.use()
                self._started += 1
                stream.steps += 1
                if self._coming(stream.steps) == stream.steps:
                    self._samples.stepped(True)  # all else is as it was
                else:
                    self._announce()

    @never_compiled
    def _begin_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._handed is not None or not self._watches(optimizer):
            return None
        self.unstepped = None
        if self._fresh:
            self._fresh.discard(optimizer)
        self._started += 1
        if self.after is not None:
            self._guarded(self._watch_end, optimizer)
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            if backward_in_progress() >= 0:
                self._safely(self._rounds.add, optimizer, lambda parameter: parameter.grad)
            else:
                self._safely(self._step, optimizer)
            return None
        # With a closure the gradients of this step do not exist yet: its first evaluation makes them.
        watched = self._watch_closure(closure, optimizer)
        if "closure" in kwargs:
            return args, {**kwargs, "closure": watched}
        return (args[0], watched, *args[2:]), kwargs

    def _watch_end(self, optimizer: Optimizer) -> None:
        """Be called after this optimizer's steps, before the program's own hooks, which may change the weights."""
        if optimizer in self._ending:
            return
        self._ending.add(optimizer)
        handle = optimizer.register_step_post_hook(self._after_step)
        hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
        hooks.move_to_end(handle.id, last=False)
        self._handles.append(handle)

    @never_compiled
    def _after_step(self, optimizer: Optimizer, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        stream = self._streams.get(id(optimizer))
        if self.after is not None and stream is not None and not is_nested(sys._getframe(2), self.evaluation):
            self._guarded(self.after, optimizer, stream.number, stream.steps - 1)

    def _watches(self, optimizer: object) -> bool:
        return self._only is None or id(optimizer) in self._only

    def _watch_closure(self, closure: _Function, optimizer: Optimizer) -> _Function:
        taken = False

        def watched() -> object:
            nonlocal taken
            self.repeating = taken
            try:
                result = closure()
            finally:
                self.repeating = False
            if not taken:
                taken = True
                self._guarded(self._step, optimizer)
            self._consume(optimizer)
            self._losses.use()  # losses of a line search do not belong to the next step
            return result

        self.evaluation = watched.__code__
        return functools.wraps(closure, updated=())(watched)

    def finish(self) -> None:
        """The program is over: what it did after its last backward pass may be a step."""
        if self.unstepped is not None:
            self._guarded(self.unstepped.finish)

    def hand(self, gradients: Mapping[str, Any], loss: float, lr: float) -> None:
        """The program hands over the gradients of a step; from the first one on nothing else is recorded."""
        self._guarded(self._take_handed, gradients, loss, lr)

    def _own_gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self._reduced or process_place().world_size == 1:
            return parameter.grad
        return self._local.gradient(parameter, 1.0)[0]

    def _take_handed(self, gradients: Mapping[str, Any], loss: float, lr: float) -> None:
        self.unstepped = None
        if self._handed is None:
            self._handed = HandedStream()
        self._take_by_hand(step_by_hand(self._handed, self._handed.put(gradients), float(loss), float(lr)))

    def _take_by_hand(self, step: OptimizerStep) -> None:
        step.stream, step.step = self._advance(step.optimizer)
        if self._wants(step.stream, step.step):
            self._on_step(step)
        self._announce()

    def _skip(self, optimizer: Optimizer) -> None:
        self.unstepped = None
        self._losses.use()
        self._losses.scaler = None
        stream, step = self._advance(optimizer)
        self._skipped += 1
        self.left_out(stream, step)
        if self.after is not None:
            self.after(optimizer, stream, step)
        self._consume(optimizer)
        self._announce()

    def _step(self, optimizer: Optimizer) -> None:
        try:
            self._take(optimizer)
        finally:
            self._consume(optimizer)
            self._announce()

    def _consume(self, optimizer: Optimizer) -> None:
        if self._local.watching:
            self._local.consume(optimizer)
        if self._noise:
            self._micro_batches.consume(optimizer)

    def _begin_round(self) -> bool:
        stream = self._streams.get(id(self._rounds))
        step = 0 if stream is None else stream.steps
        return self._coming(step) == step

    def _end_round(self) -> None:
        self._guarded(self._take, self._rounds)
        stream = self._streams.get(id(self._rounds))
        if self.after is not None and stream is not None:
            self._guarded(self.after, self._rounds, stream.number, stream.steps - 1)
        self._guarded(self._announce)

    def _announce(self) -> None:
        self._samples.stepped(self._look_ahead())
        if self._upcoming is not None:
            self._upcoming([stream.steps for stream in self._streams.values()])

    def _look_ahead(self) -> bool:
        """Choose what to watch until the next step; returns whether it is wanted, of any optimizer."""
        streams = self._streams.values()
        # There may be an optimizer for each layer: most have done as many steps.
        coming = {steps: self._coming(steps) for steps in {stream.steps for stream in streams}}
        wanted = any(step == steps for steps, step in coming.items())
        self._local.wanted = self._micro_batches.wanted = near = wanted or self._expects()
        special = self.unstepped is not None or self._handed is not None or self.after is not None
        near = near or special or self._made_late
        single = len(streams) == self._launched == 1 and not self._local.watching
        again = wanted and single and not special and not self._noise and self._upcoming is None
        for stream in streams:
            step, stream.again = coming[stream.steps], again
            # The step before a wanted one begins to listen.
            stream.quiet = 0 if near else min(step - 1, self.clock.due if stream.number == 0 else step)
        self._listen(near or self.clock.runs)
        return wanted

    def _advance(self, optimizer: Optimizer | Rounds) -> tuple[int, int]:
        """Numbers of the optimizer and of its step; counts the step."""
        key = id(optimizer)
        stream = self._streams.get(key)
        if stream is None:
            # Goes with the optimizer: another one may get its id, but not its number.
            gone = weakref.ref(optimizer, lambda _: self._streams.pop(key, None))
            stream = self._streams[key] = _Stream(len(self.numbered), gone)
            self.numbered.append(stream)
        stream.steps += 1
        return stream.number, stream.steps - 1

    def _take(self, optimizer: Optimizer | Rounds) -> None:
        losses = self._losses
        first = losses.use()
        stream, step = self._advance(optimizer)
        self._made_late = self._made_late or (step == 0 and self.backward_passes == self._unheard_from)
        scaler, losses.scaler = losses.scaler, None
        # A fused optimizer decides by itself whether it skips. The sum stays on its device: reading it at
        # each step would make training wait.
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None:
            self._skipped = self._skipped + (found_inf > 0)
        if not self._wants(stream, step):
            return
        if found_inf is not None and found_inf > 0:
            self.left_out(stream, step)
            return
        groups = optimizer.param_groups
        loss, micro_batches = losses.of(groups)
        loss_scale = 1.0 if scaler is None else scaler.get_scale()
        grad_scale = grad_scale_of(optimizer)
        self._on_step(
            OptimizerStep(
                optimizer=optimizer,
                stream=stream,
                step=step,
                loss=loss,
                micro_batches=micro_batches,
                lr=float(groups[0].get("lr", math.nan)),
                grad_scale=grad_scale,
                clip_norm=losses.clip_norm(groups),
                loss_scale=loss_scale,
                gradient=self._gradients(optimizer, loss_scale / grad_scale),
                replicas=functools.partial(self._micro_batches.replicas, scale=loss_scale),
                first=first,
                samples=self._samples.count,
                tokens=self._samples.tokens,
            )
        )

    def _gradients(
        self, optimizer: Optimizer | Rounds, scale: float
    ) -> Callable[[torch.Tensor], tuple[torch.Tensor | None, str]]:
        """A function that returns a step's gradients; ``scale`` is the extra factor on those of the backward pass."""
        made = _DISTRIBUTED and torch.distributed.is_initialized()
        world = torch.distributed.get_world_size() if made else self._launched
        stage = LOCAL if world == 1 else REDUCED
        if isinstance(optimizer, Rounds):
            return lambda parameter: (optimizer.gradient(parameter), stage)
        if stage == LOCAL:
            return own_gradient
        if self._reduced:
            return lambda parameter: (parameter.grad, stage)
        return lambda parameter: self._local.gradient(parameter, scale)
