"""The recipes of docs/how-to/lightning.md in the smallest program of each trainer.

What is recorded, applied, logged and swept must agree.

Every program trains with plain SGD, so that the gradients which the optimizer used follow from the weights.
"""

import csv
import itertools
import math
import tomllib
from collections import defaultdict
from functools import partial
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers_capture import run_python, write_script
from helpers_docs import ROOT, blocks
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import gtrace
from gtrace.errors import UsageError
from gtrace.runlog import read_runlog
from gtrace.sweep import EXPECTATION

pytestmark = pytest.mark.filterwarnings("ignore")
CODEC, LR, STEPS = "qsgdinf:bits=4", 0.5, 4
RECIPES = [block.text for block in blocks("docs/how-to/lightning.md") if block.language == "python"]


class Kept:
    """A tracker, and the protocol of torchtitan's loggers: ``log(metrics, step)``."""

    def __init__(self):
        self.rows = defaultdict(dict)

    def log(self, metrics, step):
        self.rows[step] |= metrics


class Pieces:
    """A model, its data and its optimizer; what backward passes made, and the weights before and after each step."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.data = TensorDataset(torch.randn(8 * STEPS, 6), torch.randint(3, (8 * STEPS,)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=LR)
        self.exact, self.weights = defaultdict(list), []
        for name, parameter in self.model.named_parameters():
            keep = partial(self._keep, name)
            parameter.register_post_accumulate_grad_hook(keep)
        self._look()
        self.optimizer.register_step_post_hook(lambda *_: self._look())

    def _keep(self, name, parameter):
        self.exact[name].append(parameter.grad.clone())

    def _look(self):
        self.weights.append({name: p.detach().clone() for name, p in self.model.named_parameters()})

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.model(x), y)


def run(place, **names):
    """The recipe of this place on the page."""
    exec(compile(RECIPES[place], "lightning.md", "exec"), {"gtrace": gtrace, **names})


def lightning(pieces, folder):
    import lightning.pytorch as pl
    from lightning.pytorch.loggers import CSVLogger

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = pieces.model

        def training_step(self, batch, _):
            return pieces.loss(*batch)

        def configure_optimizers(self):
            return pieces.optimizer

    logger = CSVLogger(folder)
    quiet = dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    trainer = partial(pl.Trainer, max_epochs=1, accelerator="cpu", devices=1, logger=logger, **quiet)
    run(0, Trainer=trainer, model=Module(), data=DataLoader(pieces.data, batch_size=8))
    rows = defaultdict(dict)
    with open(f"{logger.log_dir}/metrics.csv", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            rows[int(row["step"])] |= {name: float(value) for name, value in row.items() if value and name != "step"}
    return rows


def transformers(pieces, folder, monkeypatch):
    import transformers

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = pieces.model

        def forward(self, x, labels):
            return {"loss": pieces.loss(x, labels)}

    quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    plain = {"per_device_train_batch_size": 8, "lr_scheduler_type": "constant", "max_grad_norm": 0}
    arguments = transformers.TrainingArguments(str(folder / "out"), max_steps=STEPS, **plain, **quiet)
    kept = Kept()
    monkeypatch.setattr("gtrace.trackers.open_tracker", lambda to: {"tensorboard:runs": kept}[to])
    monkeypatch.setattr("gtrace.capture.options.check_tracker", lambda to: None)
    trainer = partial(transformers.Trainer, optimizers=(pieces.optimizer, None))
    run(1, Trainer=trainer, model=Net(), arguments=arguments, data=[{"x": x, "labels": y} for x, y in pieces.data])
    return kept.rows


def accelerate(pieces, _folder):
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
    loader = DataLoader(pieces.data, batch_size=8)
    model, optimizer, loader = accelerator.prepare(pieces.model, pieces.optimizer, loader)

    def train():
        for batch in loader:
            accelerator.backward(pieces.loss(*batch))
            optimizer.step()
            optimizer.zero_grad()

    run(2, accelerator=accelerator, model=model, optimizer=optimizer, train=train)
    accelerator.end_training()
    return kept.rows


def torchtitan(pieces, _folder):
    """The names that torchtitan's own ``Trainer`` has, in a loop."""

    class Processor:
        logger = Kept()

    class Trainer:
        model_parts = (pieces.model,)
        optimizers = (pieces.optimizer,)
        metrics_processor = Processor()

        def train(self):
            for batch in DataLoader(pieces.data, batch_size=8):
                pieces.loss(*batch).backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

    run(3, trainer=Trainer())
    return Processor.logger.rows


def case(program, *packages, name):
    absent = [package for package in packages if find_spec(package) is None]
    return pytest.param(
        program,
        id=name,
        marks=[
            pytest.mark.framework_case(f"{name}: capture, codec, numbers in a logger", packages=packages),
            pytest.mark.skipif(absent != [], reason=f"not installed: {absent}"),
        ],
    )


