"""Names of parameters, from the modules that own them."""

import copy
import gc
import pickle

import pytest
import torch
from helpers_hooks import module
from torch import nn

from gtrace.torch_hooks.naming import ModuleCollector, Names, ParameterName, name_parameters


def groups_of(*parameters):
    return [{"params": list(parameters)}]


def table_names(table, *modules):
    return [table[id(p)].name for module in modules for p in module.parameters()]


def names(groups, modules=(), scan=False, **options):
    table = name_parameters(groups, modules, scan=scan, **options)
    return [table[id(p)].name for group in groups for p in group["params"]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])


PATHS = [name for name, _ in Net().named_parameters()]


def test_names_are_paths_in_the_tree_of_the_outermost_module():
    net = Net()
    table = name_parameters(groups_of(*net.parameters()), [net.encoder, net.layers[0], net], scan=False)
    assert table_names(table, net) == PATHS
    assert table[id(net.layers[1].bias)] == ParameterName("layers.1.bias", (), "LayerNorm", "Net")
    # A part of the model is not the model, and a module inside itself is walked once.
    assert names(groups_of(*net.parameters()), [nn.Sequential(net.encoder), net]) == PATHS
    net.encoder.owner = net
    assert "encoder.weight" in names(groups_of(*net.parameters()), [net])


class DistributedDataParallel(nn.Module):
    """The name and the attribute are what counts."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class OptimizedModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


class _FabricModule(nn.Module):
    """It holds its model twice."""

    def __init__(self, forward, original):
        super().__init__()
        self._forward_module, self._original_module = forward, original


def test_wrappers_leave_no_trace_in_names():
    net = Net()
    wrapped = OptimizedModule(DistributedDataParallel(net))
    assert names(groups_of(*net.parameters()), [wrapped, net]) == PATHS
    table = name_parameters(groups_of(*net.parameters()), [_FabricModule(wrapped, net)])
    assert [(one.name, one.aliases, one.model) for one in table.values()] == [(name, (), "Net") for name in PATHS]
    # A user's own attribute of that name stays.
    holder = module(module=nn.Linear(2, 2))
    assert names(groups_of(*holder.parameters()), [holder]) == ["module.weight", "module.bias"]


def test_several_models_of_one_optimizer_are_told_apart():
    first, second, net, other = nn.Linear(2, 2), nn.Linear(2, 2), Net(), Net()
    found = names(groups_of(first.weight, second.weight, net.encoder.weight), [first, second, net])
    assert found == ["Linear.weight", "Linear_2.weight", "Net.encoder.weight"]
    # Labels are those of the models inside of wrappers.
    found = names(groups_of(net.encoder.weight, other.encoder.weight), [OptimizedModule(net), other])
    assert found == ["Net.encoder.weight", "Net_2.encoder.weight"]


def test_models_that_are_gone_keep_their_names_from_other_optimizers():
    known = Names()
    for stream, expected in ((0, "weight"), (0, "weight"), (1, "Linear_2.weight"), (2, "Linear_3.weight")):
        model = nn.Linear(2, 2)
        assert table_names(known.of(groups_of(*model.parameters()), [model], stream=stream), model)[0] == expected
        del model
        gc.collect()


def test_bare_tensors_have_the_names_that_the_optimizer_was_given_or_numbers():
    net, bare, known = Net(), nn.Parameter(torch.zeros(3)), Names()
    groups = groups_of(net.encoder.weight) + groups_of(net.encoder.bias, bare)
    assert names(groups, [net], stream=2, scan=True) == ["encoder.weight", "encoder.bias", "unnamed/opt2.g1.p1"]
    optimizers = [torch.optim.SGD([("scale", nn.Parameter(torch.zeros(3)))], lr=0.1) for _ in range(2)]
    found = [known.of(one.param_groups, [], stream=k, scan=False) for k, one in enumerate([*optimizers, optimizers[0]])]
    assert [entry.name for table in found for entry in table.values()] == ["scale", "unnamed/opt1.g0.p0", "scale"]


def test_a_copied_model_is_found_by_the_scan_also_among_modules_that_are_not_built_yet():
    original, unborn = Net(), Net.__new__(Net)
    copied = copy.deepcopy(original)
    assert names(groups_of(*copied.parameters()), [original], scan=True) == PATHS
    assert names(groups_of(*copied.parameters()), [original])[0] == "unnamed/opt0.g0.p0"
    assert not vars(unborn).get("_parameters")


@pytest.fixture
def collector():
    made = ModuleCollector()
    made.install()
    yield made
    made.remove()


def test_the_collector_sees_modules_while_they_live_copied_and_unpickled_ones_too(collector):
    net = Net()
    assert {id(net), id(net.encoder), id(net.layers)} <= {id(module) for module in collector.modules()}
    for one in (net, copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert names(groups_of(*one.parameters()), collector.modules()) == PATHS
    del net, one
    gc.collect()
    assert collector.modules() == []


def test_the_collector_takes_modules_that_cannot_be_hashed_and_stops(collector):
    class Odd(nn.Linear):
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("must not be compared")

    odd = Odd(2, 2)
    assert [module is odd for module in collector.modules()] == [True]
    before = nn.Module.__setstate__.__wrapped__
    assert nn.Module.__setstate__.__module__ == before.__module__
    collector.remove()
    assert nn.Module.__setstate__ is before
    net = Net()
    assert [module is odd for module in collector.modules()] == [True]
    assert isinstance(net, nn.Module)
