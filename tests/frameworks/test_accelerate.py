"""Accelerate: a loop with an Accelerator, by ``accelerate launch`` and in two processes of torchrun."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from helpers_capture import run_gtrace, write_script
from torch import nn

from gtrace.trace import open_trace

# Importing it takes seconds, which every worker would spend at collection.
pytestmark = pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")

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


def weights_without(ranks=1):
    """What every rank comes to: one process computes all ranks' gradients, and averages them as DDP does."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = list(zip(torch.randn(32, 4).split(4), torch.randint(2, (32,)).split(4), strict=True))
    for first in range(0, len(batches), 2 * ranks):
        found = []
        for rank in range(ranks):
            optimizer.zero_grad()
            for x, y in batches[first + rank : first + 2 * ranks : ranks]:
                (nn.functional.cross_entropy(model(x), y) / 2).backward()
            found.append([p.grad.clone() for p in model.parameters()])
        for parameter, *gradients in zip(model.parameters(), *found, strict=True):
            parameter.grad = sum(gradients) / ranks
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return model.state_dict()


def same_weights(folder, ranks=1):
    for rank in range(ranks):
        captured = torch.load(folder / f"captured{rank}.pt")
        assert all(torch.equal(captured[name], value) for name, value in weights_without(ranks).items())


@pytest.mark.capture_case("accelerate: accumulation and clipping", packages=("accelerate",))
@pytest.mark.capture_case("accelerate launch", packages=("accelerate",))
def test_launched(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    single = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = ["accelerate.commands.accelerate_cli", "launch", "--cpu", *single, "train.py", "captured"]
    result = run_gtrace("capture", "-o", "run.zarr", "-m", *launch, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "gtrace: 4 steps captured in run.zarr (4 tensors" in result.stderr
    same_weights(tmp_path)
    trace = open_trace(tmp_path / "run.zarr")
    assert [info.name for info in trace.tensors] == NAMES
    scalars = trace.scalars()
    assert scalars["step"].tolist() == [0, 1, 2, 3]
    assert scalars["micro_batches"].tolist() == [2] * 4
    assert np.isfinite(scalars["clip_norm"]).all()


@pytest.mark.capture_case("accelerate in two processes of torchrun", packages=("accelerate",))
def test_two_processes(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    result = run_gtrace("capture", "-o", "run.zarr", "-m", *launch, "captured", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    same_weights(tmp_path, 2)
    trace = open_trace(tmp_path / "run.zarr")
    assert [(info.rank, info.name) for info in trace.tensors] == [(rank, name) for rank in (0, 1) for name in NAMES]
    for rank in (0, 1):
        assert trace.scalars(rank=rank)["step"].tolist() == [0, 1]
    assert {info.stage for info in trace.tensors} == {"local"}
    assert not np.array_equal(trace.read("0.weight", 0, rank=0), trace.read("0.weight", 0, rank=1))
