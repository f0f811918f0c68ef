import copy
import re
import warnings

import numpy as np
import pytest
import torch
from helpers_hooks import module
from torch import nn

from gtrace.errors import UsageError
from gtrace.training import Exchange, compress

SPEC = "qsgdinf:bits=3,bucket_size=64"


@pytest.fixture
def net():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body, head = nn.Linear(20, 30), nn.Linear(30, 2)
        return module(lambda self, x: self.head(torch.relu(self.body(x))), body=body, head=head)


def data(step):
    return torch.from_numpy(np.random.default_rng(step).standard_normal((16, 20)).astype(np.float32))


def backward(net, step):
    for parameter in net.parameters():
        parameter.grad = None
    (net(data(step)) ** 2).mean().backward()


def train(net, optimizer, steps=4):
    for step in range(steps):
        backward(net, step)
        optimizer.step()


def weights(net):
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize("kind", ["optimizer", "model"])
def test_the_optimizer_steps_with_what_was_decoded(net, kind):
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    exchange = Exchange(SPEC, seed=8, refit="once")
    with compress(optimizer if kind == "optimizer" else net, SPEC, seed=8, refit="once") as compression:
        for step in range(3):
            backward(net, step)
            old = {name: p.detach().clone() for name, p in net.named_parameters()}
            expected = exchange.step(step, [{name: p.grad.numpy().copy() for name, p in net.named_parameters()}])
            bits = compression.tally.bits
            optimizer.step()
            for name, parameter in net.named_parameters():
                assert torch.equal(parameter.detach(), old[name] - torch.from_numpy(expected.gradients[name]))
            assert compression.tally.bits == bits + expected.tally.bits
    assert compression.steps == 3
    assert compression.tally.ratio > 5
    assert compression.tally.float32_bits == 3 * 32 * weights(net).numel()


def test_it_ends_with_the_block(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with compress(optimizer, SPEC) as first, compress(net, SPEC) as second:
        train(net, optimizer, 2)
    twin = copy.deepcopy(net)
    train(net, optimizer, 2)
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), 2)
    assert torch.equal(weights(net), weights(twin))
    assert (first.steps, second.steps) == (2, 2)


