"""Training loops of many styles, captured with everything on: the bits, the names, the gradients and the losses."""

import re

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from helpers_styles import STYLES
from torch import nn
from torch._dynamo import lookup_backend

from gtrace.capture.options import every_step, parse_steps


class HandWritten:
    """What each optimizer saw, noted by a wrapper around its ``step``."""

    def __init__(self):
        self.steps, self.losses, self._numbers, self._kept = {}, {}, {}, []

    def __call__(self, optimizer, *models):
        self._kept.append((optimizer, models))
        step = optimizer.step

        def noted(closure=None):
            if closure is None:
                self._note(optimizer, models)
                return step()
            return step(lambda: (closure(), self._note(optimizer, models))[0])

        optimizer.step = noted
        return optimizer

    def loss(self, optimizer, value):
        self.losses.setdefault(id(optimizer), []).append(float(value))

    def _note(self, optimizer, models):
        number = self._numbers.setdefault(id(optimizer), len(self._numbers))
        names = {id(p): name for model in models for name, p in reversed(list(model.named_parameters()))}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        row = {names[id(p)]: p.grad.detach().float().clone() for p in parameters if p.grad is not None}
        self.steps.setdefault(number, []).append(row)

    def numbered_losses(self):
        return {self._numbers[key]: losses for key, losses in self.losses.items()}


def bits(trained):
    tensors = [t for one in trained for t in (one.state_dict().values() if hasattr(one, "state_dict") else [one])]
    return [tensor.numpy(force=True).tobytes() for tensor in tensors]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.capture_case(name)) for name in STYLES], ids=lambda name: name[:20]
)
def test_a_style(name, path):
    torch.manual_seed(0)
    plain = bits(STYLES[name](HandWritten()))
    torch.manual_seed(0)
    seen = HandWritten()
    with Captured(path, kind="both", noise=True, optimizer_state=True, second_moments=True) as run:
        trained = STYLES[name](seen)
    assert bits(trained) == plain
    assert [line for line in run.said if "note:" not in line] == []
    trace = run.trace
    assert trace.attrs["capture"]["errors"] == 0
    for number, rows in seen.steps.items():
        # As the program spells them: the number of a later optimizer and the class of a further model are in front.
        shown = {
            re.sub(r"^(opt\d+/)?([A-Z]\w*\.)?", "", info.name): info.name
            for info in trace.tensors
            if info.kind == "weight" and info.optimizer == number
        }
        assert shown.keys() == {name for row in rows for name in row}
        for name in shown:
            steps = [step for step, row in enumerate(rows) if name in row]
            assert trace.steps(shown[name], optimizer=number).tolist() == steps
            for step in steps:
                gradient = trace.read(shown[name], step, optimizer=number)
                assert gradient.tobytes() == rows[step][name].reshape(-1).numpy().tobytes()
    names = [(info.kind, info.name) for info in trace.tensors]
    assert len(set(names)) == len(names)
    for number, losses in seen.numbered_losses().items():
        assert np.allclose(trace.scalars(optimizer=number)["loss"], losses, rtol=1e-6)
    assert not [info.name for info in trace.tensors if "unnamed" in info.name or "~" in info.name]


