"""What capture says about the time of steps, of which it takes none."""

import sys
import time

import numpy as np
import pytest
import torch
from helpers_capture import Captured
from torch import nn

from gtrace.capture.options import every_step
from gtrace.costs import parse_cluster
from gtrace.torch_hooks.times import StepClock
from gtrace.trace.facts import StepTimes

FORWARD, BACKWARD, AFTER = 0.004, 0.006, 0.002


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(_, gradient):
        time.sleep(BACKWARD)
        return gradient


def train(steps, groups=nn.Module.parameters):
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(groups(model), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(steps):
        optimizer.zero_grad()
        Slow.apply(model(torch.randn(4, 3))).square().sum().backward()
        time.sleep(AFTER)
        optimizer.step()
        scheduler.step()


@pytest.mark.capture_case("times of steps and backward passes")
@pytest.mark.parametrize(("every", "recorded"), [(5, False), (1, True)])
def test_times_of_steps(every, recorded, path):
    with Captured(path, policy=every_step(every)) as run:
        train(12)
    times = StepTimes.of(run.trace.attrs)
    # Sleeping takes at least as long; how much longer depends on the machine.
    assert times.backward >= BACKWARD
    assert times.after_backward >= AFTER
    assert times.step >= FORWARD + BACKWARD + AFTER
    assert times.step >= times.backward + times.after_backward + 0.9 * FORWARD
    assert (times.recorded, times.steps) == (recorded, 10 if recorded else 8)
    cluster, said = times.applied(parse_cluster("8x25Gbit/s"))
    assert (cluster.step_time, cluster.backward_time) == (times.step, times.backward)
    assert "measured during capture" in said


@pytest.mark.capture_case("learning rate and momentum of each parameter group")
def test_rates_of_groups(path):
    def groups(model):
        return [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.4, "momentum": 0.5}]

    with Captured(path) as run:
        train(3, groups)
    for name, lr, momentum in (("weight", 0.1, 0.9), ("bias", 0.4, 0.5)):
        numbers = run.trace.statistics(name)
        assert numbers["group_lr"].tolist() == pytest.approx([lr, lr / 2, lr / 4])
        assert np.all(numbers["group_momentum"] == momentum)


def test_what_capture_itself_takes_does_not_count():
    taken = [0.0]
    clock = StepClock(lambda: taken[0])
    for step in range(6):
        time.sleep(0.01)
        taken[0] += 0.01
        clock.step(step, recorded=False, models=list)
    assert clock.describe()["step"] < 0.009


class _Event:
    """An event of a GPU that is always one step behind."""

    now, last = 0.0, None

    def __init__(self, enable_timing):
        assert enable_timing
        self.device = "cuda:0"

    def record(self):
        self.at, _Event.last = _Event.now, self

    def query(self):
        return self is not _Event.last

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", _Event)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_is_not_waited_for():
    clock = StepClock(float)
    for step in range(8):
        _Event.now += 0.5
        clock.backward_begins()
        _Event.now += 0.25
        clock.backward_ends()
        _Event.now += 0.125
        clock.step(step, recorded=False, models=list)
    found = {"step": 0.875, "steps": 5, "recorded": False}
    assert clock.describe() == {**found, "backward": 0.25, "after_backward": 0.125}


class Sharding:
    """A module that calls collectives through its name ``dist``, as those of torch do that shard models."""

    def __init__(self, **results):
        self.dist, self.results = self, results

    def __getattr__(self, name):
        return lambda _: self.results.get(name)


EXCHANGE = ["all_gather_into_tensor", "reduce_scatter_single", "all_reduce", "get_rank"]


@pytest.mark.parametrize(
    ("names", "result", "known"),
    [
        (EXCHANGE, {}, True),
        (["reduce_scatter_tensor"], {}, False),  # the gathering is the program's own
        (["all_gather"], {}, False),
        (EXCHANGE, {"all_reduce": "a handle to wait for it"}, False),
        (2000 * EXCHANGE, {}, False),
    ],
)
def test_collectives_have_a_time_if_all_of_them_are_known(names, result, known, monkeypatch):
    sharding, clock = Sharding(**result), StepClock(float)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp._runtime_utils", sharding)
    for step in range(8):
        for name in names:
            getattr(sharding.dist, name)(torch.empty(0))
        clock.step(step, recorded=False, models=list)
    assert ("step" in clock.describe(), "communication" in clock.describe()) == (True, known)


def test_times_in_a_cluster():
    """Waiting within the backward pass is not computing: 20 ms of the 30 ms."""
    cluster = parse_cluster("8x25Gbit/s")
    known = {"step": 0.1, "backward": 0.07, "communication": 0.03, "ranks": 2}
    found, said = StepTimes(**known, exposed=0.03, outside_backward=0.01).applied(cluster)
    assert (found.step_time, found.backward_time) == (pytest.approx(0.07), pytest.approx(0.05))
    assert "all-gather and reduce-scatter 30 ms, for which training waits" in said
    found, said = StepTimes(**known, exposed=0.02).applied(cluster)
    assert (found.step_time, found.backward_time) == (pytest.approx(0.08), pytest.approx(0.05))
    assert "20 ms of it after the backward pass" in said
    own = parse_cluster("8x25Gbit/s,180ms")
    assert StepTimes(step=0.1).applied(own) == (own, ""), "the user's own time counts"


@pytest.mark.parametrize("found", [None, [], {"step": -1}, {"step": "1"}, {"step": True}, {"step": float("nan")}])
def test_wrong_times_count_as_unknown(found):
    times = StepTimes.of({"times": found, "world_size": "2"})
    assert (times.step, times.ranks, str(times)) == (None, 1, "")
    cluster = parse_cluster("8x25Gbit/s")
    assert times.applied(cluster) == (cluster, "")
