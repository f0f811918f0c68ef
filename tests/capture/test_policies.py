"""What is recorded beside whole gradients: samples of blocks, second moments, micro-batches; and what is said."""

import io
import re
import threading

import numpy as np
import pytest
import torch
from helpers_capture import Captured, write_script
from helpers_hooks import descend
from torch import nn

import gtrace
from gtrace.capture import CaptureOptions, CaptureSession, record
from gtrace.capture.options import step_policy
from gtrace.capture.session import print_line
from gtrace.capture.writer import AsyncWriter
from gtrace.trace.check import check_trace
from gtrace.trace.rows import BLOCK, BlockSample

MANY = 5 * BLOCK + 100


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 3))


@pytest.fixture
def model():
    return network()


@pytest.fixture
def optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


class Wide(nn.Module):
    """One parameter of several blocks, the last one short."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(MANY) / 100)
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, x):
        return x * self.weight.cumsum(0).sin().mean() + self.bias.sum() * (self.weight**2).sum()


def steps(model, optimizer, count=3, batches=1, before_step=lambda: None, **zero):
    """Train, and return what each micro-batch adds to the gradients: [step][batch][parameter]."""
    torch.manual_seed(1)
    added = []
    for _ in range(count):
        optimizer.zero_grad(**zero)
        added.append([])
        for _ in range(batches):
            last = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            (model(torch.randn(8, 40)).square().mean() / batches).backward()
            added[-1].append(
                [p.grad - (0 if old is None else old) for p, old in zip(model.parameters(), last, strict=True)]
            )
        before_step()
        optimizer.step()
    return added


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
@pytest.mark.capture_case("--max-elements: whole blocks of weights, the same at every step")
def test_blocks_of_weights_and_exact_numbers_of_all(suffix, tmp_path):
    path, model = tmp_path / f"run{suffix}", Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    with record(model, optimizer, path, max_elements=BLOCK + 1):
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(())).backward()
            expected.append(model.weight.grad.numpy().copy())
            optimizer.step()
    with gtrace.open_trace(path) as trace:
        info = next(info for info in trace.tensors if info.name == "weight")
        sample = BlockSample.read(info.sample)
        assert sample == BlockSample.choose("weight", MANY, 2 * BLOCK)
        assert (info.shape, sample.kept, sample.blocks, info.size) == ((MANY,), 2, 6, sample.size)
        numbers = trace.statistics("weight")
        assert numbers["n_total"].tolist() == [MANY] * 3
        for step, gradient in enumerate(expected):
            kept = np.concatenate([gradient[start : start + BLOCK] for start in sample.offsets])
            np.testing.assert_array_equal(trace.read("weight", step), kept)
            exact = gradient.astype(np.float64)
            assert numbers["whole_norm1"][step] == pytest.approx(np.abs(exact).sum(), rel=1e-13)
            assert numbers["whole_norm2"][step] == pytest.approx(np.square(exact).sum(), rel=1e-13)
            assert numbers["whole_absmax"][step] == np.abs(exact).max()
            assert numbers["whole_nonfinite"][step] == 0
        assert trace.read("bias", 0).size == 7
        assert np.isnan(trace.statistics("bias")["whole_norm1"]).all()
    assert check_trace(path).clean


def test_non_finite_values_outside_of_the_sample_are_counted(tmp_path):
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sample = BlockSample.choose("weight", MANY, 1)
    outside = next(start for start in range(0, MANY, BLOCK) if start not in sample.offsets)
    with record(model, optimizer, tmp_path / "run.zarr", max_elements=1):
        model(torch.ones(())).backward()
        model.weight.grad[outside : outside + 2] = torch.tensor([float("nan"), float("inf")])
        finite = model.weight.grad[model.weight.grad.isfinite()].double()
        optimizer.step()
    numbers = gtrace.open_trace(tmp_path / "run.zarr").statistics("weight")
    assert numbers["nonfinite"].tolist() == [0]
    assert numbers["whole_nonfinite"].tolist() == [2]
    assert numbers["whole_norm2"][0] == pytest.approx(float(finite.square().sum()), rel=1e-12)


@pytest.mark.capture_case("--optimizer-state: Adam's second moments")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam])
def test_second_moments_as_the_step_finds_them(make, tmp_path):
    model = network()
    optimizer = make(model.parameters(), lr=0.01)
    found = []

    def look():
        state = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in model.parameters()]
        found.append([np.nan if s is None else s.double().sum().item() for s in state])

    with record(model, optimizer, tmp_path / "run.zarr", optimizer_state=True) as session:
        steps(model, optimizer, before_step=look)
    assert session.finish("complete").without == ()
    trace = gtrace.open_trace(tmp_path / "run.zarr")
    for place, (name, _) in enumerate(model.named_parameters()):
        np.testing.assert_allclose(trace.statistics(name)["second_moment"], [row[place] for row in found], rtol=1e-12)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1:]).all()


def test_an_optimizer_without_second_moments_says_so(model, optimizer, path):
    with record(model, optimizer, path, optimizer_state=True) as session:
        steps(model, optimizer)
    assert "exp_avg_sq" in session.finish("complete").without[0]
    assert np.isnan(gtrace.open_trace(path).statistics("0.weight")["second_moment"]).all()


@pytest.mark.capture_case("--noise: second moments across micro-batches")
@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("batches", [2, 4])
def test_micro_batches(batches, to_none, model, optimizer, path):
    with record(model, optimizer, path, noise=True) as session:
        added = steps(model, optimizer, batches=batches, set_to_none=to_none)
    assert session.finish("complete").without == ()
    # The time of the looks counts, not only that of the copies.
    assert session._recorder.hooks.seconds > 0
    trace = gtrace.open_trace(path)
    for place, (name, _) in enumerate(model.named_parameters()):
        numbers = trace.statistics(name)
        for step, parts in enumerate(added):
            parts = [part[place].double() for part in parts]
            assert numbers["replicas"][step] == batches
            assert numbers["replicas_norm2"][step] == pytest.approx(sum(float(p.square().sum()) for p in parts))
            assert numbers["replicas_sum_norm2"][step] == pytest.approx(float(sum(parts).square().sum()), rel=1e-5)


def test_one_micro_batch_has_no_scatter(model, optimizer, path):
    with record(model, optimizer, path, noise=True) as session:
        steps(model, optimizer)
    assert session.finish("complete").without == ("no noise: one micro-batch in each step",)
    assert np.isnan(gtrace.open_trace(path).statistics("0.weight")["replicas"]).all()


@pytest.mark.parametrize("to_none", [True, False])
def test_what_another_loss_left_behind_is_no_micro_batch(to_none, model, optimizer, path):
    """As in a GAN: the discriminator's loss reaches the generator, whose gradients are set to zero before its own."""
    with record(model, optimizer, path, noise=True):
        for _ in range(2):
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.zero_grad(set_to_none=to_none)
            model(torch.randn(8, 40)).square().mean().backward()
            optimizer.step()
    assert np.isnan(gtrace.open_trace(path).statistics("0.weight")["replicas"]).all()


