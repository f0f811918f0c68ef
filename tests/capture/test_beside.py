"""What is recorded beside whole gradients: samples of blocks, second moments of Adam, and micro-batches."""

import numpy as np
import pytest
import torch
from torch import nn

import gtrace
from gtrace.capture import record
from gtrace.errors import TraceError
from gtrace.sweep import run_sweep
from gtrace.sweep.gradient_noise import NOISE
from gtrace.trace.check import check_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.rows import BLOCK, BlockSample

MANY = 5 * BLOCK + 100
ROWS = 6


@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
@pytest.mark.capture_case("--max-elements: whole blocks of weights, the same at every step")
def test_blocks_of_weights_and_exact_numbers_of_all(suffix, tmp_path):
    """Several blocks, the last one short. Numbers that are not finite, outside of the sample, are counted."""
    path, weight, bias = tmp_path / f"run{suffix}", nn.Parameter(torch.randn(MANY) / 100), nn.Parameter(torch.zeros(7))
    optimizer, expected = torch.optim.SGD([weight, bias], lr=0.1), []
    sample = BlockSample.choose("0", MANY, 2 * BLOCK)
    outside = next(start for start in range(0, MANY, BLOCK) if start not in sample.offsets)
    with record(nn.ParameterList([weight, bias]), optimizer, path, max_elements=BLOCK + 1):
        for step in range(3):
            optimizer.zero_grad()
            (weight.cumsum(0).sin().mean() + bias.sum() * weight.square().sum()).backward()
            if step == 2:
                weight.grad[outside : outside + 2] = torch.tensor([torch.nan, torch.inf])
            expected.append(weight.grad.numpy().copy())
            optimizer.step()
    with gtrace.open_trace(path) as trace:
        info = next(info for info in trace.tensors if info.name == "0")
        assert BlockSample.read(info.sample) == sample
        assert (info.shape, sample.kept, sample.blocks, info.size) == ((MANY,), 2, 6, sample.size)
        numbers = trace.statistics("0")
        assert numbers["n_total"].tolist() == [MANY] * 3
        assert (numbers["whole_nonfinite"].tolist(), numbers["nonfinite"].tolist()) == ([0, 0, 2], [0] * 3)
        for step, gradient in enumerate(expected):
            kept = np.concatenate([gradient[start : start + BLOCK] for start in sample.offsets])
            np.testing.assert_array_equal(trace.read("0", step), kept)
            exact = gradient[np.isfinite(gradient)].astype(np.float64)
            assert numbers["whole_norm1"][step] == pytest.approx(np.abs(exact).sum(), rel=1e-12)
            assert numbers["whole_norm2"][step] == pytest.approx(np.square(exact).sum(), rel=1e-12)
            assert numbers["whole_absmax"][step] == np.abs(exact).max()
        assert trace.read("1", 0).size == 7
        assert np.isnan(trace.statistics("1")["whole_norm1"]).all()
    assert check_trace(path).clean


