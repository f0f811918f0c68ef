"""Local steps in programs that know nothing of them: alone, and among ranks that exchange bytes."""

import copy
import io

import pytest
import torch
from helpers_training import RANKS_PROGRAM, launched
from torch import nn

from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.training import vectors
from gtrace.training.joint import JointWorkers, LocalSteps

EVERY = 3


def simulated(codec):
    """The program's ranks in one process: the weights of each after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    options = LinkOptions(RefitSchedule.parse(DEFAULT_REFIT), 0, vectors.ENGINE)

    def make(one, *rest):
        return LocalSteps(one, *rest, inner=torch.optim.Adam(one.parameters(), lr=0.01), every=EVERY)

    workers = JointWorkers(model, 2, make, CodecTable.of(codec), options)
    randoms = [torch.Generator().manual_seed(rank) for rank in range(2)]
    for _ in range(6):
        for one, random in zip(workers.models, randoms, strict=True):
            x, y = torch.randn(8, 20, generator=random), torch.randint(0, 5, (8,), generator=random)
            one.zero_grad()
            nn.functional.cross_entropy(one(x), y).backward()
        workers.step(0.01, last=False)
        yield [[p.detach().clone() for p in one.parameters()] for one in workers.models]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_ranks_step_alone_and_exchange_what_simulated_ones_do(tmp_path):
    codec = "ef:topk:ratio=0.1"
    done, study, steps, _ = launched(tmp_path, RANKS_PROGRAM, "--codec", codec, "--every", EVERY)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("--every 3 changes the training") == 1
    ranks = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    for step, expected in enumerate(simulated(codec)):
        assert all(same(ranks[rank][step], expected[rank]) for rank in range(2)), step
        assert same(ranks[0][step], ranks[1][step]) is ((step + 1) % EVERY == 0)
    assert [record["bits"] > 0 for record in steps] == [(step + 1) % EVERY == 0 for step in range(6)]
    assert {record["bits_float32"] for record in steps} == {32 * 785}
    assert "--every 3" in study["command"]


def model_and_data():
    torch.manual_seed(1)
    return nn.Linear(50, 8), torch.randn(16, 50)


def steps(model, x, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()


def test_a_single_process_moves_as_the_published_outer_optimizer_does(training):
    model, x = model_and_data()
    twin = copy.deepcopy(model)
    outer = torch.optim.SGD(twin.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    one, lines = training("none", every=EVERY)
    steps(model, x, torch.optim.SGD(model.parameters(), lr=0.1), 7)
    summary = one.finish()
    for _ in range(2):
        inner = copy.deepcopy(twin)
        steps(inner, x, torch.optim.SGD(inner.parameters(), lr=0.1), EVERY)
        for p, q in zip(twin.parameters(), inner.parameters(), strict=True):
            p.grad = p.detach() - q.detach()
        outer.step()
    steps(twin, x, torch.optim.SGD(twin.parameters(), lr=0.1), 1)
    torch.testing.assert_close(model.weight, twin.weight, rtol=1e-5, atol=1e-7)
    assert summary.steps == 7
    assert (summary.tally.bits, summary.tally.float32_bits) == (2 * 32 * 408, 7 * 32 * 408)
    assert "changes the training" in lines[0]


def test_a_checkpoint_within_a_round_goes_on_as_if_nothing_had_happened(training):
    ends = []
    for parts in ((8,), (4, 4)):
        model, x = model_and_data()
        one, _ = training("ef:signsgd", every=EVERY)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for number, count in enumerate(parts):
            if number:
                file = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict()], file)
                one.finish()
                # Without the tool the program can read its checkpoint, too.
                weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                model, _ = model_and_data()
                torch.optim.Adam(model.parameters(), lr=0.01).load_state_dict(state)
                one, lines = training("ef:signsgd", every=EVERY)
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            steps(model, x, optimizer, count)
        one.finish()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)
    assert not any("memory" in line for line in lines)
    other, lines = training("ef:topk:ratio=0.5", every=EVERY)
    optimizer.load_state_dict(state)
    steps(model, x, optimizer, 1)
    other.finish()
    assert "saved with codec ef:signsgd, and here it is ef:topk:ratio=0.5" in " ".join(lines)


@pytest.mark.parametrize("left_out", [(0, 2), (0, 1, 2), (3, 4, 5)])
def test_a_step_that_a_scaler_leaves_out_counts(training, left_out):
    model, x = model_and_data()
    one, _ = training("none", every=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * (float("inf") if step in left_out else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert one.finish().tally.bits == 2 * 32 * 408


def test_several_encodings_are_compared_with_as_many_gradients_and_an_error_stops_the_program(training):
    model, x = model_and_data()
    one, _ = training("none", every=EVERY, workers=2)
    steps(model, x, torch.optim.SGD(model.parameters(), lr=0.1), EVERY)
    tally = one.finish().tally
    assert (tally.bits, tally.ratio) == (2 * 32 * 408, EVERY)
    training("none", every=EVERY, nonfinite="error")
    with pytest.raises(Exception, match="not finite"):
        steps(model, x, torch.optim.SGD(model.parameters(), lr=float("inf")), EVERY)
