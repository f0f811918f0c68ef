"""Accelerate: a loop with an Accelerator in one process, and ``accelerate launch`` with two."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers_capture import run_gtrace, run_python, write_script

from gtrace.trace import open_trace

pytest.importorskip("accelerate")

SCRIPT = """
    import gc, sys
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    def main():
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        set_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        data = DataLoader(TensorDataset(torch.randn(32, 4), torch.randint(2, (32,))), batch_size=4)
        model, optimizer, data = accelerator.prepare(model, optimizer, data)
        for x, y in data:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
        torch.save(accelerator.unwrap_model(model).state_dict(), f"{sys.argv[1]}{accelerator.process_index}.pt")
        accelerator.wait_for_everyone()
        del model, optimizer, data
        gc.collect()
        accelerator.end_training()

    main()
    """
NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The weights of one process without capture."""
    folder = tmp_path_factory.mktemp("plain")
    write_script(folder / "train.py", SCRIPT)
    done = run_python("train.py", "plain", cwd=folder)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "plain0.pt")


def same_as(plain, folder):
    captured = torch.load(folder / "captured0.pt")
    assert all(torch.equal(captured[name], value) for name, value in plain.items())


def same_weights(folder, ranks):
    for rank in range(ranks):
        plain, captured = (torch.load(folder / f"{how}{rank}.pt") for how in ("plain", "captured"))
        assert all(torch.equal(captured[name], value) for name, value in plain.items())


@pytest.mark.capture_case("accelerate: accumulation and clipping", packages=("accelerate",))
def test_one_process(tmp_path, plain):
    write_script(tmp_path / "train.py", SCRIPT)
    result = run_gtrace("capture", "-o", "run.zarr", "train.py", "captured", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    same_as(plain, tmp_path)
    trace = open_trace(tmp_path / "run.zarr")
    assert [info.name for info in trace.tensors] == NAMES
    scalars = trace.scalars()
    assert scalars["step"].tolist() == [0, 1, 2, 3]
    assert scalars["micro_batches"].tolist() == [2] * 4
    assert np.isfinite(scalars["clip_norm"]).all()


@pytest.mark.capture_case("accelerate launch", packages=("accelerate",))
def test_launched(tmp_path, plain):
    write_script(tmp_path / "train.py", SCRIPT)
    options = [
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    launch = ["accelerate.commands.accelerate_cli", "launch", *options, "train.py", "captured"]
    result = run_gtrace("capture", "-o", "run.zarr", "-m", *launch, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "gtrace: 4 steps captured in run.zarr (4 tensors" in result.stderr
    same_as(plain, tmp_path)
    assert [info.name for info in open_trace(tmp_path / "run.zarr").tensors] == NAMES


@pytest.mark.capture_case("accelerate in two processes of torchrun", packages=("accelerate",))
def test_two_processes(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    plain = run_python("-m", *launch, "plain", cwd=tmp_path)
    assert plain.returncode == 0, plain.stderr
    result = run_gtrace("capture", "-o", "run.zarr", "-m", *launch, "captured", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    same_weights(tmp_path, 2)
    trace = open_trace(tmp_path / "run.zarr")
    assert [(info.rank, info.name) for info in trace.tensors] == [(rank, name) for rank in (0, 1) for name in NAMES]
    for rank in (0, 1):
        assert trace.scalars(rank=rank)["step"].tolist() == [0, 1]
    assert {info.stage for info in trace.tensors} == {"local"}
    assert not np.array_equal(trace.read("0.weight", 0, rank=0), trace.read("0.weight", 0, rank=1))
