"""Capture and a codec in the smallest program of each trainer: what is recorded, applied, logged and swept agrees.

Every program trains with plain SGD, so that the gradients which the optimizer used follow from the weights.
"""

import csv
import itertools
import math
from collections import defaultdict
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gtrace
from gtrace.sweep import EXPECTATION

pytestmark = pytest.mark.filterwarnings("ignore")
CODEC, LR, STEPS = "qsgdinf:bits=4", 0.5, 4


class Kept:
    """A tracker, and the protocol of torchtitan's loggers: ``log(metrics, step)``."""

    def __init__(self):
        self.rows = defaultdict(dict)

    def log(self, metrics, step):
        self.rows[step] |= metrics


def pieces():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return model, TensorDataset(torch.randn(8 * STEPS, 6), torch.randint(3, (8 * STEPS,)))


def weights_of(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def lightning(folder, with_gtrace):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    from gtrace.trainers.lightning import LightningCallback

    inner, data = pieces()
    weights = [weights_of(inner)]

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = inner

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=LR)

        def on_train_batch_end(self, *_):
            weights.append(weights_of(inner))

    logger = CSVLogger(folder)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    own = [LightningCallback(folder / "run.zarr", codec=CODEC)] if with_gtrace else []
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=logger, callbacks=own, default_root_dir=folder, **quiet
    )
    trainer.fit(Module(), DataLoader(data, batch_size=8))
    if not with_gtrace:
        return weights, {}
    rows = defaultdict(dict)
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: float(value) for name, value in row.items() if value and name != "step"}
    return weights, rows


def transformers(folder, with_gtrace):
    import transformers

    from gtrace.trainers.transformers import TransformersCallback

    inner, data = pieces()
    weights, kept = [weights_of(inner)], Kept()

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = inner

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    class Keep(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            weights.append(weights_of(inner))

    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
    )
    model = Net()
    own = [TransformersCallback(folder / "run.zarr", codec=CODEC, to=kept)] if with_gtrace else []
    transformers.Trainer(
        model,
        arguments,
        train_dataset=[{"x": x, "labels": y} for x, y in data],
        optimizers=(torch.optim.SGD(model.parameters(), lr=LR), None),
        callbacks=[Keep(), *own],
    ).train()
    return weights, kept.rows


def accelerate(folder, with_gtrace):
    from accelerate import Accelerator
    from accelerate.tracking import GeneralTracker

    kept = Kept()

    class Own(GeneralTracker):
        name, requires_logging_directory, tracker = "own", False, None

        def store_init_configuration(self, values):
            pass

        def log(self, values, step=None, **_):
            kept.log(values, step)

    accelerator = Accelerator(cpu=True, log_with=Own())
    accelerator.init_trackers("demo")
    inner, data = pieces()
    weights = [weights_of(inner)]
    model, optimizer, loader = accelerator.prepare(
        inner, torch.optim.SGD(inner.parameters(), lr=LR), DataLoader(data, batch_size=8)
    )

    def train():
        for x, y in loader:
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            weights.append(weights_of(inner))

    if with_gtrace:
        with (
            gtrace.capture.record(model, optimizer.optimizer, folder / "run.zarr", to=accelerator),
            gtrace.training.compress(optimizer.optimizer, CODEC, to=accelerator),
        ):
            train()
    else:
        train()
    accelerator.end_training()
    return weights, kept.rows


def torchtitan(folder, with_gtrace):
    """The names that torchtitan's own ``Trainer`` has, in a loop: the package needs CUDA builds of torch."""
    inner, data = pieces()
    weights = [weights_of(inner)]

    class Trainer:
        model_parts = [inner]  # noqa: RUF012
        optimizers = [torch.optim.SGD(inner.parameters(), lr=LR)]  # noqa: RUF012
        logger = Kept()

        def train(self):
            for x, y in DataLoader(data, batch_size=8):
                nn.functional.cross_entropy(inner(x), y).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                weights.append(weights_of(inner))

    trainer = Trainer()
    if with_gtrace:
        model, optimizers, logger = trainer.model_parts[0], trainer.optimizers, trainer.logger
        with (
            gtrace.capture.record(model, list(optimizers), folder / "run.zarr", to=logger),
            gtrace.training.compress(optimizers[0], CODEC, to=logger),
        ):
            trainer.train()
    else:
        trainer.train()
    return weights, trainer.logger.rows


def case(program, *packages, name):
    what = "capture, codec, numbers in its own loggers"
    absent = [package for package in packages if find_spec(package) is None]
    return pytest.param(
        program,
        id=name,
        marks=[
            pytest.mark.framework_case(name, what, packages=packages),
            pytest.mark.skipif(absent != [], reason=f"not installed: {absent}"),
        ],
    )


@pytest.mark.parametrize(
    "program",
    [
        case(lightning, "lightning", name="Lightning Trainer"),
        case(transformers, "transformers", "accelerate", name="Hugging Face Trainer"),
        case(accelerate, "accelerate", name="Accelerate"),
        case(torchtitan, name="torchtitan (its trainer's names in a loop, without the package)"),
    ],
)
def test_captured_swept_and_trained_with_a_codec(program, tmp_path):
    weights, logged = program(tmp_path, True)
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    assert trace.status == "complete"
    assert trace.steps(trace.tensors[0].name).tolist() == list(range(STEPS)) == sorted(logged)
    swept = gtrace.run_sweep(trace, [CODEC])
    for step, (before, after) in enumerate(itertools.pairwise(weights)):
        energy = lost = 0.0
        for info in trace.tensors:
            exact = trace.read(info.name, step)
            name = info.name.removeprefix("net.")
            applied = ((before[name] - after[name]) / LR).flatten().numpy()
            energy += float(np.square(exact, dtype=np.float64).sum())
            lost += float(np.square(applied - exact, dtype=np.float64).sum())
        numbers = logged[step]
        assert numbers["gtrace/capture/norm"] == pytest.approx(math.sqrt(energy))
        assert numbers[f"gtrace/train/{CODEC}/error"] == pytest.approx(lost / energy, rel=1e-3)
        # One draw of the noise whose expectation the sweep has.
        rows = (swept["step"] == step) & (swept["draw"] == EXPECTATION)
        assert lost / swept["squared_error"][rows].sum() == pytest.approx(1, abs=0.5)
    shares = [value for name, value in numbers.items() if name.startswith("gtrace/capture/energy_share/")]
    assert len(shares) == 2
    assert sum(shares) == pytest.approx(1)
    plain, _ = program(tmp_path, False)
    assert any(not torch.equal(plain[-1][name], value) for name, value in weights[-1].items())
    # The first gradient is the exact one of the run without gtrace.
    for info in trace.tensors:
        name = info.name.removeprefix("net.")
        exact = ((plain[0][name] - plain[1][name]) / LR).flatten().numpy()
        np.testing.assert_allclose(trace.read(info.name, 0), exact, atol=1e-6)
