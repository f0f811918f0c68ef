from __future__ import annotations

import dataclasses

import pytest

from gtrace.trace import OptimizerFacts, Trace

SGD = OptimizerFacts(kind="SGD", momentum=0.9, nesterov=True, weight_decay=5e-4, decoupled=False, planned_steps=1000)
ADAM = OptimizerFacts(kind="AdamW", betas=(0.9, 0.95), eps=1e-8, steps_seen=40, batch_size=12.0, varies=("betas",))


def trace_with(**attrs):
    return Trace.from_arrays({"w": [1.0]}, attrs=attrs)


@pytest.mark.parametrize("facts", [SGD, ADAM])
def test_what_is_described_is_read(facts):
    trace = trace_with(optimizers={"1": facts.describe()})
    assert trace.optimizer_facts(1).describe() == facts.describe()
    assert trace.optimizer_facts() == OptimizerFacts()


@pytest.mark.parametrize(
    ("attrs", "length"),
    [
        ({"status": "complete"}, 40),
        ({"status": "interrupted"}, None),
        ({"status": "complete", "cut": True}, None),
        ({"status": "interrupted", "planned": 90}, 90),
    ],
)
def test_the_length_of_the_training(attrs, length):
    facts = {"steps_seen": 40, "planned_steps": attrs.pop("planned", None)}
    assert OptimizerFacts.of({**attrs, "optimizers": {"0": facts}}).length == length


def test_the_batch_size_of_a_trace_without_an_optimizer():
    assert trace_with(batch_size=64).optimizer_facts() == OptimizerFacts(batch_size=64.0)


def test_a_tensor_of_another_group():
    own = SGD.of_tensor({"group": {"weight_decay": 0.0, "lr_ratio": 10.0, "eps": "x"}})
    assert own == dataclasses.replace(SGD, weight_decay=0.0, lr_ratio=10.0)
    assert SGD.of_tensor({}) == SGD


@pytest.mark.parametrize(
    "optimizers",
    [
        None,
        [],
        {"0": 3},
        {
            "0": {"kind": 7, "momentum": 1.5, "nesterov": 1, "weight_decay": float("nan"), "betas": [0.9, "x"]}
            | {"eps": -1, "planned_steps": True, "batch_size": 0, "varies": 3, "lr_ratio": "1", "length": 3}
        },
    ],
)
def test_what_is_not_a_fact_is_unknown(optimizers):
    assert OptimizerFacts.of({"optimizers": optimizers}) == OptimizerFacts()
