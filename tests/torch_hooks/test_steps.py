"""Which losses and norms belong to a step, in loops of every style."""

import math
import pickle

import pytest
import torch
from helpers_hooks import Watch, quadratic, weight
from torch import nn


def told(watch):
    return [(step.stream, step.loss, step.micro_batches) for step in watch.steps]


def test_a_loss_with_a_factor_and_a_diverged_one_that_was_thrown_away():
    w = weight()
    optimizer = torch.optim.SGD([w], lr=0.0)
    loss = quadratic(w)
    with Watch() as watch:
        loss.backward(torch.ones_like(loss))
        optimizer.step()
        quadratic(w).backward(torch.tensor(-0.5))
        quadratic(w).sum().reshape(1).backward(torch.tensor([2.0]))
        optimizer.step()
        (quadratic(w) * math.nan).backward()
        optimizer.zero_grad()
        quadratic(w).backward()
        optimizer.step()
    assert told(watch) == [(0, 5.0, 1), (0, 7.5, 2), (0, 5.0, 1)]


@pytest.mark.capture_case("a backward pass of which the gradients are thrown away")
@pytest.mark.parametrize("how", ["optimizer", "model"])
def test_what_was_backpropagated_before_zero_grad_is_no_part_of_the_step(how):
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with Watch() as watch:
        zero = optimizer.zero_grad if how == "optimizer" else model.zero_grad
        for _ in range(2):
            image = torch.ones(1, 2, requires_grad=True)
            model(image).square().sum().mul(1000).backward()  # an attack on the image
            zero()
            losses = [model(image.detach()).square().sum(), model(image.detach()).abs().sum()]
            for loss in losses:
                loss.backward()
            expected = model.weight.grad.clone()
            optimizer.step()
            assert torch.equal(watch.gradients[-1][0], expected)
            zero()
    assert told(watch) == [(0, sum(loss.item() for loss in losses), 2)] * 2


def test_zero_grad_of_one_of_two_optimizers():
    actor, critic = weight(1.0), weight(3.0)
    a, c = torch.optim.SGD([actor], lr=0.0), torch.optim.SGD([critic], lr=0.0)
    with Watch() as watch:
        for _ in range(2):
            a.zero_grad()
            quadratic(actor).backward()
            c.zero_grad()
            quadratic(critic).backward()
            a.step()
            c.step()
    assert told(watch) == [(0, 10.0, 2), (1, 9.0, 1)] * 2


class TwoSided(torch.optim.SGD):
    """Sharpness-aware: one backward pass tells where to look, a second one there is stepped on."""

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["away"] = p.grad.sign()
                p.add_(self.state[p]["away"])
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
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
    assert told(watch) == [(0, 13.0, 1)] * 2
    assert all(torch.equal(gradient, torch.tensor([4.0, 6.0])) for (gradient,) in watch.gradients)


def test_each_optimizer_has_the_norm_of_its_own_gradients():
    first, second, third = weight(3.0, 4.0), weight(6.0), weight(1.0)
    optimizers = [torch.optim.SGD(parameters, lr=0.0) for parameters in ([first], [second], [third])]
    with Watch() as watch:
        (quadratic(first) + quadratic(second) + quadratic(third)).backward()
        nn.utils.clip_grad_norm_(iter([first]), 1.0)
        nn.utils.clip_grad_norm_(second, 1.0)
        for optimizer in optimizers:
            optimizer.step()
    norms = [step.clip_norm for step in watch.steps]
    assert norms[:2] == [pytest.approx(10.0), pytest.approx(12.0)]
    assert math.isnan(norms[2])


@pytest.mark.capture_case("clipping")
def test_parts_that_are_clipped_one_by_one_have_one_norm():
    first, second = weight(3.0, 4.0), weight(12.0)
    optimizer = torch.optim.SGD([first, second], lr=0.0)
    with Watch() as watch:
        (quadratic(first) + quadratic(second)).backward()
        for part in (first, second):
            nn.utils.clip_grad_norm_([part], 100.0)
            nn.utils.clip_grad_norm_([part], 1e-3)  # the norm is that of the last call
            part.grad.mul_(1000)
            nn.utils.clip_grad_norm_([part], 100.0)
        optimizer.step()
    assert watch.steps[0].clip_norm == pytest.approx(math.hypot(1.0, 1.0), rel=1e-3)


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
