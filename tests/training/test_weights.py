import numpy as np
import pytest
import torch
from helpers_hooks import module
from torch import nn

from gtrace.errors import UsageError
from gtrace.schedule import RefitSchedule
from gtrace.training import Study
from gtrace.training.weights import PLACEMENTS, QuantizedWeights, WeightLevels, inner_weights

FIRST = RefitSchedule.parse("once")


def model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def skewed(n=4000, seed=0):
    """Heavy tails, and more of them above zero."""
    rng = np.random.default_rng(seed)
    return (rng.laplace(size=n) + 0.3 * rng.exponential(size=n)).astype(np.float32)


def small(**settings):
    return {"workers": 1, "steps": 8, "batch_size": 8, "eval_every": 2, "weights": ["optimal5", "xnor5"], **settings}


def plainly_rounded(values, levels):
    """The nearest level of each value, by trying all of them."""
    distances = np.abs(np.float64(values)[:, None] - np.float64(levels))
    return levels[distances.argmin(1)]


@pytest.mark.parametrize("count", [2, 5, 15, 40, 256])
@pytest.mark.parametrize("placement", ["optimal", "uniform"])
def test_weights_go_to_the_nearest_level(placement, count):
    w, levels = skewed(), WeightLevels(placement, count)
    scale = np.abs(w).max()
    fitted = levels.fit(w / scale)
    assert fitted.size == count
    assert fitted[[0, -1]] == pytest.approx([w.min() / scale, w.max() / scale] if placement == "optimal" else [-1, 1])
    np.testing.assert_array_equal(levels.round(w, fitted), plainly_rounded(w, (fitted * scale).astype(np.float32)))


def test_the_factor_of_xnor_leaves_the_least_error_and_for_two_levels_is_the_mean_magnitude():
    """XNOR-Net, equation 6: the best factor of sign(W) is the mean of |W|."""
    w, levels = skewed(), WeightLevels.parse("xnor2")
    expected = np.where(w > 0, 1, -1) * np.abs(w).mean(dtype=np.float64)
    np.testing.assert_allclose(levels.round(w, levels.fit(w)), expected, rtol=1e-6)
    levels = WeightLevels.parse("xnor5")
    rounded = levels.round(w, levels.fit(w)).astype(np.float64)
    errors = [np.square(factor * rounded - w).sum() for factor in (0.99, 1, 1.01)]
    assert errors[1] == min(errors)


def test_only_inner_weights_are_quantized():
    text = module(embedding=nn.Embedding(9, 4), lstm=nn.LSTM(4, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 9))
    assert list(inner_weights(model())) == ["2.weight"]
    assert list(inner_weights(text)) == ["lstm.weight_ih_l0", "lstm.weight_hh_l0"]
    with pytest.raises(UsageError, match="has 2 with weights"):
        inner_weights(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="float64"):
        inner_weights(model().double())
    net = model()
    before = net[2].weight.detach().clone()
    with pytest.raises(RuntimeError), QuantizedWeights(net, WeightLevels.parse("uniform3"), FIRST).in_place():
        net(torch.zeros(2, 99))
    assert torch.equal(net[2].weight, before)  # also when the model fails


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_step_is_the_straight_through_one(placement):
    """Against a network written by hand, whose middle layer holds the levels themselves."""
    net, lr = model(), 0.3
    exact = {name: p.detach().clone() for name, p in net.named_parameters()}
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    weights = QuantizedWeights(net, WeightLevels(placement, 5), FIRST)
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    with weights.in_place():
        assert len(net[2].weight.unique()) == 5
        nn.functional.cross_entropy(net(x), y).backward()
        seen = net[2].weight.detach().clone()
    for name, p in net.named_parameters():
        assert torch.equal(p, exact[name]), name
    optimizer.step()

    flat = exact["2.weight"].numpy().reshape(-1)
    levels = WeightLevels(placement, 5)
    by_hand = torch.from_numpy(levels.round(flat, levels.fit(flat / np.abs(flat).max()))).view(8, 5)
    torch.testing.assert_close(seen, by_hand)
    hidden = nn.functional.relu(x @ exact["0.weight"].T + exact["0.bias"])
    hand = by_hand.requires_grad_()
    z = hidden @ hand.T + exact["2.bias"]
    z = (z - z.mean(0)) / torch.sqrt(z.var(0, unbiased=False) + net[3].eps)
    nn.functional.cross_entropy(z @ exact["4.weight"].T + exact["4.bias"], y).backward()
    torch.testing.assert_close(net[2].weight.detach(), exact["2.weight"] - lr * hand.grad)
    wrong = ((seen - exact["2.weight"]) ** 2).sum() / (exact["2.weight"] ** 2).sum()
    assert weights.error == pytest.approx(wrong.item(), rel=1e-5)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_weights_without_levels_stay(value):
    net = model()
    with torch.no_grad():
        net[2].weight.fill_(value)
    weights = QuantizedWeights(net, WeightLevels.parse("optimal5"), FIRST)
    with weights.in_place():
        assert torch.equal(net[2].weight.nan_to_num(7.0), torch.full((8, 5), value).nan_to_num(7.0))
    assert np.isnan(weights.error)


def test_the_test_sees_quantized_weights():
    study = Study("digits-mlp", [], **small(weights=["uniform2"]))
    run, task = study._runs[1], study.task
    run._model.eval()
    with torch.no_grad():
        exact = task.evaluate(run._model).loss
    assert run._test().loss != pytest.approx(exact, rel=1e-4)