def test_a_scaled_loss_leaves_no_trace(tmp_path):
    norms = []
    for scale in (1.0, 1024.0):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        path = tmp_path / f"{scale}.zarr"
        with record(model, optimizer, path, noise=True):
            torch.manual_seed(1)
            for _ in range(2):
                scaler.scale(model(torch.randn(8, 40)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        norms.append(gtrace.open_trace(path).statistics("2.weight")["replicas_norm2"][0])
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_nothing_changes_the_training(tmp_path):
    weights = []
    for options in (None, {"noise": True, "optimizer_state": True, "second_moments": True, "max_elements": 10}):
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        if options is None:
            steps(model, optimizer, 20, batches=3)
        else:
            with record(model, optimizer, tmp_path / "run.zarr", **options):
                steps(model, optimizer, 20, batches=3)
        weights.append([p.detach().clone() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


def test_the_first_line_predicts_and_verbose_goes_on(tmp_path):
    with Captured(tmp_path / "run.zarr", policy=step_policy(None, None), budget=10_000_000, verbose=True) as run:
        model = network()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.01), 201)
    said = run.said
    assert run.summary.rows == 201
    row = 4 * sum(p.numel() for p in model.parameters())
    most = step_policy(None, None).most(10_000_000 // row)
    assert re.fullmatch(
        rf"gtrace: recording 4 tensors, {row / 1000:.1f} kB a step, copied in [\d.]+ ms; "
        rf"auto keeps at most {most:,} steps \({row * most / 1e6:.1f} MB of the 10.0 MB budget\)",
        said[0],
    )
    assert [line.split(":")[1] for line in said[1:]] == [" step 99", " step 199"]


@pytest.mark.parametrize("kind", ["weight", "both"])
@pytest.mark.parametrize("late", [False, True])
def test_the_first_line_tells_the_size_of_sketches(kind, late, tmp_path, monkeypatch):
    """Not the most that they can take; of both kinds of gradients together, also if steps have queued up."""
    said, queued, runs = [], threading.Event(), AsyncWriter._runs
    monkeypatch.setattr(AsyncWriter, "_runs", lambda self: [queued.wait(20), *runs(self)][1:])
    path = tmp_path / "run.zarr"
    options = CaptureOptions(path, step_policy(None, None), budget=10**9, kind=kind, sketch="l2:8192,linf:8192,none")
    session = CaptureSession(options, say=said.append, status=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Tanh(), torch.nn.Linear(200, 300))
    session.start()
    if not late:
        queued.set()
    descend(model, torch.optim.SGD(model.parameters(), lr=0.01), 500, 300, steps=10)
    queued.set()
    assert session.finish("complete").rows == 10
    ((number, unit),) = re.findall(r"tensors, ([\d.]+) ([kM]B) a step", said[0])
    told = float(number) * {"kB": 1e3, "MB": 1e6}[unit]
    rows = sum(file.stat().st_size for file in path.rglob("c.*")) / 10
    assert told == pytest.approx(rows, rel=0.2)


def test_nothing_is_said_unless_asked_for(tmp_path):
    with Captured(tmp_path / "run.zarr") as run:
        model = network()
        steps(model, torch.optim.SGD(model.parameters(), lr=0.01), 101)
    assert (run.summary.rows, run.said) == (101, [])


TRAIN = """
    import torch
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 200)
    optimizer = torch.optim.Adam(model.parameters())
    for step in range(30):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 300)).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), "weights.pt")
"""


def test_the_command_line(tmp_path, gtrace_here, weights_without):
    plain = weights_without(write_script(tmp_path / "train.py", TRAIN))
    options = ("--max-elements", "20000", "--optimizer-state", "--noise", "-o", "run.zarr")
    code, _, err = gtrace_here("capture", *options, "train.py")
    assert code == 0
    first, last = err.splitlines()
    # 2 of 4 blocks, and the bias.
    assert first.startswith(f"gtrace: recording 2 tensors, {(2 * BLOCK + 200) * 4 / 1000:.1f} kB a step")
    assert last.startswith("gtrace: 30 steps captured in run.zarr (2 tensors")
    assert (tmp_path / "weights.pt").read_bytes() == plain
    told = gtrace_here("info", "run.zarr")[1]
    assert "whole blocks of 1 tensor" in told
    assert "training Adam, lr 0.001, betas 0.9 and 0.999; batch 16; 30 steps taken\n" in told
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        assert trace.statistics("weight")["replicas"].tolist() == [2] * 30


def test_a_closed_stderr_stops_nothing(monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr("sys.stderr", closed)
    with pytest.raises(ValueError, match="closed"):
        closed.write("what print_line runs into")
    assert print_line("gtrace: recording") is None


@pytest.mark.parametrize("option", ["--noise", "--optimizer-state"])
def test_options_of_weights_are_none_of_neural_gradients(option, tmp_path, gtrace_here):
    write_script(tmp_path / "train.py", TRAIN)
    code, _, err = gtrace_here("capture", "--kind", "neural", option, "train.py")
    assert code == 2
    assert f"{option} is about gradients of weights" in err


def test_what_changes_gradients_between_micro_batches_is_none(model, optimizer, path):
    """Clipping between micro-batches, and gradients that are kept after a step."""
    weight = model[0].weight
    expected, before = [], torch.zeros_like(weight)
    with record(model, optimizer, path, noise=True):
        for _ in range(3):
            added = []
            for batch in range(3):
                model(torch.randn(8, 40)).square().mean().backward()
                added.append((weight.grad - before).double())
                if batch == 1:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                before = weight.grad.clone()
            expected.append(added)
            optimizer.step()
    numbers = gtrace.open_trace(path).statistics("0.weight")
    assert numbers["replicas"].tolist() == [3, 3, 3]
    for step, added in enumerate(expected):
        assert numbers["replicas_norm2"][step] == pytest.approx(sum(float(g.square().sum()) for g in added), rel=1e-4)
        assert numbers["replicas_sum_norm2"][step] == pytest.approx(float(sum(added).square().sum()), rel=1e-4)


def test_a_backward_pass_that_raised_is_no_micro_batch(model, optimizer, path):
    with record(model, optimizer, path, noise=True):
        model(torch.randn(8, 40)).square().mean().backward()
        handle = model[0].weight.register_hook(lambda _gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(8, 40)).square().mean().backward()
        handle.remove()
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.randn(8, 40)).square().mean().backward()
        optimizer.step()
    assert gtrace.open_trace(path).statistics("2.weight")["replicas"].tolist() == [2]
