"""Adam's second moments element by element: from the optimizer into the trace, and on into a sweep."""

import numpy as np
import pytest
import torch
from torch import nn

import gtrace
from gtrace.capture import record
from gtrace.errors import TraceError, UsageError
from gtrace.sweep import run_sweep
from gtrace.trace.check import check_trace
from gtrace.trace.convert import pack_trace
from gtrace.trace.rows import BLOCK

ROWS = 6


def train(path, make=torch.optim.Adam, count=ROWS, **options):
    """Train a small model, record it, and return the second moments that each step found, by parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(30, 12), nn.Flatten(), nn.Linear(48, 3))
    optimizer = make(model.parameters(), lr=0.01)
    found = []
    with record(model, optimizer, path, second_moments=True, **options) as session:
        for _ in range(count):
            optimizer.zero_grad()
            model(torch.randint(0, 30, (8, 4))).square().mean().backward()
            state = [optimizer.state.get(p, {}).get("exp_avg_sq") for p in model.parameters()]
            found.append([None if v is None else v.flatten().numpy().copy() for v in state])
            optimizer.step()
    return [name for name, _ in model.named_parameters()], found, session.finish("complete")


@pytest.mark.capture_case("--second-moments: Adam's second moments, element by element")
@pytest.mark.parametrize("suffix", [".zarr", ".h5"])
def test_they_are_those_that_the_step_found(suffix, tmp_path):
    path = tmp_path / f"run{suffix}"
    names, found, summary = train(path)
    assert (summary.rows, summary.tensors, summary.without) == (ROWS, 3, ())
    assert not check_trace(path).faults
    packed = tmp_path / "packed.h5"
    pack_trace(path, packed)
    for place in (path, packed):
        with gtrace.open_trace(place) as trace:
            for k, name in enumerate(names):
                assert trace.steps(name, kind="second_moment").tolist() == list(range(1, ROWS))
                for step in range(1, ROWS):
                    moments = trace.read(name, step, kind="second_moment")
                    np.testing.assert_array_equal(moments, found[step][k])
                assert trace.statistics(name, kind="second_moment")["optimizer_step"].tolist() == list(range(1, ROWS))
            (info,) = (i for i in trace.tensors if i.kind == "second_moment" and i.name == names[0])
            assert (info.attrs["decay"], info.attrs["eps"]) == (0.999, 1e-8)


def test_there_are_none_without_adam(tmp_path):
    _, _, summary = train(tmp_path / "run.zarr", torch.optim.SGD)
    assert "exp_avg_sq" in summary.without[0]
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        assert {info.kind for info in trace.tensors} == {"weight"}
        assert np.isnan(run_sweep(trace, ["qsgdinf:bits=3"]).columns["update_error"]).all()


def test_the_budget_counts_them(tmp_path):
    plain = train(tmp_path / "run.zarr")[1][-1]
    row = 4 * sum(v.size for v in plain)
    _, _, summary = train(tmp_path / "less.zarr", steps="0-99", budget=5 * row)
    # The first step has no second moments yet: 1 + 2 + 2.
    assert summary.rows == 3
    assert summary.over_budget


def test_options_that_do_not_go_with_them(tmp_path):
    with pytest.raises(UsageError, match="--sketch"):
        train(tmp_path / "run.zarr", sketch="l2:512")
    with pytest.raises(UsageError, match="--second-moments is about gradients of weights"):
        train(tmp_path / "run.zarr", kind="neural")


def test_update_errors_of_a_sweep_against_the_optimizers_own_numbers(tmp_path):
    """Rows are what float64 makes of decoded values and torch's own state; chunks and threads change nothing."""
    path = tmp_path / "run.zarr"
    names, found, _ = train(path)
    specs = ["qsgdinf:bits=2,bucket_size=64", "alq:bits=3,bucket_size=64", "signsgd", "topk:ratio=0.1", "fp:e3m0"]
    with gtrace.open_trace(path) as trace:
        rows = run_sweep(trace, specs, draws=6, steps=[0, 3, 4], refit="previous").columns
        again = run_sweep(trace, specs, draws=6, steps=[0, 3, 4], refit="previous", jobs=3, chunk=128).columns
        assert np.isnan(rows["update_error"][rows["step"] == 0]).all()
        for k, name in enumerate(names):
            step = 4
            g = trace.read(name, step).astype(np.float64)
            v = 0.999 * found[step][k].astype(np.float64) + 0.001 * g**2
            divisor = np.sqrt(v / (1 - 0.999**5)) + 1e-8
            for spec in specs:
                mine = (rows["tensor"] == name) & (rows["step"] == step) & (rows["codec"] == str(gtrace.codec(spec)))
                drawn = rows["update_error"][mine & (rows["draw"] >= 0)]
                assert np.isfinite(drawn).all()
                codec = gtrace.codec(spec)
                if spec == "fp:e3m0":
                    state = codec.fit(codec.init(g.size), trace.sketch(name, step, "none"), step)
                    decoded = codec.simulate(state, g.astype(np.float32), (0, 0)).values
                    wanted = np.sum(((decoded - g) / divisor) ** 2) / np.sum((g / divisor) ** 2)
                    np.testing.assert_allclose(drawn, wanted, rtol=1e-5)
                expected = rows["update_error"][mine & (rows["draw"] < 0)]
                if expected.size:
                    spread = drawn.std(ddof=1) / np.sqrt(drawn.size)
                    assert abs(drawn.mean() - expected[0]) <= 6 * spread + 5e-3 * expected[0]
    order = np.lexsort([rows[key] for key in ("draw", "codec", "step", "tensor")])
    other = np.lexsort([again[key] for key in ("draw", "codec", "step", "tensor")])
    np.testing.assert_allclose(rows["update_error"][order], again["update_error"][other], rtol=1e-12)