def train(path, make=torch.optim.Adam, count=ROWS, **options):
    """Train a small model, record it, and return the second moments that each step found, by parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 12), nn.Flatten(), nn.Linear(48, 3))
    optimizer = make(model.parameters(), lr=0.01)
    found = []
    with record(model, optimizer, path, **options) as session:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randint(0, 30, (8, 4))).square().mean().backward()
            state = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in model.parameters()]
            found.append([None if v is None else v.flatten().numpy().copy() for v in state])
            optimizer.step()
    return [name for name, _ in model.named_parameters()], found, session.finish("complete")


@pytest.mark.capture_case("--optimizer-state: Adam's second moments")
@pytest.mark.capture_case("--second-moments: Adam's second moments, element by element")
@pytest.mark.parametrize(
    ("make", "suffix"), [(torch.optim.Adam, ".zarr"), (torch.optim.AdamW, ".h5"), (torch.optim.NAdam, ".zarr")]
)
def test_second_moments_and_their_sums_are_those_that_the_step_found(make, suffix, tmp_path):
    path, packed = tmp_path / f"run{suffix}", tmp_path / "packed.h5"
    names, found, summary = train(path, make, optimizer_state=True, second_moments=True)
    assert (summary.rows, summary.tensors, summary.without) == (ROWS, 3, ())
    assert not check_trace(path).faults
    pack_trace(path, packed)
    for place in (path, packed):
        with gtrace.open_trace(place) as trace:
            for k, name in enumerate(names):
                sums = [np.nan if row[k] is None else row[k].sum(dtype=np.float64) for row in found]
                own = trace.statistics(name, kind="weight")["second_moment"]
                np.testing.assert_allclose(own, sums, rtol=1e-12)
                assert np.isnan(own).tolist() == [step == 0 for step in range(ROWS)]
                assert trace.steps(name, kind="second_moment").tolist() == list(range(1, ROWS))
                for step in range(1, ROWS):
                    np.testing.assert_array_equal(trace.read(name, step, kind="second_moment"), found[step][k])
                assert trace.statistics(name, kind="second_moment")["optimizer_step"].tolist() == list(range(1, ROWS))
            (info,) = (i for i in trace.tensors if i.kind == "second_moment" and i.name == names[0])
            assert (info.attrs["decay"], info.attrs["eps"]) == (0.999, 1e-8)


def test_there_are_none_without_adam(path):
    names, _, summary = train(path, torch.optim.SGD, second_moments=True, optimizer_state=True)
    assert "exp_avg_sq" in summary.without[0]
    with gtrace.open_trace(path) as trace:
        assert {info.kind for info in trace.tensors} == {"weight"}
        assert np.isnan(trace.statistics(names[0])["second_moment"]).all()
        assert np.isnan(run_sweep(trace, ["qsgdinf:bits=3"]).columns["update_error"]).all()


def test_the_budget_counts_second_moments(tmp_path):
    row = 4 * sum(v.size for v in train(tmp_path / "run.zarr")[1][-1])
    _, _, summary = train(tmp_path / "less.zarr", second_moments=True, steps="0-99", budget=5 * row)
    # The first step has no second moments yet: 1 + 2 + 2.
    assert (summary.rows, summary.over_budget) == (3, True)


def test_update_errors_of_a_sweep_against_the_optimizers_own_numbers(path):
    """Rows are what float64 makes of decoded values and torch's own state; the mean of draws is what is expected."""
    names, found, _ = train(path, second_moments=True)
    specs = ["qsgdinf:bits=2,bucket_size=64", "alq:bits=3,bucket_size=64", "signsgd", "topk:ratio=0.1", "fp:e3m0"]
    with gtrace.open_trace(path) as trace:
        rows = run_sweep(trace, specs, draws=6, steps=[0, 3, 4], refit="previous", jobs=3, chunk=128).columns
        assert np.isnan(rows["update_error"][rows["step"] == 0]).all()
        for k, name in enumerate(names):
            step = 4
            g = trace.read(name, step).astype(np.float64)
            v = 0.999 * found[step][k].astype(np.float64) + 0.001 * g**2
            divisor = np.sqrt(v / (1 - 0.999**5)) + 1e-8
            for spec in specs:
                codec = gtrace.codec(spec)
                mine = (rows["tensor"] == name) & (rows["step"] == step) & (rows["codec"] == str(codec))
                drawn = rows["update_error"][mine & (rows["draw"] >= 0)]
                assert np.isfinite(drawn).all()
                if spec == "fp:e3m0":
                    state = codec.fit(codec.init(g.size), trace.sketch(name, step, "none"), step)
                    decoded = codec.simulate(state, g.astype(np.float32), (0, 0)).values
                    wanted = np.sum(((decoded - g) / divisor) ** 2) / np.sum((g / divisor) ** 2)
                    np.testing.assert_allclose(drawn, wanted, rtol=1e-5)
                expected = rows["update_error"][mine & (rows["draw"] < 0)]
                if expected.size:
                    spread = drawn.std(ddof=1) / np.sqrt(drawn.size)
                    assert abs(drawn.mean() - expected[0]) <= 6 * spread + 5e-3 * expected[0]


