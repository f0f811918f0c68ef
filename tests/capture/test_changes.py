"""What an optimizer does: updates, outer gradients and momentum, against weights that the loop itself copies."""

import contextlib

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture import record
from gtrace.capture.options import every_step

STEPS, SPAN = 6, 2
KINDS = "update,outer,momentum"
#: steps with an infinite gradient: the first one of an outer gradient, and the last one of another
BAD = (2, 5)


class Shrinking(torch.optim.SGD):
    """Its step goes on after that of its base."""

    def step(self, closure=None):
        result = super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            parameter.data.mul_(0.99)
        return result


def model_of(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def groups(model):
    return [{"params": model[0].parameters(), "lr": 0.2, "momentum": 0.5}, {"params": model[2].parameters()}]


def sgd(model, **about):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01, **about)


MAKERS = {
    "for-loop": lambda m: sgd(m, foreach=False),
    "foreach": lambda m: sgd(m, foreach=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "groups": lambda m: torch.optim.SGD(groups(m), lr=0.1, momentum=0.9),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
    # torch watches the step of a class once there is an object of it.
    "super": lambda m: sgd(m) and Shrinking(m.parameters(), lr=0.1, momentum=0.9),
    "closure": sgd,
    "LBFGS": lambda m: torch.optim.LBFGS([p for p in m.parameters() if p.requires_grad], lr=0.1, max_iter=3),
    "bfloat16": sgd,
    "scaler": sgd,
    "scaler, fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
}


def train(case, seen=None):
    """Train; ``seen`` gets the weights before each step and at the end, and the momentum after each step."""
    model = model_of(torch.bfloat16 if case == "bfloat16" else torch.float32)
    optimizer = MAKERS[case](model)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled="scaler" in case)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    seen = [] if seen is None else seen

    def note():
        seen.append(({name: p.detach().double().clone() for name, p in named.items()}, {}))

    for step in range(STEPS):
        x = torch.randn(4, 6, dtype=model[0].weight.dtype)

        def closure(x=x, step=step):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss * (torch.inf if "scaler" in case and step in BAD else 1.0)).backward()
            return loss

        note()
        if case in ("closure", "LBFGS"):
            optimizer.step(closure)
        else:
            closure()
            scaler.step(optimizer)
            scaler.update()
        for name, p in named.items():
            own = optimizer.state.get(p, {})
            if (mean := own.get("momentum_buffer", own.get("exp_avg"))) is not None:
                seen[-1][1][name] = mean.detach().clone()
    note()
    return [p.detach() for p in model.parameters()]


@pytest.mark.capture_case("--kind update, outer, momentum: closures, fused, foreach, groups, GradScaler, bfloat16")
@pytest.mark.parametrize("case", MAKERS)
def test_they_are_what_the_loop_sees(case, path):
    plain, seen = train(case), []
    with Captured(path, kind=KINDS, every=SPAN, policy=every_step(1)) as run:
        trained = train(case, seen)
    assert all(torch.equal(a, b) for a, b in zip(plain, trained, strict=True))
    assert run.said == []
    bad = BAD if "scaler" in case else ()
    assert run.summary.skipped_steps == len(bad)
    assert run.trace.attrs["capture"]["skipped"] == ({"0": "2,5"} if bad else {})
    kinds = {"update": 1, "outer": SPAN} | ({} if case == "LBFGS" else {"momentum": 0})
    assert {(info.kind, info.name) for info in run.trace.tensors} == {(kind, n) for kind in kinds for n in seen[0][0]}
    for info in run.trace.tensors:
        span = kinds[info.kind]
        steps = run.trace.steps(info.name, kind=info.kind).tolist()
        assert steps == [s for s in range(0, STEPS, max(1, span)) if info.kind == "outer" or s not in bad]
        for step in steps:
            before, means = seen[step]
            wanted = before[info.name] - seen[step + span][0][info.name] if span else means[info.name]
            found = run.trace.read(info.name, step, kind=info.kind)
            assert found.tobytes() == wanted.float().numpy().tobytes(), (info, step)
    assert ("no momentum" in " ".join(run.summary.without)) == (case == "LBFGS")


