"""Trackers, each in its own local mode: what is sent is what the package keeps."""

import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch

import gtrace
from gtrace import trackers
from gtrace.errors import UsageError
from gtrace.report.files import send_results
from gtrace.runlog import read_runlog
from gtrace.sweep import ResultStore
from gtrace.trace.numbers import numbers_of_trace
from gtrace.trackers import Tracking, of_record
from gtrace.training import Study, compress

STEPS = [({"gtrace/train/qsgdinf:bits=4/error": 0.5, "gtrace/loss": 2.0}, 3), ({"gtrace/loss": 1.0}, 4)]


class Kept:
    """A tracker of the program's own."""

    def __init__(self):
        self.steps = []

    def log(self, numbers, step):
        self.steps.append((numbers, step))


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    (file,) = (folder / "runs").iterdir()
    for event in EventFileLoader(str(file)).Load():
        for value in event.summary.value:
            yield value.tag, event.step, float(make_ndarray(value.tensor))


def read_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    # The file of an offline run: 7 bytes, then checksum, length, type and a record, again and again.
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    data, place = file.read_bytes(), 7
    assert len(data) < 1 << 15  # of one block
    while place + 7 < len(data):
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        items = Record.FromString(data[place + 7 : place + 7 + size]).history.item
        place += 7 + size
        found = {(item.key or "/".join(item.nested_key)): item.value_json for item in items}
        for name in found:
            if name.startswith("gtrace/"):
                yield name, int(found["gtrace/step"]), float(found[name])


def read_mlflow(_folder):
    import mlflow

    client = mlflow.MlflowClient()
    run = mlflow.search_runs(experiment_names=["tried"], output_format="list")[0]
    for name in run.data.metrics:
        yield from ((name, one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))


def read_trackio(_folder):
    from trackio.sqlite_storage import SQLiteStorage

    for row in SQLiteStorage.get_logs("tried", SQLiteStorage.get_runs("tried")[0]):
        yield from ((name, row["step"], row[name]) for name in row if name.startswith("gtrace"))


