"""Accelerate: a loop with an Accelerator, by ``accelerate launch``."""

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


def weights_without():
    """What the script comes to without Accelerate."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for k, (x, y) in enumerate(zip(torch.randn(32, 4).split(4), torch.randint(2, (32,)).split(4), strict=True)):
        (nn.functional.cross_entropy(model(x), y) / 2).backward()
        if k % 2:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.capture_case("accelerate: accumulation and clipping", packages=("accelerate",))
@pytest.mark.capture_case("accelerate launch", packages=("accelerate",))
def test_launched(tmp_path):
    write_script(tmp_path / "train.py", SCRIPT)
    single = ("--num_processes", "1", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
    launch = ["accelerate.commands.accelerate_cli", "launch", "--cpu", *single, "train.py", "captured"]
    result = run_gtrace("capture", "-o", "run.zarr", "-m", *launch, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "gtrace: 4 steps captured in run.zarr (4 tensors" in result.stderr
    captured = torch.load(tmp_path / "captured0.pt")
    assert all(torch.equal(captured[name], value) for name, value in weights_without().items())
    trace = open_trace(tmp_path / "run.zarr")
    assert [info.name for info in trace.tensors] == NAMES
    scalars = trace.scalars()
    assert scalars["step"].tolist() == [0, 1, 2, 3]
    assert scalars["micro_batches"].tolist() == [2] * 4
    assert np.isfinite(scalars["clip_norm"]).all()
