"""What hooks make of an optimizer's steps: their numbers, gradients, losses and norms, in loops of every style."""

import gc
import math
import pickle
import threading
from collections import Counter

import pytest
import torch
from helpers_hooks import Watch, quadratic, weight
from torch import nn


def sgd(*parameters, lr=0.1, **options):
    return torch.optim.SGD(parameters, lr=lr, **options)


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


class TwoSided(torch.optim.SGD):
    """Sharpness-aware: one backward pass tells where to look, a second one there is stepped on."""

    def first_step(self):
        (p,) = self.param_groups[0]["params"]
        self.state[p]["away"] = p.grad.sign()
        p.data.add_(self.state[p]["away"])
        self.zero_grad()

    def second_step(self):
        (p,) = self.param_groups[0]["params"]
        p.data.sub_(self.state[p]["away"])
        super().step()

    def step(self, closure=None):
        self.first_step()
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
    assert [(step.loss, step.micro_batches) for step in watch.steps] == [(13.0, 1)] * 2
    assert all(torch.equal(gradient, torch.tensor([4.0, 6.0])) for (gradient,) in watch.gradients)


def several_optimizers():
    """On one backward pass, of which one steps twice as often; a third one comes later."""
    parameters = weight(1.0), weight(2.0), weight(0.5)
    optimizers = [sgd(parameters[0]), torch.optim.Adam([parameters[1]], lr=0.2)]
    for step in range(30):
        if step == 25:
            optimizers.append(sgd(parameters[2]))
        loss = sum(map(quadratic, parameters))
        loss.backward()
        for optimizer in optimizers:
            yield optimizer, [loss]
            optimizer.zero_grad()
        loss = quadratic(parameters[0])
        loss.backward()
        yield optimizers[0], [loss]
        optimizers[0].zero_grad()


def losses_of_their_own():
    """What is before ``zero_grad`` of one of two optimizers is no part of its step; it has two micro-batches."""
    actor, critic = weight(1.0), weight(3.0, 1.0)
    a, c = sgd(actor), sgd(critic, lr=0.01)
    for _ in range(30):
        a.zero_grad()
        losses = [quadratic(actor), quadratic(critic), critic.abs().sum()]
        losses[0].backward()
        c.zero_grad()
        losses[1].backward()
        losses[2].backward()
        yield a, losses
        yield c, losses[1:]


