"""A codec in programs that know nothing of it, at every step or around local steps."""

import copy
import io
import runpy
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers_training import RANKS_PROGRAM, launched, logged
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gtrace
from gtrace.cli import main
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import LinkOptions
from gtrace.runlog import read_runlog
from gtrace.schedule import DEFAULT_REFIT, RefitSchedule
from gtrace.training import vectors
from gtrace.training.exchange import Exchange
from gtrace.training.joint import JointWorkers, LocalSteps

PROGRAM = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x, y = torch.randn(64, 30), torch.randint(0, 4, (64,))
for step in range(6):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    if step == 0:
        first = {name: p.grad.numpy().copy() for name, p in model.named_parameters()}
    optimizer.step()
print("weights", float(sum(p.detach().double().abs().sum() for p in model.parameters())))
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, in the folder of the program."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)

    def call(*args, command="train"):
        with pytest.raises(SystemExit) as end:
            main([command, *args])
        out, err = capfd.readouterr()
        return SimpleNamespace(exit_code=end.value.code or 0, stdout=out, stderr=err, output=out + err)

    return call


def weights(result):
    return float(result.stdout.split("weights ")[1].split()[0])


def test_a_program_trains_through_a_codec_and_its_log_can_be_reported(run, tmp_path):
    plain = run("--codec", "none", "-o", "plain.jsonl", "train.py")
    coded = run("--codec", "qsgdinf", "--bits", "3", "train.py")
    assert plain.exit_code == coded.exit_code == 0, plain.output + coded.output
    assert "6 steps through qsgdinf:bits=3" in coded.stderr
    assert "next: gtrace report train-qsgdinf-bits3.jsonl" in coded.stderr
    assert weights(plain) != weights(coded)
    study, steps, end = logged(tmp_path, "train-qsgdinf-bits3.jsonl")
    assert [record["step"] for record in steps] == list(range(6))
    assert study["tensors"] == {"0.weight": 1200, "0.bias": 40, "2.weight": 160, "2.bias": 4}
    assert all(0.01 < record["relative_variance"] < 2 for record in steps)
    assert (end["type"], end["bits"]) == ("end", sum(record["bits"] for record in steps))
    report = run("train-qsgdinf-bits3.jsonl", "--json", command="report")
    assert report.exit_code == 0, report.output


def test_without_loss_of_bits_the_program_is_the_same_to_the_bit_and_else_its_gradients_go_through_the_codec(
    run, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    coded = run("--codec", "none", "train.py")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "exit", int)
        gradients = runpy.run_path("train.py")["first"]
    assert weights(coded) == float(capfd.readouterr().out.split()[1])
    run("--codec", "alq:bits=3", "--seed", "7", "-o", "log.jsonl", "train.py")
    tally = Exchange(gtrace.codec("alq:bits=3"), seed=7).step(0, [gradients]).tally
    first = logged(tmp_path)[1][0]
    assert (first["bits"], first["relative_variance"]) == (tally.bits, tally.relative_variance)


def test_rules_and_small_tensors_go_their_own_way_and_several_encodings_average(run, tmp_path):
    given = ("--rule", "2.weight=none", "--min-size", "100")
    run("--codec", "qsgdinf:bits=2", *given, "-o", "rules.jsonl", "train.py")
    run("--codec", "qsgdinf:bits=2", "-o", "one.jsonl", "train.py")
    result = run("--codec", "qsgdinf:bits=2", "--workers", "8", "-o", "eight.jsonl", "train.py")
    assert "optimistic" in result.stderr
    (study, (ruled, *_), _), (_, (one, *_), _), (_, (eight, *_), _) = (
        logged(tmp_path, f"{name}.jsonl") for name in ("rules", "one", "eight")
    )
    assert study["rules"] == [["2.weight", "none"]]
    assert study["command"] == f"gtrace train --codec qsgdinf:bits=2 {' '.join(given)} train.py"
    # 204 values of 32 bits each are what the rule, the size and nothing else add.
    assert ruled["bits"] > max(32 * 204, one["bits"])
    assert 5 < one["relative_variance"] / eight["relative_variance"] < 12  # independent roundings: 8 in the mean
    assert eight["bits"] == pytest.approx(8 * one["bits"], rel=0.05)


