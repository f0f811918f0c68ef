"""What hooks make of an optimizer's steps: their numbers, gradients, losses and norms, in loops of every style."""

import copy
import gc
import math
import pickle
import threading

import pytest
import torch
from helpers_hooks import Watch, quadratic, weight
from torch import nn


def sgd(*parameters, lr=0.1, **options):
    return torch.optim.SGD(parameters, lr=lr, **options)


def losses(watch):
    return [(step.stream, step.loss, step.micro_batches) for step in watch.steps]


@pytest.mark.capture_case("several optimizers")
def test_two_optimizers_on_one_backward_pass_see_the_same_loss():
    first, second = weight(1.0), weight(2.0)
    optimizers = [sgd(first), torch.optim.Adam([second], lr=0.2)]
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
    w, numbers = weight(), []
    with Watch(on_step=lambda step: numbers.append(step.stream)):
        for _ in range(3):
            quadratic(w).backward()
            sgd(w).step()
    assert numbers == [0, 1, 2]


def test_what_is_a_loss():
    """Its factor counts; explicit gradients of something larger make none; later changes in place do not matter."""
    w = weight()
    optimizer = sgd(w, lr=0.0)

    def factor():
        loss = quadratic(w)
        loss.backward(torch.ones_like(loss))

    def two():
        quadratic(w).backward(torch.tensor(-0.5))
        quadratic(w).sum().reshape(1).backward(torch.tensor([2.0]))

    def thrown_away():
        (quadratic(w) * math.nan).backward()
        optimizer.zero_grad()
        quadratic(w).backward()

    def in_place():
        loss = quadratic(w)
        loss.backward()
        loss.detach().mul_(100)

    def several():
        torch.autograd.backward([quadratic(w), w.sum()])

    def none():
        (w * 2).backward(torch.ones(2))

    with Watch() as watch:
        for backward in (factor, two, thrown_away, in_place, several, none):
            backward()
            optimizer.step()
    *told, (stream, loss, count) = losses(watch)
    assert told == [(0, 5.0, 1), (0, 7.5, 2), (0, 5.0, 1), (0, 5.0, 1), (0, 8.0, 1)]
    assert (stream, math.isnan(loss), count) == (0, True, 0)


@pytest.mark.parametrize(
    ("make", "evaluations", "by_keyword"),
    [
        pytest.param(torch.optim.LBFGS, 4, False, marks=pytest.mark.capture_case("LBFGS")),
        pytest.param(torch.optim.LBFGS, 4, True, marks=pytest.mark.capture_case("LBFGS")),
        pytest.param(torch.optim.Adam, 1, False, marks=pytest.mark.capture_case("closures of other optimizers")),
    ],
)
def test_gradients_of_a_closure_are_those_of_its_first_evaluation(make, evaluations, by_keyword):
    w = weight(3.0, -2.0)
    optimizer = make([w], lr=0.5, **({} if evaluations == 1 else {"max_iter": 4}))
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
            returned = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            assert (len(seen) > 1) == (evaluations > 1)
            assert returned.item() == seen[0][0]
            first.append(seen[0])
    assert [s.step for s in watch.steps] == [0, 1, 2]
    assert [s.loss for s in watch.steps] == [loss for loss, _ in first]
    assert all(torch.equal(g[0], e) for g, (_, e) in zip(watch.gradients, first, strict=True))


@pytest.mark.capture_case("a subclass of an optimizer that calls super().step()")
def test_a_subclass_that_calls_super_step_is_one_step_and_one_that_raised_hides_nothing():
    class Doubling(torch.optim.SGD):
        fails = True

        def step(self, closure=None):
            if self.fails:
                raise ArithmeticError("once")
            self.param_groups[0]["params"][0].grad.mul_(2)
            return super().step(closure)

    w = weight()
    other = sgd(weight())  # hooks SGD.step itself
    optimizer = Doubling([w], lr=0.1)
    with Watch() as watch:
        quadratic(w).backward()
        with pytest.raises(ArithmeticError):
            optimizer.step()
        optimizer.fails = False
        for _ in range(2):
            optimizer.zero_grad()
            quadratic(w).backward()
            optimizer.step()
    assert [s.step for s in watch.steps] == [0, 1, 2]
    assert torch.equal(watch.gradients[1][0], torch.tensor([2.0, 4.0]))
    assert other.param_groups