def gradients_that_are_thrown_away():
    """By the model or the optimizer, after an attack on the input, or a loss that diverged."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = sgd(model.weight)
    for step in range(30):
        image = torch.ones(1, 2, requires_grad=True)
        model(image).square().sum().mul(math.nan if step % 2 else 1000).backward()
        (model if step % 3 else optimizer).zero_grad()
        loss = model(image.detach()).square().sum()
        loss.backward()
        yield optimizer, [loss]
        optimizer.zero_grad()


def factors_and_larger_roots():
    """A factor counts; explicit gradients of something larger make no loss; later changes in place do not matter."""
    w = weight()
    optimizer = sgd(w, lr=0.01)
    for _ in range(6):
        loss = quadratic(w)
        loss.backward(torch.ones_like(loss))
        loss.detach().mul_(100)
        yield optimizer, [loss / 100]
        quadratic(w).backward(torch.tensor(-0.5))
        quadratic(w).reshape(1).backward(torch.tensor([2.0]))
        yield optimizer, [-0.5 * quadratic(w), 2 * quadratic(w)]
        torch.autograd.backward([quadratic(w), w.sum()])
        yield optimizer, [quadratic(w) + w.sum()]
        (w * 2).backward(torch.ones(2))
        yield optimizer, []


def clipping():
    """Each optimizer has the norm of its own gradients at the last call; parts that are clipped in turn have one."""
    first, second, third, fourth = weight(3.0, 4.0), weight(6.0), weight(1.0), weight(12.0)
    one, two, three = sgd(first, fourth, lr=0.01), sgd(second, lr=0.01), sgd(third, lr=0.01)
    for _ in range(30):
        loss = sum(map(quadratic, (first, second, third, fourth)))
        loss.backward()
        nn.utils.clip_grad_norm_(iter([first]), 1.0)
        norms = [nn.utils.clip_grad_norm_([part], 100.0) for part in (first, fourth)]
        yield one, [loss], math.hypot(*norms)
        yield two, [loss], float(nn.utils.clip_grad_norm_(second, 1.0))
        yield three, [loss]
        for optimizer in (one, two, three):
            optimizer.zero_grad()


THROWN_AWAY = pytest.mark.capture_case("a backward pass of which the gradients are thrown away")


@pytest.mark.parametrize("every", [1, 3, 10])
@pytest.mark.parametrize(
    "loop",
    [
        pytest.param(several_optimizers, marks=pytest.mark.capture_case("several optimizers")),
        losses_of_their_own,
        pytest.param(gradients_that_are_thrown_away, marks=THROWN_AWAY),
        factors_and_larger_roots,
        pytest.param(clipping, marks=pytest.mark.capture_case("clipping")),
    ],
)
def test_a_loop(loop, every):
    """A loop says what the step is that it takes next: its optimizer, its losses, the norm of its gradients if clipped.

    Steps that are only counted, now and then from elsewhere, change nothing about the others.
    """
    gc.collect()  # an optimizer that never steps is waited for
    numbers, steps, expected, gradients = {}, Counter(), [], []
    with Watch(lambda _, step: step % every == 0, coming=lambda step: step + -step % every) as watch:
        watch.hooks.clock.due = math.inf
        for optimizer, losses, *norm in loop():
            number, (group, *_) = numbers.setdefault(id(optimizer), len(numbers)), optimizer.param_groups
            if steps[number] % every == 0:
                loss = sum(loss.item() for loss in losses) if losses else math.nan
                expected.append((number, steps[number], loss, len(losses), *(norm or [math.nan]), group["lr"]))
                gradients.append([p.grad.tolist() for p in group["params"]])
            steps[number] += 1
            optimizer.step() if steps[number] % 4 else (lambda optimizer=optimizer: optimizer.step())()
    found = [(s.stream, s.step, s.loss, s.micro_batches, s.clip_norm, s.lr) for s in watch.steps]
    assert found == [pytest.approx(one, rel=1e-6, nan_ok=True) for one in expected]
    assert [[gradient.tolist() for gradient in several] for several in watch.gradients] == gradients
    assert watch.hooks.steps == steps.total()


def closures_and_a_scaler(fused):
    """Closures, now and then, in which another optimizer steps, and a gradient scaler that leaves out steps."""
    parameter = weight()
    optimizer, inner = sgd(parameter, fused=fused), sgd(parameter, lr=0.01)
    scaler = torch.amp.GradScaler("cpu", 4.0)

    def closure():
        optimizer.zero_grad()
        loss = quadratic(parameter)
        loss.backward()
        inner.step() if step % 3 else (lambda: inner.step())()
        return loss

    for step in range(30):
        optimizer.step(closure) if step % 4 == 2 else (closure(), optimizer.step())
    for step in range(30):
        optimizer.zero_grad()
        scaler.scale(quadratic(parameter) * (math.inf if step % 7 == 3 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()


def test_steps_that_are_only_counted_change_nothing_about_the_others():
    found = []
    for coming in (lambda step: step, lambda step: step + -step % 3):
        gc.collect()
        with Watch(lambda _, step: step % 3 == 0, coming=coming) as watch:
            watch.hooks.clock.due = math.inf
            closures_and_a_scaler(fused=True)
            closures_and_a_scaler(fused=False)
        gradients = [[gradient.tolist() for gradient in several] for several in watch.gradients]
        facts = [(s.stream, s.step, s.loss, s.micro_batches, s.lr, s.loss_scale) for s in watch.steps]
        found.append((facts, gradients, watch.hooks.steps, watch.hooks.skipped_steps))
        watch.steps.clear()
    assert found[0] == found[1]


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