def compiled(what, backend, steps=5):
    """Final weights and gradients of each step of a training of which this is compiled, and what was compiled."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    graphs, gradients = [], []

    def noted(graph, inputs):
        graphs.append([str(node) for node in graph.graph.nodes if node.op != "placeholder"])
        return lookup_backend(backend)(graph, inputs)

    def compile_if(part, function):
        return torch.compile(function, backend=noted) if part in what else function

    def clipped_step():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    def iteration(x):
        optimizer.zero_grad()
        forward(x).square().mean().backward()
        step()

    model = nn.Sequential(compile_if("part", nn.Linear(4, 8)), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if "in place" in what:
        model.compile(backend=noted)
    forward = compile_if("model", compile_if("function", lambda x: model(x)) if "function" in what else model)
    step, run = compile_if("step", clipped_step), compile_if("loop", iteration)
    for _ in range(steps):
        run(torch.randn(5, 4))
        gradients.append([p.grad.flatten().tolist() for p in model.parameters()])
    return bits([model]), gradients, graphs


@pytest.mark.filterwarnings("ignore")  # torch's own, of every kind, while it compiles
@pytest.mark.filterwarnings("error:Using `torch.compile")  # for hooks like ours
@pytest.mark.capture_case("torch.compile of model, step and loop (eager, aot_eager)")
@pytest.mark.parametrize(
    ("what", "backend", "kind", "every"),
    [
        ("model and step", "eager", "weight", 3),
        ("loop", "aot_eager", "weight", 3),
        ("model", "eager", "both", 1),
        ("in place", "eager", "both", 3),
        ("function", "eager", "both", 1),
        ("part", "eager", "both", 3),
    ],
)
def test_what_is_compiled_has_the_same_graphs_and_bits(path, what, backend, kind, every):
    weights, gradients, graphs = compiled(what, backend)
    with Captured(path, policy=every_step(every), kind=kind) as run:
        assert compiled(what, backend) == (weights, gradients, graphs)
    assert graphs or what == "in place"
    assert run.summary.errors == 0
    assert bool(run.said) == (kind == "both")
    told = {"part": "inside of the compiled '0' are not", "model": "inside of the compiled 'Sequential' are not"}
    assert told.get(what, "") in " ".join(run.said)
    infos = [info for info in run.trace.tensors if info.kind == "weight"]
    assert [info.name for info in infos] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    for step in range(0, 5, every):
        assert [run.trace.read(info.name, step, kind="weight").tolist() for info in infos] == gradients[step]
    assert np.isfinite(run.trace.scalars(kind="weight")["loss"]).all()


def within(gradients, fail=False):
    """Optimizers that own one parameter each and step while the backward pass goes on; one of them may fail once."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    trained = {p: name for name, p in model.named_parameters() if p.requires_grad}
    optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in trained}

    def step(parameter):
        gradients[-1][trained[parameter]] = parameter.grad.flatten().tolist()
        if fail and len(gradients) == 2 and parameter is model[0].bias:
            raise ZeroDivisionError
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in trained:
        parameter.register_post_accumulate_grad_hook(step)
    for _ in range(4):
        gradients.append({})
        try:
            model(torch.randn(6, 3)).square().sum().backward()
        except ZeroDivisionError:
            model.zero_grad()
    return bits([model])


@pytest.mark.capture_case("optimizers inside the backward pass")
@pytest.mark.parametrize(("steps", "fail"), [("0-3", False), ("1,3", False), ("0-3", True)])
def test_optimizers_inside_a_backward_pass_are_one_stream(path, steps, fail):
    """One row for each backward pass; one that fails does not mix with the next."""
    plain, gradients = within([{}], fail), []
    with Captured(path, policy=parse_steps(steps)) as run:
        weights = within(gradients, fail)
    assert fail or weights == plain
    wanted = [step for step in range(4) if parse_steps(steps).coming(step, 0) == step]
    assert (run.summary.rows, run.summary.optimizers, run.summary.steps_seen) == (len(wanted), 1, 4)
    assert run.said == []
    trace = run.trace
    assert [key.optimizer for key in trace.streams] == [0]
    assert {info.name for info in trace.tensors} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for step in wanted:
        if not (fail and step == 1):
            for name, gradient in gradients[step].items():
                assert trace.read(name, step).tolist() == gradient
    assert trace.steps("0.weight").tolist() == [step for step in wanted if not (fail and step == 1)]
    assert trace.steps("2.weight").tolist() == wanted
    assert np.isfinite(trace.scalars()["loss"]).all()
    assert trace.scalars()["lr"].tolist() == [0.01] * len(wanted)