@pytest.mark.capture_case("--kind update, outer: optimizers inside the backward pass")
def test_optimizers_inside_the_backward_pass(path):
    model, seen = model_of(), []
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizers = {p: sgd(nn.ParameterList([p])) for p in trained}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step)
    with Captured(path, kind="weight," + KINDS, every=SPAN, policy=every_step(1)) as run:
        for _ in range(STEPS):
            seen.append(model[2].weight.detach().clone())
            model(torch.randn(4, 6)).square().mean().backward()
    seen.append(model[2].weight.detach().clone())
    for kind, span in (("update", 1), ("outer", SPAN)):
        for step in range(0, STEPS, span):
            wanted = (seen[step] - seen[step + span]).numpy()
            assert run.trace.read("2.weight", step, kind=kind).tobytes() == wanted.tobytes()
    last = optimizers[model[2].weight].state[model[2].weight]["momentum_buffer"]
    assert run.trace.read("2.weight", STEPS - 1, kind="momentum").tobytes() == last.numpy().tobytes()
    assert run.trace.steps("2.weight", kind="weight").size == STEPS


def test_an_outer_gradient_ends_before_the_program_averages(path):
    """DiLoCo's programs replace the weights in a hook after the last inner step."""
    model = model_of()
    optimizer, steps, differences, start = sgd(model), [0], [], [model[2].weight.detach().clone()]

    @torch.no_grad()
    def synchronize(*_):
        steps[0] += 1
        if steps[0] % SPAN == 0:
            differences.append(start[0] - model[2].weight)
            model[2].weight.copy_(start[0] - 0.7 * differences[-1])
            start[0] = model[2].weight.clone()

    optimizer.register_step_post_hook(synchronize)
    with record(model, optimizer, path, kind="outer", every=SPAN):
        descend(model, optimizer, 4, 6, steps=STEPS)
    with gtrace.open_trace(path) as trace:
        assert trace.steps("2.weight").tolist() == [0, 2, 4]
        for step, wanted in zip((0, 2, 4), differences, strict=True):
            assert trace.read("2.weight", step).tobytes() == wanted.numpy().tobytes()


@pytest.mark.capture_case("main_grad without grad (Megatron)")
def test_gradients_that_are_kept_beside_grad(path):
    class Main(torch.optim.Optimizer):
        """Its gradients are where Megatron accumulates them."""

        @torch.no_grad()
        def step(self):
            for parameter in self.param_groups[0]["params"]:
                parameter -= 0.1 * parameter.main_grad

    def accumulate(parameter):
        parameter.main_grad += parameter.grad
        parameter.grad = None

    model, seen = nn.Linear(6, 2), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(accumulate)
    optimizer = Main(model.parameters(), {"lr": 0.1})
    with record(model, optimizer, path, kind="weight,update"):
        for _ in range(3):
            for parameter in model.parameters():
                parameter.main_grad = torch.zeros_like(parameter)
            for _ in range(2):
                model(torch.randn(4, 6)).square().mean().backward()
            seen.append((model.weight.main_grad.clone(), model.weight.detach().clone()))
            optimizer.step()
    seen.append((None, model.weight.detach().clone()))
    with gtrace.open_trace(path) as trace:
        for step in range(3):
            assert trace.read("weight", step).tobytes() == seen[step][0].numpy().tobytes()
            update = seen[step][1] - seen[step + 1][1]
            assert trace.read("weight", step, kind="update").tobytes() == update.numpy().tobytes()


def test_a_step_that_raises_leaves_no_update(path):
    model = model_of()
    optimizer = sgd(model)
    fails = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with record(model, optimizer, path, kind="update"):
        for _ in range(3):
            with contextlib.suppress(ZeroDivisionError):
                descend(model, optimizer, 4, 6, steps=1)
            fails.remove()
    assert gtrace.open_trace(path).steps("2.weight").tolist() == [1, 2]


@pytest.mark.parametrize("how", [{"max_elements": 16384}, {"sketch": "l2:512"}, {"budget": 3 * 4 * 40_000}])
def test_samples_sketches_and_budget_are_those_of_gradients(how, path):
    model = nn.Linear(200, 200, bias=False)
    optimizer = sgd(model)
    with record(model, optimizer, path, kind="update", steps="0-9", **how) as session:
        descend(model, optimizer, 4, 200, steps=5)
    summary = session.finish("complete")
    with gtrace.open_trace(path) as trace:
        (info,) = trace.tensors
        assert trace.steps("weight").size == summary.rows == (3 if "budget" in how else 5)
        assert summary.over_budget == ("budget" in how)
        assert bool(info.sketches) == ("sketch" in how)
        assert (info.sample is not None) == ("max_elements" in how)
        rows = gtrace.run_sweep(trace, ["qsgd:bits=3,bucket_size=512"], draws=0)
        assert np.isfinite(rows["relative_variance"]).all()
        assert rows.provenance["kind"] == "update"
