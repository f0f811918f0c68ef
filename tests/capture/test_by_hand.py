"""Programs that change their weights without an optimizer of torch: what is a step, and what of it is recorded."""

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from torch import nn

import gtrace
from gtrace.capture.summary import result_text


class Bare:
    """Tensors that no module owns."""

    def __init__(self):
        self.first, self.second = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)

    def __call__(self, x):
        return (x @ self.first).clamp(min=0) @ self.second

    def parameters(self):
        return self.first, self.second

    def named_parameters(self):
        return [("unnamed/opt0.g0.p0", self.first), ("unnamed/opt0.g0.p1", self.second)]


def loss_of(model):
    return model(torch.randn(5, 4)).square().mean()


def loss_after_an_attack(model):
    """Of an input that was changed, for which the gradients of the weights are thrown away."""
    x = torch.randn(5, 4, requires_grad=True)
    for _ in range(2):
        model(x).square().mean().backward()
        x.data.add_(x.grad.sign(), alpha=0.1)
        x.grad = None
    model.zero_grad()
    return model(x.detach()).square().mean()


def behind_autograd(p):
    p.data.add_(p.grad, alpha=-0.1)


@torch.no_grad()
def in_place(p):
    p -= 1e-3 * p.grad


@torch.no_grad()
def with_momentum(p):
    p.momentum = getattr(p, "momentum", 0.0) * 0.9 + p.grad
    p.sub_(p.momentum, alpha=0.01)


def to_none(p):
    p.grad = None


def to_zero(p):
    p.grad.zero_()


def no_change(_):
    pass


def descend(note, make=lambda: nn.Linear(4, 2), loss=loss_of, change=behind_autograd, clear=to_none, batches=1, clip=0):
    """A loop without an optimizer; ``note`` is called when the gradients of a step are there."""
    torch.manual_seed(0)
    model = make()
    for _ in range(3):
        for _ in range(batches):
            loss(model).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        note({name: p.grad.flatten().tolist() for name, p in model.named_parameters()})
        for p in model.parameters():
            change(p)
            clear(p)
    return [p.detach().numpy().tobytes() for p in model.parameters()]


LOOPS = {
    "a word language model": {"make": lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), "clip": 0.01},
    "micro-batches": {"batches": 2},
    "gradients that are never cleared": {"clear": no_change},
    "bare tensors": {"make": Bare, "change": in_place, "clear": to_zero},
    "an embedding of which most rows are zero": {
        "make": lambda: nn.Embedding(5000, 2),
        "loss": lambda model: model(torch.tensor([4321])).square().sum(),
    },
    "an optimizer of one's own": {"change": with_momentum, "clear": to_zero},
    "an attack on the input": {"loss": loss_after_an_attack},
}


@pytest.mark.capture_case("no optimizer: weights changed by hand, or by an optimizer of one's own")
@pytest.mark.parametrize("name", LOOPS)
def test_gradients_after_each_backward_pass(name, path):
    # It never steps, and all steps wait until the end, when the model is gone.
    exists = (
        torch.optim.SGD(nn.Linear(1, 1).parameters()) if name in ("a word language model", "bare tensors") else None
    )
    rows = []
    plain = descend(rows.append, **LOOPS[name])
    with Captured(path) as run:
        assert descend(no_change, **LOOPS[name]) == plain
    del exists
    assert (run.summary.errors, run.summary.by_hand) == (0, True)
    names = [info.name for info in run.trace.tensors]
    assert [{name: run.trace.read(name, step).tolist() for name in names} for step in range(3)] == rows
    assert run.trace.scalars()["step"].tolist() == [0, 1, 2]
    assert np.isfinite(run.trace.scalars()["loss"]).all()


