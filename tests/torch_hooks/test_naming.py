import copy
import gc
import pickle

import pytest
import torch
from helpers_hooks import module
from torch import nn

from gtrace.torch_hooks.naming import ModuleCollector, Names, ParameterName, name_parameters


def groups_of(*parameters, **extra):
    return [{"params": list(parameters), **extra}]


def names(groups, modules=(), **options):
    table = name_parameters(groups, modules, **options)
    return [table[id(p)].name for group in groups for p in group["params"]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4)])


def test_names_are_paths_in_the_module_tree():
    net = Net()
    table = name_parameters(groups_of(*net.parameters()), [net], scan=False)
    assert {n: table[id(p)].name for n, p in net.named_parameters()} == {n: n for n, _ in net.named_parameters()}
    assert table[id(net.layers[1].bias)] == ParameterName("layers.1.bias", (), "LayerNorm", "Net")


def test_inner_modules_are_named_through_the_outermost_one():
    net = Net()
    found = names(groups_of(*net.encoder.parameters()), [net.encoder, net.layers[0], net], scan=False)
    assert found == ["encoder.weight", "encoder.bias"]


def test_tied_weights_have_aliases():
    net = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embedding"].weight
    net["again"] = net["embedding"]
    (entry,) = name_parameters(groups_of(net["head"].weight), [net], scan=False).values()
    assert entry == ParameterName("embedding.weight", ("head.weight", "again.weight"), "Embedding", "ModuleDict")


class DistributedDataParallel(nn.Module):
    """The name and the attribute are what counts."""

    def __init__(self, module):
        super().__init__()
        self.module = module


class OptimizedModule(nn.Module):
    def __init__(self, module):
        super().__init__()
        self._orig_mod = module


def test_wrappers_leave_no_trace_in_names():
    net = Net()
    wrapped = OptimizedModule(DistributedDataParallel(net))
    expected = [name for name, _ in net.named_parameters()]
    assert names(groups_of(*net.parameters()), [wrapped, net], scan=False) == expected
    assert name_parameters(groups_of(*net.parameters()), [wrapped])[id(net.encoder.weight)].model == "Net"


def test_a_wrapper_that_holds_its_model_twice_makes_no_aliases():
    class _FabricModule(nn.Module):
        def __init__(self, forward, original):
            super().__init__()
            self._forward_module, self._original_module = forward, original

    net = Net()
    table = name_parameters(groups_of(*net.parameters()), [_FabricModule(DistributedDataParallel(net), net)])
    assert [(one.name, one.aliases) for one in table.values()] == [(name, ()) for name, _ in net.named_parameters()]


def test_several_models_of_one_optimizer_are_told_apart():
    first, second, net = nn.Linear(2, 2), nn.Linear(2, 2), Net()
    found = names(groups_of(first.weight, second.weight, net.encoder.weight), [first, second, net], scan=False)
    assert found == ["Linear.weight", "Linear_2.weight", "Net.encoder.weight"]
    # Labels are those of the models inside of wrappers.
    other = Net()
    found = names(groups_of(net.encoder.weight, other.encoder.weight), [OptimizedModule(net), other], scan=False)
    assert found == ["Net.encoder.weight", "Net_2.encoder.weight"]


def test_a_users_own_attribute_called_module_stays():
    holder = module(module=nn.Linear(2, 2))
    assert names(groups_of(*holder.parameters()), [holder], scan=False) == ["module.weight", "module.bias"]


def table_names(table, *modules):
    return [table[id(p)].name for module in modules for p in module.parameters()]


def test_a_second_model_gets_its_class_in_front_where_names_would_repeat():
    class Critic(nn.Linear):
        pass

    known = Names()
    scale = module(scale=nn.Parameter(torch.ones(2)))
    models = [nn.Linear(2, 2), Critic(2, 2), DistributedDataParallel(nn.Linear(2, 2)), scale]
    tables = [known.of(groups_of(*one.parameters()), models, stream=k, scan=False) for k, one in enumerate(models)]
    found = [name for table, one in zip(tables, models, strict=True) for name in table_names(table, one)]
    labels = ("", "Critic.", "Linear_2.")
    assert found == [*(f"{label}{part}" for label in labels for part in ("weight", "bias")), "scale"]
    again = known.of(groups_of(models[1].weight, models[0].weight), models, stream=4, scan=False)
    assert [again[id(model.weight)].name for model in models[:2]] == ["weight", "Critic.weight"]


