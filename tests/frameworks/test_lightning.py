"""Lightning, with automatic and with manual optimization."""

from importlib.util import find_spec

import pytest
import torch
from helpers_capture import Captured
from helpers_training import assert_recorded
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# Importing it takes seconds, which every worker would spend at collection.
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed"),
]


@pytest.fixture(scope="module")
def kinds():
    """Lightning modules by name."""
    import lightning

    class _Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            self.seen = {}

        def loss(self, batch):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def keep(self, optimizer, number=0):
            """What a hand-written hook of Lightning's own sees."""
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            self.seen.setdefault(number, []).append([p.grad.clone() for p in parameters])

    class Automatic(_Net):
        def training_step(self, batch, _):
            return self.loss(batch)

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.01)

        def on_before_optimizer_step(self, optimizer):
            self.keep(optimizer)

    class Clipped(Automatic):
        """Lightning clips inside the closure, after the hook that other frameworks would use."""

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            self.seen[0].pop()
            self.keep(optimizer)

    class Manual(_Net):
        """Two optimizers; the second steps every other batch."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            first, second = self.optimizers()
            for number, optimizer in enumerate((first, second)):
                if number == 1 and index % 2:
                    continue
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                self.keep(optimizer.optimizer, number)
                optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.SGD(self.net[2].parameters(), lr=0.1)

    return {"automatic": Automatic, "clipped": Clipped, "manual": Manual}


def fit(kind, folder, **options):
    import lightning

    lightning.seed_everything(0, verbose=False)
    data = TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
    model = kind()
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    where = {"accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    trainer = lightning.Trainer(max_epochs=2, **where, **quiet, **options)
    trainer.fit(model, DataLoader(data, batch_size=8, shuffle=True))
    return model


@pytest.mark.capture_case("Lightning, automatic and manual optimization", packages=("lightning",))
@pytest.mark.parametrize(
    ("kind", "options", "steps"),
    [
        ("automatic", {}, [8]),
        ("automatic", {"accumulate_grad_batches": 2}, [4]),
        ("automatic", {"precision": "bf16-mixed"}, [8]),
        ("clipped", {"gradient_clip_val": 0.05}, [8]),
        ("manual", {}, [8, 4]),
    ],
    ids=["automatic", "accumulated", "bf16", "clipped", "manual"],
)
def test_fit(tmp_path, kinds, kind, options, steps):
    plain = fit(kinds[kind], tmp_path, **options)
    with Captured(tmp_path / "run.zarr") as run:
        model = fit(kinds[kind], tmp_path, **options)
    assert {info.name for info in run.trace.tensors} == {name for name, _ in plain.named_parameters()}
    for number, count in enumerate(steps):
        assert len(model.seen[number]) == count
        assert_recorded(run, plain.state_dict(), model.state_dict(), model.seen[number], number)