def test_a_failing_program_keeps_its_log_and_says_its_code(run, tmp_path):
    result = run("--codec", "qsgdinf", "train.py", "3")
    assert result.exit_code == 5
    assert "train.py failed with exit code 3" in result.stderr
    assert logged(tmp_path, "train-qsgdinf-bits4.jsonl")[2]["type"] == "end"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing.py"], "no such script"),
        (["--rule", "bias", "train.py"], "write GLOB=CODEC"),
        (["--exchange", "tree", "train.py"], "exchange: 'tree' is unknown; known: allgather"),
        (["--rule", "bias=none"], "--rule is for a SCRIPT"),
        (["still.py"], "it took no step of a torch optimizer"),
        (["byhand.py"], "it took no step of a torch optimizer"),
        (["empty.py"], "nothing went through the codec"),
    ],
)
def test_wrong_usage_is_said_in_one_line(run, tmp_path, args, said):
    (tmp_path / "still.py").write_text("import torch\n")
    (tmp_path / "empty.py").write_text("x = 1\n")
    by_hand = PROGRAM.replace("optimizer.zero_grad()", "model.zero_grad()").replace("optimizer = ", "#")
    by_hand = by_hand.replace("optimizer.step()", "[p.data.sub_(p.grad) for p in model.parameters()]")
    (tmp_path / "byhand.py").write_text(by_hand)
    result = run("--codec", "qsgdinf", *args)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr


NONE_DENSE = """
import torch
table = torch.nn.Embedding(5, 2, sparse=True)
optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
for step in range(2):
    table(torch.tensor([1])).sum().backward()
    optimizer.step()
"""


def test_a_program_without_a_gradient_for_the_codec_has_no_numbers(run, tmp_path):
    (tmp_path / "sparse.py").write_text(NONE_DENSE)
    result = run("--codec", "qsgdinf", "sparse.py")
    assert "nan" not in result.stderr
    assert "nothing went through qsgdinf:bits=4: no gradient of 2 steps was dense and finite" in result.stderr


def test_gradients_that_are_not_finite_are_counted_in_one_line_and_the_report_says_that_it_diverged(run, tmp_path):
    (tmp_path / "blows.py").write_text(PROGRAM.replace("lr=0.05", "lr=1e30").replace("range(6)", "range(20)"))
    result = run("--codec", "none", "blows.py")
    assert result.stderr.count("warning: ") == 3
    _, steps, end = logged(tmp_path, "blows-none.jsonl")
    bad = [record["nonfinite"] for record in steps]
    said = f"{sum(bad)} gradient values in 4 tensors were not finite, at {sum(map(bool, bad))} steps"
    assert f"gtrace: {said}\n" in result.stderr
    assert end["diverged"]
    records = read_runlog(tmp_path / "blows-none.jsonl")
    assert [record["text"] for record in records if record["type"] == "warning"][3:] == [said]
    last = max(record["step"] for record in steps if record["loss"] is not None)
    shown = run("blows-none.jsonl", command="report")
    assert f"Trained with none on 1 worker: diverged: no finite loss after step {last}" in " ".join(
        shown.stdout.split()
    )


def linear(**options):
    torch.manual_seed(1)
    model = torch.nn.Linear(50, 8, **options)
    return model, torch.randn(16, 50, dtype=options.get("dtype", torch.float32))