@pytest.mark.parametrize("wrong", [{"decay": "half"}, {"decay": 1.5}, {"eps": -1.0}, {"eps": [1.0]}])
def test_a_damaged_constant_is_an_error_of_the_trace(wrong, path):
    with gtrace.create_trace(path) as writer:
        writer.append(0, "w", np.ones(8, np.float32))
        writer.append(0, "w", np.ones(8, np.float32), kind="second_moment", **{"decay": 0.9, "eps": 1e-8} | wrong)
    with gtrace.open_trace(path) as trace, pytest.raises(TraceError, match="second moments of w"):
        run_sweep(trace, ["qsgdinf:bits=3"])


def test_a_sample_has_the_same_blocks_of_both(path):
    weight = nn.Parameter(torch.randn(MANY) / 100)
    optimizer = torch.optim.Adam([weight], lr=0.01)
    options = {"second_moments": True, "max_elements": 2 * BLOCK}
    with record(nn.ParameterList([weight]), optimizer, path, **options):
        for _ in range(2):
            optimizer.zero_grad()
            (weight.cumsum(0).sin() * weight).sum().backward()
            before = optimizer.state.get(weight, {}).get("exp_avg_sq", torch.zeros(MANY)).clone()
            optimizer.step()
    with gtrace.open_trace(path) as trace:
        gradient, moments = trace.tensors
        assert gradient.sample == moments.sample
        kept = np.concatenate([np.arange(MANY)[k : k + BLOCK] for k in moments.sample["offsets"]])
        np.testing.assert_array_equal(trace.read(moments.name, 1, kind="second_moment"), before.numpy()[kept])
        rows = run_sweep(trace, ["qsgdinf:bits=3,bucket_size=512"], steps=[1])
        assert np.isfinite(rows["update_error"]).all()


