"""Programs that change their weights without an optimizer of torch: what is a step, and what of it is recorded."""

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from torch import nn

import gtrace
from gtrace.capture.words import result_text

LOOPS = {}


def loop(function):
    LOOPS[function.__name__] = function
    return function


def loss_of(model, rows=5):
    return model(torch.randn(rows, 4)).square().mean()


@loop
def word_language_model(note):
    """With clipping, and weights changed behind autograd's back."""
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    for _ in range(4):
        model.zero_grad()
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        note(dict(model.named_parameters()))
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
    return model.parameters()


@loop
def micro_batches_and_gradients_set_to_none(note, batches=2, clear=True):
    model = nn.Linear(4, 2)
    for _ in range(3):
        for _ in range(batches):
            loss_of(model).backward()
        note(dict(model.named_parameters()))
        for p in model.parameters():
            p.data -= 0.1 * p.grad
            p.grad = None if clear else p.grad
    return model.parameters()


@loop
def gradients_that_are_never_cleared(note):
    return micro_batches_and_gradients_set_to_none(note, 1, clear=False)


@loop
def bare_tensors(note):
    w1, w2 = torch.randn(4, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    for _ in range(3):
        (torch.randn(5, 4) @ w1).clamp(min=0).mm(w2).square().sum().backward()
        note({"unnamed/opt0.g0.p0": w1, "unnamed/opt0.g0.p1": w2})
        with torch.no_grad():
            w1 -= 1e-3 * w1.grad
            w2 -= 1e-3 * w2.grad
            w1.grad.zero_()
            w2.grad.zero_()
    return w1, w2


@loop
def an_embedding_of_which_most_rows_are_zero(note):
    model = nn.Embedding(5000, 2)
    for _ in range(3):
        model.zero_grad()
        model(torch.tensor([4321])).square().sum().backward()
        note(dict(model.named_parameters()))
        model.weight.data.add_(model.weight.grad, alpha=-0.1)
    return model.parameters()


@loop
def an_optimizer_of_ones_own(note):
    class Momentum:
        def __init__(self, parameters):
            self.parameters = [(p, torch.zeros_like(p)) for p in parameters]

        @torch.no_grad()
        def step(self):
            for p, buffer in self.parameters:
                p.sub_(buffer.mul_(0.9).add_(p.grad), alpha=0.01)

    model = nn.Linear(4, 2)
    optimizer = Momentum(model.parameters())
    for _ in range(3):
        model.zero_grad(set_to_none=False)
        loss_of(model).backward()
        note(dict(model.named_parameters()))
        optimizer.step()
    return model.parameters()


@loop
def after_an_attack_on_the_input(note):
    """Which changes its input, and whose gradients of the weights are thrown away."""
    model = nn.Linear(4, 2)
    for _ in range(3):
        x = torch.randn(5, 4, requires_grad=True)
        for _ in range(2):
            model(x).square().mean().backward()
            x.data.add_(x.grad.sign(), alpha=0.1)
            x.grad = None
        model.zero_grad()
        model(x.detach()).square().mean().backward()
        note(dict(model.named_parameters()))
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        model.zero_grad()
    return model.parameters()


def trained(loop, note):
    torch.manual_seed(0)
    return [p.detach().numpy().tobytes() for p in loop(note)]


@pytest.mark.capture_case("no optimizer: weights changed by hand, or by an optimizer of one's own")
@pytest.mark.parametrize("name", LOOPS)
def test_gradients_after_each_backward_pass(name, tmp_path):
    rows = []
    # It never steps, and all steps wait until the end, when the model is gone.
    exists = torch.optim.SGD(nn.Linear(1, 1).parameters()) if name in ("word_language_model", "bare_tensors") else None
    plain = trained(LOOPS[name], lambda ps: rows.append({n: p.grad.flatten().tolist() for n, p in ps.items()}))
    with Captured(tmp_path / "run.zarr") as run:
        weights = trained(LOOPS[name], lambda _: None)
    assert weights == plain
    assert run.summary.errors == 0
    assert run.summary.by_hand
    del exists
    found = [
        {info.name: run.trace.read(info.name, step).tolist() for info in run.trace.tensors} for step in range(len(rows))
    ]
    assert found == rows
    assert run.trace.scalars()["step"].tolist() == list(range(len(rows)))
    assert np.isfinite(run.trace.scalars()["loss"]).all()


@pytest.mark.capture_case("no optimizer: several models")
def test_models_that_are_changed_in_turn_have_steps_of_their_own(tmp_path):
    rows = {"critic": [], "generator": []}
    with Captured(tmp_path / "run.zarr") as run:
        torch.manual_seed(0)
        models = {"critic": nn.Linear(2, 1), "generator": nn.Linear(4, 2)}
        for step in range(4):
            for name in ("critic", "generator") if step % 2 else ("critic",):
                models["critic"].zero_grad()
                models["generator"].zero_grad()
                # Both get gradients, and one changes.
                models["critic"](models["generator"](torch.randn(5, 4))).square().mean().backward()
                rows[name].append({key: p.grad.flatten().tolist() for key, p in models[name].named_parameters()})
                for p in models[name].parameters():
                    p.data.add_(p.grad, alpha=-0.1)
    for number, prefix, of in ((0, "", rows["critic"]), (1, "Linear_2.", rows["generator"])):
        names = [info.name for info in run.trace.tensors if info.optimizer == number]
        assert set(names) == {f"{prefix}weight", f"{prefix}bias"}
        for step, row in enumerate(of):
            found = {key: run.trace.read(prefix + key, step, optimizer=number).tolist() for key in row}
            assert found == row
        assert run.trace.scalars(optimizer=number)["step"].size == len(of)
    assert result_text(run.summary, run.path).startswith("2 to 4 steps of each of 2 optimizers captured")


@pytest.mark.capture_case("no optimizer: and then one that steps")
@pytest.mark.parametrize("exists", [True, False])
def test_an_optimizer_that_steps_later(exists, tmp_path):
    """If it exists from the start it may be about to step: what was done by hand before is no step of the training."""
    with Captured(tmp_path / "run.zarr", tensors=("weight",)) as run:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if exists else None
        rows = []
        for step in range(6):
            model.zero_grad()
            loss_of(model).backward()
            rows.append(model.weight.grad.flatten().tolist())
            if step < 3:
                model.weight.data.add_(model.weight.grad, alpha=-0.1)
            else:
                optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer.step()
    found = [run.trace.read(i.name, s, optimizer=i.optimizer).tolist() for i in run.trace.tensors for s in range(3)]
    # Other tests may have left an optimizer that is not collected yet.
    assert found in ([rows[3:]] if exists else [rows, rows[3:]])


@pytest.mark.capture_case("torch.func.grad: gradients handed over")
def test_gradients_that_are_handed_over(tmp_path):
    def loss_of(weights, x):
        return (x @ weights["w"] + weights["b"]).square().mean()

    rows = []
    with gtrace.capture(tmp_path / "run.zarr", every=2) as session:
        torch.manual_seed(0)
        weights = {"w": torch.randn(4, 2), "b": torch.zeros(2)}
        for _ in range(5):
            gradients, loss = torch.func.grad_and_value(loss_of)(weights, torch.randn(5, 4))
            rows.append(({name: one.flatten().tolist() for name, one in gradients.items()}, float(loss)))
            gtrace.record_gradients(gradients, loss=loss, lr=0.1)
            weights = {name: one - 0.1 * gradients[name] for name, one in weights.items()}
    gtrace.record_gradients(gradients)  # outside of a capture nothing happens
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        assert trace.scalars()["step"].tolist() == [0, 2, 4]
        assert trace.scalars()["lr"].tolist() == [0.1] * 3
        for step, loss in zip((0, 2, 4), trace.scalars()["loss"], strict=True):
            row, expected = rows[step]
            assert {name: trace.read(name, step).tolist() for name in row} == row
            assert loss == pytest.approx(expected)
    assert session.finish("complete").functional == 5