def train(model, x, steps=1, optimizer=None):
    """Steps on the squares of the outputs, by default of plain SGD."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).abs().square().mean().backward()
        optimizer.step()


def test_models_with_equal_names_and_models_that_come_and_go_have_states_of_their_own(training):
    """A later parameter may lie where one that is gone lay, and have another size."""
    one, _ = training("ef:topk:ratio=0.1")
    models = [linear() for _ in range(2)]
    for model in models:
        train(*model)
    assert set(one.sizes) == {"weight", "bias", "Linear_2.weight", "Linear_2.bias"}
    for width in (8, 9, 10, 11):
        train(torch.nn.Linear(50, width), torch.randn(4, 50))
    summary = one.finish()
    assert (summary.steps, summary.optimizers) == (6, 6)
    assert sum(one.sizes.values()) == 2 * 408 + 51 * (8 + 9 + 10 + 11)


@pytest.mark.parametrize("every", [None, 2])
def test_a_program_may_swap_parameters_and_have_one_in_a_group_twice(training, every):
    """torch refuses to swap tensors with weak references, and warns of a parameter that is in a group twice."""
    one, lines = training("qsgdinf:bits=3", every=every)
    model, x = linear()
    with pytest.warns(UserWarning, match="duplicate parameters"):
        optimizer = torch.optim.SGD([*model.parameters(), model.bias], lr=0.1)
    train(model, x, 1, optimizer)
    torch.utils.swap_tensors(model.weight, torch.nn.Parameter(torch.ones_like(model.weight)))
    train(model, x, 2, optimizer)
    assert one.sizes == {"weight": 400, "bias": 8}
    assert one.finish().tally.float32_bits == 3 * 32 * 408
    assert not any("warning" in line for line in lines)


def test_a_gradient_scaler_still_skips_what_is_not_finite(training):
    model, x = linear()
    one, _ = training()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model.weight.detach().clone()
    scaler.scale(model(x).square().mean() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
    assert one.finish().steps == 0


def test_sparse_gradients_go_uncompressed_with_one_warning(training):
    embedding = torch.nn.Embedding(20, 4, sparse=True)
    one, lines = training()
    optimizer = torch.optim.SGD(embedding.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        embedding(torch.tensor([1, 2])).sum().backward()
        exact = embedding.weight.grad.clone()
        optimizer.step()
        assert torch.equal(embedding.weight.grad.to_dense(), exact.to_dense())
    one.finish()
    assert [line for line in lines if "sparse" in line] == lines[:1]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float64, torch.bfloat16])
def test_complex_and_double_gradients_keep_their_types(training, dtype):
    model, x = linear(dtype=dtype)
    training("qsgdinf:bits=6")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model(x).abs().square().mean().backward()
    exact = model.weight.grad.clone()
    optimizer.step()
    decoded = model.weight.grad
    assert decoded.dtype == dtype
    assert 0 < float((decoded - exact).abs().square().sum() / exact.abs().square().sum()) < 0.1


def test_values_of_a_gradient_may_lie_in_one_place(training):
    training("qsgdinf:bits=2")
    weight = torch.nn.Parameter(torch.zeros(3, 4))
    weight.grad = torch.linspace(-1, 1, 4).expand(3, 4)
    torch.optim.SGD([weight], lr=1.0).step()
    assert torch.equal(weight, -weight.grad)
    assert not torch.equal(weight[0], weight[1])


def test_training_goes_on_after_an_error_of_the_hooks_and_without_a_log(training, tmp_path, monkeypatch):
    one, lines = training()
    monkeypatch.setattr(one, "_flush", lambda: 1 / 0)
    train(*linear(), steps=2)
    monkeypatch.undo()
    assert lines[0].startswith("gtrace: warning: ZeroDivisionError")
    one.finish()
    one, lines = training(log=str(tmp_path / "no" / "log.jsonl"))
    train(*linear(), steps=2)
    summary = one.finish()
    assert (summary.steps, summary.log, len(lines)) == (2, None, 1)
    assert "training goes on without a run log" in lines[0]


@pytest.mark.parametrize("every", [None, 2])
def test_nothing_is_left_behind(training, every):
    def patched():
        return [
            *(dict(vars(DistributedDataParallel)), len(_global_optimizer_pre_hooks), torch.autograd.backward),
            *(torch.optim.Optimizer.state_dict, torch.optim.Optimizer.load_state_dict),
        ]

    before = patched()
    one, _ = training("none", every=every)
    changed = [now is not then and now != then for now, then in zip(patched(), before, strict=True)]
    assert changed[:2] == [True, True]
    assert changed[3:] == [every is not None] * 2
    one.finish()
    assert patched() == before


SHARDED = (
    RANKS_PROGRAM.replace("nn.parallel import DistributedDataParallel", "distributed.fsdp import fully_shard")
    .replace("wrapped = DistributedDataParallel(model)", "fully_shard(model[0])\n    wrapped = fully_shard(model)")
    .replace("    wrapped.register_comm_hook(None, bf16_compress_hook)\n", "")
    .replace("p.tolist()", "p.full_tensor().tolist()")
)
START = "mp.spawn(main, args=(2, sys.argv[1]), nprocs=2)"
FORKED = RANKS_PROGRAM.replace(START, 'mp.start_processes(main, args=(2, sys.argv[1]), nprocs=2, start_method="fork")')
#: the program is rank 0 itself, and forks rank 1
FORK = 'mp.get_context("fork").Process(target=main, args=(1, 2, sys.argv[1])).start()'
BESIDE = RANKS_PROGRAM.replace(START, f"{FORK}; main(0, 2, sys.argv[1])")
LAUNCH = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "train.py", sys.argv[1], rank]) for rank in "01"]
sys.exit(max(rank.wait() != 0 for rank in ranks))
"""
SPARSE = ("--codec", "ef:topk:ratio=0.1")


