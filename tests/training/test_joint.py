"""Optimizers whose step includes the exchange, against plain twins of their published formulas."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers_training import Faulty
from torch import nn

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.schedule import RefitSchedule
from gtrace.training import Exchange, NonfiniteGradientError, train
from gtrace.training.joint import JointWorkers, LocalSteps, OneBitAdam, OuterNesterov, ZeroOneAdam
from gtrace.training.settings import JOINT_CODEC

SIGNS = JOINT_CODEC
STEPS, LR = 24, 0.01


def workers_of(make, count, codec=SIGNS):
    torch.manual_seed(0)
    options = LinkOptions(RefitSchedule.parse("once"), 3)
    return JointWorkers(nn.Linear(16, 4), count, make, CodecTable.of(codec), options)


def gradient(step, worker, shape):
    """No worker has another one's; none is zero."""
    random = torch.Generator().manual_seed(1000 * step + 10 * worker + len(shape))
    return torch.randn(shape, generator=random) + 0.3


def give(workers, step):
    """Every worker's model gets its gradients of a step."""
    for worker, model in enumerate(workers.models):
        for p in model.parameters():
            p.grad = gradient(step, worker, p.shape)


def falling(step):
    return LR / (1 + 0.1 * step)


class Signs:
    """DeepSpeed's ``compressed_allreduce``, with one chunk on the server."""

    def __init__(self, count, like):
        self.errors = [torch.zeros_like(like) for _ in range(count + 1)]

    def send(self, who, values):
        values = values + self.errors[who]
        sent = torch.linalg.norm(values) / math.sqrt(values.numel()) * values.sign()
        self.errors[who] = values - sent
        return sent

    def mean(self, values):
        mean = torch.stack([self.send(k, one) for k, one in enumerate(values)]).mean(0)
        return self.send(-1, mean)


def onebit_twin(warmup):
    def make(weight, count):
        x, m, v, signs = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight), Signs(count, weight)
        done = 0

        def follow(gradients, lr, _last):
            nonlocal x, m, v, done
            if done < warmup:
                g = torch.stack(gradients).mean(0)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            else:
                m = signs.mean([0.9 * m + 0.1 * g for g in gradients])
            done += 1
            x = x - lr * m / (v.sqrt() + 1e-8)
            return x

        return follow

    return make


def zeroone_twin(freeze, every, doubling, kappa):
    """The steps of DeepSpeed's ``ZeroOneAdam`` after the call that only makes its buffers."""

    def make(weight, count):
        common, v, signs = weight.clone(), torch.zeros_like(weight), Signs(count, weight)
        ms = [torch.zeros_like(weight) for _ in range(count)]
        us = [torch.zeros_like(weight) for _ in range(count)]
        step, interval, counter, local, locals_, rates = 0, 1, 0, 1, 0, 0.0

        def follow(gradients, lr, last):
            nonlocal common, v, ms, us, step, interval, counter, local, locals_, rates, signs
            step += 1
            if step <= freeze + 1:
                if step % interval == 0:
                    g = torch.stack(gradients).mean(0)
                    v = 0.999 * v + 0.001 * g * g
                    counter += 1
                else:
                    g = signs.mean(gradients)
                if counter == kappa:
                    counter, interval = 0, 2 * interval
                ms = [0.9 * ms[0] + 0.1 * g] * count
                common = common - lr * ms[0] / (v.sqrt() + 1e-8)
                return common
            if step == freeze + 2:
                signs = Signs(count, weight)
            ms = [0.9 * m + 0.1 * g for m, g in zip(ms, gradients, strict=True)]
            rates += lr
            us = [u - lr * m / (v.sqrt() + 1e-8) for u, m in zip(us, ms, strict=True)]
            if step % local == 0 or last:
                z = signs.mean([u * (v.sqrt() + 1e-8) for u in us])
                ms, us = [-z / rates] * count, [torch.zeros_like(weight)] * count
                common, rates = common + z / (v.sqrt() + 1e-8), 0.0
            locals_ += 1
            if locals_ == doubling:
                locals_, local = 0, min(every, 2 * local)
            return common

        return follow

    return make


def diloco_twin(every, inner):
    def make(weight, count):
        theta = nn.Parameter(weight.clone())
        outer = torch.optim.SGD([theta], lr=0.7, momentum=0.9, nesterov=True)
        own = [nn.Parameter(weight.clone()) for _ in range(count)]
        optimizers = [inner([x]) for x in own]
        done = 0

        def follow(gradients, lr, last):
            nonlocal done
            for x, optimizer, g in zip(own, optimizers, gradients, strict=True):
                x.grad = g
                optimizer.param_groups[0]["lr"] = lr
                optimizer.step()
            done += 1
            if done % every == 0 or last:
                theta.grad = torch.stack([theta.detach() - x.detach() for x in own]).mean(0)
                outer.step()
                for x in own:
                    x.data.copy_(theta.data)
            return theta.detach().clone()

        return follow

    return make


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=LR)


