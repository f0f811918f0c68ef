"""A codec in programs that know nothing of it."""

import runpy
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from helpers_capture import run_gtrace
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gtrace
from gtrace.cli import main
from gtrace.runlog import read_runlog
from gtrace.training.exchange import Exchange

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
    optimizer.step()
print("weights", float(sum(p.detach().double().abs().sum() for p in model.parameters())))
sys.exit(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    return tmp_path


@pytest.fixture
def run(program, capfd):
    """Runs the command in this process, in the folder of the program."""

    def call(*args, command="train"):
        with pytest.raises(SystemExit) as end:
            main([command, *args])
        out, err = capfd.readouterr()
        return SimpleNamespace(exit_code=end.value.code or 0, stdout=out, stderr=err, output=out + err)

    return call


def weights(result):
    return float(result.stdout.split("weights ")[1].split()[0])


def test_a_program_trains_through_a_codec_and_its_log_can_be_reported(run, program):
    plain = run("--codec", "none", "-o", "plain.jsonl", "train.py")
    coded = run("--codec", "qsgdinf", "--bits", "3", "train.py")
    assert plain.exit_code == coded.exit_code == 0, plain.output + coded.output
    assert "6 steps through qsgdinf:bits=3" in coded.stderr
    assert "next: gtrace report train-qsgdinf-bits3.jsonl" in coded.stderr
    assert weights(plain) != weights(coded)
    records = read_runlog(program / "train-qsgdinf-bits3.jsonl")
    steps = [record for record in records if record["type"] == "step"]
    assert [record["step"] for record in steps] == list(range(6))
    assert records[0]["tensors"] == {"0.weight": 1200, "0.bias": 40, "2.weight": 160, "2.bias": 4}
    assert all(0.01 < record["relative_variance"] < 2 for record in steps)
    assert (records[-1]["type"], records[-1]["bits"]) == ("end", sum(record["bits"] for record in steps))
    report = run("train-qsgdinf-bits3.jsonl", "--json", command="report")
    assert report.exit_code == 0, report.output


def test_without_loss_of_bits_the_program_is_the_same_to_the_bit(run, program, capfd, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py"])
    coded = run("--codec", "none", "train.py")
    with pytest.raises(SystemExit):
        runpy.run_path("train.py")
    assert weights(coded) == float(capfd.readouterr().out.split()[1])


def test_the_codec_sees_the_gradients_that_the_optimizer_would_have_used(run, program):
    """One step by hand, through an exchange of the same seed."""
    run("--codec", "alq:bits=3", "--seed", "7", "-o", "log.jsonl", "train.py")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.ReLU(), torch.nn.Linear(40, 4))
    x, y = torch.randn(64, 30), torch.randint(0, 4, (64,))
    torch.nn.functional.cross_entropy(model(x), y).backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    by_hand = Exchange(gtrace.codec("alq:bits=3"), seed=7).step(0, [gradients])
    first = read_runlog(program / "log.jsonl")[1]
    assert (first["bits"], first["relative_variance"]) == (by_hand.tally.bits, by_hand.tally.relative_variance)


def test_rules_and_small_tensors_go_their_own_way(run, program):
    run("--codec", "qsgdinf:bits=2", "--rule", "2.weight=none", "--min-size", "100", "-o", "log.jsonl", "train.py")
    records = read_runlog(program / "log.jsonl")
    assert records[0]["rules"] == [["2.weight", "none"]]
    given = "--rule 2.weight=none --min-size 100 train.py"
    assert records[0]["command"] == f"gtrace train --codec qsgdinf:bits=2 {given}"
    run("--codec", "qsgdinf:bits=2", "-o", "whole.jsonl", "train.py")
    whole = read_runlog(program / "whole.jsonl")
    # 204 values of 32 bits each are what the rule, the size and nothing else add.
    assert records[1]["bits"] > 32 * 204
    assert records[1]["bits"] > whole[1]["bits"]


def test_several_encodings_of_one_gradient_average_and_are_called_optimistic(run, program):
    run("--codec", "qsgdinf:bits=2", "-o", "one.jsonl", "train.py")
    result = run("--codec", "qsgdinf:bits=2", "--workers", "8", "-o", "eight.jsonl", "train.py")
    one, eight = (read_runlog(program / f"{name}.jsonl") for name in ("one", "eight"))
    assert "optimistic" in result.stderr
    ratio = one[1]["relative_variance"] / eight[1]["relative_variance"]
    assert 5 < ratio < 12  # independent roundings: 8 in the mean
    assert eight[1]["bits"] == pytest.approx(8 * one[1]["bits"], rel=0.05)


def test_a_failing_program_keeps_its_log_and_says_its_code(run, program):
    result = run("--codec", "qsgdinf", "train.py", "3")
    assert result.exit_code == 5
    assert "train.py failed with exit code 3" in result.stderr
    assert read_runlog(program / "train-qsgdinf-bits4.jsonl")[-1]["type"] == "end"


@pytest.mark.parametrize(
    ("args", "code", "said"),
    [
        (["--codec", "qsgdinf", "nothing.py"], 2, "no such script"),
        (["--codec", "qsgdinf", "--lr", "0.1", "train.py"], 2, "--lr is for built-in tasks; train.py has its own"),
        (["--codec", "qsgdinf", "--rule", "bias", "train.py"], 2, "write GLOB=CODEC"),
        (["--codec", "qsgdinf", "--rule", "bias=nonsense", "train.py"], 2, "nonsense"),
        (["--codec", "qsgdinf", "--rule", "bias=none"], 2, "--rule is for a SCRIPT"),
        (["--codec", "qsgdinf", "still.py"], 2, "it took no step of a torch optimizer"),
        (["--codec", "qsgdinf", "empty.py"], 2, "nothing went through the codec"),
    ],
)
def test_wrong_usage_is_said_in_one_line(run, program, args, code, said):
    (program / "still.py").write_text("import torch\n")
    (program / "empty.py").write_text("x = 1\n")
    result = run(*args)
    assert result.exit_code == code, result.output
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def linear(**options):
    torch.manual_seed(1)
    model = torch.nn.Linear(50, 8, **options)
    x = torch.randn(16, 50, dtype=options.get("dtype", torch.float32))
    return model, x


def train(model, x, steps=1):
    """Steps of plain SGD on the squares of the outputs."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(x).abs().square().mean().backward()
        optimizer.step()


def test_every_evaluation_of_a_closure_is_compressed(training):
    model, x = linear()
    one, _ = training()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    exact, used = [], []

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        exact.append(model.weight.grad.clone())
        return loss

    original = optimizer._gather_flat_grad
    optimizer._gather_flat_grad = lambda: used.append(model.weight.grad.clone()) or original()
    optimizer.step(closure)
    summary = one.finish()
    assert summary.steps == 1
    assert len(exact) >= 3
    assert summary.tally.float32_bits == 32 * 408 * len(exact)
    assert not any(torch.equal(a, b) for a in exact for b in used)


def test_optimizers_inside_the_backward_pass_make_one_step(training):
    model, x = linear()
    one, _ = training()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter, optimizer in optimizers.items():

        def hook(p, optimizer=optimizer):
            optimizer.step()
            optimizer.zero_grad()

        parameter.register_post_accumulate_grad_hook(hook)
    for _ in range(3):
        model(x).square().mean().backward()
    summary = one.finish()
    assert summary.steps == 3
    assert summary.tally.float32_bits == 3 * 32 * 408


def test_two_models_with_equal_names_keep_states_of_their_own(training):
    one, _ = training("ef:topk:ratio=0.1")
    models = [linear() for _ in range(2)]
    for model in models:
        train(*model)
    summary = one.finish()
    assert (summary.optimizers, summary.elements) == (2, 2 * 408)
    assert set(one._sizes) == {"weight", "bias", "Linear_2.weight", "Linear_2.bias"}


def test_models_that_come_and_go_never_share_a_state(training):
    """A later parameter may lie where one that is gone lay, and have another size."""
    one, _ = training("ef:topk:ratio=0.1")
    for width in (8, 9, 10, 11):
        train(torch.nn.Linear(50, width), torch.randn(4, 50))
    summary = one.finish()
    assert (summary.steps, summary.elements) == (4, 51 * (8 + 9 + 10 + 11))


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


def test_an_error_of_the_hooks_becomes_a_warning_and_training_goes_on(training, monkeypatch):
    one, lines = training()
    monkeypatch.setattr(one, "_flush", lambda: 1 / 0)
    train(*linear(), steps=2)
    monkeypatch.undo()
    assert lines[0].startswith("gtrace: warning: ZeroDivisionError")


def test_complex_and_double_gradients_keep_their_types(training):
    for dtype in (torch.complex64, torch.float64, torch.bfloat16):
        model, x = linear(dtype=dtype)
        one, _ = training("qsgdinf:bits=6")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(x.to(dtype)).abs().square().mean().backward()
        exact = model.weight.grad.clone()
        optimizer.step()
        one.finish()
        decoded = model.weight.grad
        assert decoded.dtype == dtype
        error = float((decoded - exact).abs().square().sum() / exact.abs().square().sum())
        assert 0 < error < 0.1


def test_a_log_that_cannot_be_written_does_not_stop_training(training, tmp_path):
    one, lines = training(log=str(tmp_path / "no" / "log.jsonl"))
    train(*linear(), steps=2)
    summary = one.finish()
    assert (summary.steps, summary.log, len(lines)) == (2, None, 1)
    assert "training goes on without a run log" in lines[0]


def test_nothing_is_left_behind(training):
    before = dict(vars(DistributedDataParallel)), len(_global_optimizer_pre_hooks), torch.autograd.backward
    one, _ = training()
    assert len(_global_optimizer_pre_hooks) > before[1]
    one.finish()
    assert (dict(vars(DistributedDataParallel)), len(_global_optimizer_pre_hooks), torch.autograd.backward) == before


RANKS_PROGRAM = """
import os, signal, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

def main(rank, world, folder, dies=False):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 5))
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(rank)
    for step in range(6):
        if dies and rank == 1 and step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = torch.randn(8, 20, generator=random), torch.randint(0, 5, (8,), generator=random)
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(x), y).backward()
        optimizer.step()
    weights = [None] * world
    dist.all_gather_object(weights, [p.tolist() for p in model.parameters()])
    assert all(one == weights[0] for one in weights)
    dist.destroy_process_group()