def accumulate(path, count=3, batches=2, to_none=True, clip_after=None, keep=False, scale=1.0, lr=0.01):
    """Record a training; returns what each micro-batch adds to a gradient: [step][batch].

    Args:
        clip_after: the batch after which gradients are clipped.
        keep: they are never set to zero.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 50), nn.ReLU(), nn.Linear(50, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    weight, before, added = model[0].weight, torch.zeros(50, 40), []
    with record(model, optimizer, path, noise=True) as session:
        for _ in range(count):
            if not keep:
                optimizer.zero_grad(set_to_none=to_none)
                before = torch.zeros(50, 40)
            added.append([])
            for batch in range(batches):
                scaler.scale(model(torch.randn(8, 40)).square().mean()).backward()
                added[-1].append((weight.grad - before).double() / scale)
                if batch == clip_after:
                    nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                before = weight.grad.clone()
            scaler.step(optimizer)
            scaler.update()
    return added, session.finish("complete").without, session._recorder.hooks.seconds


@pytest.mark.capture_case("--noise: second moments across micro-batches")
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"batches": 4},
        {"to_none": False},
        {"batches": 4, "to_none": False},
        {"scale": 1024.0},
        {"batches": 3, "clip_after": 1, "keep": True},  # what else changes gradients is no micro-batch
    ],
)
def test_micro_batches(how, path):
    added, without, seconds = accumulate(path, **how)
    assert without == ()
    assert seconds > 0, "the time of the looks counts, not only that of the copies"
    numbers = gtrace.open_trace(path).statistics("0.weight")
    assert numbers["replicas"].tolist() == [how.get("batches", 2)] * 3
    for step, parts in enumerate(added):
        assert numbers["replicas_norm2"][step] == pytest.approx(sum(float(p.square().sum()) for p in parts), rel=1e-4)
        assert numbers["replicas_sum_norm2"][step] == pytest.approx(float(sum(parts).square().sum()), rel=1e-4)


def test_one_micro_batch_has_no_scatter(path):
    assert accumulate(path, batches=1)[1] == ("no noise: one micro-batch in each step",)
    assert np.isnan(gtrace.open_trace(path).statistics("0.weight")["replicas"]).all()


@pytest.mark.parametrize("end", ["zero", "none", "raise"])
def test_what_another_loss_left_behind_is_no_micro_batch(end, path):
    """As in a GAN: the discriminator's loss reaches the generator, whose gradients are set to zero before its own."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, optimizer, path, noise=True):
        for _ in range(2):
            model(torch.randn(8, 4)).square().mean().backward()
            if end == "raise":
                handle = model[0].weight.register_hook(lambda _gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    model(torch.randn(8, 4)).square().mean().backward()
                handle.remove()
            optimizer.zero_grad(set_to_none=end != "zero")
            for _ in range(2 if end == "raise" else 1):
                model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
    found = gtrace.open_trace(path).statistics("1.weight")["replicas"]
    np.testing.assert_array_equal(found, [2.0 if end == "raise" else np.nan] * 2)


def noises(path):
    """The noise that a sweep finds: its result, the variance and the signal of each step."""
    result = gtrace.run_sweep(path, ["qsgdinf:bits=4"], draws=0, tensors=["0.weight"])
    assert result.provenance["noise"] == {"from": ["micro-batches"]}
    found = [told for (*_, what), told in result.details.items() if what == NOISE]
    return result, *np.transpose([(told["variance"], told["signal"]) for told in found])


def test_micro_batches_are_the_noise_of_a_sweep(tmp_path):
    """Clipping scales it as it scales the gradient, and averages of four ranks have a quarter of it."""
    count, n = 8, 4
    added, *_ = accumulate(tmp_path / "run.zarr", count, n)
    result, variance, signal = noises(tmp_path / "run.zarr")
    own = np.array([sum(float(part.square().sum()) for part in parts) for parts in added])
    total = np.array([float(sum(parts).square().sum()) for parts in added])
    np.testing.assert_allclose(variance, n * (own - total / n) / (n - 1), rtol=1e-4)
    np.testing.assert_allclose(signal, n * (total - own) / (n - 1), rtol=1e-3)
    np.testing.assert_allclose(result["noise_ratio"], result["squared_error"] / variance, rtol=1e-9)
    accumulate(tmp_path / "same.zarr", count, n, lr=0.0)
    accumulate(tmp_path / "clip.zarr", count, n, clip_after=n - 1, lr=0.0)
    (plain, whole, _), (clipped, less, _) = noises(tmp_path / "same.zarr"), noises(tmp_path / "clip.zarr")
    np.testing.assert_allclose(less, whole * clipped["energy"] / plain["energy"], rtol=1e-4)
    np.testing.assert_allclose(clipped["noise_ratio"], plain["noise_ratio"], rtol=1e-4)
    reduced = gtrace.create_trace(tmp_path / "reduced.zarr", attrs={"world_size": 4})
    with gtrace.open_trace(tmp_path / "run.zarr") as trace, reduced as writer:
        numbers = trace.statistics("0.weight")
        for k, step in enumerate(trace.steps("0.weight").tolist()):
            told = {name: numbers[name][k] for name in ("replicas", "replicas_norm2", "replicas_sum_norm2")}
            writer.append(step, "0.weight", trace.read("0.weight", step), stage="reduced", numbers=told)
            writer.commit(step)
    _, quarter, same = noises(tmp_path / "reduced.zarr")
    np.testing.assert_allclose(quarter, variance / 4, rtol=1e-5)
    np.testing.assert_allclose(same, signal, rtol=1e-4)