METHODS = {
    "onebit-adam": (lambda *a: OneBitAdam(*a, warmup=8), onebit_twin(8), SIGNS),
    "zeroone-adam": (lambda *a: ZeroOneAdam(*a, warmup=6, every=4, doubling=5), zeroone_twin(6, 4, 5, 2), SIGNS),
    "diloco": (lambda m, *a: LocalSteps(m, *a, inner=adam(m.parameters()), every=5), diloco_twin(5, adam), "none"),
}


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_each_method_is_its_published_formula(method, count, monkeypatch):
    """The workers' common weights are a twin's after each step, and in the end all workers have them."""
    monkeypatch.setattr(ZeroOneAdam, "KAPPA", 2)
    make, twin, codec = METHODS[method]
    workers, apart = workers_of(make, count, codec), []
    model = copy.deepcopy(workers.models[0])
    start = [p.detach().clone() for p in model.parameters()]
    twins = [twin(p, count) for p in start]
    for step in range(STEPS):
        give(workers, step)
        last = step == STEPS - 1
        workers.step(falling(step), last=last)
        workers.common_to(model)
        for p, follow in zip(model.parameters(), twins, strict=True):
            own = follow([gradient(step, worker, p.shape) for worker in range(count)], falling(step), last)
            apart.append(float((p.detach() - own).abs().max()))
    moved = max(float((p.detach() - q).abs().max()) for p, q in zip(model.parameters(), start, strict=True))
    assert max(apart) < 2e-5 * moved
    assert moved > LR
    states = [tuple(p.detach().numpy().tobytes() for p in model.parameters()) for model in workers.models]
    assert len(set(states)) == 1


@pytest.mark.parametrize("count", [1, 4])
def test_ef21_with_momentum_and_plain_sgd_is_ef21_sgdm(count):
    """Fatkhullin et al. 2023, Algorithm 1, with eta = 0.1 and the two largest values of eight sent."""
    exchange, x, twin = Exchange("ef21:momentum=0.9:topk:ratio=0.25", count), np.zeros(8), np.zeros(8)
    v, g = [None] * count, np.zeros((count, 8))
    for step in range(STEPS):
        gradients = [gradient(step, k, (8,)).numpy() for k in range(count)]
        for k, new in enumerate(gradients):
            v[k] = new if v[k] is None else 0.9 * v[k] + 0.1 * new
            change = v[k] - g[k]
            change[np.argsort(np.abs(change))[:6]] = 0
            g[k] += change
        twin -= LR * g.mean(0)
        x -= LR * exchange.step(step, [{"w": new} for new in gradients]).gradients["w"]
    np.testing.assert_allclose(x, twin, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["onebit-adam", "zeroone-adam"])
def test_a_weight_without_a_gradient_stays_where_it_is(method):
    workers = workers_of(METHODS[method][0], 2)
    before = workers.models[0].weight.detach().clone()
    for step in range(STEPS):
        give(workers, step)
        for model in workers.models:
            model.weight.grad[:, 3] = 0
        workers.step(LR, last=step == STEPS - 1)
    moved = (workers.models[0].weight.detach() - before).abs()
    assert moved[:, 3].max() == 0
    assert moved[:, :3].min() > 0


def test_a_weight_that_joins_within_a_round_is_exchanged_at_its_end():
    """Ranks that stepped on it alone would keep it apart."""
    outer, weights = OuterNesterov(), {name: torch.ones(2) for name in "ab"}
    outer.begin({"a": weights["a"]})
    weights["a"] -= 0.5
    outer.begin(weights)
    weights["b"] -= 0.25
    assert {name: change.tolist() for name, change in outer.change(weights).items()} == {
        "a": [0.5] * 2,
        "b": [0.25] * 2,
    }


def test_costs_are_those_of_what_travels():
    count, size = 4, 16 * 4 + 4
    workers = workers_of(lambda *a: OneBitAdam(*a, warmup=1), count)
    tallies = []
    for step in range(2):
        give(workers, step)
        tallies.append(workers.step(LR, last=False))
    # A bit a value and a float32 scale for each of two tensors, from each worker and once back.
    assert [tally.payload_bits for tally in tallies] == [32 * size * count, (size + 4 + 64) * count]
    assert [tally.down_bits for tally in tallies] == [0, size + 4 + 64]
    assert {tally.float32_bits for tally in tallies} == {32 * size * count}
    # The average was encoded twice.
    assert 0 < tallies[1].worker_variance < tallies[1].relative_variance


def test_gradients_that_are_not_finite_are_left_out():
    study = train(Faulty(lambda batch: batch == 6), [SIGNS], steps=4, workers=2, every=2)
    assert np.isfinite(study.results[1].loss)
    assert "not finite" in " ".join(study.warnings)
    with pytest.raises(NonfiniteGradientError, match=r"step 1, worker 0, 1\.weight"):
        train(Faulty(lambda batch: batch == 6), [SIGNS], steps=4, workers=2, every=2, nonfinite="error")
