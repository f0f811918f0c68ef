"""Codecs that share something out among tensors do so wherever gradients are encoded, as in a sweep."""

import numpy as np
import pytest
import torch
from helpers_training import sender

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.fitting import allocate_sparsity
from gtrace.schedule import RefitSchedule
from gtrace.sketch import MomentSketch
from gtrace.training.exchange import Exchange, Tally
from gtrace.training.neural import LayerCodecs

MIXED = "prune:sparsity=0.8,allocation=heterogeneous"
SIZES = {"heavy": 6000, "light": 2000, "bias": 30}
SPREAD = {"heavy": 2.5, "light": 0.5, "bias": 0.2}
NAMES = tuple(SIZES)


def gradients(seed=0):
    """Tensors of unlike spread, so that equal sparsities lose much more than shares."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.choice([-1, 1], n) * rng.lognormal(0, SPREAD[name], n)).astype(np.float32)
        for name, n in SIZES.items()
    }


def shares(tensors, sparsity=0.8):
    return allocate_sparsity([MomentSketch.of(x, norm="none") for x in tensors.values()], sparsity)


def targets(senders):
    """What each tensor's sender was given, whether its codec is wrapped or not."""
    return [float(next(v for k, v in one.state.arrays.items() if k.endswith("target"))) for one in senders]


def allocated(exchange, *names, worker=0):
    return targets(exchange._links[name, worker][0] for name in names or NAMES)


@pytest.mark.parametrize("spec", [MIXED, f"ef:{MIXED}", f"rotate:{MIXED}"])
def test_each_worker_allocates_from_its_own_gradients(spec):
    workers = [gradients(1), gradients(2)]
    exchange = Exchange(spec, 2, refit="0,2")
    for step in range(3):
        exchange.step(step, workers)
        for worker, tensors in enumerate(workers):
            # Of the gradients themselves: what a codec remembers or rotates is fitted to, and not shared out by.
            assert allocated(exchange, worker=worker) == pytest.approx(list(shares(tensors)))
    assert not np.allclose(shares(workers[0]), shares(workers[1]))


def test_a_server_allocates_from_the_averages():
    workers = [gradients(1), gradients(2)]
    exchange = Exchange("none", 2, down=gtrace.codec(MIXED))
    averages = {name: (workers[0][name] + workers[1][name]) / 2 for name in NAMES}
    exchange.step(0, workers)
    assert allocated(exchange, worker=-1) == pytest.approx(list(shares(averages)), rel=1e-6)


def test_a_tensor_that_comes_late_is_allocated_with_the_others_and_tensors_of_a_table_among_themselves():
    tensors, exchange = gradients(), Exchange(MIXED, refit="once")
    exchange.step(0, [{name: tensors[name] for name in ("heavy", "light")}])
    exchange.step(1, [tensors])
    # Thresholds travel in every payload and follow every gradient, whatever the schedule; so do the shares.
    assert allocated(exchange) == pytest.approx(list(shares(tensors)))
    exchange = Exchange(CodecTable(gtrace.codec(MIXED), tensors={"light": gtrace.codec("qsgdinf:bits=3")}))
    exchange.step(0, [tensors])
    own = {name: tensors[name] for name in ("heavy", "bias")}
    assert allocated(exchange, *own) == pytest.approx(list(shares(own)))


def test_layers_share_out_by_the_gradients_themselves():
    tensors = gradients()
    layers = LayerCodecs(gtrace.codec(f"rotate:{MIXED}"), worker=0, seed=0, refit=RefitSchedule.parse("0,+2"))
    for name, values in tensors.items():
        layers.carry(name, values, 0, Tally())
    layers.settle(0, Tally())
    found = [float(layers._tensors[name].sender.state.arrays["inner.target"]) for name in NAMES]
    assert found == pytest.approx(list(shares(tensors)))
    # Until the batch is over, the next fit keeps the share.
    layers.carry("heavy", tensors["heavy"], 2, Tally())
    assert float(layers._tensors["heavy"].sender.state.arrays["inner.target"]) == found[0]


def test_a_fit_does_not_depend_on_what_was_fitted_before():
    rng = np.random.default_rng(0)
    # So much alike that a code of one serves the other: a new one saves less than it costs to send.
    first, second = rng.standard_normal((2, 2400)).astype(np.float32)
    codec = gtrace.codec("nuqsgd:bits=8")
    both, alone = sender(codec, 2400, "every"), sender(codec, 2400, "every")
    both.send(first, 0)
    assert both.send(second, 1).payload == alone.send(second, 1).payload
    # Zeros say nothing: what was fitted is there for the next gradient.
    both.send(np.zeros(2400, np.float32), 2)
    assert "lengths" in both.state.arrays


def test_several_optimizers_of_a_script_are_told_that_they_share_apart(training):
    _, said = training(MIXED)
    layers = [torch.nn.Linear(8, 8), torch.nn.Linear(8, 2)]
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    for _ in range(2):
        layers[1](layers[0](torch.ones(4, 8))).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    assert sum("each optimizer's tensors apart" in line for line in said) == 1