def test_a_tensor_with_nan_is_not_updated_and_warned_about_three_times_or_sent_as_zeros(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = net.body.weight.detach().clone(), net.body.bias.detach().clone()
    with compress(optimizer, SPEC) as compression, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for step in range(5):
            backward(net, step)
            net.body.weight.grad[0, 0] = float("nan")
            optimizer.step()
    texts = [str(one.message) for one in said if one.category is RuntimeWarning]
    assert [re.sub(r" gradient.*;", "", text) for text in texts] == [
        f"gtrace: step {step}, body.weight: 1 the tensor is not updated" for step in range(3)
    ]
    assert torch.equal(net.body.weight, before[0])
    assert not torch.equal(net.body.bias, before[1])
    assert compression.tally.nonfinite == 5
    backward(net, 0)
    net.body.weight.grad[0, 0] = float("inf")
    with compress(optimizer, SPEC, nonfinite="zero"), pytest.warns(RuntimeWarning, match="sent as zeros"):
        optimizer.step()
    assert net.body.weight.grad[0, 0] == 0
    assert torch.isfinite(weights(net)).all()
    net.body.weight.grad[0, 0] = float("inf")
    with compress(optimizer, SPEC, nonfinite="pass"), pytest.warns(RuntimeWarning, match="they go on as they are"):
        optimizer.step()
    assert not torch.isfinite(net.body.weight[0, 0])


@pytest.mark.parametrize("keyword", [False, True])
def test_every_evaluation_of_a_closure_is_compressed(net, keyword):
    optimizer, evaluations = torch.optim.LBFGS(net.parameters(), max_iter=3), []

    def closure():
        optimizer.zero_grad()
        backward(net, 0)
        evaluations.append((net.body.weight.grad.clone(), compression.steps))
        return 1.0 - 0.1 * len(evaluations)

    with compress(optimizer, SPEC) as compression:
        optimizer.step(closure=closure) if keyword else optimizer.step(closure)
    assert [steps for _, steps in evaluations] == list(range(compression.steps))
    assert compression.steps > 1
    assert not torch.equal(evaluations[-1][0], net.body.weight.grad)


def test_layers_may_be_replaced_and_other_models_are_left_alone(net):
    with compress(net, "ef:topk:ratio=0.1") as compression:
        train(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
        for width in (3, 4, 5, 2, 2):
            net.head = nn.Linear(30, width)
            train(net, torch.optim.SGD(net.parameters(), lr=0.1), 2)
            assert np.count_nonzero(net.head.weight.grad) == 3 * width
            # Its parameters may get the ids of those that are gone.
            other = nn.Linear(30, width)
            other(torch.ones(1, 30)).sum().backward()
            torch.optim.SGD(other.parameters(), lr=0.1).step()
            assert np.count_nonzero(other.weight.grad) == 30 * width
            del other
        # Surgery on a parameter that stays.
        net.head.weight, net.head.bias = nn.Parameter(torch.ones(2, 30)), None
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for width in (2, 6):
            net.head.weight.data, net.head.weight.grad = torch.ones(width, 30), None
            train(net, optimizer, 1)
            assert np.count_nonzero(net.head.weight.grad) == 3 * width
    assert compression.steps == 14


def test_a_group_that_is_added_leaves_earlier_names_and_their_memory(net):
    later = nn.Linear(30, 30)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with compress(optimizer, "ef:topk:ratio=0.1") as compression:
        train(net, optimizer, 1)
        optimizer.add_param_group({"params": list(later.parameters())})
        later(torch.ones(1, 30)).sum().backward()
        optimizer.step()
        names = [name for name, *_ in compression.state_dict()["links"]]
    assert names[:4] == [name for name, _ in net.named_parameters()]
    assert len(names) == 6


def test_parameters_that_are_swapped_keep_their_names_and_memory(net):
    """torch refuses to swap tensors with weak references."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with compress(optimizer, "ef:topk:ratio=0.1") as compression:
        train(net, optimizer, 1)
        torch.utils.swap_tensors(net.head.weight, nn.Parameter(torch.ones_like(net.head.weight)))
        train(net, optimizer, 1)
        names = [name for name, *_ in compression.state_dict()["links"]]
    assert names == [name for name, _ in net.named_parameters()]


class Inherited(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """A wrapper with the parameters of an optimizer inside."""

    def __init__(self, inner):
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure=None):
        return self.inner.step(closure)


@pytest.mark.parametrize("target", ["outer", "inner", "model"])
def test_a_step_within_a_step_is_not_encoded_again(net, target):
    torch.optim.SGD(net.parameters(), lr=0.1)
    inner = Inherited(net.parameters(), lr=0.1)
    outer = Around(inner)
    with compress({"outer": outer, "inner": inner, "model": net}[target], SPEC) as compression:
        train(net, outer, 3)
    assert compression.steps == 3
    assert compression.tally.float32_bits == 3 * 32 * weights(net).numel()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", ["optimizer", "model"])
def test_a_compiled_step_is_compressed_like_another(kind):
    ends = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(20, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

        def step(x, layer=layer, optimizer=optimizer):
            optimizer.zero_grad()
            layer(x).square().mean().backward()
            optimizer.step()

        taken = torch.compile(step, backend="eager") if compiled else step
        with compress(optimizer if kind == "optimizer" else layer, SPEC) as compression:
            for number in range(3):
                taken(data(number))
        assert compression.steps == 3
        ends.append(weights(layer))
    assert torch.equal(*ends)


def test_the_factor_of_a_gradient_scaler_is_not_in_the_memory():
    ends = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)):
        torch.manual_seed(0)
        layer = nn.Linear(20, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, fused=True)
        with compress(optimizer, "ef:topk:ratio=0.1") as compression:
            for step in range(4):
                optimizer.zero_grad()
                loss = layer(data(step)).square().mean()
                (loss if scaler is None else scaler.scale(loss)).backward()
                optimizer.step() if scaler is None else (scaler.step(optimizer), scaler.update())
        ends.append((weights(layer), compression.tally.energy))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


def test_a_state_is_that_of_its_codec(net):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with compress(optimizer, "alq:bits=3") as compression:
        train(net, optimizer, 1)
        saved = compression.state_dict()
    with compress(optimizer, "alq:bits=4") as compression:
        with pytest.raises(UsageError, match="saved with codec alq:bits=3, and here it is alq:bits=4"):
            compression.load_state_dict(saved)
        assert compression.steps == 0
        compression.use_bits(3)
        compression.load_state_dict(saved)


def test_sparse_gradients_are_refused():
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    with compress(optimizer, SPEC), pytest.raises(UsageError, match="gradient of weight is sparse"):
        optimizer.step()