@pytest.mark.framework_case("DistributedDataParallel in an unmodified script: gtrace train")
@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_a_program_starts_exchange_payloads(tmp_path, dies):
    started = time.monotonic()
    (tmp_path / "launch.py").write_text(LAUNCH)
    start = "launch.py" if dies else "train.py"
    done, study, steps, _ = launched(tmp_path, RANKS_PROGRAM, *SPARSE, "--compare-every", "3", start=start)
    assert study["world_size"] == 2
    assert [record["step"] for record in steps] == list(range(len(steps)))
    assert all(record["bits"] < 0.2 * record["bits_float32"] for record in steps)
    assert all(0 < record["wire_bytes"] < 4 * 785 for record in steps)
    assert steps[0]["bf16_variance"] < 1e-4 < steps[0]["relative_variance"]
    assert done.stderr.count("own communication hook bf16_compress_hook is left out") == 2  # once on each rank
    if dies:
        assert done.returncode == 5, done.stderr
        assert 3 <= len(steps) <= 5
        # Far below the half hour after which a process group gives up waiting.
        assert time.monotonic() - started < 200
    else:
        assert done.returncode == 0, done.stderr
        assert len(steps) == 6
        assert "6 steps through ef:topk:ratio=0.1 in a launched process, the first of 2 ranks" in done.stderr


@pytest.mark.parametrize(("program", "every"), [(FORKED, 1), (BESIDE, 2)])
def test_forked_ranks_exchange_payloads(tmp_path, program, every):
    words = [*SPARSE, "--every", every] if every > 1 else ["--codec", "none"]
    done, study, steps, end = launched(tmp_path, program, *words)
    assert done.returncode == 0, done.stderr
    assert study["world_size"] == 2
    assert len(steps) == 6
    assert sum(record["wire_bytes"] > 0 for record in steps) == 6 // every
    assert end["type"] == "end"


@pytest.mark.framework_case("fully_shard in an unmodified script: gtrace train")
def test_ranks_of_a_sharded_model_exchange_payloads(tmp_path):
    done, study, steps, _ = launched(tmp_path, SHARDED, *SPARSE, "--compare-every", "3")
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert "6 steps through ef:topk:ratio=0.1 in a launched process, the first of 2 ranks" in done.stderr
    assert study["tensors"] == {"0.weight": 600, "0.bias": 30, "2.weight": 150, "2.bias": 5}
    assert len(steps) == 6
    assert not (tmp_path / "log-2.jsonl").exists()  # the other rank's
    assert all(record["bits"] < 0.2 * record["bits_float32"] == 0.2 * 32 * 785 for record in steps)
    # Half of the chunks stay where they are.
    assert all(0 < record["wire_bytes"] < 2 * 785 for record in steps)
    assert steps[3]["bf16_variance"] < 1e-4 < steps[3]["relative_variance"]


EVERY = 3


