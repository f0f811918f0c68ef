"""Exchanges of tensors that stay where they are, against exchanges of the host's arrays; the CPU is the device."""

import numpy as np
import pytest
import torch
from helpers_training import heavy, rank_codecs, sender

import gtrace
from gtrace.codecs.assignment import CodecTable
from gtrace.codecs.link import Receiver
from gtrace.training import device, vectors
from gtrace.training.compression import read_gradient, write_gradient
from gtrace.training.exchange import Exchange
from gtrace.training.frames import NOT_FINITE, SimulatedRank, lockstep
from gtrace.training.ranks import Piece
from gtrace.training.ways import way as way_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("spec", ["ef:qsgdinf:bits=3", "topk:ratio=0.1", "alq:bits=3"])
def test_a_sender_takes_tensors_whatever_the_codec(spec):
    values = heavy(3000)
    made = [sender(spec, 3000, engine=vectors.ENGINE) for _ in range(2)]
    ends = [Receiver(gtrace.codec(spec), 3000, vectors.ENGINE) for _ in range(2)]
    for step in range(2):
        on_host, here = made[0].send(values, step), made[1].send(torch.from_numpy(values), step)
        assert on_host == here
        arrived, tensor = ends[0].receive(on_host), ends[1].receive(here, CPU)
        np.testing.assert_array_equal(tensor.numpy(), arrived)
        made[0].settle(values, arrived)
        made[1].settle(torch.from_numpy(values), tensor)


@pytest.mark.parametrize("spec", ["qsgdinf:bits=3", "alq:bits=3,scope=model", "natural"])
def test_an_exchange_of_tensors_is_one_of_arrays(spec, on_cpu):
    batches = [
        [{"w": heavy(9000, k).reshape(90, 100), "b": heavy(10, 9 + k)} for k in range(3 * step, 3 * step + 3)]
        for step in range(3)
    ]
    of_arrays, of_tensors = (Exchange(gtrace.codec(spec), 3, seed=4, refit="0,2") for _ in range(2))
    for step, batch in enumerate(batches):
        expected = of_arrays.step(step, batch)
        found = of_tensors.step(step, [{name: torch.from_numpy(a) for name, a in one.items()} for one in batch])
        for name, average in expected.gradients.items():
            assert isinstance(found.gradients[name], torch.Tensor)
            np.testing.assert_array_equal(found.gradients[name].numpy(), average)
        for field in ("payload_bits", "shared_bits", "float32_bits", "zeros"):
            assert getattr(found.tally, field) == getattr(expected.tally, field)
        assert found.tally.relative_variance == pytest.approx(expected.tally.relative_variance)
        assert found.tally.worker_variance == pytest.approx(expected.tally.worker_variance)


@pytest.mark.parametrize("policy", ["skip", "zero", "pass"])
def test_values_that_are_not_finite_in_tensors(policy, on_cpu):
    batch = [{"w": heavy(100, k)} for k in range(2)]
    batch[1]["w"][[3, 50]] = np.nan, np.inf
    expected = Exchange(gtrace.codec("qsgdinf"), 2, nonfinite=policy).step(0, batch)
    tensors = [{"w": torch.from_numpy(one["w"])} for one in batch]
    found = Exchange(gtrace.codec("qsgdinf"), 2, nonfinite=policy).step(0, tensors)
    assert found.bad == expected.bad
    assert found.tally.nonfinite == 2
    np.testing.assert_array_equal(found.gradients["w"].numpy(), expected.gradients["w"])


def train(spec, steps=4):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(30, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with gtrace.training.compress(optimizer, spec) as compression:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 30).bfloat16()).square().mean().backward()
            optimizer.step()
    return model, compression.tally


def test_a_training_loop_ends_at_the_same_weights(monkeypatch):
    expected, on_host = train("zipml:bits=3")
    used = []
    original = device.encode
    monkeypatch.setattr(device, "encode", lambda *given: used.append(given) or original(*given))
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
    found, here = train("zipml:bits=3")
    assert len(used) == 4 * 4
    assert here.bits == on_host.bits
    for a, b in zip(expected.parameters(), found.parameters(), strict=True):
        assert torch.equal(a, b)


NAMES = ("w", "bias", "v", "u")
SIZES = (3000, 40, 200, 70)
RULES = CodecTable.of("alq:bits=3,bucket_size=64", {"bias": "none"})
TENSORS = [(size, RULES.choose(name, size)) for name, size in zip(NAMES, SIZES, strict=True)]


def both_ranks(way, common, kept):
    """What both ranks hold after a step, and their tallies; rank 1 has no values to send for the last two tensors."""
    everyone, exchanges = [], []
    for rank in range(2):
        likes = [vectors.flat(kept(heavy(size, 5 * rank + k)), codec) for k, (size, codec) in enumerate(TENSORS)]
        values = [*likes[:2], NOT_FINITE, None] if rank == 1 else likes
        named = zip(NAMES, TENSORS, likes, strict=True)
        whole = [Piece(name, codec, size, vectors.place_of(like)) for name, (size, codec), like in named]
        everyone.append(rank_codecs(SimulatedRank(rank, 2), RULES, common=common))
        exchanges.append(way_of(way)(everyone[-1], whole, values, 0))
    return lockstep(exchanges)[0], [codecs.tally for codecs in everyone]


@pytest.mark.parametrize("common", [False, True])
@pytest.mark.parametrize("way", ["allgather", "two-shot"])
def test_ranks_average_tensors_as_they_average_arrays(way, common, on_cpu):
    expected, counted = both_ranks(way, common, lambda values: values)
    found, tallies = both_ranks(way, common, torch.from_numpy)
    for rank in range(2):
        for name, array, tensor in zip(NAMES, expected[rank], found[rank], strict=True):
            assert isinstance(array, np.ndarray)
            assert isinstance(tensor, np.ndarray if name == "bias" else torch.Tensor)
            np.testing.assert_array_equal(vectors.on_host(tensor), array)
        assert np.isnan(expected[rank][2]).all()
        assert np.isfinite(expected[rank][0]).all()
        for field in ("payload_bits", "shared_bits", "frame_bits", "down_bits", "zeros"):
            assert getattr(tallies[rank], field) == getattr(counted[rank], field)
        assert tallies[rank].worker_variance == pytest.approx(counted[rank].worker_variance)
    np.testing.assert_array_equal(expected[0][0], expected[1][0])


def test_a_scaled_gradient_is_read_and_written_where_it_lies(monkeypatch):
    parameter = torch.nn.Parameter(torch.zeros(4, 2))
    parameter.grad = torch.from_numpy(heavy(8).reshape(4, 2))
    expected = read_gradient(parameter, 3.0)
    assert isinstance(expected, np.ndarray)
    monkeypatch.setattr(device, "DEVICES", {"cpu"})
    found = read_gradient(parameter, 3.0)
    assert isinstance(found, torch.Tensor)
    np.testing.assert_array_equal(found.numpy(), expected)
    write_gradient(parameter, found + 1, 3.0)
    np.testing.assert_array_equal(parameter.grad.numpy(), (expected + 1) * np.float32(3))
