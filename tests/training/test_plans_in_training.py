"""A plan in the place of a codec: studies, one's own loop, and the communication hook's state."""

import pytest
import torch

from gtrace.codecs import codec
from gtrace.codecs.assignment import CodecTable
from gtrace.errors import UsageError
from gtrace.training import State, Study, compress

SPECS = {"fc1.weight": "qsgdinf:bits=3", "fc1.bias": "none", "fc2.weight": "alq:bits=2", "gone": "none"}
TABLE = CodecTable(
    codec("qsgdinf:bits=4"), tensors={n: codec(s) for n, s in SPECS.items()}, name="mine", source="dir/p l.toml"
)


class Plan:
    """What ``gtrace.load_plan`` returns, as far as training looks at it."""

    table = TABLE


def test_a_study_trains_with_a_plan_beside_a_codec():
    study = Study("digits-mlp", ["qsgdinf:bits=4", Plan()], steps=2, workers=2, eval_every=2)
    study.run()
    runs = {result.run: result for result in study.results}
    assert list(runs) == ["none", "qsgdinf:bits=4", "plan:mine"]
    assert 0 < runs["plan:mine"].tally.bits < runs["qsgdinf:bits=4"].tally.bits
    assert runs["plan:mine"].relative_variance > 0
    assert any("1 of its 4 tensors are not in this model, gone" in text for text in study.warnings)
    assert study.describe()["plans"] == [TABLE.describe()]
    assert "qsgdinf:bits=4 --plan 'dir/p l.toml' --task digits-mlp" in study.command
    assert "--codec" not in Study("digits-mlp", [TABLE], steps=1).command


def test_what_a_plan_cannot_do_is_refused():
    with pytest.raises(UsageError, match="gradients of weights"):
        Study("digits-mlp", [TABLE], kind="neural")
    with pytest.raises(UsageError, match="names the codec of every tensor"):
        Study("digits-mlp", [TABLE], min_size=10)
    with pytest.raises(UsageError, match="named twice"):
        Study("digits-mlp", [TABLE, TABLE])


def test_loops_and_hooks_take_plans():
    model = torch.nn.Sequential()
    model.add_module("fc1", torch.nn.Linear(30, 20))
    model.add_module("other", torch.nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with compress(model, Plan()) as compression:
        model(torch.randn(8, 30)).square().mean().backward()
        exact = {name: p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
    found = dict(model.named_parameters())
    assert torch.equal(found["fc1.bias"].grad, exact["fc1.bias"])
    assert found["fc1.weight"].grad.unique().numel() <= 7
    assert 7 < found["other.weight"].grad.unique().numel() <= 15
    assert compression.tally.bits > 32 * 20
    assert State(Plan()).rules is TABLE