def simulated(codec):
    """The program's ranks in one process: the weights of each after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    options = LinkOptions(RefitSchedule.parse(DEFAULT_REFIT), 0, vectors.engine)

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


def test_rounds_take_up_parameters_that_are_added_and_leave_those_that_are_gone(training):
    """A layer that is unfrozen later, also in a checkpoint within a round; and a parameter that gets another shape."""
    ends = []
    for interrupted in (False, True):
        one, _ = training("qsgdinf:bits=8", every=EVERY)
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(50, 8), nn.Linear(8, 4)), torch.randn(16, 50)
        optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
        train(model, x, 2, optimizer)
        optimizer.add_param_group({"params": list(model[0].parameters())})
        train(model, x, 6, optimizer)
        if interrupted:
            state = copy.deepcopy(optimizer.state_dict())
            one.finish()
            one, lines = training("qsgdinf:bits=8", every=EVERY)
            optimizer = torch.optim.SGD([{"params": list(model[k].parameters())} for k in (1, 0)], lr=0.1)
            optimizer.load_state_dict(state)
        train(model, x, 5, optimizer)
        ends.append(model[0].weight.detach().clone())
        for parameter in model[1].parameters():
            parameter.data, parameter.grad = torch.ones(5, *parameter.shape[1:]), None
        train(model, x, 2, optimizer)
        assert one.finish().steps == (7 if interrupted else 15)
        assert one.sizes["opt0/1.weight"] == 40
    assert torch.equal(*ends)
    assert not any("memory" in line for line in lines)


def test_a_checkpoint_within_a_round_goes_on_as_if_nothing_had_happened(training):
    ends = []
    for parts in ((8,), (4, 4)):
        model, x = linear()
        one, _ = training("ef:signsgd", every=EVERY)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for number, count in enumerate(parts):
            if number:
                file = io.BytesIO()
                torch.save([model.state_dict(), optimizer.state_dict()], file)
                one.finish()
                # Without the tool the program can read its checkpoint, too.
                weights, state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
                model, _ = linear()
                torch.optim.Adam(model.parameters(), lr=0.01).load_state_dict(state)
                one, lines = training("ef:signsgd", every=EVERY)
                optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            train(model, x, count, optimizer)
        one.finish()
        ends.append(model.weight.detach().clone())
    assert torch.equal(*ends)
    assert not any("memory" in line for line in lines)
    other, lines = training("ef:topk:ratio=0.5", every=EVERY)
    optimizer.load_state_dict(state)
    train(model, x, 1, optimizer)
    other.finish()
    assert "saved with codec ef:signsgd, and here it is ef:topk:ratio=0.5" in " ".join(lines)


@pytest.mark.parametrize("frozen", ["before", "after"])
def test_a_program_that_freezes_or_thaws_a_layer_after_a_checkpoint_goes_on_as_if_it_had_not_stopped(training, frozen):
    ends = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(50, 8), nn.Linear(8, 4)), torch.randn(16, 50)
        one, _ = training("ef:signsgd", every=EVERY)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].requires_grad_(frozen == "after")
        train(model, x, EVERY + (frozen == "before"), optimizer)
        if interrupted:
            state = copy.deepcopy(optimizer.state_dict())
            one.finish()
            one, lines = training("ef:signsgd", every=EVERY)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.load_state_dict(state)
        model[0].requires_grad_(frozen == "before")
        before = model[0].weight.detach().clone()
        train(model, x, 2 * EVERY, optimizer)
        assert torch.equal(before, model[0].weight) == (frozen == "after")
        one.finish()
        ends.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *ends))
    assert not any("memory" in line for line in lines)


def test_a_checkpoint_of_other_parameters_starts_again_and_says_so(training):
    model, x = linear()
    one, _ = training(every=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, x, EVERY, optimizer)
    state = copy.deepcopy(optimizer.state_dict())
    one.finish()
    state["gtrace_outer"]["names"] = ["other"]
    one, lines = training(every=EVERY)
    optimizer.load_state_dict(state)
    train(model, x, EVERY, optimizer)
    one.finish()
    assert "saved with other parameters, e.g. other, and the outer momentum starts empty" in " ".join(lines)


def test_optimizers_inside_the_backward_pass_make_one_step(training):
    model, x = linear()
    one, _ = training()
    for parameter in model.parameters():

        def hook(p, optimizer=torch.optim.SGD([parameter], lr=0.1)):  # noqa: B008
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        model(x).square().mean().backward()
    summary = one.finish()
    assert (summary.steps, summary.tally.float32_bits) == (3, 3 * 32 * 408)


@pytest.mark.parametrize("left_out", [(0, 2), (0, 1, 2), (3, 4, 5)])
def test_a_step_that_a_scaler_leaves_out_counts(training, left_out):
    model, x = linear()
    one, _ = training("none", every=EVERY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(6):
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean() * (float("inf") if step in left_out else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert one.finish().tally.bits == 2 * 32 * 408