def test_a_model_over_several_optimizers_keeps_its_names():
    known, net, other = Names(), Net(), Net()
    parts = [net.encoder, net.layers]
    found = [known.of(groups_of(*part.parameters()), [net, other], stream=k) for k, part in enumerate(parts)]
    assert [table_names(*pair) for pair in zip(found, parts, strict=True)] == [
        ["encoder.weight", "encoder.bias"],
        ["layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"],
    ]
    # The second of two models has none of the first one's names, even those that no optimizer has had yet.
    known = Names()
    known.of(groups_of(net.encoder.weight), [net, other])
    later = known.of(groups_of(*other.layers[0].parameters()), [net, other], stream=1)
    assert table_names(later, other.layers[0]) == ["Net_2.layers.0.weight", "Net_2.layers.0.bias"]
    again = known.of(groups_of(*net.parameters()), [net, other], stream=2)
    assert table_names(again, net.encoder)[0] == "encoder.weight"


def test_models_that_are_gone_keep_their_names_from_other_optimizers():
    known = Names()
    for stream, expected in ((0, "weight"), (0, "weight"), (1, "Linear_2.weight"), (2, "Linear_3.weight")):
        model = nn.Linear(2, 2)
        assert table_names(known.of(groups_of(*model.parameters()), [model], stream=stream), model)[0] == expected
        del model
        gc.collect()


def test_a_layer_that_takes_the_place_of_another_one_has_its_name():
    known, net = Names(), Net()
    known.of(groups_of(*net.parameters()), [net])
    net.encoder = nn.Linear(3, 7)
    assert table_names(known.of(groups_of(*net.parameters()), [net], stream=1), net.encoder)[0] == "encoder.weight"


def test_given_names_of_two_optimizers_are_told_apart():
    known = Names()
    optimizers = [torch.optim.SGD([("scale", nn.Parameter(torch.zeros(3)))], lr=0.1) for _ in range(2)]
    found = [known.of(one.param_groups, [], stream=k, scan=False) for k, one in enumerate([*optimizers, optimizers[0]])]
    assert [entry.name for table in found for entry in table.values()] == ["scale", "unnamed/opt1.g0.p0", "scale"]


def test_a_part_of_the_model_is_not_the_model_and_a_module_inside_itself_is_walked_once():
    net = Net()
    part = nn.Sequential(net.encoder)
    assert names(groups_of(*net.parameters()), [part, net], scan=False)[0] == "encoder.weight"
    net.encoder.owner = net
    assert "encoder.weight" in names(groups_of(*net.parameters()), [net], scan=False)


def test_bare_tensors_have_the_names_that_the_optimizer_was_given_or_numbers():
    net, bare = Net(), nn.Parameter(torch.zeros(3))
    groups = groups_of(net.encoder.weight) + groups_of(net.encoder.bias, bare)
    assert names(groups, [net], stream=2) == ["encoder.weight", "encoder.bias", "unnamed/opt2.g1.p1"]
    optimizer = torch.optim.SGD([("scale", bare), ("shift", nn.Parameter(torch.zeros(3)))], lr=0.1)
    assert names(optimizer.param_groups) == ["scale", "shift"]


def test_a_copied_model_is_found_by_the_scan():
    original = Net()
    copied = copy.deepcopy(original)
    assert names(groups_of(*copied.parameters()), [original])[0] == "encoder.weight"
    assert names(groups_of(*copied.parameters()), [original], scan=False)[0] == "unnamed/opt0.g0.p0"


def test_the_scan_survives_modules_that_are_not_built_yet():
    unborn = Net.__new__(Net)
    copied = copy.deepcopy(Net())
    assert names(groups_of(*copied.parameters()))[0] == "encoder.weight"
    assert not vars(unborn).get("_parameters")


@pytest.fixture
def collector():
    made = ModuleCollector()
    made.install()
    yield made
    made.remove()


def test_the_collector_sees_modules_while_they_live(collector):
    net = Net()
    assert {id(net), id(net.encoder), id(net.layers)} <= {id(module) for module in collector.modules()}
    assert names(groups_of(*net.parameters()), collector.modules(), scan=False)[0] == "encoder.weight"
    del net
    gc.collect()
    assert collector.modules() == []


def test_the_collector_takes_modules_that_cannot_be_hashed(collector):
    class Odd(nn.Linear):
        __hash__ = None

        def __eq__(self, other):
            raise AssertionError("must not be compared")

    odd = Odd(2, 2)
    assert [module is odd for module in collector.modules()] == [True]


def test_the_collector_sees_copies_and_unpickled_modules(collector):
    net = Net()
    twin, other = copy.deepcopy(net), pickle.loads(pickle.dumps(net))
    for one in (twin, other):
        assert names(groups_of(*one.parameters()), collector.modules(), scan=False)[0] == "encoder.weight"


def test_the_collector_stops(collector):
    before = nn.Module.__setstate__.__wrapped__
    assert nn.Module.__setstate__.__module__ == before.__module__
    collector.remove()
    assert nn.Module.__setstate__ is before
    net = Net()
    assert collector.modules() == []
    assert isinstance(net, nn.Module)
