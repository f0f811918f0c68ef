"""What the experiments on MQGrad make of their runs."""

import dataclasses
import math

import pytest

from gtrace.training.tasks.images import VARIABLE
from gtrace_experiments.reproduce import _mqgrad as mqgrad
from gtrace_experiments.reproduce import mqgrad_fig4
from gtrace_experiments.reproduce.experiment import Context


@pytest.fixture(scope="module")
def found():
    return mqgrad.measure(Context(quick=True))


def test_without_the_images_another_task_is_trained_and_named(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    task, data = mqgrad._task(Context())
    assert task.name == "digits-cnn"
    assert "Fashion-MNIST is not installed" in data


def test_both_experiments_share_the_runs(found):
    assert mqgrad.measure(Context(quick=True)) is found


def test_every_policy_has_a_run_on_the_clock_of_the_paper(found):
    assert {len(runs) for runs in (*found.runs.values(), found.plain)} == {1}
    assert found.clock.iteration(4) - found.clock.iteration(3) == pytest.approx(5.0)
    for name, runs in found.runs.items():
        seconds = float(runs[0].sim_seconds[0])
        bits = int(name.split()[1]) if name.startswith("fixed") else int(runs[0].codec_bits[0])
        # The range, the envelope and the padding of two tensors, and envelopes of the others.
        assert 0 <= seconds - found.clock.iteration(bits) < 0.5
    assert all(0 < share < 1 for share in found.codec_share.values())


def test_a_seed_that_does_not_arrive_makes_the_mean_infinite(found):
    high = max(float(run.loss.max()) for runs in found.runs.values() for run in runs)
    assert found.seconds("fixed 8 bits", high) < math.inf
    assert found.reached("fixed 8 bits", high) == "1 of 1"
    assert found.seconds("fixed 8 bits", 0.0) == math.inf
    assert found.reached("fixed 8 bits", 0.0) == "0 of 1"


@pytest.mark.parametrize(
    ("bits", "nodes", "ramp"),
    [
        ([2] * 5 + [3] * 5, [2] * 5 + [3] * 5, True),
        ([2] * 10, [2] * 10, False),
        ([2] * 4 + [3] * 6, [2] * 4 + [3] * 6, False),
        ([2] * 5 + [3] * 5, [3] * 5 + [2] * 5, False),
    ],
)
def test_a_ramp_rises_every_five_steps_only(bits, nodes, ramp):
    records = [{"step": k, "codec_bits": b, "node": n} for k, (b, n) in enumerate(zip(bits, nodes, strict=True))]
    assert mqgrad_fig4._is_ramp(records) == ramp


def test_a_run_is_earlier_if_it_takes_less_time_or_the_other_never_arrives(found, monkeypatch):
    monkeypatch.setattr(mqgrad, "seconds_to_loss", lambda seconds, _loss: seconds)
    never = math.nan
    times = {"a": (1.0, 2.0, 3.0, never, never), "b": (2.0, 2.0, never, 1.0, never)}
    made = dataclasses.replace(found, runs=times)
    assert made.earlier("a", "b", 0.5) == 2
    assert made.earlier("b", "a", 0.5) == 1