if __name__ == "__main__":
    if len(sys.argv) > 2:
        main(int(sys.argv[2]), 2, sys.argv[1], dies=True)
    else:
        import torch.multiprocessing as mp
        mp.spawn(main, args=(2, sys.argv[1]), nprocs=2)
"""
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


@pytest.mark.framework_case("DistributedDataParallel in an unmodified script: gtrace train")
@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_a_program_starts_exchange_payloads(tmp_path, dies):
    words = ["train", "--codec", "ef:topk:ratio=0.1", "--compare-every", "3", "-o", "log.jsonl"]
    (tmp_path / "train.py").write_text(RANKS_PROGRAM)
    (tmp_path / "launch.py").write_text(LAUNCH)
    started = time.monotonic()
    done = run_gtrace(*words, "launch.py" if dies else "train.py", tmp_path, cwd=tmp_path)
    records = read_runlog(tmp_path / "log.jsonl")
    steps = [record for record in records if record["type"] == "step"]
    assert records[0]["world_size"] == 2
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
    (tmp_path / "train.py").write_text(program)
    words = ["train", "--codec", "ef:topk:ratio=0.1", "--every", every] if every > 1 else ["train", "--codec", "none"]
    done = run_gtrace(*words, "-o", "log.jsonl", "train.py", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study, *records = read_runlog(tmp_path / "log.jsonl")
    steps = [record for record in records if record["type"] == "step"]
    assert study["world_size"] == 2
    assert len(steps) == 6
    assert sum(record["wire_bytes"] > 0 for record in steps) == 6 // every
    assert records[-1]["type"] == "end"


@pytest.mark.framework_case("fully_shard in an unmodified script: gtrace train")
def test_ranks_of_a_sharded_model_exchange_payloads(tmp_path):
    (tmp_path / "train.py").write_text(SHARDED)
    words = ["train", "--codec", "ef:topk:ratio=0.1", "--compare-every", "3", "-o", "log.jsonl"]
    done = run_gtrace(*words, "train.py", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr
    assert "6 steps through ef:topk:ratio=0.1 in a launched process, the first of 2 ranks" in done.stderr
    study, *records = read_runlog(tmp_path / "log.jsonl")
    steps = [record for record in records if record["type"] == "step"]
    assert study["tensors"] == {"0.weight": 600, "0.bias": 30, "2.weight": 150, "2.bias": 5}
    assert len(steps) == 6
    assert not (tmp_path / "log-2.jsonl").exists()  # the other rank's
    assert all(record["bits"] < 0.2 * record["bits_float32"] == 0.2 * 32 * 785 for record in steps)
    # Half of the chunks stay where they are.
    assert all(0 < record["wire_bytes"] < 2 * 785 for record in steps)
    assert steps[3]["bf16_variance"] < 1e-4 < steps[3]["relative_variance"]