PROGRAMS = [
    case(lightning, "lightning", name="Lightning"),
    case(transformers, "transformers", "accelerate", name="Hugging Face Trainer"),
    case(accelerate, "accelerate", name="Accelerate"),
    case(torchtitan, name="torchtitan's names in a loop, without the package"),
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_captured_swept_and_trained_with_a_codec(program, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pieces = Pieces()
    logged = program(pieces, tmp_path, *([monkeypatch] if program is transformers else []))
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    assert trace.status == "complete"
    swept = gtrace.run_sweep(trace, [CODEC])
    steps = list(range(STEPS))
    assert sorted(logged) == steps
    for step, (before, after) in zip(steps, itertools.pairwise(pieces.weights), strict=True):
        energy = lost = 0.0
        for name, found in pieces.exact.items():
            exact = found[step].flatten().numpy().astype(np.float64)
            (info,) = (one for one in trace.tensors if one.name.removeprefix("net.") == name)
            assert np.array_equal(trace.read(info.name, step), exact)
            applied = ((before[name] - after[name]) / LR).flatten().numpy()
            energy += float(np.square(exact).sum())
            lost += float(np.square(applied - exact).sum())
        numbers = logged[step]
        assert numbers["gtrace/capture/norm"] == pytest.approx(math.sqrt(energy))
        assert numbers[f"gtrace/train/{CODEC}/error"] == pytest.approx(lost / energy, rel=1e-3)
        shares = [value for name, value in numbers.items() if name.startswith("gtrace/capture/energy_share/")]
        assert sum(shares) == pytest.approx(1)
        assert len(shares) == 2
        # One draw of the noise whose expectation the sweep has.
        rows = (swept["step"] == step) & (swept["draw"] == EXPECTATION)
        assert lost / swept["squared_error"][rows].sum() == pytest.approx(1, abs=0.5)
    # Nothing stays behind.
    assert not pieces.optimizer._optimizer_step_pre_hooks


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
@pytest.mark.parametrize("asked", [{}, {"GTRACE_TRACE": "own.zarr"}, {"GTRACE_CODEC": CODEC}])
def test_lightning_finds_its_callback_by_the_entry_point(asked, tmp_path, monkeypatch):
    import lightning.pytorch as pl

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    about = tmp_path / "site" / "stand_in-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: stand-in\nVersion: 1\n")
    (about / "entry_points.txt").write_text(
        "".join(f"[{group}]\nstand_in = {names['gtrace']}\n" for group, names in groups.items())
    )
    if not entry_points(group="lightning.pytorch.callbacks_factory", name="gtrace"):
        monkeypatch.syspath_prepend(about.parent)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    trainer = pl.Trainer(logger=False, enable_checkpointing=False, default_root_dir=tmp_path, accelerator="cpu")
    found = [type(one).__name__ for one in trainer.callbacks if type(one).__module__.startswith("gtrace")]
    assert found == (["LightningCallback"] if asked else [])


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_a_codec_between_processes_is_refused_by_hugging_face():
    from gtrace.trainers.transformers import TransformersCallback

    with pytest.raises(UsageError, match="gtrace train --codec qsgdinf:bits=4 SCRIPT"):
        TransformersCallback(codec=CODEC).on_train_begin(SimpleNamespace(world_size=2), None, None, optimizer=None)
    with pytest.raises(UsageError, match=r"name a trace to write, e.g. 'run.zarr', a codec"):
        TransformersCallback()


RANKS = """
    import sys
    import torch
    import lightning.pytorch as pl
    from gtrace.trainers.lightning import LightningCallback

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(6, 3)

        def training_step(self, batch, _):
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

        def on_before_optimizer_step(self, _):
            torch.save(self.net.weight.grad, f"averaged{self.global_step}-{self.global_rank}.pt")

    torch.manual_seed(0)
    data = torch.utils.data.DataLoader(torch.randn(16, 6), batch_size=4)
    pl.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[LightningCallback("run.zarr", codec="qsgdinf:bits=2")],
    ).fit(Module(), data)
    """


@pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
@pytest.mark.framework_case("Lightning, ddp: payloads between ranks", packages=("lightning",))
def test_payloads_travel_between_the_ranks_of_lightning(tmp_path):
    write_script(tmp_path / "train.py", RANKS)
    done = run_python("train.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    assert {info.rank for info in trace.tensors} == {0, 1}
    (name,) = {info.name for info in trace.tensors if info.name.endswith("weight")}
    for step in range(2):
        ours, theirs = (torch.load(tmp_path / f"averaged{step}-{rank}.pt").flatten().numpy() for rank in (0, 1))
        assert np.array_equal(ours, theirs)
        exact = [trace.read(name, step, rank=rank) for rank in (0, 1)]
        assert not np.allclose(exact[0], exact[1])
        error = np.square(ours - np.mean(exact, axis=0)).sum() / np.square(np.mean(exact, axis=0)).sum()
        assert 1e-4 < error < 1


LAUNCHED = """
    import torch, transformers
    from torch import nn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(6, 3)

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    torch.manual_seed(0)
    model = Net()
    data = [{"x": torch.randn(6), "labels": torch.randint(3, ())} for _ in range(32)]
    arguments = transformers.TrainingArguments(
        "out", max_steps=3, per_device_train_batch_size=4, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, use_cpu=True, ddp_backend="gloo",
    )
    transformers.Trainer(
        model, arguments, train_dataset=data, optimizers=(torch.optim.SGD(model.parameters(), lr=0.5), None)
    ).train()
    """


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.framework_case(
    "Hugging Face Trainer, torchrun: gtrace train between ranks", packages=("transformers", "accelerate")
)
def test_gtrace_train_puts_the_codec_between_the_ranks_of_hugging_face(tmp_path):
    write_script(tmp_path / "train.py", LAUNCHED)
    launch = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--")
    train = ("gtrace", "train", "--codec", CODEC, "-o", "run.jsonl", "train.py")
    done = run_python(*launch, *train, cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    study, *records = read_runlog(tmp_path / "run.jsonl")
    assert (study["world_size"], study["exchange"]) == (2, "allgather")
    steps = [record for record in records if record["type"] == "step"]
    assert [record["step"] for record in steps] == [0, 1, 2]
    assert all(record["wire_bytes"] > 0 and 0 < record["worker_variance"] < 0.1 for record in steps)
