"""``gtrace.sweep(...)`` is a function, and ``gtrace.sweep`` still a package; the steps that stand for all."""

import subprocess
import sys

import numpy as np
import pytest

import gtrace
from gtrace.errors import UsageError
from gtrace.sweep.quick import METHODS, representative_steps


@pytest.fixture
def trace():
    rng = np.random.default_rng(0)
    return gtrace.Trace.from_arrays({"w": {step: rng.standard_normal(200) for step in (0, 1, 2)}})


def specs(result):
    return sorted(set(result["codec"].tolist()))


def test_text_lists_and_codecs_over_ranges(trace):
    two = ["alq:bits=2", "alq:bits=3", "mcgq:bits=2", "mcgq:bits=3"]
    assert specs(gtrace.sweep(trace, "alq,mcgq", bits=range(2, 4))) == two
    mixed = ["qsgd:bits=3", gtrace.codec("qsgd:bits=5"), "qsgdinf"]
    assert specs(gtrace.sweep(trace, mixed, bits=4, draws=0)) == ["qsgd:bits=3", "qsgd:bits=5", "qsgdinf:bits=4"]
    assert specs(gtrace.sweep(trace, gtrace.codec("bf16"))) == ["bf16"]
    assert specs(gtrace.sweep(trace, "topk", ratio=[0.1, 0.2])) == ["topk:ratio=0.1", "topk:ratio=0.2"]


def test_without_codecs_it_measures_what_the_command_does(trace):
    result = gtrace.sweep(trace, steps=(0, 1))
    names = {spec.partition(":")[0] for spec in specs(result)}
    assert names == {spec.partition(":")[0] for spec in METHODS.split(",")}
    assert set(result["step"]) == {0, 1}


@pytest.mark.parametrize(
    ("codecs", "options", "message"),
    [
        ("alq", {"bitz": 3}, "did you mean bits"),
        ("alq", {"refitt": "each"}, "did you mean refit"),
        ("bf16", {"bits": 3}, "sweep: bits: bf16 has no bits to choose"),
        ("alq:bits=2,qsgdinf:bits=2", {"bits": 3}, "sweep: bits: alq:bits=2 has bits of its own"),
        ("alq,qsgd", {"ratio": 0.1}, "sweep: ratio: none of these codecs has ratio to choose"),
        ("alq", {"chunk": 2**30 + 1}, "chunk cannot be 1073741825 elements"),
        ("alg", {}, "alg"),
        ([], {}, "no codec given"),
    ],
)
def test_what_cannot_be_swept(trace, codecs, options, message):
    with pytest.raises(UsageError, match=message):
        gtrace.sweep(trace, codecs, **options)


@pytest.mark.parametrize(
    "first",
    ["import gtrace.sweep", "from gtrace.sweep import expand", "import gtrace.sweep.run", "from gtrace import sweep"],
)
def test_the_package_and_the_function_in_any_order(first):
    rest = "import gtrace, gtrace.sweep.store as s; from gtrace.sweep import SweepResult, run_sweep"
    check = "assert callable(gtrace.sweep) and s.SweepResult is SweepResult is gtrace.SweepResult"
    same = "import gtrace.sweep.run; assert gtrace.run_sweep is run_sweep is gtrace.sweep.run.run_sweep"
    subprocess.run([sys.executable, "-c", f"{first}\n{rest}\n{check}\n{same}"], check=True)


@pytest.mark.parametrize(
    ("steps", "most", "found"),
    [
        ([], 8, ()),
        ([3, 9], 8, (3, 9)),
        (range(100), 8, (0, 1, 2, 49, 73, 97, 98, 99)),
        (range(0, 1000, 10), 4, (0, 330, 660, 990)),
        ([*range(6), 50, *range(90, 96)], 7, (0, 1, 2, 50, 93, 94, 95)),
        ([0, 10, 20, 21, 22, 30, 40], 5, (0, 20, 21, 22, 40)),
        (range(5), 2, (0, 4)),
    ],
)
def test_steps_are_spread_over_training_in_bursts_of_three(steps, most, found):
    assert representative_steps(steps, most) == found