@pytest.mark.capture_case("AMP with GradScaler, fused and not")
def test_a_fused_optimizer_that_was_unscaled_by_hand():
    w = weight()
    optimizer = sgd(w, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with Watch() as watch:
        scaler.scale(quadratic(w)).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
    assert watch.steps[0].grad_scale == 1.0
    assert torch.equal(watch.gradients[0][0], torch.tensor([2.0, 4.0]))


def test_an_error_of_the_observer_does_not_stop_training_and_an_interrupt_passes_through():
    errors = [KeyboardInterrupt(), OSError("disk full"), OSError("still")]

    def fail(_step):
        raise errors.pop()

    w = weight()
    optimizer, watch = sgd(w), Watch(on_step=fail)
    watch.hooks.install()
    quadratic(w).backward()
    optimizer.step()
    optimizer.step()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    watch.hooks.remove()
    assert [str(error) for error in watch.errors] == ["still", "disk full"]


def test_only_the_given_optimizers_are_watched():
    first, second = weight(), weight()
    mine, other = sgd(first), sgd(second)
    scaler = torch.amp.GradScaler("cpu")
    with Watch(optimizers=[mine]) as watch:
        (quadratic(first) + scaler.scale(quadratic(second))).backward()
        scaler.step(other)
        mine.step()
    assert [(s.optimizer is mine, s.stream) for s in watch.steps] == [(True, 0)]
    assert watch.hooks.skipped_steps == 0


def test_everything_is_put_back_but_another_wrapper_on_top():
    def state():
        scaler = torch.amp.GradScaler
        return torch.autograd.backward, scaler.scale, scaler.step, torch.nn.utils.clip_grad_norm_

    before = state()
    with Watch() as watch:
        ours = state()
        assert all(now is not then for now, then in zip(ours, before, strict=True))
    assert state() == before
    w = weight()
    quadratic(w).backward()
    sgd(w).step()
    assert watch.steps == []
    watch.hooks.install()
    wrapped = torch.autograd.backward
    torch.autograd.backward = theirs = lambda *args, **kwargs: wrapped(*args, **kwargs)
    watch.hooks.remove()
    assert torch.autograd.backward is theirs
    torch.autograd.backward = before[0]


def test_threads_that_train_have_their_own_losses():
    weights = [weight(1.0), weight(2.0)]
    turns = [threading.Semaphore(1), threading.Semaphore(0)]

    def train(number):
        optimizer = sgd(weights[number])
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
        found = [step.loss for step in watch.steps if step.optimizer.param_groups[0]["params"][0] is weights[number]]
        assert found == pytest.approx([(number + 1) ** 2 * 0.64**step for step in range(3)])
    assert [step.micro_batches for step in watch.steps] == [1] * 6
    assert watch.backward_passes == 6


def test_a_thread_that_only_steps_has_the_losses_of_the_first():
    w = weight()
    with Watch() as watch:
        quadratic(w).backward()
        thread = threading.Thread(target=sgd(w).step)
        thread.start()
        thread.join()
    assert watch.steps[0].loss == 5.0


@pytest.mark.capture_case("a backward pass of which the gradients are thrown away")
@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_what_was_backpropagated_before_zero_grad_is_no_part_of_the_step(how):
    model = nn.Linear(2, 1, bias=False)
    optimizer = sgd(model.weight, lr=0.0)
    with Watch() as watch:
        zero = optimizer.zero_grad if how == "optimizer" else model.zero_grad
        for _ in range(2):
            image = torch.ones(1, 2, requires_grad=True)
            model(image).square().sum().mul(1000).backward()  # an attack on the image
            zero()
            parts = [model(image.detach()).square().sum(), model(image.detach()).abs().sum()]
            for loss in parts:
                loss.backward()
            expected = model.weight.grad.clone()
            optimizer.step()
            assert torch.equal(watch.gradients[-1][0], expected)
            zero()
    assert losses(watch) == [(0, sum(loss.item() for loss in parts), 2)] * 2


def test_zero_grad_of_one_of_two_optimizers():
    actor, critic = weight(1.0), weight(3.0)
    a, c = sgd(actor, lr=0.0), sgd(critic, lr=0.0)
    with Watch() as watch:
        for _ in range(2):
            a.zero_grad()
            quadratic(actor).backward()
            c.zero_grad()
            quadratic(critic).backward()
            a.step()
            c.step()
    assert losses(watch) == [(0, 10.0, 2), (1, 9.0, 1)] * 2


class TwoSided(torch.optim.SGD):
    """Sharpness-aware: one backward pass tells where to look, a second one there is stepped on."""

    @torch.no_grad()
    def first_step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p]["away"] = p.grad.sign()
            p.add_(self.state[p]["away"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(self.state[p]["away"])
        super().step()

    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@pytest.mark.capture_case("two-sided steps (SAM), by hand and with a closure")
@pytest.mark.parametrize("with_closure", [False, True])
def test_a_two_sided_step(with_closure):
    w = weight(1.0, 2.0)
    optimizer = TwoSided([w], lr=0.0)

    def closure():
        loss = quadratic(w)
        loss.backward()
        return loss

    with Watch() as watch:
        for _ in range(2):
            closure()
            if with_closure:
                optimizer.step(closure)
            else:
                optimizer.first_step()
                closure()
                optimizer.second_step()
            optimizer.zero_grad()
    assert [step.step for step in watch.steps] == [0, 1]
    assert losses(watch) == [(0, 13.0, 1)] * 2
    assert all(torch.equal(gradient, torch.tensor([4.0, 6.0])) for (gradient,) in watch.gradients)


@pytest.mark.capture_case("clipping")
def test_each_optimizer_has_the_norm_of_its_own_gradients():
    """Of the last call for each; parts that are clipped one by one have one norm."""
    first, second, third, fourth = weight(3.0, 4.0), weight(6.0), weight(1.0), weight(12.0)
    optimizers = [sgd(first, lr=0.0), sgd(second, lr=0.0), sgd(third, lr=0.0)]
    parts = sgd(first, fourth, lr=0.0)
    with Watch() as watch:
        sum(map(quadratic, (first, second, third, fourth))).backward()
        nn.utils.clip_grad_norm_(iter([first]), 1.0)
        nn.utils.clip_grad_norm_(second, 1.0)
        for optimizer in optimizers:
            optimizer.step()
        for part in (first, fourth):
            part.grad.mul_(100)
            nn.utils.clip_grad_norm_([part], 100.0)
            nn.utils.clip_grad_norm_([part], 1e-3)
            part.grad.mul_(1000)
            nn.utils.clip_grad_norm_([part], 100.0)
        parts.step()
    one, two, none, both = (step.clip_norm for step in watch.steps)
    assert (one, two, math.isnan(none)) == (pytest.approx(10.0), pytest.approx(12.0), True)
    assert both == pytest.approx(math.hypot(1.0, 1.0), rel=1e-3)
    assert torch.equal(watch.gradients[1][0], second.grad)


def test_clipping_is_what_it_was():
    w = weight(3.0, 4.0)
    quadratic(w).backward()
    with Watch():
        assert nn.utils.clip_grad_norm_(parameters=(p for p in [w]), max_norm=5.0) == 10.0
        with pytest.warns(UserWarning, match="empty generator"):
            nn.utils.clip_grad_norm_((p for p in []), 5.0)
        for function in (nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_norm_, torch.autograd.backward):
            assert pickle.loads(pickle.dumps(function)) is function
    assert torch.allclose(w.grad, torch.tensor([3.0, 4.0]))


class Twice(torch.optim.SGD):
    """A subclass, and an optimizer inside of it: three steps that are one."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self.inner = sgd(*parameters, lr=0.01)

    def step(self, closure=None):
        self.inner.step()
        return super().step(closure)


def alternating():
    """Two optimizers in turn on losses of their own, a third one from step 25 on, and a step of two micro-batches."""
    one, two, three = weight(), weight(3.0, 1.0), weight(0.5)
    optimizers = [sgd(one), torch.optim.Adam([two], lr=0.01)]
    for step in range(40):
        if step == 25:
            optimizers.append(sgd(three, lr=0.2))
        for parameter, optimizer in zip((one, two, three), optimizers, strict=False):
            for _ in range(1 + step % 2):
                quadratic(parameter).backward()
            nn.utils.clip_grad_norm_([parameter], 1.0)
            optimizer.step()
            optimizer.zero_grad()


def copied():
    """An optimizer, and a copy of it that begins later."""
    parameter = weight()
    optimizer = sgd(parameter)
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
    optimizer, inner = sgd(parameter), sgd(parameter, lr=0.01)

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
        optimizer, scaler = sgd(parameter, fused=fused), torch.amp.GradScaler("cpu", 4.0)
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
    optimizer = sgd(parameter)
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
    optimizer, heard = sgd(first), []
    with Watch(lambda _, step: step % 10 == 0, coming=lambda step: step + -step % 10) as watch:
        watch.hooks.clock.due = math.inf
        for step in range(8):
            for group in (first, second):
                group.grad = None
            loss = quadratic(first) + quadratic(second)
            loss.backward()
            if step in (3, 6):
                norm = nn.utils.clip_grad_norm_([second], 1.0)
                sgd(second).step()
                heard.append((loss.item(), norm.item()))
            optimizer.step()
    found = [(step.stream, step.loss, step.micro_batches, step.clip_norm) for step in watch.steps]
    assert [one[:3:2] for one in found] == [(0, 1), (1, 0), (2, 1)]
    assert math.isnan(found[1][1])
    assert found[2][1::2] == heard[1]