@pytest.mark.parametrize("wrong", [{"decay": "half"}, {"decay": 1.5}, {"eps": -1.0}, {"eps": [1.0]}])
def test_a_damaged_constant_is_an_error_of_the_trace(wrong, tmp_path):
    path = tmp_path / "run.zarr"
    with gtrace.create_trace(path) as writer:
        writer.append(0, "w", np.ones(8, np.float32))
        writer.append(0, "w", np.ones(8, np.float32), kind="second_moment", **{"decay": 0.9, "eps": 1e-8} | wrong)
    with gtrace.open_trace(path) as trace, pytest.raises(TraceError, match="second moments of w"):
        run_sweep(trace, ["qsgdinf:bits=3"])


def test_a_sample_has_the_same_blocks_of_both(tmp_path):
    size, block = 5 * BLOCK + 100, BLOCK
    weight = nn.Parameter(torch.randn(size) / 100)
    optimizer = torch.optim.Adam([weight], lr=0.01)
    options = {"second_moments": True, "max_elements": 2 * block}
    with record(nn.ParameterList([weight]), optimizer, tmp_path / "run.zarr", **options):
        for _ in range(2):
            optimizer.zero_grad()
            (weight.cumsum(0).sin() * weight).sum().backward()
            before = optimizer.state.get(weight, {}).get("exp_avg_sq", torch.zeros(size)).clone()
            optimizer.step()
    with gtrace.open_trace(tmp_path / "run.zarr") as trace:
        gradient, moments = trace.tensors
        assert gradient.sample == moments.sample
        kept = np.concatenate([np.arange(size)[k : k + block] for k in moments.sample["offsets"]])
        np.testing.assert_array_equal(trace.read(moments.name, 1, kind="second_moment"), before.numpy()[kept])
        rows = run_sweep(trace, ["qsgdinf:bits=3,bucket_size=512"], steps=[1])
        assert np.isfinite(rows["update_error"]).all()