#: package -> what pip calls it, if that differs
DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}
PLACES = {"tensorboard": "runs", "wandb": "tried", "mlflow": "tried", "trackio": "tried"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "package",
    [
        pytest.param(one, marks=pytest.mark.framework_case(f"--to {one}", packages=(DISTRIBUTIONS.get(one, one),)))
        for one in trackers.KINDS
    ],
)
def test_a_package_keeps_what_is_sent(package, tmp_path, monkeypatch):
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    local = {"WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "HF_HUB_OFFLINE": "1"}
    local |= {"MLFLOW_TRACKING_URI": f"file:{tmp_path}", "TRACKIO_DIR": str(tmp_path / "trackio")}
    for name, value in local.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    tracking = Tracking(f"{package}:{PLACES[package]}")
    assert tracking.log(STEPS) == 2
    tracking.close()
    found = sorted(one for one in globals()[f"read_{package}"](tmp_path) if one[0] != "gtrace/step")
    sent = [(name, step, value) for numbers, step in STEPS for name, value in numbers.items()]
    shown = [(name.replace("=", "_") if package == "mlflow" else name, *rest) for name, *rest in sent]
    assert found == sorted(shown)


def test_an_error_of_a_tracker_ends_it_and_not_the_training():
    asked, errors = [], []

    class Broken:
        def log(self, _numbers, step):
            asked.append(step)
            raise OSError("no server")

    tracking = Tracking(Broken(), errors.append)
    assert [tracking.log(STEPS), tracking.log(STEPS)] == [0, 0]
    assert asked == [3]
    says = "--to Broken: the tracker takes no numbers (OSError: no server); fix it, or leave --to out"
    assert [str(error) for error in errors] == [says]
    with pytest.raises(UsageError, match="no server"):
        Tracking(Broken()).log(STEPS)


def train(model, batches, optimizer, after=lambda: None):
    for step in range(4):
        for x in batches[2 * step : 2 * step + 2]:
            model(x).square().mean().backward()
        optimizer.step()
        after()
        optimizer.zero_grad()


def pieces():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    return model, torch.randn(8, 7, 6), torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_capture_sends_norms_shares_and_noise(tmp_path):
    model, batches, optimizer = pieces()
    gradients, kept = [], Kept()
    with gtrace.capture.record(model, optimizer, tmp_path / "run.zarr", to=kept, noise=True):
        train(model, batches, optimizer, lambda: gradients.append([p.grad.double() for p in model.parameters()]))
    assert [step for _, step in kept.steps] == [0, 1, 2, 3]
    for (numbers, _), grads in zip(kept.steps, gradients, strict=True):
        first, last = (float(sum(g.square().sum() for g in pair)) for pair in (grads[:2], grads[2:]))
        assert numbers["gtrace/capture/norm"] == pytest.approx(math.sqrt(first + last))
        assert numbers["gtrace/capture/norm/0"] == pytest.approx(math.sqrt(first))
        assert numbers["gtrace/capture/energy_share/2"] == pytest.approx(last / (first + last))
        assert numbers["gtrace/capture/lr"] == 0.1
        assert 0 < numbers["gtrace/capture/noise_share"] < math.inf
    # What the finished trace says is the same.
    again = Kept()
    Tracking(again).log(numbers_of_trace(gtrace.open_trace(tmp_path / "run.zarr")))
    assert again.steps == kept.steps


def test_a_codec_in_a_loop_sends_its_errors():
    model, batches, optimizer = pieces()
    kept, gradients, errors = Kept(), [], []
    optimizer.register_step_pre_hook(lambda *_: gradients.append([p.grad.clone() for p in model.parameters()]))

    def after():
        errors.append([p.grad - g for p, g in zip(model.parameters(), gradients[-1], strict=True)])

    with compress(optimizer, "qsgdinf:bits=3", to=kept) as compression:
        train(model, batches, optimizer, after)
    start = "gtrace/train/qsgdinf:bits=3"
    assert [step for _, step in kept.steps] == [0, 1, 2, 3]
    for (numbers, _), exact, lost in zip(kept.steps, gradients, errors, strict=True):
        energy, error = (float(sum(g.double().square().sum() for g in part)) for part in (exact, lost))
        assert numbers[f"{start}/norm"] == pytest.approx(math.sqrt(energy))
        assert numbers[f"{start}/error"] == pytest.approx(error / energy)
    bits = [numbers[f"{start}/bits_per_value"] for numbers, _ in kept.steps]
    assert np.mean(bits) == pytest.approx(compression.tally.bits_per_element)


def test_a_run_log_has_losses_errors_noise_ratios_and_tests(tmp_path):
    options = {"steps": 2, "workers": 2, "measure": 1, "eval_every": 2, "seed": 1}
    Study("digits-mlp", ["qsgdinf:bits=3"], **options).run(tmp_path / "run.jsonl")
    found = {}
    for record in read_runlog(tmp_path / "run.jsonl"):
        for numbers, step in of_record(record):
            found |= {(name, step): value for name, value in numbers.items()}
    names = {name.rpartition("/")[2] for name, _ in found}
    assert names == {"loss", "lr", "error", "bits_per_value", "noise_ratio", "test_loss", "accuracy"}
    assert found["gtrace/train/none/seed1/bits_per_value", 1] == 32
    assert found["gtrace/train/none/seed1/error", 0] == 0 < found["gtrace/train/qsgdinf:bits=3/seed1/error", 0]


def test_a_sweep_is_summed_over_its_tensors(tmp_path, monkeypatch):
    generator = np.random.default_rng(0)
    gradients = {name: {step: generator.normal(size=40) for step in (0, 1, 2)} for name in ("a.w", "b.w")}
    path, found = tmp_path / "a.sweep.db", []
    gtrace.run_sweep(gtrace.Trace.from_arrays(gradients), ["qsgdinf:bits=3", "topk"], output=path)
    monkeypatch.setattr(trackers.Tracking, "log", lambda _self, steps: found.extend(steps) or len(found))
    assert send_results([path], "tensorboard") == {path: 6}
    rows = ResultStore.load(path).columns
    assert [step for _, step in found] == [0, 0, 1, 1, 2, 2]
    for numbers, step in found:
        (spec,) = {name.split("/")[2] for name in numbers}
        here = (rows["codec"] == spec) & (rows["step"] == step)
        error, bits = (here & (rows["draw"] == draw) for draw in ((-1 if spec[0] == "q" else 0), 0))
        told = {name.rpartition("/")[2]: number for name, number in numbers.items()}
        assert told["error"] == pytest.approx(rows["squared_error"][error].sum() / rows["energy"][error].sum())
        assert told["bits_per_value"] == pytest.approx(rows["bits_total"][bits].mean())
        # Without randomness all of the error is bias.
        assert (told["noise_ratio"] > 0) == (spec[0] == "q")
