"""Names of parameters, from the modules that own them."""

import torch
from helpers_hooks import module
from torch import nn

from gtrace.torch_hooks import naming
from gtrace.torch_hooks.naming import ModuleCollector, Names, TreeName


def groups_of(*parameters):
    return [{"params": list(parameters)}]


def names(groups, modules=(), scan=False, **options):
    table = Names().of(groups, modules, scan=scan, **options)
    return [table[id(p)].name for group in groups for p in group["params"]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])


PATHS = [name for name, _ in Net().named_parameters()]


def test_a_model_with_many_optimizers_is_searched_for_once(monkeypatch):
    """A search through all live objects takes some hundredths of a second."""
    net, searches = Net(), []
    search = naming._all_live_modules
    monkeypatch.setattr(naming, "_all_live_modules", lambda: searches.append(1) or search())
    known = Names()
    each = [(parameter, known.of(groups_of(parameter), [], stream=k)) for k, parameter in enumerate(net.parameters())]
    assert [found[id(parameter)].name for parameter, found in each] == PATHS
    assert len(searches) == 1
    other = Net()
    found = known.of(groups_of(other.encoder.weight), [], stream=len(each))
    assert (found[id(other.encoder.weight)].name, len(searches)) == ("Net_2.encoder.weight", 2)


def test_names_are_paths_in_the_tree_of_the_outermost_module():
    net = Net()
    table = Names().of(groups_of(*net.parameters()), [net.encoder, net.layers[0], net], scan=False)
    assert [table[id(p)].name for p in net.parameters()] == PATHS
    assert table[id(net.layers[1].bias)] == TreeName("layers.1.bias", (), "LayerNorm", "Net")
    # A part of the model is not the model, and a module inside itself is walked once.
    assert names(groups_of(*net.parameters()), [nn.Sequential(net.encoder), net]) == PATHS
    net.encoder.owner = net
    assert "encoder.weight" in names(groups_of(*net.parameters()), [net])
    # A wrapper leaves no trace, and a user's own attribute of the name that it uses stays.
    holder = module(module=nn.Linear(2, 2))
    assert names(groups_of(*holder.parameters()), [holder]) == ["module.weight", "module.bias"]


def test_several_models_of_one_optimizer_are_told_apart():
    first, second, net, other = nn.Linear(2, 2), nn.Linear(2, 2), Net(), Net()
    found = names(groups_of(first.weight, second.weight, net.encoder.weight), [first, second, net])
    assert found == ["Linear.weight", "Linear_2.weight", "Net.encoder.weight"]
    # Labels are those of the models inside of wrappers.
    found = names(groups_of(net.encoder.weight, other.encoder.weight), [nn.DataParallel(net), other])
    assert found == ["Net.encoder.weight", "Net_2.encoder.weight"]


def test_bare_tensors_have_the_names_that_the_optimizer_was_given_or_numbers():
    net, bare, known = Net(), nn.Parameter(torch.zeros(3)), Names()
    groups = groups_of(net.encoder.weight) + groups_of(net.encoder.bias, bare)
    assert names(groups, [net], stream=2, scan=True) == ["encoder.weight", "encoder.bias", "unnamed/opt2.g1.p1"]
    optimizers = [torch.optim.SGD([("scale", nn.Parameter(torch.zeros(3)))], lr=0.1) for _ in range(2)]
    found = [known.of(one.param_groups, [], stream=k, scan=False) for k, one in enumerate([*optimizers, optimizers[0]])]
    assert [entry.name for table in found for entry in table.values()] == ["scale", "unnamed/opt1.g0.p0", "scale"]


def test_the_collector_takes_modules_that_cannot_be_hashed_and_stops():
    class Odd(nn.Linear):
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("must not be compared")

    collector = ModuleCollector()
    collector.install()
    odd = Odd(2, 2)
    assert [module is odd for module in collector.modules()] == [True]
    before = nn.Module.__setstate__.__wrapped__
    assert nn.Module.__setstate__.__module__ == before.__module__
    collector.remove()
    assert nn.Module.__setstate__ is before
    net = Net()
    assert [module is odd for module in collector.modules()] == [True]
    assert isinstance(net, nn.Module)