@pytest.mark.capture_case("no optimizer: several models")
def test_models_that_are_changed_in_turn_have_steps_of_their_own(path):
    rows = {"critic": [], "generator": []}
    with Captured(path) as run:
        models = {"critic": nn.Linear(2, 1), "generator": nn.Linear(4, 2)}
        for step in range(4):
            for name in ("critic", "generator") if step % 2 else ("critic",):
                models["critic"].zero_grad()
                models["generator"].zero_grad()
                # Both get gradients, and one changes.
                models["critic"](models["generator"](torch.randn(5, 4))).square().mean().backward()
                rows[name].append({key: p.grad.flatten().tolist() for key, p in models[name].named_parameters()})
                for p in models[name].parameters():
                    behind_autograd(p)
    for number, prefix, of in ((0, "", rows["critic"]), (1, "Linear_2.", rows["generator"])):
        names = [info.name for info in run.trace.tensors if info.optimizer == number]
        assert set(names) == {f"{prefix}weight", f"{prefix}bias"}
        for step, row in enumerate(of):
            assert {key: run.trace.read(prefix + key, step, optimizer=number).tolist() for key in row} == row
        assert run.trace.scalars(optimizer=number)["step"].size == len(of)
    assert result_text(run.summary, path).startswith("2 to 4 steps of each of 2 optimizers captured")


@pytest.mark.capture_case("no optimizer: and then one that steps")
@pytest.mark.parametrize("exists", [True, False])
def test_an_optimizer_that_steps_later(exists, path):
    """If it exists from the start it may be about to step: what was done by hand before is no step of the training."""
    with Captured(path, tensors=("weight",)) as run:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if exists else None
        rows = []
        for step in range(6):
            model.zero_grad()
            loss_of(model).backward()
            rows.append(model.weight.grad.flatten().tolist())
            if step < 3:
                behind_autograd(model.weight)
            else:
                optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.step()
    found = [run.trace.read(i.name, s, optimizer=i.optimizer).tolist() for i in run.trace.tensors for s in range(3)]
    # Other tests may have left an optimizer that is not collected yet.
    assert found in ([rows[3:]] if exists else [rows, rows[3:]])


@pytest.mark.capture_case("torch.func.grad: gradients handed over")
def test_gradients_that_are_handed_over(path):
    def squares(weights, x):
        return (x @ weights["w"] + weights["b"]).square().mean()

    rows = []
    with gtrace.capture(path, every=2) as session:
        weights = {"w": torch.randn(4, 2), "b": torch.zeros(2)}
        for _ in range(5):
            gradients, loss = torch.func.grad_and_value(squares)(weights, torch.randn(5, 4))
            rows.append(({name: one.flatten().tolist() for name, one in gradients.items()}, float(loss)))
            gtrace.record_gradients(gradients, loss=loss, lr=0.1)
            weights = {name: one - 0.1 * gradients[name] for name, one in weights.items()}
    gtrace.record_gradients(gradients)  # outside of a capture nothing happens
    with gtrace.open_trace(path) as trace:
        assert trace.scalars()["step"].tolist() == [0, 2, 4]
        assert trace.scalars()["lr"].tolist() == [0.1] * 3
        for step, loss in zip((0, 2, 4), trace.scalars()["loss"], strict=True):
            row, expected = rows[step]
            assert {name: trace.read(name, step).tolist() for name in row} == row
            assert loss == pytest.approx(expected)
    assert session.finish("complete").functional == 5


def test_weights_that_are_swapped_stay_those_of_one_model(path):
    """torch refuses to swap tensors with weak references."""
    with Captured(path) as run:
        model = nn.Linear(4, 3)
        for step in range(6):
            if step == 3:
                torch.utils.swap_tensors(model.weight, nn.Parameter(torch.ones(3, 4)))
            model.zero_grad()
            loss_of(model).backward()
            for parameter in model.parameters():
                in_place(parameter)
    assert {(one.name, one.optimizer) for one in run.trace.tensors} == {("weight", 0), ("bias", 0)}
    assert run.trace.steps("weight").tolist() == [*range(6)]
    assert run.summary.errors == 0
