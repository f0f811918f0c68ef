"""The steps that stand for all, what a sweep is said to take, and its progress in a pipe."""

import pytest
from helpers_sweep import write_trace

from gtrace.sweep.quick import announce, representative_steps
from gtrace.sweep.run import expand
from gtrace.trace import open_trace


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


def test_what_takes_long_is_timed_first(tmp_path, monkeypatch):
    write_trace(tmp_path / "run.zarr", steps=range(40))
    codecs = expand("qsgd,ef:signsgd", {"bits": [2, 3]})
    with open_trace(tmp_path / "run.zarr") as trace:
        said = announce(trace, codecs, [0, 1, 2], globs=None, kind=None, jobs=1, every=30)
        assert said.endswith("steps, seconds; --all: 30 configurations on 40 steps, about 133 times as long")
        monkeypatch.setattr("gtrace.sweep.quick._WORTH_TIMING", 0)
        said = announce(trace, codecs, [0, 1, 2], globs=None, kind=None, jobs=1, every=10**6)
        assert said.startswith("measures 3 configurations on 3 of 40 steps, ")
        assert "; --all: 1000000 configurations on 40 steps, about " in said
        all_of_it = announce(trace, codecs, None, globs=None, kind=None, jobs=1, every=3)
    assert "--all" not in all_of_it
