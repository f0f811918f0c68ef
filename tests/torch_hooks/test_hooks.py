import copy
import gc
import math
import threading

import pytest
import torch
from helpers_hooks import Watch, quadratic, weight
from torch import nn


@pytest.mark.capture_case("several optimizers")
def test_two_optimizers_on_one_backward_pass_see_the_same_loss():
    first, second = weight(1.0), weight(2.0)
    optimizers = [torch.optim.SGD([first], lr=0.1), torch.optim.Adam([second], lr=0.2)]
    with Watch() as watch:
        for _ in range(2):
            (quadratic(first) + quadratic(second)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [(s.stream, s.step, s.lr) for s in watch.steps] == [(0, 0, 0.1), (1, 0, 0.2), (0, 1, 0.1), (1, 1, 0.2)]
    assert watch.steps[0].loss == watch.steps[1].loss == 5.0
    assert watch.steps[2].loss == watch.steps[3].loss < 5.0


def test_a_new_optimizer_never_takes_the_number_of_one_that_is_gone():
    w = weight()
    with Watch(on_step=lambda step: numbers.append(step.stream)):
        numbers = []
        for _ in range(3):
            optimizer = torch.optim.SGD([w], lr=0.1)
            quadratic(w).backward()
            optimizer.step()
            del optimizer
    assert numbers == [0, 1, 2]


def test_backward_with_explicit_gradients_is_no_loss():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Watch() as watch:
        quadratic(w).backward()
        optimizer.step()
        optimizer.zero_grad()
        w.data.copy_(torch.tensor([1.0, 2.0]))
        (w * 2).backward(torch.ones(2))
        optimizer.step()
        torch.autograd.backward([quadratic(w), w.sum()])
        optimizer.step()
    # Nothing is left of the step before.
    assert [step.micro_batches for step in watch.steps[:2]] == [1, 0]
    assert math.isnan(watch.steps[1].loss)
    assert watch.steps[2].loss == pytest.approx(0.8**2 + 1.8**2 + 0.8 + 1.8)


def test_a_loss_changed_in_place_after_its_backward_pass_keeps_its_value():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Watch() as watch:
        loss = quadratic(w)
        loss.backward()
        loss.detach().mul_(100)
        optimizer.step()
    assert watch.steps[0].loss == 5.0


@pytest.mark.capture_case("LBFGS")
@pytest.mark.parametrize("by_keyword", [False, True])
def test_lbfgs_gradients_are_those_of_the_first_evaluation(by_keyword):
    w = weight(3.0, -2.0)
    optimizer = torch.optim.LBFGS([w], lr=0.5, max_iter=4)
    first = []

    def closure():
        optimizer.zero_grad()
        loss = ((w - 1) ** 4).sum()
        loss.backward()
        seen.append((loss.item(), w.grad.clone()))
        return loss

    with Watch() as watch:
        for _ in range(3):
            seen = []
            if by_keyword:
                optimizer.step(closure=closure)
            else:
                optimizer.step(closure)
            assert len(seen) > 1, "more than one evaluation, or this tests nothing"
            first.append(seen[0])
    assert [s.step for s in watch.steps] == [0, 1, 2]
    assert [s.loss for s in watch.steps] == [loss for loss, _ in first]
    assert all(torch.equal(g[0], e) for g, (_, e) in zip(watch.gradients, first, strict=True))


@pytest.mark.capture_case("closures of other optimizers")
def test_a_closure_of_a_first_order_optimizer():
    w = weight()
    optimizer = torch.optim.Adam([w], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = quadratic(w)
        loss.backward()
        return loss

    with Watch() as watch:
        returned = optimizer.step(closure)
    assert returned.item() == watch.steps[0].loss == 5.0
    assert torch.equal(watch.gradients[0][0], torch.tensor([2.0, 4.0]))


@pytest.mark.capture_case("a subclass of an optimizer that calls super().step()")
def test_a_subclass_that_calls_super_step_is_one_step():
    class Doubling(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.mul_(2)
            return super().step(closure)

    w = weight()
    plain = torch.optim.SGD([weight()], lr=0.1)  # hooks SGD.step itself
    optimizer = Doubling([w], lr=0.1)
    with Watch() as watch:
        for _ in range(2):
            optimizer.zero_grad()
            quadratic(w).backward()
            optimizer.step()
    assert [s.step for s in watch.steps] == [0, 1]
    assert torch.equal(watch.gradients[0][0], torch.tensor([2.0, 4.0]))
    assert plain.param_groups


def test_a_step_that_raised_does_not_hide_the_next_one():
    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError("once")
            return super().step(closure)

    w = weight()
    optimizer = Failing([w], lr=0.1)
    with Watch() as watch:
        quadratic(w).backward()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        optimizer.fails = False
        optimizer.step()
    assert [s.step for s in watch.steps] == [0, 1]


@pytest.mark.capture_case("AMP with GradScaler, fused and not")
def test_a_fused_optimizer_that_was_unscaled_by_hand():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Watch() as watch:
        scaler.scale(quadratic(w)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert watch.steps[0].grad_scale == 1.0
    assert torch.equal(watch.gradients[0][0], torch.tensor([2.0, 4.0]))


def test_an_error_of_the_observer_does_not_stop_training():
    def fail(step):
        raise OSError(f"disk full at {step.step}")

    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    watch = Watch(on_step=fail)
    watch.hooks.install()
    for _ in range(2):
        quadratic(w).backward()
        optimizer.step()
    watch.hooks.remove()
    assert [str(error) for error in watch.errors] == ["disk full at 0", "disk full at 1"]


def test_an_interrupt_in_the_observer_passes_through():
    def interrupt(step):
        raise KeyboardInterrupt

    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Watch(on_step=interrupt):
        quadratic(w).backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()


def test_only_the_given_optimizers_are_watched():
    first, second = weight(), weight()
    mine, other = torch.optim.SGD([first], lr=0.1), torch.optim.SGD([second], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with Watch(optimizers=[mine]) as watch:
        (quadratic(first) + scaler.scale(quadratic(second))).backward()
        scaler.step(other)
        mine.step()
    assert [(s.optimizer is mine, s.stream) for s in watch.steps] == [(True, 0)]
    assert watch.hooks.skipped_steps == 0


def test_everything_is_put_back():
    def state():
        scaler = torch.amp.GradScaler
        return (torch.autograd.backward, scaler.scale, scaler.step, torch.nn.utils.clip_grad_norm_)

    before = state()
    with Watch() as watch:
        assert all(now is not then for now, then in zip(state(), before, strict=True))
    assert state() == before
    w = weight()
    quadratic(w).backward()
    torch.optim.SGD([w], lr=0.1).step()
    assert watch.steps == []


def test_another_wrapper_on_top_is_left_alone():
    watch = Watch()
    original = torch.autograd.backward
    watch.hooks.install()
    ours = torch.autograd.backward

    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    torch.autograd.backward = theirs
    watch.hooks.remove()
    assert torch.autograd.backward is theirs
    torch.autograd.backward = original


def test_threads_that_train_have_their_own_losses():
    weights = [weight(1.0), weight(2.0)]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def train(number):
        optimizer = torch.optim.SGD([weights[number]], lr=0.1)
        for _ in range(3):
            for part in (lambda: quadratic(weights[number]).backward(), optimizer.step, optimizer.zero_grad):
                turns[number].acquire()
                part()
                turns[1 - number].release()

    with Watch() as watch:
        threads = [threading.Thread(target=train, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    for number in range(2):
        losses = [step.loss for step in watch.steps if step.optimizer.param_groups[0]["params"][0] is weights[number]]
        assert losses == pytest.approx([(number + 1) ** 2 * 0.64**step for step in range(3)])
    assert [step.micro_batches for step in watch.steps] == [1] * 6
    assert watch.backward_passes == 6


def test_a_thread_that_only_steps_has_the_losses_of_the_first():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.1)
    with Watch() as watch:
        quadratic(w).backward()
        thread = threading.Thread(target=optimizer.step)
        thread.start()
        thread.join()
    assert watch.steps[0].loss == 5.0


class Twice(torch.optim.SGD):
    """A subclass, and an optimizer inside of it: three steps that are one."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.inner = torch.optim.SGD(parameters, lr=0.01)

    def step(self, closure=None):
        self.inner.step()
        return super().step(closure)


def alternating():
    """Two optimizers in turn on losses of their own, a third one from step 25 on, and a step of two micro-batches."""
    one, two, three = weight(), weight(3.0, 1.0), weight(0.5)
    optimizers = [torch.optim.SGD([one], lr=0.1), torch.optim.Adam([two], lr=0.01)]
    for step in range(40):
        if step == 25:
            optimizers.append(torch.optim.SGD([three], lr=0.2))
        for parameter, optimizer in zip((one, two, three), optimizers, strict=False):
            for _ in range(1 + step % 2):
                quadratic(parameter).backward()
            nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
            optimizer.zero_grad()


def copied():
    """An optimizer, and a copy of it that begins later."""
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    for step in range(30):
        if step == 15:
            optimizer = copy.deepcopy(optimizer)
            parameter = optimizer.param_groups[0]["params"][0]
        optimizer.zero_grad()
        quadratic(parameter).backward()
        optimizer.step()


def nested():
    """Steps within steps; every third one is called from elsewhere."""
    parameter = weight()
    optimizer = Twice([parameter])
    for step in range(30):
        quadratic(parameter).backward()
        optimizer.step() if step % 3 else (lambda: optimizer.step())()


def with_closures():
    """Closures, now and then, in which another optimizer steps."""
    parameter = weight()
    optimizer, inner = (torch.optim.SGD([parameter], lr=lr) for lr in (0.1, 0.01))

    def closure():
        optimizer.zero_grad()
        loss = quadratic(parameter)
        loss.backward()
        inner.step() if step % 3 else (lambda: inner.step())()
        return loss

    for step in range(30):
        optimizer.step(closure) if step % 4 == 2 else (closure(), optimizer.step())


def scaled():
    """A gradient scaler that leaves out steps, of a fused optimizer and of another one."""
    for fused in (True, False):
        parameter = weight()
        optimizer, scaler = torch.optim.SGD([parameter], lr=0.1, fused=fused), torch.amp.GradScaler("cpu", 4.0)
        for step in range(30):
            optimizer.zero_grad()
            scaler.scale(quadratic(parameter) * (math.inf if step % 7 == 3 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()


def told(program, wanted, coming):
    gc.collect()  # an optimizer that never steps is waited for
    with Watch(lambda _, step: wanted(step), coming=coming) as watch:
        watch.hooks.clock.due = math.inf
        program()
    facts = [(s.stream, s.step, s.loss, s.micro_batches, repr(s.clip_norm), s.lr, s.loss_scale) for s in watch.steps]
    gradients = [[gradient.tolist() for gradient in several] for several in watch.gradients]
    watch.steps.clear()
    return facts, gradients, watch.hooks.steps, watch.hooks.skipped_steps


@pytest.mark.parametrize("every", [3, 10])
@pytest.mark.parametrize("program", [alternating, copied, nested, with_closures, scaled])
def test_steps_that_are_only_counted_change_nothing_about_the_others(program, every):
    plain = told(program, lambda step: step % every == 0, lambda step: step)
    assert told(program, lambda step: step % every == 0, lambda step: step + -step % every) == plain


@pytest.mark.parametrize("compiled", [False, True])
def test_between_recorded_steps_nothing_is_installed_in_a_backward_pass(monkeypatch, compiled):
    monkeypatch.setattr("gtrace.torch_hooks.hooks.has_compiled", lambda: compiled)
    there, original = [], torch.autograd.backward
    parameter = weight()
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    with Watch(optimizers=[optimizer], coming=lambda step: step + -step % 10) as watch:
        watch.hooks.clock.due = math.inf
        for _ in range(20):
            there.append(torch.autograd.backward is not original)
            quadratic(parameter).backward()
            optimizer.step()
    # What is compiled may know it by its identity.
    assert there == [compiled or step % 10 == 0 for step in range(20)]


def test_a_loss_that_nobody_heard_is_unknown_and_the_next_one_is_heard(monkeypatch):
    monkeypatch.setattr(gc, "get_objects", list)  # for an optimizer of another test it would listen
    first, second = weight(), weight(3.0, 1.0)
    optimizer, losses = torch.optim.SGD([first], lr=0.1), []
    with Watch(lambda _, step: step % 10 == 0, coming=lambda step: step + -step % 10) as watch:
        watch.hooks.clock.due = math.inf
        for step in range(8):
            for group in (first, second):
                group.grad = None
            loss = quadratic(first) + quadratic(second)
            loss.backward()
            if step in (3, 6):
                norm = nn.utils.clip_grad_norm_([second], 1.0)
                torch.optim.SGD([second], lr=0.1).step()
                losses.append((loss.item(), norm.item()))
            optimizer.step()
    found = [(step.stream, step.loss, step.micro_batches, step.clip_norm) for step in watch.steps]
    assert [one[:3:2] for one in found] == [(0, 1), (1, 0), (2, 1)]
    assert math.isnan(found[1][1])
    assert found[2][1::2] == losses[1]
