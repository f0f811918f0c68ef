"""A program of several ranks, which nobody prepared, under ``gtrace train``: to its end, and with a rank that dies."""

import time

import pytest
from helpers_capture import run_gtrace

from gtrace.runlog import read_runlog

PROGRAM = """
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
    PROGRAM.replace("nn.parallel import DistributedDataParallel", "distributed.fsdp import fully_shard")
    .replace("wrapped = DistributedDataParallel(model)", "fully_shard(model[0])\n    wrapped = fully_shard(model)")
    .replace("    wrapped.register_comm_hook(None, bf16_compress_hook)\n", "")
    .replace("p.tolist()", "p.full_tensor().tolist()")
)
START = "mp.spawn(main, args=(2, sys.argv[1]), nprocs=2)"
FORKED = PROGRAM.replace(START, 'mp.start_processes(main, args=(2, sys.argv[1]), nprocs=2, start_method="fork")')
#: the program is rank 0 itself, and forks rank 1
FORK = 'mp.get_context("fork").Process(target=main, args=(1, 2, sys.argv[1])).start()'
BESIDE = PROGRAM.replace(START, f"{FORK}; main(0, 2, sys.argv[1])")
LAUNCH = """
import subprocess, sys
ranks = [subprocess.Popen([sys.executable, "train.py", sys.argv[1], rank]) for rank in "01"]
sys.exit(max(rank.wait() != 0 for rank in ranks))
"""


@pytest.mark.framework_case("DistributedDataParallel in an unmodified script: gtrace train")
@pytest.mark.parametrize("dies", [False, True])
def test_ranks_that_a_program_starts_exchange_payloads(tmp_path, dies):
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "launch.py").write_text(LAUNCH)
    started = time.monotonic()
    words = ["train", "--codec", "ef:topk:ratio=0.1", "--compare-every", "3", "-o", "log.jsonl"]
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
